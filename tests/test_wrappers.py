"""hooked: the callback in the decision. anticipate is in test_predictive."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jscale


def seen(finite, **grads):
    return jscale.Observation(finite=finite, grads={k: jnp.float32(x) for k, x in grads.items()})


def test_a_hook_sees_the_old_state_the_proposed_one_and_the_observation():
    calls = []

    def hook(old, proposed, observation):
        calls.append(tuple(map(type, (old, proposed, observation))))
        kept = jnp.where(observation.finite, proposed.loss_scale, old.loss_scale * 0.25)
        return proposed._replace(loss_scale=kept)

    rule = jscale.hooked(jscale.dynamic(16, growth_interval=1), hook)
    up, down = (rule.update(rule.init(), jscale.Observation(x)) for x in (True, False))
    assert (float(up.loss_scale), float(down.loss_scale)) == (32, 4)
    assert calls[0] == (jscale.DynamicState, jscale.DynamicState, jscale.Observation)


@pytest.mark.parametrize("wrong", [0.0, -1.0, jnp.inf, jnp.nan, 1e-39, 1e38])
def test_an_illegal_scale_from_a_hook_is_not_used(wrong):
    rule = jscale.hooked(
        jscale.dynamic(16), lambda old, new, _: new._replace(loss_scale=jnp.float32(wrong))
    )
    assert float(rule.update(rule.init(), jscale.Observation(False)).loss_scale) == 8


def test_a_python_number_is_taken_in_the_dtype_of_its_field():
    rule = jscale.hooked(
        jscale.dynamic(16), lambda old, new, _: new._replace(loss_scale=2.0, growth_tracker=7)
    )
    state = rule.update(rule.init(), jscale.Observation(True))
    assert (state.loss_scale.dtype, state.growth_tracker.dtype) == (jnp.float32, jnp.int32)
    assert not state.loss_scale.weak_type and not state.growth_tracker.weak_type


@pytest.mark.parametrize(
    "hook, words",
    [
        (lambda old, new, _: None, "returned None: end it with `return proposed`."),
        (lambda old, new, _: new.loss_scale, "missing loss_scale"),
        (lambda old, new, _: tuple(new), "missing loss_scale"),
        (
            lambda old, new, _: new._replace(loss_scale=jnp.ones(2)),
            "at loss_scale float32[2], expected float32[]",
        ),
        (
            lambda old, new, _: new._replace(loss_scale=jnp.float16(2)),
            "returned float16[] for loss_scale, which holds float32[]",
        ),
        (
            lambda old, new, _: new._replace(growth_tracker=1.5),
            "for growth_tracker, which holds int32[]",
        ),
        (lambda old, new, _: new._replace(loss_scale=True), "for loss_scale, which holds float32"),
    ],
)
def test_a_hook_that_returns_another_state_is_named_with_the_field(hook, words):
    rule = jscale.hooked(jscale.dynamic(16), hook)
    with pytest.raises(TypeError, match=re.escape(words)) as error:
        jax.jit(rule.update)(rule.init(), jscale.Observation(jnp.array(True)))
    assert "return proposed" in str(error.value) or "proposed._replace(...)" in str(error.value)


def test_nothing_is_decided_under_off():
    rule = jscale.hooked(jscale.off(), lambda old, new, _: new._replace(loss_scale=8.0))
    tx = jscale.with_loss_scale(optax.sgd(1.0), rule)
    state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))[1]
    assert isinstance(state.rule, jscale.OffState) and float(jscale.loss_scale(state)) == 1


@pytest.mark.parametrize(
    "wrap", [jscale.anticipate, lambda rule: jscale.hooked(rule, lambda o, n, _: n)]
)
def test_check_sees_that_the_rule_inside_is_at_its_minimum(wrap):
    tx = jscale.with_loss_scale(optax.sgd(1.0), wrap(jscale.dynamic(8, min_scale=4)))
    params, state = jnp.ones(()), tx.init(jnp.ones(()))
    for _ in range(3):
        state = tx.update(jnp.float32(jnp.inf), state, params)[1]
    with pytest.raises(FloatingPointError, match="overflow with the loss scale at its minimum, 4"):
        jscale.check(state)
    jax.jit(lambda s: s, donate_argnums=0)(tx.init(params))  # no buffer twice


def test_bad_arguments():
    with pytest.raises(TypeError, match="rule must be a ScaleRule, got function"):
        jscale.hooked(jscale.dynamic, lambda old, new, observation: new)
    with pytest.raises(TypeError, match="fn must be a function .*, got 3"):
        jscale.hooked(jscale.dynamic(), 3)


def test_the_examples_clamp_during_a_warm_up():
    def clamp(old, proposed, observation):
        low = jnp.minimum(proposed.loss_scale, 2.0**12)
        warm = proposed.amax.noted >= 20
        return proposed._replace(loss_scale=jnp.where(warm, proposed.loss_scale, low))

    counted = jscale.anticipate(jscale.dynamic(2**12, growth_interval=5))
    for inside in (jscale.log_normal(2**12), counted):
        rule = jscale.hooked(inside, clamp)
        step = lambda state, _: ((new := rule.update(state, seen(True, w=1e-3))), new.loss_scale)
        _, scales = jax.lax.scan(step, rule.init(), length=40)
        assert float(rule.init().loss_scale) == 2.0**12
        assert set(scales[:19].tolist()) == {2.0**12}
        assert scales[19:23].tolist() == [2.0**13, 2.0**14, 2.0**15, 2.0**16]


def test_the_examples_no_growth_while_the_loss_curves_upwards():
    def careful(old, proposed, observation):
        kept = jnp.minimum(proposed.loss_scale, old.loss_scale)
        rising = proposed.alarm >= 0.5
        return proposed._replace(loss_scale=jnp.where(rising, kept, proposed.loss_scale))

    rule = jscale.hooked(jscale.anticipate(jscale.log_normal()), careful)
    steps = jnp.arange(300)
    losses = 2 + 0.1 * jnp.sin(steps) + jnp.maximum(steps - 200, 0) ** 2 / 500
    amax = jnp.exp2(-(steps - 200) / 20)  # gradients shrink, so that the scale would grow

    def step(state, now):
        loss, amax = now
        state = rule.update(state, jscale.Observation(True, loss=loss, grads=amax))
        return state, state

    _, states = jax.lax.scan(step, rule.init(), (losses, amax))
    rising = states.alarm >= 0.5
    assert 200 < int(jnp.argmax(rising)) < 250
    growth = jnp.diff(states.loss_scale) > 0
    assert bool(jnp.any(growth)) and not bool(jnp.any(growth & rising[1:]))


def test_the_examples_a_policy_for_one_part_of_the_model():
    def spare_vision(old, proposed, observation):
        amax = jscale.Observation(True, grads=observation.grads["vision"]).amax
        fits = jnp.where(amax > 0, 2.0**12 / amax, jnp.inf)
        scale = jnp.ldexp(1.0, jnp.frexp(jnp.minimum(proposed.loss_scale, fits))[1] - 1)
        scale = jnp.where(observation.finite, scale, old.loss_scale / 2)
        return proposed._replace(loss_scale=scale)

    rule = jscale.hooked(jscale.dynamic(), spare_vision)
    tx = jscale.with_loss_scale(optax.sgd(0.1), rule)
    params = {"vision": jnp.ones(2), "text": jnp.ones(2)}
    for grads, scale in (
        ({"vision": jnp.array([3.0, 0]), "text": jnp.array([1.0, 0])}, 2.0**10),
        ({"vision": jnp.array([0.0, 0]), "text": jnp.array([9.0, 0])}, 2.0**16),
        ({"vision": jnp.array([jnp.inf, 0]), "text": jnp.array([9.0, 0])}, 2.0**15),
    ):
        _, state = tx.update(grads, tx.init(params), params)
        assert float(jscale.loss_scale(state)) == scale


def test_the_examples_log_from_inside_jit(capfd):
    def tell(old, new):
        if old != new:
            print(f"loss scale {old:g} -> {new:g}")

    def log(old, proposed, observation):
        jax.debug.callback(tell, old.loss_scale, proposed.loss_scale)
        return proposed

    rule = jscale.hooked(jscale.dynamic(8, growth_interval=2), log)
    step = lambda state, finite: (rule.update(state, jscale.Observation(finite)), None)
    flags = jnp.array([True, True, True, False])
    jax.block_until_ready(jax.jit(lambda f: jax.lax.scan(step, rule.init(), f))(flags))
    jax.effects_barrier()
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("loss scale")]
    assert lines == ["loss scale 8 -> 16", "loss scale 16 -> 8"]
