import contextlib
import functools
import inspect
import warnings

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jscale
from jscale import autocast, explain

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


# Orthogonal weights and tanh keep every error of a float16 product from growing.
def weights(seed, n=4):
    return jnp.asarray(np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))[0], F32)


X = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (4, 4)), F32)
W, V = weights(1), weights(2)


def inner_jaxprs(eqn):
    values = jax.tree.leaves([*eqn.params.values()], is_leaf=lambda x: hasattr(x, "eqns"))
    return [value for value in values if hasattr(value, "eqns")]


def equations(jaxpr):
    """All equations, those inside others too; inside of pallas_call is the kernel's business."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name != "pallas_call":
            for inner in inner_jaxprs(eqn):
                yield from equations(inner)


def traced(fun, *args, **kwargs):
    return [*equations(jax.make_jaxpr(fun)(*args, **kwargs))]


def products(fun, *args, **kwargs):
    """The dtype in which each product of `fun` runs: that of its operands, and of its result."""
    dtypes = []
    for eqn in traced(fun, *args, **kwargs):
        if eqn.primitive.name in PRODUCTS:
            atoms = [*eqn.invars[:2], *eqn.outvars]
            dtypes.append(">".join(dict.fromkeys(str(x.aval.dtype) for x in atoms)))
    return dtypes


def count(fun, name, *args):
    return sum(eqn.primitive.name == name for eqn in traced(fun, *args))


def residuals(fun, *args):
    """What the backward pass keeps: (shape, dtype)."""
    pullback = jax.eval_shape(lambda *xs: jax.vjp(fun, *xs)[1], *args)
    return [(x.shape, str(x.dtype)) for x in jax.tree.leaves(pullback)]


def mm(x, w, dtype=F16):
    """A product as it is cast by hand."""
    return (x.astype(dtype) @ w.astype(dtype)).astype(F32)


def total(fun):
    """A scalar of what `fun` returns, whose cotangents are all different."""

    def loss(*args):
        parts = [jnp.ravel(x) for x in jax.tree.leaves(fun(*args)) if x.dtype == F32]
        return sum(jnp.sum(x * jnp.cos(jnp.arange(x.size, dtype=F32))) for x in parts)

    return loss


def assert_close(got, want, tolerance=2.0**-7):
    """Equal up to the rounding of a few float16 products, relative to the norm.

    One product rounds two operands and a result, 3 * 2^-11 at the most; the programs here have up
    to 8 in a row, and an orthogonal matrix or a tanh makes no error larger. Roundings of different
    signs cancel in part, which makes half of the sum a safe bound.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = jnp.asarray(g), jnp.asarray(w)
        assert (g.shape, g.dtype, g.weak_type) == (w.shape, w.dtype, w.weak_type)
        if jnp.issubdtype(w.dtype, jnp.inexact):
            g, w = np.asarray(g), np.asarray(w)
            assert np.linalg.norm(g - w) <= tolerance * max(np.linalg.norm(w), 2.0**-7)


def custom_vjp(bwd, **options):
    """x @ w, with a rule of its own for the backward pass."""
    product = jax.custom_vjp(lambda x, w: x @ w, **options)
    product.defvjp(lambda x, w: (x @ w, (x, w)), bwd)
    return product


def custom_jvp():
    product = jax.custom_jvp(lambda x, w: x @ w)
    product.defjvp(lambda p, t: (product(*p), t[0] @ p[1] + p[0] @ t[1]))
    return product


def usual(kept, ct):
    x, w = kept
    return ct @ w.T, x.T @ ct


def sevenfold(kept, ct):
    x, w = kept
    return 7 * (ct @ w.T), 7 * (x.T @ ct)


# Bits


def relu_mlp(mm, x, w, v):
    return jax.nn.relu(mm(jax.nn.relu(mm(x, w)), v)) + x


def tanh_mlp(mm, x, w, v):
    return jnp.tanh(mm(jnp.tanh(mm(x, w)) + 1, v)) * 3


def attention(mm, x, w, v):
    scores = mm(x, w) * 2 + mm(x, v).T
    return mm(jax.nn.softmax(scores), x) / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True))


def recurrent(mm, x, w, v):
    def turn(carry, x):
        carry = jnp.tanh(mm(carry, w) + mm(x[None, :], v))
        return carry, carry[0]

    return lax.scan(turn, jnp.zeros((1, 4)), x)[1]


def convolution(conv, x, w, v):
    images, kernel = x.reshape(1, 1, 4, 4), w.reshape(1, 1, 4, 4)
    return jax.nn.relu(conv(images, kernel)) * v.reshape(1, 1, 4, 4)


def conv(x, k):
    return lax.conv(x, k, (1, 1), "SAME")


def cast_conv(x, k):
    return conv(x.astype(F16), k.astype(F16)).astype(F32)


NETS = [
    (relu_mlp, jnp.matmul, mm),
    (tanh_mlp, jnp.matmul, mm),
    (attention, jnp.matmul, mm),
    (recurrent, jnp.matmul, mm),
    (convolution, conv, cast_conv),
]
nets = pytest.mark.parametrize("net, as_written, by_hand", NETS, ids=[n.__name__ for n, *_ in NETS])


def one_by_one(fun):
    """`fun`, each operation by itself: called plainly, jax.numpy compiles some of them together."""
    return lambda *args: jaxpr_as_fun(jax.make_jaxpr(fun)(*args))(*args)[0]


def with_gradients(fun):
    return lambda *args: (fun(*args), jax.grad(total(fun), (0, 1, 2))(*args))


@nets
def test_without_recomputing_every_bit_is_that_of_casts_by_hand(net, as_written, by_hand):
    fun = autocast(functools.partial(net, as_written), recompute=False)
    hand = functools.partial(net, by_hand)
    assert_same_bits(*(jax.jit(with_gradients(f))(X, W, V) for f in (fun, hand)))
    assert_same_bits(*(with_gradients(f)(X, W, V) for f in (fun, one_by_one(hand))))


@nets
def test_with_recomputing_values_have_the_same_bits(net, as_written, by_hand):
    # XLA may fuse a recomputed chain otherwise, so that for gradients this holds operation by
    # operation only, and not inside a compiled loop.
    fun, hand = autocast(functools.partial(net, as_written)), functools.partial(net, by_hand)
    assert_same_bits(*(jax.jit(f)(X, W, V) for f in (fun, hand)))
    got, want = (with_gradients(f)(X, W, V) for f in (fun, one_by_one(hand)))
    if net is recurrent:
        assert_close(got, want, 2.0**-9)
    else:
        assert_same_bits(got, want)


@nets
def test_a_compiled_recomputed_gradient_differs_by_roundings(net, as_written, by_hand):
    fun, hand = autocast(functools.partial(net, as_written)), functools.partial(net, by_hand)
    got = jax.jit(jax.grad(total(fun), (0, 1, 2)))(X, W, V)
    assert_close(got, jax.jit(jax.grad(total(hand), (0, 1, 2)))(X, W, V), 2.0**-9)


def test_bfloat16_works_likewise():
    got = autocast(functools.partial(tanh_mlp, jnp.matmul), BF16)(X, W, V)
    want = tanh_mlp(functools.partial(mm, dtype=BF16), X, W, V)
    assert_same_bits(got, want)


# What float16 cannot hold (each seen to go wrong in some library)


def through(x):
    """x, by way of a product."""
    return x @ jnp.eye(x.shape[-1])


def test_sums_and_variances_are_taken_in_float32():
    assert autocast(lambda x: jnp.sum(through(x)))(jnp.ones((70000, 1))) == 70000
    assert autocast(lambda x: jnp.var(through(x)))(jnp.array([[0.0, 600.0]])) == 90000
    assert autocast(lambda x: jnp.sum(through(x) ** 2))(jnp.full((4, 4), 300.0)) == 16 * 90000
    assert autocast(lambda x: jnp.linalg.norm(through(x)))(jnp.full((2, 2), 300.0)) == 600
    assert autocast(lambda x: jnp.vdot(through(x), x))(jnp.full((2, 2), 300.0)) == 360000
    mean = autocast(jax.grad(lambda x: jnp.mean(through(x) ** 2)))(jnp.full((4, 4), 300.0))
    np.testing.assert_array_equal(mean, np.full((4, 4), 37.5))


def test_log_softmax_of_large_logits_has_a_finite_gradient():
    def loss(x):
        return -jnp.mean(jax.nn.log_softmax(through(x) * 4)[:, 0])

    value, grads = jax.value_and_grad(autocast(loss))(X * 2.0**14)
    assert np.isfinite(value) and np.isfinite(grads).all()
    lse = autocast(lambda x: jax.nn.logsumexp(through(x)))(jnp.zeros((65536, 1)))
    np.testing.assert_allclose(lse, 16 * np.log(2), rtol=1e-6)


def test_an_eps_that_float16_rounds_to_zero_counts():
    def normed(x):
        h = through(x)
        return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-8)

    value, pullback = jax.vjp(autocast(normed), jnp.zeros((4, 4)))
    np.testing.assert_array_equal(value, np.zeros((4, 4)))
    # 1 / sqrt(1e-8), rounded on its way through the backward product
    np.testing.assert_allclose(pullback(jnp.ones((4, 4)))[0], 1e4, rtol=2.0**-11)


