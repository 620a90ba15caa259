"""Raising on the host what a jitted step can only record."""

import jax
import numpy as np

from ._optimizer import find_state
from ._tree import PyTree


def check(state: PyTree, *, max_skips: int = 20, allow_nonfinite_loss: bool = False) -> None:
    """Raise, with the likely cause, if training cannot go on by itself.

    Call it outside jit, as often as the metrics are looked at; it waits for the state and copies a
    few scalars to the host.

    Args:
      state: as for `loss_scale`.
      max_skips: how many skipped steps in a row are too many. A run that starts with a large
        scale skips some 15 steps before it settles.
      allow_nonfinite_loss: do not raise on a single inf or NaN loss (seen only if `loss=` is passed
        to `update`), only on `max_skips` skips in a row.

    Raises:
      FloatingPointError: the loss is not finite; or gradients still overflow with the scale at its
        minimum; or `max_skips` steps in a row were skipped.

    >>> import jax.numpy as jnp, jscale, optax
    >>> tx = jscale.with_loss_scale(optax.sgd(0.1))
    >>> params = {"w": jnp.ones(2)}
    >>> _, state = tx.update({"w": jnp.full(2, jnp.nan)}, tx.init(params), params, loss=jnp.nan)
    >>> jscale.check(state)
    Traceback (most recent call last):
    FloatingPointError: the loss is not finite: ...
    """
    found = jax.device_get(find_state(state))
    rule = found["rule"]
    skips = int(np.max(found["consecutive_skips"]))
    loss_finite = bool(np.all(found["loss_finite"]))
    norm = found["grad_norm"]
    overflow = norm is not None and not np.all(np.isfinite(norm))
    scale = np.max(rule["loss_scale"])
    at_min = bool(np.any(rule.get("at_min", False)))
    after = f"after {skips} skipped steps in a row" if skips else "though the step was applied"

    if not loss_finite and (skips >= max_skips or not allow_nonfinite_loss):
        raise FloatingPointError(
            f"the loss is not finite: it came out of the forward pass as inf or NaN, {after}. "
            "Lowering the loss scale cannot help. Look at the data of this step, the learning "
            "rate, and operations that overflow in float16 (exp, sums, norms, masks of -1e9)."
        )
    if overflow and at_min:
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
            else "Gradients are finite: the caller's apply= vetoed the steps."
        )
        raise FloatingPointError(
            f"{skips} steps in a row were skipped; the loss scale is {scale:g}. {cause}"
        )
