import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jscale

F16 = jnp.float16


def mlp_loss(params, x, y):
    """float16 products under a float32 loss."""
    w1, w2 = (params[k].astype(F16) for k in ("w1", "w2"))
    hidden = jnp.tanh(x.astype(F16) @ w1)
    return jnp.mean(jnp.square((hidden @ w2).astype(jnp.float32) - y)) / 4096


@functools.cache
def problem():
    k1, k2, k3, k4 = jax.random.split(jax.random.key(0), 4)
    params = {"w1": jax.random.normal(k1, (4, 8)), "w2": jax.random.normal(k2, (8, 1))}
    return params, jax.random.normal(k3, (16, 4)), jax.random.normal(k4, (16, 1))


@jax.jit
def scaled_grads(scale):
    return jscale.value_and_grad(mlp_loss, scale)(*problem())


def test_a_power_of_two_changes_no_bit_of_a_gradient_that_fits():
    # From 2^12 to 2^22 every float16 value of this backward pass is normal.
    loss, reference = scaled_grads(2.0**12)
    for exponent in range(13, 23):
        got, grads = scaled_grads(2.0**exponent)
        assert got == loss
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(reference), strict=True):
            np.testing.assert_array_equal(a, b)


def test_scaling_brings_back_what_underflows():
    tiny = lambda w: jnp.sum((w.astype(F16) * F16(1)).astype(jnp.float32)) * 1e-9
    w = jnp.ones(3)
    np.testing.assert_array_equal(jscale.grad(tiny, 1)(w), jnp.zeros(3))
    np.testing.assert_allclose(jscale.grad(tiny, 2.0**20)(w), np.full(3, 1e-9), rtol=2.0**-11)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(-24, 32), st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=4))
def test_float32_gradients_are_bitwise_those_of_jax(exponent, x):
    x = jnp.asarray(x, jnp.float32)
    fun = lambda w: jnp.sum(w * x)
    w = jnp.ones_like(x)
    loss, grads = jscale.value_and_grad(fun, 2.0**exponent)(w)
    want_loss, want = jax.value_and_grad(fun)(w)
    np.testing.assert_array_equal(loss, want_loss)
    # float32 subnormals flush to zero on the CPU, scaled or not
    np.testing.assert_array_equal(grads, jnp.where(abs(want) * 2.0**exponent < 2.0**-126, 0, want))


def test_the_scale_that_scaled_unscales_on_every_step():
    rule = jscale.dynamic(4, growth_interval=1)
    state, x = rule.init(), jnp.array([2.0, 4.0, 6.0])
    for _ in range(5):
        grads = jscale.grad(lambda w: jnp.sum(w * x), state.loss_scale)(jnp.ones(3))
        np.testing.assert_array_equal(grads, x)
        state = rule.update(state, jscale.Observation(finite=True))
    assert float(state.loss_scale) == 128


def test_a_float16_loss_is_scaled_in_float32():
    assert float(jscale.scale_loss(F16(3), 2.0**15)) == 98304
    assert float(jscale.scale_loss(jnp.ones((), F16), 65536)) == 65536
    # The loss is 2; the gradient of each of 64 weights is 1/32.
    fun = lambda w: jnp.mean(w.astype(F16) * F16(2))
    loss, grads = jscale.value_and_grad(fun, 2.0**16)(jnp.ones(64))
    assert loss.dtype == jnp.float32 and float(loss) == 2
    np.testing.assert_array_equal(grads, np.full(64, 1 / 32, np.float32))


def test_a_float16_loss_takes_an_integer_scale():
    assert float(jscale.grad(lambda w: w.astype(F16), jnp.int32(2**16))(jnp.float32(1))) == 1


def test_only_a_float16_loss_is_scaled_by_less_and_by_no_less_than_it_needs():
    # 2^15 times 2^-39 is the smallest float16; half of it is zero.
    half = lambda w: w.astype(F16) * F16(2.0**-20) * F16(2.0**-19)
    single = lambda w: half(w).astype(jnp.float32) * 0.5
    assert float(jscale.grad(half, 2.0**16)(jnp.float32(1))) == 2.0**-39
    assert float(jscale.grad(single, 2.0**16)(jnp.float32(1))) == 2.0**-40


