import io
import math
import sys

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from matplotlib.figure import Figure

import jscale
from jscale import plot
from jscale._plot_range import bounds
from jscale._plot_run import _POINTS, _thin, read

INF = math.inf


def row(step, scale=8.0, finite=True, **more):
    norm = 1.0 if finite else INF
    return {"step": step, "loss": 1.0, "grad_scale": scale, "finite": finite, "grad_norm": norm} | (
        more
    )


RUN = [row(i, 2.0 ** (8 + i // 10), i not in (33, 34)) for i in range(60)]
GROUPS = {
    "loss": np.linspace(3, 1, 40),
    "finite": np.arange(40) != 7,
    "grad_scale/text": 2.0 ** (np.arange(40) // 8),
    "grad_norm/text": np.ones(40),
    "grad_scale/vision": np.full(40, 2.0**-4),
    "grad_norm/vision": np.where(np.arange(40) == 7, INF, 1.0),
    "grad_scale/layers": 2.0 ** np.tile(np.arange(12), (40, 1)),
    "grad_norm/layers": np.ones((40, 12)),
}
RNG = np.random.default_rng(0)
SPREAD = np.float32(RNG.normal(size=(12, 400)) * np.exp2(-2 * np.arange(12) - 10)[:, None])
LAYERS = jscale.stats(SPREAD, layers=True)
TOWERS = jscale.stats({"text": SPREAD[0], "vision": SPREAD[9]}, ["text", "vision"])
PICTURES = {
    "scale": lambda: plot.scale(RUN),
    "scales": lambda: plot.scale(GROUPS),
    "loss": lambda: plot.loss(RUN * 20),
    "loss_and_scale": lambda: plot.loss_and_scale(GROUPS),
    "exponents": lambda: plot.exponents(jscale.stats(SPREAD), 2.0**12),
    "exponents of groups": lambda: plot.exponents(TOWERS, {"text": 2.0, "vision": 2.0**20}),
    "layers": lambda: plot.layers(LAYERS, 2.0 ** jnp.arange(12.0)),
    "layers of groups": lambda: plot.layers(TOWERS),
}


def texts(figure):
    found = figure.findobj(matplotlib.text.Text)
    return [x.get_text() for x in found if x.get_text() and x.get_visible()]


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
@pytest.mark.parametrize("name", PICTURES)
def test_pictures_render_at_their_size_and_without_a_warning(name, kind):
    figure = PICTURES[name]()
    assert figure.get_size_inches()[0] == 6.4
    out = io.BytesIO()
    figure.savefig(out, format=kind)
    assert len(out.getvalue()) > 3000
    for ax in figure.axes:
        assert ax.get_ylabel()


@pytest.mark.parametrize("name", PICTURES)
def test_nothing_global_changes_and_settings_of_others_do_not_show(name):
    before = dict(matplotlib.rcParams)
    look = texts(PICTURES[name]()), PICTURES[name]().get_size_inches().tolist()
    assert dict(matplotlib.rcParams) == before
    with matplotlib.rc_context({"figure.figsize": (1, 1), "font.size": 30, "axes.grid": True}):
        figure = PICTURES[name]()
    assert (texts(figure), figure.get_size_inches().tolist()) == look
    assert not any(line.get_visible() for ax in figure.axes for line in ax.get_xgridlines())


def drawn_texts(figure):
    """With their places; not the labels of ticks beyond the ends of an axis."""
    hidden = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low <= tick.get_loc() <= high:
                    hidden |= {tick.label1, tick.label2}
    for text in figure.findobj(matplotlib.text.Text):
        if text.get_text().strip() and text.get_visible() and text not in hidden:
            yield text.get_text(), text.get_window_extent()


@pytest.mark.parametrize("name", PICTURES)
def test_all_text_is_inside_and_none_lies_on_another(name):
    figure = PICTURES[name]()
    figure.savefig(io.BytesIO(), format="png", dpi=figure.dpi)
    drawn, (width, height) = list(drawn_texts(figure)), figure.get_size_inches() * figure.dpi
    for i, (one, a) in enumerate(drawn):
        assert a.x0 >= -1 and a.y0 >= -1 and a.x1 <= width + 1 and a.y1 <= height + 1, one
        for other, b in drawn[i + 1 :]:
            apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
            assert apart, (one, other)


def test_axes_of_others_are_drawn_into_and_keep_their_figure():
    figure = Figure(figsize=(16, 8))
    axes = figure.subplots(2, 3).ravel()
    assert plot.scale(RUN, axes[0]) is figure
    assert plot.loss(RUN, axes[1]) is figure
    assert plot.loss_and_scale(RUN, axes[2:4]) is figure
    assert plot.exponents(LAYERS, 2.0, axes[4]) is figure
    assert plot.layers(LAYERS, ax=axes[5]) is figure
    assert all(ax.has_data() for ax in axes)
    part = Figure().subfigures(1, 2)[0]
    assert plot.scale(RUN, part.subplots()) is part


def test_lines_and_bars_are_told_apart_without_colour():
    lines = plot.scale(GROUPS).axes[0].get_lines()[:3]
    assert len({str(line._dash_pattern) for line in lines}) == 3
    shown = plot.exponents(TOWERS).axes[0]
    steps = [x for x in shown.patches if isinstance(x, matplotlib.patches.StepPatch)]
    assert len({str(x.get_linestyle()) for x in steps}) == 2
    assert {x.get_hatch() for x in shown.collections} >= {"/////", None}


def test_the_scale_has_marks_where_it_grew_and_where_steps_were_skipped():
    ax = plot.scale(RUN).axes[0]
    assert legend(ax) == ["loss scale", "grown", "2 skipped"]
    _, grown, skipped = ax.get_lines()
    assert grown.get_xdata().tolist() == [10, 20, 30, 40, 50]
    assert skipped.get_xdata().tolist() == [33, 34]
    assert skipped.get_ydata().tolist() == [11, 11]
    assert ax.yaxis.get_major_formatter()(9, 0) == "$2^{9}$"


def test_a_skip_is_marked_at_the_scale_that_overflowed():
    run = read(GROUPS)
    assert {name: x.steps[x.skipped].tolist() for name, x in run.scales.items()} == {
        "text": [],
        "vision": [7],
        "layers": [],
    }
    assert run.skipped.tolist() == [7]
    # A veto is nobody's.
    vetoed = read(GROUPS | {"grad_norm/vision": np.ones(40)})
    assert all(x.skipped.sum() == 1 for x in vetoed.scales.values())
    # With skip="own" each has a flag.
    own = {"finite/text": np.ones(40, bool), "finite/vision": np.arange(40) != 9}
    own = read(GROUPS | own | {"grad_norm/vision": np.where(np.arange(40) == 9, INF, 1.0)})
    assert own.scales["vision"].steps[own.scales["vision"].skipped].tolist() == [9]


def test_a_stack_is_a_median_and_a_band_however_it_was_logged():
    one = {k: x for k, x in GROUPS.items() if "layers" not in k}
    for i in range(12):
        one[f"grad_scale/layers/{i}"] = GROUPS["grad_scale/layers"][:, i]
    for log in (GROUPS, one):
        ax = plot.scale(log).axes[0]
        assert legend(ax)[2:4] == ["layers", "layers: lowest to highest"]
        assert ax.get_lines()[2].get_ydata().tolist() == [5.5, 5.5]
    assert len(plot.scale({f"grad_scale/t/{i}": [1.0, 2.0] for i in range(3)}).axes[0].lines) >= 3


def test_logs_of_live_metrics_and_of_a_scan_give_the_same_picture():
    tx = jscale.with_loss_scale(optax.sgd(0.1), jscale.dynamic(8.0, growth_interval=2))

    def step(state, grad):
        _, state = tx.update(grad, state, jnp.ones(2))
        return state, jscale.metrics(state)

    state, grads = tx.init(jnp.ones(2)), jnp.ones((6, 2)).at[3].set(jnp.inf)
    _, columns = jax.lax.scan(step, state, grads)
    rows = []
    for grad in grads:
        state, metrics = step(state, grad)
        rows.append(metrics)
    for a, b in zip(jax.tree.leaves(read(rows)), jax.tree.leaves(read(columns)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert read(rows).skipped.tolist() == [3]


def test_what_comes_again_after_a_restart_replaces_what_was_there():
    log = [row(i, 8.0) for i in range(10)] + [row(i, 4.0) for i in range(6, 12)]
    run = read(log).scales[""]
    assert run.steps.tolist() == list(range(12))
    assert run.log2[:, 0].tolist() == [3.0] * 6 + [2.0] * 6


def test_keys_that_a_step_did_not_log_leave_no_hole_and_none_is_not_finite():
    log = [{"step": i, "loss": 1.0} | ({"grad_scale": 4.0} if i % 5 == 0 else {}) for i in range(9)]
    log[2]["loss"] = None
    run = read(log)
    assert run.scales[""].steps.tolist() == [0, 5]
    assert np.flatnonzero(np.isnan(run.loss)).tolist() == [2]
    assert "1 not finite" in legend(plot.loss(log).axes[0])


def test_many_steps_are_drawn_by_few_points_that_keep_every_peak():
    n = 300_000
    loss = 1 + RNG.random(n)
    loss[123_456], loss[200_000] = 90, np.nan
    scale = 2.0 ** (np.arange(n) // 7 % 5)
    log = {"loss": loss, "grad_scale": scale, "finite": np.arange(n) % 3 > 0}
    figure = plot.loss_and_scale(log)
    upper, lower = figure.axes
    points = sum(len(line.get_xdata()) for ax in figure.axes for line in ax.get_lines())
    assert points < 3 * _POINTS
    assert np.nanmax(upper.get_lines()[0].get_ydata()) == 90
    assert legend(upper) == ["each step", "mean of 1,500", "100,000 skipped", "1 not finite"]
    assert lower.get_lines()[0].get_xdata()[-1] == n - 1


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(0, 4 * _POINTS), st.integers(0, 2**32 - 1))
def test_thinning_keeps_ends_and_extremes(n, seed):
    y = np.random.default_rng(seed).normal(size=n)
    kept = _thin(y)
    assert len(kept) <= max(_POINTS, 0) and np.all(np.diff(kept) > 0)
    if n:
        assert kept[0] == 0 and kept[-1] == n - 1
        assert (y[kept].min(), y[kept].max()) == (y.min(), y.max())


@pytest.mark.parametrize("name", plot.FORMATS)
def test_the_bounds_of_formats_are_where_a_cast_changes(name):
    low, normal, high = bounds(name)
    cast = lambda log2: float(np.float64(2.0**log2).astype(jnp.dtype(name)))
    assert cast(low) == 0 < cast(low + 0.01)
    assert float(jnp.finfo(name).smallest_normal) == 2.0**normal
    if high < 128:
        with np.errstate(over="ignore"):
            assert np.isfinite(cast(high - 1e-4)) and not np.isfinite(cast(high + 1e-4))


@settings(derandomize=True, deadline=None, max_examples=10)
@given(st.lists(st.integers(-40, 10), min_size=1, max_size=30), st.integers(-20, 20))
def test_the_shares_beside_a_format_are_those_of_stats(exponents, bits):
    found = jscale.stats(np.resize(np.float32(2.0) ** np.array(exponents), 30))
    ax = plot.exponents(found, 2.0**bits, formats=["float16"]).axes[0]
    shown = [text.get_text() for text in ax.texts if "%" in text.get_text()]
    metrics = found.metrics(2.0**bits)
    for text, name in zip(shown, ("underflow", "subnormal", "overflow"), strict=True):
        share = float(metrics[name])
        number = float(text.strip("<%")) / 100
        assert abs(number - share) < 0.006 if number >= 0.1 else abs(number - share) < 6e-4


def test_the_scale_moves_the_histogram():
    found = jscale.stats(jnp.full(8, 2.0**-30))
    ax = plot.exponents(found, 2.0**20).axes[0]
    assert legend(ax) == ["unscaled", "× $2^{20}$"]
    steps = [x for x in ax.patches if isinstance(x, matplotlib.patches.StepPatch)]
    peaks = [x.get_data().edges[np.argmax(x.get_data().values)] for x in steps]
    assert peaks == [-30, -10, -10]
    assert ax.get_xlabel() == "log2 of magnitude, scaled"


def test_a_heat_map_has_a_row_for_each_layer_the_first_at_the_top():
    scales = np.float32(2.0 ** np.arange(20))  # XLA's exp2 is not exact
    ax, bar = plot.layers(
        jscale.stats(np.ones((20, 4)) / scales[:, None], layers=True), scales
    ).axes
    cells = ax.collections[0].get_array()
    assert cells.shape[0] == 20 and ax.get_ylim() == (19.5, -0.5)
    assert np.all(np.ma.count(cells, axis=1) == 1)
    assert len(set(np.argmax(np.ma.filled(cells, 0), axis=1))) == 1
    assert bar.get_ylabel() == "share of elements"
    assert [x for x in texts(ax) if x in ("zero", "subnormal", "normal", "inf")] == [
        *("zero", "subnormal", "normal", "inf")
    ]
    names = [text.get_text() for text in plot.layers(TOWERS).axes[0].get_yticklabels()]
    assert names == ["text", "vision"]


def test_names_are_text_and_no_formula():
    names = ["$\\frac", "_hidden", "<b>&", "tab\tnew\n\x1b[31m", "x" * 90]
    log = {f"grad_scale/{name}": [1.0, 2.0] for name in names}
    figure = plot.loss_and_scale(log | {"loss $": [1.0, 2.0]}, loss="loss $")
    figure.savefig(io.BytesIO(), format="svg")
    assert len(legend(figure.axes[1])) == 6
    plot.exponents({name: jscale.stats(jnp.ones(2)) for name in names}).savefig(io.BytesIO())


@pytest.mark.parametrize(
    "log", [[], {}, [{}], [{"loss": 1.0}], [row(3)], [row(0, INF), row(1, None)], [row(0, 0.0)]]
)
def test_logs_with_little_in_them_are_drawn(log):
    for picture in (plot.scale, plot.loss, plot.loss_and_scale):
        picture(log).savefig(io.BytesIO())


def test_stats_with_little_in_them_are_drawn():
    for found in (jscale.stats({}), jscale.stats(jnp.zeros(3)), jscale.stats(jnp.full(2, jnp.nan))):
        plot.exponents(found, 4.0).savefig(io.BytesIO())
        plot.layers(found).savefig(io.BytesIO())


def test_bad_arguments_are_one_sentence():
    with pytest.raises(TypeError, match="log must have a dict for each step, got 3"):
        plot.scale([3])
    with pytest.raises(ValueError, match="log has 2 rows in some columns, and 1 in grad_scale"):
        plot.scale({"loss": [1, 2], "grad_scale": [1.0]})
    with pytest.raises(TypeError, match="found must be what stats returns"):
        plot.exponents(jnp.ones(3))
    with pytest.raises(ValueError, match="loss_scale must be positive and finite, got 0"):
        plot.exponents(LAYERS, 0.0)
    with pytest.raises(ValueError, match="but has none for .'vision'."):
        plot.exponents(TOWERS, {"text": 1.0})
    with pytest.raises(ValueError, match="no layer"):
        plot.layers(jscale.stats({}, layers=True))


def test_without_matplotlib_one_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(ImportError, match=r"pip install 'jscale\[plot\]'"):
        plot.scale(RUN)


@pytest.mark.parametrize("draw", [plot.scale, plot.loss, plot.loss_and_scale])
def test_a_log_about_something_else_is_refused(draw):
    with pytest.raises(ValueError, match="log has no 'loss'.*, but a, step: is it logged by"):
        draw([{"step": 1, "a": 1.0}] * 3)
