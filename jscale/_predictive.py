"""Rules that look at how large the gradients are, and not only at whether they overflowed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ._arguments import as_bits, as_count
from ._forecast import (
    AMAX_MEMORY,
    AMAX_PRIOR,
    F16_LIMIT,
    Forecast,
    best,
    bounds,
    exponent_of,
    i32,
    look,
    no_forecast,
    noted,
    power_of_two,
    quantile,
    whole,
)
from ._rules import Observation, ScaleRule

_UNSEEN = -150.0  # log2 of less than any float32
_HOLD, _LONGEST_HOLD = 4, 4096  # found by measuring, with experiments/scaler_shootout.py
_SILENCE = 16


class Guard(NamedTuple):
    """What overflows have taught that the gradients at hand do not show.

    Cotangents of activations may be larger than any gradient of a parameter, and a batch may be
    unlike all before it. After an overflow the scale stays below the one that overflowed for
    `hold` clean steps, then comes back. If that soon overflows again, the next hold is 4 times as
    long.

    Attributes:
      lowered: i32[], by how many doublings the scale is kept below what the gradients suggest.
      hold: i32[], clean steps until it comes back by one; from then on it takes a quarter.
      streak: i32[], clean steps in a row, or less than 0: overflows in a row.
      silent: i32[], steps in a row without any gradient.

    >>> import jscale
    >>> int(jscale.headroom().init().guard.hold)
    4
    """

    lowered: jax.Array
    hold: jax.Array
    streak: jax.Array
    silent: jax.Array


def _new_guard() -> Guard:
    return Guard(lowered=i32(0), hold=i32(_HOLD), streak=i32(0), silent=i32(0))


def _guarded(
    exponent: jax.Array,
    guard: Guard,
    finite: jax.Array,
    seen: jax.Array,
    wanted: jax.Array,
    known: jax.Array,
) -> tuple[jax.Array, Guard]:
    """The next exponent of the scale, if the gradients suggest `wanted` (where `known`).

    At most one up in a step, since a single small gradient may mislead; but 2 and then 4 down on
    overflows in a row, since it can come back at once.
    """
    clean = jnp.maximum(guard.streak, 0)
    streak = jnp.where(finite, clean + 1, jnp.minimum(guard.streak, 0) - 1)
    streak = jnp.clip(streak, -(2**30), 2**30)
    silent = jnp.where(seen | ~finite, 0, jnp.minimum(guard.silent + 1, 2**30))

    refuted = (guard.hold <= clean) & (clean < 2 * guard.hold)
    longer = jnp.minimum(4 * guard.hold, _LONGEST_HOLD)
    hold = jnp.where(refuted, longer, jnp.where(clean < guard.hold, guard.hold, _HOLD))
    relax = (streak >= guard.hold) & ((streak - guard.hold) % (guard.hold // 4) == 0)
    lowered = jnp.where(finite, guard.lowered - i32(relax), wanted - exponent + 1)
    lowered = jnp.where(known, jnp.maximum(lowered, 0), 0)

    fitting = jnp.where(known, wanted - lowered, exponent)
    # Without any gradient there may be underflow, and growth is the cure.
    waiting = exponent + i32((silent > 0) & (silent % _SILENCE == 0))
    up = jnp.where(seen, jnp.minimum(fitting, exponent + 1), waiting)
    down = jnp.minimum(fitting, exponent - jnp.where(streak == -1, 2, 4))
    hold = jnp.where(finite, guard.hold, hold)
    return jnp.where(finite, up, down), Guard(lowered, hold, streak, silent)


class LogNormalState(NamedTuple):
    """State of `log_normal`.

    Attributes:
      loss_scale: f32[], the scale for the next backward pass, a power of two.
      amax: statistics of log2 of the largest gradient, unscaled.
      guard: what overflows have taught beyond that.
      steps_at_min: i32[], for how many steps in a row the scale has come out at `min_scale`.

    >>> import jscale
    >>> jscale.log_normal().init()._fields
    ('loss_scale', 'amax', 'guard', 'steps_at_min')
    """

    loss_scale: jax.Array
    amax: Forecast
    guard: Guard
    steps_at_min: jax.Array


def log_normal(
    init_scale: float = 2.0**16,
    *,
    overflow_rate: float = 2.5e-4,
    min_scale: float = 2.0**-24,
    max_scale: float = 2.0**32,
) -> ScaleRule:
    """The largest scale at which the next gradients will probably not overflow.

    The largest unscaled gradient of each step is taken to be log-normally distributed. Its
    logarithm is predicted by three running means, over 1, 8 and 32 steps, of which the one counts
    that has had the smallest errors: the last value where steps are alike, the long mean where they
    are not. The scale is the largest power of two at which the prediction, plus so many deviations
    of its error as `overflow_rate` says, stays below 65504.

    After OpenSeq2Seq's LogMax (Kuchaiev et al., 2018), whose statistics an overflow or a gradient
    of zero spoils for thousands of steps. Here neither enters them. An overflow lowers the scale by
    2 doublings, a second one in a row by 4; the scale then stays below the one that overflowed for
    4 clean steps, and 4 times as long whenever that turns out to have been too short, which is how
    it learns of cotangents that are larger than all gradients of parameters. Until a gradient has
    been seen, only overflows move the scale. It rises by one doubling in a step at most, and by one
    in 16 steps while all gradients are zero, as they are after underflow.

    In `experiments/scaler_shootout.py` it skips 5 to 20 times fewer steps than torch's rule where
    gradients are steady, and leaves as many bits unused (up to 0.3 more); where they jump or surge,
    it wins in both. If they come in two sizes, `headroom` leaves fewer bits unused. With a
    deviation of 0.5 it skips 0.003 % of the steps and leaves 2.25 bits unused on average over where
    the mean of log2 lies between two powers of two; for single positions these go up to 0.0125 %
    and 2.57 bits. Of the recorded runs it skips no step in the transformer's and 2 in the recurrent
    net's, where torch's rule skips none. It costs a maximum over the gradients in each step.

    Args:
      init_scale: scale of the first step. This and the bounds are powers of two.
      overflow_rate: at most which share of the steps may overflow, in a steady state. Rounding to
        powers of two makes it several times less.
      min_scale: the scale never falls below it.
      max_scale: the scale never grows above it.

    Returns:
      A `ScaleRule` whose state is a `LogNormalState`. It needs the gradients, unscaled, in the
      Observation; `with_loss_scale` puts them there.

    Raises:
      TypeError, ValueError: a setting is not a number, or is out of range.

    >>> import jax, jax.numpy as jnp, jscale
    >>> rule = jscale.log_normal()
    >>> state, update = rule.init(), jax.jit(rule.update)
    >>> for finite in (True, True, False, True):
    ...     state = update(state, jscale.Observation(finite, grads=jnp.float32(0.01)))
    ...     print(f"2^{jnp.log2(state.loss_scale):.0f}", end=" ")
    2^17 2^18 2^16 2^17
    """
    z = quantile(overflow_rate)
    first, low, high = bounds(init_scale, min_scale, max_scale)

    def init() -> LogNormalState:
        scale, at_min = power_of_two(i32(first)), i32(first <= low)
        return LogNormalState(scale, no_forecast(), _new_guard(), at_min)

    def update(state: LogNormalState, observation: Observation) -> LogNormalState:
        finite, seen, x = look(observation)
        amax = noted(state.amax, x, seen, AMAX_MEMORY, AMAX_PRIOR)
        expected = best(amax, amax.means + z * jnp.sqrt(amax.squares))
        exponent, guard = _guarded(
            exponent_of(state.loss_scale),
            state.guard,
            finite,
            seen,
            wanted=whole(F16_LIMIT - expected),
            known=amax.noted > 0,
        )
        exponent = jnp.clip(exponent, low, high)
        at_min = jnp.where(exponent <= low, state.steps_at_min + 1, 0)
        return LogNormalState(power_of_two(exponent), amax, guard, at_min)

    return ScaleRule(init, update)


class HeadroomState(NamedTuple):
    """State of `headroom`.

    Attributes:
      loss_scale: f32[], the scale for the next backward pass, a power of two.
      largest: f32[], log2 of the largest gradient, unscaled, in this window; -150 for none.
      before: f32[], that of the window before.
      steps: i32[], steps in this window.
      guard: what overflows have taught beyond that.
      steps_at_min: i32[], for how many steps in a row the scale has come out at `min_scale`.

    >>> import jscale
    >>> float(jscale.headroom(init_scale=8).init().loss_scale)
    8.0
    """

    loss_scale: jax.Array
    largest: jax.Array
    before: jax.Array
    steps: jax.Array
    guard: Guard
    steps_at_min: jax.Array


def headroom(
    bits: float = 1,
    *,
    window: int = 100,
    init_scale: float = 2.0**16,
    min_scale: float = 2.0**-24,
    max_scale: float = 2.0**32,
) -> ScaleRule:
    """Keeps the largest gradient of the last steps so many bits below float16's limit.

    Delayed scaling, as Transformer Engine scales float8 tensors by a window of their largest
    magnitudes, for the one scale of the loss. Where `log_normal` accepts a rare overflow, this one
    keeps a distance that you choose. Overflows, zeros and growth are treated as there.

    Args:
      bits: between the largest gradient of the window and 65504. Rounding to powers of two adds up
        to one.
      window: steps. The window begins between `window` and twice as many steps ago, so that its
        maximum takes two numbers to keep.
      init_scale: scale of the first step. This and the bounds are powers of two.
      min_scale: the scale never falls below it.
      max_scale: the scale never grows above it.

    Returns:
      A `ScaleRule` whose state is a `HeadroomState`. It needs the gradients, unscaled, in the
      Observation; `with_loss_scale` puts them there.

    Raises:
      TypeError, ValueError: a setting is not a number, or is out of range.

    >>> import jax, jax.numpy as jnp, jscale
    >>> rule = jscale.headroom(bits=2, init_scale=2**14)
    >>> seen = jscale.Observation(finite=True, grads=jnp.float32(3))
    >>> state = jax.jit(rule.update)(rule.init(), seen)
    >>> float(state.loss_scale * 3)
    12288.0
    """
    bits = as_bits(bits, default=1)
    window = as_count("window", window)
    first, low, high = bounds(init_scale, min_scale, max_scale)

    def init() -> HeadroomState:
        unseen = lambda: jnp.asarray(_UNSEEN, jnp.float32)
        return HeadroomState(
            loss_scale=power_of_two(i32(first)),
            largest=unseen(),
            before=unseen(),
            steps=i32(0),
            guard=_new_guard(),
            steps_at_min=i32(first <= low),
        )

    def update(state: HeadroomState, observation: Observation) -> HeadroomState:
        finite, seen, x = look(observation)
        largest = jnp.maximum(state.largest, jnp.where(seen, x, _UNSEEN))
        top = jnp.maximum(largest, state.before)
        exponent, guard = _guarded(
            exponent_of(state.loss_scale),
            state.guard,
            finite,
            seen,
            wanted=whole(F16_LIMIT - bits - top),
            known=top > _UNSEEN,
        )
        exponent = jnp.clip(exponent, low, high)
        full = state.steps + 1 >= window
        return HeadroomState(
            loss_scale=power_of_two(exponent),
            largest=jnp.where(full, _UNSEEN, largest),
            before=jnp.where(full, largest, state.before),
            steps=jnp.where(full, 0, state.steps + 1),
            guard=guard,
            steps_at_min=jnp.where(exponent <= low, state.steps_at_min + 1, 0),
        )

    return ScaleRule(init, update)
