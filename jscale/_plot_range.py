"""Histograms of exponents that a scale has moved, on axes, with the ranges of number formats."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._groups import shown
from ._plot_run import legend, text
from ._stats import LIMIT, NORMAL, ZERO, Stats
from ._tree import describe

COLORS = "black", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "0.5"
DASHES = "-", (0, (5, 1.5)), (0, (6, 1.5, 1, 1.5)), (0, (1, 1)), (0, (3, 1, 1, 1, 1, 1)), "-"
_EDGES = np.arange(-260, 261)


class Row(NamedTuple):
    """Counts of a group, by layer, and log2 of the scale of each."""

    name: str
    zeros: np.ndarray
    counts: np.ndarray
    nonfinite: np.ndarray
    bits: np.ndarray


def as_rows(found: Any, loss_scale: Any) -> list[Row]:
    given = found if isinstance(found, Mapping) else {"": found}
    if bad := [x for x in given.values() if not isinstance(x, Stats)]:
        raise TypeError(f"found must be what stats returns, got {describe(bad[0])}.")
    several = isinstance(loss_scale, Mapping)
    if several and (missing := [key for key in given if key not in loss_scale]):
        raise ValueError(
            f"loss_scale must have a scale for each group, but has none for {missing}."
        )
    result = []
    for name, counted in given.items():
        own = np.float64(jax.device_get(loss_scale[name] if several else loss_scale))
        if not (np.isfinite(own) & (own > 0)).all():
            raise ValueError(f"loss_scale must be positive and finite, got {own}.")
        zeros, counts, lost = (np.float64(x) for x in jax.device_get(counted))
        bits = np.broadcast_to(np.log2(own), zeros.shape).reshape(-1)
        label = shown(name, given) if len(given) > 1 else name
        row = Row(label, zeros.reshape(-1), counts.reshape(-1, 255), lost.reshape(-1), bits)
        result.append(row)
    return result


def _below(row: Row, bits: np.ndarray, at: Any) -> np.ndarray:
    """How many of each layer are below 2^at once moved by `bits`, spread evenly in a binade."""
    known = np.arange(-127, 129)
    counts = np.concatenate([np.zeros((len(bits), 1)), np.cumsum(row.counts, axis=1)], axis=1)
    found = [np.interp(at - b, known, c) for b, c in zip(bits, counts, strict=True)]
    return np.array(found).reshape(len(bits), *np.shape(at))


def bounds(name: str) -> tuple[float, float, float]:
    """log2 of where a format ceases to round to zero, is normal, and ends."""
    found = jnp.finfo(name)
    largest = float(found.max)
    half = 2.0 ** (math.floor(math.log2(largest)) - found.nmant - 1)
    limit = math.log2(largest + half) if largest < 2.0**127 else 128.0
    least = math.log2(float(found.smallest_normal))
    return least - found.nmant - 1, least, limit


def draw_exponents(parts: list[Row], axes: Any, formats: Sequence[str], outside: bool) -> None:
    total, scaled = sum(part.counts.sum() for part in parts), any(p.bits.any() for p in parts)
    tops, highest = [], np.zeros(len(_EDGES) - 1)
    for i, part in enumerate(parts):
        of = max(part.counts.sum(), 1.0)
        look: dict[str, Any] = {"linestyle": DASHES[i % len(DASHES)]}
        if scaled:
            shares = np.diff(_below(part, 0 * part.bits, _EDGES).sum(axis=0)) / of
            label = None if i else "unscaled"
            axes.stairs(shares, _EDGES, color="0.5", linewidth=0.8, label=label, **look)
            tops.append(_EDGES[np.argmax(shares)] + 0.5)
            highest = np.fmax(highest, shares)
        shares = np.diff(_below(part, part.bits, _EDGES).sum(axis=0)) / of
        highest = np.fmax(highest, shares)
        tops.append(_EDGES[np.argmax(shares)] + 0.5)
        one = np.ptp(part.bits) == 0
        label = f"× $2^{{{part.bits[0]:.4g}}}$" if one else "× the scales of layers"
        label = f"{text(part.name)} {label if scaled else ''}".strip() or "gradients"
        if len(parts) == 1:
            axes.stairs(shares, _EDGES, fill=True, color="0.88", zorder=1)
        axes.stairs(shares, _EDGES, color=COLORS[i % len(COLORS)], label=label, **look)
    peak, seen = highest.max() or 1.0, _EDGES[:-1][highest > 1e-4]
    if len(tops) == 2 and scaled and abs(tops[1] - tops[0]) >= 4:
        arrow = {"arrowstyle": "->", "linewidth": 0.8}
        way = np.sign(tops[1] - tops[0])
        ends = [(tops[1] - way, peak / 2), (tops[0] + way, peak / 2)]
        axes.annotate("", *ends, arrowprops=arrow, zorder=3)
    room = 0.09 * (len(formats) + 1)
    height = peak / (0.93 - room)
    axes.set(xlim=(min([ZERO - 3, *seen - 2]), max([LIMIT + 3, *seen + 3])), ylim=(0, height))
    axes.set(xlabel="log2 of magnitude" + ", scaled" * scaled)
    axes.set_ylabel("share of nonzero gradients", y=(0.95 - room) / 2)
    axes.set_yticks([y for y in axes.get_yticks() if y <= 1.05 * peak])
    places = [height * (0.96 - 0.09 * (i + 1)) for i in range(len(formats))]
    axes.set_yticks(places, [_short(name) for name in formats], minor=True)
    axes.tick_params("y", which="minor", length=0)

    def beside(y: float, words: Sequence[str]) -> None:
        for i, word in enumerate(words):
            at: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "va": "center"}
            where = (34 + 36 * i, 0)
            axes.annotate(word, (1, y), where, textcoords="offset points", ha="right", **at)

    beside(places[0] + 0.09 * height if places else 0, ["zero", "subn.", "inf"])
    for y, name in zip(places, formats, strict=True):
        low, normal, high = bounds(name)
        bar: dict[str, Any] = {"edgecolor": "0.3", "linewidth": 0.6}
        across = (y - 0.028 * height, 0.056 * height)
        axes.broken_barh([(low, normal - low)], across, facecolor="1", hatch="/////", **bar)
        axes.broken_barh([(normal, high - normal)], across, facecolor="0.75", **bar)
        under = [sum(_below(part, part.bits, b).sum() for part in parts) for b in bounds(name)]
        counts = np.diff([0, *under, total])
        beside(y, [_percent(n / max(total, 1)) for n in (counts[0], counts[1], counts[3])])
        if y == places[0]:
            look = {"color": "0.4", "linewidth": 0.7, "linestyle": (0, (1, 2)), "zorder": 0}
            axes.vlines([low, normal, high], 0, y, **look)
    legend(axes, outside, top=0.98 - room)


def draw_layers(parts: list[Row], axes: Any) -> None:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter

    if not sum(len(part.zeros) for part in parts):
        raise ValueError("found has no layer to draw.")
    of = [np.maximum(p.zeros + p.counts.sum(axis=1) + p.nonfinite, 1)[:, None] for p in parts]
    moved = [np.diff(_below(part, part.bits, _EDGES), axis=1) for part in parts]
    grid = np.concatenate(moved) / np.concatenate(of)
    zeros = np.concatenate([part.zeros[:, None] for part in parts]) / np.concatenate(of)
    names = [
        part.name if part.name and len(part.zeros) == 1 else f"{part.name}/{i}".lstrip("/")
        for part in parts
        for i in range(len(part.zeros))
    ]
    seen = _EDGES[:-1][(grid > 1e-5).any(axis=0)]
    left, right = min([ZERO - 4, *seen - 1]), max([LIMIT + 2, *seen + 2])
    inside, edges = slice(left - _EDGES[0], right - _EDGES[0]), np.arange(len(grid) + 1) - 0.5
    look: dict[str, Any] = {"cmap": "Greys", "norm": LogNorm(1e-4, 1)}
    empty = lambda x: np.ma.masked_less(x, 1e-12)
    axes.pcolormesh(np.arange(left, right + 1), edges, empty(grid[:, inside]), **look)
    image = axes.pcolormesh([left - 5, left - 1], edges, empty(zeros), **look)
    axes.axvline(left - 0.5, color="black", linewidth=0.8)
    ends, over = (left, ZERO, NORMAL, LIMIT, right), axes.get_xaxis_transform()
    for i, zone in enumerate(("zero", "subnormal", "normal", "inf")):
        at = (ends[i] + ends[i + 1]) / 2
        axes.text(at, 1.01, zone, ha="center", fontsize="small", transform=over)
    for bound in ends[1:-1]:
        axes.axvline(bound, color="#D55E00", linewidth=1, linestyle=(0, (4, 2)))
    every = max(1, math.ceil(len(names) / 24))
    axes.set_yticks(range(0, len(names), every), [text(name) for name in names[::every]])
    whole = [
        x for x in range(-250, 250, 10 if right - left < 120 else 20) if left + 4 <= x <= right
    ]
    axes.set_xticks([left - 3, *whole], ["is 0", *(f"{x}".replace("-", "−") for x in whole)])
    scaled = ", scaled" * any(part.bits.any() for part in parts)
    axes.set(xlim=(left - 5, right), ylim=(len(grid) - 0.5, -0.5))
    axes.set(xlabel=f"log2 of magnitude{scaled}")
    axes.set(ylabel="layer" if len(names) > len(parts) else "group")
    ticks = FuncFormatter(lambda y, _: f"{100 * y:g}%")
    bar = {"label": "share of elements", "format": ticks, "extend": "min"}
    axes.get_figure().colorbar(image, ax=axes, **bar)


def _short(name: str) -> str:
    return name.removeprefix("float8_").removesuffix("fn")


def _percent(share: float) -> str:
    """Two digits at most, since more is not seen."""
    if 0 < share < 0.001:
        return "<0.1%"
    return f"{100 * share:.1f}%" if 0 < share < 0.0995 else f"{100 * share:.0f}%"
