import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import example, given, settings, strategies as st

import jscale
from jscale import Observation

STEPS = 64  # one length for all drawn sequences: one compilation per rule


@functools.cache
def _runner(items):
    rule = jscale.dynamic(**dict(items))

    def step(state, finite):
        state = rule.update(state, Observation(finite=finite))
        return state, state

    return rule, jax.jit(lambda flags: jax.lax.scan(step, rule.init(), flags))


def run(config, flags):
    """Scales before each step and after the last, under jit and scan."""
    rule, scan = _runner(tuple(sorted(config.items())))
    padded = jnp.asarray(list(flags) + [True] * (STEPS - len(flags)))
    _, states = scan(padded)
    return [float(rule.init().loss_scale), *map(float, states.loss_scale[: len(flags)])]


CONFIGS = [
    {},
    dict(init_scale=4.0, growth_interval=3),
    dict(init_scale=4.0, growth_interval=1, max_scale=2.0**10),
    dict(init_scale=4.0, growth_interval=2, growth_factor=4.0, backoff_factor=0.25, min_scale=1.0),
    *(
        dict(init_scale=256.0, growth_interval=4, hysteresis=h, refill=refill)
        for h in (2, 3)
        for refill in ("growth", "clean", "drop")
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_dynamic_follows_the_oracle(config):
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.lists(st.booleans(), min_size=1, max_size=STEPS))
    @example([True] * STEPS)
    @example([False] * STEPS)
    @example([True, True, False] * 20)
    @example([False, True] * 30)
    def follows(flags):
        assert run(config, flags) == oracle.scales(config, flags)

    follows()


def test_growth_comes_on_the_last_step_of_the_interval():
    assert run(dict(init_scale=4.0, growth_interval=3), [True] * 4) == [4, 4, 4, 8, 8]


def test_growth_ends_at_a_power_of_two():
    rule = jscale.dynamic(growth_interval=1)
    state, _ = jax.lax.scan(
        lambda s, _: (rule.update(s, Observation(finite=True)), None), rule.init(), length=200
    )
    assert float(state.loss_scale) == 2.0**32


def test_backoff_ends_at_the_minimum_and_comes_back():
    rule = jscale.dynamic(growth_interval=1)
    down = lambda s, _: (rule.update(s, Observation(finite=False)), None)
    state, _ = jax.lax.scan(down, rule.init(), length=400)
    assert float(state.loss_scale) == 2.0**-24
    state = rule.update(state, Observation(finite=True))
    assert float(state.loss_scale) == 2.0**-23


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.floats(2.0**-126, 2.0**126, width=32),
    st.floats(1.001, 1e30),
    st.floats(1e-30, 0.999),
    st.lists(st.booleans(), min_size=1, max_size=20),
)
def test_a_scale_stays_finite_normal_and_within_bounds(init, growth, backoff, flags):
    tiny = float(np.finfo(np.float32).tiny)
    rule = jscale.dynamic(
        init,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=1,
        min_scale=tiny,
        max_scale=2.0**126,
    )
    state = rule.init()
    for finite in flags:
        state = rule.update(state, Observation(finite=finite))
        assert tiny <= float(state.loss_scale) <= 2.0**126


def test_a_shorter_interval_after_a_restart_still_grows():
    state = jscale.dynamic(8, growth_interval=10).init()
    state = state._replace(growth_tracker=jnp.int32(6))
    state = jscale.dynamic(8, growth_interval=5).update(state, Observation(finite=True))
    assert float(state.loss_scale) == 16


def test_less_hysteresis_after_a_restart_holds_at_once():
    state = jscale.dynamic(8, hysteresis=5).init()
    state = jscale.dynamic(8).update(state, Observation(finite=False))
    assert float(state.loss_scale) == 4


def test_a_resumed_count_goes_on():
    rule = jscale.dynamic(8, growth_interval=4)
    state = rule.init()
    for _ in range(2):
        state = rule.update(state, Observation(finite=True))
    state = jscale.DynamicState(*map(jnp.asarray, jax.device_get(state)))
    for _ in range(2):
        state = rule.update(state, Observation(finite=True))
    assert float(state.loss_scale) == 16


@pytest.mark.parametrize("value", [65536, 65536.0, np.float64(65536), np.int64(65536), "f16"])
def test_the_scale_is_strong_float32_whatever_it_was_given_as(value):
    value = jnp.float16(1024) if value == "f16" else value
    for rule in (jscale.dynamic(value), jscale.static(value)):
        scale = rule.init().loss_scale
        assert scale.dtype == jnp.float32 and not scale.weak_type and scale.shape == ()


@pytest.mark.parametrize(
    "rule", [jscale.dynamic(), jscale.dynamic(hysteresis=2), jscale.static(8), jscale.off()]
)
def test_state_in_has_the_type_of_state_out(rule):
    state = rule.init()
    assert "loss_scale" in state._fields
    out = jax.eval_shape(lambda s: rule.update(s, Observation(finite=True)), state)
    typed = lambda x: (x.shape, x.dtype, x.weak_type)
    assert jax.tree.structure(out) == jax.tree.structure(state)
    assert list(map(typed, out)) == list(map(typed, state))


def test_settings_hold_in_jit_and_after_tree_map():
    rule = jscale.dynamic(4, min_scale=2.0)
    state = jax.jit(lambda s: jax.tree.map(lambda x: x, s))(rule.init())
    for _ in range(5):
        state = jax.jit(rule.update)(state, Observation(finite=jnp.array(False)))
    assert float(state.loss_scale) == 2.0


