"""Times of train steps that run in turns, and the memory and kernels of their programs.

Other load and a warm card hit all of them alike, so that ratios are taken turn by turn. A turn is a
loop of calls that is waited for once. Used by on_gpu.py.
"""

import math
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import gpu_program
import jax
import jax.numpy as jnp
import numpy as np

RESERVE = 10.0  # seconds that the turns may take


class Program(NamedTuple):
    """A train step, with shapes in place of arrays."""

    step: Callable[..., Any]  # (params, state, *data) -> (params, state, loss)
    init: Callable[..., Any]
    params: Any
    data: tuple[Any, ...]
    products: str = "default"  # of float32; the default is TF32


def text_of(error: Exception) -> str:
    return "".join(traceback.format_exception(error, limit=-3))[:3000]


def filled(shape, rng):
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return jnp.zeros(shape.shape, shape.dtype)
    return jnp.array(0.02 * rng.standard_normal(shape.shape, np.float32))


class Run:
    """A compiled step with arrays of its own, which it replaces in place."""

    def __init__(self, program: Program, turn_seconds: float):
        rng = np.random.default_rng(0)
        new = lambda shapes: jax.tree.map(lambda x: filled(x, rng), shapes)
        self.params, self.data = new(program.params), new(program.data)
        self.state = jax.jit(program.init)(self.params)
        start = time.perf_counter()
        with jax.default_matmul_precision(program.products):
            step = jax.jit(program.step, donate_argnums=(0, 1))
            self.step = step.lower(self.params, self.state, *self.data).compile()
        self.found = {"compile_seconds": time.perf_counter() - start, **described(self.step)}
        self.calls = 1
        self.turn()  # warms up
        self.calls = self.found["calls"] = max(1, math.ceil(turn_seconds / self.turn()))

    def turn(self) -> float:
        """Seconds of a step."""
        start = time.perf_counter()
        for _ in range(self.calls):
            self.params, self.state, loss = self.step(self.params, self.state, *self.data)
        jax.block_until_ready((self.params, self.state, loss))
        return (time.perf_counter() - start) / self.calls


def described(compiled) -> dict[str, Any]:
    try:
        memory = compiled.memory_analysis()
        whole = memory.argument_size_in_bytes + memory.output_size_in_bytes
        whole += memory.temp_size_in_bytes - memory.alias_size_in_bytes
        counts = gpu_program.count(compiled.as_text())
        return {"temp_bytes": memory.temp_size_in_bytes, "bytes_in_all": whole, **counts}
    except Exception as error:  # the times are worth having without
        return {"not described": text_of(error)}


def step_times(names, program, left, turns: int, turn_seconds: float):
    """Rows by name, with ratios to the first of them.

    `program` makes the Program of a name, `left` says how many seconds are left. Each turn takes
    at least `turn_seconds`, in as many calls as that needs.
    """
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Run] = {}
    longest = 0.0
    for name in names:
        if left() < 1.5 * longest + RESERVE:
            rows[name] = {"skipped": f"{left():.0f} s left"}
            continue
        start = time.perf_counter()
        try:
            runs[name] = Run(program(name), turn_seconds)
            rows[name] = runs[name].found
        except Exception as error:  # the other rows are worth having
            rows[name] = {"error": text_of(error)}
        longest = max(longest, time.perf_counter() - start)

    times: dict[str, list[float]] = {name: [] for name in runs}
    until = time.perf_counter() + RESERVE
    for turn in range(turns):
        if turn >= 3 and time.perf_counter() > until:
            break
        first = turn % max(1, len(runs))
        for name in [*runs][first:] + [*runs][:first]:
            times[name].append(runs[name].turn())
    base = times.get(next(iter(rows)), [])
    for name, seconds in times.items():
        rows[name] |= {"ms": 1e3 * statistics.median(seconds), "turns": len(seconds)}
        if base:
            ratios = [a / b for a, b in zip(seconds, base, strict=True)]
            rows[name]["ratio_quartiles"] = statistics.quantiles(ratios, n=4)
    return {"rows": rows}


def print_times(rows):
    heads = "ms    ratio (half of the turns)       in all MB         temp MB  kernels"
    print(f"  {'':26s}{heads}")
    first = next(iter(rows.values()))
    for name, row in rows.items():
        if "ms" not in row:
            print(f"  {name:19s}  {row.get('skipped') or row['error'].splitlines()[-1][:70]}")
            continue
        low, middle, high = row.get("ratio_quartiles", [math.nan] * 3)
        line = f"  {name:19s}{row['ms']:9.3f}    x{middle:.4f} (x{low:.4f} to x{high:.4f})"
        for key in ("bytes_in_all", "temp_bytes"):
            size, whole = row.get(key, math.nan), first.get(key, math.nan)
            line += f"{size / 1e6:9.1f} x{size / whole:.3f}"
        print(f"{line}{row.get('kernels', ''):9}")