def test_masks_are_beyond_float16_and_a_masked_row_is_finite():
    def masked(x, mask):
        return jax.nn.softmax(jnp.where(mask, through(x), -1e9)) @ x

    mask = jnp.tril(jnp.ones((4, 4), bool), -1)
    value, grads = jax.value_and_grad(total(autocast(masked)))(X, mask)
    assert np.isfinite(value) and np.isfinite(grads).all()
    np.testing.assert_allclose(autocast(masked)(X, mask)[0], X.mean(0), atol=2.0**-10)


@pytest.mark.parametrize("approximate", [True, False])
def test_gelu_cubes_in_float32(approximate):
    gelu = functools.partial(jax.nn.gelu, approximate=approximate)
    value, grads = jax.value_and_grad(autocast(lambda x: gelu(through(x)).sum()))(
        jnp.full((4, 4), 60.0)
    )
    assert value == 960
    np.testing.assert_array_equal(grads, np.ones((4, 4)))


def test_positions_and_tables_made_of_them_are_exact():
    def tables(x):
        places = jnp.arange(4096)
        angles = places.astype(F32)[:, None] * jnp.asarray([[1.0, 0.1]], F32)
        return places, angles, jnp.sin(angles), jnp.cumsum(jnp.ones(4096)), x @ x

    *got, _ = autocast(tables)(X)
    *want, _ = tables(X)
    assert_same_bits(got, want)


def test_probabilities_near_one_have_a_finite_logarithm():
    loss = autocast(lambda x: -jnp.sum(jnp.log(1 - jax.nn.sigmoid(through(x)))))
    value, grads = jax.value_and_grad(loss)(jnp.full((1, 1), 9.25))
    np.testing.assert_allclose(value, 9.25, rtol=1e-3)
    np.testing.assert_allclose(grads, 1, rtol=1e-3)


def test_a_checkpoint_recomputes_in_the_same_dtypes():
    fun = autocast(jax.checkpoint(lambda x, w, v: jnp.tanh(jnp.tanh(x @ w) @ v)))
    assert set(products(jax.grad(total(fun), (0, 1, 2)), X, W, V)) == {"float16"}
    hand = jax.checkpoint(lambda x, w, v: jnp.tanh(mm(jnp.tanh(mm(x, w)), v)))
    assert_same_bits(*(jax.grad(total(f), (0, 1, 2))(X, W, V) for f in (fun, hand)))


def test_no_cast_outlives_its_call():
    fun = autocast(lambda x, w: x @ w)
    for scale in (1, 2, 4):
        np.testing.assert_array_equal(fun(X, W * scale), mm(X, W * scale))


# Casts


def casts(fun, *args):
    eqns = traced(fun, *args)
    return [
        (str(e.invars[0].aval.dtype), str(e.outvars[0].aval.dtype))
        for e in eqns
        if e.primitive.name == "convert_element_type"
    ]


MOVES = {
    "nothing": lambda y: y,
    "transpose": lambda y: y.T,
    "reshape": lambda y: y.reshape(2, 2, 4).reshape(4, 4),
    "heads": lambda y: jnp.swapaxes(y.reshape(2, 2, 2, 2), 1, 2).reshape(4, 4),
    "flip": lambda y: jnp.flip(y)[::-1],
    "new_axis": lambda y: y[None].reshape(4, 4),
    "slice": lambda y: y[:2][:, 1:3].reshape(1, 4),
    "named": lambda y: checkpoint_name(y, "y"),
    "jit": lambda y: jax.jit(lambda y: y.T)(y),
    "jit_in_jit": lambda y: jax.jit(jax.jit(lambda y: y.T))(y),
}


@pytest.mark.parametrize("move", MOVES)
def test_from_product_to_product_nothing_is_widened(move):
    fun = autocast(lambda x, w: MOVES[move](x @ w) @ w, recompute=False)
    got = casts(fun, X, W)
    assert got.count(("float32", "float16")) == 3  # x, and w twice
    assert got.count(("float16", "float32")) == 1  # the result


def test_a_layer_that_casts_by_hand_gets_no_more_casts():
    def layer(x, w):
        return mm(jnp.tanh(mm(x, w)), w)

    got, written = casts(autocast(layer, recompute=False), X, W), casts(layer, X, W)
    assert {*got} == {*written}
    assert all(got.count(cast) <= written.count(cast) for cast in got)


@pytest.mark.parametrize("recompute", [True, False])
def test_gradients_of_what_is_used_often_are_summed_in_float32(recompute):
    # Cotangents of one cast for all uses would meet in float16, where 70 * 1000 is inf.
    row = jnp.ones((1, 4))

    def often(w, x):
        return jnp.concatenate([(x @ w) * 1000 for _ in range(70)])

    fun = autocast(often, recompute=recompute)
    got = jax.grad(lambda w: jnp.sum(fun(w, row)))(W)
    np.testing.assert_array_equal(got, np.full((4, 4), 70000))


# Who decides: the code


def half_model(dtype):
    def model(params, x):
        def layer(x, w):
            h = jnp.tanh(x @ w.astype(dtype))
            return jax.jit(lambda h: (h @ h.T @ h).astype(dtype))(h), h.sum(dtype=F32)

        x, sums = lax.scan(jax.checkpoint(layer), x.astype(dtype), params)
        x = lax.cond(sums[0] > 0, lambda x: x @ x, lambda x: x.T, x)
        return jnp.dot(x, x, preferred_element_type=F32), custom_jvp()(x, x)

    return model


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_half_precision_model_is_unchanged(dtype):
    model, args = half_model(dtype), (jnp.stack([W, V]), X)
    assert str(jax.make_jaxpr(autocast(model))(*args)) == str(jax.make_jaxpr(model)(*args))


def test_float64_complex_and_integer_products_are_unchanged():
    def integers(a):
        return a @ a, lax.dot(a, a, preferred_element_type=jnp.int32)

    cases = [(integers, jnp.full((4, 4), 100, jnp.int8)), (lambda a: a @ a, lax.complex(X, W))]
    for fun, a in cases:
        assert str(jax.make_jaxpr(autocast(fun))(a)) == str(jax.make_jaxpr(fun)(a))
    with jax.enable_x64():
        double, fun = X.astype(jnp.float64), lambda a, w: jnp.tanh(a @ w) @ w
        w = W.astype(jnp.float64)
        assert str(jax.make_jaxpr(autocast(fun))(double, w)) == str(jax.make_jaxpr(fun)(double, w))
        assert products(autocast(fun), X, W) == ["float16", "float16"]
        assert_close(autocast(fun)(X, W), fun(X, W))


def test_integers_multiplied_into_float32_are_unchanged():
    fun = lambda a: lax.dot(a, a.T, preferred_element_type=F32)
    codes = jnp.full((4, 8), 127, jnp.int8)
    np.testing.assert_array_equal(autocast(fun)(codes), fun(codes))


def test_a_precision_in_the_code_wins_and_that_of_the_session_does_not():
    def fun(x, w):
        with jax.default_matmul_precision("highest"):
            y = x @ w
        return y @ w, jnp.dot(x, w, precision="highest"), jnp.dot(x, w, precision="default")

    assert products(autocast(fun), X, W) == ["float32", "float16", "float32", "float16"]
    with jax.default_matmul_precision("highest"):
        assert products(autocast(jnp.matmul), X, W) == ["float16"]
        assert products(autocast(conv), X[None, None], W[None, None]) == ["float16"]


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_what_was_computed_in_half_precision_and_cast_up_stays_float32(dtype):
    half = lambda x: jnp.sin(x.astype(dtype))
    cases = [
        lambda x, w: half(x).astype(F32) @ w,
        lambda x, w: w @ half(x).astype(F32).T,
        lambda x, w: jnp.einsum("ij,jk->ki", half(x).astype(F32), w),
        lambda x, w: half(x).reshape(2, 8).astype(F32).reshape(4, 4) @ w,
        lambda x, w: jax.vmap(lambda x: x.astype(F32) @ w)(half(x)),
        lambda x, w: jax.nn.dot_product_attention(*[half(x).astype(F32).reshape(1, 4, 2, 2)] * 3),
    ]
    for fun in cases:
        assert set(products(autocast(fun), X, W)) == {"float32"}


def with_jvp(fun):
    function = jax.custom_jvp(fun)
    function.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
    return function


def with_vjp(fun):
    function = jax.custom_vjp(fun)
    function.defvjp(lambda *xs: jax.vjp(fun, *xs), lambda pullback, ct: pullback(ct))
    return function


CALLS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda fun: lambda *xs: lax.cond(True, fun, fun, *xs),
    "scan": lambda fun: lambda *xs: lax.scan(lambda c, _: (c, fun(*xs)), 0, length=2)[1],
    "while": lambda fun: (
        lambda *xs: lax.fori_loop(0, jnp.int32(2), lambda i, y: fun(*xs), fun(*xs))
    ),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "vmap": lambda fun: (
        lambda x, *w: jax.vmap(fun, (0, *[None] * len(w)))(x.reshape(1, 4, 4), *w).reshape(4, 4)
    ),
    "shard_map": lambda fun: (
        lambda *xs: jax.shard_map(fun, mesh=mesh(1), in_specs=(P(),) * len(xs), out_specs=P())(*xs)
    ),
}
calls = pytest.mark.parametrize("call", CALLS)


def mesh(*shape, names=("d", "e"), explicit=False):
    kind = (AxisType.Explicit if explicit else AxisType.Auto,) * len(shape)
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names[: len(shape)], axis_types=kind, devices=devices)


@calls
def test_a_cast_by_hand_counts_inside_a_call(call):
    inside = CALLS[call](lambda h, w: h.astype(F32) @ w)
    assert set(products(autocast(lambda x, w: inside(jnp.sin(x.astype(F16)), w)), X, W)) == {
        "float32"
    }


