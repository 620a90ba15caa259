"""The steps that jscale's cost is compared with do the same work."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peer_steps
import pytest


def loss_fn(params, x, y):
    y_hat = x.astype(jnp.float16) @ params["w"].astype(jnp.float16)
    # A 64th, so that the first step does not overflow at 2^16.
    return jnp.mean(jnp.square(y_hat.astype(jnp.float32) - y.astype(jnp.float32))) / 64


@pytest.mark.parametrize("library", peer_steps.LIBRARIES)
def test_every_library_takes_the_same_steps_and_skips_the_same(standard_promotion, library):
    if not peer_steps.installed(library):
        pytest.skip(f"{library} is not installed")
    keys = jax.random.split(jax.random.key(0), 3)
    x, y, w = (jax.random.normal(key, (4, 4)) for key in keys)
    y = y.astype(jnp.float16).astype(jnp.float32)  # or MPX, which casts all data, rounds it
    tx = optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(0.1))

    def run(library, inputs):
        step, init = peer_steps.make_step(library, loss_fn, tx)
        step, params = jax.jit(step, donate_argnums=(0, 1)), {"w": jnp.copy(w)}
        state = init(params)
        for x in inputs:
            params, state, told = step(params, state, x, y)
        assert step._cache_size() == 1
        return np.asarray(params["w"]), told

    # All but the unscaled step should skip it.
    overflow = [] if library == "unscaled" else [x * 1e6]
    params, told = run(library, [x, *overflow, x])
    expected, told_unscaled = run("unscaled", [x, x])
    # A power of two as the scale changes no digit of a float16 gradient that does not underflow.
    np.testing.assert_allclose(params, expected, rtol=1e-6)
    np.testing.assert_allclose(told["loss"], told_unscaled["loss"], rtol=1e-6)
