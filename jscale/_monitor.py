"""Reading the metrics of a run as they come: trends, and advice in words."""

import collections
import logging
import math
import statistics
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ._advice import KINDS, Advice, Thresholds, words
from ._arguments import as_count
from ._tree import describe, listing

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_STATS = "underflow subnormal headroom slack".split()
_READ = {"grad_scale", "grad_norm", "finite", "loss_finite", "skipped_steps", *_STATS}
_ENOUGH = 10  # overflows, before a share of them means something
_MOVES = 256
_LOSSES = 20


class _Scale:
    """The trends of one scale, of bounded size."""

    def __init__(self, settled: bool, step: int):
        self.settled, self.since = settled, step
        self.moves: collections.deque = collections.deque(maxlen=_MOVES)  # step, log2 from there on
        self.overflows: collections.deque = collections.deque()  # step, how many
        self.low = self.high = math.nan
        self.clean = self.row = self.stuck = self.zero = self.lost_row = 0
        self.room, self.slack, self.lost = math.inf, math.nan, math.nan

    def forget(self, step: int) -> None:
        """The run was restarted from before `step`."""
        for trend in (self.moves, self.overflows):
            while trend and trend[-1][0] >= step:
                trend.pop()
        self.since = min(self.since, step)
        self.clean = self.row = self.stuck = self.zero = self.lost_row = 0

    def before(self, step: int, window: int) -> tuple[int, float, float]:
        """The last step with the highest scale of the window, its log2, and the lowest so far."""
        at, high, low, until = step, -math.inf, math.inf, step
        for begin, value in reversed(self.moves):
            if value > high:
                at, high = until, value
            low = min(low, value) if begin != step else low
            until = begin - 1
            if begin <= step - window:
                break
        return at, high, low

    def count(self, step: int, window: int) -> int:
        return sum(n for at, n in self.overflows if at > step - window)


