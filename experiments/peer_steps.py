"""One train step as each loss-scaling library would have its users write it, and unscaled.

gpu_structure.py counts their kernels and overhead.py takes their times. A library is imported when
its step is made, and MPX is not among the dependencies: pip install mixed_precision_for_JAX.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import optax

import jscale

GROWTH_INTERVAL = 2000


def unscaled(loss_fn, tx):
    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, {"loss": loss}

    return step, tx.init


def with_jscale(loss_fn, tx, rule=None, root=None):
    """As in its README. With a dict of rules, `root` is the key of the one that scales the loss."""
    tx = jscale.with_loss_scale(tx, rule)

    def step(params, state, x, y):
        scale = jscale.loss_scale(state)
        loss, grads = jscale.value_and_grad(loss_fn, scale, root=root)(params, x, y)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, {"loss": loss, **jscale.metrics(state)}

    return step, tx.init


def with_flax(loss_fn, tx):
    """As in Flax's own examples (wmt, lm1b)."""
    from flax.training.dynamic_scale import DynamicScale

    def init(params):
        # As arrays, or the counter's type changes with the first step.
        scale = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(2**16))
        return tx.init(params), scale

    def step(params, state, x, y):
        inner, scale = state
        scale, finite, loss, grads = scale.value_and_grad(loss_fn)(params, x, y)
        updates, new = tx.update(grads, inner, params)
        where = functools.partial(jnp.where, finite)
        state = jax.tree.map(where, new, inner), scale
        params = jax.tree.map(where, optax.apply_updates(params, updates), params)
        return params, state, {"loss": loss, "scale": scale.scale, "finite": finite}

    return step, init


def with_jmp(loss_fn, tx):
    """As in jmp's README."""
    import jmp

    def init(params):
        # By hand: jmp's own class cannot hold shapes in place of arrays.
        return tx.init(params), jnp.float32(2**15), jnp.int32(0)

    def step(params, state, x, y):
        inner, *numbers = state
        scale = jmp.DynamicLossScale(*numbers, period=GROWTH_INTERVAL)
        scaled = lambda params: scale.scale(loss_fn(params, x, y))
        loss, grads = scale.unscale(jax.value_and_grad(scaled)(params))
        finite = jmp.all_finite(grads)
        scale = scale.adjust(finite)
        updates, new = tx.update(grads, inner, params)
        params = jmp.select_tree(finite, optax.apply_updates(params, updates), params)
        state = jmp.select_tree(finite, new, inner), scale.loss_scale, scale.counter
        return params, state, {"loss": loss, "scale": scale.loss_scale, "finite": finite}

    return step, init


def with_mpx(loss_fn, tx):
    """As in MPX's README. It casts parameters and data itself."""
    import mpx

    def init(params):
        # By hand: its own class has Python numbers for leaves.
        return tx.init(params), jnp.float32(2**15), jnp.int32(0)

    def step(params, state, x, y):
        inner, scale, counter = state
        scaling = mpx.DynamicLossScaling(
            scale, jnp.float32(1), period=GROWTH_INTERVAL, counter=counter
        )
        value_and_grad = mpx.filter_value_and_grad(loss_fn, scaling)
        loss, scaling, finite, grads = value_and_grad(params, x, y)
        params, inner = mpx.optimizer_update(params, tx, inner, grads, finite)
        state = inner, scaling.loss_scaling, scaling.counter
        return params, state, {"loss": loss, "scale": scaling.loss_scaling, "finite": finite}

    return step, init


def with_optax(loss_fn, tx):
    """optax.apply_if_finite has no scale: it is moved by hand."""
    tx = optax.apply_if_finite(tx, max_consecutive_errors=100)

    def init(params):
        return tx.init(params), jnp.float32(2**16), jnp.int32(0)

    def step(params, state, x, y):
        inner, scale, count = state
        scaled = lambda params: loss_fn(params, x, y) * scale
        loss, grads = jax.tree.map(lambda a: a / scale, jax.value_and_grad(scaled)(params))
        updates, inner = tx.update(grads, inner, params)
        finite = inner.last_finite
        count = jnp.where(finite, count + 1, 0)
        grow = count == GROWTH_INTERVAL
        scale = jnp.where(finite, jnp.where(grow, scale * 2, scale), scale / 2)
        state = inner, scale, jnp.where(grow, 0, count)
        params = optax.apply_updates(params, updates)
        return params, state, {"loss": loss, "scale": scale, "finite": finite}

    return step, init


LIBRARIES = {
    "unscaled": unscaled,
    "jscale": with_jscale,
    "flax": with_flax,
    "jmp": with_jmp,
    "mpx": with_mpx,
    "optax": with_optax,
}


def installed(library: str) -> bool:
    return library == "unscaled" or importlib.util.find_spec(library) is not None


def make_step(library: str, loss_fn, tx, **options):
    """`step(params, state, x, y) -> (params, state, outputs)`, and `init(params) -> state`.

    `outputs` is a dict of the loss and of what else the library tells of the step.
    """
    return LIBRARIES[library](loss_fn, tx, **options)
