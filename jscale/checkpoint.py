"""Optimizer states out of checkpoints that were made without a scaler, with another, or before.

A state of `with_loss_scale` is a pytree of arrays: Orbax saves and restores it as it is, on
whatever devices, and `jax.eval_shape(tx.init, params)` is its abstract target. This module is for
checkpoints that hold another state than the optimizer now has. Here is one without a scaler:

>>> import jax, jax.numpy as jnp, jscale, optax
>>> from jscale import checkpoint
>>> params = {"w": jnp.ones(2)}
>>> saved = optax.adam(1e-3).init(params)
>>> tx = jscale.with_loss_scale(optax.adam(1e-3))
>>> state = checkpoint.attach(tx.init(params), saved)
>>> float(jscale.loss_scale(state))
65536.0

The target with which Orbax restores it, to which shardings are to be added:

>>> target = jax.eval_shape(lambda: checkpoint.detach(tx.init(params)))
>>> jax.tree.structure(target) == jax.tree.structure(saved)
True

`VERSION` goes beside what is saved, so that a jscale that is too old for it says so:
`save(..., custom_metadata={"jscale": checkpoint.VERSION})`, and
`attach(..., version=metadata["jscale"])`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._arguments import as_number, as_scale
from ._state import LossScaleState, find_all, find_state
from ._tree import PyTree, describe, listing, path_name, path_parts

__all__ = ["VERSION", "attach", "detach"]

# Raised when a field changes its meaning; new fields alone do not need it.
VERSION = 1

_Name = tuple[str, ...]
_SCALE = ("loss_scale",)


def _name(path: Any) -> _Name:
    """A path in components that are the same for the types of a nest and for Orbax's dicts."""
    parts = path_parts(path)
    # NNX's variables add a component. No other leaf can have the name without it.
    return parts[:-1] if parts[-1:] == ("value",) else parts


def detach(state: PyTree) -> PyTree:
    """`state` without the scaler, as the wrapped optimizer alone would have it.

    Args:
      state: any nest with one `LossScaleState`, as for `loss_scale`; it may be abstract.

    Returns:
      The nest with the `LossScaleState` replaced by its `inner`.

    Raises:
      ValueError: there is no loss scale in `state`, or more than one; or each group has its own
        state of the wrapped optimizer, with counts of its own (`skip="own"`), so that there is no
        state of one optimizer. `state.inner[key]` is that of a group.

    >>> import jax.numpy as jnp, jscale, optax
    >>> state = jscale.with_loss_scale(optax.trace(0.9)).init({"w": jnp.ones(2)})
    >>> print(jscale.checkpoint.detach(state))
    TraceState(trace={'w': Array([0., 0.], dtype=float32)})
    """
    if isinstance(find_state(state)[0]["finite"], dict):
        raise ValueError(
            "with skip='own' each group has its own state of the wrapped optimizer, with counts of "
            "its own, and no single optimizer could go on with them: save the state as it is, or "
            "take that of a group, state.inner[key]."
        )
    [(where, node)] = find_all(state)
    inner = node.inner if isinstance(node, LossScaleState) else node.get("inner", {})
    # Told by its path: an nnx.State makes its nodes anew whenever it is looked at.
    replace = lambda path, x: inner if path == where else x
    return jax.tree.map_with_path(
        replace, state, is_leaf=lambda path, _: path == where, is_leaf_takes_path=True
    )


