"""How the loss scale moves: pure rules, in the form of optax's init/update pairs."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._arguments import (
    HIGHEST,
    LOWEST,
    AxisName,
    as_axes,
    as_count,
    as_number,
    as_scale,
    check_bounds,
)
from ._finite import global_norm, over
from ._tree import PyTree, at_least_f32, describe, inexact_leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observation:
    """What a rule may look at after a backward pass.

    `amax` and `grad_norm` are worked out when a rule asks for them, and cost nothing otherwise.

    Attributes:
      finite: bool[], whether the gradients were finite.
      loss: f32[], the unscaled loss, or None if the caller did not pass it.
      grads: the unscaled gradients, or None.
      axis_name: axes of shard_map over which the gradients are spread, or None.

    >>> import jax.numpy as jnp, jscale
    >>> float(jscale.Observation(finite=True, grads={"w": jnp.array([3.0, -4.0])}).amax)
    4.0
    """

    finite: jax.typing.ArrayLike
    loss: jax.typing.ArrayLike | None = None
    grads: PyTree | None = None
    axis_name: AxisName = dataclasses.field(default=None, metadata={"static": True})

    def _need_grads(self, name: str) -> PyTree:
        if self.grads is None:
            raise ValueError(
                f"the rule asks for {name}, but this Observation has no gradients: "
                "pass grads=, unscaled."
            )
        return self.grads

    @property
    def amax(self) -> jax.Array:
        """f32[], the largest magnitude among the unscaled gradients; 0 if there are none."""
        leaves = inexact_leaves(self._need_grads("amax"))
        largest = [jnp.max(jnp.abs(at_least_f32(x)), initial=0).astype(jnp.float32) for x in leaves]
        amax = jnp.max(jnp.stack(largest)) if largest else jnp.zeros((), jnp.float32)
        amax = jnp.where(jnp.isnan(amax), jnp.inf, amax)  # a maximum over devices may lose a NaN
        axes = as_axes(self.axis_name)
        return lax.pmax(over(amax, axes), axes) if axes else amax

    @property
    def grad_norm(self) -> jax.Array:
        """f32[], the Euclidean norm of the unscaled gradients."""
        return global_norm(self._need_grads("grad_norm"), self.axis_name)


class ScaleRule(NamedTuple):
    """A rule for the loss scale: two pure functions, as `optax.GradientTransformation` has.

    Attributes:
      init: `init() -> state`, a NamedTuple of arrays with a field `loss_scale` (f32).
      update: `update(state, observation) -> state`, called once per step, traced under jit; the
        state that comes out has the structure, shapes and dtypes of the one that went in.

    A rule that keeps the largest gradient a factor of 1000 below float16's limit:

    >>> import jax.numpy as jnp, jscale, optax
    >>> def update(state, observation):
    ...     room = jnp.floor(jnp.log2(65.5 / jnp.maximum(observation.amax, 1e-6)))
    ...     fits = jnp.ldexp(jnp.float32(1), room.astype(int))  # exp2 is off by an ulp on CPUs
    ...     scale = jnp.where(observation.finite, fits, state.loss_scale / 2)
    ...     return state._replace(loss_scale=scale)
    >>> rule = jscale.ScaleRule(jscale.static(1024).init, update)
    >>> tx = jscale.with_loss_scale(optax.sgd(0.1), rule)
    >>> params = {"w": jnp.ones(2)}
    >>> _, state = tx.update({"w": jnp.array([0.1, -0.5])}, tx.init(params), params)
    >>> float(jscale.loss_scale(state))
    128.0
    """

    init: Callable[[], Any]
    update: Callable[[Any, Observation], Any]


def as_rule(name: str, value: Any) -> ScaleRule:
    if not isinstance(value, ScaleRule):
        raise TypeError(
            f"{name} must be a ScaleRule, got {describe(value)}: "
            "use jscale.dynamic(), jscale.static(1024) or jscale.off()."
        )
    return value


class DynamicState(NamedTuple):
    """State of `dynamic`.

    Attributes:
      loss_scale: f32[], the scale for the next backward pass.
      growth_tracker: i32[], clean steps since the last growth or overflow; below 0 while they do
        not count yet (`presets.deepspeed`).
      hysteresis_tracker: i32[], overflows that it still takes to lower the scale; 0 counts as 1.
      steps_at_min: i32[], for how many steps in a row the scale has come out at `min_scale`; an
        overflow with 2 or more is one that lowering the scale did not help.

    >>> import jscale
    >>> int(jscale.dynamic(4.0, hysteresis=2).init().hysteresis_tracker)
    2
    """

    loss_scale: jax.Array
    growth_tracker: jax.Array
    hysteresis_tracker: jax.Array
    steps_at_min: jax.Array


def as_growth(name: str, value: Any) -> float:
    """A growth factor: above 1, and finite, as float32 has it (1 + 1e-9 is 1 there)."""
    growth = as_number(name, value, "2 is usual")
    with np.errstate(over="ignore"):
        if not 1 < np.float32(growth) < math.inf:
            raise ValueError(f"{name} must be finite and above 1, got {growth}: 2 is usual.")
    return growth


def _as_backoff(name: str, value: Any) -> float:
    backoff = as_number(name, value, "0.5 is usual")
    with np.errstate(over="ignore", under="ignore"):
        if not 0 < np.float32(backoff) < 1:
            raise ValueError(
                f"{name} must lie strictly between 0 and 1, got {backoff}: 0.5 is usual."
            )
    return backoff


def times(scale: jax.Array, factor: float) -> jax.Array:
    """`scale * factor`, rounded once, for a factor that float32 need not hold."""
    if float(np.float32(factor)) == factor:
        return scale * np.float32(factor)
    with jax.enable_x64(True):  # inside these three operations only: they get and return float32
        product = lax.convert_element_type(scale, np.float64) * np.float64(factor)
        return lax.convert_element_type(product, np.float32)


class Ladder:
    """How far a scale moves, and within which bounds.

    Args:
      wide: use the factors as float64 has them, and round their products once, to float32. By
        default the factors are rounded to float32 first.
      hold_at_min: a backoff to below `min_scale` does not happen; by default it ends there.
      hold_at_max: a growth to above `max_scale` does not happen; by default it ends there.
      names: what the caller's arguments are called, where not as here.
    """

    def __init__(
        self,
        init_scale: float,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        min_scale: float = LOWEST,
        max_scale: float = HIGHEST,
        wide: bool = False,
        hold_at_min: bool = False,
        hold_at_max: bool = False,
        names: Mapping[str, str] = MappingProxyType({}),
    ):
        name = lambda key: names.get(key, key)
        self.init_scale = as_scale(name("init_scale"), init_scale)
        min_scale = as_scale(name("min_scale"), min_scale)
        max_scale = as_scale(name("max_scale"), max_scale)
        growth = as_growth(name("growth_factor"), growth_factor)
        backoff = _as_backoff(name("backoff_factor"), backoff_factor)
        check_bounds(
            (name("init_scale"), self.init_scale),
            (name("min_scale"), min_scale),
            (name("max_scale"), max_scale),
        )
        self._growth = growth if wide else float(np.float32(growth))
        self._backoff = backoff if wide else float(np.float32(backoff))
        self._min, self._max = np.float32(min_scale), np.float32(max_scale)
        self._hold_at_min, self._hold_at_max = hold_at_min, hold_at_max

    def first(self) -> tuple[jax.Array, jax.Array]:
        """The first scale, and for how many steps it has been at its minimum."""
        scale = jnp.asarray(self.init_scale, jnp.float32)
        return scale, self._at_min(scale).astype(jnp.int32)

    def move(
        self, scale: jax.Array, steps_at_min: jax.Array, grow: jax.Array, drop: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The next of both."""
        up, down = times(scale, self._growth), times(scale, self._backoff)
        if self._hold_at_max:
            up = jnp.where(up > self._max, scale, up)
        if self._hold_at_min:
            down = jnp.where(down < self._min, scale, down)
        # A run may be resumed with other bounds than its scale had kept.
        scale = jnp.clip(jnp.where(grow, up, jnp.where(drop, down, scale)), self._min, self._max)
        return scale, jnp.where(self._at_min(scale), steps_at_min + 1, 0)

    def _at_min(self, scale: jax.Array) -> jax.Array:
        """Whether a backoff would leave the scale where it is."""
        if self._hold_at_min:
            return times(scale, self._backoff) < self._min
        return scale <= self._min


