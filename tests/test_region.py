"""A region changes at what scale gradients are computed, and never what they are."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers import assert_same_bits, bits
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, PartitionSpec as P

import jscale

INF, NAN = jnp.inf, jnp.nan
KEY = jax.random.key(0)


def normal(i, *shape):
    return jax.random.normal(jax.random.fold_in(KEY, i), shape)


def half(x):
    return x.astype(jnp.float16)


def single(x):
    return x.astype(jnp.float32)


# What gradients are. Where every operation rounds by itself, powers of two cancel to the last bit.
# XLA fuses products with sums, and rounds them once; so under jit the numbers are exact ones.

op_by_op = jax.disable_jit

PARAMS = {"a": normal(0, 3, 4), "b": {"c": normal(1, 4)}, "d": normal(2, 3, 4)}
X = normal(3, 2, 3)


def tower(params, x):
    return jnp.tanh(x @ params["a"]) * params["b"]["c"][None, :]


def passed(region, p):
    return jnp.sum(jnp.sin(region(tower)(p, X) + X @ p["d"]))


def closed_over(region, p):
    return jnp.sum(jnp.sin(region(lambda x: tower(p, x))(X) + X @ p["d"]))


def tied(region, p):
    """`a` is in the region, as an argument and closed over, and outside."""
    inside = region(lambda a, x: jnp.tanh(x @ a) * (x @ p["a"]) * p["b"]["c"][None, :])
    return jnp.sum(jnp.sin(inside(p["a"], X) + X @ (p["a"] + p["d"])))


def activations_closed_over(region, p):
    h = X @ p["a"]
    return jnp.sum(region(lambda c: jnp.sin(h) * c[None, :])(p["b"]["c"]) * (h + X @ p["d"]))


def returned_as_it_came(region, p):
    a, c, h = region(lambda a, c, x: (a, c, jnp.sin(x @ a)))(p["a"], p["b"]["c"], X)
    return jnp.sum(h * c[None, :]) * jnp.sum(jnp.cos(a) * p["d"])


def twice(region, p):
    f = region(tower)
    return jnp.sum(f(p, X) * f({**p, "a": p["d"]}, jnp.cos(X)))


ways = pytest.mark.parametrize(
    "loss",
    [passed, closed_over, tied, activations_closed_over, returned_as_it_came, twice],
    ids=lambda f: f.__name__,
)
exponents = st.integers(-20, 20)
bare = lambda fun: fun


@ways
def test_gradients_are_those_without_a_region(loss):
    @settings(max_examples=6, deadline=None, derandomize=True)
    @given(exponents, exponents)
    def check(inside, around):
        region = lambda fun: jscale.region(fun, 2.0**inside, 2.0**around)
        assert_same_bits(jax.grad(functools.partial(loss, region))(PARAMS), want)

    with op_by_op():
        want = jax.grad(functools.partial(loss, bare))(PARAMS)
        check()


@ways
def test_an_outer_loss_scale_is_taken_off_by_value_and_grad_alone(loss):
    scale = {"": jnp.float32(2.0**9), "b": jnp.float32(2.0**13)}
    region = lambda fun: jscale.region(fun, scale["b"], scale[""])
    with op_by_op():
        want = jax.value_and_grad(functools.partial(loss, bare))(PARAMS)
        got = jscale.value_and_grad(functools.partial(loss, region), scale, root="")(PARAMS)
    assert_same_bits(got, want)


def test_regions_nest():
    def loss(inner, middle, p):
        f = middle(lambda p, x: inner(tower)(p, jnp.cos(x @ p["a"] @ p["d"].T)) * (x @ p["d"]))
        return jnp.sum(f(p, X))

    inner = lambda fun: jscale.region(fun, 2.0**-7, 2.0**12)
    middle = lambda fun: jscale.region(fun, 2.0**12, 2.0**3)
    with op_by_op():
        want = jax.grad(functools.partial(loss, bare, bare))(PARAMS)
        assert_same_bits(jax.grad(functools.partial(loss, inner, middle))(PARAMS), want)


def test_other_scales_change_gradients_by_their_rounding_only():
    w, x = normal(4, 64), normal(5, 64)
    want = jax.grad(lambda w: jnp.sum(w * x))(w)
    for scale in (3.0, 1000.1, 1 / 7, 1e-20, 1e20):
        got = jax.grad(lambda w, s=scale: jnp.sum(jscale.region(jnp.multiply, s, 1.3)(w, x)))(w)
        # Multiplied, multiplied, divided: three roundings of 2^-24.
        np.testing.assert_allclose(got, want, rtol=3 * 2**-24)


def test_values_are_those_of_the_function():
    f = lambda p: jscale.region(tower, 3.0, 7.0)(p, X)
    assert_same_bits(f(PARAMS), tower(PARAMS, X))
    assert_same_bits(jax.vjp(f, PARAMS)[0], tower(PARAMS, X))


# Everything goes in and comes out


def test_whatever_is_no_gradient_passes():
    seen = []

    def fun(tree, word, flag, number, *, act, raw):
        seen.append((word, flag, number, act, raw.dtype, tree["none"], type(tree["numpy"])))
        noise = jax.random.normal(tree["key"], (3,))
        w = act(tree["w"]) * noise * number + tree["numpy"]
        z = tree["z"] * tree["z"]
        return {
            "w": w,
            "i": tree["i"] + 1,
            "b": ~tree["b"],
            "key": jax.random.split(tree["key"]),
            "raw": raw,
            "z": z,
            "empty": tree["empty"] * 2.0,
            "none": None,
            "word": word,
            "number": number,
            "act": act,
        }

    def loss(region, w, z, empty):
        tree = {
            "w": w,
            "z": z,
            "empty": empty,
            "i": jnp.int32(3),
            "b": jnp.array(True),
            "key": KEY,
            "none": None,
            "numpy": np.ones(3, np.float32),
        }
        out = region(fun)(tree, "word", True, 2.5, act=jnp.sin, raw=jnp.uint32([1, 2]))
        return jnp.sum(out["w"]) + jnp.abs(out["z"]) + jnp.sum(out["empty"]), out

    args = normal(6, 3), jnp.complex64(1.5 - 0.5j), jnp.zeros((0, 2))
    grad = lambda region: jax.grad(functools.partial(loss, region), (0, 1, 2), has_aux=True)(*args)
    with op_by_op():
        want, want_out = grad(bare)
        got, out = grad(lambda fun: jscale.region(fun, 2.0**17, 2.0**3))
    assert_same_bits(got, want)
    assert [out.pop(k) for k in ("word", "number", "act")] == ["word", 2.5, jnp.sin]
    [want_out.pop(k) for k in ("word", "number", "act")]
    assert_same_bits(out, want_out)
    assert seen[0] == seen[1] == ("word", True, 2.5, jnp.sin, jnp.uint32, None, np.ndarray)


def test_what_is_closed_over_under_jit_may_be_anything_too():
    def loss(region, w, key, i):
        return jnp.sum(region(lambda w: w * jax.random.normal(key, (3,)) * i.astype(w.dtype))(w))

    grad = lambda region: jax.jit(jax.grad(functools.partial(loss, region)))
    args = normal(6, 3), KEY, jnp.int32(3)
    got = grad(lambda fun: jscale.region(fun, 8.0, 2.0))(*args)
    assert_same_bits(got, grad(bare)(*args))


def test_weak_types_stay_weak():
    # Strict promotion: a float32 that is not weak does not multiply a float16.
    f = jscale.region(lambda x: (x * jnp.float16(2), x * 2.0), 8.0, 1.0)
    gradient = jax.grad(lambda x: f(x)[0].astype(jnp.float32))(3.0)
    assert float(gradient) == 2
    assert jax.make_jaxpr(f)(3.0).out_avals[1].weak_type


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
def test_cotangents_change_scale_in_float32_and_come_back_in_their_dtype(dtype):
    # Neither the ratio nor the cotangent on its way fits into float16 at one end or the other.
    w = jnp.asarray([0.5, -1.5], dtype)
    for inside, around in ((2.0**20, 2.0**-2), (2.0**-60, 2.0**40)):
        out, pull = jax.vjp(jscale.region(lambda w: single(w.real), inside, around), w)
        (gradient,) = pull(jnp.float32([2.0**-14, -(2.0**-10)]))
        if inside < 1 and dtype == jnp.float16:
            want = jnp.zeros(2, dtype) * jnp.asarray([1, -1], dtype)  # below what it has
        else:
            want = jnp.asarray([2.0**-14, -(2.0**-10)], dtype)
        if inside > 1 and dtype == jnp.float16:
            want = jnp.asarray([2.0**-14, -INF], dtype)  # 2^12 * 2^... above what it has
            (gradient,) = pull(jnp.float32([2.0**-14, -1.0]))
        assert_same_bits(gradient, want)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        w = jnp.asarray(1 / 3, jnp.float64)
        want = jax.grad(lambda w: jnp.sin(w) * w)(w)
        got = jax.grad(lambda w: jscale.region(jnp.sin, 2.0**40, 0.5)(w) * w)(w)
        assert_same_bits(got, want)


# Where it is called


def step_function(region, p, x):
    """Exact in float32 on the numbers below, however XLA fuses it."""
    h = region(lambda p, x: jnp.square(x @ p["a"]) * p["b"][None, :])(p, x)
    return jnp.sum(h * (x @ p["a"]))


EXACT = {"a": jnp.float32([[1, -2], [3, 0.5]]), "b": jnp.float32([2, -1])}
EXACT_X = jnp.float32([[1, 2], [-0.5, 4], [2, 0]])


def at(inside, around=2.0):
    return lambda fun: jscale.region(fun, inside, around)


def exact_gradient(wrap, inside, around=2.0):
    return jax.jit(jax.grad(wrap(functools.partial(step_function, at(inside, around)))))


@pytest.mark.parametrize(
    "wrap",
    [
        bare,
        jax.jit,
        jax.checkpoint,
        jscale.autocast,
        lambda f: jax.checkpoint(jscale.autocast(f)),
        lambda f: lambda p, x: jnp.sum(jax.vmap(lambda x: f(p, x[None]))(x)),
        lambda f: lambda p, x: jax.lax.cond(x[0, 0] > 0, f, lambda p, x: jnp.float32(0), p, x),
    ],
    ids=["jit", "jit_in_jit", "remat", "autocast", "autocast_remat", "vmap", "cond"],
)
def test_inside_of_any_transformation(wrap):
    want = jax.grad(functools.partial(step_function, bare))(EXACT, EXACT_X)
    # Traced scales too, of which none may be known.
    get = jax.jit(lambda s, o: exact_gradient(wrap, s, o)(EXACT, EXACT_X))
    for inside, around in ((2.0**5, 2.0), (0.25, 2.0**5)):
        assert_same_bits(get(inside, around), want)


@pytest.mark.parametrize(
    "wrap", [jax.jit, jax.checkpoint, jscale.autocast, jax.named_call], ids=lambda f: f.__name__
)
def test_around_any_transformation(wrap):
    want = jax.grad(functools.partial(step_function, bare))(EXACT, EXACT_X)
    region = lambda fun: jscale.region(wrap(fun), 2.0**5, 2.0)
    got = jax.jit(jax.grad(functools.partial(step_function, region)))(EXACT, EXACT_X)
    assert_same_bits(got, want)


def test_a_scan_over_layers_and_their_scales():
    weights = jnp.float32([[[1, 2], [0, 1]], [[1, 0], [-1, 1]], [[0, 1], [1, 0.5]]])

    def loss(scales, weights, x):
        def body(x, layer):
            w, scale = layer
            return jscale.region(lambda w, x: x + x @ w, scale, 4.0)(w, x), None

        return jnp.sum(jnp.square(jax.lax.scan(body, x, (weights, scales))[0]))

    gradient = jax.jit(jax.grad(loss, (1, 2)))
    want = gradient(jnp.full(3, 4.0), weights, EXACT_X)
    got = gradient(jnp.float32([2.0**-3, 2.0**20, 2.0**7]), weights, EXACT_X)
    assert_same_bits(got, want)


def test_vmap_over_scales_and_everything_else():
    want = jax.grad(functools.partial(step_function, bare))(EXACT, EXACT_X)
    gradient = lambda s: jax.grad(functools.partial(step_function, at(s)))(EXACT, EXACT_X)
    got = jax.jit(jax.vmap(gradient))(jnp.float32([1, 2.0**10, 2.0**-9]))
    for i in range(3):
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], got), want)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("varying", [True, False])
def test_in_shard_map(check_vma, varying):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = jnp.concatenate([EXACT_X, EXACT_X[:1] * 2])

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("d"), P()), out_specs=P(), check_vma=check_vma
    )
    def gradient(p, x, scale):
        if varying and check_vma:
            p = jax.tree.map(lambda w: jax.lax.pcast(w, "d", to="varying"), p)
        grads = jax.grad(functools.partial(step_function, at(scale)))(p, x)
        # JAX itself sums over the devices the gradients of what they share, if it knows.
        return jax.lax.psum(grads, "d") if varying or not check_vma else grads

    want = jax.grad(functools.partial(step_function, bare))(EXACT, x)
    assert_same_bits(jax.jit(gradient)(EXACT, x, jnp.float32(2.0**9)), want)


@pytest.mark.parametrize("scale", [1.0, 2.0**15])
@pytest.mark.parametrize("inside", [2.0**-8, 1.0, 2.0**11])
def test_a_gradient_penalty_is_the_same_at_any_scale(scale, inside):
    def penalty(w):
        critic = lambda x: jscale.region(lambda w, x: jnp.dot(w, x), inside, scale)(w, x)
        gradient = jscale.grad(critic, scale)(jnp.ones(2))
        return jnp.square(jnp.sqrt(jnp.sum(jnp.square(gradient))) - 1)

    loss, gradient = jscale.value_and_grad(penalty, scale)(jnp.float32([3, 4]))
    assert float(loss) == 16
    np.testing.assert_array_equal(gradient, np.float32([4.8, 6.4]))


def test_second_derivatives_are_those_without_a_region():
    def loss(region, p):
        inner = lambda x: jnp.sum(region(tower)(p, x) * region(jnp.sin)(X @ p["d"]))
        energy, forces = jax.value_and_grad(inner)(X)
        return jnp.square(energy) + jnp.sum(jnp.square(forces))

    hessian = lambda region: jax.hessian(lambda c: jnp.sum(region(jnp.sin)(c) * c))(X[0])
    with op_by_op():
        want = jax.grad(functools.partial(loss, bare))(PARAMS), hessian(bare)
        for inside, around in ((2.0**12, 1.0), (2.0**-9, 2.0**5)):
            got = jax.grad(functools.partial(loss, at(inside, around)))(PARAMS)
            assert_same_bits((got, hessian(at(inside, around))), want)


# At what scale they are computed


def through_half(w, x):
    return single(half(w) * half(x))


def test_what_underflows_outside_survives_inside():
    w, x = jnp.float32(1), jnp.float32(2.0**-20)

    def loss(w, outer):
        outside = through_half(w, x)
        inside = jscale.region(through_half, 2.0**20, outer)(w, x)
        return (outside, inside)

    # Cotangents of 2^-10: the product with 2^-20 is below 2^-25, and zero in float16.
    grads = [jax.grad(lambda w, i=i: loss(w, 1.0)[i] * 2.0**-10)(w) for i in range(2)]
    assert [float(g) for g in grads] == [0, 2.0**-30]


def test_what_overflows_at_a_scale_too_large_shows():
    w, x = jnp.float32(1), jnp.float32(2)
    f = lambda s: jax.grad(lambda w: jscale.region(through_half, s, 1.0)(w, x))(w)
    assert float(f(2.0**14)) == 2 and float(f(2.0**15)) == INF


@pytest.mark.parametrize("autocast_inside", [True, False])
def test_autocast_computes_at_the_scale_of_the_region(autocast_inside):
    w, x = jnp.full((2, 2), 2.0**-13), jnp.ones((2, 2))
    inner = jscale.autocast if autocast_inside else bare
    outer = bare if autocast_inside else jscale.autocast

    def loss(scale, w):
        f = jscale.region(inner(lambda w: x @ w), scale, 1.0)
        return jnp.sum(f(w)) * 2.0**-30

    gradient = jax.jit(lambda s, w: jax.grad(outer(functools.partial(loss, s)))(w))
    assert not gradient(1.0, w).any()
    np.testing.assert_array_equal(gradient(2.0**30, w), np.full((2, 2), 2.0**-29))


def products(jaxpr: Any) -> int:
    """How many matrix products a program does, inner programs included."""
    count = 0
    for equation in jaxpr.eqns:
        count += equation.primitive.name == "dot_general"
        for x in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            count += products(getattr(x, "jaxpr", x)) if hasattr(x, "eqns") else 0
    return count


@pytest.mark.parametrize("how", ["plain", "jit", "scan"])
def test_what_needs_no_gradient_gets_none(how):
    """Two products forward, and backward one for `w` alone: not for x, nor for the frozen v."""
    w, v, x = jnp.ones((2, 2)), jnp.ones((2, 2)), jnp.ones((2, 2))

    def loss(region, w):
        f = region(lambda w, v, x: jnp.sin(x @ v) @ w)
        if how == "scan":
            return jnp.sum(jax.lax.scan(lambda c, x: (c + f(w, v, x), None), x, x[None])[0])
        return jnp.sum((jax.jit(f) if how == "jit" else f)(w, v, x))

    count = lambda region: products(jax.make_jaxpr(jax.grad(functools.partial(loss, region)))(w))
    assert count(at(8.0)) == count(bare) == 3


def test_a_region_adds_no_product():
    count = lambda region: products(
        jax.make_jaxpr(jax.grad(functools.partial(tied, region)))(PARAMS)
    )
    assert count(at(8.0)) == count(bare)


# What does not leave it


def risky(w, x):
    """Cotangents of x overflow at a large scale, with those of w."""
    return single(half(w) * half(x))


W, XS = jnp.float32([1.0, 2.0, -4.0]), jnp.float32([2.0, 0.5, 1.0])


def stopping(scale, stop, w, x, c=None):
    c = jnp.ones(3) if c is None else c
    x = jnp.sin(x)
    return jnp.sum(jscale.region(risky, scale, 1.0, stop_nonfinite=stop)(w, x) * c) + jnp.sum(x)


@pytest.mark.parametrize("stop", [1, [1], (1,), np.int64(1)])
def test_an_overflow_is_zero_behind_the_region_and_nan_in_it(stop):
    # The cotangents of x are 2^14 w: of these the last is above 65504.
    gw, gx = jax.grad(functools.partial(stopping, 2.0**14, stop), (0, 1))(W, XS)
    bare_w, bare_x = jax.grad(functools.partial(stopping, 1.0, ()), (0, 1))(W, XS)
    assert np.isnan(gw).all()
    assert_same_bits(gx[:2], bare_x[:2])
    assert_same_bits(gx[2:], jnp.cos(XS[2:]))  # what is outside only
    assert np.isfinite(bare_w).all()
    gw, gx = jax.grad(functools.partial(stopping, 2.0**14, ()), (0, 1))(W, XS)
    assert np.isinf(gx[2]) and np.isfinite(gw).all()


def test_an_overflow_that_comes_from_outside_stops_there_too():
    c = jnp.float32([1.0, INF, NAN])
    gw, gx = jax.grad(functools.partial(stopping, 4.0, 1), (0, 1))(W, XS, c)
    assert np.isnan(gw).all() and np.isfinite(gx).all()


def test_finite_steps_are_untouched():
    @settings(max_examples=10, deadline=None, derandomize=True)
    @given(st.integers(-8, 12), st.sampled_from([0, 1, [0], [1]]))
    def check(exponent, stop):
        got = jax.grad(functools.partial(stopping, 2.0**exponent, stop), (0, 1))(W, XS)
        assert_same_bits(got, want)

    want = jax.grad(functools.partial(stopping, 1.0, ()), (0, 1))(W, XS)
    check()


def test_all_else_shows_the_overflow_be_it_closed_over_or_in_a_tree():
    def loss(p, q, x, i):
        f = lambda p, x, i: risky(p["w"] * q, x[0]) + p["u"] + x[2] + i.astype(jnp.float32)
        f = jscale.region(f, 2.0**15, 1.0, stop_nonfinite=1)
        return jnp.sum(f(p, [x, jnp.int32(3), x], i))

    p = {"w": W, "u": jnp.ones(3), "n": None}
    grads = jax.jit(jax.grad(loss, (0, 1, 2)))(p, jnp.ones(3), XS, jnp.int32(1))
    assert all(np.isnan(x).all() for x in jax.tree.leaves(grads[:2]))
    # Those of x are 2^15 w, of which only the first is below 65504, and 1 from elsewhere.
    np.testing.assert_array_equal(grads[2], np.float32([2, 1, 1]))


def test_what_cannot_be_differentiated_may_be_named_too():
    def loss(w, x, i):
        f = jscale.region(lambda w, x, i: w * x, 8.0, 1.0, stop_nonfinite=[1, 2])
        return jnp.sum(f(w, x, i))

    for i in (jnp.int32(3), None, 2.0, "word", np.ones(3)):
        grads = jax.grad(loss, (0, 1))(W, XS, i)
        assert_same_bits(grads, (XS, W))
        f = jscale.region(lambda w, i: w * 2.0, 8.0, 1.0, stop_nonfinite=1)
        assert_same_bits(jax.grad(lambda w, f=f, i=i: jnp.sum(f(w, i)))(W), jnp.full(3, 2.0))


def test_stopping_in_a_scan_and_in_a_nest():
    def loss(scale, w, x):
        inner = lambda w, x: jscale.region(risky, scale, 2.0, stop_nonfinite=1)(w, x) * w
        body = lambda x, w: (jscale.region(inner, 2.0, 1.0, stop_nonfinite=1)(w, x) + x, None)
        return jnp.sum(jax.lax.scan(body, x, w)[0])

    gradient = jax.jit(jax.grad(loss, (1, 2)))
    w = jnp.stack([W, W * 2.0])
    assert_same_bits(gradient(4.0, w, XS), gradient(1.0, w, XS))
    gw, gx = gradient(2.0**15, w, XS)
    assert np.isnan(gw).all() and np.isfinite(gx).all()


@pytest.mark.parametrize("check_vma, varying", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("stop", [0, 1])
def test_stopping_in_shard_map(check_vma, varying, stop):
    """An overflow on one device is NaN for what all share, and zero where it is stopped."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("d"), P()), out_specs=(P(), P("d")),
        check_vma=check_vma,
    )  # fmt: skip
    def gradient(w, x, scale):
        if varying:
            w = jax.lax.pcast(w, "d", to="varying")
        f = jscale.region(risky, scale, 1.0, stop_nonfinite=stop)
        gw, gx = jax.grad(lambda w, x: jnp.sum(f(w, x)), (0, 1))(w, x)
        # JAX itself sums over the devices the gradients of what they share, if it knows.
        return gw if check_vma and not varying else jax.lax.psum(gw, "d"), gx

    gradient = jax.jit(gradient)
    w, x = jnp.float32([1.0, -4.0]), jnp.float32([1, 2, 1, 4])
    gw, gx = gradient(w, x, 8.0)
    np.testing.assert_array_equal(gw, [2, 6])
    np.testing.assert_array_equal(gx, [1, -4, 1, -4])
    gw, gx = gradient(w, x, 2.0**14)  # 2^14 w is too much on both, 2^14 x on the second
    if stop == 1:
        assert np.isnan(gw).all()
        np.testing.assert_array_equal(gx, [1, 0, 1, 0])
    elif check_vma and not varying:  # summed before it leaves
        np.testing.assert_array_equal(gw, [2, 0])
        assert np.isnan(gx).all()
    else:
        np.testing.assert_array_equal(gw, [2, 2])
        np.testing.assert_array_equal(gx, [1, -INF, NAN, NAN])


