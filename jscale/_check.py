"""Raising on the host what a jitted step can only record."""

from typing import Any, NamedTuple

import jax
import numpy as np

from ._arguments import as_count
from ._groups import shown
from ._state import by_rule, find_state
from ._tree import PyTree

# What to do about it; `Monitor` says the same.
LOST_LOSS = (
    "Lowering the loss scale cannot help. Look at the data of this step, the learning "
    "rate, and operations that overflow in float16 (exp, sums, norms, masks of -1e9)."
)
AT_MINIMUM = (
    "If the loss is finite, lower min_scale or compute the largest activations "
    "in float32; if it is not, lowering the scale cannot help."
)
NOT_FINITE = (
    "Gradients are inf or NaN. If the scale is still falling to where they fit, a lower "
    "init_scale skips fewer steps; if they are NaN at any scale, look at the forward pass: "
    "pass loss= to update to have it checked."
)
INVALID = "the rule must keep it positive and finite."


class _Part(NamedTuple):
    """What is looked at of one scale."""

    name: str
    scale: Any
    skips: int
    overflow: bool
    at_min: bool


def check(state: PyTree, *, max_skips: int = 20, allow_nonfinite_loss: bool = False) -> None:
    """Raise, with the likely cause, if training cannot go on by itself.

    Call it outside jit, as often as the metrics are looked at; it waits for the state and copies a
    few scalars to the host. If the state was vmapped, each copy is checked. Of several scales, one
    at its minimum is blamed if no other overflowed that could still fall.

    Args:
      state: as for `loss_scale`.
      max_skips: how many skipped steps in a row are too many. A run that starts with a large
        scale skips some 15 steps before it settles. Of several rules, as many for each, since they
        settle one after the other.
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
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((found, rule))):
        raise TypeError("check raises on what it sees, so it must be called outside jit and scan.")
    found, rule = jax.device_get((found, rule))
    max_skips *= len(by_rule(rule) or [""])
    for copy in np.ndindex(np.shape(found["loss_finite"])):
        _check_one(
            found["loss_finite"][copy], _parts(found, rule, copy), max_skips, allow_nonfinite_loss
        )


def _parts(found: dict[str, Any], rule: dict[str, Any], copy: tuple[int, ...]) -> list[_Part]:
    """One for each scale: of a rule, of several, and of each layer of a stack."""
    parts = []
    several = by_rule(rule)
    for key, own in (several or {"": rule}).items():
        mine = {name: x[key] if isinstance(x, dict) else x for name, x in found.items()}
        # A rule may name its fields as it likes; only these two mean something here.
        at_min, norm = own.get("steps_at_min"), mine["grad_norm"]
        scale, skips = own["loss_scale"][copy], mine["consecutive_skips"][copy]
        for layer in np.ndindex(np.shape(scale)):
            where = copy + layer
            parts.append(
                _Part(
                    name=" of " + "/".join(map(str, (shown(key, several), *layer)))
                    if several
                    else "",
                    scale=scale[layer],
                    skips=skips,
                    overflow=norm is not None and not np.isfinite(norm[where]),
                    at_min=at_min is not None and at_min[where] >= 2,
                )
            )
    return parts


def _check_one(
    loss_finite: bool, parts: list[_Part], max_skips: int, allow_nonfinite_loss: bool
) -> None:
    skips = max(part.skips for part in parts)
    row = f"{skips} skipped step{'s' if skips > 1 else ''} in a row"
    after = f"after {row}" if skips else "though the step was applied"
    for part in parts:
        if not (np.isfinite(part.scale) and part.scale > 0):
            raise FloatingPointError(f"the loss scale{part.name} is {part.scale}: {INVALID}")
    if not loss_finite and (skips >= max_skips or not allow_nonfinite_loss):
        raise FloatingPointError(
            f"the loss is not finite: it came out of the forward pass as inf or NaN, {after}. "
            + LOST_LOSS
        )
    overflowed = [part for part in parts if part.overflow]
    # If one of several can still fall, the others may overflow because of it.
    if overflowed and all(part.at_min for part in overflowed):
        part = overflowed[0]
        raise FloatingPointError(
            f"gradients overflow with the loss scale{part.name} at its minimum, {part.scale:g}, "
            f"{after}. {AT_MINIMUM}"
        )
    if skips >= max_skips:
        cause = (
            NOT_FINITE
            if overflowed
            else "The last of them had finite gradients: the caller's apply= vetoed it."
        )
        scales = "; ".join(
            f"the loss scale{part.name} is {part.scale:g}{', its minimum' if part.at_min else ''}"
            for part in (overflowed or parts)[:5]
        )
        if len(overflowed) > 1:
            cause += (
                " Of several scales, is each that of a region, and do their rules come in the "
                "order of the backward pass, from the root on?"
            )
        raise FloatingPointError(f"{row}; {scales}. {cause}")