def counting(
    init_scale: float,
    *,
    growth_interval: int,
    hysteresis: int = 1,
    refill: Literal["growth", "clean", "drop"] = "growth",
    uncounted: int = 0,
    names: Mapping[str, str] = MappingProxyType({}),
    **ladder: Any,
) -> ScaleRule:
    """`dynamic`, and what other systems' rules of its kind differ in.

    Args:
      uncounted: clean steps that do not count, at the start and after every overflow.
      **ladder: see `Ladder`.
    """
    name = lambda key: names.get(key, key)
    steps = Ladder(init_scale, names=names, **ladder)
    growth_interval = as_count(name("growth_interval"), growth_interval)
    hysteresis = as_count(name("hysteresis"), hysteresis)
    if refill not in ("growth", "clean", "drop"):
        raise ValueError(
            f"refill must be 'growth', 'clean' or 'drop', got {refill!r}: see the docstring."
        )

    def init() -> DynamicState:
        scale, steps_at_min = steps.first()
        return DynamicState(
            loss_scale=scale,
            growth_tracker=jnp.asarray(-uncounted, jnp.int32),
            hysteresis_tracker=jnp.asarray(hysteresis, jnp.int32),
            steps_at_min=steps_at_min,
        )

    def update(state: DynamicState, observation: Observation) -> DynamicState:
        scale, clean_steps, credit, steps_at_min = state
        finite = jnp.asarray(observation.finite, bool)
        # >= and minimum: a run may be resumed with smaller settings than its counts had reached.
        grow = finite & (clean_steps + 1 >= growth_interval)
        left = jnp.maximum(jnp.minimum(credit, hysteresis) - 1, 0)
        drop = ~finite & (left == 0)

        scale, steps_at_min = steps.move(scale, steps_at_min, grow, drop)
        restart = jnp.where(finite, 0, -uncounted)
        refills = {"growth": grow, "clean": finite, "drop": finite | drop}[refill]
        return DynamicState(
            loss_scale=scale,
            growth_tracker=jnp.where(finite & ~grow, clean_steps + 1, restart),
            hysteresis_tracker=jnp.where(refills, hysteresis, jnp.where(finite, credit, left)),
            steps_at_min=steps_at_min,
        )

    return ScaleRule(init, update)


