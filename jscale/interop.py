"""Scaler states of other systems, to and from plain dicts: a run moves, and decides as before.

>>> import jax.numpy as jnp, jscale, optax
>>> from jscale import interop
>>> saved = {  # torch.load("scaler.pt", weights_only=True)
...     "scale": 1024.0,
...     "growth_factor": 2.0,
...     "backoff_factor": 0.5,
...     "growth_interval": 200,
...     "_growth_tracker": 199,
... }
>>> rule, rule_state = interop.load("torch", saved)
>>> tx = jscale.with_loss_scale(optax.sgd(0.1), rule)
>>> params = {"w": jnp.ones(2)}
>>> opt_state = interop.put(tx.init(params), rule_state)
>>> _, opt_state = tx.update({"w": jnp.ones(2)}, opt_state, params)
>>> float(jscale.loss_scale(opt_state))
2048.0

And back: a state holds counters alone, so `export` is told the settings that are not the defaults.

>>> interop.export("torch", opt_state, growth_interval=200)["_growth_tracker"]
0

Nothing here reads files. A pickle runs code while it is read, so use loaders that refuse to:
`torch.load(path, weights_only=True)` for torch, apex, Megatron and DeepSpeed's `FP16_Optimizer`,
`numpy.load(path, allow_pickle=False)`. DeepSpeed with ZeRO pickles the scaler itself, which they
refuse: where the run still lives, `vars(optimizer.loss_scaler)` is a dict.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import presets
from ._arguments import as_number, as_scale, as_switch, did_you_mean
from ._rules import DynamicState, OffState, ScaleRule
from ._state import by_rule, find_all, find_state
from ._tree import PyTree, describe, mismatch, path_parts

__all__ = ["export", "load", "put"]

# A dict's numbers and flags by key; a DynamicState's growth_tracker and hysteresis_tracker.
_Values = Mapping[str, Any]
_Counts = tuple[int, int | None]


@dataclasses.dataclass(frozen=True)
class _System:
    """Where a system keeps what a `DynamicState` holds.

    Attributes:
      preset: its rule. Where a saved state has settings too, they go by the names of its arguments.
      start, interval, hysteresis: the preset's names for the first scale, the steps before a growth
        and the overflows before a drop.
      scale: the key of the scale.
      read: the two counts of a `DynamicState`, from counters and settings; full hysteresis is None.
      write: counters, from the two counts and the settings.
      late: by how many clean steps a growth comes later than after the interval.
      least_credit: its count of overflows to tolerate, when there are none left.
      settings: the settings that its own saved states have.
      constants: what else they have, always the same.
      optional: keys that not all of its versions have.
      ignored: keys that say nothing about the scale.
      unwrap, wrap: from and to the form in which it keeps these keys.
    """

    preset: Callable[..., ScaleRule]
    start: str
    interval: str
    scale: str
    read: Callable[[_Values], _Counts]
    write: Callable[[int, int, _Values], dict[str, int]]
    hysteresis: str | None = None
    late: int = 0
    least_credit: int = 1
    settings: tuple[str, ...] = ()
    constants: _Values = dataclasses.field(default_factory=dict)
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    unwrap: Callable[[Any], Any] = lambda saved: saved
    wrap: Callable[[dict[str, Any]], dict[str, Any]] = lambda saved: saved

    def defaults(self) -> dict[str, Any]:
        parameters = inspect.signature(self.preset).parameters.values()
        return {p.name: p.default for p in parameters if p.name != self.start}

    def counters(self) -> tuple[str, ...]:
        return tuple(self.write(0, 1, self.defaults()))


def _simple(key: str) -> dict[str, Any]:
    """The one counter `key`, which counts as `growth_tracker` does."""
    return {"read": lambda v: (v[key], None), "write": lambda clean, credit, v: {key: clean}}


def _unwrap_apex(saved: Any) -> Any:
    scalers = [k for k in saved if k.startswith("loss_scaler")] if _is_dict(saved) else []
    if len(scalers) > 1:
        raise ValueError(
            f"this apex state has {len(scalers)} scalers, {', '.join(scalers)}: pass one of them, "
            f"e.g. saved[{scalers[0]!r}]."
        )
    if scalers and len(saved) > 1:
        others = ", ".join(repr(key) for key in saved if key not in scalers)
        raise ValueError(
            f"this apex state has {others} beside {scalers[0]}: pass saved[{scalers[0]!r}]."
        )
    return saved[scalers[0]] if scalers else saved


def _unwrap_deepspeed(saved: Any) -> Any:
    # FP16_Optimizer, until 0.19, has no hysteresis, and so none in its state.
    if _is_dict(saved) and saved and not {"cur_hysteresis", "delayed_shift"} & set(saved):
        return {**saved, "delayed_shift": 1}
    return saved


def _read_deepspeed(v: _Values) -> _Counts:
    # Its iterations are numbered through; a growth comes when a multiple of the window has passed.
    if v["cur_iter"] < 0 or v["last_overflow_iter"] < -1:
        raise ValueError(
            "cur_iter must be at least 0, and last_overflow_iter at least -1, got "
            f"{v['cur_iter']} and {v['last_overflow_iter']}: they number iterations."
        )
    since = v["cur_iter"] - v["last_overflow_iter"] - 1
    return (since - 1) % v["scale_window"] if since > 0 else since - 1, v.get("cur_hysteresis")


_SYSTEMS = {
    "torch": _System(
        presets.torch,
        start="init_scale",
        interval="growth_interval",
        scale="scale",
        settings=("growth_factor", "backoff_factor", "growth_interval"),
        **_simple("_growth_tracker"),
    ),
    "apex": _System(
        presets.apex,
        start="init_scale",
        interval="scale_window",
        scale="loss_scale",
        unwrap=_unwrap_apex,
        wrap=lambda saved: {"loss_scaler0": saved},
        **_simple("unskipped"),
    ),
    "deepspeed": _System(
        presets.deepspeed,
        start="init_scale",
        interval="scale_window",
        hysteresis="delayed_shift",
        scale="cur_scale",
        read=_read_deepspeed,
        write=lambda clean, credit, v: {
            "cur_iter": clean + 1,
            "last_overflow_iter": -1,
            "cur_hysteresis": max(credit, 1),
        },
        settings=("scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis"),
        constants={"scale_factor": 2.0, "dynamic_loss_scale": True, "dynamic": True},
        optional=("cur_hysteresis", "min_scale", "delayed_shift", "consecutive_hysteresis")
        + ("raise_error_at_min_scale", "scale_factor", "dynamic_loss_scale", "dynamic"),
        ignored=("dtype", "overflow", "clip_grad", "optimizer_state_dict", "fp32_groups")
        + ("fp32_groups_flat",),
        unwrap=_unwrap_deepspeed,
    ),
    "megatron": _System(
        presets.megatron,
        start="initial_scale",
        interval="growth_interval",
        hysteresis="hysteresis",
        least_credit=0,
        scale="scale",
        read=lambda v: (v["growth_tracker"], max(v["hysteresis_tracker"], 0)),
        write=lambda clean, credit, v: {"growth_tracker": clean, "hysteresis_tracker": credit},
    ),
    "keras": _System(
        presets.keras,
        start="initial_scale",
        interval="dynamic_growth_steps",
        scale="dynamic_scale",
        optional=("dynamic_growth_steps",),
        ignored=("name", "inner_optimizer", "initial_scale"),
        **_simple("step_counter"),
    ),
    "paddle": _System(
        presets.paddle,
        start="init_loss_scaling",
        interval="incr_every_n_steps",
        hysteresis="decr_every_n_nan_or_inf",
        scale="scale",
        read=lambda v: (v["incr_count"], v["decr_every_n_nan_or_inf"] - v["decr_count"]),
        write=lambda clean, credit, v: {
            "incr_count": clean,
            "decr_count": v["decr_every_n_nan_or_inf"] - max(credit, 1),
        },
        settings=("incr_ratio", "decr_ratio", "incr_every_n_steps", "decr_every_n_nan_or_inf"),
        constants={"use_dynamic_loss_scaling": True},
        wrap=lambda saved: saved | {"scale": np.array([saved["scale"]], np.float32)},
    ),
    "flax": _System(
        presets.flax,
        start="scale",
        interval="growth_interval",
        late=1,
        scale="scale",
        settings=("growth_factor", "backoff_factor", "growth_interval", "minimum_scale"),
        # Static fields, which flax.serialization leaves out.
        optional=("growth_factor", "backoff_factor", "growth_interval", "minimum_scale"),
        **_simple("fin_steps"),
    ),
    "jmp": _System(
        presets.jmp,
        start="loss_scale",
        interval="period",
        scale="loss_scale",
        settings=("period", "factor", "min_loss_scale"),
        wrap=lambda saved: saved | {"loss_scale": np.float32(saved["loss_scale"])},
        **_simple("counter"),
    ),
}


def _is_dict(x: Any) -> bool:
    return isinstance(x, Mapping) and all(isinstance(key, str) for key in x)


def _quoted(key: Any, known: Any) -> str:
    return repr(str(key)) + did_you_mean(str(key), known)


def _find(system: Any) -> _System:
    if not isinstance(system, str):
        raise TypeError(
            f"system must be a name such as 'torch', got {describe(system)}: it comes first, "
            "the state second."
        )
    if system not in _SYSTEMS:
        raise ValueError(
            f"system must be one of {', '.join(_SYSTEMS)}; got {_quoted(system, _SYSTEMS)}."
        )
    return _SYSTEMS[system]


def _settings(system: str, given: _Values) -> dict[str, Any]:
    """The preset's arguments but for the first scale: `given`, and else its defaults."""
    known = _find(system).defaults()
    if unknown := [_quoted(key, known) for key in given if key not in known]:
        raise TypeError(
            f"presets.{system} has no setting {', '.join(unknown)}: it has {', '.join(known)}."
        )
    return {**known, **given}


