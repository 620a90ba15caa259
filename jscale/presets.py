"""The loss scale rules of other systems, step by step, under their own argument names.

Each preset returns a `ScaleRule`, whose state is a `jscale.DynamicState` unless its docstring names
another. Given the same steps, it has the same scale before each of them as the system that it is
named after: it is tested against recordings of them (`dalle`, whose source is not public, against
its paper). An argument that is not a number, a flag that
is not a bool (TypeError), or a value out of range (ValueError) is refused under its own name. What
differs, everywhere:

- **Bounds.** A scale stays within [2^-126, 2^126]. Some systems let it go on to 2^127, inf,
  float64's larger numbers, subnormals or 0; inf and 0 are never left again. There the preset stays
  at its bound. An initial scale beyond them is an error.
- **float32.** apex's `fp16_utils`, fairseq and MindSpore's manager keep the scale as a Python
  float. For factors that are no power of two, each change of the preset's scale is rounded to
  float32, that is by 2^-24 at most.
- **Nothing raises inside jit.** Where a system stops the run (DeepSpeed and fairseq at the minimum,
  MindSpore after 1000 overflows in a row), the preset keeps the scale. `jscale.check`, called on
  the host, raises then, or sooner.
- **The rule only.** What is looked at, and when, is `with_loss_scale`'s: one update for each step,
  by the float32 norm of the unscaled gradients, and one decision for all parameters. torch's scaler
  decides optimizer by optimizer, apex updates once for each backward pass, Paddle's last optimizer
  decides for all.
- **Changed settings.** In a run that goes on with a smaller interval than its count has reached,
  the scale grows at once; torch, Megatron and Keras, which test for equality, wait for an overflow.

>>> import jax.numpy as jnp, jscale, optax
>>> from jscale import presets
>>> tx = jscale.with_loss_scale(optax.adamw(3e-4), presets.megatron(initial_scale=2**16))
>>> float(jscale.loss_scale(tx.init({"w": jnp.ones(2)})))
65536.0
"""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._arguments import HIGHEST, LOWEST, as_count, as_number, as_scale, as_switch
from ._rules import (
    Ladder,
    Observation,
    ScaleRule,
    as_growth,
    counting,
    off,
    static,
    times,
)

__all__ = [
    "DalleState",
    "FairseqState",
    "LogMaxState",
    "apex",
    "apex_fp16_utils",
    "apex_hysteresis",
    "dalle",
    "deepspeed",
    "fairseq",
    "flax",
    "jmp",
    "keras",
    "megatron",
    "mindspore",
    "openseq2seq_backoff",
    "openseq2seq_logmax",
    "paddle",
    "tensorflow",
    "torch",
]


# For messages, where the minimum is no argument.
_FIXED = {"min_scale": "the minimum"}


def _bound(name: str, value: float) -> float:
    bound = as_number(name, value, "pass a positive number")
    if not bound >= 0:
        raise ValueError(f"{name} must not be negative, got {bound}: pass a positive number.")
    return bound


def _floor(name: str, value: float) -> float:
    """A reference's minimum; jscale's, where that is higher."""
    return max(_bound(name, value), LOWEST)


def _ceiling(name: str, value: float) -> float:
    return as_scale(name, min(_bound(name, value), HIGHEST))


def _rounded(name: str, value: float) -> float:
    """A growth factor as float32 has it."""
    return float(np.float32(as_growth(name, value)))


