"""20,000 steps with overflows of every kind: nothing drifts."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jscale

CHUNK, CHUNKS = 500, 40
STEPS = CHUNK * CHUNKS
LOW, HIGH = 2.0**-10, 2.0**20


def overflows():
    """Which steps overflow: 1 % of all, bursts, and stretches of hundreds."""
    random = np.random.default_rng(0)
    bad = random.random(STEPS) < 0.01
    for length, count in ((8, 60), (300, 5), (900, 1)):
        for start in random.integers(STEPS - length, size=count):
            bad[start : start + length] = True
    return bad.reshape(CHUNKS, CHUNK)


RULES = {
    "dynamic": jscale.dynamic(growth_interval=20, hysteresis=2, min_scale=LOW, max_scale=HIGH),
    "headroom": jscale.headroom(window=50, min_scale=LOW, max_scale=HIGH),
    "several": {
        "head": jscale.dynamic(growth_interval=20, min_scale=LOW, max_scale=HIGH),
        "layers": jscale.stacked(
            jscale.dynamic(growth_interval=50, min_scale=LOW, max_scale=HIGH), 2
        ),
    },
}


def expected_scales(bad):
    """What `dynamic` with hysteresis does, in plain Python."""
    scale, clean, patience = 2.0**16, 0, 2
    for overflowed in bad:
        yield scale
        if overflowed:
            clean, patience = 0, patience - 1
            if patience <= 0:
                scale = max(scale / 2, LOW)
        elif (clean := clean + 1) == 20:
            scale, clean, patience = min(scale * 2, HIGH), 0, 2


@pytest.mark.parametrize("name", RULES)
def test_twenty_thousand_steps(standard_promotion, name):
    tx = jscale.with_loss_scale(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), RULES[name]
    )
    traces = 0

    def body(carry, bad):
        params, opt_state, key = carry
        key, now = jax.random.split(key)
        x = jax.random.normal(now, (4, 4))
        scale = jscale.loss_scale(opt_state)
        several = isinstance(scale, dict)

        half = lambda x: x.astype(jnp.float16)
        layer = lambda w, h: jnp.tanh(half(h) @ half(w)).astype(jnp.float32)

        def loss_fn(params):
            h = x
            for i, w in enumerate(params["layers"]):
                at = jscale.region(layer, scale["layers"][i], scale["head"]) if several else layer
                h = at(w, h)
            return jnp.mean((h @ params["head"] - x[:, :1]) ** 2)

        root = "head" if several else None
        loss, grads = jscale.value_and_grad(loss_fn, scale, root=root)(params)
        grads["head"] = jnp.where(bad, jnp.inf, grads["head"])
        updates, opt_state = tx.update(grads, opt_state, params, loss=loss)
        m = jscale.metrics(opt_state)
        seen = {"finite": m["finite"], "scale": scale, "loss": loss}
        return (optax.apply_updates(params, updates), opt_state, key), seen

    @jax.jit
    def run(carry, bad):
        nonlocal traces
        traces += 1
        return lax.scan(body, carry, bad)

    params = {"head": jnp.ones((4, 1)), "layers": jnp.stack([jnp.eye(4)] * 2)}
    carry = params, tx.init(params), jax.random.key(0)
    bad, rows, alive = overflows(), [], []
    for part in bad:
        carry, seen = run(carry, part)
        rows.append(jax.device_get(seen))
        del seen
        if len(rows) in (2, CHUNKS):
            gc.collect()
            alive.append(sorted(x.nbytes for x in jax.live_arrays()))
    assert traces == 1
    assert alive[0] == alive[1]

    seen = jax.tree.map(lambda *x: np.concatenate(x), *rows)
    skipped, state = ~seen["finite"], carry[1]
    assert skipped[bad.ravel()].all() and np.isfinite(seen["loss"]).all()
    assert state.skipped_steps == skipped.sum() < 0.25 * STEPS
    assert state.applied_steps == STEPS - skipped.sum() == state.inner[1][0].count
    for scale in jax.tree.leaves(seen["scale"]):
        assert (LOW <= scale).all() and (scale <= HIGH).all() and (np.log2(scale) % 1 == 0).all()
    assert seen["loss"][-CHUNK:].mean() < 0.1 * seen["loss"][:CHUNK].mean()
    if name == "dynamic":
        assert seen["scale"].tolist() == list(expected_scales(skipped))
        assert seen["scale"].min() == LOW
