"""Raising on the host what a jitted step can only record."""

from typing import Any

import jax
import numpy as np

from ._arguments import as_count
from ._state import find_state
from ._tree import PyTree


def check(state: PyTree, *, max_skips: int = 20, allow_nonfinite_loss: bool = False) -> None:
    """Raise, with the likely cause, if training cannot go on by itself.

    Call it outside jit, as often as the metrics are looked at; it waits for the state and copies a
    few scalars to the host. If the state was vmapped, each copy is checked.

    Args:
      state: as for `loss_scale`.
      max_skips: how many skipped steps in a row are too many. A run that starts with a large
        scale skips some 15 steps before it settles.
      allow_nonfinite_loss: by default one inf or NaN loss, in the last step, is enough to raise
        (it is seen only if `loss=` is passed to `update`). True lets single bad batches pass, which
        are skipped anyway, and raises on `max_skips` skips in a row.

    Raises:
      FloatingPointError: the loss is not finite; or gradients overflowed with the scale at its
        minimum; or `max_skips` steps in a row were skipped; or a rule produced an invalid scale.

    >>> import jax.numpy as jnp, jscale, optax
    >>> tx = jscale.with_loss_scale(optax.sgd(0.1))
    >>> params = {"w": jnp.ones(2)}
    >>> _, state = tx.update({"w": jnp.full(2, jnp.nan)}, tx.init(params), params, loss=jnp.nan)
    >>> jscale.check(state)
    Traceback (most recent call last):
    FloatingPointError: the loss is not finite: ...
    """
    max_skips = as_count("max_skips", max_skips)
    found, rule = find_state(state)
    # A rule may name its fields as it likes; only these two mean something here.
    found |= {name: rule[name] for name in ("loss_scale", "steps_at_min") if name in rule}
    if any(isinstance(x, jax.core.Tracer) for x in found.values()):
        raise TypeError("check raises on what it sees, so it must be called outside jit and scan.")
    found = jax.device_get(found)
    for index in np.ndindex(np.shape(found["consecutive_skips"])):
        one = {name: None if x is None else x[index] for name, x in found.items()}
        _check_one(one, max_skips, allow_nonfinite_loss)


def _check_one(found: dict[str, Any], max_skips: int, allow_nonfinite_loss: bool) -> None:
    skips, scale, norm = (found[k] for k in ("consecutive_skips", "loss_scale", "grad_norm"))
    row = f"{skips} skipped step{'s' if skips > 1 else ''} in a row"
    after = f"after {row}" if skips else "though the step was applied"
    overflow = norm is not None and not np.isfinite(norm)

    if not (np.isfinite(scale) and scale > 0):
        raise FloatingPointError(
            f"the loss scale is {scale}: the rule must keep it positive and finite."
        )
    if not found["loss_finite"] and (skips >= max_skips or not allow_nonfinite_loss):
        raise FloatingPointError(
            f"the loss is not finite: it came out of the forward pass as inf or NaN, {after}. "
            "Lowering the loss scale cannot help. Look at the data of this step, the learning "
            "rate, and operations that overflow in float16 (exp, sums, norms, masks of -1e9)."
        )
    if overflow and found.get("steps_at_min", 0) >= 2:
        raise FloatingPointError(
            f"gradients overflow with the loss scale at its minimum, {scale:g}, {after}. If the "
            "loss is finite, lower min_scale or compute the largest activations in float32; if it "
            "is not, lowering the scale cannot help."
        )
    if skips >= max_skips:
        cause = (
            "Gradients are inf or NaN. If the scale is still falling to where they fit, a lower "
            "init_scale skips fewer steps; if they are NaN at any scale, look at the forward pass: "
            "pass loss= to update to have it checked."
            if overflow
            else "The last of them had finite gradients: the caller's apply= vetoed it."
        )
        raise FloatingPointError(f"{row}; the loss scale is {scale:g}. {cause}")
