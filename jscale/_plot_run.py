"""The log of a run as arrays, and its loss and its scale on axes."""

import collections
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ._tree import describe

Log = Iterable[Mapping[str, Any]] | Mapping[str, Any]
_POINTS, _MARKS, _MEANS = 4000, 400, 200  # as many as a picture shows


class Scale(NamedTuple):
    """One of the scales: the steps at which it is known."""

    steps: np.ndarray
    log2: np.ndarray  # by step and layer
    skipped: np.ndarray


class Run(NamedTuple):
    steps: np.ndarray  # at which the loss is known
    loss: np.ndarray
    scales: dict[str, Scale]
    skipped: np.ndarray  # the steps


def read(log: Log, loss: str = "loss") -> Run:
    """Takes a dict for each step, or columns, in which what a step did not log is masked."""
    if not isinstance(log, Mapping):
        rows = list(log)
        if bad := [row for row in rows if not isinstance(row, Mapping)]:
            raise TypeError(f"log must have a dict for each step, got {describe(bad[0])}.")
        keys = dict.fromkeys(key for row in rows for key in row)
        log = {key: [row.get(key, np.ma.masked) for row in rows] for key in keys}
    wanted = {"grad_scale", "grad_norm", "finite"}
    known = lambda key: key in ("step", loss) or str(key).partition("/")[0] in wanted
    columns = _stacks({key: _column(values) for key, values in log.items() if known(key)})
    n = max(map(len, columns.values()), default=0)
    if short := [key for key, column in columns.items() if len(column) != n]:
        raise ValueError(
            f"log has {n} rows in some columns, and {len(log[short[0]])} in {short[0]}."
        )
    steps = columns.get("step", np.arange(n, dtype=float)[:, None])[:, 0]
    # After a restart steps come again: the last ones count.
    later = np.append(np.fmin.accumulate(np.ma.filled(steps, np.nan)[::-1])[::-1][1:], np.inf)
    kept = np.ma.filled(steps < later, False)
    steps, columns = np.asarray(steps[kept]), {key: x[kept] for key, x in columns.items()}
    nothing = np.ma.masked_all((len(steps), 1))

    names = [key[11:] for key in columns if key.partition("/")[0] == "grad_scale"]
    flags, overflows = {}, {}
    for name in names:
        own = f"/{name}" if name else ""
        norm = columns.get("grad_norm" + own, nothing)
        flag = columns.get("finite" + own, columns.get("finite", nothing))
        overflows[name] = np.ma.filled(~np.isfinite(norm), False).any(axis=1)
        skipped = np.ma.filled(flag == 0, False).any(axis=1)
        flags[name] = overflows[name] if np.ma.getmaskarray(flag).all() else skipped
    # Of several, a step that no overflow explains was skipped for all.
    explained = np.any([*overflows.values(), np.zeros(len(steps), bool)], axis=0)
    scales = {}
    for name in names:
        value = np.ma.masked_invalid(columns[f"grad_scale/{name}" if name else "grad_scale"])
        there = ~np.ma.getmaskarray(np.ma.masked_less_equal(value, 0)).any(axis=1)
        blamed = flags[name] & (overflows[name] | ~explained | (len(names) == 1))
        scales[name] = Scale(steps[there], np.log2(value.data[there]), blamed[there])
    losses = columns.get(loss, nothing)[:, 0]
    there = ~np.ma.getmaskarray(losses)
    skipped = steps[np.any([*flags.values(), np.zeros(len(steps), bool)], axis=0)]
    return Run(steps[there], losses.data[there], scales, skipped)


def _column(values: Any) -> Any:
    """float64 by step and layer. None stands for what is not finite."""
    if hasattr(values, "dtype"):
        found = np.ma.asarray(values).astype(np.float64)
    else:
        values = jax.device_get(list(values))
        there = [x is not np.ma.masked for x in values]
        shape = next((np.shape(x) for x in values if x is not np.ma.masked and x is not None), ())
        numbers = [np.full(shape, np.nan) if x is None else x for x in values]
        numbers = [x if ok else np.full(shape, 0.0) for x, ok in zip(numbers, there, strict=True)]
        found = np.ma.array(np.asarray(numbers, np.float64))
        found[~np.array(there, bool)] = np.ma.masked
    return found.reshape((len(found), -1 if found.size else 1))


def _stacks(columns: dict[str, Any]) -> dict[str, Any]:
    """Many layers that were logged one by one, as `grad_scale/layers/0` and so on, put together."""
    parents = {key: key.rpartition("/")[0] for key in columns if key.rpartition("/")[2].isdigit()}
    many = {
        p for p, n in collections.Counter(parents.values()).items() if n > 4 and p not in columns
    }
    found: dict[str, list[Any]] = {}
    for key, column in columns.items():
        parent = parents.get(key)
        found.setdefault(parent if parent in many else key, []).append(column)
    return {key: np.ma.concatenate(parts, axis=1) for key, parts in found.items()}


