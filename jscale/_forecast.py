"""Running statistics of a number, and what they forecast; scales as powers of two."""

import math
import statistics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._arguments import as_number, as_power_of_two, check_bounds
from ._rules import Observation

F16_LIMIT = math.log2(65504)

# Found by measuring, with experiments/scaler_shootout.py.
AMAX_MEMORY = (1, 8, 32)  # steps that the running means of log2 amax remember
AMAX_PRIOR = 10
LOSS_MEMORY = (4, 16, 64)
_DEVIATION_MEMORY = 500


def i32(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


def exponent_of(scale: jax.Array) -> jax.Array:
    return jnp.frexp(scale)[1] - 1


def power_of_two(exponent: jax.Array) -> jax.Array:
    return jnp.ldexp(jnp.float32(1), exponent)  # jnp.exp2 is off by an ulp on some devices


def bounds(init_scale: float, min_scale: float, max_scale: float) -> tuple[int, int, int]:
    """The exponents of three powers of two, of which the first lies between the others."""
    given = {"init_scale": init_scale, "min_scale": min_scale, "max_scale": max_scale}
    first, low, high = (as_power_of_two(name, value) for name, value in given.items())
    check_bounds(*given.items())
    return first, low, high


def quantile(overflow_rate: float) -> float:
    """How many deviations above the mean a normal variable lies that rarely."""
    rate = as_number("overflow_rate", overflow_rate, "2.5e-4 is the default")
    if not 1e-9 <= rate < 0.5:
        raise ValueError(
            f"overflow_rate must be from 1e-9 to below 0.5, got {rate}: 2.5e-4 is the default."
        )
    return -statistics.NormalDist().inv_cdf(rate)


class Forecast(NamedTuple):
    """Running means of a number, and how far the next one came out above each.

    Attributes:
      means: f32[3], over few, more and many steps.
      squares: f32[3], for each mean, the mean square of the errors of predicting the next number
        by it: of those upwards, twice, which for a symmetric distribution is that of all.
      noted: i32[], how many numbers that are.

    >>> import jscale
    >>> jscale.log_normal().init().amax.means.shape
    (3,)
    """

    means: jax.Array
    squares: jax.Array
    noted: jax.Array


def no_forecast() -> Forecast:
    return Forecast(jnp.zeros(3, jnp.float32), jnp.ones(3, jnp.float32), i32(0))


def noted(
    old: Forecast, x: jax.Array, valid: jax.Array, memory: tuple[int, ...], prior: int = 0
) -> Forecast:
    """With `x`, if it is `valid`; otherwise `x` may be anything.

    A deviation of 1 is assumed beforehand, worth `prior` numbers.
    """
    n = old.noted.astype(jnp.float32)
    # Gains of a plain mean first, so that there is no bias to correct.
    gain = jnp.maximum(1 / jnp.asarray(memory, jnp.float32), 1 / (n + 1))
    error = jnp.where(valid, x - old.means, 0.0)
    # Upwards only: many small gradients in between say nothing about the large ones to come.
    square = 2 * jnp.square(jnp.maximum(error, 0))
    known = valid & (old.noted > 0)
    gain_squares = jnp.maximum(1 / _DEVIATION_MEMORY, 1 / jnp.maximum(n + prior, 1))
    return Forecast(
        means=old.means + gain * error,
        squares=old.squares + jnp.where(known, gain_squares * (square - old.squares), 0.0),
        noted=jnp.minimum(old.noted + valid.astype(jnp.int32), 2**30),
    )


def best(forecast: Forecast, values: jax.Array) -> jax.Array:
    """That of three values which belongs to the mean that has predicted best."""
    is_best = forecast.squares <= jnp.min(forecast.squares)
    return jnp.max(jnp.where(is_best, values, -jnp.inf))


def slopes(forecast: Forecast, memory: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Change per step, lately and before: a mean over n steps lags n - 1 behind a straight line."""
    m, (a, b, c) = forecast.means, memory
    return (m[0] - m[1]) / (b - a), (m[1] - m[2]) / (c - b)


def look(observation: Observation) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether the step was finite, whether it shows a largest gradient, and log2 of that."""
    finite = jnp.asarray(observation.finite, bool)
    amax = observation.amax
    seen = finite & (amax >= jnp.finfo(jnp.float32).tiny) & (amax < jnp.inf)
    return finite, seen, jnp.log2(jnp.where(seen, amax, 1.0))


def whole(x: jax.Array) -> jax.Array:
    """The floor of `x` as an integer; far beyond every exponent it ends."""
    return jnp.floor(jnp.clip(x, -300, 300)).astype(jnp.int32)
