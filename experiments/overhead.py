"""What a scaled train step costs on this machine, in time: the step, its tracing, its compilation.

A 3-layer perceptron of width 512 with AdamW and clipping, float32 weights and float16 products, as
users of each library would write it (peer_steps.py). All steps run in one process, in turns, so
that other load hits all of them; ratios are taken turn by turn. Traced and compiled are steps of
AdamW on many small leaves, of which each rule governs as many.

    python experiments/overhead.py          # 6 minutes on 2 cores (or: make bench)
    python experiments/overhead.py --short  # half a minute

On 2 CPU cores, with jax 0.12.0.1, in seconds of the processor but for the first:

    a step of 15.1 ms, scaled
        jscale     x1.018 (half of the turns x1.008 to x1.027)
        flax       x1.027 (half of the turns x1.015 to x1.037)
        jmp        x1.121 (half of the turns x1.111 to x1.134)
        mpx        x1.092 (half of the turns x1.080 to x1.100)
        optax      x0.931 (half of the turns x0.920 to x0.940)
    to trace a step
        leaves           10      100     1000    10000
        unscaled     0.02 s   0.13 s   1.33 s  16.09 s
        jscale        x1.61    x1.29    x1.13    x1.19
        flax          x1.16    x1.19    x1.07    x1.09
        jmp           x1.27    x1.13    x1.11    x1.03
        mpx           x1.27    x1.15    x1.12    x1.15
        optax         x1.29    x1.24    x1.23    x1.33
    to compile it
        leaves           10      100     1000
        unscaled     0.10 s   0.31 s   7.22 s
        jscale        x2.50    x2.03    x1.77
        flax          x1.86    x1.73    x1.63
        jmp           x2.18    x2.06    x1.74
        mpx           x2.10    x2.70    x2.40
        optax         x2.04    x1.90    x1.57
    jscale, 1000 leaves
        rules             1       10     1000
        to trace     1.55 s   1.70 s   6.24 s
        to compile  12.65 s  11.72 s 120.64 s

All grows linearly. The 1.8 % of the step are no overhead of a fixed size, since a batch four times
as large has them too, and mostly XLA's choice of what to fuse: apply_if_finite, which branches, is
faster than no check at all. So on a CPU the step misses one percent, and what a GPU would do is
read off its program (gpu_structure.py). Compiling is dear here because the loss is next to nothing.
"""

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import optax
import tyro
from peer_steps import LIBRARIES, installed, make_step

import jscale

WIDTH = 512
PEERS = [name for name in LIBRARIES if installed(name)]


@dataclasses.dataclass(frozen=True)
class Config:
    """What a scaled train step costs in time."""

    turns: int = 200
    """How often each step runs."""
    batch: int = 1024
    """Examples in a step."""
    traced: tuple[int, ...] = (10, 100, 1000, 10_000)
    """Numbers of leaves to trace a step for."""
    compiled: tuple[int, ...] = (10, 100, 1000)
    """Numbers of leaves to compile a step for."""
    rules: tuple[int, ...] = (1, 10, 1000)
    """Numbers of rules over 1000 leaves."""
    short: bool = False
    """A few turns, 10 and 100 leaves, up to 10 rules."""


def perceptron(params, x, y):
    x = x.astype(jnp.float16)
    for w in params:
        x = jax.nn.gelu(x @ w.astype(jnp.float16))
    return jnp.mean(jnp.square(x.astype(jnp.float32) - y))


def steps_in_turns(turns: int, batch: int):
    keys = jax.random.split(jax.random.key(0), 5)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys[:3]]
    x, y = (jax.random.normal(k, (batch, WIDTH)) for k in keys[3:])
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    runs = {}
    for name in PEERS:
        step, init = make_step(name, perceptron, tx)
        step = jax.jit(step, donate_argnums=(0, 1))
        own = jax.tree.map(jnp.copy, params)
        own, state, _ = jax.block_until_ready(step(own, init(own), x, y))
        runs[name] = [step, own, state]
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns):
        order = list(runs)[turn % len(runs) :] + list(runs)[: turn % len(runs)]
        for name in order:
            step, own, state = runs[name]
            start = time.perf_counter()
            own, state, _ = jax.block_until_ready(step(own, state, x, y))
            times[name].append(time.perf_counter() - start)
            runs[name] = [step, own, state]
    print(f"a step of {1e3 * statistics.median(times['unscaled']):.1f} ms, scaled")
    for name in PEERS[1:]:
        ratios = [b / a for a, b in zip(times["unscaled"], times[name], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"    {name:10s} x{middle:.3f} (half of the turns x{low:.3f} to x{high:.3f})")


def squares(params, x, y):
    return sum(jnp.sum(p * p) for p in jax.tree.leaves(params)) * jnp.mean(x) + jnp.mean(y)


def seconds(name: str, leaves: int, rules: int = 1, compiling: bool = False) -> float:
    """Of the processor, to trace a step over that many leaves, or to compile what was traced."""
    groups = [f"{i:04d}" for i in range(rules)]
    leaf = jax.ShapeDtypeStruct((8,), jnp.float32)
    params = {key: {f"{i:05d}": leaf for i in range(leaves // rules)} for key in groups}
    several = {"rule": {key: jscale.dynamic() for key in groups}, "root": groups[0]}
    step, init = make_step(name, squares, optax.adamw(1e-3), **(several if rules > 1 else {}))
    data = [jax.ShapeDtypeStruct((4,), jnp.float32)] * 2
    args = params, jax.eval_shape(init, params), *data
    jax.clear_caches()
    start = time.process_time()
    traced = jax.jit(step).trace(*args)
    if compiling:
        lowered = traced.lower()
        start = time.process_time()
        lowered.compile()
    return time.process_time() - start


def by_leaves(title: str, numbers: tuple[int, ...], compiling: bool):
    print(title)
    print(f"    {'leaves':10s}", *(f"{n:8d}" for n in numbers))
    seconds("unscaled", 10, compiling=compiling)  # to warm up
    # Of three short ones, the least disturbed counts.
    found = {
        (name, n): min(seconds(name, n, compiling=compiling) for _ in range(3 if n < 1000 else 1))
        for n in numbers
        for name in PEERS
    }
    print(f"    {'unscaled':10s}", *(f"{found['unscaled', n]:6.2f} s" for n in numbers))
    for name in PEERS[1:]:
        ratios = (found[name, n] / found["unscaled", n] for n in numbers)
        print(f"    {name:10s}", *(f"{f'x{ratio:.2f}':>8}" for ratio in ratios), flush=True)


def by_rules(numbers: tuple[int, ...], leaves: int):
    print(f"jscale, {leaves} leaves")
    print(f"    {'rules':10s}", *(f"{n:8d}" for n in numbers))
    for title, compiling in (("to trace", False), ("to compile", True)):
        each = (seconds("jscale", leaves, n, compiling) for n in numbers)
        print(f"    {title:10s}", *(f"{x:6.2f} s" for x in each), flush=True)


def main(config: Config):
    if config.short:
        few = (10, 100)
        config = dataclasses.replace(config, turns=20, traced=few, compiled=few, rules=(1, 10))
    steps_in_turns(config.turns, config.batch)
    by_leaves("to trace a step", config.traced, compiling=False)
    by_leaves("to compile it", config.compiled, compiling=True)
    by_rules(config.rules, max(config.compiled))


if __name__ == "__main__":
    main(tyro.cli(Config))
