"""Rules made of other rules."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._arguments import HIGHEST, LOWEST, as_count, as_power_of_two
from ._forecast import (
    AMAX_MEMORY,
    AMAX_PRIOR,
    F16_LIMIT,
    LOSS_MEMORY,
    Forecast,
    best,
    i32,
    look,
    no_forecast,
    noted,
    power_of_two,
    quantile,
    slopes,
    whole,
)
from ._rules import Observation, OffState, ScaleRule, as_rule
from ._tree import describe, mismatch, path_name, strong


class AnticipateState(NamedTuple):
    """State of `anticipate`.

    Attributes:
      loss_scale: f32[], the scale for the next backward pass.
      rule: state of the rule inside; its `loss_scale` is what that would take.
      amax: statistics of log2 of the largest gradient, unscaled.
      loss: statistics of the loss.
      alarm: f32[], by how much the loss is forecast to rise within the horizon, in units of what
        noise explains; 0 if it does not rise. From 1 on it lowers the scale.
      steps_at_min: i32[], that of the rule inside; 0 if it has none.

    >>> import jscale
    >>> float(jscale.anticipate(jscale.dynamic()).init().alarm)
    0.0
    """

    loss_scale: jax.Array
    rule: Any
    amax: Forecast
    loss: Forecast
    alarm: jax.Array
    steps_at_min: jax.Array


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
    rule = as_rule("rule", rule)
    _check_single("anticipate", rule)
    horizon = as_count("horizon", horizon)
    max_bits = as_count("max_bits", max_bits)
    z = quantile(overflow_rate)
    low = as_power_of_two("min_scale", min_scale)
    at_min = lambda state: jnp.array(getattr(state, "steps_at_min", 0), jnp.int32)

    def init() -> AnticipateState:
        state = rule.init()
        scale = jnp.array(state.loss_scale, jnp.float32)  # a copy, or it could not be donated
        none = no_forecast(), no_forecast(), jnp.float32(0)
        return AnticipateState(scale, state, *none, at_min(state))

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
        return AnticipateState(scale, inside, amax, loss, alarm, at_min(inside))

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

    It first acts after the first step, so choose the first scale of `rule` accordingly. Under
    `off()` nothing is decided, and `fn` is not called.

    Args:
      rule: any rule.
      fn: `fn(old_state, proposed_state, observation) -> state`, where `proposed_state` is what
        `rule` makes of `old_state`. It returns that, or another state like it.

    Returns:
      A `ScaleRule` with the states of `rule`.

    Raises:
      TypeError: `rule` is no rule, or `fn` no function; when traced, `fn` returns a state of
        another structure, shape or dtype.

    No more than 2^12 in the first 1000 steps, while the learning rate warms up, with the default
    rule inside `anticipate`, which counts the steps, as `log_normal` does:

    >>> import jax, jax.numpy as jnp, jscale
    >>> def clamp(old, proposed, observation):
    ...     low = jnp.minimum(proposed.loss_scale, 2.0**12)
    ...     warm = proposed.amax.noted >= 1000
    ...     return proposed._replace(loss_scale=jnp.where(warm, proposed.loss_scale, low))
    >>> rule = jscale.hooked(jscale.anticipate(jscale.dynamic(2**12)), clamp)

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
    rule = as_rule("rule", rule)
    if not callable(fn):
        raise TypeError(
            f"fn must be a function (old, proposed, observation) -> state, got {describe(fn)}."
        )
    if isinstance(rule.init(), OffState):
        return rule

    def update(state: Any, observation: Observation) -> Any:
        proposed = rule.update(state, observation)
        new = _as_proposed(fn(state, proposed, observation), proposed)
        scale = new.loss_scale
        legal = (scale >= LOWEST) & (scale <= HIGHEST)
        return new._replace(loss_scale=jnp.where(legal, scale, proposed.loss_scale))

    return ScaleRule(rule.init, update)


def _as_proposed(new: Any, proposed: Any) -> Any:
    """`new` with the dtypes of `proposed`, if that loses nothing."""
    remedy = "return the proposed state, or proposed._replace(...)"
    if new is None:
        raise TypeError(
            "the function given to hooked returned None: end it with `return proposed`."
        )
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


def _check_single(name: str, rule: ScaleRule) -> None:
    if jnp.ndim(rule.init().loss_scale):
        raise ValueError(
            f"{name} takes a rule for a single scale, and was given one for several: put stacked "
            "around all other rules."
        )


def stacked(rule: ScaleRule, n: int) -> ScaleRule:
    """One scale for each layer of a scanned stack, each with its own state of `rule`.

    For a dict of rules: the leaves under its key have a leading axis of `n` layers, as
    `jax.lax.scan` takes them. The scan runs from layer 0 to layer n - 1, so the backward pass comes
    to the last layer first, and where a layer overflows, the rules of those below it hold their
    state: their gradients come out of that overflow. The layers are one group of `with_loss_scale`,
    so a step is applied to all of them or to none.

        def body(x, layer):
            params, scale = layer
            return jscale.region(block, scale, scales["head"])(params, x), None

        x, _ = jax.lax.scan(body, x, (params["layers"], scales["layers"]))

    Let what passes from layer to layer be float32: between them its cotangents are at the scale
    around the regions, whatever the layers do. On a mesh of explicit axes, the axis of the layers
    cannot be sharded.

    Args:
      rule: any rule for a single scale.
      n: the number of layers.

    Returns:
      A `ScaleRule` whose states are those of `rule` with a leading axis of n: `loss_scale` is
      f32[n]. It takes `finite` as bool[n] or bool[], and gradients with a leading axis of n.

    Raises:
      TypeError, ValueError: `rule` is no rule for a single scale, or `n` no count.

    >>> import jax.numpy as jnp, jscale
    >>> rule = jscale.stacked(jscale.dynamic(8, growth_interval=1), 3)
    >>> finite = jnp.array([True, False, True])
    >>> print(rule.update(rule.init(), jscale.Observation(finite)).loss_scale)
    [ 8.  4. 16.]
    """
    rule = as_rule("rule", rule)
    n = as_count("n", n)
    _check_single("stacked", rule)

    def init() -> Any:
        return jax.tree.map(lambda x: jnp.stack([strong(jnp.asarray(x))] * n), rule.init())

    def update(state: Any, observation: Observation) -> Any:
        finite = jnp.broadcast_to(jnp.asarray(observation.finite, bool), (n,))
        one = lambda state, finite, grads: rule.update(
            state, dataclasses.replace(observation, finite=finite, grads=grads)
        )
        new = jax.vmap(one)(state, finite, observation.grads)
        layer = jnp.arange(n)
        learns = layer >= jnp.max(jnp.where(finite, -1, layer))
        hold = lambda new, old: jnp.where(learns.reshape((n,) + (1,) * (old.ndim - 1)), new, old)
        return jax.tree.map(hold, new, state)

    return ScaleRule(init, update)