@calls
def test_a_cast_by_hand_counts_for_the_operand_of_a_call(call):
    inside = CALLS[call](lambda h, w: h @ w)
    fun = lambda x, w: inside(jnp.sin(x.astype(F16)).astype(F32), w)
    assert set(products(autocast(fun), X, W)) == {"float32"}


@calls
def test_a_cast_by_hand_counts_for_the_result_of_a_call(call):
    inside = CALLS[call](lambda x: jnp.sin(x.astype(F16)).astype(F32))
    fun = lambda x, w: inside(x).reshape(-1, 4) @ w
    assert set(products(autocast(fun), X, W)) == {"float32"}


@calls
def test_a_parameter_stored_in_half_precision_multiplies_in_half_precision(call):
    inside = CALLS[call](lambda x, w: x @ w.astype(F32))
    assert set(products(autocast(inside), X, W.astype(F16))) == {"float16"}
    assert set(products(autocast(inside), X.astype(F32), W.astype(BF16))) == {"float16"}


def test_a_stored_stack_of_half_precision_multiplies_in_half_precision():
    def fun(x, stack):
        x, _ = lax.scan(lambda x, w: (x @ w.astype(F32), None), x, stack)
        return x @ stack[1].astype(F32)

    assert products(autocast(fun), X, jnp.stack([W, V]).astype(F16)) == ["float16"] * 2


def test_a_part_of_a_parameter_is_that_parameter():
    def fun(p, x, i):
        q, k = jnp.split(p["qk"].astype(F32), 2, axis=1)
        return x @ p["stack"][i].astype(F32) @ q @ k

    p = dict(stack=jnp.stack([W, V]), qk=jnp.concatenate([W, V], axis=1))
    half, i = jax.tree.map(lambda w: w.astype(F16), p), jnp.int32(1)
    assert products(autocast(fun), half, X, i) == ["float16"] * 3
    assert products(autocast(fun, keep="stack"), p, X, i) == ["float32", "float16", "float16"]
    assert products(autocast(fun, keep="qk"), p, X, i) == ["float16", "float32", "float32"]


def test_a_closed_over_parameter_in_half_precision_is_like_an_argument():
    stored = W.astype(F16)
    assert products(autocast(lambda x: x @ stored.astype(F32)), X) == ["float16"]
    fun = lambda x, w: autocast(lambda x: x @ w.astype(F32))(x)
    assert products(jax.grad(total(fun)), X, stored) == ["float16"] * 2


def test_inner_products_and_only_those_are_sums():
    assert products(autocast(jnp.vdot), X, W) == ["float32"]
    assert products(autocast(jax.vmap(jnp.dot)), X, W) == ["float32"]
    assert products(autocast(lambda x, w: x[0] @ w), X, W) == ["float16"]
    assert products(autocast(lambda x, w: jnp.einsum("ij,ij->i", x, w)), X, W) in ([], ["float32"])


# Who decides: patterns


def block(call, inner=None):
    """Two products: that of params["outer"]["w"], and inside `call` that of params["b"]["wo"]."""
    product = CALLS[call](lambda x, w: (inner or jnp.matmul)(x, w))
    if call == "custom_jvp":
        product.defjvp(lambda p, t: jax.jvp(lambda x, w: (inner or jnp.matmul)(x, w), p, t))
    if call == "custom_vjp":
        op = inner or jnp.matmul
        forward = lambda x, w: jax.vjp(op, x, w)
        product.defvjp(forward, lambda pullback, ct: pullback(ct))

    def head(x, w):
        return product(x, w)

    def fun(params, x):
        h = jnp.tanh(x @ params["outer"]["w"])
        with jax.named_scope("head"):
            h = jax.jit(head)(h, params["b"]["wo"])
        return jnp.sin(h.reshape(-1, 4)).sum(0)

    return fun


PARAMS = {"outer": {"w": W}, "b": {"wo": V}}
differentiable = pytest.mark.parametrize("call", [call for call in CALLS if call != "while"])
ways = pytest.mark.parametrize("pattern", ["wo", "b/wo", "?/w*", "head", "he*d", "b"])


def rows(fun, *args):
    return sorted(products(fun, *args))


@calls
@ways
def test_keep_finds_operations_by_scope_function_and_argument(call, pattern):
    fun = block(call)
    got = products(autocast(fun, keep=pattern), PARAMS, X)
    assert got == ["float16"] + ["float32"] * (len(got) - 1) and len(got) > 1


@differentiable
@pytest.mark.parametrize("pattern", ["wo", "head"])
def test_what_is_kept_is_kept_in_the_gradient(call, pattern):
    fun = block(call)
    got = products(jax.grad(total(autocast(fun, keep=pattern))), PARAMS, X)
    # The outer product, and its cotangent of w: x gets no gradient.
    assert got.count("float16") == 2 and set(got) == {"float16", "float32"}


@differentiable
@pytest.mark.parametrize("pattern", ["wo", "head"])
def test_a_result_in_float32_goes_beyond_float16_and_its_backward_products_do_not(call, pattern):
    fun = block(call, inner=lambda x, w: (x * 2.0**9 @ w) * 2.0**-18)
    params = PARAMS | {"b": {"wo": V * 2.0**9}}
    assert not np.isfinite(autocast(fun)(params, X)).all()
    wide = autocast(fun, f32_results=pattern)
    assert_close(wide(params, X), fun(params, X))
    got = products(jax.grad(total(wide)), params, X)
    assert "float16>float32" in got and "float32" not in got
    if "custom" not in call:  # whose rule is in the scope too: its products are asked for as well
        assert got.count("float16") >= 4  # the outer one, its weight's, and two of the inner one


@calls
@pytest.mark.parametrize("pattern", ["dot_general", "dot_*", "*"])
def test_keep_finds_primitives(call, pattern):
    assert set(products(autocast(block(call), keep=pattern), PARAMS, X)) == {"float32"}


def test_everything_kept_is_the_function_itself():
    fun = block("jit")
    kept = autocast(fun, keep="*")
    assert str(jax.make_jaxpr(kept)(PARAMS, X)) == str(jax.make_jaxpr(fun)(PARAMS, X))


def test_also_casts_what_is_asked_for_in_values_and_gradients():
    fun = lambda x, w: jnp.sum(jnp.sin(jnp.tanh(x @ w)))
    hand = lambda x, w: jnp.sum(jnp.sin(jnp.tanh(mm(x, w).astype(F16)).astype(F32)))
    cast = autocast(fun, also="tanh", recompute=False)
    assert_same_bits(*(jax.value_and_grad(f, (0, 1))(X, W) for f in (cast, hand)))


@pytest.mark.parametrize("options", [{}, {"keep": "dot_general"}], ids=["also", "keep_and_also"])
@pytest.mark.parametrize("name", ["softplus", "act"])
def test_a_value_does_not_depend_on_being_differentiated(name, options):
    @jax.custom_jvp
    def act(x, w):
        with jax.named_scope("exponent"):
            return jnp.exp(x @ w)

    act.defjvp(lambda p, t: jax.jvp(lambda x, w: jnp.exp(x @ w), p, t))

    def fun(x, w):
        with jax.named_scope("act"):
            return jnp.sum(jax.nn.softplus(act(x, w)))

    cast = autocast(fun, also=name, recompute=False, **options)
    assert_same_bits(cast(X, W), jax.value_and_grad(cast)(X, W)[0])


def test_also_over_dropout_and_positions():
    def fun(x, w, key):
        with jax.named_scope("mlp"):
            h = jnp.tanh(x @ w) * lax.iota(F32, 4)[:, None].reshape(4, 1)
            return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), 2 * h, 0.0)

    cast, key = autocast(fun, also="mlp"), jax.random.key(0)
    assert_close(cast(X, W, key), fun(X, W, key))
    assert_close(jax.jit(cast)(X, W, key), fun(X, W, key))


@pytest.mark.parametrize("also", ["scatter-add", "pool", "reduce"])
def test_also_leaves_what_is_written_for_float32_alone(also):
    def fun(x, w):
        with jax.named_scope("pool"):
            x = jax.ops.segment_sum(x @ w, jnp.array([0, 1, 1, 0]), 2)
            return lax.reduce(x @ w, 0.0, lambda a, b: a + jnp.abs(b), (0,))

    cast = autocast(fun, also=also)
    assert_close(cast(X, W), fun(X, W))
    assert products(cast, X, W) == ["float16"] * 2


def test_also_leaves_the_types_of_a_callback_alone():
    double = lambda x: np.asarray(x) * np.asarray(x).dtype.type(2)
    fun = lambda x, w: jax.pure_callback(double, jax.ShapeDtypeStruct((4, 4), F32), x @ w) @ w
    cast = autocast(fun, also="*")
    assert_close(cast(X, W), fun(X, W))
    assert_close(jax.jit(cast)(X, W), fun(X, W))


def test_keep_is_stronger_than_also():
    got = traced(autocast(lambda x: jnp.tanh(x) @ x, keep="tanh", also="*"), X)
    assert {e.outvars[0].aval.dtype for e in got if e.primitive.name == "tanh"} == {jnp.dtype(F32)}


def test_a_pattern_names_no_argument_of_a_rule_of_its_own():
    product = custom_vjp(usual)
    cast = autocast(lambda ws, x: product(x @ ws[0], ws[1]), keep="0/0")
    assert products(jax.grad(total(cast)), [W, V], X).count("float16") == 3


