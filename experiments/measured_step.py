"""The train step whose cost gpu_structure.py and overhead.py measure, scaled and not."""

import jax
import optax

import jscale


def make_step(loss_fn, tx, scaled: bool):
    """`step(params, state, *batch) -> (params, state, loss)`, and the optimizer it uses."""
    if scaled:
        tx = jscale.with_loss_scale(tx)

    def step(params, state, *batch):
        value_and_grad = (
            jscale.value_and_grad(loss_fn, jscale.loss_scale(state))
            if scaled
            else jax.value_and_grad(loss_fn)
        )
        loss, grads = value_and_grad(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step, tx
