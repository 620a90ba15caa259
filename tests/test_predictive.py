"""log_normal, headroom and anticipate: what holds whatever they see, and what they are for."""

import functools
import math
import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

import jscale

STEPS = 48  # one length for all drawn sequences: one compilation per rule
LIMIT = math.log2(65504)
INF, NAN = float("inf"), float("nan")

RULES = {
    "log_normal": jscale.log_normal(),
    "log_normal bounded": jscale.log_normal(4.0, min_scale=0.25, max_scale=64.0),
    "headroom": jscale.headroom(),
    "headroom bounded": jscale.headroom(2.5, window=2, init_scale=1, min_scale=1, max_scale=2**20),
    "anticipate dynamic": jscale.anticipate(jscale.dynamic(4.0, growth_interval=2)),
    "anticipate log_normal": jscale.anticipate(jscale.log_normal(), horizon=64),
    "hooked": jscale.hooked(jscale.anticipate(jscale.static(8)), lambda old, new, seen: new),
}
BOUNDS = {"log_normal bounded": (0.25, 64), "headroom bounded": (1, 2**20), "hooked": (2**-24, 8)}
every_rule = pytest.mark.parametrize("name", RULES)


def observation(finite, amax, loss):
    return jscale.Observation(finite=finite, loss=loss, grads={"w": amax})


@functools.cache
def runner(name):
    """All states of a run over given observations, under jit and scan."""
    rule = RULES[name]

    def step(state, seen):
        state = rule.update(state, observation(*seen))
        return state, state

    return jax.jit(lambda seen: jax.lax.scan(step, rule.init(), seen)[1])


def arrays(steps):
    finite, amax, loss = zip(*steps, strict=True)
    with np.errstate(over="ignore"):
        return jnp.asarray(finite), jnp.float32(np.float32(amax)), jnp.float32(np.float32(loss))


def drawn(rng):
    steps = rng.random(STEPS) < 0.8, 2 ** rng.normal(0, 3, STEPS), rng.random(STEPS)
    return arrays(zip(*steps, strict=True))


magnitudes = st.one_of(
    st.floats(2.0**-30, 2.0**20),
    st.sampled_from([0.0, 1e-45, 1e-38, 1.2e-38, 1.0, 1e19, 3e38, INF, NAN]),
)
losses = st.one_of(st.floats(-1e3, 1e3), st.sampled_from([0.0, 1e-45, 1e17, 1e30, -3e38, INF, NAN]))
sequences = st.lists(
    st.tuples(st.booleans(), magnitudes, losses), min_size=STEPS, max_size=STEPS
).map(arrays)


@every_rule
def test_whatever_is_seen_a_scale_is_a_power_of_two_in_its_bounds_and_nothing_is_nan(name):
    low, high = BOUNDS.get(name, (2.0**-24, 2.0**32))

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(sequences)
    def holds(seen):
        states = runner(name)(seen)
        scales = np.asarray(states.loss_scale)
        assert np.all(np.frexp(scales)[0] == 0.5)
        assert np.all((low <= scales) & (scales <= high))
        assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(states))

    holds()


@every_rule
def test_an_overflow_lowers_the_scale_and_a_clean_step_at_most_doubles_it(name):
    low, _ = BOUNDS.get(name, (2.0**-24, 0))

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(sequences)
    def holds(seen):
        scales = np.asarray(runner(name)(seen).loss_scale)
        before, after, finite = scales[:-1], scales[1:], np.asarray(seen[0])[1:]
        down = 1 if name == "hooked" else 2  # a static scale inside
        assert np.all(finite | (after <= np.maximum(before / down, low)))
        assert np.all(after <= 2 * before)

    holds()


@every_rule
def test_vmap_runs_every_lane_as_alone(name):
    rng = np.random.default_rng(0)
    lanes = [drawn(rng) for _ in range(3)]
    together = jax.vmap(runner(name))(jax.tree.map(lambda *x: jnp.stack(x), *lanes))
    for i, lane in enumerate(lanes):
        alone = runner(name)(lane)
        assert jax.tree.map(lambda x: x[i], together).loss_scale.tolist() == (
            alone.loss_scale.tolist()
        )