@pytest.mark.parametrize("option", ["keep", "also", "f32_results"])
def test_a_pattern_that_names_nothing_is_told(option):
    fun = autocast(lambda x, w: x @ w, **{option: ("dot_general", "decoder/wo", "dec*")})
    with pytest.warns(UserWarning, match=r"dec\*, decoder/wo matched no"):
        fun(X, W)
    with pytest.warns(UserWarning, match="jscale.explain"):
        jax.jit(fun)(X, W)


@pytest.mark.parametrize(
    "given, error, said",
    [
        (dict(compute_dtype=jnp.int32), ValueError, "compute_dtype must be float16, bfloat16 or"),
        (dict(compute_dtype="fp16"), ValueError, "got 'fp16'"),
        (dict(compute_dtype=None), ValueError, "got None"),
        (dict(compute_dtype=jnp.float64), ValueError, "float64"),
        (dict(recompute=1), TypeError, "recompute must be True or False, got 1"),
        (dict(recompute="no"), TypeError, "got 'no'"),
        (dict(keep=[1]), TypeError, "keep takes names of operations"),
        (dict(also=b"exp"), TypeError, "also takes names of operations"),
        (dict(f32_results="/"), TypeError, "f32_results takes names of operations"),
        (dict(keep=""), TypeError, "keep takes names of operations"),
        (dict(keep=5), TypeError, "keep takes names of operations.*got 5"),
        (dict(keep=None), TypeError, "keep takes names of operations.*got None"),
    ],
)
def test_bad_options_are_errors(given, error, said):
    with pytest.raises(error, match=said):
        autocast(jnp.matmul, **given)
    if "recompute" not in given:
        with pytest.raises(error, match=said):
            explain(jnp.matmul, **given)


@pytest.mark.parametrize("transform", [autocast, explain])
def test_what_is_not_a_function_is_an_error(transform):
    with pytest.raises(TypeError, match=r"fun must be a function, got float32\[4,4\]"):
        transform(X)


@pytest.mark.parametrize("name", ["float16", "half", np.float16, np.dtype("float16"), F16])
def test_dtypes_have_their_usual_names(name):
    assert products(autocast(jnp.matmul, name), X, W) == ["float16"]


# One autocast in another


def test_the_inner_autocast_decides():
    full, brain = autocast(jnp.matmul, F32), autocast(jnp.matmul, BF16)
    fun = autocast(lambda x, w: full(jnp.tanh(brain(jnp.tanh(x @ w), w)), w))
    assert products(fun, X, W) == ["float16", "bfloat16", "float32"]
    grads = products(jax.grad(total(fun), (0, 1)), X, W)
    assert {name: grads.count(name) for name in set(grads)} == dict.fromkeys(set(grads), 3)
    kept = autocast(jnp.matmul, keep="dot_general")
    assert products(autocast(lambda x, w: kept(x, w) @ w), X, W) == ["float32", "float16"]


@calls
def test_the_inner_autocast_decides_inside_a_call(call):
    product = jax.custom_vjp(jnp.matmul)
    product.defvjp(lambda x, w: (x @ w, (x, w)), usual)
    full = autocast(product, F32)
    inner = CALLS[call](full)
    if call == "custom_jvp":
        inner = autocast(custom_jvp(), F32)
    if call == "custom_vjp":
        inner.defvjp(lambda x, w: (full(x, w), (x, w)), usual)
    fun = autocast(lambda x, w: inner(x @ w, w))
    got = products(fun, X, W)
    assert got[0] == "float16" and set(got[1:]) == {"float32"}
    if call not in ("while", "custom_vjp"):  # whose rule here is not all in the inner one
        grads = products(jax.grad(total(fun), (0, 1)), X, W)
        assert grads.count("float16") == 3 and set(grads) == {"float16", "float32"}


def test_an_inner_autocast_around_a_gradient_decides():
    full = autocast(jax.grad(lambda x, w: jnp.sum(jnp.tanh(x @ w))), F32)
    fun = autocast(lambda x, w: jax.jit(full)(x @ w, w))
    assert products(fun, X, W) == ["float16"] + ["float32"] * 2
    outside = autocast(
        lambda x, w: jax.grad(lambda x: autocast(jnp.vecdot, F32)(x @ w, x).sum())(x)
    )
    assert set(products(outside, X, W)) <= {"float16", "float32"}


def test_the_same_autocast_twice_is_the_same_as_once():
    once = autocast(lambda x, w: jnp.tanh(x @ w) @ w)
    assert_same_bits(autocast(once)(X, W), once(X, W))
    grads = [jax.grad(total(f), (0, 1))(X, W) for f in (once, autocast(once, recompute=False))]
    assert_same_bits(*grads)


# Programs inside programs


def scan_programs():
    def turn(w):
        return lambda c, x: (jnp.tanh(c @ w), c[0] * x[0])

    def scan(**options):
        return lambda x, w, v: lax.scan(turn(w), x, jnp.concatenate([x, x]), **options)

    yield "scan", scan()
    yield "scan_reverse", scan(reverse=True)
    yield "scan_unroll", scan(unroll=2)
    yield "scan_unroll_all", scan(unroll=True)
    yield "scan_length", lambda x, w, v: lax.scan(lambda c, _: (c @ w, None), x, length=3)[0]
    yield "scan_once", lambda x, w, v: lax.scan(lambda c, _: (c @ w, c.T @ v), x, length=1)
    yield "scan_never", lambda x, w, v: lax.scan(lambda c, _: (c @ w, None), x, length=0)[0] @ v
    yield (
        "scan_weak",
        lambda x, w, v: lax.scan(
            lambda c, y: ((c[0] + 1, c[1] * 0.5), (y @ w)[0, 0]), (0, 1.0), jnp.stack([x, x])
        ),
    )
    yield (
        "scan_tree",
        lambda x, w, v: lax.scan(
            lambda c, p: ({"a": jnp.tanh(c["a"] @ p["w"]), "n": c["n"] + 1}, c["n"]),
            {"a": x, "n": jnp.int32(0)},
            {"w": jnp.stack([w, v])},
        ),
    )
    yield "map", lambda x, w, v: lax.map(lambda row: row @ w, x)
    yield "associative", lambda x, w, v: lax.associative_scan(jnp.matmul, jnp.stack([w, v, w, v]))
    yield "fori", lambda x, w, v: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w), x)
    yield (
        "checkpoint_in_scan",
        lambda x, w, v: lax.scan(
            jax.checkpoint(lambda c, w: (jnp.tanh(jnp.tanh(c @ w) @ v), None)), x, jnp.stack([w, v])
        )[0],
    )


def call_programs():
    yield "jit", lambda x, w, v: jax.jit(lambda x: jnp.tanh(x @ w))(x @ v)
    yield "jit_in_jit", lambda x, w, v: jax.jit(jax.jit(lambda y: (y @ w, y)))(x @ v)[0]
    static = jax.jit(lambda x, w, n: (x @ w) * n, static_argnums=2)
    yield "jit_static", lambda x, w, v: static(x, w, 3) + static(x, v, 2)
    named = jax.jit(lambda x, w, flip=False: w @ x if flip else x @ w, static_argnames="flip")
    yield "jit_static_name", lambda x, w, v: named(x, w, flip=True) + named(x, v)
    donate = jax.jit(lambda x, w: jnp.tanh(x) @ w, donate_argnums=0)
    yield "jit_donate", lambda x, w, v: donate(x @ w, v)
    twice = jax.jit(lambda x, y: (x @ y, x, x))
    yield "jit_same_operand", lambda x, w, v: twice(x @ w, x @ w)[:2]
    yield "jit_constant", lambda x, w, v: jax.jit(lambda x: (x @ w, 1.0, jnp.arange(2)))(x)
    yield "jit_identity", lambda x, w, v: jax.jit(lambda x, y: (y, x))(x @ w, w @ v)
    yield "inline", lambda x, w, v: jax.jit(lambda x: jnp.tanh(x @ w), inline=True)(x @ v)
    dots = jax.checkpoint_policies.dots_saveable
    for name, policy in (("all", None), ("dots", dots)):
        yield (
            f"checkpoint_{name}",
            lambda x, w, v, policy=policy: jax.checkpoint(
                lambda x: jnp.tanh(jnp.tanh(x @ w) @ v), policy=policy
            )(x),
        )
    yield "cond", lambda x, w, v: lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: w.T, x @ v)
    yield (
        "switch",
        lambda x, w, v: lax.switch(
            jnp.int32(1), [lambda x: x, lambda x: jnp.tanh(x @ w), lambda x: v], x @ v
        ),
    )
    yield "vmap", lambda x, w, v: jax.vmap(lambda row: jnp.tanh(row @ w) @ v)(x)
    yield (
        "vmap_axis",
        lambda x, w, v: jax.vmap(lambda x: lax.pmean(x @ w, "b"), axis_name="b")(jnp.stack([x, v])),
    )
    yield "grad", lambda x, w, v: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w) @ v))(x)
    yield "jvp", lambda x, w, v: jax.jvp(lambda x: jnp.tanh(x @ w), (x,), (v,))
    gs = jnp.array([1, 3], jnp.int32)
    yield "ragged", lambda x, w, v: lax.ragged_dot(jnp.tanh(x), jnp.stack([w, v]), gs)
    yield "conv", lambda x, w, v: conv(jnp.tanh(x)[None, None], w[None, None])
    yield "einsum", lambda x, w, v: jnp.einsum("ij,jk,lk->il", x, w, v)
    yield (
        "several",
        lambda x, w, v: (
            jnp.argmax(x @ w, -1),
            jnp.sort(x @ w),
            lax.top_k(x @ v, 2),
        ),
    )


