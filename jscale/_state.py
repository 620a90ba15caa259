"""What `with_loss_scale` records, and how it is found again in a larger state."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from ._tree import PyTree, describe, path_name


class LossScaleState(NamedTuple):
    """State of `with_loss_scale`. Every field describes the last update.

    Attributes:
      rule: state of the scale rule; `rule.loss_scale` is the scale for the next step.
      finite: bool[], the flag that decided: the gradients and their norm were finite, on every
        device, and `apply` did not veto. Use it with `select`.
      grad_norm: f32[], norm of the unscaled gradients before anything clipped them; inf or NaN
        where they overflowed. None under `off`, which does not look.
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
    finite: jax.Array
    grad_norm: jax.Array | None
    loss_finite: jax.Array
    applied_steps: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array
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


def find_state(state: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the one `LossScaleState` in `state` but `inner`, and those of its rule's state.

    Both as plain arrays.
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
    fields = lambda node: dict(node) if isinstance(node, Mapping) else node._asdict()
    # An NNX optimizer keeps each array in a Variable, a tree with one leaf.
    unwrap = lambda x: next(iter(jax.tree.leaves(x)), None)
    own = fields(found[0][1])
    rule = {name: unwrap(x) for name, x in fields(own["rule"]).items()}
    return {name: unwrap(own.get(name)) for name in LossScaleState._fields[1:-1]}, rule


def loss_scale(state: PyTree) -> jax.Array:
    """The scale for the next backward pass.

    Args:
      state: any nest that holds one `LossScaleState`: an optax state, a Flax TrainState, the
        `opt_state` of an `nnx.Optimizer`, an `nnx.State`.

    Returns:
      f32[].

    Raises:
      ValueError: there is no loss scale in `state`, or more than one (the message lists them).

    >>> import jax.numpy as jnp, jscale, optax
    >>> tx = optax.chain(jscale.with_loss_scale(optax.adam(1e-3)))
    >>> float(jscale.loss_scale(tx.init({"w": jnp.ones(3)})))
    65536.0
    """
    _, rule = find_state(state)
    return rule["loss_scale"]


def metrics(state: PyTree) -> dict[str, jax.Array]:
    """What to log each step: the same keys every time, all unscaled, all 0-d arrays.

    Args:
      state: as for `loss_scale`.

    Returns:
      `grad_scale` (the scale for the next step), `grad_norm`, `finite`, `loss_finite`,
      `applied_steps`, `skipped_steps`, `consecutive_skips`, as `LossScaleState` describes them.
      Under `off`, `grad_scale` is 1 and `grad_norm`, which is not looked at, is absent.

    >>> import jax.numpy as jnp, jscale, optax
    >>> tx = jscale.with_loss_scale(optax.adam(1e-3), jscale.static(1024))
    >>> m = jscale.metrics(tx.init({"w": jnp.ones(3)}))
    >>> float(m["grad_scale"]), int(m["skipped_steps"])
    (1024.0, 0)
    """
    found, rule = find_state(state)
    return {"grad_scale": rule["loss_scale"]} | {k: v for k, v in found.items() if v is not None}
