"""One scale for each layer of a stack: each is a rule of its own, but for what overflowed above."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits
from hypothesis import given, settings, strategies as st
from oracle import Dynamic

import jscale

INF = np.inf
N = 4


def of_layer(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


SETTINGS = {"init_scale": 8.0, "growth_interval": 2, "hysteresis": 2, "min_scale": 2.0}
RULE = jscale.stacked(jscale.dynamic(**SETTINGS), N)
update = jax.jit(RULE.update)

layers = st.lists(st.booleans(), min_size=N, max_size=N)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(layers | st.booleans(), min_size=1, max_size=10))
def test_a_layer_learns_unless_one_above_it_overflowed(steps):
    state, expected = RULE.init(), [Dynamic(**SETTINGS) for _ in range(N)]
    for flags in steps:
        state = update(state, jscale.Observation(jnp.array(flags)))
        flags = flags if isinstance(flags, list) else [flags] * N
        for layer in reversed(range(N)):
            expected[layer].update(flags[layer])
            if not flags[layer]:
                break
        np.testing.assert_array_equal(state.loss_scale, [x.scale for x in expected])
        np.testing.assert_array_equal(state.growth_tracker, [x.clean_steps for x in expected])


RULES = {
    "dynamic": jscale.dynamic(8, growth_interval=1),
    "static": jscale.static(8),
    "log_normal": jscale.log_normal(),
    "anticipate": jscale.anticipate(jscale.dynamic(8)),
    "hooked": jscale.hooked(jscale.dynamic(8, growth_interval=1), lambda old, new, seen: new),
    "of_ones_own": jscale.ScaleRule(
        lambda: jscale.StaticState(8.0),
        lambda s, seen: s._replace(loss_scale=jnp.maximum(seen.amax, seen.loss)),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_each_layer_is_the_rule_by_itself_with_its_own_gradients(name):
    rule = RULES[name]
    stack, n = jscale.stacked(rule, 3), 3
    seen = lambda grads, finite: jscale.Observation(finite, jnp.float32(2), grads)
    state, alone = stack.init(), [rule.init()] * n
    assert state.loss_scale.shape == (n,)
    step, one = jax.jit(stack.update), jax.jit(rule.update)
    for k in range(3):
        grads = {"w": jnp.float32([[1, 2], [2.0**k, 8], [-64, 0]]), "b": jnp.arange(3.0), "n": None}
        kinds = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state)
        state = step(state, seen(grads, jnp.array([k != 1, True, True])))
        assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state) == kinds
        alone = [
            one(s, seen(of_layer(grads, i), jnp.array(k != 1 or i > 0)))
            for i, s in enumerate(alone)
        ]
        for i in range(n):
            np.testing.assert_array_equal(state.loss_scale[i], alone[i].loss_scale)


def test_hooked_may_be_around_a_stack_too():
    cap = lambda old, new, seen: new._replace(loss_scale=jnp.minimum(new.loss_scale, 16.0))
    rule = jscale.hooked(jscale.stacked(jscale.dynamic(8, growth_interval=1), 2), cap)
    state = rule.init()
    for _ in range(3):
        state = rule.update(state, jscale.Observation(jnp.array([True, False])))
    np.testing.assert_array_equal(state.loss_scale, [8, 1])  # the first one holds


# In an optimizer

PARAMS = {"head": jnp.ones(2), "layers": {"w": jnp.ones((3, 2)), "b": jnp.ones((3, 1, 2))}}
STACK = {
    "head": jscale.dynamic(8, growth_interval=1),
    "layers": jscale.stacked(jscale.dynamic(8, growth_interval=1), 3),
}


def test_a_stack_is_applied_or_skipped_as_one():
    tx = jscale.with_loss_scale(optax.sgd(1.0), STACK, skip="own")
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    grads["layers"]["b"] = grads["layers"]["b"].at[1, 0, 0].set(INF)
    updates, state = tx.update(grads, tx.init(PARAMS), PARAMS)
    assert {k: bool(x) for k, x in state.finite.items()} == {"head": True, "layers": False}
    assert not any(np.any(x) for x in jax.tree.leaves(updates["layers"]))
    np.testing.assert_array_equal(state.grad_norm["layers"], np.float32([2, INF, 2]))
    np.testing.assert_array_equal(jscale.loss_scale(state)["layers"], [8, 4, 16])


def test_layers_behind_an_overflow_of_the_head_hold():
    tx = jscale.with_loss_scale(optax.sgd(1.0), STACK)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    grads["head"] = grads["head"] * INF
    _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(jscale.loss_scale(state)["layers"], [8, 8, 8])


def test_groups_behind_an_overflow_of_a_layer_hold():
    tx = jscale.with_loss_scale(optax.sgd(1.0), dict(reversed(STACK.items())))
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    grads["layers"]["w"] = grads["layers"]["w"].at[2].set(INF)
    _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
    scales = jscale.loss_scale(state)
    assert float(scales["head"]) == 8
    np.testing.assert_array_equal(scales["layers"], [8, 8, 4])


@pytest.mark.parametrize("rules", [{"": jscale.stacked(jscale.dynamic(8), 3)}, STACK])
def test_norms_of_layers_that_are_finite_one_by_one(rules):
    """Clipping takes the norm of all; where float32 cannot hold it, the step is skipped."""
    params = {"layers": jnp.zeros((3, 2)), "head": jnp.zeros((3, 2))}
    grads = {"layers": jnp.full((3, 2), 9e18), "head": jnp.zeros((3, 2))}
    tx = jscale.with_loss_scale(optax.clip_by_global_norm(1.0), rules)
    updates, state = tx.update(grads, tx.init(params), params)
    assert not state.finite
    assert not any(np.any(x) for x in jax.tree.leaves(updates))


@pytest.mark.parametrize("wrap", [lambda rule: rule, lambda rule: {"": rule}])
def test_a_stack_may_be_the_only_rule(wrap):
    rule = wrap(jscale.stacked(jscale.dynamic(8, growth_interval=1), 3))
    tx = jscale.with_loss_scale(optax.sgd(1.0), rule)
    params = {"w": jnp.ones((3, 2))}
    grads = {"w": jnp.ones((3, 2)).at[1, 1].set(INF)}
    _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    scales = jscale.loss_scale(state)
    np.testing.assert_array_equal(scales[""] if isinstance(scales, dict) else scales, [8, 4, 16])
    assert not state.finite
    unscaled = jscale.unscale(grads, {"": jnp.float32([2, 4, 8])})
    np.testing.assert_array_equal(unscaled["w"], [[0.5, 0.5], [0.25, INF], [0.125, 0.125]])


@pytest.mark.parametrize("shape", [(4, 2), (2,), ()])
def test_every_leaf_of_a_stack_has_its_layers(shape):
    params = {"head": jnp.ones(2), "layers": {"w": jnp.ones(shape)}}
    tx = jscale.with_loss_scale(optax.sgd(1.0), STACK)
    with pytest.raises(
        ValueError, match="^layers/w is float32.* a scale for each of 3 layers: give"
    ):
        tx.update(params, tx.init(params), params)
    with pytest.raises(
        ValueError, match="^layers/w is float32.* a scale for each of 3 layers: give"
    ):
        jscale.unscale(params, {"layers": [1.0, 2.0, 4.0], "": 1.0})


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda: jscale.stacked(8.0, 3), "rule must be a ScaleRule, got 8.0"),
        (lambda: jscale.stacked(jscale.dynamic, 3), "rule must be a ScaleRule"),
        (lambda: jscale.stacked(jscale.dynamic(), 0), "n must be a whole number from 1"),
        (lambda: jscale.stacked(jscale.dynamic(), 2.5), "n must be a whole number from 1"),
        (lambda: jscale.stacked(jscale.dynamic(), "3"), "n must be a real number"),
        (lambda: jscale.stacked(RULE, 3), "takes a rule for a single scale, and was given one for"),
    ],
)
def test_a_mistake_is_one_clear_sentence(wrong, words):
    with pytest.raises((TypeError, ValueError), match=words) as error:
        wrong()
    assert len(str(error.value).splitlines()) == 1


# In a scan: what one scale for all cannot do


def half(x):
    return x.astype(jnp.float16)


def block(w, x):
    """The gradient of `w` passes through float16, that of `x` does not."""
    return x + (half(w) * half(jax.lax.stop_gradient(x))).astype(jnp.float32)


def loss_fn(params, scales):
    """Each layer adds w to 1, and makes the cotangent of all below it 2^14 times smaller."""

    def body(x, layer):
        w, scale = layer
        x = jscale.region(block, scale, scales["head"])(w, x)
        return 1.0 + (x - 1.0) * 2.0**-14, None

    x, _ = jax.lax.scan(body, jnp.float32(1), (params["layers"], scales["layers"]))
    return x * params["head"]


def test_each_layer_of_a_scan_finds_a_scale_that_fits():
    n = 4
    params = {"head": jnp.float32(1), "layers": jnp.zeros(n)}
    rules = {
        "head": jscale.static(1),
        "layers": jscale.stacked(jscale.dynamic(2.0**20, growth_interval=1, max_scale=2.0**100), n),
    }
    tx = jscale.with_loss_scale(optax.sgd(0.0), rules)

    def step(state, _):
        scales = jscale.loss_scale(state)
        f = functools.partial(loss_fn, scales=scales)
        loss, grads = jscale.value_and_grad(lambda p: f(p), scales, root="head")(params)
        return tx.update(grads, state, params, loss=loss)[1], None

    # Each doubles in every clean step and overflows in the next, when those below it wait.
    state, _ = jax.jit(lambda s: jax.lax.scan(step, s, length=1000))(tx.init(params))
    # 2^15 is the largest power of two that float16 has; a step later it may be twice that.
    log = np.log2(jscale.loss_scale(state)["layers"]) - 14 * np.arange(n, 0, -1)
    assert ((log == 15) | (log == 16)).all()
    one = jax.grad(loss_fn)(params, {"head": 1.0, "layers": jnp.full(n, 2.0**20)})
    assert not one["layers"][0] and one["layers"][3] == 2.0**-14
    fitting = {"head": 1.0, "layers": jnp.float32([2.0**56, 2.0**42, 2.0**28, 2.0**14])}
    assert_same_bits(jax.grad(loss_fn)(params, fitting)["layers"], 1.0 / fitting["layers"])