def test_a_scale_above_what_a_float16_loss_can_take_turns_back():
    fun = lambda w: (w.astype(F16) * F16(1e-3)).astype(F16)
    rule = jscale.dynamic(2.0**16, growth_interval=2)
    state, scales = rule.init(), []
    for _ in range(8):
        scales.append(float(state.loss_scale))
        gradient = jscale.grad(fun, state.loss_scale)(jnp.float32(1))
        state = rule.update(state, jscale.Observation(finite=jscale.all_finite(gradient)))
    assert scales == [2.0**16, 2.0**16, 2.0**17] * 2 + [2.0**16] * 2


def test_gradients_overflow_at_one_and_fit_at_a_quarter():
    fun = lambda x: (x.astype(F16) * F16(1000) * F16(100)).astype(jnp.float32)
    x = jnp.float32(0.5)  # the value fits: 50000
    assert not np.isfinite(jscale.grad(fun, 1)(x))
    assert float(jscale.grad(fun, 0.25)(x)) == 99968


def test_the_reported_loss_is_never_a_scaled_one():
    loss, grads = jscale.value_and_grad(lambda w: w * 1e30, 2.0**32)(jnp.float32(1e5))
    assert float(loss) == np.float32(1e5) * np.float32(1e30)
    assert not np.isfinite(grads)


@pytest.mark.parametrize("dtype", [F16, jnp.bfloat16, jnp.float32, jnp.complex64])
def test_gradients_come_out_wide(dtype):
    got = jscale.unscale({"w": jnp.ones(2, dtype)}, 1024)["w"]
    want = jnp.complex64 if dtype == jnp.complex64 else jnp.float32
    assert got.dtype == want and not got.weak_type
    np.testing.assert_array_equal(got, np.full(2, 1 / 1024, want))


def test_unscaling_happens_in_float32():
    # In float16 the quotient would be the subnormal 6e-8, twice too large.
    got = jscale.unscale(F16(1e-3), 32768)
    np.testing.assert_array_equal(got, np.float32(F16(1e-3)) / np.float32(32768))


def test_float64_keeps_its_precision():
    with jax.enable_x64(True):
        fun = lambda w: jnp.sum(w * jnp.float64(1 / 3))
        loss, grads = jscale.value_and_grad(fun, 2.0**16)(jnp.ones(2, jnp.float64))
        assert loss.dtype == grads.dtype == jnp.float64
        np.testing.assert_array_equal(grads, np.full(2, 1 / 3))


def test_what_is_no_gradient_passes_through():
    tree = {
        "int": jnp.arange(2),
        "bool": jnp.array([True]),
        "none": None,
        "key": jax.random.key(0),
        "float0": np.zeros((2,), jax.dtypes.float0),
        "_overwrite_with_gradient": {"kernel_scale": jnp.ones(1)},
    }
    got = jscale.unscale(tree, 1024)
    assert all(got[k] is tree[k] for k in ("int", "bool", "none", "key", "float0"))
    np.testing.assert_array_equal(got["_overwrite_with_gradient"]["kernel_scale"], np.ones(1))
    assert jscale.unscale({}, 2) == {}


def test_arguments_go_where_jax_puts_them():
    fun = lambda a, b, *, c: (a * b * c, {"aux": a})
    (loss, aux), (ga, gb) = jscale.value_and_grad(fun, 4, (0, 1), has_aux=True)(2.0, 3.0, c=5.0)
    assert (float(loss), float(ga), float(gb), aux) == (30, 15, 10, {"aux": 2.0})
    grads, aux = jscale.grad(fun, 4, 1, True)(2.0, 3.0, c=5.0)
    assert (float(grads), aux) == (10, {"aux": 2.0})
    assert jscale.value_and_grad(mlp_loss, 4).__name__ == "mlp_loss"


@pytest.mark.parametrize("dtype", [F16, jnp.float32])
def test_a_gradient_penalty_is_the_same_at_any_scale(dtype):
    def penalty(w, scale):
        score = lambda x: jnp.sum(w.astype(dtype) * x.astype(dtype), dtype=jnp.float32)
        slope = jscale.grad(score, scale)(jnp.ones(2))
        return jnp.square(jnp.linalg.norm(slope) - 1)

    w = jnp.array([3.0, 4.0])
    reference = None
    for scale in (0.125, 1.0, 512.0):
        loss, grads = jscale.value_and_grad(penalty, scale)(w, scale)
        reference = grads if reference is None else reference
        assert float(loss) == 16
        np.testing.assert_array_equal(grads, reference)
        np.testing.assert_allclose(grads, [4.8, 6.4], rtol=float(jnp.finfo(dtype).eps))