def closed_custom_vjp(constant):
    closed = jax.custom_vjp(lambda x: x @ constant)
    closed.defvjp(lambda x: (x @ constant, None), lambda _, ct: (7 * (ct @ constant.T),))
    return lambda x, w, v: closed(x @ w)


def custom_programs():
    one, seven, rule = custom_vjp(usual), custom_vjp(sevenfold), custom_jvp()
    yield "custom_vjp", lambda x, w, v: one(one(x, w), v)
    yield "custom_vjp_wrong", lambda x, w, v: jnp.tanh(seven(x, w))
    lazy = custom_vjp(lambda kept, ct: (ct @ kept[1].T, None))
    yield "custom_vjp_none", lambda x, w, v: lazy(x, w) @ v
    yield (
        "custom_vjp_scan",
        lambda x, w, v: lax.scan(lambda c, w: (jnp.tanh(seven(c, w)), None), x, jnp.stack([w, v]))[
            0
        ],
    )
    yield "custom_vjp_jit", lambda x, w, v: jax.jit(one)(x @ w, v)
    yield "custom_vjp_checkpoint", lambda x, w, v: jax.checkpoint(one)(x @ w, v)
    yield "custom_vjp_vmap", lambda x, w, v: jax.vmap(one)(*(jnp.stack([a, a]) for a in (x, w)))

    nondiff = jax.custom_vjp(lambda f, x, w, n: f(x @ w) * n.astype(F32), nondiff_argnums=(0,))
    nondiff.defvjp(
        lambda f, x, w, n: (nondiff(f, x, w, n), (x, w, n)),
        lambda f, kept, ct: (7 * (f(ct) @ kept[1].T), kept[0].T @ ct, None),
    )
    yield "custom_vjp_integer", lambda x, w, v: nondiff(jnp.tanh, x, w, jnp.int32(2))
    yield (
        "custom_vjp_integer_scan",
        lambda x, w, v: lax.scan(lambda c, n: (nondiff(jnp.tanh, c, w, n), None), x, jnp.arange(3))[
            0
        ],
    )
    pair = jax.custom_vjp(lambda x, w: (x @ w, jnp.argmax(x @ w, -1)))
    pair.defvjp(lambda x, w: (pair(x, w), (x, w)), lambda kept, ct: usual(kept, ct[0]))
    yield "custom_vjp_integer_result", lambda x, w, v: pair(x, w)
    dct = jax.custom_vjp(lambda p: {"y": p["x"] @ p["w"]})
    dct.defvjp(
        lambda p: (dct(p), p),
        lambda p, ct: (dict(zip("xw", usual((p["x"], p["w"]), ct["y"]), strict=True)),),
    )
    yield "custom_vjp_tree", lambda x, w, v: dct({"x": x, "w": w})["y"]
    # Constants of any kind may be closed over; only their gradients may not be asked for.
    for name, constant in (("numpy", np.asarray(V)), ("array", V + 0)):
        yield f"custom_vjp_closed_{name}", closed_custom_vjp(constant)

    @jax.custom_gradient
    def steep(x):
        y = x @ V
        return y, lambda ct: 5 * (ct @ V.T)

    yield "custom_gradient", lambda x, w, v: steep(x @ w)

    yield "custom_jvp", lambda x, w, v: jnp.tanh(rule(rule(x, w), v))
    wrong = jax.custom_jvp(lambda x, w: x @ w)
    wrong.defjvp(lambda p, t: (wrong(*p), 7 * (t[0] @ p[1])))
    yield "custom_jvp_wrong", lambda x, w, v: jnp.tanh(wrong(x, w))
    yield (
        "custom_jvp_scan",
        lambda x, w, v: lax.scan(lambda c, w: (jnp.tanh(wrong(c, w)), None), x, jnp.stack([w, v]))[
            0
        ],
    )
    closed = jax.custom_jvp(lambda x: x @ V)
    closed.defjvp(lambda p, t: (closed(*p), 7 * (t[0] @ V)))
    yield "custom_jvp_closed", lambda x, w, v: closed(x @ w)
    # A rule that holds another.
    outer = jax.custom_vjp(lambda x, w: jnp.tanh(rule(x, w)))
    outer.defvjp(lambda x, w: (outer(x, w), (x, w)), lambda kept, ct: sevenfold(kept, rule(ct, ct)))
    yield "custom_in_custom", lambda x, w, v: outer(x, w)


def sharded_programs():
    two, row = mesh(2), P("d", None)
    for vma in (True, False):

        def mapped(fun, *specs, out=None, vma=vma):
            out = P() if out is None else out
            return jax.shard_map(fun, mesh=two, in_specs=specs, out_specs=out, check_vma=vma)

        local = mapped(lambda x, w: jnp.tanh(lax.psum(x @ w, "d")), P(None, "d"), row)
        yield f"shard_map_{vma}", lambda x, w, v, local=local: local(x, w) @ v
        loop = mapped(
            lambda x, w: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0],
            row,
            P(),
            out=row,
        )
        yield f"shard_map_scan_{vma}", lambda x, w, v, loop=loop: loop(x, w)
        kept = mapped(jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w), row, P(), out=row)
        yield f"shard_map_checkpoint_{vma}", lambda x, w, v, kept=kept: kept(x, w)
        # A row-parallel layer as it is written by hand: its sum over the devices is inside.
        parallel = jax.custom_vjp(lambda x, w: lax.psum(x @ w, "d"))
        parallel.defvjp(lambda x, w: (parallel(x, w), (x, w)), usual)
        rules = mapped(parallel, P(None, "d"), row)
        if not vma:  # the rule above gives gradients that vary as its operands do not
            yield "shard_map_custom_vjp_psum", lambda x, w, v, rules=rules: rules(x, w)
        jvp = jax.custom_jvp(lambda x, w: lax.psum(x @ w, "d"))
        jvp.defjvp(lambda p, t, jvp=jvp: (jvp(*p), lax.psum(t[0] @ p[1] + p[0] @ t[1], "d")))
        rules = mapped(jvp, P(None, "d"), row)
        yield f"shard_map_custom_jvp_psum_{vma}", lambda x, w, v, rules=rules: rules(x, w)
        rules = mapped(custom_jvp(), row, P(), out=row)
        yield f"shard_map_custom_jvp_{vma}", lambda x, w, v, rules=rules: rules(x, w)
    sharding = NamedSharding(two, row)
    yield "constraint", lambda x, w, v: lax.with_sharding_constraint(x @ w, sharding) @ v
    out = jax.jit(lambda x, w: x @ w, out_shardings=sharding)
    yield "out_shardings", lambda x, w, v: out(x, w) @ v


PROGRAMS = {
    name: program
    for programs in (scan_programs, call_programs, custom_programs, sharded_programs)
    for name, program in programs()
}
NO_REVERSE = {"associative"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_cast_all_through(name):
    program = PROGRAMS[name]
    cast = autocast(program)
    assert set(products(cast, X, W, V)) == {"float16"}
    assert len(products(cast, X, W, V)) == len(products(program, X, W, V))
    got = jax.eval_shape(cast, X, W, V)
    want = jax.eval_shape(program, X, W, V)
    assert [(x, x.weak_type) for x in jax.tree.leaves(got)] == [
        (x, x.weak_type) for x in jax.tree.leaves(want)
    ]
    both = lambda fun: jax.jit(lambda *xs: (fun(*xs), jax.grad(total(fun), (0, 1, 2))(*xs)))
    with warnings.catch_warnings():
        # Donation inside of another function is for nothing.
        warnings.filterwarnings("ignore", message="Some donated buffers")
        assert_close(both(cast)(X, W, V), both(program)(X, W, V))
    backward = products(jax.grad(total(cast), (0, 1, 2)), X, W, V)
    assert set(backward) == {"float16"}


@pytest.mark.parametrize(
    "name", ["scan", "cond", "custom_vjp_scan", "jit_static", "shard_map_True"]
)
def test_compiled_or_not_is_the_same(name):
    cast = autocast(PROGRAMS[name])
    both = lambda *xs: (cast(*xs), jax.grad(total(cast), (0, 1, 2))(*xs))
    # A float32 rounding that compiling moves may move a float16 rounding: 2^-11 of a product.
    assert_close(jax.jit(both)(X, W, V), both(X, W, V), 2.0**-9)


def test_a_while_loop_is_walked_with_its_condition():
    def fun(x, w):
        go = lambda c: (c[0] < 3) & ((c[1] @ w)[0, 0] < 1e9)
        return lax.while_loop(go, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))

    cast = autocast(fun)
    assert products(cast, X, W) == ["float16", "float16"]
    assert_close(cast(X, W), fun(X, W))
    assert_close(*(jax.jvp(f, (X, W), (W, X))[1][1] for f in (cast, fun)))


def test_a_pallas_kernel_is_left_alone():
    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((4, 4), F32), interpret=True)
    fun = lambda x, w: call(x @ w, w)
    assert_close(autocast(fun)(X, W), fun(X, W))
    assert_same_bits(autocast(fun)(X, W), call(mm(X, W), W))