def torch(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> ScaleRule:
    """`torch.amp.GradScaler`, and FSDP's `ShardedGradScaler`.

    Not followed: no minimum (2^-126 here, where torch goes on to 0); 2^127; `update(new_scale)`;
    the state machine of each optimizer (`unscale_`, `step`, `update`). FSDP's scaler rounds its
    factors to float32 on CPUs, and goes to inf. Source: PyTorch 2.13, `torch/amp/grad_scaler.py`
    and `_amp_update_scale_`.

    Args:
      init_scale: scale of the first step.
      growth_factor: multiplies the scale after `growth_interval` clean steps in a row; a growth
        that float32 cannot hold is dropped.
      backoff_factor: multiplies the scale on overflow.
      growth_interval: clean steps in a row before a growth.
      enabled: False gives `jscale.off()`.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    >>> import jscale
    >>> rule = jscale.presets.torch(8, growth_interval=1)
    >>> float(rule.update(rule.init(), jscale.Observation(finite=True)).loss_scale)
    16.0
    """
    if not as_switch("enabled", enabled):
        return off()
    return counting(
        init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        wide=True,
        hold_at_max=True,
    )


def apex(
    loss_scale: float | Literal["dynamic"] = "dynamic",
    init_scale: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> ScaleRule:
    """`apex.amp`'s `LossScaler`: torch's rule with a maximum, at which it stops.

    Not followed: one update per backward pass; a constant scale that applies overflowed steps
    (`static` skips them). Source: apex before amp was removed, `apex/amp/scaler.py`.

    Args:
      loss_scale: `"dynamic"`, or a constant.
      init_scale: scale of the first step, or `max_loss_scale` if that is less.
      scale_factor: 2. apex takes others, and uses 2.
      scale_window: clean steps in a row before the scale is doubled.
      min_loss_scale: the scale never falls below it; None is 2^-126.
      max_loss_scale: the scale never grows above it.

    Returns:
      A `ScaleRule` whose state is a `jscale.DynamicState`; `jscale.static` for a constant.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    >>> import jscale
    >>> float(jscale.presets.apex(init_scale=2.0**30).init().loss_scale) == 2**24
    True
    """
    if not (isinstance(loss_scale, str) and loss_scale == "dynamic"):
        return static(as_scale("loss_scale", loss_scale))
    if as_number("scale_factor", scale_factor, "leave it out") != 2:
        raise ValueError(
            f"scale_factor must be 2, got {scale_factor}: apex.amp takes it and uses 2, "
            "so leave it out; apex_fp16_utils has others."
        )
    largest = _ceiling("max_loss_scale", max_loss_scale)
    return counting(
        min(as_number("init_scale", init_scale, "2**16 is usual"), largest),
        growth_interval=scale_window,
        min_scale=_floor("min_loss_scale", 0 if min_loss_scale is None else min_loss_scale),
        max_scale=largest,
        names={
            "growth_interval": "scale_window",
            "min_scale": "min_loss_scale",
            "max_scale": "max_loss_scale",
        },
    )


def apex_fp16_utils(
    init_scale: float = 2.0**32,
    scale_factor: float = 2.0,
    scale_window: int = 1000,
) -> ScaleRule:
    """`apex.fp16_utils.DynamicLossScaler`, and `apex.contrib`'s `FP16_Optimizer` (from 2^16).

    The minimum is 1. Source: `apex/fp16_utils/loss_scaler.py`.

    Args:
      init_scale: scale of the first step.
      scale_factor: multiplies the scale after `scale_window` clean steps, divides it on overflow.
      scale_window: clean steps in a row before a growth.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    >>> import jscale
    >>> rule = jscale.presets.apex_fp16_utils(1)
    >>> float(rule.update(rule.init(), jscale.Observation(finite=False)).loss_scale)
    1.0
    """
    factor = as_growth("scale_factor", scale_factor)
    return counting(
        init_scale,
        growth_factor=factor,
        backoff_factor=1 / factor,
        growth_interval=scale_window,
        min_scale=1.0,
        wide=True,
        names={"growth_interval": "scale_window", **_FIXED},
    )


def apex_hysteresis(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
) -> ScaleRule:
    """apex's kernel `update_scale_hysteresis`: torch's rule, which tolerates overflows.

    It takes `hysteresis` overflows in a row to lower the scale; each further one in the same row
    lowers it again. Source: `csrc/update_scale_hysteresis.cu`.

    Args:
      init_scale: scale of the first step.
      growth_factor: multiplies the scale after `growth_interval` clean steps in a row; a growth
        that float32 cannot hold is dropped.
      backoff_factor: multiplies the scale.
      growth_interval: clean steps in a row before a growth.
      hysteresis: overflows in a row that it takes to lower the scale.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    >>> import jscale
    >>> rule = jscale.presets.apex_hysteresis(8, hysteresis=2)
    >>> state = rule.init()
    >>> for _ in range(3):
    ...     state = rule.update(state, jscale.Observation(finite=False))
    ...     print(float(state.loss_scale))
    8.0
    4.0
    2.0
    """
    return counting(
        init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        refill="clean",
        wide=True,
        hold_at_max=True,
    )


def deepspeed(
    init_scale: float = 2.0**16,
    scale_window: int = 1000,
    min_scale: float = 1.0,
    delayed_shift: int = 2,
    consecutive_hysteresis: bool = False,
    raise_error_at_min_scale: bool = True,
) -> ScaleRule:
    """DeepSpeed's `DynamicLossScaler`, and its `FP16_Optimizer`.

    At the start, and after every overflow, the first growth takes `scale_window + 1` clean steps.
    DeepSpeed's configuration calls these settings `initial_scale_power`, `loss_scale_window`,
    `min_loss_scale`, `hysteresis` and `consecutive_hysteresis`; its defaults are the ones here.
    Until 0.19 the `FP16_Optimizer`, which is used without ZeRO, has no hysteresis:
    `delayed_shift=1`.

    Source: DeepSpeed 0.19.8, `runtime/fp16/loss_scaler.py` and `fused_optimizer.py`.

    Args:
      init_scale: scale of the first step.
      scale_window: clean steps before the scale is doubled.
      min_scale: the scale never falls below it.
      delayed_shift: overflows that it takes to lower the scale. Once it has been lowered, every
        further one lowers it again.
      consecutive_hysteresis: whether a clean step forgives the overflows before it; by default only
        a growth does.
      raise_error_at_min_scale: not followed, for nothing can raise inside jit. The scale stays at
        its minimum, as under False; call `jscale.check` on the host, which raises when the minimum
        does not help.

    Returns:
      A `ScaleRule` whose state is a `jscale.DynamicState`, with a `growth_tracker` that starts at
      -1.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    >>> import jscale
    >>> rule = jscale.presets.deepspeed(8, scale_window=1)
    >>> state = rule.init()
    >>> for _ in range(3):
    ...     state = rule.update(state, jscale.Observation(finite=True))
    ...     print(float(state.loss_scale))
    8.0
    16.0
    32.0
    """
    as_switch("raise_error_at_min_scale", raise_error_at_min_scale)
    consecutive = as_switch("consecutive_hysteresis", consecutive_hysteresis)
    return counting(
        init_scale,
        growth_interval=scale_window,
        min_scale=_floor("min_scale", min_scale),
        hysteresis=delayed_shift,
        refill="clean" if consecutive else "growth",
        uncounted=1,
        names={"growth_interval": "scale_window", "hysteresis": "delayed_shift"},
    )


def megatron(
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> ScaleRule:
    """Megatron-Core's `DynamicGradScaler`.

    Clean steps do not restore spent hysteresis, whatever its docstring says: only a growth does.
    The defaults are those of Megatron's configuration, where `growth_interval` is
    `loss_scale_window`. Its constant scale is `jscale.static`. Not followed: it has no maximum, and
    stays at inf.

    Source: Megatron-LM, `megatron/core/optimizer/grad_scaler.py`.

    Args:
      initial_scale: scale of the first step.
      min_scale: the scale never falls below it.
      growth_factor: multiplies the scale after `growth_interval` clean steps in a row.
      backoff_factor: multiplies the scale.
      growth_interval: clean steps in a row before a growth.
      hysteresis: overflows since the last growth that it takes to lower the scale. Once it has been
        lowered, every further one lowers it again.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    >>> import jscale
    >>> int(jscale.presets.megatron().init().hysteresis_tracker)
    2
    """
    return counting(
        initial_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=_floor("min_scale", min_scale),
        hysteresis=hysteresis,
        names={"init_scale": "initial_scale"},
    )


class FairseqState(NamedTuple):
    """State of `fairseq`.

    Attributes:
      loss_scale: f32[], the scale for the next backward pass.
      growth_tracker: i32[], clean steps since the last growth or overflow.
      steps_since_rescale: i32[], steps since the scale last changed.
      overflows_since_drop: i32[], overflows since the scale was last lowered.
      steps_at_min: i32[], for how many steps in a row the scale could not fall.

    >>> import jscale
    >>> jscale.presets.fairseq().init()._fields[1:3]
    ('growth_tracker', 'steps_since_rescale')
    """

    loss_scale: jax.Array
    growth_tracker: jax.Array
    steps_since_rescale: jax.Array
    overflows_since_drop: jax.Array
    steps_at_min: jax.Array


def fairseq(
    init_scale: float = 2.0**15,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    tolerance: float = 0.0,
    threshold: float | None = None,
    min_loss_scale: float = 1e-4,
) -> ScaleRule:
    """fairseq's `DynamicLossScaler`.

    An overflow lowers the scale if the share of overflows since the last change is at least
    `tolerance`. The overflows are counted since the last drop, and the steps since the last change
    of any kind; so it is in fairseq.

    A scale of `min_loss_scale` or less aborts the run there. Nothing can raise inside jit: the
    scale stays at the last one above it, and `jscale.check`, called on the host, raises then.
    fairseq also aborts on an overflow that it tolerates when the scale is that low already.

    Source: fairseq, `fairseq/optim/dynamic_loss_scaler.py`; its command line starts at 128.

    Args:
      init_scale: scale of the first step.
      scale_factor: multiplies the scale after `scale_window` clean steps, divides it on overflow.
      scale_window: clean steps in a row before a growth.
      tolerance: the share of overflows, from 0 to 1, below which the scale stays; 0 tolerates none.
      threshold: the scale never falls below it, if it is above `min_loss_scale`.
      min_loss_scale: the scale stays above it.

    Returns:
      A `ScaleRule` whose state is a `FairseqState`.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    >>> import jscale
    >>> rule = jscale.presets.fairseq(8, tolerance=0.4)
    >>> state = rule.init()
    >>> for finite in (True, True, False, False):
    ...     state = rule.update(state, jscale.Observation(finite=finite))
    ...     print(float(state.loss_scale))
    8.0
    8.0
    8.0
    4.0
    """
    factor = as_growth("scale_factor", scale_factor)
    scale_window = as_count("scale_window", scale_window)
    tolerance = as_number("tolerance", tolerance, "pass a share from 0 to 1")
    if not 0 <= tolerance <= 1:
        raise ValueError(f"tolerance must lie within [0, 1], got {tolerance}: it is a share.")
    first = as_scale("init_scale", init_scale)
    floor = _floor("threshold", 0 if threshold is None else threshold)
    aborts = min(_bound("min_loss_scale", min_loss_scale), HIGHEST)
    hold = floor <= aborts
    if hold:
        above = np.float32(aborts)
        above = above if above > aborts else np.nextafter(above, np.float32(math.inf))
        floor = min(max(float(above), LOWEST), first)  # what begins below stays there
    steps = Ladder(
        first,
        growth_factor=factor,
        backoff_factor=1 / factor,
        min_scale=floor,
        wide=True,
        hold_at_min=hold,
        names={"min_scale": "threshold"},
    )

    def init() -> FairseqState:
        scale, steps_at_min = steps.first()
        none = lambda: jnp.zeros((), jnp.int32)  # no buffer twice, or it could not be donated
        return FairseqState(scale, none(), none(), none(), steps_at_min)

    def update(state: FairseqState, observation: Observation) -> FairseqState:
        scale, clean_steps, since, overflows, steps_at_min = state
        finite = jnp.asarray(observation.finite, bool)
        since, overflows = since + 1, overflows + (~finite).astype(jnp.int32)
        grow = finite & (clean_steps + 1 >= scale_window)
        # Not the quotient, since GPUs may round 1 / 20 to below 0.05.
        tolerated = times(since.astype(jnp.float32), tolerance)
        drop = ~finite & (overflows.astype(jnp.float32) >= tolerated)
        scale, steps_at_min = steps.move(scale, steps_at_min, grow, drop)
        return FairseqState(
            loss_scale=scale,
            growth_tracker=jnp.where(finite & ~grow, clean_steps + 1, 0),
            steps_since_rescale=jnp.where(grow | drop, 0, since),
            overflows_since_drop=jnp.where(drop, 0, overflows),
            steps_at_min=steps_at_min,
        )

    return ScaleRule(init, update)


def keras(initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000) -> ScaleRule:
    """Keras 3's `LossScaleOptimizer`.

    Not followed: it has neither minimum nor maximum, and ends at 0 (on JAX and TensorFlow below
    2^-126) or inf. Source: Keras 3.15, `keras/src/optimizers/loss_scale_optimizer.py`.

    Args:
      initial_scale: scale of the first step.
      dynamic_growth_steps: clean steps in a row before the scale is doubled.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    >>> import jscale
    >>> float(jscale.presets.keras().init().loss_scale)
    32768.0
    """
    return counting(
        initial_scale,
        growth_interval=dynamic_growth_steps,
        names={"init_scale": "initial_scale", "growth_interval": "dynamic_growth_steps"},
    )


def tensorflow(
    initial_scale: float = 2.0**15, growth_steps: int = 2000, multiplier: float = 2.0
) -> ScaleRule:
    """TensorFlow's `LossScaleOptimizer` of `tf.keras`, and `DynamicLossScale` of TensorFlow 1.

    The minimum is 1; a growth that float32 cannot hold is dropped. TensorFlow 1 calls the arguments
    `initial_loss_scale`, `increment_period` and `multiplier`. Not followed: 2^127.

    Source: TensorFlow 2.21, `python/keras/mixed_precision/loss_scale_optimizer.py` and
    `python/training/experimental/loss_scale.py`.

    Args:
      initial_scale: scale of the first step.
      growth_steps: clean steps in a row before a growth.
      multiplier: multiplies the scale, and divides it on overflow.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    >>> import jscale
    >>> rule = jscale.presets.tensorflow(1)
    >>> float(rule.update(rule.init(), jscale.Observation(finite=False)).loss_scale)
    1.0
    """
    factor = _rounded("multiplier", multiplier)
    return counting(
        initial_scale,
        growth_factor=factor,
        backoff_factor=1 / factor,
        growth_interval=growth_steps,
        min_scale=1.0,
        wide=True,
        hold_at_max=True,
        names={"init_scale": "initial_scale", "growth_interval": "growth_steps", **_FIXED},
    )


def paddle(
    init_loss_scaling: float = 2.0**16,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
    use_dynamic_loss_scaling: bool = True,
    *,
    enable: bool = True,
    static_graph: bool = False,
) -> ScaleRule:
    """`paddle.amp.GradScaler`, and the operation `update_loss_scaling_` of static graphs.

    It takes `decr_every_n_nan_or_inf` overflows in a row for each drop. Not followed: an eager
    scale has neither minimum nor maximum, and ends at 0 or inf. Source: Paddle 3.3,
    `python/paddle/amp/grad_scaler.py`.

    Args:
      init_loss_scaling: scale of the first step.
      incr_ratio: multiplies the scale after `incr_every_n_steps` clean steps in a row.
      decr_ratio: multiplies the scale.
      incr_every_n_steps: clean steps in a row before a growth.
      decr_every_n_nan_or_inf: overflows in a row for each drop.
      use_dynamic_loss_scaling: False gives `jscale.static(init_loss_scaling)`.
      enable: False gives `jscale.off()`.
      static_graph: the operation's rule: the minimum is 1, and a growth that float32 cannot hold is
        dropped.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    >>> import jscale
    >>> rule = jscale.presets.paddle(8, decr_every_n_nan_or_inf=2)
    >>> state = rule.init()
    >>> for _ in range(4):
    ...     state = rule.update(state, jscale.Observation(finite=False))
    ...     print(float(state.loss_scale))
    8.0
    4.0
    4.0
    2.0
    """
    static_graph = as_switch("static_graph", static_graph)
    dynamic = as_switch("use_dynamic_loss_scaling", use_dynamic_loss_scaling)
    if not as_switch("enable", enable):
        return off()
    if not dynamic:
        return static(as_scale("init_loss_scaling", init_loss_scaling))
    return counting(
        init_loss_scaling,
        growth_factor=incr_ratio,
        backoff_factor=decr_ratio,
        growth_interval=incr_every_n_steps,
        min_scale=1.0 if static_graph else LOWEST,
        hysteresis=decr_every_n_nan_or_inf,
        refill="drop",
        hold_at_max=static_graph,
        names={
            "init_scale": "init_loss_scaling",
            "growth_factor": "incr_ratio",
            "backoff_factor": "decr_ratio",
            "growth_interval": "incr_every_n_steps",
            "hysteresis": "decr_every_n_nan_or_inf",
            **_FIXED,
        },
    )


def mindspore(
    init_loss_scale: float = 2.0**24, scale_factor: float = 2.0, scale_window: int = 2000
) -> ScaleRule:
    """MindSpore's `DynamicLossScaleManager`, `DynamicLossScaleUpdateCell` and `DynamicLossScaler`.

    The minimum is 1. The cell calls the first argument `loss_scale_value`, the functional scaler
    `scale_value`. Not followed: the manager raises at the 1001st overflow in a row (`jscale.check`
    raises sooner, when the minimum does not help); the cell has no maximum, and stays at inf. For
    factors that are no powers of two the three differ in the last bits, since the cell multiplies
    by the float32 reciprocal: each change of the scale is met within 1.5 * 2^-24 of its value, and
    over 300 steps at a factor of 1.3 they drift apart by 1.5e-5.

    Source: MindSpore 2.10, `train/loss_scale_manager.py`, `nn/wrap/loss_scale.py`,
    `amp.py`.

    Args:
      init_loss_scale: scale of the first step.
      scale_factor: multiplies the scale after `scale_window` clean steps, divides it on overflow.
      scale_window: clean steps in a row before a growth.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    >>> import jscale
    >>> float(jscale.presets.mindspore().init().loss_scale) == 2**24
    True
    """
    factor = _rounded("scale_factor", scale_factor)
    return counting(
        init_loss_scale,
        growth_factor=factor,
        backoff_factor=1 / factor,
        growth_interval=scale_window,
        min_scale=1.0,
        wide=True,
        hold_at_max=True,
        names={"init_scale": "init_loss_scale", "growth_interval": "scale_window", **_FIXED},
    )


def openseq2seq_backoff(
    scale_min: float = 1.0,
    scale_max: float = 2.0**14,
    step_factor: float = 2.0,
    step_window: int = 2000,
) -> ScaleRule:
    """OpenSeq2Seq's `BackoffScaler`. It starts at its maximum.

    Not followed: there the step count is read while it is being written, so that a growth may come
    a step early. Source: OpenSeq2Seq, `open_seq2seq/optimizers/automatic_loss_scaler.py`.

    Args:
      scale_min: the scale never falls below it.
      scale_max: scale of the first step; the scale never grows above it.
      step_factor: multiplies the scale after `step_window` clean steps, divides it on overflow.
      step_window: clean steps in a row before a growth.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    >>> import jscale
    >>> float(jscale.presets.openseq2seq_backoff().init().loss_scale)
    16384.0
    """
    largest = _ceiling("scale_max", scale_max)
    factor = _rounded("step_factor", step_factor)
    return counting(
        largest,
        growth_factor=factor,
        backoff_factor=1 / factor,
        growth_interval=step_window,
        min_scale=_floor("scale_min", scale_min),
        max_scale=largest,
        wide=True,
        names={
            "init_scale": "scale_max",
            "min_scale": "scale_min",
            "max_scale": "scale_max",
            "growth_interval": "step_window",
        },
    )


class LogMaxState(NamedTuple):
    """State of `openseq2seq_logmax`. The averages are not corrected for their start from 0.

    Attributes:
      loss_scale: f32[], the scale for the next backward pass.
      mean: f32[], average of log2 of the largest gradient, decayed by `beta1`.
      slow_mean: f32[], the same, decayed by `beta2`.
      slow_square: f32[], average of the square, decayed by `beta2`.
      decay1: f32[], `beta1` to the power of the number of steps.
      decay2: f32[], `beta2` to the power of the number of steps.
      steps_at_min: i32[], for how many steps in a row the scale has come out at `scale_min`.

    >>> import jscale
    >>> float(jscale.presets.openseq2seq_logmax().init().decay1)
    1.0
    """

    loss_scale: jax.Array
    mean: jax.Array
    slow_mean: jax.Array
    slow_square: jax.Array
    decay1: jax.Array
    decay2: jax.Array
    steps_at_min: jax.Array


def openseq2seq_logmax(
    scale_min: float = 1.0,
    scale_max: float = 2.0**14,
    log_max: float = 16.0,
    beta1: float = 0.99,
    beta2: float = 0.999,
    overflow_std_dev: float = 3.09,
) -> ScaleRule:
    """OpenSeq2Seq's `LogMaxScaler`, faults included.

    It puts the scale where a log-normal largest gradient overflows one step in 1000. It starts at
    1, whatever `scale_min`. On overflow it averages in 2^`log_max`, where it means `log_max`, so
    that a single one pins the scale to `scale_min` for thousands of steps; and it aims at 2^16,
    whatever `log_max`.

    Not followed: a largest gradient of 0 makes the scale NaN for ever there; here such a step
    changes nothing. The recorded scales are met within 2e-4 of their value: TensorFlow and XLA
    differ in the last bits, and the deviation is the square root of a small difference. In the
    first steps, or if the largest gradient stays the same, it is one of rounding errors.

    Source: OpenSeq2Seq, `open_seq2seq/optimizers/automatic_loss_scaler.py`.

    Args:
      scale_min: the scale never falls below it.
      scale_max: the scale never grows above it.
      log_max: log2 of what an overflow counts as, before the fault; at most 60.
      beta1: decay of the mean.
      beta2: decay of mean and square for the deviation.
      overflow_std_dev: how many deviations above the mean must fit.

    Returns:
      A `ScaleRule` whose state is a `LogMaxState`. It asks for the gradients.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    >>> import jax.numpy as jnp, jscale
    >>> rule = jscale.presets.openseq2seq_logmax()
    >>> seen = jscale.Observation(finite=True, grads={"w": jnp.array([-16.0, 0.5])})
    >>> round(float(rule.update(rule.init(), seen).loss_scale))
    4096
    """
    smallest, largest = _floor("scale_min", scale_min), _ceiling("scale_max", scale_max)
    if smallest > largest:
        raise ValueError(
            f"scale_min must not exceed scale_max, got {scale_min} > {scale_max}: swap them."
        )
    log_max = as_number("log_max", log_max, "16 is usual")
    if not 0 < log_max <= 60:
        raise ValueError(f"log_max must lie within (0, 60], got {log_max}: 16 is usual.")
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= as_number(name, beta, "leave it out") < 1:
            raise ValueError(f"{name} must lie within [0, 1), got {beta}: leave it out.")
    deviations = as_number("overflow_std_dev", overflow_std_dev, "3.09 is usual")
    if not 0 <= deviations < 1e9:
        raise ValueError(
            f"overflow_std_dev must lie within [0, 1e9), got {deviations}: 3.09 is usual."
        )
    follow = lambda mean, beta, x: np.float32(beta) * mean + np.float32(1 - beta) * x

    def init() -> LogMaxState:
        zero, one = lambda: jnp.zeros((), jnp.float32), lambda: jnp.ones((), jnp.float32)
        none = jnp.zeros((), jnp.int32)
        return LogMaxState(one(), zero(), zero(), zero(), one(), one(), none)

    def update(state: LogMaxState, observation: Observation) -> LogMaxState:
        finite, amax = jnp.asarray(observation.finite, bool), observation.amax
        finite = finite & jnp.isfinite(amax)
        seen = jnp.log(amax) / np.log(np.float32(2))
        x = jnp.where(finite, seen, np.float32(2.0**log_max))
        mean = follow(state.mean, beta1, x)
        slow_mean = follow(state.slow_mean, beta2, x)
        slow_square = follow(state.slow_square, beta2, x * x)
        decay1, decay2 = state.decay1 * np.float32(beta1), state.decay2 * np.float32(beta2)
        mu, slow_mu = mean / (1 - decay1), slow_mean / (1 - decay2)
        variance = slow_square / (1 - decay2) - slow_mu * slow_mu
        sigma = jnp.sqrt(jnp.maximum(variance, 0))
        scale = jnp.exp2(16 - (sigma * np.float32(deviations) + mu))
        scale = jnp.clip(scale, np.float32(smallest), np.float32(largest))
        at_min = jnp.where(scale <= np.float32(smallest), state.steps_at_min + 1, 0)
        new = LogMaxState(scale, mean, slow_mean, slow_square, decay1, decay2, at_min)
        # The logarithm of 0, or of what counts as 0, would stay in the averages.
        told = ~finite | (amax >= np.finfo(np.float32).tiny)
        return jax.tree.map(lambda n, o: jnp.where(told, n, o), new, state)

    return ScaleRule(init, update)


def flax(
    scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    minimum_scale: float | None = 2.0**-126,
) -> ScaleRule:
    """`flax.training.dynamic_scale.DynamicScale`.

    A growth takes `growth_interval + 1` clean steps. Not followed: it grows to float32's largest
    number. Source: Flax 0.12, `flax/training/dynamic_scale.py`.

    Args:
      scale: scale of the first step.
      growth_factor: multiplies the scale after `growth_interval + 1` clean steps in a row.
      backoff_factor: multiplies the scale on overflow.
      growth_interval: clean steps in a row after which the next one grows.
      minimum_scale: the scale never falls below it; None is 2^-126.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    >>> import jscale
    >>> rule = jscale.presets.flax(8, growth_interval=1)
    >>> state = rule.init()
    >>> for _ in range(3):
    ...     state = rule.update(state, jscale.Observation(finite=True))
    ...     print(float(state.loss_scale))
    8.0
    16.0
    16.0
    """
    return counting(
        scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=as_count("growth_interval", growth_interval) + 1,
        min_scale=_floor("minimum_scale", 0 if minimum_scale is None else minimum_scale),
        names={"init_scale": "scale", "min_scale": "minimum_scale"},
    )


def jmp(
    loss_scale: float = 2.0**15,
    period: int = 2000,
    factor: float = 2,
    min_loss_scale: float = 1.0,
) -> ScaleRule:
    """`jmp.DynamicLossScale`.

    Not followed: 2^127; and `min_loss_scale`, which becomes 1 there whenever the object passes
    through jit, is kept. Source: jmp 0.0.4.

    Args:
      loss_scale: scale of the first step.
      period: clean steps in a row before a growth; one that float32 cannot hold is dropped.
      factor: multiplies the scale, and divides it on overflow.
      min_loss_scale: the scale never falls below it.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    >>> import jscale
    >>> float(jscale.presets.jmp(2.0**10).init().loss_scale)
    1024.0
    """
    growth = _rounded("factor", factor)
    return counting(
        loss_scale,
        growth_factor=growth,
        backoff_factor=1 / growth,
        growth_interval=period,
        min_scale=_floor("min_loss_scale", min_loss_scale),
        wide=True,
        hold_at_max=True,
        names={
            "init_scale": "loss_scale",
            "growth_interval": "period",
            "min_scale": "min_loss_scale",
        },
    )


class DalleState(NamedTuple):
    """State of `dalle`.

    Attributes:
      loss_scale: f32[], the scale for the next backward pass.
      cooldown: i32[], for how many more steps an overflow does not lower it.
      steps_at_min: i32[], for how many steps in a row the scale has come out at its minimum.

    >>> import jscale
    >>> int(jscale.presets.dalle().init().cooldown)
    0
    """

    loss_scale: jax.Array
    cooldown: jax.Array
    steps_at_min: jax.Array


def dalle(
    init_scale: float = 2.0**13,
    *,
    growth_factor: float = 2.0 ** (1 / 1000),
    backoff_factor: float = 2.0**-0.5,
    min_scale: float = 2.0**7,
    max_scale: float = 2.0**24,
    cooldown: int = 125,
) -> ScaleRule:
    """The rule of DALL-E, which had one scale for each of its residual blocks.

    A little growth on every clean step, and a small drop on overflow, but not two within `cooldown`
    steps. About 5 % of its steps were skipped. Its gradients were sums over the data-parallel
    replicas: multiply the first scale and both bounds by their number where yours are.

    As there: `stacked(presets.dalle(), n)`, with each block a `region` whose `stop_nonfinite` is
    the residual stream. There is no code to follow; argument names are jscale's.

    Source: Ramesh et al., Zero-Shot Text-to-Image Generation, 2021, appendix D.

    Args:
      init_scale: scale of the first step.
      growth_factor: multiplies the scale on every clean step.
      backoff_factor: multiplies the scale on overflow.
      min_scale: the scale never falls below it.
      max_scale: the scale never grows above it.
      cooldown: steps from one drop to the next, at least.

    Returns:
      A `ScaleRule` whose state is a `DalleState`.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    >>> import jscale
    >>> rule = jscale.presets.dalle(2**13)
    >>> state = rule.init()
    >>> for finite in (False, False, True):
    ...     state = rule.update(state, jscale.Observation(finite=finite))
    ...     print(f"{state.loss_scale:.1f}", int(state.cooldown))
    5792.6 124
    5792.6 123
    5796.6 122
    """
    steps = Ladder(
        init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        min_scale=min_scale,
        max_scale=max_scale,
        wide=True,
    )
    cooldown = as_count("cooldown", cooldown)

    def init() -> DalleState:
        scale, steps_at_min = steps.first()
        return DalleState(scale, jnp.zeros((), jnp.int32), steps_at_min)

    def update(state: DalleState, observation: Observation) -> DalleState:
        finite = jnp.asarray(observation.finite, bool)
        drop = ~finite & (state.cooldown == 0)
        scale, steps_at_min = steps.move(state.loss_scale, state.steps_at_min, finite, drop)
        left = jnp.where(drop, cooldown - 1, jnp.maximum(state.cooldown - 1, 0))
        return DalleState(scale, left, steps_at_min)

    return ScaleRule(init, update)