def _taken(system: str, saved: Any) -> dict[str, Any]:
    """What a saved state says about the scale, by key: all that must be there, and no more."""
    this = _find(system)
    whole, saved = saved, this.unwrap(saved)
    needed = {this.scale, *this.counters(), *this.settings, *this.constants} - set(this.optional)
    known = needed | set(this.optional)
    if isinstance(saved, Mapping):
        if not saved:
            raise ValueError(
                f"this {system} state is empty: its scaler was off, or constant. "
                "Use jscale.off() or jscale.static."
            )
        unknown = [key for key in saved if key not in known | set(this.ignored)]
        found = {key: saved[key] for key in saved if key in known}
    else:
        unknown, found = [], {key: getattr(saved, key) for key in known if hasattr(saved, key)}
    found = {key: _value(key, value) for key, value in found.items()}
    for key, constant in this.constants.items():
        if found.get(key, constant) != constant:
            remedy = f"{system} has no other"
            if constant is True:
                remedy = f"use jscale.static({found.get(this.scale, '')})"
            raise ValueError(f"{key} is {found[key]!r}, and must be {constant!r}: {remedy}.")
    missing = sorted(needed - set(found))
    if unknown or missing:
        said = [f"lacks {', '.join(map(repr, missing))}"] if missing else []
        said += [f"has {', '.join(_quoted(key, known) for key in unknown)}"] if unknown else []
        what = "state" if isinstance(saved, Mapping) else f"state, a {type(saved).__name__},"
        # Of a whole checkpoint, the part that looks like it.
        inside = lambda x: isinstance(x, Mapping) and (needed <= set(x) or "loss_scaler0" in x)
        parts = [k for k, x in whole.items() if inside(x)] if isinstance(whole, Mapping) else []
        remedy = (
            f"pass saved[{parts[0]!r}]"
            if parts
            else "pass what the scaler's state_dict() or fields hold, that is "
            + ", ".join(sorted(known))
        )
        raise ValueError(f"this {system} {what} {' and '.join(said)}: {remedy}.")
    return found


