"""Presets against recordings of the systems that they are named after."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from recordings import HIGHEST, LOWEST, PRESETS, leaves_bounds, recordings

import jscale
from jscale import Observation, presets
from jscale._rules import times

# Declared differences: where a recorded scale first leaves [2^-126, 2^126], to 2^127 and inf, or to
# subnormals and 0. Until then every scale is the same.
LEAVES = {
    "apex_amp_lossscaler": {
        "random_p0.3_5000|defaults": 501,
        "backoff_to_zero_200": 143,
        "growth_to_max_24|max=1e39": 7,
    },
    "apex_fp16utils_dynamiclossscaler": {"growth_to_max_24": 0},  # starts at 2^1010
    "apex_update_scale_hysteresis": {
        "random_p0.01_5000|hyst1_int20": 3216,
        "random_p0.01_5000|hyst2_int20": 2471,
        "random_p0.01_5000|hyst3_int20": 2471,
        "growth_to_max_24": 7,
    },
    "deepspeed_dynamiclossscaler": {
        "random_p0.01_5000|hyst1_win20": 3448,
        "random_p0.01_5000|hyst2_win20": 2612,
        "random_p0.01_5000|hyst2c_win20": 2512,
        "random_p0.01_5000|hyst3_win20": 2512,
        "random_p0.01_5000|hyst3c_win20": 2512,
        "backoff_to_zero_200|min=0 no raise": 143,
    },
    "deepspeed_fp16_optimizer": {"backoff_to_zero_200": 143},
    "fairseq_dynamiclossscaler": {
        "random_p0.01_5000|win20": 3236,
        "random_p0.01_5000|win20_tol0.25": 2673,
        "random_p0.3_5000|win20_tol0.05": 499,
    },
    "keras_lossscaleoptimizer_jax": {"growth_to_max_24": 7, "backoff_to_zero_then_clean": 143},
    "keras_lossscaleoptimizer_tensorflow": {
        "growth_to_max_24": 7,
        "backoff_to_zero_then_clean": 143,
    },
    "megatron_dynamicgradscaler": {
        "random_p0.01_5000|hyst1_int20": 3216,
        "random_p0.01_5000|hyst2_int20": 2551,
        "random_p0.01_5000|hyst3_int20": 2471,
        "growth_to_max_24": 7,
        "backoff_to_zero_200|min=2^-149": 143,
    },
    "mindspore_dynamiclossscaler": {"growth_to_max_24": 7},
    "mindspore_updatecell": {"growth_to_max_24": 7},
    "openseq2seq_backoff": {"growth_to_max_24|max=2^127": 0},
    "paddle_gradscaler_eager": {
        "random_p0.01_5000|decr_every1_int20": 3216,
        "random_p0.01_5000|decr_every2_int20": 2471,
        "random_p0.01_5000|decr_every3_int20": 2471,
        "growth_to_max_24": 7,
        "backoff_to_zero_then_clean": 143,
    },
    "paddle_update_loss_scaling_op": {
        "random_p0.01_5000|decr_every1_int20": 3216,
        "random_p0.01_5000|decr_every2_int20": 2471,
        "random_p0.01_5000|decr_every3_int20": 2471,
        "growth_to_max_24": 7,
    },
    "tf_keras_legacy_dynamiclossscalestate": {
        "random_p0.01_5000|win20": 3216,
        "growth_to_max_24": 7,
    },
    "tf_v1_dynamiclossscale": {"random_p0.01_5000|win20": 3216, "growth_to_max_24": 7},
    "torch_fsdp_sharded_cpu": {
        "random_p0.01_5000|interval20": 3216,
        "growth_to_max_24": 7,
        "backoff_to_zero_then_clean": 143,
    },
    "torch_gradscaler": {
        "random_p0.3_5000|defaults": 501,
        "growth_to_max_24": 7,
        "growth_past_max_then_inf": 7,
        "backoff_to_zero_then_clean": 143,
    },
}

# Declared differences in value, relative: a float64 scale whose factor is no power of two, rounded
# to float32 at each of its changes; logarithms of another library.
NEARLY = {
    ("apex_fp16utils_dynamiclossscaler", "non_pow2_random_p0.1_400"): 130 * 2.0**-24,
    ("openseq2seq_logmax", "lognormal_mu2_sd2_all_ok_500"): 2e-4,  # as its docstring says
}


@functools.cache
def replayed(system):
    """The scales of all of a system's recordings, before each step and after the last.

    One program: the rules go side by side through one scan.
    """
    traces = [t for t in recordings(system).values() if leaves_bounds(t) != 0]
    rules = [PRESETS[system](**t["params"]) for t in traces]
    length = max(len(t["found_inf"]) for t in traces)
    pad = lambda rows, fill: np.array([row + [fill] * (length - len(row)) for row in rows]).T
    finite = pad([t["found_inf"] for t in traces], 0) == 0
    amax = np.float32(pad([t.get("amax_when_finite", []) for t in traces], 1.0))
    amax = np.where(finite, amax, np.float32(np.inf))

    def step(states, seen):
        seen = [Observation(finite=f, grads={"w": a}) for f, a in zip(*seen, strict=True)]
        new = [r.update(s, o) for r, s, o in zip(rules, states, seen, strict=True)]
        return new, [s.loss_scale for s in new]

    first = [rule.init() for rule in rules]
    _, scales = jax.jit(lambda *seen: jax.lax.scan(step, first, seen))(finite, amax)
    return {
        t["name"]: np.append(s.loss_scale, after)
        for t, s, after in zip(traces, first, scales, strict=True)
    }


@pytest.mark.parametrize("system", PRESETS)
def test_a_preset_has_the_recorded_scales(system):
    for name, trace in recordings(system).items():
        leaves = leaves_bounds(trace)
        assert leaves == LEAVES.get(system, {}).get(name), name
        if leaves == 0:
            continue
        # A recording ends where the system raised: the scale before that step is the last.
        want = np.float64(trace["scale"])[:leaves]
        got = replayed(system)[name]
        assert LOWEST <= got.min() and got.max() <= HIGHEST
        if tolerance := NEARLY.get((system, name)):
            np.testing.assert_allclose(got[: len(want)], want, rtol=tolerance, err_msg=name)
        else:
            np.testing.assert_array_equal(got[: len(want)], np.float32(want), err_msg=name)
        if leaves is not None:  # at the bound that the other one passes
            assert got[leaves] == (HIGHEST if float(trace["scale"][leaves]) > 1 else LOWEST), name


def test_a_first_scale_out_of_bounds_is_an_error():
    with pytest.raises(ValueError, match="init_scale must be positive, finite and from 2\\^-126"):
        presets.apex_fp16_utils(2.0**1010)


RAISES = [
    ("deepspeed_dynamiclossscaler", "all_inf_24|config_defaults raises at min"),
    ("fairseq_dynamiclossscaler", "all_inf_24|class_defaults aborts (min 1e-4)"),
]


@pytest.mark.parametrize("system, name", RAISES)
def test_check_raises_where_the_system_does_and_the_scale_stays(system, name):
    trace = recordings(system)[name]
    tx = jscale.with_loss_scale(optax.sgd(1.0), PRESETS[system](**trace["params"]))
    params = {"w": jnp.ones(())}
    state = tx.init(params)
    update = jax.jit(lambda s: tx.update({"w": jnp.float32(jnp.inf)}, s, params)[1])
    for _ in range(trace["raised_at"]):
        state = update(state)
        jscale.check(state, max_skips=1000)
    state = update(state)
    with pytest.raises(FloatingPointError, match="at its minimum"):
        jscale.check(state, max_skips=1000)
    assert float(jscale.loss_scale(state)) == trace["scale_after_raise"] == trace["scale"][-1]


def test_other_raises_come_sooner_on_the_host():
    trace = recordings("mindspore_dynamiclossscalemanager")[
        "all_inf_1100 raises after 1000 consecutive"
    ]
    assert trace["raised_at"] == 1000
    rule = presets.mindspore(*trace["params"].values())
    state, _ = jax.lax.scan(
        lambda s, _: (rule.update(s, Observation(finite=False)), None), rule.init(), length=19
    )
    assert (float(state.loss_scale), int(state.steps_at_min)) == (1, 4)


NAMES = [name for name in presets.__all__ if not name.endswith("State")]
RULES = {name: getattr(presets, name)() for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_state_in_has_the_type_of_state_out(name):
    rule, seen = RULES[name], Observation(finite=jnp.array(True), grads={"w": jnp.ones(2)})
    state = rule.init()
    typed = lambda x: (x.shape, x.dtype, x.weak_type)
    for enabled in (False, True):
        with jax.enable_x64(enabled):
            out = jax.eval_shape(rule.update, state, seen)
            assert jax.tree.structure(out) == jax.tree.structure(state)
            assert list(map(typed, out)) == list(map(typed, state))
    assert state._fields[0] == "loss_scale" and state.loss_scale.dtype == jnp.float32


@pytest.mark.parametrize("name", NAMES)
def test_no_buffer_is_in_a_state_twice(name):
    state = RULES[name].init()
    assert len({id(x) for x in state}) == len(state)
    assert len({x.unsafe_buffer_pointer() for x in state}) == len(state)


def test_presets_go_through_vmap_and_the_wrapper():
    for name in ("torch", "fairseq", "openseq2seq_logmax", "deepspeed"):
        tx = jscale.with_loss_scale(optax.sgd(1.0), RULES[name])
        params = {"w": jnp.ones((2,))}
        update = jax.vmap(lambda g: tx.update({"w": g}, tx.init(params), params)[1])
        state = update(jnp.array([[1.0, 2.0], [1.0, jnp.inf]]))
        assert jscale.loss_scale(state).shape == (2,)


def test_the_log_normal_rule_never_meets_the_logarithm_of_zero():
    rule = RULES["openseq2seq_logmax"]
    state = rule.init()
    for amax in (4.0, 0.0, 1e-40, 4.0):
        old, seen = state, Observation(finite=True, grads={"w": jnp.float32([amax, 0])})
        state = rule.update(state, seen)
        assert np.isfinite(state.loss_scale)
        if amax < 1:
            assert jax.tree.all(jax.tree.map(lambda a, b: bool(a == b), old, state))
    state = rule.update(state, Observation(finite=False, grads={"w": jnp.float32([jnp.nan])}))
    assert float(state.loss_scale) == 1


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.floats(0.01, 100.0), st.integers(0, 2**31))
def test_a_product_with_a_float64_is_rounded_once(factor, seed):
    scales = np.random.default_rng(seed).uniform(1, 2, 1000).astype(np.float32)
    want = np.float32(np.float64(scales) * factor)
    np.testing.assert_array_equal(jax.jit(times, static_argnums=1)(scales, factor), want)
    np.testing.assert_array_equal(jax.vmap(lambda s: times(s, factor))(scales), want)


@pytest.mark.parametrize("tolerance", [0.05, 0.1, 0.2, 0.25, 0.3, 1 / 3, 0.5, 0.9, 1.0])
def test_a_share_of_overflows_is_compared_as_float64_has_it(tolerance):
    since, overflows = np.meshgrid(np.arange(1, 1500), np.arange(1, 400))
    want = overflows / since >= tolerance
    got = overflows.astype(np.float32) >= times(jnp.float32(since), tolerance)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "rule, first, last",
    [  # a growth that float32 cannot hold; one that jscale's bounds end
        (presets.torch(1e37, growth_factor=64.0, growth_interval=1), 1e37, 1e37),
        (presets.paddle(1e37, 64.0, incr_every_n_steps=1, static_graph=True), 1e37, 1e37),
        (presets.paddle(1e37, 64.0, incr_every_n_steps=1), 1e37, HIGHEST),
        (presets.tensorflow(2.0**125, growth_steps=1), 2.0**125, HIGHEST),
        (presets.apex(init_scale=2.0**23, scale_window=1), 2.0**23, 2.0**24),
        (presets.apex(init_scale=3.0, scale_window=1, max_loss_scale=5.0), 3.0, 5.0),
        (presets.openseq2seq_backoff(scale_max=6.0, step_window=1), 6.0, 6.0),
        (presets.jmp(1e37, factor=64, period=1), 1e37, 1e37),
    ],
)
def test_a_growth_beyond_the_maximum_is_dropped_or_ends_there(rule, first, last):
    state = rule.init()
    assert float(state.loss_scale) == np.float32(first)
    for _ in range(3):
        state = rule.update(state, Observation(finite=True))
    assert float(state.loss_scale) == np.float32(last)
    assert int(state.growth_tracker) == 0


@pytest.mark.parametrize(
    "rule, scales",
    [
        (presets.fairseq(2.0, threshold=1.0), [1.0, 1.0]),
        (presets.fairseq(4.0, min_loss_scale=1.0), [2.0, 2.0]),
        (presets.fairseq(4.0, threshold=1.0, min_loss_scale=1.0), [2.0, 2.0]),
        (presets.fairseq(1.0, min_loss_scale=1.0), [1.0, 1.0]),
        (presets.apex(init_scale=3.0, min_loss_scale=2.0), [2.0, 2.0]),
        (presets.tensorflow(3.0, multiplier=3.0), [1.0, 1.0]),
    ],
)
def test_a_drop_below_the_minimum_ends_there_or_is_refused(rule, scales):
    state = rule.init()
    for scale in scales:
        state = rule.update(state, Observation(finite=False))
        assert float(state.loss_scale) == scale
    assert int(state.steps_at_min) >= 2


FACTORS = dict(growth_factor=1.7, backoff_factor=0.3, growth_interval=1)


@pytest.mark.parametrize(
    "rule, narrow",
    [
        (jscale.dynamic(1000.1, **FACTORS), True),
        (presets.megatron(1000.1, **FACTORS, hysteresis=1), True),
        (presets.paddle(1000.1, 1.7, 0.3, incr_every_n_steps=1), True),
        (presets.torch(1000.1, **FACTORS), False),
        (presets.apex_hysteresis(1000.1, **FACTORS), False),
    ],
)
def test_factors_are_rounded_to_float32_where_the_system_does(rule, narrow):
    up, down = (float(np.float32(x)) if narrow else x for x in (1.7, 0.3))
    state, want = rule.init(), np.float32(1000.1)
    for finite in [True] * 9 + [False] * 8:
        state = rule.update(state, Observation(finite=finite))
        want = np.float32(float(want) * (up if finite else down))
        assert np.float32(state.loss_scale) == want


def test_switched_off_or_constant():
    for rule in (presets.torch(enabled=False), presets.paddle(enable=False)):
        assert isinstance(rule.init(), jscale.OffState)
    for rule in (presets.apex(128.0), presets.paddle(128.0, use_dynamic_loss_scaling=False)):
        assert float(rule.init().loss_scale) == 128 and isinstance(rule.init(), jscale.StaticState)


# Arguments in words of the system: each bad value is one sentence that names its argument.
BAD = {
    "init": ["x", None, 0.0, -1.0, np.nan, 1e300],
    "window": [0, 1.5, "x", None, 2**31],
    "factor": [1.0, 0.5, np.nan, np.inf, "x"],
    "backoff": [1.0, 0.0, "x", 1e300],
    "minimum": [-1.0, np.nan, "x", 1e30],
    "maximum": [0.0, -1.0, "x", None],
    "flag": ["no", 0, None],
}
ARGUMENTS = {
    "torch": dict(
        init="init_scale",
        factor="growth_factor",
        backoff="backoff_factor",
        window="growth_interval",
        flag="enabled",
    ),
    "apex": dict(window="scale_window", minimum="min_loss_scale", maximum="max_loss_scale"),
    "apex_fp16_utils": dict(init="init_scale", factor="scale_factor", window="scale_window"),
    "apex_hysteresis": dict(factor="growth_factor", window="hysteresis"),
    "dalle": dict(
        init="init_scale",
        factor="growth_factor",
        backoff="backoff_factor",
        window="cooldown",
        minimum="min_scale",
        maximum="max_scale",
    ),
    "deepspeed": dict(
        init="init_scale",
        window="delayed_shift",
        minimum="min_scale",
        flag="consecutive_hysteresis",
    ),
    "megatron": dict(init="initial_scale", window="growth_interval", backoff="backoff_factor"),
    "fairseq": dict(init="init_scale", factor="scale_factor", window="scale_window"),
    "keras": dict(init="initial_scale", window="dynamic_growth_steps"),
    "tensorflow": dict(init="initial_scale", window="growth_steps", factor="multiplier"),
    "paddle": dict(
        init="init_loss_scaling",
        factor="incr_ratio",
        backoff="decr_ratio",
        window="decr_every_n_nan_or_inf",
        flag="static_graph",
    ),
    "mindspore": dict(init="init_loss_scale", factor="scale_factor", window="scale_window"),
    "openseq2seq_backoff": dict(
        factor="step_factor", window="step_window", minimum="scale_min", maximum="scale_max"
    ),
    "openseq2seq_logmax": dict(minimum="scale_min", maximum="scale_max"),
    "flax": dict(init="scale", window="growth_interval", minimum="minimum_scale"),
    "jmp": dict(init="loss_scale", factor="factor", window="period", minimum="min_loss_scale"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_argument_is_named_as_the_system_names_it(name):
    for kind, argument in ARGUMENTS[name].items():
        assert argument in inspect.signature(getattr(presets, name)).parameters
        for value in BAD[kind]:
            with pytest.raises((TypeError, ValueError), match=rf"\b{argument}\b") as error:
                getattr(presets, name)(**{argument: value})
            assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: presets.apex("dynamik"), "loss_scale must be a real number, got 'dynamik'"),
        (lambda: presets.apex(scale_factor=4.0), "scale_factor must be 2, got 4.0: apex.amp takes"),
        (lambda: presets.fairseq(tolerance=1.5), "tolerance must lie within [0, 1], got 1.5"),
        (
            lambda: presets.fairseq(2.0, threshold=4.0),
            "init_scale must be at least 4.0 (threshold), got 2.0",
        ),
        (
            lambda: presets.tensorflow(0.5),
            "initial_scale must be at least 1.0 (the minimum), got 0.5: raise it",
        ),
        (lambda: presets.deepspeed(min_scale=None), "min_scale must be a real number, got None"),
        (lambda: presets.openseq2seq_logmax(log_max=100), "log_max must lie within (0, 60]"),
        (lambda: presets.openseq2seq_logmax(beta1=1.0), "beta1 must lie within [0, 1), got 1.0"),
        (lambda: presets.openseq2seq_logmax(overflow_std_dev=-1), "overflow_std_dev must lie"),
    ],
)
def test_what_a_system_would_not_do_is_an_error(make, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        make()


def test_the_defaults_are_those_that_were_recorded():
    for system, name in [
        ("torch_gradscaler", "random_p0.01_5000|defaults"),
        ("megatron_dynamicgradscaler", "random_p0.01_5000|config_defaults"),
        ("deepspeed_dynamiclossscaler", "random_p0.01_5000|config_defaults"),
    ]:
        params = inspect.signature(PRESETS[system]).parameters
        for key, value in recordings(system)[name]["params"].items():
            assert params[key].default == value


@pytest.mark.parametrize("seed", range(3))
def test_dalle_drops_seldom_and_grows_slowly(seed):
    rule = presets.dalle(2.0**10, min_scale=2.0**8, max_scale=2.0**11, cooldown=20)
    flags = np.random.default_rng(seed).random(4000) > (0.02, 0.05, 0.001)[seed]
    step = lambda state, finite: (
        rule.update(state, jscale.Observation(finite)),
        state.loss_scale,
    )
    got = np.asarray(jax.jit(lambda flags: jax.lax.scan(step, rule.init(), flags))(flags)[1])

    scale, last, drops = 2.0**10, -20, 0
    for i, finite in enumerate(flags):
        assert abs(got[i] / scale - 1) < 1e-4  # float32 rounds once a step, 2^-24
        if finite:
            scale = min(scale * 2 ** (1 / 1000), 2.0**11)
        elif i - last >= 20:
            scale, last, drops = max(scale / 2**0.5, 2.0**8), i, drops + 1
    assert drops and np.ptp(got)