def test_rules_that_autocast_does_not_know_are_left_alone():
    solve = lambda w, x: lax.custom_linear_solve(
        lambda v: w @ v,
        x,
        lambda _, b: jnp.linalg.solve(w, b),
        lambda _, b: jnp.linalg.solve(w.T, b),
    )
    assert_same_bits(autocast(solve)(W, X[0]), solve(W, X[0]))

    @jax.custom_batching.custom_vmap
    def product(x, w):
        return x @ w

    product.def_vmap(lambda n, batched, x, w: (jnp.full((n, 4, 4), 7.0), True))
    assert_same_bits(jax.vmap(autocast(product))(X[None], W[None]), jnp.full((1, 4, 4), 7.0))


@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit], ids=["plain", "jit_inside"])
@pytest.mark.parametrize("recompute", [True, False])
def test_callbacks_run_once(wrap, recompute):
    ran = []

    def fun(x, w):
        y = x @ w
        jax.debug.callback(lambda y: ran.append(("debug", y.dtype)), y)
        same = lambda y: ran.append(("pure", y.dtype)) or np.asarray(y)
        z = jax.pure_callback(same, jax.ShapeDtypeStruct((4, 4), F32), lax.stop_gradient(y))
        one = lambda y: ran.append(("io", y.dtype)) or np.float32(1)
        one = jax.experimental.io_callback(one, jax.ShapeDtypeStruct((), F32), lax.stop_gradient(z))
        return jnp.sum(jnp.tanh(y * z) @ w) * one

    cast = autocast(wrap(fun), recompute=recompute)
    for run in (cast, jax.jit(cast), jax.grad(cast), jax.jit(jax.grad(cast))):
        ran.clear()
        jax.block_until_ready(run(X, W))
        jax.effects_barrier()
        assert sorted(name for name, _ in ran) == ["debug", "io", "pure"]
        assert {str(dtype) for _, dtype in ran} == {"float32"}


@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit, jax.checkpoint])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(wrap):
    def layer(x, w, bias, key):
        h = jnp.tanh(x @ w) + bias
        return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), 2 * h, 0.0)

    layer = autocast(wrap(layer))
    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        value, pullback = jax.vjp(layer, X, W, jnp.full((4, 4), 2.0), key)
        np.testing.assert_array_equal(
            pullback(jnp.ones((4, 4)))[2], jnp.where(value == 0, 0.0, 2.0)
        )
        fun = lambda *xs: jax.grad(lambda b: layer(*xs[:2], b, xs[2]).sum())(jnp.full((4, 4), 2.0))
        np.testing.assert_array_equal(jax.jit(fun)(X, W, key) == 0, value == 0)


def test_perturbations_are_told_as_they_are():
    product = jax.custom_vjp(lambda x, w: x @ w)

    def forward(x, w):
        assert not w.perturbed
        return x.value @ w.value, w.value

    product.defvjp(forward, lambda w, ct: (ct @ w.T, None), symbolic_zeros=True)
    fun = lambda x: jnp.sum(product(x, W))
    assert_close(jax.grad(autocast(fun))(X), jax.grad(fun)(X))


# In programs


@pytest.mark.parametrize("recompute", [True, False])
def test_any_derivative_can_be_taken(recompute):
    fun = lambda x: jnp.sum(jnp.tanh(jnp.sin(x @ W) @ V))
    cast = autocast(fun, recompute=recompute)

    def derivatives(f):
        return lambda x: (
            jax.hessian(f)(x),
            jax.jacfwd(jax.grad(f))(x),
            jax.grad(lambda x: jax.grad(f)(x).sum())(x),
            jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
        )

    assert_close(*(jax.jit(derivatives(f))(X) for f in (cast, fun)), 2.0**-6)
    value, linear = jax.linearize(cast, X)
    got = value, linear(V)
    assert_same_bits(got, jax.jvp(cast, (X,), (V,)))
    assert_close(got, jax.jvp(fun, (X,), (V,)))


def test_vmap_is_the_same_inside_and_outside():
    fun = lambda x: jnp.tanh(x @ W) @ V
    assert_same_bits(jax.vmap(autocast(fun))(X), autocast(jax.vmap(fun))(X))
    mean = lambda x: lax.pmean(fun(x), "b")
    assert_same_bits(
        jax.vmap(autocast(mean), axis_name="b")(X), autocast(jax.vmap(mean, axis_name="b"))(X)
    )


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
def test_shard_map_is_the_same_inside_and_outside(check_vma, recompute):
    def mapped(fun):
        specs = dict(in_specs=(P(None, "d"), P("d", None)), out_specs=P(None, "d"))
        return jax.shard_map(fun, mesh=mesh(2), check_vma=check_vma, **specs)

    local = lambda x, w: lax.psum(jnp.tanh(x @ w), "d") @ w.T
    cast = functools.partial(autocast, recompute=recompute)
    funs = cast(mapped(local)), mapped(cast(local)), mapped(local)
    values = [jax.jit(jax.value_and_grad(total(f), (0, 1)))(X, W) for f in funs]
    assert_close(values[0], values[1], 2.0**-9)
    assert_close(values[0], values[2])


@pytest.mark.parametrize("options", [{}, {"f32_results": "*"}], ids=["plain", "f32_results"])
def test_shardings_in_types_are_kept(options):
    by_rows = lambda x, w: jnp.tanh(x @ w)
    rule = custom_jvp()
    spread = lambda x, w: jnp.tanh(jnp.matmul(x, w.T, out_sharding=P("d", None)))
    with jax.set_mesh(mesh(2, 2, explicit=True)):
        x, w = jax.device_put(X, P("d", None)), jax.device_put(W, P(None, "e"))
        for fun, *args in (
            (by_rows, x, w),
            (rule, x, w),
            (spread, jax.device_put(X, P("d", "e")), w),
        ):
            cast = autocast(fun, **options)
            got, want = jax.jit(cast)(*args), jax.jit(fun)(*args)
            assert jax.typeof(got) == jax.typeof(want)
            np.testing.assert_allclose(got, want, atol=2.0**-9)
            grads = [jax.jit(jax.grad(total(f)))(*args) for f in (cast, fun)]
            np.testing.assert_allclose(*grads, atol=2.0**-7)


def loops(cast):
    """A loss whose layer is cast inside a scan, and closes over the parameters."""

    def loss(params, x):
        layer = cast(lambda c: jnp.tanh(c @ params["w"]) @ params["v"])
        return jnp.sum(lax.scan(lambda c, _: (layer(c), None), x, length=3)[0] * x)

    return loss


def test_it_may_close_over_what_is_traced():
    params = {"w": W, "v": V}
    got, want = (jax.grad(loops(f))(params, X) for f in (autocast, lambda f: f))
    assert_close(got, want)
    assert set(products(jax.grad(loops(autocast)), params, X)) == {"float16"}
    rule = lambda w: jax.custom_jvp(lambda x: x @ w)

    def closed(w, x):
        product = rule(w)
        product.defjvp(lambda p, t: (product(*p), t[0] @ w))
        inside = autocast(lambda x: jax.checkpoint(jax.jit(product))(x) @ w)
        return jnp.sum(inside(x))

    assert_close(*(jax.grad(f, 1)(W, X) for f in (closed, lambda w, x: jnp.sum(x @ w @ w))))


def test_nothing_leaks():
    params = {"w": W, "v": V}
    with jax.checking_leaks():
        jax.make_jaxpr(jax.value_and_grad(loops(autocast)))(params, X)
        for name in ("custom_vjp_scan", "cond"):
            jax.make_jaxpr(jax.grad(total(autocast(PROGRAMS[name]))))(X, W, V)
    fun = autocast(lambda x: {"y": x @ x.T, "name": "y"})
    for n in (2, 3):  # other shapes, and nothing left from the first
        assert fun(jnp.ones((n, 4)))["y"].shape == (n, n)
    with pytest.raises(ZeroDivisionError):
        autocast(lambda x: x @ x * (1 / 0))(X)
    assert str(jax.make_jaxpr(jnp.sin)(X).eqns[0].source_info.name_stack) == ""


def test_arguments_reach_the_function_as_they_are():
    table, marker, seen = np.ones((4, 4), np.float32), object(), []

    def fun(x, name, nothing, *, number, table, act, many, flag=True):
        seen.append((name, nothing, number, table, act, many, flag))
        return act(x @ jnp.asarray(table) * number)

    given = dict(number=2.5, table=table, act=jnp.tanh, many=[1, (marker,)], flag=False)
    got = autocast(fun)(X, "name", None, **given)
    assert_same_bits(got, jnp.tanh(mm(X, jnp.asarray(table)) * 2.5))
    (name, nothing, number, seen_table, act, many, flag) = seen[0]
    assert (name, nothing, number, act, flag) == ("name", None, 2.5, jnp.tanh, False)
    assert type(number) is float and seen_table is table and many[1][0] is marker


def test_what_is_returned_is_handed_through():
    table, marker = np.ones(3), object()

    def fun(x):
        return {"y": x @ x, "n": 3, "s": "text", "none": None, "t": (table, marker), "f": 0.5}

    got = autocast(fun)(X)
    assert (got["n"], got["s"], got["none"], got["f"]) == (3, "text", None, 0.5)
    assert type(got["n"]) is int and got["t"][0] is table and got["t"][1] is marker


def test_weak_types_come_out_as_they_were():
    def fun(x, weak):
        return x @ x, weak * 2, jnp.asarray(1.0) + 0, lax.full_like(weak, 2), weak @ weak, weak @ x

    weak = jnp.full((4, 4), 1.0)
    assert weak.weak_type
    got, want = (jax.jit(f)(X, weak) for f in (autocast(fun), fun))
    assert [x.weak_type for x in got] == [x.weak_type for x in want]


