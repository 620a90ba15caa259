"""Rules made of other rules."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._arguments import HIGHEST, LOWEST, as_count
from ._forecast import (
    AMAX_MEMORY,
    AMAX_PRIOR,
    F16_LIMIT,
    LOSS_MEMORY,
    Forecast,
    best,
    bounds,
    i32,
    look,
    no_forecast,
    noted,
    power_of_two,
    quantile,
    slopes,
    whole,
)
from ._rules import Observation, ScaleRule
from ._tree import describe, mismatch, path_name


class AnticipateState(NamedTuple):
    """State of `anticipate`.

    Attributes:
      loss_scale: f32[], the scale for the next backward pass.
      rule: state of the rule inside; its `loss_scale` is what that would take.
      amax: statistics of log2 of the largest gradient, unscaled.
      loss: statistics of the loss.
      alarm: f32[], by how much the loss is forecast to rise within the horizon, in units of what
        noise explains; 0 if it does not rise. From 1 on it lowers the scale.

    >>> import jscale
    >>> float(jscale.anticipate(jscale.dynamic()).init().alarm)
    0.0
    """

    loss_scale: jax.Array
    rule: Any
    amax: Forecast
    loss: Forecast
    alarm: jax.Array


def anticipate(
    rule: ScaleRule,
    *,
    horizon: int = 16,
    overflow_rate: float = 2.5e-4,
    max_bits: int = 4,
    min_scale: float = 2.0**-24,
) -> ScaleRule:
    """`rule`, with the scale lowered ahead of an overflow that can be seen coming.

    In each step the scale is that of `rule`, or less while either of these points to an overflow:

    - the trend of the gradients: log2 of the largest one is predicted as in `log_normal`, and where
      it rises by more than noise explains, the rise goes on for `horizon` steps. What is predicted
      has to fit under 65504;
    - the curvature of the loss: it rises, ever faster, so that within `horizon` steps it would rise
      by more than noise explains. Diverging runs do that before they overflow.

    It comes back by itself when the forecast does, by one doubling in a step. `rule` goes on as if
    its own scale had been used, but is told of an overflow at the scale that did overflow. So
    `anticipate(dynamic())` probes for larger scales without overflowing.

    `state.rule.alarm` (of the state of `with_loss_scale`) is there to be logged: see
    `AnticipateState`.

    Args:
      rule: any rule.
      horizon: how many steps to look ahead.
      overflow_rate: how rare an overflow by noise should be; it says how many deviations a forecast
        keeps free, and from how many on a rise of the loss is more than noise.
      max_bits: by how many doublings the curvature of the loss may lower the scale.
      min_scale: the forecast does not lower the scale below it.

    Returns:
      A `ScaleRule` whose state is an `AnticipateState`. It needs the gradients, unscaled, in the
      Observation, which `with_loss_scale` puts there; without `loss=` the second sign is missing.

    Raises:
      TypeError, ValueError: `rule` is no rule, or a setting is out of range.

    >>> import jax, jax.numpy as jnp, jscale
    >>> rule = jscale.anticipate(jscale.static(2**14))
    >>> state, update = rule.init(), jax.jit(rule.update)
    >>> for step in range(90):   # gradients that double every 10 steps, up to 2^1.9
    ...     grads = jnp.float32(2 ** (step / 10 - 7))
    ...     state = update(state, jscale.Observation(finite=True, grads=grads))
    ...     if step % 20 == 9:
    ...         print(f"2^{jnp.log2(state.loss_scale):.0f}", end=" ")
    2^14 2^14 2^14 2^14 2^12
    """
    if not isinstance(rule, ScaleRule):
        raise TypeError(
            f"rule must be a ScaleRule, got {describe(rule)}: pass e.g. jscale.dynamic()."
        )
    horizon = as_count("horizon", horizon)
    max_bits = as_count("max_bits", max_bits)
    z = quantile(overflow_rate)
    _, low, _ = bounds(2.0**126, min_scale, 2.0**126)

    def init() -> AnticipateState:
        state = rule.init()
        scale = jnp.array(state.loss_scale, jnp.float32)  # a copy, or it could not be donated
        return AnticipateState(scale, state, no_forecast(), no_forecast(), jnp.float32(0))

    def update(state: AnticipateState, observation: Observation) -> AnticipateState:
        finite, seen, x = look(observation)
        used = state.loss_scale
        before = jnp.where(finite, state.rule.loss_scale, used)
        inside = rule.update(state.rule._replace(loss_scale=before), observation)
        amax = noted(state.amax, x, seen, AMAX_MEMORY, AMAX_PRIOR)
        loss, alarm = state.loss, state.alarm
        if observation.loss is not None:
            value = jnp.asarray(observation.loss, jnp.float32)
            real = jnp.abs(value) < 1e18
            loss = noted(loss, jnp.minimum(value, _believable(loss)), real, LOSS_MEMORY)
            alarm = _rise(loss, horizon) / z

        _, slope = slopes(amax, AMAX_MEMORY)
        a, b, c = AMAX_MEMORY
        noise = jnp.sqrt(amax.squares[2]) / (2 * (c - b))
        ahead = horizon + jnp.asarray([a - 1, b - 1, c - 1], jnp.float32)
        expected = amax.means + ahead * jnp.maximum(slope - noise, 0) + z * jnp.sqrt(amax.squares)
        cap = whole(F16_LIMIT - best(amax, expected))
        cap = jnp.where(amax.noted > 0, cap, 126)
        # A rising loss lowers what it finds, be it the rule's or the forecast's.
        curved = jnp.clip(jnp.floor(alarm), 0, max_bits).astype(jnp.int32)
        lowest = jnp.minimum(inside.loss_scale, power_of_two(i32(low)))
        scale = jnp.minimum(inside.loss_scale, power_of_two(jnp.clip(cap, low, 126)))
        scale = jnp.maximum(scale * power_of_two(-curved), lowest)
        scale = jnp.minimum(scale, jnp.where(finite, 2 * used, used))
        return AnticipateState(scale, inside, amax, loss, alarm)

    return ScaleRule(init, update)


# Twice the longest memory: from then on slopes and deviations of the loss mean something.
_SETTLED = 2 * LOSS_MEMORY[-1]


def _believable(loss: Forecast) -> jax.Array:
    """The largest loss that is noted as it is: one bad batch must not look like a trend."""
    mean = loss.means[1]
    deviation = jnp.maximum(jnp.sqrt(loss.squares[1]), 1e-3 * jnp.abs(mean))
    return jnp.where(loss.noted >= _SETTLED, mean + 6 * deviation, jnp.inf)


def _rise(loss: Forecast, horizon: int) -> jax.Array:
    """By how many deviations the loss goes on to rise within the horizon."""
    a, b, c = LOSS_MEMORY
    slope, earlier = slopes(loss, LOSS_MEMORY)
    curvature = (slope - earlier) / ((c - a) / 2)  # the two slopes lie so many steps apart
    rise = horizon * slope + horizon**2 / 2 * curvature
    deviation = jnp.maximum(jnp.sqrt(loss.squares[1]), jnp.finfo(jnp.float32).tiny)
    real = (slope > 0) & (loss.noted >= _SETTLED)
    return jnp.where(real, jnp.clip(rise / deviation, 0, 1e6), 0.0)


def hooked(rule: ScaleRule, fn: Callable[[Any, Any, Observation], Any]) -> ScaleRule:
    """`rule`, with the last word in each step given to a function of yours.

    `fn` is traced, so it decides with `jnp.where`. It may use whatever the states hold: the count
    of steps in `log_normal`'s `amax.noted`, the `alarm` of `anticipate`, the gradients of a part of
    the model. A scale that it returns is used if it lies from 2^-126 to 2^126; for NaN, zero and
    what is beyond, that of `rule` is.

    Args:
      rule: any rule.
      fn: `fn(old_state, proposed_state, observation) -> state`, where `proposed_state` is what
        `rule` makes of `old_state`. It returns that, or another state like it.

    Returns:
      A `ScaleRule` with the states of `rule`.

    Raises:
      TypeError: `rule` is no rule, or `fn` no function; when traced, `fn` returns a state of
        another structure, shape or dtype.

    No more than 2^12 in the first 1000 steps, while the learning rate warms up:

    >>> import jax, jax.numpy as jnp, jscale
    >>> def clamp(old, proposed, observation):
    ...     low = jnp.minimum(proposed.loss_scale, 2.0**12)
    ...     warm = proposed.amax.noted >= 1000
    ...     return proposed._replace(loss_scale=jnp.where(warm, proposed.loss_scale, low))
    >>> rule = jscale.hooked(jscale.log_normal(2**12), clamp)

    No growth while the loss curves upwards:

    >>> def careful(old, proposed, observation):
    ...     kept = jnp.minimum(proposed.loss_scale, old.loss_scale)
    ...     rising = proposed.alarm >= 0.5
    ...     return proposed._replace(loss_scale=jnp.where(rising, kept, proposed.loss_scale))
    >>> rule = jscale.hooked(jscale.anticipate(jscale.log_normal()), careful)

    A policy for one part of the model: its gradients stay 4 doublings below float16's limit.

    >>> def spare_vision(old, proposed, observation):
    ...     amax = jscale.Observation(True, grads=observation.grads["vision"]).amax
    ...     fits = jnp.where(amax > 0, 2.0**12 / amax, jnp.inf)
    ...     scale = jnp.ldexp(1.0, jnp.frexp(jnp.minimum(proposed.loss_scale, fits))[1] - 1)
    ...     scale = jnp.where(observation.finite, scale, old.loss_scale / 2)
    ...     return proposed._replace(loss_scale=scale)
    >>> rule = jscale.hooked(jscale.dynamic(), spare_vision)
    >>> grads = {"vision": jnp.array([3.0]), "text": jnp.array([0.1])}
    >>> state = rule.update(rule.init(), jscale.Observation(finite=True, grads=grads))
    >>> float(state.loss_scale * 3)
    3072.0

    A line in the log whenever the scale moves, from inside jit:

    >>> def tell(old, new):
    ...     if old != new:
    ...         print(f"loss scale {old:g} -> {new:g}")
    >>> def log(old, proposed, observation):
    ...     jax.debug.callback(tell, old.loss_scale, proposed.loss_scale)
    ...     return proposed
    >>> rule = jscale.hooked(jscale.dynamic(8), log)
    >>> def one_overflow():
    ...     jax.jit(rule.update)(rule.init(), jscale.Observation(finite=False))
    ...     jax.effects_barrier()
    >>> one_overflow()
    loss scale 8 -> 4
    """
    if not isinstance(rule, ScaleRule):
        raise TypeError(
            f"rule must be a ScaleRule, got {describe(rule)}: pass e.g. jscale.dynamic()."
        )
    if not callable(fn):
        raise TypeError(
            f"fn must be a function (old, proposed, observation) -> state, got {describe(fn)}."
        )

    def update(state: Any, observation: Observation) -> Any:
        proposed = rule.update(state, observation)
        new = _like(fn(state, proposed, observation), proposed)
        scale = new.loss_scale
        legal = (scale >= LOWEST) & (scale <= HIGHEST)
        return new._replace(loss_scale=jnp.where(legal, scale, proposed.loss_scale))

    return ScaleRule(rule.init, update)


def _like(new: Any, proposed: Any) -> Any:
    """`new` with the dtypes of `proposed`, if that loses nothing."""
    remedy = "return the proposed state, or proposed._replace(...)"
    if difference := mismatch(new, proposed):
        raise TypeError(
            f"the function given to hooked returned another state than it may: {difference}; "
            f"{remedy}."
        )

    def one(path, x, like):
        x, like = jnp.asarray(x), jnp.asarray(like)
        kind = jnp.issubdtype(like.dtype, jnp.floating) - jnp.issubdtype(x.dtype, jnp.floating)
        if x.dtype != like.dtype and not (x.weak_type and kind == 0):
            raise TypeError(
                f"the function given to hooked returned {describe(x)} for {path_name(path)}, "
                f"which holds {describe(like)}: {remedy} with a value of that dtype."
            )
        return jax.lax.convert_element_type(x, like.dtype)

    return jax.tree.map_with_path(one, new, proposed)
