"""What float16 with jscale takes on the GPU at hand, in time and in memory, and that it trains.

Not yet run on a GPU: rehearsed on a CPU, and the larger programs compiled for an H200 that is only
described (jax 0.11.2 and 0.12.0.1: the largest needs 25 GB).

One script for a machine without a network. jax and optax are enough, jscale need not be installed,
and the step of a library that is missing is left out. It keeps within a budget of seconds: the
least important comes last, and is skipped with a word when too few are left. What fails is
recorded, and the rest goes on.

    python experiments/on_gpu.py                # one H200, under 5 minutes; writes runs/on_gpu
    python experiments/on_gpu.py --rehearse     # everything tiny on the CPU, 30 seconds of one core

It prints a table for each part, and writes results.json anew after each:

    training on text    losses in float32, in float16 with a dynamic scale, and without one
    AdamW, ...          the steps of gpu_structure.py, unscaled and scaled by each library
    transformer, ViT    whole steps, scaled where they are float16, by precision

Most of the time goes into compiling: for a described H200, 7 seconds of one core for a program of
the second kind and 7 to 36 for one of the third; a real GPU also tries kernels. So the last parts
may be skipped, but with JAX_COMPILATION_CACHE_DIR set, a second run gets further.

Steps run in turns, so that other load and a warm card hit all of them; a turn is a loop of calls
that is waited for once. Ratios are taken turn by turn: the median, and between which half of them
lie. Memory is what `memory_analysis` says of the very programs that ran: "temp" is what a step
holds in between, "in all" adds parameters, state and batch. (The allocator's own peak would need a
fresh process for each program, and has the autotuner's buffers in it.)
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("JAX_PLATFORMS", "")  # or gpu_program.py would choose the CPU
if importlib.util.find_spec("tyro") is None:
    # The scripts whose models are imported need it only when they are run themselves.
    sys.modules["tyro"] = types.ModuleType("tyro")

import autocast_memory
import gpu_structure
import jax
import jax.numpy as jnp
import numpy as np
import optax
import peer_steps
import vit_memory
from step_times import Program, print_times, step_times, text_of
from vit_memory import scaled_step

import jscale

LAST = 30  # steps that the table of the training averages over
DIVISOR = 256.0  # of the training's loss, as in quickstart.py

# Train steps, with shapes in place of arrays.


def products_in(precision: str) -> str:
    return "highest" if precision == "float32" else "default"


def libraries(case: str):
    """A step of gpu_structure.py: unscaled, and with each library's loss scale."""
    tx, model, *_ = gpu_structure.CASES[case]
    loss_fn, params, data = model()

    def program(library):
        telling, init = peer_steps.make_step(library, loss_fn, tx)

        def step(params, state, x, y):
            params, state, told = telling(params, state, x, y)
            return params, state, told["loss"]  # what nobody reads is not computed

        return Program(step, init, params, tuple(data))

    return filter(peer_steps.installed, peer_steps.LIBRARIES), program


def transformer(tiny: bool = False):
    """A step of the transformer of autocast_memory.py, by precision."""
    fun, (params, *data) = autocast_memory.MODELS["transformer"]
    if tiny:
        sizes = {3072: 64, 768: 16, 512: 8, 64: 4, 12: 4, 8: 2}
        shrink = lambda x: autocast_memory.array(*(sizes.get(n, n) for n in x.shape))
        params, data = jax.tree.map(shrink, (params[:1], data))
    kinds = {
        "float32": (fun, jscale.off()),
        "autocast": (jscale.autocast(fun), jscale.dynamic()),
        "TF32": (fun, jscale.off()),
        "bfloat16, all": (functools.partial(fun, dtype=jnp.bfloat16), jscale.off()),
        "float16, all": (functools.partial(fun, dtype=jnp.float16), jscale.dynamic()),
        "autocast, all kept": (jscale.autocast(fun, recompute=False), jscale.dynamic()),
    }

    def program(name):
        step, init = scaled_step(*kinds[name], vit_memory.ADAM)
        return Program(step, init, params, tuple(data), products_in(name))

    return kinds, program


