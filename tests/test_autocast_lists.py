"""Every function of torch's CUDA autocast lists that JAX has: what `autocast` makes of it.

The lists are the registrations of torch 2.13.0, in golden/torch_autocast_lists.json.
"""

import functools
import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits
from jax import lax

import jscale
from jscale._jaxpr import body, is_product, subjaxprs

GOLDEN = pathlib.Path(__file__).parent / "golden" / "torch_autocast_lists.json"
LISTS = json.loads(GOLDEN.read_text())["cuda"]

# Rounding to float16 moves a number by at most this part of it.
HALF_ULP = 2.0**-11
SMALLEST = 2.0**-24

# What may happen to float16 besides products: it is made, and moved from place to place.
MOVES = """
    broadcast_in_dim convert_element_type reduce_precision reshape rev slice squeeze transpose
""".split()


class Case(NamedTuple):
    """A function as JAX has it, and operands for it.

    Attributes:
      fun: the function.
      args: trees of float32 NumPy arrays; all of them are differentiated.
      products: how many products the result goes through, one after the other.
      linear: whether the function is linear in each operand, with nothing but sums and products.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    products: int = 1
    linear: bool = True


rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


def between(low, high, *shape):
    return rng.uniform(low, high, shape).astype(np.float32)


def case(fun, *args, **facts):
    return Case(fun, args, **facts)


def module(layer, *args, **facts):
    """A Linen module as a function of its parameters."""
    shapes = jax.eval_shape(layer.init, jax.random.key(0), *args)
    params = jax.tree.map(lambda x: between(-0.2, 0.2, *x.shape), shapes)
    return Case(layer.apply, (params, *args), **facts)


def convolution(*window, size=6, names=None):
    space = "DHW"[-len(window) :]
    names = names or (f"NC{space}", f"OI{space}", f"NC{space}")
    x_sizes = dict(N=2, C=3) | dict.fromkeys(space, size)
    w_sizes = dict(O=4, I=3) | dict(zip(space, window, strict=True))
    x, w = normal(*map(x_sizes.get, names[0])), normal(*map(w_sizes.get, names[1]))
    convolve = functools.partial(lax.conv_general_dilated, dimension_numbers=names)
    return case(lambda x, w: convolve(x, w, (1,) * len(window), "SAME"), x, w)


def transposed(*window):
    x, w = normal(2, *(3 for _ in window), 3), normal(*window, 3, 4)
    return case(lambda x, w: lax.conv_transpose(x, w, (2,) * len(window), "SAME"), x, w)


def cell(layer, *carry):
    carry = carry[0] if len(carry) == 1 else carry
    return module(layer, carry, between(-0.5, 0.5, 3, 5), linear=False)


def lstm_gates(c, gates):
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return c, jax.nn.sigmoid(o) * jnp.tanh(c)


def gru_gates(h, x_gates, h_gates):
    (xr, xz, xn), (hr, hz, hn) = (jnp.split(gates, 3, axis=-1) for gates in (x_gates, h_gates))
    z = jax.nn.sigmoid(xz + hz)
    return (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h


def resize(method, *shape, antialias=False):
    new = tuple(n + 2 for n in shape) if not antialias else tuple(n - 2 for n in shape)
    return case(lambda x: jax.image.resize(x, new, method, antialias), normal(*shape))


def renorm(x):
    norms = jnp.linalg.norm(x, axis=1, keepdims=True)
    return jnp.where(norms > 1, x / norms, x)


def cosine_embedding_loss(a, b):
    cosines = optax.cosine_similarity(a, b)
    return jnp.mean(jnp.where(LABELS > 0, 1 - cosines, jax.nn.relu(cosines - 0.1)))


def multi_margin_loss(scores):
    right = jnp.take_along_axis(scores, LABELS[:, None], axis=1)
    return jnp.mean(jnp.square(jax.nn.relu(0.5 - right + scores)))


def multilabel_margin_loss(scores):
    # Classes 0 and 2 are right.
    margins = 1 - (scores[:, (0, 2), None] - scores[:, None, (1, 3)])
    return jnp.mean(jax.nn.relu(margins))


def nll_loss(log_probs):
    return -jnp.mean(jnp.take_along_axis(log_probs, LABELS[:, None], axis=1))


LABELS = np.array([0, 2, 1])
ROW, COLUMN = np.array([0, 2, 1, 0]), np.array([3, 0, 0, 1])
MATRIX, POSITIVE = normal(3, 4), between(0.1, 2.0, 3, 4)
UNIT, SIGNS = between(-0.9, 0.9, 3, 4), np.sign(normal(3, 4))
PAIR = normal(3, 4), normal(3, 4)
MM = normal(3, 4), normal(4, 5)
BMM = normal(2, 3, 4), normal(2, 4, 5)
CONV, CONV_TRANSPOSE = convolution(3, 3), transposed(3, 3)
LAYER_NORM = module(nn.LayerNorm(), MATRIX)
MATMUL = case(jnp.matmul, *BMM)
IMAGE = normal(3, 4, 5)

CASES = {
    # fp16
    "_convolution": CONV,
    "convolution": CONV,
    "conv1d": convolution(3),
    "conv2d": CONV,
    "conv3d": convolution(2, 3, 2, size=3),
    "conv_tbc": convolution(3, names=("WNC", "WIO", "WNC")),
    "conv_transpose1d": transposed(3),
    "conv_transpose2d.input": CONV_TRANSPOSE,
    "conv_transpose3d.input": transposed(2, 2, 2),
    "prelu": module(nn.PReLU(), MATRIX),
    "addmm": case(lambda b, x, y: b + x @ y, normal(3, 5), *MM),
    "addmv": case(lambda b, x, y: b + x @ y, normal(3), normal(3, 4), normal(4)),
    "addr": case(lambda b, x, y: b + jnp.outer(x, y), normal(3, 4), normal(3), normal(4)),
    "matmul": MATMUL,
    "einsum": case(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), *BMM),
    "mm": case(jnp.matmul, *MM),
    "mv": case(jnp.matmul, normal(3, 4), normal(4)),
    "linalg_vecdot": case(jnp.linalg.vecdot, *PAIR),
    "linear": module(nn.Dense(5), MATRIX),
    "addbmm": case(lambda b, x, y: b + jnp.sum(x @ y, axis=0), normal(3, 5), *BMM),
    "baddbmm": case(lambda b, x, y: b + x @ y, normal(2, 3, 5), *BMM),
    "bmm": MATMUL,
    "chain_matmul": case(lambda x, y, z: x @ y @ z, *MM, normal(5, 6), products=2),
    "linalg_multi_dot": case(lambda *xs: jnp.linalg.multi_dot(xs), *MM, normal(5, 6), products=2),
    "_thnn_fused_lstm_cell": case(lstm_gates, UNIT, normal(3, 16)),
    "_thnn_fused_gru_cell": case(gru_gates, UNIT, normal(3, 12), normal(3, 12)),
    "lstm_cell": cell(nn.OptimizedLSTMCell(4), UNIT, UNIT),
    "gru_cell": cell(nn.GRUCell(4), UNIT),
    "rnn_tanh_cell": cell(nn.SimpleCell(4), UNIT),
    "rnn_relu_cell": cell(nn.SimpleCell(4, activation_fn=jax.nn.relu), UNIT),
    "scaled_dot_product_attention": case(
        jax.nn.dot_product_attention,
        *(between(-0.5, 0.5, 2, n, 2, 4) for n in (3, 5, 5)),
        products=2,
        linear=False,
    ),
    # fp32
    "acos": case(jnp.arccos, UNIT),
    "asin": case(jnp.arcsin, UNIT),
    "cosh": case(jnp.cosh, MATRIX),
    "erfinv": case(lax.erf_inv, UNIT),
    "exp": case(jnp.exp, MATRIX),
    "expm1": case(jnp.expm1, MATRIX),
    "log": case(jnp.log, POSITIVE),
    "log10": case(jnp.log10, POSITIVE),
    "log2": case(jnp.log2, POSITIVE),
    "log1p": case(jnp.log1p, POSITIVE),
    "reciprocal": case(jnp.reciprocal, POSITIVE),
    "rsqrt": case(lax.rsqrt, POSITIVE),
    "sinh": case(jnp.sinh, MATRIX),
    "tan": case(jnp.tan, UNIT),
    "pow.Tensor_Scalar": case(lambda x: (x**3, x**1.5, x**-2), POSITIVE),
    "pow.Tensor_Tensor": case(jnp.power, POSITIVE, MATRIX),
    "pow.Scalar": case(lambda x: 2.0**x, MATRIX),
    "softplus": case(jax.nn.softplus, MATRIX),
    "layer_norm": LAYER_NORM,
    "native_layer_norm": case(jax.nn.standardize, MATRIX),
    "rms_norm": module(nn.RMSNorm(), MATRIX),
    "group_norm": module(nn.GroupNorm(2), MATRIX),
    "frobenius_norm.dim": case(lambda x: jnp.linalg.norm(x, "fro", axis=(1, 2)), IMAGE),
    "nuclear_norm": case(lambda x: jnp.linalg.norm(x, "nuc"), MATRIX),
    "nuclear_norm.dim": case(lambda x: jnp.linalg.norm(x, "nuc", axis=(1, 2)), IMAGE),
    "cosine_similarity": case(optax.cosine_similarity, *PAIR),
    "poisson_nll_loss": case(lambda x, y: jnp.mean(jnp.exp(x) - y * x), MATRIX, POSITIVE),
    "cosine_embedding_loss": case(cosine_embedding_loss, *PAIR),
    "nll_loss": case(nll_loss, MATRIX),
    "nll_loss2d": case(lambda x: nll_loss(x.transpose(2, 1, 0)[:3, 0]), IMAGE),
    "hinge_embedding_loss": case(
        lambda x: jnp.mean(jnp.where(SIGNS > 0, x, jax.nn.relu(1 - x))), MATRIX
    ),
    "kl_div": case(optax.kl_divergence, MATRIX, POSITIVE),
    "l1_loss": case(lambda x, y: jnp.mean(jnp.abs(x - y)), *PAIR),
    "smooth_l1_loss": case(optax.huber_loss, *PAIR),
    "huber_loss": case(lambda x, y: jnp.mean(optax.huber_loss(x, y, delta=0.5)), *PAIR),
    "mse_loss": case(lambda x, y: jnp.mean(optax.squared_error(x, y)), *PAIR),
    "margin_ranking_loss": case(lambda x, y: jnp.mean(jax.nn.relu(0.1 - SIGNS * (x - y))), *PAIR),
    "multilabel_margin_loss": case(multilabel_margin_loss, MATRIX),
    "soft_margin_loss": case(lambda x: jnp.mean(jnp.log1p(jnp.exp(-SIGNS * x))), MATRIX),
    "triplet_margin_loss": case(optax.losses.triplet_margin_loss, *PAIR, MATRIX),
    "multi_margin_loss": case(multi_margin_loss, MATRIX),
    "binary_cross_entropy_with_logits": case(
        lambda x: optax.sigmoid_binary_cross_entropy(x, jnp.asarray(SIGNS > 0, x.dtype)), MATRIX
    ),
    "dist": case(lambda x, y: jnp.linalg.norm(x - y), *PAIR),
    "pdist": case(
        lambda x: jnp.linalg.norm(x[np.array([0, 0, 1])] - x[np.array([1, 2, 2])], axis=-1), MATRIX
    ),
    "cdist": case(lambda x, y: jnp.linalg.norm(x[:, None] - y[None], axis=-1), *PAIR),
    "renorm": case(renorm, MATRIX),
    "logsumexp": case(jax.nn.logsumexp, MATRIX),
    "upsample_nearest1d": resize("nearest", 4),
    "_upsample_nearest_exact1d": resize("nearest", 4),
    "upsample_nearest2d": resize("nearest", 4, 5),
    "_upsample_nearest_exact2d": resize("nearest", 4, 5),
    "upsample_nearest3d": resize("nearest", 3, 4, 5),
    "_upsample_nearest_exact3d": resize("nearest", 3, 4, 5),
    "upsample_linear1d": resize("linear", 4),
    "upsample_bilinear2d": resize("linear", 4, 5),
    "_upsample_bilinear2d_aa": resize("linear", 4, 5, antialias=True),
    "upsample_trilinear3d": resize("linear", 3, 4, 5),
    "upsample_bicubic2d": resize("cubic", 4, 5),
    "_upsample_bicubic2d_aa": resize("cubic", 4, 5, antialias=True),
    # fp32_set_opt_dtype, fp32_append_dtype
    "prod": case(jnp.prod, MATRIX),
    "prod.dim_int": case(lambda x: jnp.prod(x, axis=1), MATRIX),
    "softmax.int": case(jax.nn.softmax, MATRIX),
    "log_softmax.int": case(jax.nn.log_softmax, MATRIX),
    "cumprod": case(lambda x: jnp.cumprod(x, axis=1), MATRIX),
    "cumsum": case(lambda x: jnp.cumsum(x, axis=1), MATRIX),
    "linalg_vector_norm": case(lambda x: jnp.linalg.vector_norm(x, axis=1), MATRIX),
    "linalg_matrix_norm": case(lambda x: jnp.linalg.matrix_norm(x, ord=2), MATRIX),
    "linalg_matrix_norm.str_ord": case(lambda x: jnp.linalg.matrix_norm(x, ord="nuc"), MATRIX),
    "sum": case(jnp.sum, MATRIX),
    "sum.dim_IntList": case(lambda x: jnp.sum(x, axis=(0, 2)), IMAGE),
    "norm.Scalar": case(jnp.linalg.norm, MATRIX),
    "norm.ScalarOpt_dim": case(lambda x: jnp.linalg.norm(x, 3, axis=1), MATRIX),
    # promote
    "addcdiv": case(lambda a, b, c: a + 0.5 * b / c, *PAIR, POSITIVE),
    "addcmul": case(lambda a, b, c: a + 0.5 * b * c, *PAIR, MATRIX),
    "atan2": case(jnp.arctan2, *PAIR),
    "bilinear": case(
        lambda x, w, y: jnp.einsum("bi,oij,bj->bo", x, w, y),
        normal(3, 4),
        normal(2, 4, 5),
        normal(3, 5),
        products=2,
    ),
    "cross": case(jnp.cross, normal(4, 3), normal(4, 3)),
    "dot": case(jnp.dot, normal(6), normal(6)),
    "vdot": case(jnp.vdot, *PAIR),
    "grid_sampler": case(
        lambda x, at: jax.scipy.ndimage.map_coordinates(x, [*at], order=1),
        MATRIX,
        between(0.1, 1.9, 2, 6),
    ),
    "index_put": case(lambda x, v: x.at[ROW, COLUMN].set(v), MATRIX, normal(4)),
    "tensordot": case(lambda x, y: jnp.tensordot(x, y, 2), *PAIR),
    "tensordot axes=1": case(lambda x, y: jnp.tensordot(x, y, 1), *MM),
    "scatter_add": case(lambda x, v: x.at[ROW, COLUMN].add(v), MATRIX, normal(4)),
    # banned
    "binary_cross_entropy": case(
        lambda p: -jnp.mean(jnp.where(SIGNS > 0, jnp.log(p), jnp.log1p(-p))),
        between(0.1, 0.9, 3, 4),
    ),
}

MISSING = {
    "_convolution.deprecated": "an older signature of _convolution",
    "cudnn_convolution": "JAX has one convolution for all libraries",
    "cudnn_convolution_transpose": "JAX has one convolution for all libraries",
    "_scaled_dot_product_flash_attention": "cuDNN's kernel, to which JAX gives no float32",
}

# Where autocast does not do what torch does, and why.
DEVIATIONS = {
    "prelu": ("as written", "no sum of products, so no matrix unit helps"),
    "addr": ("as written", "no sum of products, so no matrix unit helps"),
    "linalg_vecdot": ("as written", "a sum of products, as the dot of torch's promote list is"),
    "_thnn_fused_lstm_cell": ("as written", "gates without products; exp and tanh stay exact"),
    "_thnn_fused_gru_cell": ("as written", "gates without products; exp and tanh stay exact"),
    "lstm_cell": ("products", "torch casts the gates too"),
    "gru_cell": ("products", "torch casts the gates too"),
    "rnn_tanh_cell": ("products", "torch casts the gate too"),
    "rnn_relu_cell": ("products", "torch casts the gate too"),
    "bilinear": ("products", "an einsum, which torch has in its fp16 list"),
    "tensordot axes=1": ("products", "with free dimensions it is a matmul by another name"),
    "binary_cross_entropy": ("as written", "torch raises; here logarithms are float32"),
}

LISTED = {name: kind for kind, names in LISTS.items() for name in names}


def law(name):
    """Whether the products of a case run in float16, or all of it as it is written."""
    if name in DEVIATIONS:
        return DEVIATIONS[name][0]
    return "products" if LISTED[aten(name)] == "fp16" else "as written"


def aten(name):
    return name.partition(" ")[0]


IN_FLOAT16 = [name for name in CASES if law(name) == "products"]
AS_WRITTEN = [name for name in CASES if law(name) == "as written"]


def prepare(name):
    """The function of a case, its operands, and cotangents for its results."""
    fun, args = CASES[name].fun, CASES[name].args
    rng = np.random.default_rng(list(name.encode()))
    cotangent = lambda x: rng.uniform(-1, 1, x.shape).astype(np.float32)
    return fun, args, jax.tree.map(cotangent, jax.eval_shape(fun, *args))


def both_passes(fun, args, cts):
    value, pullback = jax.vjp(fun, *args)
    return value, pullback(cts)


# Without LLVM's optimizations, which take longer than all the rest.
quickly = {"xla_backend_optimization_level": 0}
compiled = jax.jit(both_passes, static_argnums=0, compiler_options=quickly)
autocast = functools.cache(jscale.autocast)  # the same function each time: compiled once


def evaluated(fun, args, cts):
    """Both passes, as NumPy arrays: what is done with them then needs no compiler."""
    return jax.tree.map(np.asarray, compiled(fun, args, cts))


def traced(fun, args, cts):
    """The program of the forward pass, and that of both passes."""
    both = jax.make_jaxpr(both_passes, static_argnums=0)(fun, args, cts)
    return jax.make_jaxpr(fun)(*args), both


def equations(jaxpr):
    """Those of a program that compute something, down to the innermost."""
    for eqn in body(jaxpr).eqns:
        inner = [jaxpr for _, _, jaxpr in subjaxprs(eqn.params)]
        yield from itertools.chain(*map(equations, inner)) if inner else [eqn]


def products(jaxpr):
    return [eqn for eqn in equations(jaxpr) if is_product(eqn)]


def dtypes(*atoms):
    return {str(x.aval.dtype) for x in atoms if hasattr(x.aval, "dtype")}


def computed_in_float16(jaxpr):
    """What has a float16 result, but for products and what only moves it."""
    low = [eqn for eqn in equations(jaxpr) if "float16" in dtypes(*eqn.outvars)]
    size = lambda x: x.aval.size
    moves = lambda eqn: eqn.primitive.name in MOVES and size(eqn.outvars[0]) <= size(eqn.invars[0])
    return {eqn.primitive.name for eqn in low if not is_product(eqn) and not moves(eqn)}


def assert_within(bounds, got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w, bound in zip(*map(jax.tree.leaves, (got, want, bounds)), strict=True):
        assert g.dtype == w.dtype
        assert np.all(np.abs(g - w) <= bound)


def test_every_function_of_the_lists_has_a_case_or_a_reason_to_have_none():
    assert {*map(aten, CASES), *MISSING} == {*LISTED}
    assert not {*map(aten, CASES)} & {*MISSING}
    assert {*DEVIATIONS} <= {*CASES}


@pytest.mark.parametrize("name", IN_FLOAT16)
def test_products_run_in_float16_in_both_passes_and_nothing_else_does(name):
    fun, args, cts = prepare(name)
    pairs = zip(traced(autocast(fun), args, cts), traced(fun, args, cts), strict=True)
    for cast, written in pairs:
        assert cast.out_avals == written.out_avals
        for eqn in products(cast):
            assert dtypes(*eqn.invars, *eqn.outvars) == {"float16"}
        # None is lost, and none is computed twice.
        assert len(products(cast)) == len(products(written)) > 0
        assert not computed_in_float16(cast)


@pytest.mark.parametrize("name", [name for name in IN_FLOAT16 if CASES[name].linear])
def test_products_are_as_near_as_float16_can_be(name):
    fun, args, cts = prepare(name)
    got, want = (evaluated(f, args, cts) for f in (autocast(fun), fun))
    # The first product rounds its two operands and its result; the next a further operand and its
    # result. They are summed in float32, whose errors are 2^13 times as small.
    roundings = 2 * CASES[name].products + 1
    sums = evaluated(fun, *jax.tree.map(np.abs, (args, cts)))
    bounds = jax.tree.map(lambda x: 1.01 * roundings * HALF_ULP * x, sums)
    assert_within(bounds, got, want)


@pytest.mark.parametrize("name", [name for name in IN_FLOAT16 if CASES[name].linear])
def test_products_of_small_integers_are_exact(name):
    fun, args, cts = prepare(name)
    args, cts = jax.tree.map(lambda x: np.round(2 * x), (args, cts))
    got, want = (evaluated(f, args, cts) for f in (autocast(fun), fun))
    assert_within(jax.tree.map(np.zeros_like, want), got, want)


@pytest.mark.parametrize("name", [name for name in IN_FLOAT16 if not CASES[name].linear])
def test_cells_and_attention_are_as_near_as_their_products(name):
    fun, args, cts = prepare(name)
    got, want = (evaluated(f, args, cts) for f in (autocast(fun), fun))
    # Three roundings for each product on the way, and as much again from slopes, which are taken
    # at rounded places. They are parts of the largest element: little cancels in these sums.
    roundings = 2 * 3 * CASES[name].products
    bounds = jax.tree.map(lambda x: roundings * HALF_ULP * np.max(np.abs(x)), want)
    assert_within(bounds, got, want)


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_functions_for_float32_are_bitwise_what_they_were(name):
    fun, args, cts = prepare(name)
    forward, both = traced(autocast(fun), args, cts)
    assert str(forward) == str(jax.make_jaxpr(fun)(*args))
    assert "f16" not in str(both) and "float16" not in str(both)
    got, want = (compiled.lower(f, args, cts).as_text() for f in (autocast(fun), fun))
    if got != want:  # a sum of two cotangents may come the other way round
        assert_same_bits(evaluated(autocast(fun), args, cts), evaluated(fun, args, cts))


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_between_products_functions_for_float32_lose_nothing(name):
    fun, args, cts = prepare(name)
    args = jax.tree.map(lambda x: x.astype(np.float16).astype(np.float32), args)

    def after_products(*args):
        through = lambda x: jnp.reshape(jnp.reshape(x, (1, -1)) @ jnp.eye(x.size), x.shape)
        return fun(*jax.tree.map(through, args))

    cast = jscale.autocast(after_products)
    assert not computed_in_float16(jax.make_jaxpr(cast)(*args))
    # Products with ones and zeros are exact, but for the rounding of the cotangent.
    value, grads = evaluated(cast, args, cts)
    want, exact = evaluated(fun, args, cts)
    float32 = lambda x: 2.0**-20 * np.max(np.abs(x))
    assert_within(jax.tree.map(float32, want), value, want)
    rounded = lambda x: HALF_ULP * np.abs(x) + SMALLEST / 2 + float32(x)
    assert_within(jax.tree.map(rounded, exact), grads, exact)


RIGHT = np.array([0, 1, 2])
CROSS_ENTROPIES = {
    "log_softmax": lambda x: -jnp.sum(jax.nn.log_softmax(x)[RIGHT, RIGHT]),
    "one_hot": lambda x: jnp.sum(optax.softmax_cross_entropy(x, jnp.eye(3))),
    "labels": lambda x: jnp.sum(optax.softmax_cross_entropy_with_integer_labels(x, RIGHT)),
    "transposed": lambda x: jnp.sum(jax.nn.logsumexp(x, axis=1)) - jnp.sum(x.T[RIGHT, RIGHT]),
    "sliced": lambda x: jax.nn.logsumexp(x[0]) - x[0, 0],
}


@pytest.mark.parametrize("name", CROSS_ENTROPIES)
def test_a_confident_prediction_still_has_a_gradient(name):
    # The probability of what is right, less one, is -1e-5: in float16 the two cancel.
    weights = jnp.array([[12.0, 0.0, -1.0], [0.0, 12.0, 1.0], [1.0, 0.0, 12.0]])
    loss_fn = lambda w: 2.0**10 * CROSS_ENTROPIES[name](jnp.eye(3) @ w)
    got, want = (
        jax.jit(jax.grad(f), compiler_options=quickly)(weights)
        for f in (jscale.autocast(loss_fn), loss_fn)
    )
    # float32 itself cancels to 2^-24 of 2^10.
    assert_within(2 * HALF_ULP * jnp.abs(want) + 2.0**-13, got, want)


@pytest.mark.parametrize(
    "reason, names",
    [
        ("a sum of products", ["dot", "vdot", "linalg_vecdot", "tensordot"]),
        (
            "jax.image.resize",
            [name for name in CASES if "linear" in name or "cubic" in name],
        ),
    ],
)
def test_explain_says_why_a_product_stays_float32(reason, names):
    for name in set(names) & set(AS_WRITTEN):
        fun, args, _ = prepare(name)
        operands = jax.tree.map(jnp.asarray, args)
        rows = [row for row in jscale.explain(fun)(*operands) if row.name == "dot_general"]
        assert rows and {row.reason for row in rows} == {reason}


def test_a_resized_image_stays_float32_where_its_precision_is_the_default():
    fun, args, cts = prepare("upsample_bilinear2d")
    with jax.default_matmul_precision("highest"):
        _, both = traced(autocast(fun), args, cts)
    assert products(both) and "f16" not in str(both)


@pytest.mark.parametrize("algorithm", ["F32_F32_F32", "BF16_BF16_F32"])
def test_an_algorithm_for_float32_is_none_for_float16(algorithm):
    # Left there, it would have XLA multiply in float32 or bfloat16.
    fun, args, cts = prepare("mm")
    with jax.default_matmul_precision(algorithm):
        forward, _ = traced(autocast(fun), args, cts)
    (product,) = products(forward)
    assert product.params["precision"] is None