# Frameworks


class Tower(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(jnp.tanh(self.norm(self.linear(x))))

    def encode(self, x):
        return self(x)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.vision = Tower(rngs)
        self.text = nnx.Linear(4, 2, rngs=rngs)


@pytest.mark.parametrize(
    "call",
    [
        lambda region, tower, x: region(tower)(x),
        lambda region, tower, x: region(tower.encode)(x),
        lambda region, tower, x: region(lambda tower, x: tower(x))(tower, x),
        lambda region, tower, x: region(lambda x, *, tower: tower(x))(x, tower=tower),
    ],
    ids=["module", "method", "argument", "keyword"],
)
def test_nnx_modules_get_their_gradients_and_keep_their_state(call, standard_promotion):
    def run(region):
        model = Model(nnx.Rngs(0))
        loss_fn = lambda model, x: jnp.sum(jnp.square(model.text(call(region, model.vision, x))))
        transform = nnx.value_and_grad
        loss, grads = jscale.value_and_grad(loss_fn, 4.0, transform=transform)(model, X)
        assert int(model.vision.dropout.rngs.count[...]) > 0
        assert np.asarray(model.vision.norm.mean[...]).any()
        return loss, nnx.to_pure_dict(grads), nnx.to_pure_dict(nnx.state(model))

    with op_by_op():
        got, want = run(lambda fun: jscale.region(fun, 2.0**12, 4.0)), run(bare)
    assert bits(got) == bits(want)


def test_an_overflow_in_an_nnx_module_is_stopped_at_its_argument():
    class Half(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(W)

        def __call__(self, x):
            return risky(self.w[...], x)

    def loss(model, x):
        return jnp.sum(jscale.region(model, 2.0**14, 1.0, stop_nonfinite=0)(x))

    grads, gx = nnx.grad(loss, argnums=(0, 1))(Half(), XS)
    assert np.isnan(grads.w[...]).all()
    np.testing.assert_array_equal(gx, [1, 2, 0])


class Eqx(eqx.Module):
    vision: eqx.nn.MLP
    norm: eqx.nn.BatchNorm
    text: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(KEY, 2)
        self.vision = eqx.nn.MLP(3, 4, 4, 1, key=keys[0])
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        self.text = eqx.nn.Linear(4, 2, key=keys[1])

    def __call__(self, region, x, state):
        vision = lambda vision, norm, x, state: norm(vision(x), state)
        h, state = region(vision)(self.vision, self.norm, x, state)
        return self.text(h), state


def test_equinox_modules_and_their_state(standard_promotion):
    model, state = eqx.nn.make_with_state(Eqx)()

    @eqx.filter_jit
    def run(model, state, region):
        def loss_fn(model, x, state):
            batched = jax.vmap(
                lambda x, s: model(region, x, s), (0, None), (0, None), axis_name="batch"
            )
            y, state = batched(x, state)
            return jnp.sum(jnp.square(y)), state

        transform = eqx.filter_value_and_grad
        f = jscale.value_and_grad(loss_fn, 4.0, has_aux=True, transform=transform)
        return f(model, X, state)

    got = run(model, state, lambda fun: jscale.region(fun, 2.0**12, 4.0))
    want = run(model, state, bare)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Fused differently: sums of some ten products, whose roundings differ.
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)


def test_linen_in_its_pure_form():
    model = linen.Dense(4)
    variables = model.init(KEY, X)

    def loss(region, variables):
        return jnp.sum(jnp.sin(region(model.apply)(variables, X)))

    got = jax.grad(functools.partial(loss, at(2.0**9)))(variables)
    assert_same_bits(got, jax.grad(functools.partial(loss, bare))(variables))


# Mistakes


@pytest.mark.parametrize("name", ["loss_scale", "outer"])
@pytest.mark.parametrize(
    "scale, words",
    [
        (0.0, "must be positive, finite and from 2^-126 to 2^126, got 0.0"),
        (-1.0, "must be positive, finite and from 2^-126 to 2^126, got -1.0"),
        (INF, "must be positive, finite and from 2^-126 to 2^126, got inf"),
        (NAN, "must be positive, finite and from 2^-126 to 2^126, got nan"),
        (2.0**200, "must be positive, finite and from 2^-126 to 2^126, got 1.6"),
        (np.float32(0), "must be positive, finite and from 2^-126 to 2^126, got 0.0"),
        ("x", "must be a real number, got 'x'"),
        (None, "must be a real number, got None"),
        (True, "must be a real number, got True"),
        (1j, "must be a real number, got 1j"),
        ({"text": 8.0}, "must be a real number, got dict"),
        (jnp.ones(3), "must be a scalar, got float32[3]"),
        (np.ones(3), "must be a scalar, got float64[3]"),
    ],
)
def test_a_scale_must_be_one(name, scale, words):
    with pytest.raises((TypeError, ValueError)) as error:
        jscale.region(jnp.sin, **{"loss_scale": 8.0, "outer": 8.0, name: scale})
    assert str(error.value).startswith(f"{name} {words}")
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda: jscale.region(jnp.ones(2), 1.0, 1.0), "fun must be a function, got float32"),
        (lambda: jscale.region(jnp.sin, 1.0, 1.0, stop_nonfinite="0"), "takes positions of arg"),
        (lambda: jscale.region(jnp.sin, 1.0, 1.0, stop_nonfinite=1.5), "takes positions of arg"),
        (lambda: jscale.region(jnp.sin, 1.0, 1.0, stop_nonfinite={0}), "takes positions of arg"),
        (
            lambda: jscale.region(jnp.sin, 1.0, 1.0, stop_nonfinite=1)(W),
            "called with 1 arguments by position",
        ),
        (
            lambda: jscale.region(jnp.sin, 1.0, 1.0, stop_nonfinite=-1)(W),
            "called with 1 arguments by position",
        ),
        (
            lambda: jscale.region(lambda x, w: x * w, 1.0, 1.0, stop_nonfinite=1)(W, w=W),
            "called with 1 arguments by position",
        ),
        (
            lambda: jscale.region(jnp.sin, 1.0, 1.0, stop_nonfinite=0)(W),
            "nothing can show that it overflowed",
        ),
    ],
)
def test_a_mistake_is_one_clear_sentence(wrong, words):
    with pytest.raises((TypeError, ValueError), match=words) as error:
        wrong()
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("stored", [jnp.float32, jnp.float16])
def test_autocast_sees_through_the_edge_of_a_region(stored):
    def tower(p, x):
        return jnp.tanh(x @ p["wi"].astype(jnp.float32)) @ p["wo"].astype(jnp.float32)

    p, x = {"wi": jnp.ones((8, 8), stored), "wo": jnp.ones((8, 8), stored)}, jnp.ones((4, 8))
    products = lambda rows: [
        (row.dtype, row.count, row.reason) for row in rows if row.name == "dot_general"
    ]
    bare = lambda p, x: jnp.mean(tower(p, x))
    inside = lambda p, x: jnp.mean(jscale.region(tower, 4.0, 1.0)(p, x))
    for options in ({}, {"keep": ["0/wo"]}):
        got, want = (products(jscale.explain(f, **options)(p, x)) for f in (inside, bare))
        assert got == want
    assert [dtype for dtype, *_ in got] == ["float16", "float32"]


def test_a_region_leaves_what_fp8_layers_overwrite_as_it_is(standard_promotion):
    x = jax.random.normal(jax.random.key(0), (8, 16))
    net = linen.Dense(4, use_bias=False, dot_general_cls=linen.Fp8DirectDotGeneralOp)
    variables, head = net.init(jax.random.key(0), x), jnp.ones((4, 3))

    def loss_fn(variables, own):
        encode = jscale.region(lambda variables, x: net.apply(variables, x), own, 1.0)
        return jnp.mean(jnp.square(encode(variables, x) @ head))

    plain, scaled = (jax.grad(loss_fn)(variables, own) for own in (1.0, 2.0**10))
    assert_same_bits(scaled["params"], plain["params"])
    key = "_overwrite_with_gradient"
    for (path, one), own in zip(
        jax.tree.leaves_with_path(plain[key]), jax.tree.leaves(scaled[key]), strict=True
    ):
        # What a layer remembers of its output's cotangents is at their scale.
        at_scale = path[-1].key == "output_grad_amax_history"
        np.testing.assert_array_equal(own, one * 1024 if at_scale else one)
