"""Mixed precision in one line, from a word, a dict or a JSON file."""

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from . import presets
from ._arguments import AxisName, as_count, as_number, as_scale, as_switch, did_you_mean
from ._autocast import autocast
from ._grad import value_and_grad
from ._optimizer import with_loss_scale
from ._rules import ScaleRule, dynamic, off, static
from ._state import loss_scale

_F16, _BF16, _F32 = map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32))
_WORDS = {
    "fp16": _F16,
    "float16": _F16,
    "bf16": _BF16,
    "bfloat16": _BF16,
    "fp32": _F32,
    "float32": _F32,
    "no": _F32,  # Hugging Face accelerate's word
    "16-mixed": _F16,  # Lightning's words
    "bf16-mixed": _BF16,
    "32-true": _F32,
}


@dataclasses.dataclass(frozen=True, repr=False)
class Amp:
    """What `amp` returns: how to compute, how to scale, how to clip.

    Attributes:
      compute_dtype: dtype of matrix products: float16, bfloat16 or float32.
      rule: the rule for the loss scale; `off()` where there is none.
      max_grad_norm: norm to which unscaled gradients are clipped, or None.

    >>> import dataclasses, jax.numpy as jnp, jscale, optax
    >>> half = jscale.amp({"fp16": True, "max_grad_norm": 1.0})
    >>> half
    Amp(float16, max_grad_norm=1.0, first scale 2^16)

    Another rule than the one of the configuration:

    >>> half = dataclasses.replace(half, rule=jscale.log_normal(2**12))

    Modules that stay in float32: an `autocast` of your own decides for what is in it. Models of NNX
    and Equinox: `transform=`, as for `jscale.value_and_grad`.

    >>> opt_state = half.optimizer(optax.sgd(0.1)).init(jnp.ones((8, 8)))
    >>> loss_fn = lambda w, x: jnp.sum(x @ w)
    >>> careful = jscale.autocast(loss_fn, half.compute_dtype, keep=["dot_general"])
    >>> loss, grads = half.value_and_grad(careful, opt_state)(jnp.ones((8, 8)), jnp.ones((4, 8)))
    """

    compute_dtype: Any
    rule: ScaleRule
    max_grad_norm: float | None = None

    def __repr__(self) -> str:
        parts = [jnp.dtype(self.compute_dtype).name]
        if self.max_grad_norm is not None:
            parts.append(f"max_grad_norm={self.max_grad_norm}")
        if isinstance(self.rule, Mapping):  # several rules were put in the place of one
            return f"Amp({', '.join(parts)}, rules for {', '.join(map(repr, self.rule))})"
        with jax.ensure_compile_time_eval():  # it may be shown while jit traces
            first = float(self.rule.init().loss_scale)
        if first != 1:
            mantissa, exponent = math.frexp(first)
            parts.append(f"first scale {f'2^{exponent - 1}' if mantissa == 0.5 else f'{first:g}'}")
        return f"Amp({', '.join(parts)})"

    def optimizer(
        self,
        tx: optax.GradientTransformation | optax.MultiSteps,
        *,
        axis_name: AxisName = None,
    ) -> optax.GradientTransformationExtraArgs:
        """`tx`, after clipping if that was asked for, in `with_loss_scale`.

        Accumulation is up to you: put `optax.MultiSteps` into `tx`, with the clip inside it. The
        rule then counts micro-batches, as `with_loss_scale` does.

        Args:
          tx: the optimizer.
          axis_name: as for `with_loss_scale`. Clipping then sees one device's gradients, so average
            them first.

        Raises:
          ValueError: `max_grad_norm` would clip micro-batches.
          TypeError: an argument has the wrong type.
        """
        n = self.max_grad_norm
        if n is not None and isinstance(tx, optax.MultiSteps):
            raise ValueError(
                f"max_grad_norm = {n} would clip each micro-batch of optax.MultiSteps, not their "
                f"mean: use optax.MultiSteps(optax.chain(optax.clip_by_global_norm({n}), tx), k), "
                "and leave max_grad_norm out."
            )
        if n is not None:
            tx = optax.chain(optax.clip_by_global_norm(n), tx)
        return with_loss_scale(tx, self.rule, axis_name=axis_name)

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        opt_state: Any,
        argnums: Any = 0,
        has_aux: bool = False,
        *,
        root: str | None = None,
        transform: Callable[..., Any] = jax.value_and_grad,
    ) -> Callable[..., Any]:
        """`jscale.value_and_grad` of `fun` under `autocast`, at the scale in `opt_state`."""
        fun, scale = autocast(fun, self.compute_dtype), loss_scale(opt_state)
        return value_and_grad(fun, scale, argnums, has_aux, root=root, transform=transform)