def test_methods_partials_and_jitted_functions_are_functions():
    class Model:
        def __call__(self, x):
            return x @ W

        def method(self, x):
            """Of a model."""
            return x @ W

    model = Model()
    funs = model, model.method, functools.partial(jnp.matmul, b=W), jax.jit(lambda x: x @ W)
    for fun in funs:
        assert_same_bits(autocast(fun)(X), mm(X, W))
    cast = autocast(model.method)
    assert (cast.__name__, cast.__doc__) == ("method", "Of a model.")


def test_a_function_is_traced_once_a_call_and_once_under_jit():
    times = []

    def fun(x, w):
        times.append(1)
        return jnp.sum(jnp.tanh(x @ w))

    cast = autocast(fun)
    cast(X, W)
    assert len(times) == 1
    jax.value_and_grad(cast)(X, W)
    assert len(times) == 2
    step = jax.jit(jax.value_and_grad(cast))
    for i in range(5):
        step(X + i, W)
    assert len(times) == 3


def test_a_custom_rule_is_traced_no_more_than_it_has_to_be():
    times = []
    product = jax.custom_vjp(lambda x, w: x @ w)
    product.defvjp(
        lambda x, w: times.append("forward") or (x @ w, (x, w)),
        lambda kept, ct: times.append("backward") or usual(kept, ct),
    )
    jax.make_jaxpr(jax.grad(total(autocast(product))))(X, W)
    assert (times.count("forward"), times.count("backward")) == (1, 1)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_scanned_model_does_not_grow_with_its_depth(recompute):
    def model(x, ws):
        layer = lambda x, w: (x + jax.nn.relu(jax.jit(jnp.matmul)(x, w)) @ w, None)
        return jnp.sum(lax.scan(layer, x, ws)[0])

    cast = autocast(model, recompute=recompute)
    sizes = [len(traced(jax.grad(cast), X, jnp.stack([W] * depth))) for depth in (2, 50)]
    assert sizes[0] == sizes[1]


def test_a_shared_layer_is_one_jaxpr_for_all_its_calls():
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def model(x, w):
        for _ in range(12):
            x = layer(x, w)
        return x

    jaxpr = jax.make_jaxpr(autocast(model, recompute=False))(X, W)
    inner = {id(e.params["jaxpr"]) for e in jaxpr.eqns if e.primitive.name in ("jit", "pjit")}
    # The first takes float32, as x is; every other takes what the one before it gave.
    assert len(inner) <= 2


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_with_a_loss_scale_gradients_are_the_same(scale):
    loss = total(functools.partial(tanh_mlp, jnp.matmul))
    hand = total(functools.partial(tanh_mlp, mm))
    got = jscale.value_and_grad(autocast(loss, recompute=False), scale)(X, W, V)
    assert_same_bits(got, jscale.value_and_grad(hand, scale)(X, W, V))
    # Scaling and casting can be put the other way round.
    inside = autocast(jscale.value_and_grad(loss, scale))
    assert_close(inside(X, W, V), got, 2.0**-9)
    assert set(products(inside, X, W, V)) == {"float16"}


def test_the_result_goes_through_jit_scan_and_export():
    cast = autocast(lambda x: jnp.tanh(x @ W) @ V)
    turns, _ = lax.scan(lambda x, _: (cast(x), None), X, length=2)
    assert_close(turns, cast(cast(X)), 2.0**-9)
    (n,) = export.symbolic_shape("n")
    shape = jax.ShapeDtypeStruct((n, 4), F32)
    exported = export.export(jax.jit(jax.grad(total(cast))))(jax.ShapeDtypeStruct((4, 4), F32))
    assert_close(exported.call(X), jax.jit(jax.grad(total(cast)))(X), 2.0**-9)
    symbolic = export.export(jax.jit(jax.grad(lambda x: jnp.sum(cast(x)))))(shape)
    assert_close(symbolic.call(X), jax.grad(lambda x: jnp.sum(cast(x)))(X), 2.0**-9)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.mean(jax.nn.log_softmax(x @ W, axis=0)),
        lambda x: lax.scan(lambda h, y: (jnp.tanh(h @ W + y), None), jnp.zeros(4), x)[0].sum(),
    ],
    ids=["reduced", "scanned"],
)
def test_a_size_that_only_has_a_name_may_be_reduced_or_scanned_over(fun):
    (n,) = export.symbolic_shape("n")
    for f in (autocast(fun), jax.grad(autocast(fun))):
        exported = export.export(jax.jit(f))(jax.ShapeDtypeStruct((n, 4), F32))
        assert_close(exported.call(X), jax.jit(f)(X), 2.0**-9)


# Recomputing


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, w: jnp.abs(jnp.fft.fft(x @ w)) ** 2,
        lambda x, w: jnp.abs((x @ w + 1j * x) @ (w + 1j * w.T)) @ w,
        lambda x, w: jnp.abs(lax.cumsum(lax.complex(x @ w, x))) @ w,
    ],
    ids=["fft", "product", "cumsum"],
)
def test_complex_numbers_between_products_have_gradients(standard_promotion, fun):
    got = jax.jit(jax.grad(total(autocast(fun)), (0, 1)))(X, W)
    assert_close(got, jax.grad(total(fun), (0, 1))(X, W))


def test_a_chain_of_scalars_may_be_longer_than_python_recurses():
    def fun(x, w, t):
        for _ in range(3):  # parts, as so much is recomputed between products
            for _ in range(40):
                x = jnp.sin(x)
            for _ in range(600):
                t = t + 0.01
            x = (x * jnp.cos(t)) @ w
        return jnp.sum(x)

    t = jnp.float32(0)
    assert_close(jax.jit(jax.grad(autocast(fun)))(X, W, t), jax.jit(jax.grad(fun))(X, W, t))


ROWS, WIDTH = 64, 48


def layer_loss(act):
    """Two products with `act` between; the shapes of all that is kept tell what it is."""

    def loss(x, w, v, key):
        return jnp.mean(jnp.tanh(act(x @ w, key) @ v) ** 2)

    return loss


LAYER = jnp.ones((ROWS, 32)), jnp.ones((32, WIDTH)), jnp.ones((WIDTH, 16)), jax.random.key(0)


def dropout(h, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), 2 * h, 0.0)


def layer_norm(h, _):
    h = h - jnp.mean(h, -1, keepdims=True)
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)


ACTS = {
    "layer_norm": layer_norm,
    "softmax": lambda h, _: jax.nn.softmax(h),
    "dropout": lambda h, key: dropout(jnp.tanh(h), key),
    "dropout_multiplied": lambda h, key: h * jax.random.bernoulli(key, 0.5, h.shape).astype(F32),
    "dropout_compared": lambda h, key: jnp.where(jax.random.uniform(key, h.shape) < 0.9, h, 0.0),
    "dropout_scheduled": lambda h, key: jnp.where(
        jax.random.bernoulli(key, jax.nn.sigmoid(h[0, 0]), h.shape), h, 0.0
    ),
    "dropout_jit": jax.jit(lambda h, key: dropout(jnp.tanh(h), key)),
    "rotary": lambda h, _: jnp.concatenate([h[:, :24] * jnp.cos(h[:, 24:]), -h[:, 24:]], -1),
    **{
        name: lambda h, _, name=name: getattr(jax.nn, name)(h)
        for name in ("relu", "relu6", "gelu", "silu", "softplus", "elu", "leaky_relu", "mish")
        + ("hard_swish", "log_sigmoid", "sigmoid", "selu", "squareplus", "log_softmax")
    },
}


def kept(fun, *args):
    """What is kept beside arguments and products."""
    given = [(x.shape, str(x.dtype)) for x in jax.tree.leaves(args)]
    left = residuals(fun, *args)
    for x in given:
        if x in left:
            left.remove(x)
    return [x for x in left if x[1] != "float16" and len(x[0]) > 1]


@pytest.mark.parametrize("act", ACTS)
def test_only_products_and_masks_are_kept(act):
    fun = autocast(layer_loss(ACTS[act]))
    masks = [((ROWS, WIDTH), "bool")] if "dropout" in act else []
    assert kept(fun, *LAYER) == masks
    half = [x for x in residuals(fun, *LAYER) if x[1] == "float16"]
    assert half == [((ROWS, WIDTH), "float16"), ((ROWS, 16), "float16")]


def test_only_products_and_masks_are_kept_of_a_jitted_layer():
    @jax.jit
    def layer(x, w, v, key):
        return dropout(jnp.tanh(dropout(jnp.tanh(x @ w), key) @ v), key)

    fun = autocast(lambda *args: jnp.sum(layer(*args)))
    assert kept(fun, *LAYER) == [((ROWS, WIDTH), "bool"), ((ROWS, 16), "bool")]


def test_a_scanned_layer_keeps_its_input_its_products_and_its_mask():
    def model(x, ws, key):
        def layer(x, args):
            w, key = args
            return x + dropout(jnp.tanh(layer_norm(x, None) @ w), key), None

        return jnp.sum(lax.scan(layer, x, (ws, jax.random.split(key, 3)))[0])

    x, ws = jnp.ones((ROWS, 32)), jnp.ones((3, 32, 32))
    stack = (3, ROWS, 32)
    got = sorted(kept(autocast(model), x, ws, jax.random.key(0)))
    assert got == [(stack, "bool"), (stack, "float32")]


def test_without_recomputing_the_rest_is_kept():
    assert kept(autocast(layer_loss(ACTS["gelu"]), recompute=False), *LAYER)