class Monitor:
    """Reads the metrics of a run, on the host, and says in words what they mean.

        monitor = jscale.Monitor()
        for step, batch in enumerate(batches):
            params, opt_state, metrics = train_step(params, opt_state, batch)
            monitor.update(step, metrics)       # logs advice, by `logging`
        print(monitor.report())

    It reads what `metrics` returns, the loss under its name, and what `Stats.metrics` returns where
    that is logged; other keys and missing ones do not matter. With several scales each is judged by
    itself. Numbers of a log will do, with None for what is not finite. When steps go back, as after
    a restart, it forgets those that come again.

    Args:
      thresholds: when to speak.
      every: how many updates are read at once. In between arrays are kept as they are, so that the
        host waits for the device once in `every` steps.
      loss: the key of the loss.
      raise_on: kinds of advice, or severities, that raise, such as `("error", "falling")`.
      logger: where advice goes.

    Raises:
      TypeError, ValueError: an argument is not what it should be.

    >>> import jscale
    >>> monitor = jscale.Monitor(every=1)
    >>> [advice] = monitor.update(7, {"loss": float("nan"), "grad_scale": 1024.0})
    >>> advice.kind, advice.severity
    ('loss', 'error')
    """

    def __init__(
        self,
        thresholds: Thresholds = Thresholds(),  # noqa: B008
        *,
        every: int = 20,
        loss: str = "loss",
        raise_on: Collection[str] = (),
        logger: logging.Logger | None = None,
    ):
        if not isinstance(thresholds, Thresholds):
            raise TypeError(f"thresholds must be a Thresholds, got {describe(thresholds)}.")
        if isinstance(raise_on, str) or (unknown := set(raise_on) - {*KINDS, *_LEVELS}):
            bad = raise_on if isinstance(raise_on, str) else sorted(unknown)[0]
            raise ValueError(
                f"raise_on must be a list of severities ({', '.join(_LEVELS)}) or of kinds "
                f"({', '.join(KINDS)}), got {bad!r}."
            )
        self._limits, self._every, self._loss = thresholds, as_count("every", every), loss
        self._raise_on, self._logger = set(raise_on), logger or logging.getLogger("jscale")
        self._pending: list[tuple[Any, dict[str, Any]]] = []
        self._scales: dict[str, _Scale] = {}
        self._last: int | None = None
        self._skipped: float | None = None
        self._first: float | None = None  # where the loss began
        self._losses: collections.deque = collections.deque(maxlen=_MOVES)
        self._culprits: collections.deque = collections.deque(maxlen=2 * _ENOUGH)
        self._said: dict[tuple[str, str], Advice] = {}
        self._seen = self._skips = 0
        self.advice: collections.deque[Advice] = collections.deque(maxlen=_MOVES)

    def update(self, step: Any, metrics: Mapping[str, Any]) -> list[Advice]:
        """Takes the metrics of a step; returns what is new, if they were read.

        Raises:
          FloatingPointError: advice of a kind or severity in `raise_on`.
          TypeError: metrics are no mapping, or tracers.
        """
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics must be a dict, got {describe(metrics)}.")
        known = {k: x for k, x in metrics.items() if k == self._loss or _base(k) in _READ}
        if any(isinstance(x, jax.core.Tracer) for x in (step, *known.values())):
            raise TypeError("Monitor.update reads numbers, so call it outside jit and scan.")
        if not isinstance(step, jax.Array):
            try:
                step = int(step)
            except (TypeError, ValueError):
                raise TypeError(f"step must be a whole number, got {describe(step)}.") from None
        self._pending.append((step, known))
        return self.flush() if len(self._pending) >= self._every else []

    def flush(self) -> list[Advice]:
        """Reads the updates that wait, as at the end of a run."""
        pending, self._pending = jax.device_get(self._pending), []
        new = [advice for step, row in pending for advice in self._read(int(step), row)]
        for advice in new:
            self._logger.log(_LEVELS[advice.severity], "%s", advice)
        self.advice.extend(new)
        for advice in new:
            if self._raise_on & {advice.kind, advice.severity}:
                raise FloatingPointError(str(advice))
        return new

    def report(self) -> str:
        """What was seen and said so far, as text."""
        self.flush()
        if self._last is None:
            return "no metrics were seen"
        if not self._scales and not self._losses and not self.advice:
            return (
                f"{self._seen} steps seen, but none of their metrics are known: Monitor reads what "
                f"jscale.metrics returns, grad_scale and so on, and the loss as {self._loss!r}"
            )
        lines = [f"{self._seen} steps seen, up to {self._last}; {self._skips} skipped"]
        if self._losses:
            lines.append(f"the loss is {self._losses[-1][1]:.4g}")
        for name, scale in self._scales.items():
            now = scale.moves[-1][1] if scale.moves else math.nan
            seen = f"it was from 2^{scale.low:.4g} to 2^{scale.high:.4g}"
            of = f" of {name}" if name else ""
            lines.append(f"the loss scale{of} is 2^{now:.4g}; {seen}")
        lines += [f"{a.severity}, {a.kind}, {a}" for a in self.advice] or ["no advice"]
        return "\n".join(lines)

    def _read(self, step: int, row: dict[str, Any]) -> list[Advice]:
        if self._last is not None and step <= self._last:
            self._restart(step)
        gap, self._last = (1 if self._last is None else step - self._last), step
        self._seen += 1
        found: dict[str, list[tuple[str, dict[str, float]]]] = {}
        loss, flag = _numbers(row, self._loss), _numbers(row, "loss_finite")
        lost_loss = loss is not None and not np.isfinite(loss).all()
        lost_loss |= flag is not None and not (flag > 0).all()
        if lost_loss:
            found["loss"] = [("", {"loss": math.nan if loss is None else float(np.mean(loss))})]
        elif loss is not None and loss.size:
            self._losses.append((step, float(np.mean(loss))))
            if rising := self._rising():
                found["rising"] = [("", rising)]
        parts = _parts(row)
        hidden = self._hidden_skips(row, parts)
        self._skips += hidden + any(part["skipped"] for part in parts.values())
        moved = {}
        for name, part in parts.items():
            settled = self._seen == 1 and step > self._limits.window
            scale = self._scales.setdefault(name, _Scale(settled, step))
            if not (np.isfinite(part["scale"]) and part["scale"] > 0):
                found.setdefault("invalid", []).append((name, {"scale": part["scale"]}))
                continue
            # What a lost loss does to the scale says nothing about the scale.
            part["overflow"] &= not lost_loss
            unseen = hidden if len(parts) == 1 else 0  # of several, nobody knows whose they were
            moved[name] = self._follow(scale, step, gap, part, unseen)
        # If one of several has moved, the others may overflow because of it.
        held = not any(moved[name] for name in moved if parts[name]["overflow"])
        for name in moved:
            scale, part = self._scales[name], parts[name]
            scale.stuck = scale.stuck + 1 if part["overflow"] and held else 0
            for kind, evidence in self._judge(scale, step, part, moved[name]):
                found.setdefault(kind, []).append((name, evidence))
        if blamed := self._blame(parts):
            found["group"] = [blamed]
        return [a for kind in KINDS if (a := self._say(kind, step, found.get(kind, [])))]

    def _restart(self, step: int) -> None:
        for scale in self._scales.values():
            scale.forget(step)
        while self._losses and self._losses[-1][0] >= step:
            self._losses.pop()
        self._said = {key: advice for key, advice in self._said.items() if advice.step < step}
        self._skipped, self._last = None, step - 1

    def _hidden_skips(self, row: dict[str, Any], parts: dict[str, dict[str, Any]]) -> int:
        """Skips since the last row, in steps that were not shown."""
        total = _numbers(row, "skipped_steps")
        if total is None or total.ndim:
            return 0
        before, self._skipped = self._skipped, float(total)
        shown = any(part["skipped"] for part in parts.values())
        return 0 if before is None else max(int(total - before) - shown, 0)

    def _follow(self, scale: _Scale, step: int, gap: int, part: dict[str, Any], hidden: int) -> int:
        """Takes a step into the trends; returns whether the scale fell (-1), rose or stayed."""
        limits, now = self._limits, math.log2(part["scale"])
        scale.low, scale.high = np.fmin(scale.low, now), np.fmax(scale.high, now)
        before = scale.moves[-1][1] if scale.moves else now
        if now != before or not scale.moves:
            scale.moves.append((step, now))
            scale.room = math.inf
        overflows = hidden + part["overflow"]
        scale.row = scale.row + overflows if part["overflow"] else 0
        scale.clean = 0 if overflows else scale.clean + gap
        scale.zero = scale.zero + 1 if part["norm"] == 0 else 0
        if overflows:
            scale.overflows.append((step, overflows))
            while scale.overflows[0][0] <= step - limits.window:
                scale.overflows.popleft()
        long = step - scale.since >= 10 * limits.settle
        if not scale.settled and (long or scale.clean >= limits.settle):
            scale.settled, scale.since = True, step
            scale.overflows.clear()
            last = scale.moves[-1]
            scale.moves.clear()
            scale.moves.append(last)
        scale.room = min(scale.room, part["headroom"])
        if np.isfinite(part["lost"]):
            scale.lost, scale.slack = part["lost"], part["slack"]
            scale.lost_row = scale.lost_row + 1 if scale.lost > limits.lost else 0
        return int(np.sign(now - before))

    def _rising(self) -> dict[str, float] | None:
        """Compares the latest losses with the first."""
        if len(self._losses) < _LOSSES or self._first == math.inf:
            return None
        now = statistics.fmean([loss for _, loss in list(self._losses)[-_LOSSES:]])
        if self._first is None:
            # A rate that is far too high has raised the loss before there is a mean.
            first = min(now, 1.5 * self._losses[0][1])
            self._first = first if first > 0 else math.inf
        rise = now > self._limits.rise * self._first
        return {"first": self._first, "now": now} if rise else None

    def _judge(
        self, scale: _Scale, step: int, part: dict[str, Any], moved: int
    ) -> Iterator[tuple[str, dict[str, float]]]:
        limits, now = self._limits, math.log2(part["scale"])
        if scale.stuck >= limits.stuck:
            yield "stuck", {"scale": part["scale"], "overflows": scale.stuck}
            return
        if scale.row >= limits.row:
            yield "row", {"scale": part["scale"], "overflows": scale.row}
        if not part["off"] and scale.zero >= limits.zero:
            yield "zero", {"scale": part["scale"], "steps": scale.zero}
        if not part["off"] and scale.lost_row >= 3:
            yield "underflow", {"scale": now, "share": scale.lost, "headroom": part["headroom"]}
        quiet = step - max(scale.moves[-1][0], scale.overflows[-1][0] if scale.overflows else 0)
        wanted = not part["off"] and not scale.lost <= limits.lost / 10
        if quiet >= limits.flat and limits.unused <= scale.room < math.inf and wanted:
            yield "flat", {"scale": now, "steps": quiet, "headroom": scale.room}
        if not scale.settled:
            return
        if moved < 0:
            at, high, low = scale.before(step, limits.window)
            overflows = sum(n for when, n in scale.overflows if when >= at)
            # Rules that go up and down by much come back to where they were.
            enough = overflows >= limits.fall or not part["known"]
            if high - now >= limits.fall and now < low and enough:
                yield "falling", {"from": high, "to": now, "steps": step - at, "since": at}
        if not part["overflow"]:
            return
        if (burst := scale.count(step, 10)) >= limits.burst:
            yield "burst", {"scale": now, "overflows": burst}
        count, steps = scale.count(step, limits.window), min(limits.window, step - scale.since)
        rate = count / max(steps, 1)
        if count >= _ENOUGH and steps >= limits.window // 10:
            evidence = {"scale": now, "rate": rate, "overflows": count, "steps": steps}
            if rate >= limits.skip_rate:
                yield "skips", evidence
            if rate >= limits.skip_rate / 2 and scale.slack >= limits.slack:
                yield "high", evidence | {"slack": scale.slack}

    def _blame(self, parts: dict[str, dict[str, Any]]) -> tuple[str, dict[str, float]] | None:
        """The scale that most of the latest overflows began at."""
        names = [name for name, part in parts.items() if part["overflow"]]
        if len(parts) == 1 or not names:
            return None
        # The backward pass comes to the last layer of a stack first, and takes inf down with it.
        # Of several groups nothing says which comes first.
        stacks = {parts[name]["stack"] for name in names}
        one = len(names) == 1 or (len(stacks) == 1 and stacks != {None})
        self._culprits.append(names[-1] if one else None)
        name, count = collections.Counter(self._culprits).most_common(1)[0]
        most = count >= self._limits.blame * len(self._culprits) and count >= _ENOUGH
        return (name, {"overflows": len(self._culprits), "own": count}) if name and most else None

    def _say(
        self, kind: str, step: int, found: list[tuple[str, dict[str, float]]]
    ) -> Advice | None:
        last = lambda name: self._said.get((kind, name))
        new = [x for x in found if not (old := last(x[0])) or step - old.step > self._limits.repeat]
        if not new:
            return None
        first, *others = [name for name, _ in new]
        severity, text = words(kind, f" of {first}" if first else "", new[0][1], self._losses)
        text += f" The same goes for {listing(others)}." if others else ""
        advice = Advice(kind, step, severity, text, new[0][1])
        also = ["burst"] if kind == "falling" else []  # the same story
        self._said |= {(k, name): advice for name, _ in new for k in (kind, *also)}
        return advice