def _value(key: str, value: Any) -> Any:
    """A Python number, flag or None: of whatever array or tensor it is in."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    try:
        return value.item() if hasattr(value, "item") else np.asarray(value).item()
    except (ValueError, TypeError, RuntimeError):
        raise TypeError(f"{key} must be one number, got {describe(value)}.") from None


def _whole(key: str, value: Any) -> int:
    count = as_number(key, value, "it counts steps")
    if not abs(count) < 2**53 or count != int(count):
        raise ValueError(f"{key} must be a whole number, got {value!r}: it counts steps.")
    return int(count)


def _check_counts(
    system: str, said: _Values, counts: _Counts, lowest: int, settings: _Values
) -> None:
    """Raises if no run of `system` with these settings has counted so far: `said`, as saved."""
    this = _find(system)
    clean, credit = counts
    possible = lowest <= clean < settings[this.interval] + this.late
    if credit is not None and this.hysteresis:
        possible &= this.least_credit <= credit <= settings[this.hysteresis]
    if not possible:
        limits = [key for key in (this.interval, this.hysteresis) if key]
        write = lambda values, keys: ", ".join(f"{key} = {values[key]}" for key in keys)
        raise ValueError(
            f"{write(said, said)} cannot be where {write(settings, limits)}: "
            "pass the settings that the run had."
        )


def load(system: str, saved: Any, **settings: Any) -> tuple[ScaleRule, DynamicState]:
    """A rule and its state, from the state of another system's scaler.

    | system | `saved` |
    |---|---|
    | `"torch"` | `scaler.state_dict()` |
    | `"apex"` | `amp.state_dict()`, or one of its `loss_scaler0`, `loss_scaler1`, ... |
    | `"deepspeed"` | `FP16_Optimizer`'s `state_dict()`; with ZeRO, `vars(optimizer.loss_scaler)` |
    | `"megatron"` | the grad scaler's `state_dict()` |
    | `"keras"` | the `LossScaleOptimizer`, or its `dynamic_scale` and `step_counter` in a dict |
    | `"paddle"` | `scaler.state_dict()` |
    | `"flax"`, `"jmp"` | the `DynamicScale`, the `DynamicLossScale` |

    Values may be numbers, or arrays and tensors that hold one. Instead of a dict, an object with
    attributes of these names will do.

    Args:
      system: whose state it is.
      saved: the state. It is not changed.
      **settings: arguments of the preset of that name, for what `saved` does not hold (for apex,
        Megatron and Keras: all of them) or what shall be different from now on. What is in neither
        is as the system has it by default.

    Returns:
      The preset's `ScaleRule`, which starts at the saved scale, and a `jscale.DynamicState` with
      every counter. Give the first to `with_loss_scale` and the second to `put`.

    Raises:
      ValueError, TypeError: a key is missing or unknown, or a value cannot be; the message names
        it. Nothing is loaded then.

    >>> from jscale import interop
    >>> saved = {"scale": 8.0, "growth_tracker": 7, "hysteresis_tracker": 1}
    >>> rule, state = interop.load("megatron", saved, growth_interval=1000, hysteresis=2)
    >>> float(state.loss_scale), int(state.growth_tracker), int(state.hysteresis_tracker)
    (8.0, 7, 1)
    """
    this = _find(system)
    _settings(system, settings)
    values = _taken(system, saved)
    scale = as_scale(this.scale, values[this.scale])
    for key in this.counters():
        if key in values:
            values[key] = _whole(key, values[key])
    held = {k: v for k, v in this.defaults().items() if k in values and k != this.scale}
    for key, default in held.items():
        if isinstance(default, bool):
            as_switch(key, values[key])
    given = _settings(system, {**{key: values[key] for key in held}, **settings})
    rule = this.preset(**{this.start: scale}, **given)
    state = rule.init()
    if not isinstance(state, DynamicState) or float(state.loss_scale) != np.float32(scale):
        raise ValueError(
            f"{this.scale} is {scale}, which these settings of presets.{system} do not reach: "
            "pass them as the run had them."
        )
    clean, credit = counts = this.read({**values, **given})
    said = {key: values[key] for key in this.counters() if key in values}
    _check_counts(system, said, counts, int(state.growth_tracker), given)
    return rule, state._replace(
        growth_tracker=jnp.asarray(clean, jnp.int32),
        hysteresis_tracker=(
            state.hysteresis_tracker if credit is None else jnp.asarray(credit, jnp.int32)
        ),
    )


def export(system: str, state: PyTree, **settings: Any) -> dict[str, Any]:
    """The state of a rule, as another system's scaler loads it.

    torch, apex, DeepSpeed's `FP16_Optimizer` and Paddle take the dict in `load_state_dict`,
    Megatron with `torch.tensor([saved["scale"]])` for its scale. `vars(loss_scaler).update(saved)`
    sets DeepSpeed's scaler under ZeRO; `assign` the values to Keras's variables of these names.
    `DynamicScale(**saved)` and `DynamicLossScale(**saved)` make flax's and jmp's objects.

    Args:
      system: as for `load`.
      state: a `jscale.DynamicState`, or a nest with one `LossScaleState`, as for `loss_scale`.
      **settings: what the rule was made with, as arguments of the preset `system`, where it is not
        the default.

    Returns:
      A dict of Python numbers (for Paddle and jmp the scale is a NumPy array).

    Raises:
      ValueError, TypeError: there is no such state, or it cannot be one of a rule with these
        settings.

    >>> import jscale
    >>> jscale.interop.export("keras", jscale.presets.keras(8).init())
    {'dynamic_scale': 8.0, 'step_counter': 0}
    """
    this = _find(system)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
        raise TypeError("export reads the state, so it must be called outside jit and scan.")
    held = state._asdict() if isinstance(state, DynamicState) else find_state(state)[1]
    if by_rule(held):
        raise ValueError(
            f"one scale at a time, and this state has several, {', '.join(map(repr, held))}: pass "
            "the state of one rule, as in state.rule[key]."
        )
    if set(held) != set(DynamicState._fields):
        raise TypeError(
            f"only the states of counting rules can be exported, such as jscale.dynamic's; "
            f"this one has the fields {', '.join(held)}."
        )
    held = jax.device_get(held)
    if np.ndim(held["loss_scale"]):
        raise ValueError(f"one scale at a time, got {describe(held['loss_scale'])}: pick one.")
    said = {key: int(held[key]) for key in ("growth_tracker", "hysteresis_tracker")}
    scale, clean, credit = float(held["loss_scale"]), *said.values()
    given = _settings(system, settings)
    lowest = this.preset(**{this.start: scale}, **given).init().growth_tracker
    _check_counts(system, said, (clean, max(credit, this.least_credit)), int(lowest), given)
    saved = {this.scale: scale} | {key: given[key] for key in this.settings}
    return this.wrap(saved | dict(this.constants) | this.write(clean, credit, given))


def put(state: PyTree, rule_state: Any) -> PyTree:
    """`state` with `rule_state` in the place of its rule's state, and nothing else changed.

    Only the scale and counters travel. The settings are those of the rule that the optimizer was
    made with, so make it with the rule that `load` returned.

    Args:
      state: any nest with one `LossScaleState`, as for `loss_scale`.
      rule_state: the state of a rule, such as `load` returns; of several rules, the dict of theirs.

    Returns:
      A tree of the structure, shapes and dtypes of `state`.

    Raises:
      ValueError: there is no loss scale in `state`, or more than one; the scale cannot be one.
      TypeError: the rule in `state` keeps another kind of state.

    >>> import jax.numpy as jnp, jscale, optax
    >>> tx = jscale.with_loss_scale(optax.sgd(0.1))
    >>> state = tx.init({"w": jnp.ones(2)})
    >>> float(jscale.loss_scale(jscale.interop.put(state, jscale.dynamic(8).init())))
    8.0
    """
    norm = find_state(state)[0]["grad_norm"]
    [(where, _)] = find_all(state)
    new: dict[str, Any] = {
        "/".join(path_parts(p)): x for p, x in jax.tree.leaves_with_path(rule_state)
    }

    def name_of(path: Any) -> str | None:
        """What a leaf of the rule's state is called in `new`; None for all others."""
        parts = path_parts(path[len(where) :])
        if path[: len(where)] != where or parts[0] != "rule":
            return None
        names = ["/".join(parts[1:]), "/".join(parts[1:-1])]  # NNX's variables add a component
        return next((name for name in names if name in new), names[0])

    def like(name: str, x: Any) -> jax.ShapeDtypeStruct:
        last = jnp.ndim(new[name]) if name in new else 0  # in front are the axes of a vmap
        return jax.ShapeDtypeStruct(x.shape[x.ndim - last :], x.dtype)

    named = ((name_of(path), x) for path, x in jax.tree.leaves_with_path(state))
    held = {name: like(name, x) for name, x in named if name is not None}
    difference = mismatch(new, held)
    is_off = norm is None
    if difference or is_off != isinstance(rule_state, OffState):
        raise TypeError(
            f"the rule in this state keeps another state than this {type(rule_state).__name__} "
            f"({difference or 'their types differ'}): make the optimizer with the rule that load "
            "returned."
        )
    for name, x in new.items():
        if name.split("/")[-1] == "loss_scale":
            for scale in np.ravel(x) if np.ndim(x) else [x]:
                as_scale(name, scale)

    def leaf(path, x):
        if (name := name_of(path)) is None or is_off:  # off() has a scale of 1, whatever is saved
            return x
        return jnp.broadcast_to(jnp.array(new[name], x.dtype), x.shape)  # a copy: may be donated

    return jax.tree.map_with_path(leaf, state)