def attach(state: PyTree, saved: PyTree, *, version: int = VERSION) -> PyTree:
    """`state` with what was saved in its place, by the names of paths.

    What may differ is the scaler: `saved` may have none, or one of another rule, of other groups or
    of an older jscale. All else must be the same, to the dtype. Of the scaler:

    - if it was saved with this rule, every field is put in place;
    - from one rule to another the scale and the counts of steps are kept. The bounds of the new
      rule apply from its first update on, as `static` and its constant do;
    - a group has what was saved under its key; else what governed its parameters, of several the
      one with the smallest scale. So each of several scales starts at the one before, one scale at
      the smallest of several, and a stack has it for each layer. With `skip="own"`, every group
      also starts with the step counts and its part of the wrapped optimizer's state;
    - to and from `off` the counts of steps are kept, but no scale;
    - what was not saved stays as it is in `state`.

    Args:
      state: a fresh state, e.g. `tx.init(params)`: any nest with one `LossScaleState`, as for
        `loss_scale`. Where `saved` has the values, leaves may be `jax.ShapeDtypeStruct`.
      saved: what the checkpoint held, as it was or as the dicts and lists that Orbax makes of it
        without a target: the same nest, in which the wrapped optimizer's state may stand alone.
      version: the `VERSION` with which it was saved.

    Returns:
      A tree of the structure, shapes and dtypes of `state`. Arrays go where `state` has them, if it
      says so (its leaf is committed to devices, or has a sharding); otherwise they are those of
      `saved`, not copied.

    Raises:
      ValueError: `saved` does not fit, or comes from a newer jscale; the message has the paths.
        Nothing is used then.
      TypeError: `saved` is abstract, or it was called inside jit.

    >>> import jax.numpy as jnp, jscale, optax
    >>> params = {"text": jnp.ones(2), "vision": jnp.ones(2)}
    >>> saved = jscale.with_loss_scale(optax.adam(1e-3), jscale.dynamic(8)).init(params)
    >>> rules = {"text": jscale.dynamic(), "vision": jscale.dynamic()}
    >>> state = jscale.with_loss_scale(optax.adam(1e-3), rules).init(params)
    >>> state = jscale.checkpoint.attach(state, saved)
    >>> {key: float(scale) for key, scale in jscale.loss_scale(state).items()}
    {'text': 8.0, 'vision': 8.0}
    """
    if as_number("version", version, "pass the VERSION that was saved") > VERSION:
        raise ValueError(
            f"this checkpoint is of version {version}, and this jscale reads up to {VERSION}: "
            "update jscale."
        )
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state, saved))):
        raise TypeError("attach looks at the values, so it must be called outside jit and scan.")
    stored = {_name(path): (path, x) for path, x in jax.tree.leaves_with_path(saved)}
    for path, value in stored.values():
        if hasattr(value, "dtype") and not isinstance(value, jax.Array | np.ndarray | np.generic):
            what = f"a {type(value).__name__} at {path_name(path)}"
            raise TypeError(f"saved must hold arrays, and has {what}: restore it first.")
    if find_all(saved) and not find_all(state):
        raise ValueError(
            "saved has a scaler and state has none: attach(tx.init(params), saved) takes them in "
            "that order, and detach takes a scaler off."
        )
    by_group = isinstance(find_state(state)[0]["finite"], dict)
    at = _name(find_all(state)[0][0])
    fields = {name[len(at) :] for name in stored if name[: len(at)] == at and name != at}
    has_scaler = {"rule", "skipped_steps"} <= {field[0] for field in fields}
    was_by_group = has_scaler and any(field[0] == "finite" and field[1:] for field in fields)
    if was_by_group and not by_group:
        raise ValueError(
            "this was saved with skip='own', where each group has its own state of the wrapped "
            "optimizer: make the optimizer with skip='own'."
        )

    def split(name: _Name, drop: int = 1) -> tuple[_Name | None, _Name]:
        """The field of the scaler, or else None; and the name in a nest without a scaler."""
        field = name[len(at) :]
        if name[: len(at)] != at or not field or field[0] not in LossScaleState._fields:
            return None, name
        return (None, at + field[drop:]) if field[0] == "inner" else (field, name)

    scaler, rest = {}, {}
    for name, (path, value) in stored.items():
        own, other = split(name) if has_scaler else (None, name)
        if own:
            scaler[own] = value
        else:
            rest[other] = path, value
    # What is a group's own is below its key.
    drop = 2 if by_group and not was_by_group else 1
    flat, treedef = jax.tree.flatten_with_path(state)
    named = [(*split(_name(path), drop), path, like) for path, like in flat]
    taken = _scaler({own: like for own, *_, like in named if own}, jax.device_get(scaler))

    found: list[Any] = []
    missing, different, seen = [], [], set()
    for own, other, path, like in named:
        x: Any = taken.get(own) if own else rest.get(other, (None, None))[1]
        if id(x) in seen and isinstance(x, jax.Array):
            x = jnp.copy(x)  # or it could not be donated
        seen.add(id(x))
        found.append(x)
        if x is None:
            stays = own or callable(like)  # a function in an Equinox module
            if not stays or isinstance(like, jax.ShapeDtypeStruct):
                missing.append(path_name(path))
        elif not _same_type(x, like):
            different.append(f"{path_name(path)} ({describe(x)}, not {describe(like)})")
    used = {other for _, other, *_ in named}
    unexpected = [path_name(path) for name, (path, _) in rest.items() if name not in used]
    sides = {"missing": missing, "unexpected": unexpected, "different": different}
    if said := [f"{side} {listing(paths)}" for side, paths in sides.items() if paths]:
        raise ValueError(
            f"what was saved does not fit this state: {'; '.join(said)}. All but the scaler must "
            "be as it was saved: its optimizer, parameters, dtypes, and where the scaler stands."
        )
    leaves = [
        like if x is None else _placed(x, like, small=own is not None or np.ndim(x) == 0)
        for x, (own, *_, like) in zip(found, named, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)


def _is_integer(x: Any) -> bool:
    if hasattr(x, "dtype"):
        return jnp.issubdtype(x.dtype, jnp.integer) and x.shape == ()
    return isinstance(x, int) and not isinstance(x, bool)


def _same_type(x: Any, like: Any) -> bool:
    """Whether `x` can stand where `like` does, without a cast."""
    if hasattr(x, "dtype") and hasattr(like, "dtype"):
        return x.shape == like.shape and x.dtype == like.dtype
    # Flax's TrainState counts its steps from a Python int on, and jit makes an array of it.
    return type(x) is type(like) or _is_integer(x) and _is_integer(like)


def _placed(x: Any, like: Any, small: bool) -> Any:
    """`x` where `like` is."""
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return x
    if small and not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        x = np.array(x, like.dtype)  # off the one device that Orbax commits it to
    if getattr(like, "committed", True) and like.sharding is not None:
        return jax.device_put(x, like.sharding)
    return x if isinstance(x, jax.Array) else jnp.array(x)


def _scaler(new: dict[_Name, Any], old: dict[_Name, Any]) -> dict[_Name, Any]:
    """The values for the fields `new`, out of `old`; none for those that stay."""
    taken = {}
    for name, like in new.items():
        if name[0] == "grad_norm":  # of the last step, and of groups that may be others now
            if name in old and np.shape(old[name]) == like.shape:
                taken[name] = old[name]
        elif name[0] != "rule":
            one = name if name in old else name[:1]  # for all groups, before skip="own"
            if one in old:
                taken[name] = old[one]
    rules, saved = ({n[1:]: x for n, x in y.items() if n[0] == "rule"} for y in (new, old))
    looks = lambda fields: any(name[0] == "grad_norm" for name in fields)
    was_off = not looks(old) and set(saved) == {_SCALE}
    if looks(new) and saved and not was_off:  # the scale of `off` is no other's
        taken |= {("rule", *name): x for name, x in _rules(rules, saved).items()}
    for name, x in taken.items():
        if name[-1:] == _SCALE:
            for scale in np.ravel(x):
                as_scale(f"the saved {'/'.join(name)}", scale)
    return taken


def _by_key(rules: dict[_Name, Any]) -> dict[str, dict[_Name, Any]]:
    """The fields of each of several rules, or those of one under ''."""
    if _SCALE in rules:
        return {"": rules}
    keys = dict.fromkeys(name[0] for name in rules)
    return {key: {n[1:]: x for n, x in rules.items() if n[0] == key} for key in keys}


def _rules(new: dict[_Name, Any], old: dict[_Name, Any]) -> dict[_Name, Any]:
    before, taken = _by_key(old), {}
    if wrong := [key for key, source in before.items() if _SCALE not in source]:
        raise ValueError(f"what was saved has no loss_scale in the rules {listing(wrong)}.")
    for key, fields in _by_key(new).items():
        under = [k for k in before if not key or k.startswith(key + "/")]
        over = [k for k in before if not k or key.startswith(k + "/")]
        sources = under + sorted(over, key=len)[-1:]
        if _SCALE not in new and key in before:
            sources = [key]
        if not sources:
            continue
        source = min((before[k] for k in sources), key=lambda source: np.min(source[_SCALE]))
        same_rule = set(source) <= set(fields)
        layers = len(fields[_SCALE].shape) - np.ndim(source[_SCALE])
        for name, like in fields.items():
            if same_rule and name in source:
                x = source[name]
            elif name[-1:] == _SCALE:  # a rule may hold another
                x = source[_SCALE]
            else:
                continue
            if layers == 1 and np.shape(x) == like.shape[1:]:
                x = np.broadcast_to(x, like.shape)
            elif layers == -1:
                x = x[np.argmin(source[_SCALE])]
            taken[(name if _SCALE in new else (key, *name))] = x
    return taken
