import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jscale

INF, NAN = float("inf"), float("nan")


def weighted(params, batch):
    """A loss whose gradients are the batch."""
    return sum(jnp.sum(params[name] * x) for name, x in batch.items())


PARAMS = {"a": jnp.ones(4), "b": jnp.ones(4)}


def gradients(a, b):
    return {"a": jnp.full(4, a), "b": jnp.full(4, b)}


def test_the_scale_follows_from_the_largest_gradient_of_all_batches():
    batches = [gradients(0.5, 0.25), gradients(-3.0, 2.0), gradients(0.0, 1.0)]
    found = jscale.suggest_scale(weighted, PARAMS, batches)
    assert (found.amax, found.largest, found.loss_scale) == (3, 2.0**14, 2.0**12)
    assert found.histogram == {-2: 4, -1: 4, 0: 4, 1: 8}
    assert (found.zeros, found.underflow) == (4, 0)
    assert jscale.suggest_scale(weighted, PARAMS, batches, bits=5).loss_scale == 2.0**9


@pytest.mark.parametrize("exponent", [-40, -16, -1, 0, 3, 20, 39])
def test_the_largest_scale_is_found_from_wherever_it_starts(exponent):
    found = jscale.suggest_scale(weighted, PARAMS, [gradients(2.0**exponent, 2.0**-100)], bits=0)
    assert found.largest == 2.0 ** min(15 - exponent, 32)
    assert found.histogram == {exponent: 4, -100: 4}
    assert found.underflow == 0.5


@pytest.mark.parametrize("below, lost", [(2.0**-25, 0), (0.999 * 2.0**-25, 0.5)])
def test_underflow_is_what_float16_rounds_to_zero(below, lost):
    # 2^-25 itself is halfway: from there on the bin is kept.
    found = jscale.suggest_scale(weighted, PARAMS, [gradients(2.0**10, below / 8)], bits=2)
    assert found.loss_scale == 8
    assert found.underflow == lost


def test_what_overflows_inside_autocast_counts():
    """The cotangent of the product is 2^12 times what the gradients are."""

    def loss_fn(w, x):
        return 2.0**12 * jnp.sum(x @ w)

    w, x = jnp.ones((8, 1)), jnp.full((1, 8), 2.0**-12)
    plain = jscale.suggest_scale(loss_fn, w, [x])
    half = jscale.suggest_scale(jscale.autocast(loss_fn), w, [x])
    assert plain.largest == 2.0**15
    assert half.largest == 2.0**3
    assert half.amax == plain.amax == 1


def test_training_that_starts_there_skips_nothing():
    w = jax.random.normal(jax.random.key(0), (64, 64))
    x = jax.random.normal(jax.random.key(1), (4, 16, 64))
    half = jscale.autocast(lambda w, x: 300 * jnp.mean(jnp.tanh(x @ w) ** 2))
    found = jscale.suggest_scale(half, w, list(x), bits=0)
    fits = lambda scale: [bool(jscale.all_finite(jscale.grad(half, scale)(w, b))) for b in x]
    assert all(fits(found.largest))
    assert found.amax * 2 * found.largest > 65504 or not all(fits(2 * found.largest))


def test_modules_auxiliary_values_and_shapes_that_differ():
    loss = lambda model, batch: (jnp.mean(model(batch) ** 2), "aux")
    model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
    found = jscale.suggest_scale(
        loss,
        model,
        [jnp.ones((4, 8)), jnp.ones((2, 8))],
        has_aux=True,
        transform=nnx.value_and_grad,
    )
    assert found.amax > 0
    assert sum(found.histogram.values()) == 2 * 9


def test_it_prints_the_histogram_that_justifies_it():
    found = jscale.suggest_scale(weighted, PARAMS, [gradients(2.0, 2.0**-1)])
    assert str(found).splitlines() == [
        "loss scale 2^12; overflow above 2^14; the largest gradient is 2",
        "at that scale float16 rounds 0.00% of the gradients to zero; 0 are zero at any scale",
        "  2^-1     50.00%  " + "#" * 40,
        "  2^0       0.00%",
        "  2^1      50.00%  " + "#" * 40,
    ]
    assert "start lower" not in str(found)
    assert "start lower, at 2^2 say" in str(found._replace(zeros=2 * 10**9))
    low = str(jscale.suggest_scale(weighted, PARAMS, [gradients(2.0**-20, 2.0**-60)]))
    assert "; no overflow up to 2^32, the largest tried; " in low
    assert "  2^-60    50.00%  " + "#" * 40 + "  lost" in low.splitlines()


@pytest.mark.parametrize(
    "fun, batches, error, words",
    [
        (weighted, [], ValueError, "batches is empty"),
        (3, [1], TypeError, "fun must be a function that returns the loss, got 3"),
        (
            weighted,
            [gradients(0, 0)],
            ValueError,
            "all gradients are zero, even at a scale of 2^32",
        ),
        (weighted, [gradients(1, 1), gradients(NAN, 1)], FloatingPointError, "batch 1 is nan"),
        (
            lambda p, x: jnp.sum(jnp.sqrt(p["a"] - 1)),
            [1],
            FloatingPointError,
            "the gradients of batch 0 are not finite even at a scale of 2^-24",
        ),
        (
            weighted,
            [gradients(1, 1e30)],
            FloatingPointError,
            "the gradients of batch 0 exceed float16's range (1e+30) even at a scale of 2^-24",
        ),
        (lambda p, x: p["a"], [1], TypeError, "the loss must be a scalar"),
        *(
            (weighted, x, TypeError, "batches must be a list or an iterator, got ")
            for x in (None, "data", jnp.ones((4, 2)), gradients(1, 1), (1, 2), 3)
        ),
    ],
)
def test_errors_say_what_to_do(fun, batches, error, words):
    with pytest.raises((error, ValueError), match=re.escape(words)):
        jscale.suggest_scale(fun, PARAMS, batches)


@pytest.mark.parametrize("bits", [-1, NAN, "2", 41])
def test_bits_is_a_number_of_doublings(bits):
    with pytest.raises((TypeError, ValueError), match="bits must be"):
        jscale.suggest_scale(weighted, PARAMS, [gradients(1, 1)], bits=bits)
