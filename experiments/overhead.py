"""Wall time of a scaled train step over the same step unscaled, on this machine.

A 3-layer perceptron of width 512 with AdamW and clipping, float32 weights and float16 products.
Both steps run in one process, alternately, so that other load hits both; the ratio is taken pair
by pair. Compile time is the first call.

    python experiments/overhead.py          # 5 seconds on 2 cores (or: make bench)

On 2 CPU cores, with jax 0.10 (in brackets the quartiles of the pairs; from run to run the median
has been between x0.98 and x1.03):

    step unscaled   6.30 ms
    step jscale     x1.026 (x0.986 to x1.065)
    first call      x1.14 of 0.30 s
"""

import statistics
import time

import jax
import jax.numpy as jnp
import optax
from measured_step import make_step

WIDTH, BATCH, PAIRS = 512, 256, 200


def loss_fn(params, x, y):
    x = x.astype(jnp.float16)
    for w in params:
        x = jax.nn.gelu(x @ w.astype(jnp.float16))
    return jnp.mean(jnp.square(x.astype(jnp.float32) - y))


def main():
    keys = jax.random.split(jax.random.key(0), 5)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys[:3]]
    x, y = (jax.random.normal(k, (BATCH, WIDTH)) for k in keys[3:])
    runs = []
    for scaled in (False, True):
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        step, tx = make_step(loss_fn, tx, scaled)
        step = jax.jit(step, donate_argnums=(0, 1))
        own = jax.tree.map(jnp.copy, params)
        start = time.perf_counter()
        own, state, _ = jax.block_until_ready(step(own, tx.init(own), x, y))
        runs.append([step, own, state, [], time.perf_counter() - start])
    for pair in range(PAIRS):
        for run in runs if pair % 2 else reversed(runs):
            step, own, state, times, _ = run
            start = time.perf_counter()
            run[1], run[2], _ = jax.block_until_ready(step(own, state, x, y))
            times.append(time.perf_counter() - start)
    plain, ours = runs
    ratios = [b / a for a, b in zip(plain[3], ours[3], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"step unscaled   {1e3 * statistics.median(plain[3]):.2f} ms")
    print(f"step jscale     x{middle:.3f} (x{low:.3f} to x{high:.3f})")
    print(f"first call      x{ours[4] / plain[4]:.2f} of {plain[4]:.2f} s")


if __name__ == "__main__":
    main()