def test_two_losses_at_two_scales_add_up_unscaled():
    a = jscale.grad(lambda w: w, 2.0**15)(jnp.float32(1))
    b = jscale.grad(lambda w: w, 2.0)(jnp.float32(1))
    assert float(a + b) == 2


def test_works_under_jit_vmap_scan_remat_and_again_under_grad():
    fun = jax.checkpoint(lambda w, x: jnp.sum(jnp.square(w * x)))
    gradient = lambda w, x: jscale.grad(fun, 8)(w, x)
    w, xs = jnp.ones(3), jnp.arange(6.0).reshape(2, 3)
    want = 2 * np.square(np.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(jax.jit(jax.vmap(gradient, (None, 0)))(w, xs), want)
    np.testing.assert_array_equal(jax.lax.map(lambda x: gradient(w, x), xs), want)
    second = jax.grad(lambda w: jnp.sum(gradient(w, xs[0])))(w)
    np.testing.assert_array_equal(second, [0, 2, 8])


@pytest.mark.parametrize(
    "scale", [8, np.float64(8), np.int32(8), F16(8), jnp.int32(8), jnp.bfloat16(8)]
)
def test_any_kind_of_number_is_a_scale(scale):
    scaled = jscale.scale_loss(jnp.float32(2), scale)
    assert float(scaled) == 16 and scaled.dtype == jnp.float32 and not scaled.weak_type


@pytest.mark.parametrize(
    "scale, words",
    [
        (0, "loss_scale must be positive"),
        (-1.0, "loss_scale must be positive"),
        (float("inf"), "loss_scale must be positive, finite"),
        (np.array(0.0), "loss_scale must be positive"),
        ("dynamic", "loss_scale must be a real number, got 'dynamic'"),
        (None, "loss_scale must be a real number, got None: pass jscale.loss_scale"),
        (True, "loss_scale must be a real number, got True"),
        (jnp.array(True), r"loss_scale must be a real number, got bool\[\]"),
        (jnp.complex64(8), r"loss_scale must be a real number, got complex64\[\]"),
        (jax.random.key(0), "loss_scale must be a real number, got key"),
        (jscale.dynamic(), "loss_scale must be a real number, got ScaleRule"),
        (jnp.ones(3), r"loss_scale must be a scalar, got float32\[3\]"),
    ],
)
def test_a_bad_scale_is_one_clear_sentence(scale, words):
    for use in (lambda: jscale.value_and_grad(jnp.sum, scale), lambda: jscale.unscale(1.0, scale)):
        with pytest.raises((TypeError, ValueError), match=words):
            use()


@pytest.mark.parametrize(
    "loss, words",
    [
        (lambda w: w, r"the loss must be a scalar, got float32\[3\]: reduce it"),
        (lambda w: jnp.sum(w).astype(jnp.int32), r"real floating-point scalar, got int32\[\]"),
        (lambda w: jnp.sum(w) > 0, r"real floating-point scalar, got bool\[\]"),
        (lambda w: jnp.sum(w) + 1j, r"real floating-point scalar, got complex64\[\]"),
        (lambda w: None, "real floating-point scalar, got None: return the loss"),
        (lambda w: {"loss": jnp.sum(w)}, "real floating-point scalar, got dict: return the loss"),
        (lambda w: (jnp.sum(w), w), "returned a tuple: return the loss alone, or pass has_aux"),
    ],
)
def test_a_bad_loss_is_one_clear_sentence(loss, words):
    with pytest.raises((TypeError, ValueError), match=words), jax.numpy_dtype_promotion("standard"):
        jscale.value_and_grad(loss, 8)(jnp.ones(3))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: jscale.grad(lambda w: w, 8, has_aux=True)(1.0), r"must return \(loss, aux\), got"),
        (lambda: jscale.grad(lambda w: (w, 1, 2), 8, has_aux=True)(1.0), "got tuple"),
        (
            lambda: jscale.grad(lambda w: w, 8, transform=jax.grad)(1.0),
            "transform must return value",
        ),
        (lambda: jscale.value_and_grad(jnp.float32(1), 8), "fun must be a function that returns"),
    ],
)
def test_a_bad_call_is_one_clear_sentence(call, words):
    with pytest.raises(TypeError, match=words):
        call()
