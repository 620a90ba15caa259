"""Tracing with autocast: a deep model takes less than twice the time, a scanned one as ever.

    python experiments/autocast_tracing.py       # 25 seconds

Times to trace `jax.value_and_grad` of a transformer, best of three, and their ratio to the time
without autocast. Layers that are alike share the checkpoints that autocast makes, and JAX
differentiates them once; that is why it can take less time with than without.

                               without      with   ratio   recompute=False
    unrolled, 48 layers         0.43 s    0.37 s    0.86              2.46
    Linen, 48 layers            1.30 s    2.02 s    1.55              1.53
    scanned, 6 layers           0.05 s    0.05 s    1.05              1.21
    scanned, 48 layers          0.05 s    0.05 s    1.04              1.22

The cuts that take least memory here are two layers apart. Linen names both layers in the scopes of
such a part, so that no two of its parts are alike.
"""

import dataclasses
import time
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import tyro

import jscale

WIDTH, HEADS = 64, 4


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 48
    """Depth of the unrolled models."""


def norm(x, scale):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def block(p, x):
    q, k, v = jnp.einsum("btd,dnhk->nbthk", norm(x, p["norm1"]), p["qkv"])
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) / WIDTH**0.5)
    x = x + jnp.einsum("bhts,bshk,hkd->btd", weights, v, p["out"])
    return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS)(h, h)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


def unrolled(layers, x):
    for p in layers:
        x = block(p, x)
    return jnp.mean(x**2)


def scanned(layers, x):
    x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, layers)
    return jnp.mean(x**2)


def linen(depth):
    model = nn.Sequential([Block() for _ in range(depth)])
    return model, lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)


def shapes(*leading):
    shape = lambda *s: jax.ShapeDtypeStruct((*leading, *s), jnp.float32)
    head = WIDTH // HEADS
    return dict(
        norm1=shape(WIDTH),
        norm2=shape(WIDTH),
        qkv=shape(WIDTH, 3, HEADS, head),
        out=shape(HEADS, head, WIDTH),
        up=shape(WIDTH, 4 * WIDTH),
        down=shape(4 * WIDTH, WIDTH),
    )


def seconds(fun: Callable, *args) -> float:
    """To trace value and gradient, with nothing left over from before."""
    times = []
    for _ in range(3):
        jax.clear_caches()
        start = time.perf_counter()
        jax.jit(jax.value_and_grad(lambda *args: fun(*args))).trace(*args)
        times.append(time.perf_counter() - start)
    return min(times)


def main(config: Config) -> dict[str, float]:
    x = jax.ShapeDtypeStruct((2, 16, WIDTH), jnp.float32)
    model, apply = linen(config.layers)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    cases = {
        f"unrolled, {config.layers} layers": (unrolled, [shapes()] * config.layers),
        f"Linen, {config.layers} layers": (apply, variables),
        "scanned, 6 layers": (scanned, shapes(6)),
        f"scanned, {config.layers} layers": (scanned, shapes(config.layers)),
    }
    ratios = {}
    print(f"{'':24s}   without      with   ratio   recompute=False")
    for name, (fun, params) in cases.items():
        without = seconds(fun, params, x)
        times = [seconds(jscale.autocast(fun, recompute=r), params, x) for r in (True, False)]
        ratios[name] = times[0] / without
        print(
            f"{name:24s} {without:7.2f} s {times[0]:7.2f} s {ratios[name]:7.2f} "
            f"{times[1] / without:17.2f}"
        )
    return ratios


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
