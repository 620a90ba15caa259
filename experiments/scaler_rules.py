"""The rules that scaler_shootout.py compares: those of others, and ours with their settings."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jscale
from jscale import presets

LIMIT = math.log2(65504)


class WindowState(NamedTuple):
    loss_scale: jax.Array
    recent: jax.Array


def window(length, bits=1):
    """Delayed scaling as in Transformer Engine: the largest of the last `length` gradients."""

    def update(state, seen):
        overflowed = LIMIT + 1 - jnp.log2(state.loss_scale)
        x = jnp.where(seen.finite, jnp.log2(seen.amax), overflowed)
        recent = jnp.roll(state.recent, 1).at[0].set(x)
        exponent = jnp.floor(LIMIT - bits - jnp.max(recent)).astype(jnp.int32)
        return WindowState(jnp.ldexp(jnp.float32(1), jnp.clip(exponent, -24, 32)), recent)

    return jscale.ScaleRule(
        lambda: WindowState(jnp.float32(2**16), jnp.full(length, -99.0)), update
    )


def popart():
    """Graphcore's: halved if any gradient exceeds an eighth of the limit, else doubled."""

    def update(state, seen):
        factor = jnp.where(seen.amax * state.loss_scale > 65504 / 8, 0.5, 2.0)
        return state._replace(loss_scale=jnp.clip(state.loss_scale * factor, 2.0**-24, 2.0**32))

    return jscale.ScaleRule(jscale.static(2.0**16).init, update)


class LogMaxState(NamedTuple):
    loss_scale: jax.Array
    averages: jax.Array  # of x, by 0.99; of x and of its square, by 0.999
    steps: jax.Array


def log_max():
    """OpenSeq2Seq's LogMax, mended, with the scale rounded down to a power of two."""
    decay = np.float32([0.99, 0.999, 0.999])

    def update(state, seen):
        overflowed = LIMIT + 1 - jnp.log2(state.loss_scale)
        x = jnp.where(seen.finite, jnp.log2(seen.amax), overflowed)
        averages = decay * state.averages + (1 - decay) * jnp.stack([x, x, x * x])
        steps = state.steps + 1
        mean, slow, square = averages / (1 - decay**steps)
        top = mean + 3.09 * jnp.sqrt(jnp.maximum(square - slow * slow, 0))
        exponent = jnp.clip(jnp.floor(LIMIT - top), -24, 32).astype(jnp.int32)
        return LogMaxState(jnp.ldexp(jnp.float32(1), exponent), averages, steps)

    first = LogMaxState(jnp.float32(2**16), jnp.zeros(3), jnp.float32(0))
    return jscale.ScaleRule(lambda: first, update)


OTHERS = {
    "torch": presets.torch(),
    "backoff 200": jscale.dynamic(growth_interval=200),
    "Megatron": presets.megatron(),
    "DeepSpeed": presets.deepspeed(),
    "LogMax": presets.openseq2seq_logmax(scale_max=2.0**24),
    "LogMax mended": log_max(),
    "PopART": popart(),
    "window 16": window(16),
    "window 1024": window(1024),
}
OURS = {
    "log_normal": jscale.log_normal(),
    "headroom": jscale.headroom(),
    "anticipate(dynamic)": jscale.anticipate(jscale.dynamic()),
    "anticipate(log_normal)": jscale.anticipate(jscale.log_normal()),
}
RATES = (1e-7, 1e-5, 2.5e-4, 1e-3, 3e-3, 1e-2)
BITS = (0, 1, 2, 4, 8, 10)
INTERVALS = (50, 200, 1000, 2000)
SETTINGS = {
    "log_normal": [jscale.log_normal(overflow_rate=rate) for rate in RATES],
    # Many bits only from a low start, as LogMax has it.
    "headroom": [jscale.headroom(bits, init_scale=1 if bits > 4 else 2**16) for bits in BITS],
    "anticipate": [
        *(jscale.anticipate(jscale.dynamic(growth_interval=n)) for n in INTERVALS),
        jscale.anticipate(presets.deepspeed()),
    ],
}