def test_static_and_off_do_not_move():
    for rule, scale in ((jscale.static(8), 8), (jscale.off(), 1)):
        state = rule.update(rule.init(), Observation(finite=False))
        assert float(state.loss_scale) == scale


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "config, words",
    [
        *((dict(init_scale=x), "init_scale must be positive, finite") for x in (0, -1, INF, NAN)),
        (dict(init_scale=1e-40), "init_scale must be positive, finite and from 2^-126"),
        (dict(init_scale=1e39), "init_scale must be positive, finite"),
        (dict(init_scale="big"), "init_scale must be a real number, got 'big'"),
        (dict(init_scale=True), "init_scale must be a real number, got True"),
        (dict(init_scale=None), "init_scale must be a real number, got None"),
        (dict(init_scale=[2.0]), "init_scale must be a real number"),
        (dict(init_scale=np.ones(2)), "init_scale must be a scalar, got float64[2]"),
        (dict(growth_factor=1), "growth_factor must be finite and above 1, got 1.0"),
        (dict(growth_factor=INF), "growth_factor must be finite and above 1"),
        (dict(growth_factor=NAN), "growth_factor must be finite and above 1"),
        (dict(growth_factor=1 + 1e-9), "growth_factor must be finite and above 1"),
        (dict(growth_factor=1e39), "growth_factor must be finite and above 1"),
        (dict(backoff_factor=1 - 1e-9), "backoff_factor must lie strictly"),
        (dict(backoff_factor=1e300), "backoff_factor must lie strictly"),
        (dict(init_scale=10**400), "init_scale must be positive, finite"),
        (dict(init_scale=2j), "init_scale must be a real number"),
        *((dict(backoff_factor=x), "backoff_factor must lie strictly") for x in (0, 1, -0.5, NAN)),
        *(
            (dict(growth_interval=x), "growth_interval must be a whole")
            for x in (0, 1.5, -3, 2**31)
        ),
        (dict(growth_interval=INF), "growth_interval must be a whole"),
        (dict(growth_interval=NAN), "growth_interval must be a whole"),
        (dict(hysteresis=0), "hysteresis must be a whole"),
        (dict(refill="never"), "refill must be 'growth', 'clean' or 'drop', got 'never'"),
        (dict(min_scale=4.0, max_scale=2.0, init_scale=4.0), "min_scale must not exceed max_scale"),
        (dict(init_scale=2.0, min_scale=4.0), "init_scale must be at least 4.0 (min_scale), got 2"),
        (dict(init_scale=2.0**40), "init_scale must be at most 4294967296.0 (max_scale)"),
        (dict(min_scale=0), "min_scale must be positive"),
        (dict(max_scale=INF), "max_scale must be positive, finite"),
    ],
    ids=str,
)
def test_a_bad_setting_is_one_clear_sentence(config, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)) as error:
        jscale.dynamic(**config)
    assert len(str(error.value).splitlines()) == 1
    if set(config) == {"init_scale"} and "most" not in words:
        with pytest.raises((TypeError, ValueError), match="^scale must"):
            jscale.static(config["init_scale"])


def test_an_observation_works_out_only_what_is_asked_for():
    seen = Observation(finite=True, grads={"w": jnp.array([3.0, -4.0]), "n": jnp.arange(9)})
    assert (float(seen.amax), float(seen.grad_norm)) == (4.0, 5.0)
    assert float(Observation(finite=True, grads={"n": jnp.arange(9)}).amax) == 0
    assert float(Observation(finite=True, grads={"w": jnp.zeros((0, 2))}).amax) == 0
    with pytest.raises(ValueError, match="asks for amax, but this Observation has no gradients"):
        _ = Observation(finite=True).amax
    lean = jax.make_jaxpr(
        lambda g: jscale.dynamic().update(
            jscale.dynamic().init(), Observation(finite=True, grads=g)
        )
    )({"w": jnp.ones(7)})
    assert "reduce" not in str(lean)


def test_the_first_growth_comes_after_2000_clean_steps():
    rule = jscale.dynamic()
    step = lambda s, _: ((new := rule.update(s, Observation(finite=True))), new.loss_scale)
    _, scales = jax.lax.scan(step, rule.init(), length=2000)
    assert (float(scales[-2]), float(scales[-1])) == (2.0**16, 2.0**17)


def test_bounds_may_meet():
    rule = jscale.dynamic(8, growth_interval=1, min_scale=8, max_scale=8)
    for finite in (True, False):
        assert float(rule.update(rule.init(), Observation(finite=finite)).loss_scale) == 8


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor"])
@pytest.mark.parametrize("value", ["0.5", None, True])
def test_a_factor_is_a_number(name, value):
    with pytest.raises(TypeError, match=f"{name} must be a real number, got {value!r}"):
        jscale.dynamic(**{name: value})


def test_a_setting_is_known_when_the_rule_is_made():
    with pytest.raises(TypeError, match="init_scale must be known when the rule is made"):
        jax.jit(lambda scale: jscale.dynamic(scale).init())(8.0)


def test_a_static_scale_is_the_one_set_now_whatever_was_saved():
    state = jscale.static(16).update(jscale.static(8).init(), Observation(finite=True))
    assert float(state.loss_scale) == 16


def test_the_axes_of_an_observation_are_not_traced():
    seen = Observation(finite=jnp.array(True), axis_name="data")
    state = jscale.dynamic(8, growth_interval=1).init()
    assert float(jax.jit(jscale.dynamic(8, growth_interval=1).update)(state, seen).loss_scale) == 16


def test_what_is_observed_is_float32_with_x64_too():
    with jax.enable_x64(True):
        seen = Observation(True, grads={"a": jnp.float32([3]), "b": jnp.float64([-4])})
        assert seen.amax.dtype == seen.grad_norm.dtype == jnp.float32
        assert (float(seen.amax), float(seen.grad_norm)) == (4, 5)