def deep(x, w, layers=6, between=1):
    for _ in range(layers):
        x = x @ w
        for _ in range(between):
            x = jnp.sin(x * 1.5)
    return jnp.sum(x)


@pytest.mark.parametrize("fun", [deep, jax.jit(deep), functools.partial(deep, between=40)])
def test_recomputing_repeats_no_product_and_nothing_else_twice(fun):
    forward = count(fun, "dot_general", X, W), count(fun, "sin", X, W)
    counts = {}
    for options in ({"recompute": True}, {"recompute": False}, {"f32_results": "dot_general"}):
        grad = jax.grad(autocast(fun, **options), (0, 1))
        counts[str(options)] = count(grad, "dot_general", X, W)
        assert count(grad, "sin", X, W) <= 2 * forward[1]
    assert set(counts.values()) == {3 * forward[0]}


def test_a_long_chain_is_cut():
    checkpoints = lambda fun: [
        e
        for e in jax.make_jaxpr(autocast(fun))(X, W).eqns
        if "remat" in str(e.primitive.name) or e.primitive.name == "checkpoint"
    ]
    # No part repeats what has become long, and no short one is a part of its own.
    assert len(checkpoints(deep)) <= 2
    assert len(checkpoints(functools.partial(deep, between=40))) >= 5


def test_constants_tell_parts_apart_that_are_alike():
    # Parts with the same operations share a jaxpr. These differ in the last bit of a number, in a
    # table and in a function that is called.
    tables = [np.random.default_rng(i).uniform(size=(4, 4)).astype(np.float32) for i in range(4)]
    numbers = [0.1, float(np.nextafter(np.float32(0.1), np.float32(1))), 0.1, 0.2]

    def fun(x, w):
        for i in range(4):
            for _ in range(40):
                x = jnp.sin(x)
            x = x * numbers[i] * 10 @ w
            x = x * jnp.asarray(tables[i]) + (jnp.tanh(x), x)[i % 2]
        return x

    got, want = (autocast(fun, recompute=r)(X, W) for r in (True, False))
    assert_same_bits(got, want)


@pytest.mark.parametrize(
    "policy",
    [
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.save_only_these_names("y"),
    ],
    ids=["dots", "names"],
)
def test_a_policy_of_the_user_saves_the_float16_product(policy):
    @functools.partial(jax.checkpoint, policy=policy)
    def block(x, w):
        y = checkpoint_name(x @ w, "y")
        return jnp.sum(jnp.tanh(jnp.sin(y)))

    fun = autocast(block)
    x, w = jnp.ones((64, 32)), jnp.ones((32, 48))
    got = sorted(residuals(fun, x, w))
    assert got == [((32, 48), "float32"), ((64, 32), "float32"), ((64, 48), "float16")]
    plain = lambda x, w: jnp.sum(jnp.tanh(jnp.sin(checkpoint_name(x @ w, "y"))))
    around = jax.checkpoint(autocast(plain), policy=policy)
    assert sorted(residuals(around, x, w)) == got
    assert len(products(jax.grad(around, (0, 1)), x, w)) == 3


def test_recomputing_in_a_branch_and_in_a_loop_inside_a_branch():
    def fun(x, w, flag):
        def loop(x):
            return lax.scan(lambda c, _: (jnp.sin(jnp.sin(c @ w) @ w), None), x, length=2)[0]

        return lax.cond(flag, loop, lambda x: jnp.sin(jnp.sin(x @ w) @ w), x)

    for flag in (True, False):
        cast, plain = (
            jax.jit(jax.grad(total(f), (0, 1)), static_argnums=()) for f in (autocast(fun), fun)
        )
        assert_close(cast(X, W, flag), plain(X, W, flag))


# explain


def line(fun, text):
    """`file.py:12`, where `text` is in the source of `fun`."""
    lines, start = inspect.getsourcelines(fun)
    (number,) = [start + i for i, x in enumerate(lines) if text in x and "in_source" not in x]
    return f"{__file__.rsplit('/', 1)[-1]}:{number}"


def model(params, x):
    with jax.named_scope("stem"):
        x = jnp.tanh(x @ params["stem"])  # the stem
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])  # the layers
    x = x @ params["head"]  # the head
    half = x.astype(F16) @ params["head"].astype(F16)  # by hand
    return jnp.vdot(x, x) + jnp.sum(half.astype(F32) @ params["stem"])  # sums and casts


MODEL = {"stem": W, "layers": jnp.stack([W, V, W]), "head": V}


def found(explanation, name="dot_general"):
    return {row.reason: row for row in explanation if row.name == name}


def test_explain_says_what_runs_where_how_often_and_why():
    rows = found(explain(model, keep="stem", f32_results="head")(MODEL, X))
    assert {reason: (row.dtype, row.count) for reason, row in rows.items()} == {
        "keep='stem'": ("float32", 2),
        "product": ("float16", 3),
        "f32_results='head'": ("float16", 1),
        "float16 in the code": ("float16", 1),
        "a sum of products": ("float32", 1),
    }
    wanted = {"product": "# the layers", "f32_results='head'": "# the head"}
    wanted |= {"float16 in the code": "# by hand", "a sum of products": "# sums and casts"}
    for reason, text in wanted.items():
        (source,) = rows[reason].sources
        assert source.startswith(line(model, text) + " (model")
    assert [s.split(" ")[0] for s in rows["keep='stem'"].sources] == [
        line(model, "# the stem"),
        line(model, "# sums and casts"),
    ]
    upcast = found(explain(model)(MODEL, X))["cast to float32 in the code"]
    assert (upcast.dtype, upcast.count) == ("float32", 1)


def test_explain_counts_the_turns_of_nested_loops():
    def fun(x, w):
        turn = lambda x, _: (lax.scan(lambda x, _: (x @ w, None), x, length=4)[0], None)
        x, _ = lax.scan(turn, x, length=3)
        x = lax.fori_loop(0, 5, lambda i, x: jax.jit(lambda x: x @ w)(x), x)
        x = lax.while_loop(lambda x: x[0, 0] < 0, lambda x: x @ w, x)
        return lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x @ w @ w, x)

    (row,) = found(explain(fun)(X, W)).values()
    assert row.count == 12 + 5 + 1 + 3


def test_explain_is_a_table():
    explanation = explain(model, also="tanh")(MODEL, X)
    assert isinstance(explanation, tuple) and isinstance(explanation, jscale.Explanation)
    assert all(isinstance(row, jscale.Operation) for row in explanation)
    lines = str(explanation).splitlines()
    assert lines[0].split() == ["operation", "dtype", "count", "reason", "where"]
    assert len(lines) == 1 + len(explanation) and repr(explanation) == str(explanation)
    (tanh,) = [row for row in explanation if row.name == "tanh"]
    assert (tanh.dtype, tanh.count, tanh.reason) == ("float16", 4, "also='tanh'")
    sines = explain(lambda x: jnp.sin(x))(X)
    assert [(row.name, row.reason) for row in sines] == [("sin", "as written")]
    assert explain(lambda: 3)() == ()


def test_explain_of_what_is_cast_takes_its_options():
    options = dict(keep="stem", also="tanh", f32_results="head")
    cast = autocast(model, BF16, **options)
    assert explain(cast)(MODEL, X) == explain(model, BF16, **options)(MODEL, X)


def test_explain_of_what_is_made_of_a_cast_function_is_of_the_whole():
    loss = autocast(lambda x, w: jnp.sum(jnp.tanh(x @ w)))
    grad = lambda make: found(explain(make(loss))(X, W))["an autocast inside decides"].count
    assert grad(jax.value_and_grad) == grad(lambda fun: jax.value_and_grad(lambda *a: fun(*a)))
    assert grad(jax.value_and_grad) > 1


def test_explain_tells_an_inner_autocast():
    for dtype in (F32, BF16, F16):
        inner = autocast(jnp.matmul, dtype)
        rows = found(explain(lambda x, w: inner(x, w))(X, W))
        assert [*rows] == ["an autocast inside decides"]


def test_explain_runs_nothing_and_warns_of_nothing():
    ran = []

    def fun(x):
        jax.debug.callback(lambda: ran.append(1))
        return x @ x

    explain(fun, keep="nothing")(X)
    jax.effects_barrier()
    assert not ran
    shape = jax.ShapeDtypeStruct((4, 4), F32)
    with contextlib.suppress(TypeError):  # shapes will do, if they are taken at all
        assert found(explain(fun)(shape))["product"].count == 1


@pytest.mark.parametrize("name", ["scan", "checkpoint"])
def test_a_product_goes_into_a_loop_or_a_checkpoint_as_it_is(name):
    def scan(x, w, u):
        return lax.scan(lambda h, z: (jnp.tanh(z + h @ u), None), x[0], x @ w)[0]

    def checkpoint(x, w, u):
        return jax.checkpoint(lambda h: jnp.tanh(h) @ u)(x @ w)

    fun = {"scan": scan, "checkpoint": checkpoint}[name]
    x = jnp.stack([X, -X])
    eqns = jax.make_jaxpr(autocast(fun, recompute=False))(x, W, V).jaxpr.eqns
    (inner,) = [e for e in eqns if e.primitive.name in ("scan", "remat2")]
    assert "float16" in {str(v.aval.dtype) for v in inner.invars}
    cast, plain = (jax.grad(total(f), (0, 1, 2))(x, W, V) for f in (autocast(fun), fun))
    assert_close(cast, plain)
