"""One training loop for each way of writing models, and what a skipped step leaves behind."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from helpers import bits

import jscale

pytestmark = pytest.mark.usefixtures("standard_promotion")

HALF = jscale.Policy("params=float32,compute=float16,output=float32")
X = jax.random.normal(jax.random.key(0), (8, 3))
Y = X @ jnp.array([[1.0], [-2.0], [0.5]])
# Beyond float16, so that activations are inf, and the loss with them.
BAD_X = X.at[2, 1].set(1e6)


def optimizer():
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.03))
    return jscale.with_loss_scale(inner, jscale.dynamic(2.0**10))


def squared_error(prediction, y):
    return jnp.mean(jnp.square(prediction.astype(jnp.float32) - y))


class Loop(NamedTuple):
    """A training loop.

    Attributes:
      step: trains on a batch.
      kept: what a skipped step must not touch.
      state: something that holds the loss scale.
      traces: grows by one when the step is traced.
      constant: how many leaves of `kept` no step touches.
    """

    step: Callable[[jax.Array, jax.Array], jax.Array]
    kept: Callable[[], Any]
    state: Callable[[], Any]
    traces: list[int]
    constant: int = 0


def dict_loop():
    tx = optimizer()
    traces = []

    def loss_fn(params, x, y):
        params, x = HALF.cast_to_compute((params, x))
        hidden = jax.nn.leaky_relu(x @ params["in"])
        return squared_error(hidden @ params["out"], y)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, average, opt_state, x, y):
        traces.append(1)
        scale = jscale.loss_scale(opt_state)
        loss, grads = jscale.value_and_grad(loss_fn, scale)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params, loss=loss)
        params = optax.apply_updates(params, updates)
        moved = jax.tree.map(lambda a, p: 0.75 * a + 0.25 * p, average, params)
        average = jscale.select(opt_state.finite, moved, average)
        return params, average, opt_state, loss

    keys = jax.random.split(jax.random.key(1))
    params = {"in": jax.random.normal(keys[0], (3, 4)), "out": jax.random.normal(keys[1], (4, 1))}
    now = {"carry": (params, jax.tree.map(jnp.copy, params), tx.init(params))}

    def run(x, y):
        *now["carry"], loss = step(*now["carry"], x, y)
        return loss

    kept = lambda: (*now["carry"][:2], now["carry"][2].inner)
    return Loop(run, kept, lambda: now["carry"][2], traces)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, use_bias=False, dtype=jnp.float16)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(x)
        x = nn.Dropout(0.1, deterministic=False)(x)
        return nn.Dense(1, dtype=jnp.float16)(x)


class LinenState(train_state.TrainState):
    batch_stats: Any
    key: jax.Array


def linen_state():
    net = LinenNet()
    variables = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    return LinenState.create(
        apply_fn=net.apply,
        params=variables["params"],
        tx=optimizer(),
        batch_stats=variables["batch_stats"],
        key=jax.random.key(2),
    )


def linen_loop():
    traces = []

    @jax.jit
    def step(state, x, y):
        traces.append(1)
        key, dropout = jax.random.split(state.key)

        def loss_fn(params):
            prediction, changed = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                x,
                rngs={"dropout": dropout},
                mutable=["batch_stats"],
            )
            return squared_error(prediction, y), changed["batch_stats"]

        scale = jscale.loss_scale(state)
        (loss, stats), grads = jscale.value_and_grad(loss_fn, scale, has_aux=True)(state.params)
        new = state.apply_gradients(grads=grads)
        stats, key = jscale.select(
            new.opt_state.finite, (stats, key), (state.batch_stats, state.key)
        )
        return new.replace(batch_stats=stats, key=key), loss

    now = {"state": linen_state()}

    def run(x, y):
        now["state"], loss = step(now["state"], x, y)
        return loss

    def kept():
        state = now["state"]
        return state.params, state.batch_stats, state.key, state.opt_state.inner

    return Loop(run, kept, lambda: now["state"], traces)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 4, use_bias=False, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(4, 1, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(self.norm(self.inner(x))))


def nnx_loop():
    traces = []

    @nnx.jit
    def step(model, optimizer, x, y):
        traces.append(1)
        not_trained = (nnx.BatchStat, nnx.RngState)
        # Pure, since the Variables themselves are changed in place by the forward pass.
        before = nnx.as_pure(nnx.state(model, not_trained))
        loss, grads = jscale.value_and_grad(
            lambda model: squared_error(model(x), y),
            jscale.loss_scale(optimizer.opt_state),
            transform=nnx.value_and_grad,
        )(model)
        optimizer.update(model, grads, loss=loss)
        finite = jscale.metrics(optimizer.opt_state)["finite"]
        after = nnx.as_pure(nnx.state(model, not_trained))
        nnx.update(model, jscale.select(finite, after, before))
        return loss

    model = NnxNet(nnx.Rngs(0))
    opt = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)
    # The key of an RngStream stays; its count moves.
    kept = lambda: (nnx.state(model), nnx.state(opt.opt_state.inner))
    return Loop(
        lambda x, y: step(model, opt, x, y), kept, lambda: opt.opt_state, traces, constant=1
    )


class EqxNet(eqx.Module):
    inner: eqx.nn.Linear
    outer: eqx.nn.Linear
    act: Callable  # a leaf that is no array
    depth: jax.Array  # a leaf without a gradient

    def __init__(self, key):
        keys = jax.random.split(key)
        self.inner = eqx.nn.Linear(3, 4, key=keys[0])
        self.outer = eqx.nn.Linear(4, 1, key=keys[1])
        self.act = jax.nn.leaky_relu
        self.depth = jnp.array(2)

    def __call__(self, x):
        return self.outer(self.act(self.inner(x))) * self.depth.astype(x.dtype)


def eqx_loop():
    tx = optimizer()
    traces = []

    def loss_fn(model, x, y):
        model, x = HALF.cast_to_compute((model, x))
        return squared_error(jax.vmap(model)(x), y)

    @eqx.filter_jit
    def step(model, opt_state, x, y):
        traces.append(1)
        scale = jscale.loss_scale(opt_state)
        loss, grads = jscale.value_and_grad(loss_fn, scale, transform=eqx.filter_value_and_grad)(
            model, x, y
        )
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, opt_state, params, loss=loss)
        return eqx.apply_updates(model, updates), opt_state, loss

    model = EqxNet(jax.random.key(1))
    now = {"carry": (model, tx.init(eqx.filter(model, eqx.is_inexact_array)))}

    def run(x, y):
        *now["carry"], loss = step(*now["carry"], x, y)
        return loss

    kept = lambda: (now["carry"][0], now["carry"][1].inner)
    return Loop(run, kept, lambda: now["carry"][1], traces, constant=1)


LOOPS = {"dict": dict_loop, "linen": linen_loop, "nnx": nnx_loop, "equinox": eqx_loop}


@pytest.mark.parametrize("name", LOOPS)
def test_a_hundred_steps_one_trace_and_a_skip_that_leaves_no_mark(name):
    loop = LOOPS[name]()
    before = bits(loop.kept())
    first = loop.step(X, Y)
    same = [a == b for a, b in zip(bits(loop.kept()), before, strict=True)]
    assert sum(same) == loop.constant
    for _ in range(49):
        loop.step(X, Y)
    before = bits(loop.kept())

    assert not np.isfinite(loop.step(BAD_X, Y))
    assert bits(loop.kept()) == before
    m = jscale.metrics(loop.state())
    assert not m["finite"] and int(m["skipped_steps"]) == 1 and float(m["grad_scale"]) == 2.0**9

    loop.step(X, Y)
    assert bits(loop.kept()) != before
    for _ in range(48):
        last = loop.step(X, Y)
    m = jscale.metrics(loop.state())
    assert int(m["applied_steps"]) == 99 and int(m["skipped_steps"]) == 1
    assert len(loop.traces) == 1
    assert jscale.all_finite(loop.kept())
    assert last < first
    jscale.check(loop.state())


def test_an_average_in_float32_of_float16_parameters():
    # A move of 2^-14 from 1 would be rounded away in float16.
    average = {"w": jnp.ones(2)}

    @jax.jit
    def update(average, params, finite):
        step = lambda a, p: a + (p.astype(jnp.float32) - a) * np.float32(2.0**-14)
        return jscale.select(finite, jax.tree.map(step, average, params), average)

    for value in (2.0, jnp.inf, jnp.nan, 2.0):
        average = update(average, {"w": jnp.float16([value, 2.0])}, np.isfinite(value))
    assert average["w"].dtype == jnp.float32
    np.testing.assert_array_equal(average["w"], jnp.full(2, 1 + 2.0**-13))


def test_select_of_an_equinox_model():
    old, new = EqxNet(jax.random.key(0)), EqxNet(jax.random.key(1))
    for finite, want in ((True, new), (False, old)):
        got = eqx.filter_jit(jscale.select)(jnp.array(finite), new, old)
        assert got.act is old.act and bits(got) == bits(want)


def test_a_run_goes_on_from_bytes_in_the_middle_of_its_skips():
    tx = jscale.with_loss_scale(optax.adam(0.1), jscale.dynamic(2.0**32, growth_interval=2))
    params = {"w": jnp.ones(2)}

    @jax.jit
    def step(params, state):
        # The gradient is 2^-2; scaled it overflows float16 above 2^17.
        loss_fn = lambda p: jnp.sum(p["w"].astype(jnp.float16) * jnp.float16(0.25), dtype="float32")
        grads = jscale.grad(loss_fn, jscale.loss_scale(state))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(10):
        params, state = step(params, state)
    assert int(state.consecutive_skips) == 10
    saved = flax.serialization.to_bytes(state)
    target = jax.eval_shape(tx.init, params)
    restored = flax.serialization.from_bytes(target, saved)
    assert bits(restored) == bits(state)
    start = params
    for _ in range(10):
        params, state = step(params, state)
        start, restored = step(start, restored)
    assert int(state.applied_steps) > 0
    assert bits((start, restored)) == bits((params, state))


# Where the state is found


def holders(rule, inner):
    """The same state, one skip old, in every container."""
    tx = jscale.with_loss_scale(inner, rule)
    linen = train_state.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)
    linen = linen.apply_gradients(grads={"w": jnp.array([jnp.inf, 1.0])})

    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    opt = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = jax.tree.map(lambda x: jnp.full_like(x, jnp.inf), nnx.state(model, nnx.Param))
    opt.update(model, grads)
    return {
        "optax": linen.opt_state,
        "TrainState": linen,
        "nnx.Optimizer.opt_state": opt.opt_state,
        "nnx.state": nnx.state(opt),
        "nnx.to_pure_dict": nnx.to_pure_dict(nnx.state(opt)),
        "flax.serialization": flax.serialization.to_state_dict(linen.opt_state),
        "flax.serialization of TrainState": flax.serialization.to_state_dict(linen),
        "FrozenDict": flax.core.freeze({"opt": linen.opt_state}),
        "FrozenDict of fields": flax.core.freeze(flax.serialization.to_state_dict(linen.opt_state)),
        "nnx.State of fields": nnx.state(opt)["opt_state"],
    }


INNER = {"adam": optax.adam(0.1), "sgd": optax.sgd(0.1)}
CONTAINERS = [
    "optax",
    "TrainState",
    "nnx.Optimizer.opt_state",
    "nnx.state",
    "nnx.to_pure_dict",
    "flax.serialization",
    "flax.serialization of TrainState",
    "FrozenDict",
    "FrozenDict of fields",
    "nnx.State of fields",
]


# nnx.State drops the inner state of an optimizer that has none.
every_holder = pytest.mark.parametrize(
    "container, inner",
    [(container, inner) for container in CONTAINERS for inner in INNER],
)


@every_holder
def test_the_state_is_found_in(container, inner):
    state = holders(jscale.dynamic(8), INNER[inner])[container]
    scale = jscale.loss_scale(state)
    assert isinstance(scale, jax.Array) and not isinstance(scale, nnx.Variable)
    assert scale.dtype == jnp.float32 and float(scale) == 4.0
    m = jscale.metrics(state)
    assert all(isinstance(x, jax.Array) and x.shape == () for x in m.values())
    assert not m["finite"] and int(m["skipped_steps"]) == 1 and np.isinf(m["grad_norm"])
    jscale.check(state)
    with pytest.raises(FloatingPointError, match="1 skipped step in a row"):
        jscale.check(state, max_skips=1)


@every_holder
def test_a_state_that_is_off_is_found_in(container, inner):
    state = holders(jscale.off(), INNER[inner])[container]
    assert float(jscale.loss_scale(state)) == 1.0
    assert float(jscale.metrics(state)["grad_scale"]) == 1 and "grad_norm" not in jscale.metrics(
        state
    )
    jscale.check(state)


def test_two_states_in_one_nest_are_listed():
    state = holders(jscale.dynamic(8), optax.adam(0.1))
    with pytest.raises(ValueError, match="more than one loss scale in this state, at a, b"):
        jscale.loss_scale({"a": state["optax"], "b": state["flax.serialization"]})


# fp8: Flax passes the next value of some variables where their gradient would be.

OVERWRITE = "_overwrite_with_gradient"


def test_fp8_overwrite_leaves_are_not_gradients():
    leaf = jnp.array([1.0, jnp.inf])
    tree = {"params": {"w": jnp.full(2, 1024.0)}, OVERWRITE: {"dense": {"amax": leaf}}}
    unscaled = jscale.unscale(tree, 1024.0)
    np.testing.assert_array_equal(unscaled["params"]["w"], [1.0, 1.0])
    assert unscaled[OVERWRITE]["dense"]["amax"] is leaf
    assert jscale.all_finite(tree)
    half = jscale.Policy("half")
    for cast in (half.cast_to_param, half.cast_to_compute, half.cast_to_output):
        assert cast(tree)[OVERWRITE]["dense"]["amax"] is leaf
        assert cast(tree)["params"]["w"].dtype == jnp.float16

    tx = jscale.with_loss_scale(optax.identity())
    updates, state = tx.update(unscaled, tx.init(tree), tree)
    assert state.finite
    np.testing.assert_array_equal(state.grad_norm, jnp.sqrt(jnp.float32(2)))
    np.testing.assert_array_equal(updates[OVERWRITE]["dense"]["amax"], leaf)


def test_fp8_training_with_linen():
    net = nn.Dense(4, dtype=jnp.float16, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    variables = net.init(jax.random.key(0), X)
    state = train_state.TrainState.create(apply_fn=net.apply, params=variables, tx=optimizer())

    def loss_fn(params, x):
        return squared_error(net.apply(params, x), jnp.zeros((8, 4)))

    @jax.jit
    def step(state, x):
        scale = jscale.loss_scale(state)
        _, grads = jscale.value_and_grad(loss_fn, scale)(state.params, x)
        new = state.apply_gradients(grads=grads)
        finite = new.opt_state.finite
        overwrite = jscale.select(finite, new.params[OVERWRITE], state.params[OVERWRITE])
        return new.replace(params={**new.params, OVERWRITE: overwrite}), grads

    new, grads = step(state, X)
    by_hand = lambda params: loss_fn(params, X) * jnp.float32(2.0**10)
    want = jax.jit(jax.grad(by_hand))(state.params)[OVERWRITE]
    assert bits(new.params[OVERWRITE]) == bits(grads[OVERWRITE]) == bits(want)
    assert bits(new.params[OVERWRITE]) != bits(state.params[OVERWRITE])
    skipped, _ = step(new, BAD_X)
    assert not skipped.opt_state.finite
    assert bits((skipped.params, skipped.opt_state.inner)) == bits(
        (new.params, new.opt_state.inner)
    )