def _base(key: str) -> str:
    return key.partition("/")[0] if isinstance(key, str) else ""


def _numbers(row: Mapping[str, Any], *keys: str) -> np.ndarray | None:
    """The first that is there and can be read. None in JSON stands for what is not finite."""
    for key in keys:
        if key in row:
            try:
                return np.asarray(row[key], np.float64)
            except (TypeError, ValueError):
                pass
    return None


def _parts(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By the name of each scale, of a layer or vmapped copy too, what a row says of it."""
    parts = {}
    for key in row:
        base, slash, group = key.partition("/")
        scale = _numbers(row, key) if base == "grad_scale" else None
        if scale is None:
            continue

        def get(name: str, default: float) -> np.ndarray:
            x = _numbers(row, name + slash + group, name)
            if x is None or x.shape != scale.shape[: x.ndim]:
                return np.full(scale.shape, default)
            return np.broadcast_to(x.reshape(x.shape + (1,) * (scale.ndim - x.ndim)), scale.shape)

        norm, finite, headroom = (get(k, np.nan) for k in ("grad_norm", "finite", "headroom"))
        seen = _numbers(row, "grad_norm" + slash + group, "grad_norm") is not None
        flagged = _numbers(row, "finite" + slash + group, "finite") is not None
        with np.errstate(all="ignore"):
            bound = np.nan_to_num(16 - np.log2(norm) - np.log2(scale), nan=np.inf, neginf=np.inf)
        lost, slack = get("underflow", np.nan) + get("subnormal", 0), get("slack", np.nan)
        skipped = ~(finite > 0) & flagged
        for i in np.ndindex(scale.shape):
            name = "/".join(map(str, (group, *i) if group else i))
            name = f"copy {name}" if i and not group else name
            parts[name] = {
                "stack": group if group and i else None,
                "scale": float(scale[i]),
                "norm": float(norm[i]),
                "skipped": bool(skipped[i]),
                "overflow": bool(~np.isfinite(norm[i]) if seen else skipped[i]),
                # No element is larger than the norm.
                "headroom": float(bound[i] if np.isnan(headroom[i]) else headroom[i]),
                "lost": float(lost[i]),
                "slack": float(slack[i]),
                "known": seen or flagged,
                "off": not seen and scale[i] == 1,
            }
    return parts
