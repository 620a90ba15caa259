"""What `with_loss_scale` records, and how it is found again in a larger state."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._groups import shown
from ._tree import PyTree, describe, path_name


class LossScaleState(NamedTuple):
    """State of `with_loss_scale`. Every field describes the last update.

    With several rules, `rule` and `grad_norm` are dicts from the rules' keys; with `skip="own"`, so
    are `finite`, the three counts and `inner`.

    Attributes:
      rule: state of the scale rule; `rule.loss_scale` is the scale for the next step.
      finite: bool[], the flag that decided: the gradients and their norm were finite, on every
        device, and `apply` did not veto. Use it with `select`.
      grad_norm: f32[] (f32[n] under `stacked`), norm of the unscaled gradients before anything
        clipped them; inf or NaN where they overflowed. None under `off`, which does not look.
      loss_finite: bool[], whether the last `loss=` passed to `update` was finite.
      applied_steps: i32[], steps applied so far (micro-batches, around `optax.MultiSteps`).
      skipped_steps: i32[], steps skipped so far.
      consecutive_skips: i32[], steps skipped in a row up to now.
      inner: state of the wrapped optimizer.

    >>> import jax.numpy as jnp, jscale, optax
    >>> jscale.with_loss_scale(optax.sgd(0.1)).init({"w": jnp.ones(2)})._fields[:3]
    ('rule', 'finite', 'grad_norm')
    """

    rule: Any
    finite: Any
    grad_norm: Any
    loss_finite: jax.Array
    applied_steps: Any
    skipped_steps: Any
    consecutive_skips: Any
    inner: Any


def _is_state(x: Any) -> bool:
    # nnx.State and flax.serialization turn a NamedTuple into a mapping from its field names,
    # and leave out a field without leaves.
    return isinstance(x, LossScaleState) or (
        isinstance(x, Mapping) and set(LossScaleState._fields) - {"grad_norm", "inner"} <= set(x)
    )


def find_all(tree: PyTree) -> list[tuple[Any, Any]]:
    flat = jax.tree.leaves_with_path(tree, is_leaf=_is_state)
    return [(path, x) for path, x in flat if _is_state(x)]


def _as_dict(node: Any) -> Any:
    """A node with its fields or keys, and what is in them, as dicts of plain arrays."""
    node = node._asdict() if hasattr(node, "_asdict") else node
    if isinstance(node, Mapping):
        return {key: _as_dict(x) for key, x in node.items()}
    # An NNX optimizer keeps each array in a Variable, a tree with one leaf.
    return next(iter(jax.tree.leaves(node)), None)


def by_rule(rule: dict[str, Any]) -> dict[str, dict[str, Any]] | None:
    """The state of each of several rules, or None if it is that of a single one."""
    return None if not isinstance(rule.get("loss_scale", {}), dict) else rule


def find_state(state: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the one `LossScaleState` in `state` but `inner`, and those of its rule's state.

    Both as plain arrays; of several rules, a dict from their keys to the fields of each.
    """
    found = find_all(state)
    if len(found) != 1:
        where = ", ".join(path_name(path) for path, _ in found)
        raise ValueError(
            f"more than one loss scale in this state, at {where}: pass the part that you mean."
            if found
            else f"no loss scale in this state ({describe(state)}): "
            "wrap the optimizer with jscale.with_loss_scale, and pass its state."
        )
    node = found[0][1]
    get = node.get if isinstance(node, Mapping) else functools.partial(getattr, node)
    own = {name: _as_dict(get(name, None)) for name in LossScaleState._fields[:-1]}
    return own, own.pop("rule")


def loss_scale(state: PyTree) -> Any:
    """The scale for the next backward pass.

    Args:
      state: any nest that holds one `LossScaleState`: an optax state, a Flax TrainState, the
        `opt_state` of an `nnx.Optimizer`, an `nnx.State`.

    Returns:
      f32[]; of several rules, a dict from their keys to f32[], or f32[n] for a stack of n layers.

    Raises:
      ValueError: there is no loss scale in `state`, or more than one (the message lists them).

    >>> import jax.numpy as jnp, jscale, optax
    >>> tx = optax.chain(jscale.with_loss_scale(optax.adam(1e-3)))
    >>> float(jscale.loss_scale(tx.init({"w": jnp.ones(3)})))
    65536.0
    """
    _, rule = find_state(state)
    several = by_rule(rule)
    return {key: x["loss_scale"] for key, x in several.items()} if several else rule["loss_scale"]


def metrics(state: PyTree) -> dict[str, jax.Array]:
    """What to log each step: the same keys every time, all unscaled, all arrays.

    Args:
      state: as for `loss_scale`.

    Returns:
      `grad_scale` (the scale for the next step), `grad_norm`, `finite`, `loss_finite`,
      `applied_steps`, `skipped_steps`, `consecutive_skips`, as `LossScaleState` has them; 0-d.
      Under `off`, `grad_scale` is 1 and `grad_norm`, which is not looked at, is absent. Of several
      rules, `grad_scale/text`, `grad_norm/text` and so on (`grad_scale/rest` under ''),
      which under `stacked` are arrays; with `skip="own"` so are the flags and the counts, and
      `finite` itself says whether all were applied.

    >>> import jax.numpy as jnp, jscale, optax
    >>> tx = jscale.with_loss_scale(optax.adam(1e-3), jscale.static(1024))
    >>> m = jscale.metrics(tx.init({"w": jnp.ones(3)}))
    >>> float(m["grad_scale"]), int(m["skipped_steps"])
    (1024.0, 0)
    """
    found, _ = find_state(state)
    out = {}
    for name, value in ({"grad_scale": loss_scale(state)} | found).items():
        if isinstance(value, dict):
            if name == "finite":
                out[name] = jnp.stack(list(value.values())).all(axis=0)
            out |= {f"{name}/{shown(key, value)}": x for key, x in value.items()}
        elif value is not None:
            out[name] = value
    return out