def amp(config: str | os.PathLike | Mapping[str, Any]) -> Amp:
    """Mixed precision in one line; the loop is the same for every precision.

    Args:
      config: one of

        - `"fp16"`: products in float16 and `dynamic()`; `"bf16"`, `"fp32"`: no scale. Or the word
          of accelerate or Lightning, `"no"`, `"16-mixed"`;
        - a dict with DeepSpeed's `fp16` or `bf16` block and `gradient_clipping`. `"auto"` stands
          for DeepSpeed's default, and a `loss_scale` of 0 for a dynamic one: `presets.deepspeed`.
          A block is off unless it says `"enabled": true`. With `check_grad_overflow`, bf16 skips
          steps that are not finite, at a scale of 1. Sections that say nothing about precision are
          passed over;
        - a dict in the style of Hugging Face's `TrainingArguments` (and ms-swift): `fp16=True` or
          `bf16=True`, `max_grad_norm`, and `deepspeed`, a dict or a path. Its fp16 is torch's
          `GradScaler`: `presets.torch()`, unless `deepspeed` has a block for it. Flags decide what
          `deepspeed` leaves to them by `"enabled": "auto"`. What is left out is not assumed: there,
          `max_grad_norm` is 1.0 by default, here nothing is clipped;
        - a path to a JSON file with such a dict.

    Returns:
      An `Amp`, whose `optimizer` and `value_and_grad` take the place of optax's and JAX's.

    Raises:
      ValueError: an unknown key, with the nearest known one; a value out of range; two keys that
        contradict each other; what jscale does not do.
      TypeError: a value of the wrong type, with its key.

    Warns:
      UserWarning: a block has settings, and nothing turns it on.

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
    if isinstance(config, str) and config.lower() in _WORDS:
        dtype = _WORDS[config.lower()]
        return Amp(dtype, dynamic() if dtype == _F16 else off())
    if isinstance(config, Mapping):
        return _from_dict(config)
    if isinstance(config, str | os.PathLike):
        hint = did_you_mean(str(config), _WORDS) or f": precisions are {', '.join(_WORDS)}"
        return _from_dict(_read(config, "", "neither a precision nor", hint))
    raise TypeError(
        f"amp takes a precision ({', '.join(_WORDS)}), a dict or a path to a JSON file, "
        f"got {config!r}."
    )


def _read(
    path: str | os.PathLike, where: str, kind: str = "not", hint: str = ""
) -> Mapping[str, Any]:
    """The dict in a JSON file."""
    name = f"{where}{str(path)!r}"
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except OSError as error:
        raise ValueError(
            f"amp: {name} is {kind} a file that can be read ({error.strerror}){hint}."
        ) from None
    except ValueError as error:
        raise ValueError(f"amp: {name} is not JSON in UTF-8: {error}.") from None
    return _mapping(name, config)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"amp: {name} must hold a dict, got {value!r}.")
    return value


def _constant_scale(name: str, value: Any) -> float:
    return as_number(name, value, "0 makes it dynamic") and as_scale(name, value)


def _power(name: str, value: Any) -> int:
    power = as_number(name, value, "16 is usual")
    if not -126 <= power <= 126 or power != int(power):
        raise ValueError(
            f"{name} must be a whole number from -126 to 126, got {value!r}: 16 is usual."
        )
    return int(power)


def _norm(name: str, value: Any) -> float:
    norm = as_number(name, value, "1.0 is usual, 0 turns clipping off")
    if not 0 <= norm < float("inf"):
        raise ValueError(f"{name} must be finite and not negative, got {norm}.")
    return norm


def _only_false(name: str, value: Any) -> None:
    if as_switch(name, value):
        raise ValueError(
            f"{name} is on, but optimizers see parameters and gradients in float32 here: "
            "leave it out."
        )


# What DeepSpeed's configuration says about how to compute, and how each value is checked. Where
# inputs are cast, and when gradients are added up, makes no difference here.
_BLOCKS: dict[str, dict[str, Callable[[str, Any], Any]]] = {
    "fp16": {
        "enabled": as_switch,
        "auto_cast": as_switch,
        "loss_scale": _constant_scale,
        "initial_scale_power": _power,
        "loss_scale_window": as_count,
        "hysteresis": as_count,
        "consecutive_hysteresis": as_switch,
        "min_loss_scale": as_scale,
        "fp16_master_weights_and_grads": _only_false,
    },
    "bf16": {
        "enabled": as_switch,
        "auto_cast": as_switch,
        "check_grad_overflow": as_switch,
        "immediate_grad_update": as_switch,
        "bf16_master_weights_and_grads": _only_false,
        "bf16_optimizer_states": _only_false,
    },
}
_TORCHS_OWN = ("amp", "torch_autocast")
_NORMS = ("max_grad_norm", "gradient_clipping")
# Of its other sections none does, and a file may hold them.
_ELSEWHERE = frozenset(
    """
    activation_checkpointing aio autotuning checkpoint comet comms_logger communication_data_type
    compile compression_training csv_monitor curriculum_learning curriculum_params
    data_efficiency data_types dataloader_drop_last disable_allgather disable_python_gc dump_state
    eigenvalue elasticity expert_parallel flops_profiler gradient_accumulation_steps
    gradient_allreduce_op gradient_predivide_factor graph_harvesting hybrid_engine log_level
    managed_gradient_accumulation memory_breakdown nebula optimizer pipeline prescale_gradients
    progressive_layer_drop scheduler seq_parallel_communication_data_type sequence_parallel_size
    sparse_attention sparse_gradients steps_per_print tensor_parallel tensorboard timers
    train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism
    vocabulary_size wandb wall_clock_breakdown weight_quantization zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer zero_optimization
    """.split()
)

# By setting, such as fp16.loss_scale: what is said about it, by the key that says it.
_Said = dict[str, dict[str, Any]]


def _from_dict(config: Mapping[str, Any]) -> Amp:
    said: _Said = {}
    _note("", config, said)
    nested = config.get("deepspeed")
    if isinstance(nested, str | os.PathLike):
        nested = _read(nested, "deepspeed: ")
    if nested is not None:
        _note("deepspeed.", _mapping("deepspeed", nested), said)

    settings = {name: _agreed(by) for name, by in said.items()}
    norm = settings.get("gradient norm") or None  # 0 turns clipping off
    on = [block for block in _BLOCKS if settings.get(f"{block}.enabled")]
    if len(on) == 2:
        keys = [next(k for k, x in said[f"{b}.enabled"].items() if x is True) for b in on]
        raise ValueError(f"amp: {' and '.join(keys)} are both on: turn one of them off.")
    if not on:
        _check_off(said, settings)
        return Amp(_F32, off(), norm)
    given = {key: settings.get(f"{on[0]}.{key}") for key in _BLOCKS[on[0]]}
    given = {key: x for key, x in given.items() if x is not None}
    if on == ["bf16"]:
        return Amp(_BF16, static(1) if given.get("check_grad_overflow") else off(), norm)
    flag_alone = all(by.keys() == {"fp16"} for key, by in said.items() if key.startswith("fp16."))
    return Amp(_F16, presets.torch() if flag_alone else _deepspeed(given), norm)


def _note(where: str, config: Mapping[str, Any], said: _Said) -> None:
    """Checks what `config` says, and adds it to `said`."""

    def add(setting: str, key: str, check: Callable[[str, Any], Any], value: Any) -> None:
        auto = isinstance(value, str) and value == "auto"
        said.setdefault(setting, {})[key] = value if auto else check(f"amp: {key}", value)

    known = {*_BLOCKS, *_TORCHS_OWN, *_NORMS, *_ELSEWHERE, "deepspeed"}
    known -= {"deepspeed", "max_grad_norm"} if where else set()
    for name, value in config.items():
        key = f"{where}{name}"
        if name not in known:
            near = did_you_mean(str(name), known)
            raise ValueError(f"amp: unknown key {key}{near}: {'leave it out' if where else _PASS}.")
        if name in _NORMS and value is not None:
            add("gradient norm", key, _norm, value)
        elif name in _TORCHS_OWN:
            if as_switch(f"amp: {key}.enabled", _mapping(key, value).get("enabled", False)):
                raise ValueError(f"amp: {key} is on, which is torch's or apex's: use fp16 or bf16.")
        elif name in _BLOCKS and not where and not isinstance(value, Mapping):
            add(f"{name}.enabled", key, as_switch, value)
        elif name in _BLOCKS:
            checks = _BLOCKS[name]
            for inner, x in _mapping(key, value).items():
                if inner not in checks:
                    near = did_you_mean(str(inner), checks) or f": known are {', '.join(checks)}"
                    raise ValueError(f"amp: unknown key {key}.{inner}{near}.")
                add(f"{name}.{inner}", f"{key}.{inner}", checks[inner], x)


_PASS = (
    "of Hugging Face's arguments pass only those that say how to compute, "
    "{k: x for k, x in args.items() if k in ('fp16', 'bf16', 'max_grad_norm', 'deepspeed')}"
)


def _agreed(by: Mapping[str, Any]) -> Any:
    """What all keys say, but for those that leave it open; None if all do."""
    firm = [(key, value) for key, value in by.items() if value != "auto"]
    for key, value in firm[1:]:
        if value != firm[0][1]:
            raise ValueError(
                f"amp: {firm[0][0]} is {firm[0][1]} and {key} is {value}: give one of them."
            )
    return firm[0][1] if firm else None


def _check_off(said: _Said, settings: Mapping[str, Any]) -> None:
    """Raises or warns if nothing is on, though something may be meant to be."""
    for block in _BLOCKS:
        enabled = f"{block}.enabled"
        if settings.get(enabled) is False:
            continue
        if enabled in said:
            raise ValueError(
                f'amp: {next(iter(said[enabled]))} is "auto", and nothing decides it: write true '
                f'or false, or pass {{"{block}": True, "deepspeed": "ds.json"}}.'
            )
        if any(name.startswith(f"{block}.") for name in said):
            warnings.warn(
                f'amp: the {block} block has settings, but no "enabled": true, so this run is in '
                "float32, as DeepSpeed has it.",
                stacklevel=4,
            )


def _deepspeed(given: Mapping[str, Any]) -> ScaleRule:
    if given.get("loss_scale"):
        return static(given["loss_scale"])
    names = {
        "loss_scale_window": "scale_window",
        "hysteresis": "delayed_shift",
        "consecutive_hysteresis": "consecutive_hysteresis",
        "min_loss_scale": "min_scale",
    }
    first, least = 2.0 ** given.get("initial_scale_power", 16), given.get("min_loss_scale", 1)
    if least > first:
        raise ValueError(
            "amp: fp16.min_loss_scale must not exceed 2^initial_scale_power, "
            f"got {least} > {first}: lower it."
        )
    return presets.deepspeed(first, **{names[key]: x for key, x in given.items() if key in names})
