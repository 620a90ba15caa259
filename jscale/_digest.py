"""What a report says of a run: kept while its log is read, and told in short."""

import array
import logging
import math
import statistics
from typing import Any

import numpy as np

from ._log_files import STEP_KEYS, Broken, number
from ._monitor import Monitor
from ._plot_run import Run

_KEPT = {"grad_scale", "grad_norm", "finite", "loss_finite", "skipped_steps"}
_KEPT |= {"underflow", "subnormal", "headroom", "slack"}
_KEYS, _COLUMNS, _BURSTS, _LISTED = 10_000, 1024, 200, 5
# Rows that the monitor reads, in some 0.1 ms each, before it is shown a part of them.
_QUIET, _LOUD = 5_000, 50_000


class Digest:
    """What is kept of a log, in memory that grows by some 100 bytes a row."""

    def __init__(self, loss: str, prefix: str):
        self.loss, self.prefix = loss, prefix
        self.columns: dict[str, tuple[array.array, array.array, int]] = {}
        self.steps = array.array("d")
        self.monitor = Monitor(loss=loss, logger=logging.Logger("report", logging.CRITICAL + 1))
        self.wanted: dict[str, bool] = {}
        self.broken: list[str] = []
        self.restarts: list[tuple[int, int]] = []
        self.last: dict[str, Any] = {}
        self.count = self.breaks = self.backs = self.unnumbered = self.shown = 0
        self.quiet = self.loud = self.refused = 0
        self.after = False

    def add(self, row: Any) -> None:
        if isinstance(row, Broken):
            self.breaks += 1
            self.broken += [str(row)] if len(self.broken) < _LISTED else []
            return
        row = {k.removeprefix(self.prefix): x for k, x in row.items()} if self.prefix else row
        step = next((number(row[key]) for key in STEP_KEYS if key in row), None)
        found = {}
        for key, x in row.items():
            if key not in self.wanted and len(self.wanted) < _KEYS:
                own = key == self.loss or key.partition("/")[0] in _KEPT
                room = sum(self.wanted.values()) < _COLUMNS or key == self.loss
                self.wanted[key] = own and room
                self.refused += own and not room
            if self.wanted.get(key) and (value := number(x)) is not None:
                found[key] = value
        if not found:
            return
        before = int(self.steps[-1]) if self.steps else -1
        if not isinstance(step, float) or not abs(step) < 2**53:
            self.unnumbered, step = self.unnumbered + 1, before + 1
        step = int(step)
        if self.steps and step <= before:
            self.backs += 1
            self.restarts += [(before, step)] if len(self.restarts) < _LISTED else []
        for key, value in found.items():
            self.store(key, value)
        self.steps.append(step)
        self.count += 1
        self.tell(step, found)
        self.last = found if found.keys() >= self.last.keys() else {**self.last, **found}

    def store(self, key: str, value: Any) -> None:
        width = 3 if isinstance(value, list) else 1
        if key not in self.columns:
            self.columns[key] = array.array("q"), array.array("d"), width
        places, values, usual = self.columns[key]
        if width == usual:
            places.append(self.count)
            if width == 1:
                values.append(value)
            else:  # of a stack what is drawn
                values.extend((min(value), statistics.median(value), max(value)))

    def tell(self, step: int, row: dict[str, Any]) -> None:
        """Shows the monitor the row; of a long log fewer and fewer of those where nothing is."""
        before = self.last.get("skipped_steps")
        loud = row.get("skipped_steps", before) != before
        for key, x in row.items():
            # The sum is finite if all are.
            loud |= not math.isfinite(sum(x) if isinstance(x, list) else x)
            loud |= x == 0 and key.startswith("finite")
        if loud:
            self.loud += 1
            # It counts what happens in a row or within some steps, so these are shown, up to what
            # takes some 10 seconds.
            show = self.after = self.loud <= _LOUD or self.loud % (self.loud // _QUIET) == 0
        elif self.after:  # the end of what happened
            show, self.after = True, False
        else:
            self.quiet += 1
            show = self.quiet % (1 + self.quiet // _QUIET) == 0
        if show:
            self.shown += 1
            if self.loud > _LOUD:  # or it would take those not shown for a burst
                row = {key: x for key, x in row.items() if key != "skipped_steps"}
            self.monitor.update(step, row)

    def table(self) -> dict[str, Any]:
        """The columns, masked where a row did not have them."""
        found = {"step": np.array(self.steps)}
        for key, (places, values, width) in self.columns.items():
            column = np.ma.masked_all((self.count, width))
            column[np.array(places)] = np.array(values).reshape(-1, width)
            found[key] = column
        return found


def facts(digest: Digest, run: Run) -> list[tuple[str, str]]:
    """What there is to say of the run in short, and of the log where it is not as expected."""
    if not digest.count:
        return [("steps", "none")]
    steps = np.unique(np.array(digest.steps, np.int64))
    first, last = int(steps[0]), int(steps[-1])
    found = [("steps", f"{len(steps):,}, from {first:,} to {last:,}")]
    total = digest.last.get("skipped_steps")
    skipped = f"{len(run.skipped):,} ({len(run.skipped) / len(steps):.2%})"
    counted = isinstance(total, float) and math.isfinite(total) and total != len(run.skipped)
    found.append(("skipped", skipped + (f"; {total:,.0f} by its own count" if counted else "")))
    seen = run.loss[np.isfinite(run.loss)]
    if len(run.loss):
        lost = f"; {len(run.loss) - len(seen):,} not finite" * (len(seen) < len(run.loss))
        went = f"from {seen[0]:.4g} to {seen[-1]:.4g}" if len(seen) else "never finite"
        found.append((digest.loss, went + lost))
    for name, (_, log2, _) in run.scales.items():
        if len(log2):
            low, high, now = log2.min(), log2.max(), np.median(log2[-1])
            title = f"loss scale {name}".strip()
            found.append((title, f"2^{now:.4g}; it was from 2^{low:.4g} to 2^{high:.4g}"))
    for key, x in digest.last.items():
        base = key.partition("/")[0]
        if base in ("underflow", "subnormal", "headroom") and isinstance(x, float):
            found.append((key, f"{x:.4g} doublings" if base == "headroom" else f"{x:.2%}"))
    gaps, usual = np.diff(steps), np.median(np.diff(steps)) if len(steps) > 1 else 1
    wide = np.flatnonzero(gaps > usual)
    if usual > 1:
        found.append(("logged", f"every {usual:.0f} steps"))
    listed = lambda n, found: (f"{n:,}: " if n > 1 else "") + ", ".join(found) + "…" * (n > _LISTED)
    if len(wide):
        named = [f"{steps[i]:,} to {steps[i + 1]:,}" for i in wide[:_LISTED]]
        found.append(("gaps", listed(len(wide), named)))
    if digest.backs:
        named = [f"from {a:,} to {b:,}" for a, b in digest.restarts]
        found.append(("went back", listed(digest.backs, named) + "; what came last counts"))
    if digest.unnumbered:
        found.append(("no step", f"{digest.unnumbered:,} rows, numbered after those before"))
    if digest.shown < digest.count:
        found.append(("advice", f"from {digest.shown:,} rows: those where something happens"))
    return found


def problems(digest: Digest, run: Run) -> list[str]:
    found = []
    if digest.breaks:
        more = "…" * (digest.breaks > _LISTED)
        found.append(f"Not readable: {', '.join(digest.broken)}{more} ({digest.breaks:,} in all).")
    if digest.refused:
        found.append(
            f"{digest.refused:,} of the columns beyond {_COLUMNS:,} were not read: log layers as "
            "lists, or fewer of their statistics."
        )
    others = [key for key, own in digest.wanted.items() if not own and key not in STEP_KEYS]
    keys = f"; other keys are {', '.join(others)[:500]}" if others else ""
    if not run.scales:
        found.append(f"No grad_scale is logged{keys}: --prefix train/ reads train/grad_scale.")
    if not len(run.loss):
        found.append(f"No {digest.loss} is logged{keys}: --loss names another key.")
    return found


def bursts(run: Run) -> list[tuple[str, ...]]:
    """The skipped steps, those in a row in one line."""
    if not len(run.skipped):
        return []
    every = min(
        (np.diff(s.steps).min() for s in run.scales.values() if len(s.steps) > 1), default=1
    )
    parts = np.split(run.skipped, np.flatnonzero(np.diff(run.skipped) > every) + 1)
    if len(parts) > _BURSTS:
        parts = [*parts[: _BURSTS // 2], np.zeros(0), *parts[-_BURSTS // 2 :]]
    found: list[tuple[str, ...]] = []
    for part in parts:
        if not len(part):
            found.append(("…",) * 4)
            continue
        first, last = part[0], part[-1]
        moves = []
        for name, (steps, log2, skipped) in run.scales.items():
            at, end = np.searchsorted(steps, [first, last])
            if skipped[at : end + 1].any():
                middle = np.median(log2[max(at - 1, 0) : end + 2], axis=1)
                # A log has the scale of the step, or the one after it.
                to = middle[-2:].min() if len(middle) > 1 else middle[0]
                moves.append(f"{name}: 2^{middle[0]:.4g} to 2^{to:.4g}".removeprefix(": "))
        where = np.searchsorted(run.steps, first)
        same = where < len(run.steps) and run.steps[where] == first
        name = f"{first:,.0f}" if first == last else f"{first:,.0f} to {last:,.0f}"
        loss = f"{run.loss[where]:.4g}" if same else ""
        found.append((name, f"{len(part):,}", "; ".join(moves), loss))
    return found
