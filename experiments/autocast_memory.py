"""What autocast takes on a GPU, beside float32 and float16 by hand; no GPU needed.

XLA's CUDA compiler is asked for the forward and backward pass of five models on described GPUs.
"all float16" casts everything but norms, softmax and loss, as a user of whole-tree casts does; "all
kept" is `recompute=False`. Beside each figure is its ratio to all float16. What is in a loop counts
as often as it runs, products by the dtype of their operands. Convolutions are calls of cuDNN, which
chooses its workspace only when it runs: that is not in these figures. They repeat exactly.

    pip install '.[gpu-program,experiments]'                      # jax 0.12 or newer
    python experiments/autocast_memory.py                         # 10 minutes on 2 cores
    python experiments/autocast_memory.py --short --gpus H200     # 2 minutes

With jax 0.12.0.1:

    H200                      temp MB      kernels     traffic MB   products
    transformer
      float32               2717.9 x1.66     242 x0.83   18418.8 x1.45   108 f32
      all float16           1638.5 x1.00     290 x1.00   12717.5 x1.00   108 f16
      autocast, all kept    1828.8 x1.12     294 x1.01   13592.0 x1.07   108 f16
      autocast               755.0 x0.46     338 x1.17   14069.8 x1.11   108 f16
        cuts at 1/8         1239.4 x0.76     330 x1.14   11136.0 x0.88   108 f16
        cuts at 1/16         755.0 x0.46     338 x1.17   14069.8 x1.11   108 f16
        cuts at 1/32         755.0 x0.46     338 x1.17   14069.8 x1.11   108 f16
        cuts at 1/64         780.5 x0.48     337 x1.16   14195.7 x1.12   108 f16
        cuts at 1/128        768.0 x0.47     342 x1.18   14183.1 x1.12   108 f16
    transformer-scan
      float32               3995.9 x1.51     638 x0.97   37808.5 x1.60   108 f32
      all float16           2652.3 x1.00     656 x1.00   23580.2 x1.00   108 f16
      autocast, all kept    3275.2 x1.23     669 x1.02   26317.5 x1.12   108 f16
      autocast              1054.4 x0.40     467 x0.71   17214.2 x0.73   108 f16
    resnet
      float32                255.0 x1.84     291 x0.93    2437.9 x1.66   47 f32
      all float16            138.9 x1.00     314 x1.00    1468.3 x1.00   47 f16
      autocast, all kept     148.4 x1.07     317 x1.01    1784.8 x1.22   47 f16
      autocast               141.6 x1.02     348 x1.11    1842.9 x1.26   47 f16
    lstm
      float32                235.1 x1.87    3849 x1.00   14367.1 x1.41   512 f32
      all float16            126.0 x1.00    3856 x1.00   10195.1 x1.00   512 f16
      autocast, all kept     237.3 x1.88    4108 x1.07   11930.2 x1.17   512 f16
      autocast               134.5 x1.07    3084 x0.80    8533.9 x0.84   512 f16
    unet
      float32                332.8 x1.57     315 x0.94    2796.2 x1.61   62 f32
      all float16            211.6 x1.00     335 x1.00    1739.3 x1.00   62 f16
      autocast, all kept     161.3 x0.76     330 x0.99    1754.0 x1.01   62 f16
      autocast               105.2 x0.50     368 x1.10    1980.3 x1.14   62 f16

On an A100 autocast takes

    transformer          memory x0.53   kernels x1.22   traffic x1.21
    transformer-scan     memory x0.37   kernels x0.66   traffic x0.63
    resnet               memory x1.08   kernels x1.09   traffic x1.22
    lstm                 memory x1.07   kernels x0.80   traffic x1.39
    unet                 memory x0.70   kernels x1.10   traffic x1.18

Cuts are where recomputation starts afresh, CUTS in jscale/_recompute.py: 1/8 keeps too much, and
here nothing is gained below 1/32, but in deeper models (vit_memory.py). Two models save no memory:
ResNet's max-pooling works, as written, on float32 in its backward pass, and is the peak there (with
`also="reduce_window_max"` the memory is 94.7 MB, x0.68); the LSTM keeps two products of a step and
a float32 state, as many bytes as the float16 gates.
"""

import dataclasses
import functools
import itertools
from typing import Literal

