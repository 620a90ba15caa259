"""Mixed precision in one line, from a word, a dict or a JSON file."""

import dataclasses
import difflib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from . import presets
from ._arguments import as_count, as_number
from ._autocast import autocast
from ._grad import value_and_grad
from ._optimizer import with_loss_scale
from ._rules import ScaleRule, dynamic, off, static
from ._state import loss_scale

_WORDS = {
    "fp16": jnp.float16,
    "float16": jnp.float16,
    "bf16": jnp.bfloat16,
    "bfloat16": jnp.bfloat16,
    "fp32": jnp.float32,
    "float32": jnp.float32,
    "no": jnp.float32,  # Hugging Face accelerate's word
}

# Of DeepSpeed's configuration these say how to compute. Of its other sections none does, and a file
# may hold them.
_FP16 = (
    "enabled",
    "auto_cast",
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
    "fp16_master_weights_and_grads",
)
_BF16 = ("enabled", "auto_cast", "check_grad_overflow")
_ELSEWHERE = frozenset(
    """
    activation_checkpointing aio amp autotuning checkpoint comms_logger communication_data_type
    compression_training csv_monitor curriculum_learning data_efficiency data_types
    disable_allgather dump_state eigenvalue elasticity flops_profiler
    gradient_accumulation_steps gradient_predivide_factor memory_breakdown optimizer pipeline
    prescale_gradients progressive_layer_drop scheduler seq_parallel_communication_data_type
    sparse_attention sparse_gradients steps_per_print tensor_parallel tensorboard
    train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism wandb
    wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    zero_optimization
    """.split()
)
_KEYS = ("fp16", "bf16", "gradient_clipping", "max_grad_norm", "deepspeed")


@dataclasses.dataclass(frozen=True)
class Amp:
    """What `amp` returns: how to compute, how to scale, how to clip.

    Attributes:
      compute_dtype: dtype of matrix products: float16, bfloat16 or float32.
      rule: the rule for the loss scale; `off()` for bfloat16 and float32.
      max_grad_norm: norm to which unscaled gradients are clipped, or None.

    >>> import jscale
    >>> jscale.amp("bf16").compute_dtype.name
    'bfloat16'
    """

    compute_dtype: Any
    rule: ScaleRule
    max_grad_norm: float | None = None

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
        """`tx`, after clipping if that was asked for, in `with_loss_scale`."""
        if self.max_grad_norm is not None:
            tx = optax.chain(optax.clip_by_global_norm(self.max_grad_norm), tx)
        return with_loss_scale(tx, self.rule)

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        opt_state: Any,
        argnums: Any = 0,
        has_aux: bool = False,
        *,
        transform: Callable[..., Any] = jax.value_and_grad,
    ) -> Callable[..., Any]:
        """`jscale.value_and_grad` of `fun` under `autocast`, at the scale in `opt_state`."""
        fun, scale = autocast(fun, self.compute_dtype), loss_scale(opt_state)
        return value_and_grad(fun, scale, argnums, has_aux, transform=transform)


def amp(config: str | os.PathLike | Mapping[str, Any]) -> Amp:
    """Mixed precision in one line; the loop is the same for every precision.

    Args:
      config: one of

        - `"fp16"`: products in float16 and `dynamic()`; `"bf16"`, `"fp32"` (or `"no"`): no scale;
        - a dict with DeepSpeed's `fp16` or `bf16` block and `gradient_clipping`. `"auto"` stands
          for DeepSpeed's default, and a `loss_scale` of 0 for a dynamic one: `presets.deepspeed`.
          Sections that say nothing about precision are passed over;
        - a dict in the style of Hugging Face's `TrainingArguments` (and ms-swift): `fp16=True` or
          `bf16=True`, `max_grad_norm`, and `deepspeed`, a dict or a path. Its fp16 is torch's
          `GradScaler`: `presets.torch()`, unless `deepspeed` has a block for it;
        - a path to a JSON file with such a dict.

    Returns:
      An `Amp`, whose `optimizer` and `value_and_grad` take the place of optax's and JAX's.

    Raises:
      ValueError: an unknown key, with the nearest known one; both fp16 and bf16.
      TypeError: a value of the wrong type, with its key.

    >>> import jax.numpy as jnp, jscale, optax
    >>> half = jscale.amp({"fp16": {"enabled": True, "initial_scale_power": 10}})
    >>> tx = half.optimizer(optax.sgd(0.5))
    >>> params = jnp.ones(2)
    >>> opt_state = tx.init(params)
    >>> loss, grads = half.value_and_grad(lambda w: jnp.sum(w**2), opt_state)(params)
    >>> updates, opt_state = tx.update(grads, opt_state, params)
    >>> print(params + updates, jscale.loss_scale(opt_state))
    [0. 0.] 1024.0
    """
    if isinstance(config, str) and config in _WORDS:
        return _amp(_WORDS[config], dynamic())
    if isinstance(config, Mapping):
        return _from_dict(config)
    if isinstance(config, str | os.PathLike):
        return _from_dict(_read(config))
    raise TypeError(
        f"amp takes a precision ({', '.join(_WORDS)}), a dict or a path to a JSON file, "
        f"got {config!r}."
    )


