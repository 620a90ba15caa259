"""The same loop in float32, TF32, bfloat16 and float16, and around Flax's fp8 layers."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import fp8_ops
from flax.training.train_state import TrainState
from helpers import assert_same_bits, bits

import jscale

pytestmark = pytest.mark.usefixtures("standard_promotion")

INF = jnp.inf
X = jax.random.normal(jax.random.key(0), (8, 16))
Y = jnp.sin(X @ jnp.linspace(-1, 1, 16)[:, None])


def equations(jaxpr):
    """All of a program, with what is inside its calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def products(fun, *args):
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]


# One loop


FORMATS = {  # dtype of the products, and their precision
    "float32": (jnp.float32, "highest"),
    "tf32": (jnp.float32, "tensorfloat32"),
    "bfloat16": (jnp.bfloat16, None),
    "float16": (jnp.float16, None),
}


def precision(name):
    return (
        jax.default_matmul_precision(FORMATS[name][1])
        if FORMATS[name][1]
        else (contextlib.nullcontext())
    )


def start(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(1), 2)
    draw = lambda key, *shape: (jax.random.normal(key, shape) / shape[0] ** 0.5).astype(dtype)
    return {"w1": draw(keys[0], 16, 32), "b": jnp.zeros(32, dtype), "w2": draw(keys[1], 32, 1)}


def loss_fn(params, x, y):
    hidden = jnp.tanh(x.astype(params["w1"].dtype) @ params["w1"] + params["b"])
    return jnp.mean(jnp.square((hidden @ params["w2"]).astype(jnp.float32) - y))


inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))


def scaled_step(rule, fun):
    tx = jscale.with_loss_scale(inner, rule)

    def step(params, state, x, y):
        value_and_grad = jscale.value_and_grad(fun, jscale.loss_scale(state))
        loss, grads = value_and_grad(params, x, y)
        updates, state = tx.update(grads, state, params, loss=loss)
        return optax.apply_updates(params, updates), state, loss

    return tx, step


def bare_step(fun):
    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(fun)(params, x, y)
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return inner, step


