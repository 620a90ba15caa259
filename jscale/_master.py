"""Parameters in half precision, with float32 copies in the optimizer state."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._arguments import as_transformation
from ._tree import PyTree, at_least_f32, describe, is_gradient, path_name, strong, wide


class MasterWeightsState(NamedTuple):
    """State of `with_master_weights`.

    Attributes:
      master: float32 copies of the parameters that are narrower, which are these, rounded; None in
        the place of all others.
      inner: state of the wrapped optimizer.

    >>> import jax.numpy as jnp, jscale, optax
    >>> tx = jscale.with_master_weights(optax.sgd(0.1))
    >>> tx.init({"gain": jnp.ones(2), "w": jnp.ones(2, jnp.float16)}).master
    {'gain': None, 'w': Array([1., 1.], dtype=float32)}
    """

    master: PyTree
    inner: PyTree


def with_master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """`inner` on float32 copies of the parameters that are float16 or bfloat16.

    In float16 an update below 2^-12 of a weight is rounded away, and with a small learning rate
    weights stop moving. Here updates add up in float32, and `optax.apply_updates` gives the model
    the sum, rounded. As apex's O2 level and DeepSpeed do it; what is float32 already has no copy.

    Put it around `with_loss_scale`, so that all in there sees float32; a skipped step leaves copies
    and parameters as they are. Copies are sharded as their parameters are. Whoever changes
    parameters outside the optimizer must make a new state.

    Where float32 meets a float16 weight, JAX computes in float32, under `autocast` too: cast the
    inputs of the model as well.

    The parameters in float32, for a checkpoint or an evaluation, and the way back from a checkpoint
    of `full` and `state.inner`, which is that of the same training without copies (of NNX's states,
    take `nnx.as_pure`):

        full = jax.tree.map(lambda p, m: p if m is None else m, params, state.master)

        params = jax.tree.map(lambda p, x: x.astype(p.dtype), params, full)
        master = jax.tree.map(lambda p, x: None if p.dtype == x.dtype else x, params, full)
        state = jscale.MasterWeightsState(master, inner)

    A copy above 65504 is inf in float16; around `with_loss_scale` every step is skipped from then
    on, which `check` reports. Where a weight changes by more than a factor of two in one step,
    float32 may not hold the update, and the parameter misses its rounded copy by a last bit or by
    2^-24 of what it was, until its copy moves again.

    Args:
      inner: the optimizer, which sees float32 parameters and gradients.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `MasterWeightsState` and whose
      updates are float32. `update` needs the parameters.

    Raises:
      TypeError: `inner` is no optimizer.
      ValueError: `update` was called without parameters, or with some that have become float32, as
        `eqx.apply_updates` makes them.

    >>> import jax.numpy as jnp, jscale, optax
    >>> params = jnp.ones(1, jnp.float16)
    >>> tx = jscale.with_master_weights(jscale.with_loss_scale(optax.sgd(1e-4)))
    >>> state = tx.init(params)
    >>> for _ in range(100):   # 1 - 1e-4 is 1 in float16
    ...     updates, state = tx.update(jnp.ones(1), state, params)
    ...     params = (params.astype(jnp.float32) + updates).astype(jnp.float16)
    >>> print(params, state.master)
    [0.99] [0.98999834]
    """
    tx = as_transformation(inner)

    def copy(path: Any, p: Any) -> Any:
        if not is_gradient(path, p):
            return None
        full = at_least_f32(p)
        return None if full.dtype == jnp.asarray(p).dtype else full

    def init(params):
        # Widened twice: no buffer may be in the copies and in the state of inner.
        inner_state = jax.tree.map(strong, tx.init(wide(params)))
        return MasterWeightsState(jax.tree.map_with_path(copy, params), inner_state)

    def update(updates, state, params=None, **extra_args):
        if not isinstance(state, MasterWeightsState):
            raise TypeError(
                f"state must be a MasterWeightsState, got {describe(state)}: "
                "pass what init returned."
            )
        if params is None:
            raise ValueError("with_master_weights rounds to the parameters: pass them to update.")
        full = jax.tree.map(lambda p, m: p if m is None else m, params, state.master)
        updates, inner_state = tx.update(wide(updates), state.inner, full, **extra_args)

        def move(path, p, m, u):
            if m is None or u is None:
                return m
            if p.dtype == m.dtype:
                raise ValueError(
                    f"{path_name(path)} is {describe(p)}, but was narrower: "
                    "apply updates with optax.apply_updates, which keeps dtypes, and put "
                    "with_master_weights around with_loss_scale, not inside."
                )
            return optax.apply_updates(m, u)

        def step(path, p, m, u):
            if m is None or u is None:
                return u
            # Rounded here already, or p + (m - p) would be rounded twice. (As it is on GPUs, where
            # XLA leaves out a cast there and back.)
            rounded = m.astype(p.dtype)
            # -0.0 adds nothing, not even to -0.0 and inf. If the copy stands still, so does p.
            still = (u == 0) | (rounded == p)
            return jnp.where(still, -0.0, rounded.astype(m.dtype) - p.astype(m.dtype))

        each = functools.partial(jax.tree.map_with_path, is_leaf=lambda x: x is None)
        master = each(move, params, state.master, updates)
        return each(step, params, master, updates), MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
