"""Adapters in float16 over a frozen base: the base is not scaled, not looked at, and not moved."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits, bits, raw
from jax.extend.core import ClosedJaxpr, Jaxpr

import jscale

pytestmark = pytest.mark.usefixtures("standard_promotion")

WIDTHS, RANK, BATCH = (8, 12, 1), 2, 16
BASES = ["float32", "float16", "bfloat16", "int8", "int4"]
FLOATS = BASES[:3]


def new_base(dtype):
    """Two matrices, if need be quantised by column; and a number whose gradient is always inf."""
    base: dict[str, Any] = {}
    for i, shape in enumerate(zip(WIDTHS[:-1], WIDTHS[1:], strict=True)):
        w = jax.random.normal(jax.random.key(i), shape) / shape[0] ** 0.5
        if dtype in FLOATS:
            base[f"w{i}"] = w.astype(dtype)
        else:
            scale = jnp.max(jnp.abs(w), axis=0, keepdims=True) / jnp.iinfo(dtype).max
            base[f"w{i}"] = {"q": jnp.round(w / scale).astype(dtype), "scale": scale}
    return base | {"zero": jnp.zeros(())}


def new_adapters():
    draw = lambda i, shape: 0.3 * jax.random.normal(jax.random.key(10 + i), shape)
    return {
        f"w{i}": {"a": draw(2 * i, (n, RANK)), "b": draw(2 * i + 1, (RANK, m))}
        for i, (n, m) in enumerate(zip(WIDTHS[:-1], WIDTHS[1:], strict=True))
    }


def layer(adapter, w, x):
    if isinstance(w, dict):
        w = w["q"].astype(jnp.float32) * w["scale"]
    return x @ w.astype(jnp.float32) + (x @ adapter["a"]) @ adapter["b"]


def loss_fn(adapters, base, x, y):
    hidden = jnp.tanh(layer(adapters["w0"], base["w0"], x))
    prediction = layer(adapters["w1"], base["w1"], hidden) + jnp.sqrt(base["zero"])
    return jnp.mean(jnp.square(prediction - y))


X = jax.random.normal(jax.random.key(20), (BATCH, WIDTHS[0]))
Y = jnp.sum(jnp.sin(X), axis=1, keepdims=True)
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.03))
# Too large for the first steps.
RULE = jscale.dynamic(2.0**17, growth_interval=4)


def optimizer():
    return jscale.with_loss_scale(INNER, RULE)


class Way(NamedTuple):
    """A way to train a part of the parameters.

    Attributes:
      step: from a carry and a batch to the next carry, traceable by jax.jit.
      carry: the first one.
      parts: of a carry, the adapters, the base, and the optimizer's state.
    """

    step: Any
    carry: Any
    parts: Any


def by_argument(base):
    """The base is an argument that is not differentiated."""
    tx = optimizer()

    def step(carry, x, y):
        adapters, base, state = carry
        grad = jscale.value_and_grad(jscale.autocast(loss_fn), jscale.loss_scale(state))
        loss, grads = grad(adapters, base, x, y)
        updates, state = tx.update(grads, state, adapters, loss=loss)
        return optax.apply_updates(adapters, updates), base, state

    adapters = new_adapters()
    return Way(step, (adapters, base, tx.init(adapters)), lambda carry: carry)


LABELS = {"adapters": "trained", "base": "frozen"}


def by_label(tx):
    """All parameters are one tree with gradients; the wrapper is given the trained ones alone."""

    def way(base):
        def whole(params, x, y):
            return loss_fn(params["adapters"], params["base"], x, y)

        def step(carry, x, y):
            params, state = carry
            grad = jscale.value_and_grad(jscale.autocast(whole), jscale.loss_scale(state))
            loss, grads = grad(params, x, y)
            updates, state = tx.update(grads, state, params, loss=loss)
            return optax.apply_updates(params, updates), state

        params = {"adapters": new_adapters(), "base": base}
        parts = lambda carry: (carry[0]["adapters"], carry[0]["base"], carry[1])
        return Way(step, (params, tx.init(params)), parts)

    return way


by_partition = by_label(
    optax.partition({"trained": optimizer(), "frozen": optax.set_to_zero()}, LABELS)
)
by_mask = by_label(
    optax.chain(
        optax.masked(optimizer(), {"adapters": True, "base": False}),
        optax.masked(optax.set_to_zero(), {"adapters": False, "base": True}),
    )
)


class Net(nnx.Module):
    def __init__(self, base):
        # Also Params, which LoRAParams are too.
        self.base = nnx.data(jax.tree.map(nnx.Param, base))
        self.adapters = nnx.data(jax.tree.map(nnx.LoRAParam, new_adapters()))

    def __call__(self, x, y):
        return loss_fn(nnx.as_pure(self.adapters), nnx.as_pure(self.base), x, y)


def by_wrt(base):
    """Flax NNX: by the type of variable."""

    def step(carry, x, y):
        model, optimizer = nnx.merge(graph, carry)
        loss, grads = jscale.value_and_grad(
            jscale.autocast(lambda model: model(x, y)),
            jscale.loss_scale(optimizer.opt_state),
            argnums=nnx.DiffState(0, nnx.LoRAParam),
            transform=nnx.value_and_grad,
        )(model)
        optimizer.update(model, grads, loss=loss)
        return nnx.state((model, optimizer))

    model = Net(base)
    both = model, nnx.Optimizer(model, optimizer(), wrt=nnx.LoRAParam)
    graph, carry = nnx.split(both)

    def parts(carry):
        model, optimizer = nnx.merge(graph, carry)
        return (
            nnx.as_pure(model.adapters),
            nnx.as_pure(model.base),
            nnx.as_pure(optimizer.opt_state),
        )

    return Way(step, carry, parts)


def by_filter(base):
    """Equinox: the model comes in two trees, with None where the other has an array."""
    tx = optimizer()

    def loss_of(trained, frozen, x, y):
        model = eqx.combine(trained, frozen)
        return loss_fn(model["adapters"], model["base"], x, y)

    def step(carry, x, y):
        trained, frozen, state = carry
        half, scale = jscale.autocast(loss_of), jscale.loss_scale(state)
        grad = jscale.value_and_grad(half, scale, transform=eqx.filter_value_and_grad)
        loss, grads = grad(trained, frozen, x, y)
        updates, state = tx.update(grads, state, trained, loss=loss)
        return eqx.apply_updates(trained, updates), frozen, state

    model = {"adapters": new_adapters(), "base": base}
    is_trained = {name: jax.tree.map(lambda _: name == "adapters", x) for name, x in model.items()}
    trained, frozen = eqx.partition(model, is_trained)
    parts = lambda carry: (carry[0]["adapters"], carry[1]["base"], carry[2])
    return Way(step, (trained, frozen, tx.init(trained)), parts)


WAYS = {
    "an argument": by_argument,
    "optax.partition": by_partition,
    "optax.masked": by_mask,
    "nnx wrt": by_wrt,
    "eqx.partition": by_filter,
}
# JAX differentiates no integers, so a tree that is differentiated as a whole has none.
every_way = pytest.mark.parametrize(
    "way, dtype",
    [
        *[("an argument", dtype) for dtype in BASES],
        ("optax.partition", "float16"),
        ("optax.masked", "float16"),
        *[(way, dtype) for way in ("nnx wrt", "eqx.partition") for dtype in ("float16", "int4")],
    ],
)


@functools.cache
def by_hand(dtype):
    """One step for adapters alone, without this library but for `autocast`."""

    @jax.jit
    def step(adapters, state, scale):
        loss_of = lambda adapters: jscale.autocast(loss_fn)(adapters, new_base(dtype), X, Y) * scale
        grads = jax.tree.map(lambda g: g / scale, jax.grad(loss_of)(adapters))
        norm = optax.tree.norm(grads)
        updates, new_state = INNER.update(grads, state, adapters)
        new = optax.apply_updates(adapters, updates), new_state
        keep = lambda n, o: jnp.where(jnp.isfinite(norm), n, o)
        return *jax.tree.map(keep, new, (adapters, state)), norm

    return step


def test_every_base_has_a_gradient_that_is_not_finite():
    loss_of = lambda zero: loss_fn(new_adapters(), new_base("float16") | zero, X, Y)
    assert np.isinf(jax.grad(loss_of)({"zero": jnp.zeros(())})["zero"])


@every_way
def test_adapters_train_as_by_hand_over_a_base_that_stays(way, dtype):
    step, carry, parts = WAYS[way](new_base(dtype))
    step = jax.jit(step)
    adapters, skipped = new_adapters(), 0
    state = INNER.init(adapters)
    for _ in range(10):
        scale = jscale.loss_scale(parts(carry)[2])
        adapters, state, norm = by_hand(dtype)(adapters, state, scale)
        carry = step(carry, X, Y)
        m = jscale.metrics(parts(carry)[2])
        # The norm is that of the adapters alone, and so is the decision; sums differ in order.
        np.testing.assert_allclose(m["grad_norm"], norm, rtol=1e-6)
        assert bool(m["finite"]) == bool(np.isfinite(norm))
        skipped += not np.isfinite(norm)
    assert 0 < skipped < 5 and int(m["skipped_steps"]) == skipped
    trained, base, _ = parts(carry)
    # Programs may contract p + u differently; ten steps of 0.03 end within their rounding.
    for got, want in zip(jax.tree.leaves(trained), jax.tree.leaves(adapters), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert_same_bits(base, new_base(dtype))


@every_way
def test_the_state_is_that_of_the_adapters_alone(way, dtype):
    _, carry, parts = WAYS[way](new_base(dtype))
    assert bits(parts(carry)[2]) == bits(optimizer().init(new_adapters()))


def products(jaxpr):
    """How many products a traced program has, in which dtypes."""
    found = []
    inner = jaxpr if isinstance(jaxpr, Jaxpr) else jaxpr.jaxpr
    for eqn in inner.eqns:
        if eqn.primitive.name == "dot_general":
            found.append(str(eqn.outvars[0].aval.dtype))
        for value in eqn.params.values():
            if isinstance(value, Jaxpr | ClosedJaxpr):
                found += products(value)
    return found


@every_way
def test_no_product_is_computed_for_the_frozen(way, dtype):
    step, carry, _ = WAYS[way](new_base(dtype))
    if "optax" in way:  # in the traced program they are; what is dropped, the compiler removes
        alone, first, _ = by_argument(new_base(dtype))
        compiled = lambda f, carry: jax.jit(f).lower(carry, X, Y).compile().as_text()
        assert compiled(step, carry).count(" dot(") == compiled(alone, first).count(" dot(") > 0
        return
    # Forward three in each layer. Backward in each layer one for each half of the adapter and one
    # between them; and in the second layer two on to the first, through base and adapter.
    assert products(jax.make_jaxpr(step)(carry, X, Y)) == ["float16"] * (6 + 6 + 2)


# In the trees that optax splits, the wrapper is given the trained ones, not the other way round.

SPLIT = optax.partition({"trained": optax.sgd(1.0), "frozen": optax.set_to_zero()}, LABELS)


def test_around_optax_partition_the_frozen_count_unless_their_gradients_are_none():
    params = {"adapters": jnp.ones(2), "base": jnp.ones(3)}
    tx = jscale.with_loss_scale(SPLIT)
    grads = {"adapters": jnp.float32([3, 4]), "base": jnp.full(3, jnp.inf)}
    updates, state = tx.update(grads, tx.init(params), params)
    assert not state.finite
    updates, state = tx.update(grads | {"base": None}, tx.init(params), params)
    assert state.finite and state.grad_norm == 5 and updates["base"] is None
    np.testing.assert_array_equal(updates["adapters"], [-3, -4])


def test_only_trained_parameters_in_half_precision_are_warned_of():
    params = {"adapters": jnp.ones(2), "base": jnp.ones(3, jnp.float16)}
    inside = lambda tx: optax.partition({"trained": tx, "frozen": optax.set_to_zero()}, LABELS)
    inside(jscale.with_loss_scale(optax.adam(0.1))).init(params)
    with pytest.warns(UserWarning, match="parameters in float16: adapters. "):
        tx = inside(jscale.with_loss_scale(optax.adam(0.1)))
        tx.init(params | {"adapters": jnp.ones(2, jnp.float16)})


def test_only_trained_parameters_have_master_copies():
    params = {"adapters": jnp.ones(2, jnp.float16), "base": jnp.ones(3, jnp.float16)}
    tx = jscale.with_master_weights(jscale.with_loss_scale(optax.adam(0.1)))
    tx = optax.partition({"trained": tx, "frozen": optax.set_to_zero()}, LABELS)
    wide = [x for x in jax.tree.leaves(tx.init(params)) if x.ndim]
    # The copy, and Adam's two moments.
    assert [(x.dtype, x.shape) for x in wide] == [(jnp.float32, (2,))] * 3


# Parts of the library, with only the adapters trained


@pytest.mark.parametrize("dtype", ["float16", "int4"])
def test_regions_groups_and_stats_of_adapters_alone(dtype):
    rules = {"w1": jscale.dynamic(2.0**6), "w0": jscale.dynamic(2.0**10)}
    base, adapters = new_base(dtype), new_adapters()
    tx = jscale.with_loss_scale(optax.sgd(0.0), rules)

    @jax.jit
    def step(adapters, state, scale):
        def two_scales(adapters):
            first = jscale.region(layer, scale["w0"], scale["w1"])
            hidden = jnp.tanh(first(adapters["w0"], base["w0"], X))
            return jnp.mean(jnp.square(layer(adapters["w1"], base["w1"], hidden) - Y))

        grads = jscale.grad(two_scales, scale, root="w1")(adapters)
        return grads, tx.update(grads, state, adapters)[1], jscale.stats(grads, scale)

    state = tx.init(adapters)
    want, _, _ = step(adapters, state, dict.fromkeys(rules, jnp.float32(1)))
    grads, state, found = step(adapters, state, jscale.loss_scale(state))
    # The scales are powers of two, and products here are in float32.
    assert_same_bits(grads, want)
    m = jscale.metrics(state)
    for key in rules:
        np.testing.assert_allclose(m[f"grad_norm/{key}"], optax.tree.norm(want[key]), rtol=1e-6)
        size = sum(x.size for x in jax.tree.leaves(want[key]))
        assert found[key].exponents.sum() + found[key].zeros == size


def test_a_scale_for_each_layer_of_adapters_over_a_stacked_base():
    n, m = 3, WIDTHS[0]
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), (n, *shape)) / 3
    adapters = {"a": draw(0, m, RANK), "b": draw(1, RANK, m)}
    base = {"q": jnp.round(20 * draw(2, m, m)).astype(jnp.int8), "scale": jnp.full((n, 1, m), 0.05)}
    tx = jscale.with_loss_scale(
        optax.adam(0.1), {"": jscale.stacked(jscale.dynamic(2.0**8), n)}, skip="own"
    )

    @jax.jit
    def step(adapters, state):
        scales = jscale.loss_scale(state)[""]

        def loss_of(adapters):
            def body(x, layer_of):
                adapter, w, scale = layer_of
                run = jscale.region(lambda *args: jnp.tanh(layer(*args)), scale, 2.0**8)
                return run(adapter, w, x), None

            return jnp.mean(jax.lax.scan(body, X, (adapters, base, scales))[0])

        grads = jscale.grad(jscale.autocast(loss_of), 2.0**8)(adapters)
        found = jscale.stats(grads, jscale.loss_scale(state))
        return tx.update(grads, state, adapters)[1], found

    state, found = step(adapters, tx.init(adapters))
    assert state.grad_norm[""].shape == (n,) and np.all(state.grad_norm[""] > 0)
    assert np.all(state.finite[""]) and found[""].zeros.shape == (n,)


# autocast, and what the base is stored in


@pytest.mark.parametrize("dtype", BASES)
def test_autocast_multiplies_in_float16_whatever_the_base_is_stored_in(dtype):
    base, adapters = new_base(dtype), new_adapters()
    got = jscale.autocast(layer)(adapters["w1"], base["w1"], X @ jnp.ones((8, 12)))
    w = base["w1"]
    w = w["q"].astype(jnp.float32) * w["scale"] if isinstance(w, dict) else w
    half = lambda x: x.astype(jnp.float16)
    x, a, b = half(X @ jnp.ones((8, 12))), half(adapters["w1"]["a"]), half(adapters["w1"]["b"])
    want = (x @ half(w)).astype(jnp.float32) + ((x @ a) @ b).astype(jnp.float32)
    assert raw(got) == raw(want)
    rows = jscale.explain(layer)(adapters["w1"], base["w1"], X @ jnp.ones((8, 12)))
    found = {row.name: row.dtype for row in rows}
    assert found["dot_general"] == "float16"
    if dtype in ("int8", "int4"):
        assert found["mul"] == "float32"  # with its scale: a cast, then a product in float16


def test_autocast_leaves_a_product_of_integers_alone():
    q = jnp.arange(64, dtype=jnp.int8).reshape(8, 8)
    product = lambda x, q: jax.lax.dot(x, q, preferred_element_type=jnp.int32)
    assert_same_bits(jscale.autocast(product)(q, q), product(q, q))


@pytest.mark.parametrize("dtype", BASES[1:])
def test_autocast_keeps_no_copy_of_the_base_for_the_backward_pass(dtype):
    base = new_base(dtype)
    loss_of = lambda adapters: jscale.autocast(loss_fn)(adapters, base, X, Y)
    kept = jax.tree.leaves(jax.vjp(loss_of, new_adapters())[1])
    for name in ("w0", "w1"):
        stored = jax.tree.leaves(base[name])[0]
        same = [x for x in kept if hasattr(x, "shape") and x.shape == stored.shape]
        assert all(x.dtype == stored.dtype for x in same), [x.dtype for x in same]