@every_rule
def test_state_in_has_the_type_of_state_out(name):
    rule = RULES[name]
    state = rule.init()
    assert state.loss_scale.dtype == jnp.float32 and state.loss_scale.shape == ()
    for loss in (None, jnp.float32(1), 1.0, jnp.bfloat16(1)):
        out = jax.eval_shape(lambda s: rule.update(s, observation(True, jnp.ones(2), loss)), state)
        typed = lambda tree: [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]
        assert jax.tree.structure(out) == jax.tree.structure(state)
        assert typed(out) == typed(state)


@every_rule
def test_it_is_float32_with_x64_too(name):
    with jax.enable_x64(True):
        rule = RULES[name]
        state, grads = rule.init(), {"w": jnp.ones(2), "v": jnp.ones(2, jnp.float32)}
        seen = jscale.Observation(True, loss=jnp.ones(()), grads=grads)
        new = rule.update(state, seen)
        typed = lambda tree: [(x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]
        assert typed(new) == typed(state)
        assert all(x.dtype in (jnp.float32, jnp.int32) for x in jax.tree.leaves(new))


@every_rule
def test_a_run_goes_on_where_it_was_cut(name):
    rng = np.random.default_rng(1)
    seen = drawn(rng)
    whole = runner(name)(seen)
    middle = jax.tree.map(lambda x: jnp.asarray(jax.device_get(x)[STEPS // 2 - 1]), whole)
    rule, state = RULES[name], middle
    for i in range(STEPS // 2, STEPS // 2 + 4):
        state = jax.jit(rule.update)(state, observation(*(x[i] for x in seen)))
        helpers.assert_same_bits(state, jax.tree.map(lambda x: x[i], whole))


@functools.cache
def simulator(rule):
    def step(state, now):
        x, more, loss = now
        scale = state.loss_scale
        finite = x + more + jnp.log2(scale) < LIMIT
        state = rule.update(state, observation(finite, jnp.where(finite, jnp.exp2(x), INF), loss))
        return state, (scale, ~finite, state)

    return jax.jit(lambda *xs: jax.lax.scan(step, rule.init(), xs)[1])


def run(rule, log2_amax, hidden=0.0, loss=1.0):
    """log2 of the scales used, whether they overflowed, and the states after.

    The largest cotangent decides, which is larger than `amax` by `hidden` doublings.
    """
    steps = len(log2_amax)
    padded = 1000 if steps <= 1000 else 8000  # few lengths, few compilations
    fill = lambda x: np.resize(np.broadcast_to(np.float32(x), steps), padded)
    scales, overflowed, states = simulator(rule)(*map(fill, (log2_amax, hidden, loss)))
    cut = lambda x: np.asarray(x[:steps])
    return np.log2(cut(scales)), cut(overflowed), jax.tree.map(cut, states)


def noise(deviation, steps, seed=0):
    return np.random.default_rng(seed).normal(0, deviation, steps)


LOOKING = {"log_normal": jscale.log_normal(), "headroom": jscale.headroom()}
looking = pytest.mark.parametrize("rule", LOOKING.values(), ids=LOOKING)


@looking
def test_until_a_gradient_is_seen_only_overflows_move_the_scale(rule):
    scales, _, _ = run(rule, np.full(4, INF))
    assert scales.tolist() == [16, 14, 10, 6]
    scales, _, _ = run(rule, np.full(10, -INF))  # zeros
    assert scales.tolist() == [16] * 10


@looking
def test_one_overflow_is_forgotten_within_ten_steps(rule):
    """Of a batch unlike all others, whose size is not seen."""
    x = noise(0.25, 600) - 3.5
    calm, _, _ = run(rule, x)
    x[500] = 12
    scales, overflowed, _ = run(rule, x)
    assert np.flatnonzero(overflowed).tolist() == [500]
    assert scales[501] == scales[500] - 2
    assert np.array_equal(scales[510:], calm[510:])


@looking
def test_five_overflows_in_a_row_are_forgotten_within_thirty_steps(rule):
    x = noise(0.25, 600) - 3.5
    calm, _, _ = run(rule, x)
    x[500:505] = INF  # as NaN from the forward pass: no scale helps
    scales, _, _ = run(rule, x)
    assert scales[505] == scales[500] - 18
    assert np.array_equal(scales[535:], calm[535:])


def test_an_overflow_a_zero_and_nan_do_not_enter_the_statistics():
    update, state = jax.jit(jscale.log_normal().update), jscale.log_normal().init()
    for amax in (0.5, 0.25, 0.125):
        state = update(state, observation(jnp.array(True), jnp.float32(amax), 1.0))
    for finite, amax in [(False, INF), (False, NAN), (False, 0.5), (True, 0.0), (True, INF)]:
        new = update(state, observation(jnp.array(finite), jnp.float32(amax), 1.0))
        helpers.assert_same_bits(new.amax, state.amax)


@looking
def test_a_drop_of_the_gradients_is_followed_within_a_hundred_steps(rule):
    x = np.where(np.arange(900) < 600, -4, -14) + noise(0.25, 900)
    scales, overflowed, _ = run(rule, x)
    assert not overflowed.any()
    wait = 100 if rule is LOOKING["log_normal"] else 210  # two windows
    assert scales[600 + wait :].min() >= scales[590] + 9


@looking
def test_a_jump_of_the_gradients_costs_few_steps(rule):
    x = np.where(np.arange(900) < 600, -10, 0) + noise(0.25, 900)
    _, overflowed, _ = run(rule, x)
    assert 1 <= overflowed.sum() <= 4


@looking
def test_it_learns_of_cotangents_larger_than_all_gradients(rule):
    """Those of activations, which overflow 6 doublings earlier than what the rule sees."""
    x = noise(0.25, 8000)
    scales, overflowed, states = run(rule, x, hidden=6 + noise(0.25, 8000, seed=1))
    assert overflowed[:4000].sum() <= 25
    assert overflowed[4000:].sum() <= 5
    assert states.guard.hold[-1] >= 1024
    assert 6.9 < np.mean(LIMIT - scales[4000:]) < 9


@looking
def test_it_forgets_them_when_they_are_gone(rule):
    x = noise(0.25, 8000) - 4
    hidden = np.where(np.arange(8000) < 500, 6, 0) + noise(0.25, 8000, seed=1)
    x[7990] = 12  # a batch unlike all others
    scales, overflowed, states = run(rule, x, hidden)
    assert states.guard.hold[500] > 16
    assert states.guard.hold[-1] == 4
    assert np.mean((LIMIT - scales - x)[6000:7900]) < 4


@looking
def test_zeros_let_the_scale_climb_slowly_and_it_comes_back(rule):
    x = np.full(900, -4.0)
    x[300:700] = -INF
    scales, overflowed, _ = run(rule, x)
    assert scales[301:316].tolist() == [scales[300]] * 15  # a few zeros say nothing
    assert scales[699] == 32
    assert overflowed[700:].sum() <= 5
    assert scales[-1] == scales[300]
    alternating = np.where(np.arange(900) % 2, -4, -INF)  # zeros in between are not counted
    assert run(rule, alternating)[1].sum() == 0


@looking
def test_it_rises_with_a_warm_up_and_falls_with_training(rule):
    """Gradients that grow by 6 doublings in 300 steps and shrink again in 2000."""
    t = np.arange(2300)
    x = np.interp(t, [0, 300, 2300], [-6, 0, -8]) + noise(0.25, 2300)
    scales, overflowed, _ = run(rule, x)
    assert overflowed.sum() == 0
    assert np.mean((LIMIT - scales - x)[20:]) < 4


@pytest.mark.parametrize("deviation", [0.25, 0.5, 1.0, 1.5])
def test_log_normal_overflows_as_rarely_as_asked(deviation):
    rule = jscale.log_normal(overflow_rate=1e-2)
    rates, unused = [], []
    for shift in np.arange(4) / 4:
        x = noise(deviation, 5000, seed=int(8 * shift)) + shift
        scales, overflowed, _ = run(rule, x)
        rates.append(overflowed.mean())
        unused.append((LIMIT - scales - x).mean())
    assert np.mean(rates) <= 1e-2
    assert np.mean(unused) <= 2.326 * deviation + 0.5 + 0.3  # quantile, rounding, and a little


def test_log_normal_wastes_little_on_small_gradients_in_between():
    """A tenth of the batches is learnt already: their gradients are tiny."""
    x = noise(0.25, 1000) - 8 * (np.random.default_rng(1).random(1000) < 0.1) - 4
    scales, overflowed, _ = run(jscale.log_normal(), x)
    assert overflowed.sum() == 0
    assert np.mean(LIMIT - scales[300:]) - 4 < 5  # a symmetric deviation would leave 8 unused


def test_log_normal_follows_gradients_that_wander_slowly():
    x = 1.5 * np.cumsum(noise(0.1, 5000)) / 3
    scales, overflowed, _ = run(jscale.log_normal(), x)
    assert overflowed.sum() <= 1
    assert np.mean((LIMIT - scales - x)[500:]) < 2


def test_headroom_keeps_so_many_bits_above_the_window():
    x = np.zeros(300)
    x[150] = 5
    scales, _, _ = run(jscale.headroom(bits=6, window=10), x)
    assert set(scales[20:151]) == {9}
    assert set(scales[151:160]) == {4}  # floor(15.9993 - 6 - 5)
    assert scales[151 + 2 * 10 + 5] == 9


@pytest.mark.parametrize("step", range(150, 160))
def test_headroom_remembers_for_a_window_at_least_and_for_two_at_most(step):
    x = np.zeros(300)
    x[step] = 5
    scales, _, _ = run(jscale.headroom(bits=6, window=10), x)
    low = np.flatnonzero(scales == 4)
    assert low[0] == step + 1
    assert 10 <= len(low) <= 20


def test_headroom_of_many_bits_does_not_overflow_on_spikes():
    x = noise(0.5, 5000) + 8 * (np.random.default_rng(1).random(5000) < 1e-2)
    _, overflowed, _ = run(jscale.headroom(bits=10, init_scale=1), x)
    assert not overflowed.any()


SURGE = np.interp(np.arange(400), [0, 200, 280, 400], [-4, -4, 4, 4])


@pytest.mark.parametrize(
    "inside, skips",
    [(jscale.static(2.0**14), 120), (jscale.dynamic(2.0**14), 3)],
    ids=["static", "dynamic"],
)
def test_anticipate_lowers_the_scale_ahead_of_an_overflow(inside, skips):
    x = SURGE + noise(0.1, 400)
    assert run(inside, x)[1].sum() >= skips
    assert run(jscale.anticipate(inside), x)[1].sum() == 0


def test_a_longer_horizon_sees_a_trend_further_on():
    x = np.interp(np.arange(400), [0, 200, 360], [-4, -4, 4]) + noise(0.1, 400)
    unused = {}
    for horizon in (4, 64):
        rule = jscale.anticipate(jscale.dynamic(growth_interval=1), horizon=horizon)
        unused[horizon] = LIMIT - run(rule, x)[0] - x
    assert np.array_equal(unused[64][100:200], unused[4][100:200])
    assert np.mean((unused[64] - unused[4])[220:350]) > 1


def test_anticipate_comes_back():
    x = np.interp(np.arange(600), [0, 200, 280, 360], [-4, -4, 4, -4]) + noise(0.1, 600)
    scales, overflowed, _ = run(jscale.anticipate(jscale.static(2.0**14)), x)
    assert overflowed.sum() == 0
    assert scales[280] <= 12
    assert set(scales[420:]) == {14}


def test_anticipate_probes_without_overflowing():
    x = noise(0.25, 5000)
    rule = jscale.dynamic(2.0**14, growth_interval=50)
    assert run(rule, x)[1].sum() > 60
    scales, overflowed, _ = run(jscale.anticipate(rule), x)
    assert overflowed.sum() <= 1
    assert np.mean(LIMIT - scales[500:]) < 2.5


def test_anticipate_tells_its_rule_which_scale_overflowed():
    rule = jscale.anticipate(jscale.dynamic(2.0**20))
    update, state = jax.jit(rule.update), rule.init()
    for _ in range(10):
        state = update(state, observation(jnp.array(True), jnp.float32(16), 1.0))
    used = float(state.loss_scale)
    assert used < 2.0**12
    assert float(state.rule.loss_scale) == 2.0**20
    state = update(state, observation(jnp.array(False), jnp.float32(INF), 1.0))
    assert float(state.rule.loss_scale) == used / 2


LOSS = 2 + np.exp(-np.arange(600) / 100) + noise(0.1, 600)
UP = np.maximum(np.arange(600) - 500, 0)


@pytest.mark.parametrize("factor", [1e-6, 1, 1e6])
def test_a_loss_that_curves_upwards_is_an_alarm_that_lowers_the_scale(factor):
    rule = jscale.anticipate(jscale.static(2.0**10))
    quiet, _, states = run(rule, np.zeros(600), loss=factor * LOSS)
    assert float(states.alarm.max()) < 1
    assert set(quiet) == {10}
    scales, _, states = run(rule, np.zeros(600), loss=factor * (LOSS + (UP / 30.0) ** 2))
    first = int(np.argmax(states.alarm >= 1))
    assert 500 < first < 550  # the loss has risen by less than what it fell before
    assert scales[first + 1] == 9
    assert scales.min() >= 6


@pytest.mark.parametrize(
    "loss",
    [
        LOSS + UP / 300,  # a slow rise
        LOSS - (UP / 30.0) ** 2,
        np.where(np.arange(600) == 550, 1e6, LOSS),  # one bad batch
        np.where(np.arange(600) % 50 == 0, NAN, LOSS),
        np.full(600, 3.0),
        np.zeros(600),
    ],
    ids=["slow", "falling", "spike", "NaN", "constant", "zero"],
)
def test_what_is_not_an_alarm(loss):
    _, _, states = run(jscale.anticipate(jscale.static(2.0**10)), np.zeros(600), loss=loss)
    assert float(states.alarm.max()) < 1


def test_anticipate_works_without_a_loss():
    rule = jscale.anticipate(jscale.dynamic())
    state = rule.update(rule.init(), jscale.Observation(True, grads=jnp.float32(1)))
    assert int(state.loss.noted) == 0 and int(state.amax.noted) == 1


@every_rule
def test_in_an_optimizer_one_trace_serves_all_steps(name, standard_promotion):
    tx = jscale.with_loss_scale(optax.adam(1e-2), RULES[name])
    traces = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        traces.append(1)
        loss_fn = lambda p: jnp.sum((p["w"] - 1.0) ** 2)
        loss, grads = jscale.value_and_grad(loss_fn, jscale.loss_scale(state))(params)
        updates, state = tx.update(grads, state, params, loss=loss)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.zeros(3)}
    state = tx.init(params)
    for _ in range(5):
        params, state = step(params, state)
    assert len(traces) == 1
    jscale.check(state)
    assert float(params["w"][0]) > 0.04


@looking
def test_check_sees_a_scale_that_cannot_fall(rule):
    make = jscale.log_normal if rule is LOOKING["log_normal"] else jscale.headroom
    tx = jscale.with_loss_scale(optax.sgd(0.1), make(init_scale=2, min_scale=1))
    params = {"w": jnp.ones(2)}
    state = tx.init(params)
    for _ in range(4):
        _, state = tx.update({"w": jnp.full(2, INF)}, state, params)
    with pytest.raises(FloatingPointError, match="at its minimum, 1"):
        jscale.check(state)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: jscale.log_normal(1000), "init_scale must be a power of two, got 1000"),
        (lambda: jscale.log_normal(min_scale=0.3), "min_scale must be a power of two, got 0.3"),
        (lambda: jscale.log_normal(2.0, max_scale=3), "max_scale must be a power of two, got 3"),
        (lambda: jscale.log_normal(2.0, min_scale=4), "init_scale must be at least 4"),
        (lambda: jscale.log_normal("big"), "init_scale must be a real number, got 'big'"),
        (lambda: jscale.log_normal(overflow_rate=0), "overflow_rate must be from 1e-9 to below"),
        (lambda: jscale.log_normal(overflow_rate=NAN), "overflow_rate must be from 1e-9"),
        (lambda: jscale.log_normal(overflow_rate=None), "overflow_rate must be a real number"),
        (lambda: jscale.headroom(-1), "bits must be from 0 to 40, all that float16 has, got -1"),
        (lambda: jscale.headroom(NAN), "bits must be from 0 to 40"),
        (lambda: jscale.headroom(window=0), "window must be a whole number"),
        (lambda: jscale.headroom(init_scale=3), "init_scale must be a power of two"),
        (lambda: jscale.anticipate(jscale.dynamic), "rule must be a ScaleRule, got function"),
        (lambda: jscale.anticipate(jscale.dynamic(), horizon=0), "horizon must be a whole"),
        (lambda: jscale.anticipate(jscale.dynamic(), max_bits=0), "max_bits must be a whole"),
        (lambda: jscale.anticipate(jscale.dynamic(), min_scale=3), "min_scale must be a power"),
    ],
)
def test_a_bad_setting_is_one_clear_sentence(make, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)) as error:
        make()
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["log_normal", "headroom", "anticipate dynamic"])
def test_they_say_that_they_need_the_gradients(name):
    rule = RULES[name]
    with pytest.raises(ValueError, match="asks for amax, but this Observation has no gradients"):
        rule.update(rule.init(), jscale.Observation(finite=True))