RULES = {
    "off": jscale.off(),
    "static": jscale.static(2.0**8),
    "dynamic": jscale.dynamic(2.0**8, growth_interval=5),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rule", RULES)
def test_one_loop_trains_in_every_format(name, rule):
    half = jscale.autocast(loss_fn, compute_dtype=FORMATS[name][0])
    tx, step = scaled_step(RULES[rule], half)
    params, losses = start(), []
    state, step = tx.init(params), jax.jit(step)
    with precision(name):
        for _ in range(20):
            params, state, loss = step(params, state, X, Y)
            losses.append(loss)
    assert losses[-1] < losses[0] / 10 and step._cache_size() == 1
    found = jscale.metrics(state)
    assert (found["applied_steps"], found["skipped_steps"]) == (20, 0)
    assert found["grad_scale"] == {"off": 1, "static": 2**8, "dynamic": 2**12}[rule]
    assert ("grad_norm" in found) == (rule != "off")


def by_operation(tx, step, params):
    """Not compiled as a whole, where XLA contracts other operations in another program."""
    state, losses = tx.init(params), []
    for _ in range(2):
        params, state, loss = step(params, state, X, Y)
        losses.append(loss)
    return params, getattr(state, "inner", state), losses


@pytest.mark.parametrize("name", FORMATS)
def test_off_is_the_bare_optimizer_and_so_is_a_power_of_two_but_in_float16(name):
    half = jscale.autocast(loss_fn, compute_dtype=FORMATS[name][0])
    with precision(name):
        want = by_operation(*bare_step(half), start())
        for rule in ["off"] + ["dynamic"] * (name != "float16"):
            assert_same_bits(by_operation(*scaled_step(RULES[rule], half), start()), want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_off_is_the_bare_optimizer_for_a_model_all_in_half_precision(dtype):
    """In float16, with NaN from moments in float16."""
    got = by_operation(*scaled_step(jscale.off(), loss_fn), start(dtype))
    assert_same_bits(got, by_operation(*bare_step(loss_fn), start(dtype)))
    assert got[0]["w1"].dtype == dtype


@pytest.mark.parametrize("name", ["float32", "tf32"])
@pytest.mark.parametrize("keep", [(), ["w2"]], ids=["all", "keep"])
def test_products_keep_the_precision_that_was_asked_for(name, keep):
    """In both passes; what `keep` leaves in float32 has it beside float16 too."""
    dtype = jnp.float16 if keep else jnp.float32
    fun = jscale.autocast(loss_fn, compute_dtype=dtype, keep=keep)
    with precision(name):
        plain = products(jax.grad(loss_fn), start(), X, Y)
        got = products(jscale.grad(fun, 8.0), start(), X, Y)
    asked = {eqn.params["precision"] for eqn in plain}
    assert len(asked) == 1 and asked != {None} and len(got) == len(plain) >= 3
    wide = [eqn for eqn in got if eqn.invars[0].aval.dtype == jnp.float32]
    assert {eqn.params["precision"] for eqn in wide} == asked
    assert (len(wide) < len(got)) == bool(keep)


# fp8: Flax passes the next value of some variables where their gradient would be


OVERWRITE = fp8_ops.OVERWRITE_WITH_GRADIENT
HISTORY = 4  # steps whose largest values Flax remembers; its default is 1024
OPS = {
    "direct": nn.Fp8DirectDotGeneralOp,
    "simulated": nn.Fp8DotGeneralOp,  # rounds to fp8, and multiplies what it rounded
}
both_ops = pytest.mark.parametrize("op", OPS)
fp8 = pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")


class Fp8Net(nn.Module):
    op: str = "direct"
    dtype: jnp.dtype = jnp.float32
    bias: bool = True

    def setup(self):
        make = lambda: OPS[self.op](amax_history_length=HISTORY)
        dense = lambda n: nn.Dense(n, self.bias, dtype=self.dtype, dot_general_cls=make)
        self.first, self.second, self.norm = dense(32), dense(1), nn.LayerNorm()

    def __call__(self, x):
        return self.second(jnp.tanh(self.norm(self.first(x))))


def fp8_loss(net):
    return lambda variables, x, y=Y: jnp.mean(
        jnp.square(net.apply(variables, x).astype(jnp.float32) - y)
    )


def meta(variables, name):
    """The fp8 variables whose name begins so."""
    flat = jax.tree.leaves_with_path(variables[OVERWRITE])
    return [x for path, x in flat if path[-1].key.startswith(name)]


def descend(variables, grads):
    move = lambda p, g: p - 0.1 * g
    return {"params": jax.tree.map(move, variables["params"], grads["params"])} | {
        OVERWRITE: grads[OVERWRITE]
    }


def follow(variables, ratio):
    """What fp8 layers remember of the cotangents, moved along with the loss scale."""

    def move(path, x):
        return x * ratio if path[-1].key.startswith("output_grad") else x

    return {**variables, OVERWRITE: jax.tree.map_with_path(move, variables[OVERWRITE])}


def fp8_runner(net, fun):
    """Gradients and variables of each step at a list of scales.

    The variables come from steps at a scale of 1: until something is remembered, Flax's scales are.
    """
    step = jax.jit(lambda variables, scale: jscale.grad(fun, scale)(variables, X))
    warm = net.init(jax.random.key(2), X)
    for _ in range(HISTORY):
        warm = descend(warm, step(warm, 1.0))

    def run(scales, follows):
        variables, out, before = warm, [], 1.0
        for k, scale in enumerate(scales):
            if follows or k == 0:
                variables = follow(variables, scale / before)
            grads, before = step(variables, scale), scale
            variables = descend(variables, grads)
            out.append((grads["params"], variables))
        return out

    return run


@fp8
@both_ops
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_loss_scale_changes_no_bit_of_fp8_training_if_the_history_follows(op, dtype):
    """Which is at the scale, and so is what Flax makes of it. A constant scale needs no more."""
    net = Fp8Net(op, dtype)
    run = fp8_runner(net, fp8_loss(net))
    plain = run([1.0] * 6, follows=False)
    for scales in ([2.0**12] * 6, [2.0**k for k in (12, 12, 13, 13, 10, 10)]):
        scaled = run(scales, follows=len(set(scales)) > 1)
        for scale, one, other in zip(scales, plain, scaled, strict=True):
            assert_same_bits(other[0], one[0])
            assert_same_bits(other[1], follow(one[1], scale))


def test_a_scale_that_grew_is_clipped_for_a_step_if_the_history_does_not_follow():
    """A lower one has room."""
    net = nn.Dense(4, dot_general_cls=lambda: OPS["direct"](amax_history_length=HISTORY))
    fun = lambda variables, x: jnp.mean(net.apply(variables, x))  # cotangents always as large
    run = fp8_runner(net, fun)
    runs = (run([8.0] * 2 + [8.0 * change] * 3, follows=False) for change in (1, 2, 0.5))
    steady, grown, shrunk = ([grads["kernel"] for grads, _ in run] for run in runs)
    assert_same_bits(shrunk, steady)
    # Cotangents up to 57344 times their fp8 scale; and nothing shows it.
    np.testing.assert_allclose(grown[2], steady[2] / 2, rtol=1e-6)
    assert_same_bits(grown[:2] + grown[3:], steady[:2] + steady[3:])


def test_the_first_step_knows_no_scale_and_clips_what_is_beyond_fp8():
    net = nn.Dense(4, dot_general_cls=lambda: OPS["direct"](amax_history_length=HISTORY))
    fun = lambda variables, x: jnp.mean(net.apply(variables, x))  # cotangents of 1 / 32
    variables = net.init(jax.random.key(2), X)
    kernel = lambda scale: jscale.grad(fun, scale)(variables, X)["params"]["kernel"]
    assert_same_bits(kernel(2.0**20), kernel(1.0))
    np.testing.assert_allclose(kernel(2.0**24), kernel(1.0) * (57344 / 2**19), rtol=1e-6)


@fp8
@both_ops
def test_training_with_fp8_layers_skips_and_goes_on(op):
    net = Fp8Net(op)
    tx = jscale.with_loss_scale(optax.adamw(3e-3), jscale.dynamic(2.0**8, growth_interval=10))
    state = TrainState.create(apply_fn=net.apply, params=net.init(jax.random.key(2), X), tx=tx)
    loss_of = fp8_loss(net)

    @jax.jit
    def step(state, x, y):
        scale = jscale.loss_scale(state)
        loss, grads = jscale.value_and_grad(loss_of, scale)(state.params, x, y)
        new = state.apply_gradients(grads=grads)
        overwrite = jscale.select(
            new.opt_state.finite, *(s.params[OVERWRITE] for s in (new, state))
        )
        params = follow({**new.params, OVERWRITE: overwrite}, jscale.loss_scale(new) / scale)
        return new.replace(params=params), loss, grads

    losses = []
    for k in range(40):
        bad = k in (3, 15, 16)
        new, loss, grads = step(state, X, Y.at[0].set(jnp.nan) if bad else Y)
        assert new.opt_state.finite == (not bad)
        if bad:
            kept = lambda s: bits((s.params["params"], s.opt_state.inner, meta(s.params, "input")))
            assert kept(new) == kept(state)
            halved = jax.tree.map(lambda x: x / 2, meta(state.params, "output_grad"))
            assert_same_bits(meta(new.params, "output_grad"), halved)
        else:
            losses.append(float(loss))
            norm = optax.tree.norm(grads["params"])
            np.testing.assert_allclose(new.opt_state.grad_norm, norm, rtol=1e-6)
        state = new
        assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(state.params))
    assert losses[-1] < losses[0] / 2


def test_autocast_leaves_fp8_products_as_they_are():
    """In both passes; what is beside them is float16."""
    net = Fp8Net()
    variables = net.init(jax.random.key(2), X)
    w = jax.random.normal(jax.random.key(3), (16, 16)) / 4
    fun = lambda variables, w: fp8_loss(net)(variables, X @ w)
    both = lambda fun: jax.grad(fun, argnums=(0, 1))
    operands = lambda fun: [
        tuple(str(v.aval.dtype) for v in eqn.invars) for eqn in products(both(fun), variables, w)
    ]
    plain, cast = operands(fun), operands(jscale.autocast(fun))
    is_fp8 = lambda pair: any("float8" in dtype for dtype in pair)
    assert [x for x in cast if is_fp8(x)] == [x for x in plain if is_fp8(x)] != []
    assert {x for x in cast if not is_fp8(x)} == {("float16", "float16")}


def test_an_overflow_that_an_fp8_layer_clips_skips_the_step():
    net = nn.Dense(4, use_bias=False, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    variables = net.init(jax.random.key(0), X)
    head = jnp.full((4, 3), 300.0)
    # The head's product overflows in float16 in what it passes on.
    fun = jscale.autocast(lambda variables: jnp.mean(net.apply(variables, X) @ head))
    right, grads = (jscale.grad(fun, scale)(variables) for scale in (1.0, 2.0**16))
    assert jnp.all(grads["params"]["kernel"] != right["params"]["kernel"])
    tx = jscale.with_loss_scale(optax.sgd(0.1))
    params = variables["params"]
    _, state = tx.update(grads["params"], tx.init(params), params)
    assert not state.finite


def test_an_old_overflow_in_the_history_of_an_fp8_layer_skips_nothing():
    net = nn.Dense(1, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    tx = jscale.with_loss_scale(optax.sgd(1e-2), jscale.static(1))
    state = TrainState.create(apply_fn=net.apply, params=net.init(jax.random.key(0), X), tx=tx)
    for spike in (1.0, jnp.inf, 1.0, 1.0):
        loss_fn = lambda params, spike=spike: spike * jnp.mean(net.apply(params, X))
        state = state.apply_gradients(grads=jscale.grad(loss_fn, 1.0)(state.params))
    assert state.opt_state.skipped_steps == 1 and state.opt_state.finite


def test_inf_in_the_data_of_an_fp8_layer_is_clipped_as_without_jscale():
    net = nn.Dense(1, use_bias=False, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    params = net.init(jax.random.key(0), X)
    loss_fn = lambda params: jnp.mean(net.apply(params, X.at[0, 0].set(jnp.inf)))
    assert_same_bits(jscale.grad(loss_fn, 1.0)(params), jax.grad(loss_fn)(params))


def test_a_layer_used_twice_remembers_the_larger_values_whatever_the_scale():
    """By Flax's own dtype of fp8 variables, whose gradients add up by the maximum."""
    net = nn.Dense(16, use_bias=False, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    variables = net.init(jax.random.key(0), X)

    def twice(variables):
        as_meta = lambda x: jax.lax.convert_element_type(x, fp8_ops.fm32)
        own = jax.tree.map(as_meta, variables[OVERWRITE])
        assert jscale.unscale(own, 8.0) == own
        apply = lambda x: net.apply({**variables, OVERWRITE: own}, x)
        return jnp.mean(jnp.square(apply(apply(X))))

    plain, scaled = (jax.jit(jscale.grad(twice, scale))(variables) for scale in (1.0, 2.0**10))
    assert_same_bits(scaled["params"], plain["params"])
    for name in ("input", "kernel", "output_grad_scale"):
        assert_same_bits(meta(scaled, name), meta(plain, name))
    assert_same_bits(meta(scaled, "output_grad_amax"), [1024 * meta(plain, "output_grad_amax")[0]])
    assert meta(plain, "kernel_amax")[0][0] == jnp.max(jnp.abs(variables["params"]["kernel"]))