def draw_loss(run: Run, ax: Any, key: str, outside: bool) -> None:
    x, y = run.steps, np.where(np.isfinite(run.loss), run.loss, np.nan)
    size, kept = max(1, len(y) // _MEANS), _thin(y)
    faint: dict[str, Any] = {"color": "0.7", "linewidth": 0.7} if size > 1 else {"color": "black"}
    ax.plot(x[kept], y[kept], linestyle="-", label="each step", **faint)
    if size > 1:
        # Of blocks: a running sum would carry one huge loss on.
        starts = np.arange(0, len(y), size)
        seen, total = (np.add.reduceat(z, starts) for z in (1.0 * ~np.isnan(y), np.nan_to_num(y)))
        mean = np.divide(total, seen, out=np.full(len(starts), np.nan), where=seen > 0)
        middle = x[np.minimum(starts + size // 2, len(y) - 1)]
        ax.plot(middle, mean, color="black", linestyle="-", label=f"mean of {size:,}")
    above = {"transform": ax.get_xaxis_transform()}
    if len(run.skipped):
        label, at = f"{len(run.skipped):,} skipped", run.skipped[_few(run.skipped)]
        ax.vlines(at, 0, 1, color="0.8", linewidth=0.6, zorder=0, label=label, **above)
    if len(lost := x[np.isnan(y)]):
        at, label = lost[_few(lost)], f"{len(lost):,} not finite"
        ax.plot(at, np.full(len(at), 0.97), "kx", markersize=5, label=label, **above)
    finite = y[~np.isnan(y)]
    if finite.size and finite.min() > 0 and finite.max() > 50 * finite.min():
        ax.set_yscale("log")
    _steps(ax)
    ax.set_ylabel(text(key))
    legend(ax, outside)


def draw_scale(run: Run, ax: Any, outside: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator
    from matplotlib.transforms import ScaledTranslation

    marks: dict[str, list[Any]] = {"grown": [], "skipped": []}
    for name, (x, scales, skipped) in run.scales.items():
        middle, low, high = np.median(scales, axis=1), scales.min(axis=1), scales.max(axis=1)
        kept = _thin(middle, np.append(True, middle[1:] != middle[:-1]))
        (line,) = ax.step(x[kept], middle[kept], where="post", label=text(name or "loss scale"))
        if scales.shape[1] > 1:
            kept = _thin(high - low)
            look = {"color": line.get_color(), "alpha": 0.2, "linewidth": 0, "step": "post"}
            label = text(f"{name}: lowest to highest")
            ax.fill_between(x[kept], low[kept], high[kept], label=label, **look)
        before = np.append(middle[:1], middle[:-1])
        grown = (middle > before) & (scales.shape[1] == 1)
        marks["grown"].append((x[grown], middle[grown]))
        # The scale may be logged as it was used, or as it is after the step.
        marks["skipped"].append((x[skipped], np.fmax(middle, before)[skipped]))
    for kind, found in marks.items():
        x, y = map(np.concatenate, zip(*found, strict=True)) if found else (np.zeros(0),) * 2
        clear = len(x) <= _MARKS // 10
        if not len(x) or (kind == "grown" and not clear):  # the line shows it
            continue
        kept, look = _few(x), {"color": "black", "linestyle": "", "markersize": 5 if clear else 3}
        if kind == "grown":
            look |= {"marker": "^", "markerfacecolor": "white", "label": kind, "markersize": 4}
        else:
            look |= {"marker": "v", "markeredgewidth": 0, "label": f"{len(run.skipped):,} skipped"}
        # Beside the line by points, whatever a doubling takes.
        points = -5 if kind == "grown" else 5
        beside = ScaledTranslation(0, points / 72, ax.get_figure().dpi_scale_trans)
        ax.plot(x[kept], y[kept], transform=ax.transData + beside, **look)
    _steps(ax)
    ax.set_ylabel("loss scale")
    ax.yaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=2))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"$2^{{{y:g}}}$"))
    low, high = ax.get_ylim()
    spare = max(0.0, 4 - (high - low)) / 2
    ax.set_ylim(low - spare - 0.02 * (high - low), high + spare + 0.06 * (high - low))
    legend(ax, outside)


def _thin(y: np.ndarray, wanted: np.ndarray | None = None) -> np.ndarray:
    """Which points to draw so that nothing is missing: of many, the ends and peaks of each bin."""
    at = np.arange(len(y))
    if wanted is not None and len(y):
        at = np.flatnonzero(np.append(wanted[:-1], True))
    if len(at) <= _POINTS:
        return at
    kept = []
    for part in np.array_split(at, _POINTS // 4):
        values = np.where(np.isfinite(y[part]), y[part], 0)
        kept += [part[0], part[values.argmin()], part[values.argmax()], part[-1]]
    return np.unique(kept)


def _few(x: np.ndarray) -> np.ndarray:
    """Which marks to draw: of many, one where they would lie on each other."""
    if len(x) <= _MARKS:
        return np.arange(len(x))
    place = np.floor((x - x.min()) / max(np.ptp(x), 1) * _MARKS)
    return np.unique(place, return_index=True)[1]


def _steps(ax: Any) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def legend(ax: Any, outside: bool, top: float = 1.0) -> None:
    """Above the axes, where it hides nothing; but inside those of others, who may want a title."""
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) < 2:
        return
    look: dict[str, Any] = {"loc": "best", "bbox_to_anchor": (0, 0, 1, top), "frameon": True}
    look |= {"edgecolor": "white", "ncols": 1 + (len(labels) > 4)}
    if outside:
        look = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "ncols": 4}
    ax.legend(handles, labels, **look)


def text(name: str) -> str:
    """A name from a log as a label: no mathematics, and not hidden as one with a leading _ is."""
    shown = "".join(c if c.isprintable() else "?" for c in name)
    shown = shown if len(shown) <= 40 else shown[:39] + "…"
    return (" " + shown if shown.startswith("_") else shown).replace("$", r"\$")