def vit(sizes: vit_memory.ViT, batch: int):
    """A step of a vision transformer of vit_memory.py, by precision."""

    def program(name):
        step, init = vit_memory.step_of(name)
        _, (params, _, *data) = vit_memory.step_and_arguments(sizes, batch, name)
        return Program(step, init, params, tuple(data), products_in(name))

    names = ["float32", "autocast", "TF32", "bfloat16, Policy", "float16, Policy"]
    return names + ["float16, MPX"] * peer_steps.installed("mpx"), program


# A training in float16 beside the one in float32.


class Sizes(NamedTuple):
    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    batch: int = 64


def new_params(sizes: Sizes):
    rng = np.random.default_rng(0)
    layers, width, heads, context, _ = sizes
    normal = lambda size, *shape: jnp.array(size * rng.standard_normal(shape, np.float32))
    each = lambda n, *shape: normal(n**-0.5, layers, n, *shape)
    return {
        "bytes": normal(0.1, 256, width),
        "places": normal(0.1, context, width),
        "qkv": each(width, 3, heads, width // heads),
        "out": each(width, width),
        "up": each(width, 4 * width),
        "down": each(4 * width, width),
    }


def unit(x):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def loss_fn(params, tokens):
    """Cross-entropy of the next byte, divided as data-parallel training divides it."""
    x = params["bytes"][tokens[:, :-1]] + params["places"]
    causal = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))

    def block(x, p):
        q, k, v = jnp.einsum("btd,dnhk->nbthk", unit(x), p["qkv"])
        scores = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
        heads = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores, where=causal), v)
        x = x + heads.reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(unit(x) @ p["up"]) @ p["down"], None

    layers = {name: params[name] for name in ("qkv", "out", "up", "down")}
    x, _ = jax.lax.scan(block, x, layers)
    logits = unit(x) @ params["bytes"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean() / DIVISOR


def training(steps: int, sizes: Sizes):
    text = np.frombuffer("".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(text) - sizes.context, (steps, sizes.batch))
    batches = text[starts[..., None] + np.arange(sizes.context + 1)].astype(np.int32)
    # Gradients are smaller by the divisor, and so are the norm to clip at and Adam's epsilon.
    adam = optax.adam(1e-3, eps=1e-8 / DIVISOR)
    inner = optax.chain(optax.clip_by_global_norm(1 / DIVISOR), adam)
    half = jscale.autocast(loss_fn)
    rows: dict[str, dict[str, Any]] = {}
    for name, fun, rule in (
        ("float32", loss_fn, jscale.off()),
        ("float16, dynamic", half, jscale.dynamic(growth_interval=20)),
        ("float16, no scale", half, jscale.static(1)),
    ):
        step, init = scaled_step(fun, rule, inner)
        step, params, losses = jax.jit(step, donate_argnums=(0, 1)), new_params(sizes), []
        state = jax.jit(init)(params)
        with jax.default_matmul_precision(products_in(name)):
            for batch in batches:
                params, state, loss = step(params, state, batch)
                losses.append(loss)
        bits = np.array(jax.device_get(losses)) * DIVISOR / math.log(2)
        exact = rows["float32"]["bits_per_byte"] if rows else bits
        told = jax.device_get(jscale.metrics(state))
        rows[name] = {
            "bits_per_byte": bits.tolist(),
            "last": float(bits[-LAST:].mean()),
            "greatest_difference": float(abs(bits - exact).max()),
            "skipped_steps": int(told["skipped_steps"]),
            "scale": float(told["grad_scale"]),
        }
    return {"rows": rows}


def print_training(rows):
    print(f"  {'':19s}bits/byte  greatest difference  skipped  last scale")
    for name, row in rows.items():
        scale = f"2^{math.log2(row['scale']):g}"
        line = f"  {name:19s}{row['last']:9.3f}{row['greatest_difference']:21.4f}"
        print(f"{line}{row['skipped_steps']:9d}{scale:>12s}")


# All of it.


def environment():
    ask = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        card = subprocess.run(ask, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        card = str(error)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": jax.devices()[0].device_kind,
        "nvidia-smi": card,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "libraries": [name for name in peer_steps.LIBRARIES if peer_steps.installed(name)],
    }


class Part(NamedTuple):
    seconds: float  # with less left it is not begun
    measure: Callable[[Callable[[], float]], dict[str, Any]]
    show: Callable[[dict[str, Any]], None] = print_times


def parts(rehearse: bool) -> dict[str, Part]:
    """The most important first."""
    turns = {"turns": 3, "turn_seconds": 0.0} if rehearse else {"turns": 15, "turn_seconds": 0.1}
    trained = (30, Sizes(2, 32, 2, 16, 8)) if rehearse else (300, Sizes())
    text = Part(30, lambda left: training(*trained), print_training)

    def timed(seconds, make, *args):
        return Part(seconds, lambda left: step_times(*make(*args), left, **turns))

    if rehearse:
        tiny = vit_memory.ViT(1, width=16, hidden=32, heads=2, image=8, classes=10)
        return {
            "training on text": text,
            "12 small leaves, clip": timed(30, libraries, "12 small leaves, clip"),
            "transformer": timed(30, transformer, True),
            "tiny ViT, batch 4": timed(30, vit, tiny, 4),
        }
    small, base = vit_memory.SMALL, vit_memory.BASE
    return {
        "training on text": text,
        "AdamW, clip": timed(30, libraries, "AdamW, clip"),
        "transformer": timed(30, transformer),
        "12 x 256 ViT, batch 1024": timed(50, vit, small, 1024),
        "AdamW": timed(30, libraries, "AdamW"),
        "ViT-B, batch 128": timed(60, vit, base, 128),
        "300 small leaves, clip": timed(30, libraries, "300 small leaves, clip"),
        "12 x 256 ViT, batch 128": timed(40, vit, small, 128),
        "12 x 256 ViT, batch 512": timed(40, vit, small, 512),
        "12 x 256 ViT, batch 256": timed(40, vit, small, 256),
    }


def outcome(part: Part, left: Callable[[], float]) -> dict[str, Any]:
    if left() < part.seconds:
        return {"status": "skipped", "why": f"{left():.0f} s left, needs {part.seconds}"}
    found: dict[str, Any] = {"status": "done"}
    start = time.perf_counter()
    try:
        found |= part.measure(left)
        part.show(found["rows"])
    except Exception as error:  # whatever it is, the other parts are worth having
        found |= {"status": "failed", "why": text_of(error)}
    return {**found, "seconds": time.perf_counter() - start}


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description="What float16 with jscale takes on a GPU.")
    parser.add_argument("out", nargs="?", type=Path, default=Path("runs/on_gpu"))
    parser.add_argument("--budget", type=float, default=280, help="seconds for everything")
    parser.add_argument("--rehearse", action="store_true", help="everything tiny, on the CPU")
    config = parser.parse_args(argv)
    start = time.perf_counter()
    left = lambda: start + config.budget - time.perf_counter()
    if config.rehearse:
        jax.config.update("jax_platforms", "cpu")
        # Optimized code would take longer to compile than it runs.
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    elif jax.default_backend() != "gpu":
        sys.exit(f"jax sees no GPU, but {jax.devices()}: try --rehearse.")
    config.out.mkdir(parents=True, exist_ok=True)
    result = {"rehearsal": config.rehearse, "environment": environment(), "parts": {}}
    print(*(f"{key}: {value}" for key, value in result["environment"].items()), sep="\n")
    for name, part in parts(config.rehearse).items():
        print(name, flush=True)
        found = result["parts"][name] = outcome(part, left)
        if "why" in found:
            print(f"  {found['status']}: {found['why']}")
        result["seconds"] = config.budget - left()
        (config.out / "results.json").write_text(json.dumps(result, indent=1))
    print(f"{result['seconds']:.0f} s in all; written to {config.out / 'results.json'}")


if __name__ == "__main__":
    main()