def dynamic(
    init_scale: float = 2.0**16,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 2.0**-24,
    max_scale: float = 2.0**32,
    hysteresis: int = 1,
    refill: Literal["growth", "clean", "drop"] = "growth",
) -> ScaleRule:
    """Grow after `growth_interval` clean steps in a row, back off on overflow.

    The rule of torch.amp.GradScaler with bounds on both sides, and with the hysteresis of
    Megatron, apex or Paddle. The growth happens on the `growth_interval`-th clean step.

    Gradients that are all zero count as clean: they may have underflowed, and growth is the cure.
    Under a parameter group that never gets a gradient the scale therefore climbs to `max_scale`
    and stays there; `grad_norm` in the metrics is then 0.

    Args:
      init_scale: scale of the first step.
      growth_factor: multiplies the scale, above 1.
      backoff_factor: multiplies the scale on overflow, in (0, 1).
      growth_interval: clean steps in a row before a growth.
      min_scale: the scale never falls below it. The default, 2^-24, is far below 1: where
        activations are large, gradients overflow at a scale of 1 and a floor there never lets go.
      max_scale: the scale never grows above it.
      hysteresis: how many overflows it takes to lower the scale. A tolerated overflow still
        restarts the count of clean steps.
      refill: when spent hysteresis comes back: on `"growth"` (Megatron), on every `"clean"` step
        (apex's update_scale_hysteresis), or on every clean step and after each `"drop"` (Paddle).

    Returns:
      A `ScaleRule` whose state is a `DynamicState`.

    Raises:
      TypeError, ValueError: a setting is not a number, or is out of range.

    >>> import jscale
    >>> rule = jscale.dynamic(4, growth_interval=2)
    >>> state = rule.init()
    >>> for finite in (True, True, False):
    ...     state = rule.update(state, jscale.Observation(finite=finite))
    ...     print(float(state.loss_scale))
    4.0
    8.0
    4.0
    """
    return counting(
        init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
        hysteresis=hysteresis,
        refill=refill,
    )


class StaticState(NamedTuple):
    """State of `static`.

    Attributes:
      loss_scale: f32[], the scale.

    >>> import jscale
    >>> float(jscale.static(8).init().loss_scale)
    8.0
    """

    loss_scale: jax.Array


def static(scale: float) -> ScaleRule:
    """A constant scale. Steps with non-finite gradients are still skipped.

    A run that is resumed with another scale takes its first step at the saved one.

    Args:
      scale: positive, finite and normal in float32.

    Returns:
      A `ScaleRule` whose state is a `StaticState`.

    Raises:
      TypeError, ValueError: `scale` is not a number, or is out of range.

    >>> import jscale
    >>> float(jscale.static(1024).init().loss_scale)
    1024.0
    """
    scale = as_scale("scale", scale)
    return ScaleRule(
        init=lambda: StaticState(jnp.asarray(scale, jnp.float32)),
        update=lambda state, observation: StaticState(jnp.asarray(scale, jnp.float32)),
    )


class OffState(NamedTuple):
    """State of `off`.

    Attributes:
      loss_scale: f32[], always 1.

    >>> import jscale
    >>> isinstance(jscale.off().init(), jscale.OffState)
    True
    """

    loss_scale: jax.Array


def off() -> ScaleRule:
    """No scale and no check, for bfloat16 and float32 runs of the same training loop.

    `with_loss_scale(inner, off())` is bitwise `inner`: nothing is looked at or skipped, and
    gradients that `value_and_grad` widened go back to the dtype of their parameters.

    Returns:
      A `ScaleRule` whose state is an `OffState`.

    >>> import jscale
    >>> float(jscale.off().init().loss_scale)
    1.0
    """
    return ScaleRule(
        init=lambda: OffState(jnp.ones((), jnp.float32)),
        update=lambda state, observation: state,
    )