import jax
import jax.numpy as jnp
import optax
import tyro
from gpu_program import described_device, figures

import jscale
from jscale import _recompute

f16, f32 = jnp.float16, jnp.float32
LAYERS, BATCH, LENGTH, WIDTH, HEADS = 6, 8, 512, 768, 12  # of the transformer

# A model is written once, in `dtype` except for norms, softmax and loss: in float32 as its author
# writes it, in float16 as whole-tree casts have it.


def array(*shape):
    return jax.ShapeDtypeStruct(shape, f32)


def normalize(x, gain, axes):
    """Computed in float32, as careful authors do; the result is as x is."""
    y = x.astype(f32)
    mean = y.mean(axes, keepdims=True)
    variance = jnp.square(y - mean).mean(axes, keepdims=True)
    return ((y - mean) * jax.lax.rsqrt(variance + 1e-6) * gain).astype(x.dtype)


def mean_square(x, y):
    return jnp.square(x.astype(f32) - y).mean()


def block(p, x, dtype):
    product = lambda spec, a, name: jnp.einsum(spec, a, p[name].astype(dtype))
    qkv = product("btd,dnhk->nbthk", normalize(x, p["gain1"], -1), "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", qkv[0], qkv[1]).astype(f32) * (WIDTH // HEADS) ** -0.5
    weights = jax.nn.softmax(scores, -1).astype(dtype)
    x = x + product("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", weights, qkv[2]), "out")
    h = jax.nn.gelu(product("btd,de->bte", normalize(x, p["gain2"], -1), "up"))
    return x + product("bte,ed->btd", h, "down")


def transformer(params, x, y, dtype=f32):
    x = x.astype(dtype)
    for p in params:
        x = block(p, x, dtype)
    return mean_square(x, y)


def transformer_scan(params, x, y, dtype=f32):
    x, _ = jax.lax.scan(lambda x, p: (block(p, x, dtype), None), x.astype(dtype), params)
    return mean_square(x, y)


def transformer_arguments(*stacked):
    shapes = dict(gain1=(WIDTH,), gain2=(WIDTH,), up=(WIDTH, 4 * WIDTH), down=(4 * WIDTH, WIDTH))
    shapes |= dict(qkv=(WIDTH, 3, HEADS, WIDTH // HEADS), out=(HEADS, WIDTH // HEADS, WIDTH))
    params = {name: array(*stacked, *shape) for name, shape in shapes.items()}
    return params if stacked else [params] * LAYERS, *[array(BATCH, LENGTH, WIDTH)] * 2


def conv(x, kernel, stride=1):
    kernel, dims = kernel.astype(x.dtype), ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, [stride] * 2, "SAME", dimension_numbers=dims)


def two_convs(before, width, **more):
    kernels = dict(conv1=array(3, 3, before, width), conv2=array(3, 3, width, width))
    return dict(gain1=array(width), gain2=array(width), **kernels, **more)


def resnet(params, x, labels, dtype=f32):
    """With BatchNorm."""
    norm = lambda x, gain: normalize(x, gain, (0, 1, 2))
    x = jax.nn.relu(norm(conv(x.astype(dtype), params["stem"]), params["gain"]))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for p in params["blocks"]:
        stride = 2 if "shortcut" in p else 1
        h = jax.nn.relu(norm(conv(x, p["conv1"], stride), p["gain1"]))
        h = norm(conv(h, p["conv2"]), p["gain2"])
        if "shortcut" in p:
            x = norm(conv(x, p["shortcut"], stride), p["gain3"])
        x = jax.nn.relu(x + h)
    logits = x.astype(f32).mean((1, 2)).astype(dtype) @ params["head"].astype(dtype)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(f32), labels)
    return losses.mean()


def resnet_arguments():
    blocks = []
    for before, width in itertools.pairwise([64, 64, 64, 128, 128, 256, 256]):
        blocks.append(two_convs(before, width))
        if before != width:
            blocks[-1] |= dict(shortcut=array(1, 1, before, width), gain3=array(width))
    params = dict(stem=array(3, 3, 3, 64), gain=array(64), blocks=blocks, head=array(256, 1000))
    return params, array(32, 64, 64, 3), jax.ShapeDtypeStruct((32,), jnp.int32)