def _amp(compute_dtype: Any, rule: ScaleRule, max_grad_norm: float | None = None) -> Amp:
    scaled = compute_dtype == jnp.float16
    return Amp(jnp.dtype(compute_dtype), rule if scaled else off(), max_grad_norm)


def _read(path: str | os.PathLike) -> Mapping[str, Any]:
    if not os.path.exists(path):
        word = difflib.get_close_matches(str(path), _WORDS, 1)
        hint = f"did you mean {word[0]!r}?" if word else f"precisions are {', '.join(_WORDS)}."
        raise ValueError(f"amp: {str(path)!r} is neither a precision nor a file: {hint}")
    with open(path, encoding="utf-8") as file:
        try:
            config = json.load(file)
        except json.JSONDecodeError as error:
            raise ValueError(f"amp: {str(path)!r} is not JSON: {error}.") from None
    return _mapping(str(path), config)


def _from_dict(config: Mapping[str, Any]) -> Amp:
    _known("", config, _KEYS, _ELSEWHERE)
    blocks = dict(config)
    if isinstance(config.get("deepspeed"), str | os.PathLike):
        blocks["deepspeed"] = _read(config["deepspeed"])
    nested = _mapping("deepspeed", blocks.pop("deepspeed", None) or {})
    _known("deepspeed.", nested, ("fp16", "bf16", "gradient_clipping"), _ELSEWHERE)

    # Hugging Face's flags decide what DeepSpeed's file leaves to them by "auto".
    flags = {
        key: _flag(key, x) for key, x in blocks.items() if key in ("fp16", "bf16") and _is_flag(x)
    }
    settings = {
        key: {**_block(key, blocks), **_block(key, nested, "deepspeed.")}
        for key in ("fp16", "bf16")
    }
    on = {}
    for key in ("fp16", "bf16"):
        enabled = settings[key].get("enabled", "auto" if settings[key] else False)
        on[key] = flags.get(key, False) if enabled == "auto" else _flag(f"{key}.enabled", enabled)
        on[key] = on[key] or flags.get(key, False)
    if on["fp16"] and on["bf16"]:
        raise ValueError("amp: fp16 and bf16 are both on: turn one of them off.")
    norms = [
        _norm(key, x)
        for key, x in (
            ("max_grad_norm", blocks.get("max_grad_norm")),
            ("gradient_clipping", blocks.get("gradient_clipping")),
            ("deepspeed.gradient_clipping", nested.get("gradient_clipping")),
        )
        if x is not None and x != "auto"
    ]
    if len(set(norms)) > 1:
        raise ValueError(
            f"amp: max_grad_norm and gradient_clipping differ ({norms}): give one of them."
        )
    norm = norms[0] if norms and norms[0] > 0 else None  # 0 turns clipping off
    if on["bf16"]:
        return _amp(jnp.bfloat16, off(), norm)
    if not on["fp16"]:
        return _amp(jnp.float32, off(), norm)
    return _amp(
        jnp.float16, _deepspeed(settings["fp16"]) if settings["fp16"] else presets.torch(), norm
    )


def _is_flag(x: Any) -> bool:
    return not isinstance(x, Mapping)


def _block(key: str, config: Mapping[str, Any], where: str = "") -> Mapping[str, Any]:
    block = config.get(key, {})
    if not where and _is_flag(block):
        return {}
    known = _FP16 if key == "fp16" else _BF16
    _known(f"{where}{key}.", _mapping(f"{where}{key}", block), known)
    return block


def _deepspeed(block: Mapping[str, Any]) -> ScaleRule:
    given = {key: x for key, x in block.items() if x != "auto"}
    scale = as_number("fp16.loss_scale", given.get("loss_scale", 0), "0 makes it dynamic")
    if scale:
        return static(scale)
    power = as_number(
        "fp16.initial_scale_power", given.get("initial_scale_power", 16), "16 is usual"
    )
    consecutive = given.get("consecutive_hysteresis", False)
    return presets.deepspeed(
        2.0**power,
        scale_window=as_count("fp16.loss_scale_window", given.get("loss_scale_window", 1000)),
        min_scale=as_number("fp16.min_loss_scale", given.get("min_loss_scale", 1), "1 is usual"),
        delayed_shift=as_count("fp16.hysteresis", given.get("hysteresis", 2)),
        consecutive_hysteresis=_flag("fp16.consecutive_hysteresis", consecutive),
    )


def _known(where: str, config: Mapping[str, Any], keys: Any, ignored: Any = ()) -> None:
    for key in config:
        if key not in keys and key not in ignored:
            near = difflib.get_close_matches(str(key), [*keys, *ignored], 1)
            hint = f"did you mean {where}{near[0]}?" if near else f"known are {', '.join(keys)}."
            raise ValueError(f"amp: unknown key {where}{key}: {hint}")


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"amp: {name} must hold a dict, got {value!r}.")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"amp: {name} must be true or false, got {value!r}.")
    return value


def _norm(name: str, value: Any) -> float:
    norm = as_number(f"amp: {name}", value, "1.0 is usual, 0 turns clipping off")
    if not 0 <= norm < float("inf"):
        raise ValueError(f"amp: {name} must be finite and not negative, got {norm}.")
    return norm
