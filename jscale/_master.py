"""Parameters in half precision, with float32 copies in the optimizer state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._tree import PyTree, at_least_f32, describe, is_inexact, map_inexact, strong


class MasterWeightsState(NamedTuple):
    """State of `with_master_weights`.

    Attributes:
      master: the parameters in float32; the ones of the model are these, rounded.
      inner: state of the wrapped optimizer.

    >>> import jax.numpy as jnp, jscale, optax
    >>> tx = jscale.with_master_weights(optax.sgd(0.1))
    >>> tx.init({"w": jnp.ones(2, jnp.float16)}).master["w"].dtype
    dtype('float32')
    """

    master: PyTree
    inner: PyTree


def with_master_weights(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """`inner` on float32 copies of the parameters, which themselves may be float16 or bfloat16.

    In float16 an update below 2^-11 of a weight is rounded away, and with a small learning rate
    weights stop moving. Here updates add up in float32, and `optax.apply_updates` gives the model
    the sum, rounded once. As apex's O2 level and DeepSpeed do it, at 4 bytes a weight: models that
    are float32 and cast in the forward pass, as under `autocast`, need no copies.

    Put it inside `with_loss_scale`, so that a skipped step leaves the copies as they are, and save
    the state with the checkpoint: the copies are the parameters. Whoever changes parameters outside
    the optimizer must make a new state. The copies are sharded as the state of `inner` is.

    Args:
      inner: the optimizer, which sees float32 parameters and gradients.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `MasterWeightsState` and whose
      updates are float32. `update` needs the parameters.

    Raises:
      TypeError: `inner` is no optimizer.
      ValueError: `update` was called without parameters.

    >>> import jax.numpy as jnp, jscale, optax
    >>> params = jnp.ones(1, jnp.float16)
    >>> tx = jscale.with_master_weights(optax.sgd(1e-4))
    >>> state = tx.init(params)
    >>> for _ in range(100):   # 1 - 1e-4 is 1 in float16
    ...     updates, state = tx.update(jnp.ones(1), state, params)
    ...     params = (params.astype(jnp.float32) + updates).astype(jnp.float16)
    >>> print(params, state.master)
    [0.99] [0.98999834]
    """
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"inner must be an optax.GradientTransformation, got {describe(inner)}: "
            "pass e.g. optax.adamw(3e-4)."
        )
    tx = optax.with_extra_args_support(inner)
    wide = lambda tree: map_inexact(lambda _, x: at_least_f32(x), tree)

    def init(params):
        # Copies, also of what is float32: no buffer may be in the parameters and the state.
        master = jax.tree.map(lambda x: jnp.array(x) if is_inexact(x) else x, wide(params))
        return MasterWeightsState(master, jax.tree.map(strong, tx.init(master)))

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError("with_master_weights rounds to the parameters: pass them to update.")
        updates, inner_state = tx.update(wide(updates), state.inner, state.master, **extra_args)
        master = optax.apply_updates(state.master, updates)

        def step(p, new):
            if p is None or not is_inexact(p):
                return new
            # What brings p to the rounded copy: float32 holds the difference, unless a weight falls
            # to less than 2^-14 of itself.
            return new.astype(p.dtype).astype(new.dtype) - p.astype(new.dtype)

        is_none = lambda x: x is None
        steps = jax.tree.map(step, params, master, is_leaf=is_none)
        return steps, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
