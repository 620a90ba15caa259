"""Pictures for papers and reports. They need matplotlib: `pip install 'jscale[plot]'`.

    log = []                                  # a dict of metrics for each step
    ...
    jscale.plot.loss_and_scale(log).savefig("run.pdf")
    jscale.plot.exponents(jscale.stats(grads), scale).savefig("exponents.pdf")

Each function draws into the axes it is given, or makes a figure, and returns the figure. Nothing is
told by colour alone. The look is that of `style`, whatever your settings are, and nothing global
changes.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._plot_range import COLORS, DASHES, as_rows, draw_exponents, draw_layers
from ._plot_run import Log, Run, draw_loss, draw_scale, read
from ._stats import Stats
from ._tree import listing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")

_LOOK = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "figure.figsize": (6.4, 3.2),
    "font.size": 9,
    "hatch.linewidth": 0.5,
    "legend.fontsize": "small",
    "legend.frameon": False,
    "legend.handlelength": 3,
    "lines.linewidth": 1.3,
    "savefig.dpi": 200,
    "svg.hashsalt": "jscale",
}
_TALL = 6.4, 4.4


@contextlib.contextmanager
def style() -> Iterator[None]:
    """The look of these pictures, for what is drawn beside them.

    >>> import jscale
    >>> from matplotlib.figure import Figure
    >>> with jscale.plot.style():
    ...     figure = Figure(layout="constrained")
    >>> figure.get_size_inches().tolist()
    [6.4, 3.2]
    """
    try:
        import matplotlib.style
        from cycler import cycler
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'jscale[plot]'.") from error
    cycle = cycler(color=COLORS) + cycler(linestyle=DASHES)
    with matplotlib.style.context(["default", _LOOK | {"axes.prop_cycle": cycle}]):
        yield


def _known(log: Log, loss: str = "loss", *, or_scale: bool = True) -> Run:
    """What can be drawn of a log, which may be nearly empty, but not about something else."""
    run = read(log, loss)
    keys = set(log) if isinstance(log, Mapping) else {key for row in log for key in row}
    if keys - {"step"} and not len(run.loss) and not (or_scale and run.scales):
        raise ValueError(
            f"log has no {loss!r}{' and no grad_scale' if or_scale else ''}, but "
            f"{listing(sorted(map(str, keys)))}: is it logged by another name?"
        )
    return run


@style()
def scale(log: Log, ax: "Axes | None" = None) -> "Figure":
    """The loss scale over time, of each group, with the steps at which it grew or was skipped.

    A stack of layers is its median, and shaded from its lowest to its highest.

    Args:
      log: the metrics of a run, a dict for each step or one dict of columns, with `grad_scale`,
        `finite` and `grad_norm` as `metrics` names them; steps count from 0 if there is no `step`.
        Of several scales the mark of a skip is at those whose gradients overflowed. Steps that come
        again, after a restart, replace those before.
      ax: where to draw.

    >>> import jscale
    >>> log = [{"grad_scale": s, "finite": s > 4} for s in (8.0, 16.0, 4.0)]
    >>> figure = jscale.plot.scale(log)
    >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    ['loss scale', 'grown', '1 skipped']
    """
    figure, axes = _axes(ax)
    draw_scale(_known(log), axes, outside=ax is None)
    return figure


@style()
def loss(log: Log, ax: "Axes | None" = None, *, loss: str = "loss") -> "Figure":
    """The loss over time, its mean if there is much of it, and the steps that were skipped.

    Args:
      log, ax: as for `scale`.
      loss: the key of the loss.

    >>> import jscale
    >>> jscale.plot.loss({"loss": [3.0, 2.0, 1.0]}).axes[0].get_ylabel()
    'loss'
    """
    figure, axes = _axes(ax)
    draw_loss(_known(log, loss, or_scale=False), axes, loss, outside=ax is None)
    return figure


@style()
def loss_and_scale(
    log: Log, axes: "Sequence[Axes] | None" = None, *, loss: str = "loss"
) -> "Figure":
    """The loss, and below it the scale: what the one did when the other fell.

    Args:
      log: as for `scale`.
      axes: where to draw: the axes of the loss and of the scale.
      loss: the key of the loss.

    >>> import jscale
    >>> log = {"loss": [3.0, 2.0, 1.0], "grad_scale": [8.0, 16.0, 16.0]}
    >>> [ax.get_ylabel() for ax in jscale.plot.loss_and_scale(log).axes]
    ['loss', 'loss scale']
    """
    run, outside = _known(log, loss), axes is None
    if axes is None:
        from matplotlib.figure import Figure

        axes = Figure(figsize=_TALL, layout="constrained").subplots(2, sharex=True)
    upper, lower = axes
    draw_loss(run, upper, loss, outside)
    draw_scale(run, lower, outside)
    upper.set_xlabel("" if outside else "step")
    return lower.get_figure(root=False)  # type: ignore[return-value]


@style()
def exponents(
    found: Stats | Mapping[str, Stats],
    loss_scale: Any = 1.0,
    ax: "Axes | None" = None,
    *,
    formats: Sequence[str] = FORMATS,
) -> "Figure":
    """The exponents of gradients, moved by the loss scale, against what number formats hold.

    Above the histogram is a bar for each format, hatched where it is subnormal, and beside it what
    it makes of the nonzero gradients: the shares that become zero, are subnormal, or are too large.

    Args:
      found: what `stats` counted; of several groups, each is drawn.
      loss_scale: what the gradients would be multiplied with; of groups, a dict; of layers, f32[n].
      ax: where to draw.
      formats: names of floating-point types. The bounds of the first go through the histogram.

    >>> import jax.numpy as jnp, jscale
    >>> found = jscale.stats({"w": 2.0 ** -jnp.arange(16.0, 32.0)})
    >>> figure = jscale.plot.exponents(found, 2.0**16)
    """
    figure, axes = _axes(ax)
    draw_exponents(as_rows(found, loss_scale), axes, formats, outside=ax is None)
    return figure


@style()
def layers(
    found: Stats | Mapping[str, Stats], loss_scale: Any = 1.0, ax: "Axes | None" = None
) -> "Figure":
    """A heat map: which exponents the gradients of each layer have, and what float16 makes of them.

    Args:
      found: what `stats` counted by layer or by group; the first is at the top.
      loss_scale: as for `exponents`.
      ax: where to draw.

    >>> import jax.numpy as jnp, jscale
    >>> found = jscale.stats(jnp.exp2(-jnp.arange(24.0)).reshape(6, 4), layers=True)
    >>> figure = jscale.plot.layers(found)
    """
    figure, axes = _axes(ax, figsize=_TALL)
    draw_layers(as_rows(found, loss_scale), axes)
    return figure


def _axes(ax: Any, **figure: Any) -> tuple[Any, Any]:
    if ax is not None:
        return ax.get_figure(root=False), ax
    from matplotlib.figure import Figure

    made = Figure(layout="constrained", **figure)
    return made, made.subplots()