def lstm(params, x, y, dtype=f32):
    x, w, u, bias = jax.tree.map(lambda a: a.astype(dtype), (x, *params))

    def cell(carry, x):
        c, h = carry
        i, f, g, o = jnp.split(x @ w + h @ u + bias, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h

    _, h = jax.lax.scan(cell, (jnp.zeros_like(x[0]),) * 2, x)
    return mean_square(h, y)


def lstm_arguments(length=128, batch=64, width=512):
    params = array(width, 4 * width), array(width, 4 * width), array(4 * width)
    return params, *[array(length, batch, width)] * 2


def unet(params, x, y, dtype=f32):
    """The longest skip leads from the first level to the last."""

    def level(x, p):
        for i in "12":
            x = jax.nn.silu(normalize(conv(x, p["conv" + i]), p["gain" + i], (1, 2, 3)))
        return x

    x, skips = x.astype(dtype), []
    for p in params["down"]:
        skips.append(level(x, p))
        x = conv(skips[-1], p["smaller"], 2)
    x = level(x, params["middle"])
    for p in params["up"]:
        x = jnp.repeat(jnp.repeat(conv(x, p["narrower"]), 2, 1), 2, 2)
        x = level(jnp.concatenate([x, skips.pop()], -1), p)
    return mean_square(conv(x, params["out"]), y)


def unet_arguments():
    down = [(3, 64), (64, 128), (128, 256)]
    params = dict(
        down=[two_convs(a, b, smaller=array(3, 3, b, b)) for a, b in down],
        middle=two_convs(256, 512),
        up=[two_convs(2 * b, b, narrower=array(1, 1, 2 * b, b)) for _, b in reversed(down)],
        out=array(1, 1, 64, 3),
    )
    return params, *[array(16, 64, 64, 3)] * 2


MODELS = {
    "transformer": (transformer, transformer_arguments()),
    "transformer-scan": (transformer_scan, transformer_arguments(LAYERS)),
    "resnet": (resnet, resnet_arguments()),
    "lstm": (lstm, lstm_arguments()),
    "unet": (unet, unet_arguments()),
}
PRECISIONS = {
    "float32": lambda fun: fun,
    "all float16": lambda fun: functools.partial(fun, dtype=f16),
    "autocast, all kept": lambda fun: jscale.autocast(fun, recompute=False),
    "autocast": jscale.autocast,
}


def measure(model: str, precision: str, gpu: str = "H200"):
    """The figures of forward and backward pass."""
    fun, args = MODELS[model]
    return figures(jax.value_and_grad(PRECISIONS[precision](fun)), *args, gpu=gpu)


@dataclasses.dataclass(frozen=True)
class Config:
    """What five models take on a GPU in float32, in float16 by hand, and under autocast."""

    gpus: tuple[str, ...] = ("H200", "A100")
    """Which GPUs to compile for; none need be there."""
    models: tuple[Literal[(*MODELS,)], ...] = (*MODELS,)
    """Which models to compile."""
    short: bool = False
    """Only all float16 and autocast, and no other cuts."""


def show(label, figures, base):
    print(f"  {label:18s}", end="")
    for key, form in (("temp", "9.1f"), ("kernels", "7d"), ("traffic", "9.1f")):
        print(f" {figures[key]:{form}} x{figures[key] / base[key]:.2f}", end="")
    print("  ", *(f"{n} {dtype}" for dtype, n in figures["products"].items()), flush=True)


def main(config: Config):
    for gpu in config.gpus:
        described_device(gpu)  # or an error before anything is printed
        print(f"{gpu:20s}      temp MB      kernels     traffic MB   products")
        for model in config.models:
            print(model)
            base = measure(model, "all float16", gpu)
            for name in ("all float16", "autocast") if config.short else PRECISIONS:
                show(name, base if name == "all float16" else measure(model, name, gpu), base)
            if model == "transformer" and not config.short:
                chosen = _recompute.CUTS
                for cut in (8, 16, 32, 64, 128):
                    _recompute.CUTS = (cut,)
                    show(f"  cuts at 1/{cut}", measure(model, "autocast", gpu), base)
                _recompute.CUTS = chosen


if __name__ == "__main__":
    main(tyro.cli(Config))
