"""Float32 copies of half-precision parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, bits

import jscale

HALF = [jnp.float16, jnp.bfloat16]


def params(dtype):
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "w": jax.random.normal(keys[0], (64,)).astype(dtype),
        "b": jax.random.normal(keys[1], (3,)),
        "none": None,
    }


def grads(step):
    draw = lambda shape, i: jax.random.normal(jax.random.key(7 * step + i), shape)
    return {"w": draw((64,), 0), "b": draw((3,), 1), "none": None}


def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("scaled", [False, True])
def test_the_copies_train_as_float32_does_and_the_model_has_them_rounded(
    dtype, scaled, standard_promotion
):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    tx = jscale.with_master_weights(inner)
    tx = jscale.with_loss_scale(tx) if scaled else tx
    half, state = params(dtype), tx.init(params(dtype))
    full, full_state = wide(params(dtype)), inner.init(wide(params(dtype)))

    @jax.jit
    def step(half, state, full, full_state, g):
        updates, state = tx.update(g, state, half)
        updates_full, full_state = inner.update(g, full_state, full)
        return (
            optax.apply_updates(half, updates),
            state,
            optax.apply_updates(full, updates_full),
            full_state,
        )

    for i in range(30):
        half, state, full, full_state = step(half, state, full, full_state, grads(i))
        own = state.inner if scaled else state
        # XLA may contract p + u differently in one program; a step is 1e-4, its rounding 1e-7.
        for got, want in zip(jax.tree.leaves(own.master), jax.tree.leaves(full), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
        assert half["w"].dtype == dtype
        assert_same_bits(half["w"], own.master["w"].astype(dtype))
    assert jnp.any(half["w"] != params(dtype)["w"])


def test_without_them_small_steps_are_lost(standard_promotion):
    bare, tx = optax.sgd(1e-4), jscale.with_master_weights(optax.sgd(1e-4))
    lost = kept = jnp.ones(1, jnp.float16)
    bare_state, state = bare.init(lost), tx.init(kept)
    for _ in range(100):
        u, bare_state = bare.update(jnp.ones(1, jnp.float16), bare_state, lost)
        lost = optax.apply_updates(lost, u)
        u, state = tx.update(jnp.ones(1), state, kept)
        kept = optax.apply_updates(kept, u)
    assert float(lost[0]) == 1 and float(kept[0]) == np.float16(0.99)


@pytest.mark.parametrize("dtype", HALF)
def test_a_skip_leaves_both_and_nobody_is_warned(dtype, standard_promotion):
    tx = jscale.with_loss_scale(jscale.with_master_weights(optax.adamw(1e-3)))
    p = params(dtype)
    state = tx.init(p)  # warnings are errors
    updates, state = tx.update(grads(0), state, p)
    p = optax.apply_updates(p, updates)
    before = bits((p, state.inner))
    bad = grads(1) | {"b": jnp.full(3, jnp.inf)}
    updates, state = jax.jit(tx.update)(bad, state, p)
    assert bits((jax.jit(optax.apply_updates)(p, updates), state.inner)) == before


def test_state_in_is_of_the_type_of_state_out_and_shares_no_buffer(standard_promotion):
    tx = jscale.with_master_weights(optax.adamw(1e-3))
    p = params(jnp.float16)
    state = tx.init(p)
    typed = lambda tree: [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]
    assert typed(jax.eval_shape(tx.update, grads(0), state, p)[1]) == typed(state)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.master))
    step = jax.jit(lambda p, s: tx.update(grads(0), s, p), donate_argnums=(0, 1))
    step(p, state)  # a buffer that is in both could not be donated twice


def test_errors_say_what_to_do():
    with pytest.raises(TypeError, match=r"inner must be an optax\.GradientTransformation, got 3"):
        jscale.with_master_weights(3)
    tx = jscale.with_master_weights(optax.sgd(0.1))
    with pytest.raises(ValueError, match="pass them to update"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
