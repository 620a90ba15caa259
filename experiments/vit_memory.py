"""What a train step of the vision transformers of the MPX paper takes on a GPU, by precision.

XLA's CUDA compiler is asked for whole steps (dropout, clipping by the global norm, AdamW; in place)
on a described GPU; no GPU needed. The model is written once, in the dtype of its parameters except
for norms, softmax and loss. "temp" is what the step holds in between, "and state" adds parameters,
moments and batch. Beside each figure is how many times less it is than in float32. What is in a
loop counts as often as it runs, products by the dtype of their operands. All repeats exactly.

    pip install '.[gpu-program,experiments]'              # jax 0.12 or newer
    python experiments/vit_memory.py                      # 10 minutes on 2 cores
    python experiments/vit_memory.py --short              # 1 minute

With jax 0.12.0.1, the row of MPX with `pip install mixed_precision_for_JAX`:

    H200                     temp MB      and state MB     kernels     traffic MB   products
    12 blocks x 256, batch size 128
      float32               1911.1 x1.00    2010.5 x1.00    1257 x1.00   18681.1 x1.00   221 f32
      TF32                  1911.1 x1.00    2010.5 x1.00    1257 x1.00   18681.1 x1.00   221 f32
      bfloat16, Policy      1128.6 x1.69    1228.0 x1.64    1354 x0.93   11798.1 x1.58   221 bf16
      float16, Policy       1115.8 x1.71    1215.2 x1.65    1225 x1.03   11803.9 x1.58   221 f16
      float16, MPX          1128.6 x1.69    1228.0 x1.64    1556 x0.81   11831.0 x1.58   221 f16
      autocast, all kept    1360.9 x1.40    1460.3 x1.38    1213 x1.04   12761.5 x1.46   221 f16
      autocast               687.8 x2.78     787.2 x2.55    1402 x0.90   14551.2 x1.28   221 f16
    12 blocks x 256, batch size 256
      float32               3819.8 x1.00    3920.8 x1.00    1256 x1.00   36501.6 x1.00   221 f32
      autocast              1373.2 x2.78    1474.2 x2.66    1402 x0.90   27756.5 x1.32   221 f16
    12 blocks x 256, batch size 512
      float32               7639.0 x1.00    7743.2 x1.00    1257 x1.00   72094.5 x1.00   221 f32
      autocast              2742.6 x2.79    2846.7 x2.72    1415 x0.89   53937.1 x1.34   221 f16
    12 blocks x 256, batch size 1024
      float32              15277.0 x1.00   15387.4 x1.00    1283 x1.00  142729.0 x1.00   221 f32
      autocast              5518.7 x2.77    5629.1 x2.73    1438 x0.89  107620.9 x1.33   221 f16
    12 blocks x 256, scanned, batch size 128
      float32               3289.6 x1.00    3389.0 x1.00    1711 x1.00   32244.1 x1.00   221 f32
      autocast               749.1 x4.39     848.6 x3.99    1518 x1.13   16850.8 x1.91   221 f16
    ViT-B, batch size 128
      float32              23641.8 x1.00   24757.6 x1.00    1272 x1.00  194967.9 x1.00   221 f32
      autocast              7755.7 x3.05    8871.5 x2.79    1442 x0.88  150628.3 x1.29   221 f16

MPX published that its memory on a GPU is x1.51, x1.95 and x1.81 less at batch sizes 128, 256 and
512. With the defaults of autocast temporary memory is x2.77 to x2.79 less at all of them, x3.05 in
ViT-B; with parameters and moments, which are float32 in all rows, x2.55 and more. It costs 12 to
13 % more kernels than float32; traffic is x1.28 to x1.34 less, but 23 % more than with whole-tree
casts. TF32 takes what float32 takes. With two blocks (`--short`), which keep little, it is x2.11.
"""

import dataclasses
import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
import optax
import tyro
from autocast_memory import array, normalize
from gpu_program import described_device, figures

import jscale

f32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class ViT:
    """Sizes of a vision transformer; as they are here, that of MPX's figures on CIFAR-100."""

    blocks: int = 12
    width: int = 256
    hidden: int = 800
    heads: int = 4
    image: int = 32
    patch: int = 4
    classes: int = 100
    scan: bool = False


SMALL = ViT()
BASE = ViT(width=768, hidden=3072, heads=12, image=224, patch=16, classes=1000)


def parameters(vit: ViT):
    width, heads, each = vit.width, vit.heads, vit.width // vit.heads
    norm = {"gain": array(width), "bias": array(width)}
    block = {
        "norm1": norm,
        "qkv": array(width, 3, heads, each),
        "qkv_bias": array(3, 1, 1, heads, each),
        "out": array(heads, each, width),
        "out_bias": array(width),
        "norm2": norm,
        "up": array(width, vit.hidden),
        "up_bias": array(vit.hidden),
        "down": array(vit.hidden, width),
        "down_bias": array(width),
    }
    stacked = jax.tree.map(lambda x: array(vit.blocks, *x.shape), block)
    return {
        "patches": array(vit.patch, 3 * vit.patch, width),
        "class": array(1, 1, width),
        "positions": array((vit.image // vit.patch) ** 2 + 1, width),
        "blocks": stacked if vit.scan else [block] * vit.blocks,
        "norm": norm,
        "head": array(width, vit.classes),
        "head_bias": array(vit.classes),
    }


def norm(x, p):
    return normalize(x, p["gain"], -1) + p["bias"]


def dropout(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def block(x, p, keys):
    qkv = jnp.einsum("btd,dnhk->nbthk", norm(x, p["norm1"]), p["qkv"]) + p["qkv_bias"]
    scores = jnp.einsum("bthk,bshk->bhts", qkv[0], qkv[1]).astype(f32) * qkv.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores, -1).astype(x.dtype)
    h = jnp.einsum("bhts,bshk->bthk", weights, qkv[2])
    x = x + dropout(jnp.einsum("bthk,hkd->btd", h, p["out"]) + p["out_bias"], keys[0])
    h = jax.nn.gelu(norm(x, p["norm2"]) @ p["up"] + p["up_bias"])
    return x + dropout(h @ p["down"] + p["down_bias"], keys[1])


def loss_fn(params, images, labels, key):
    batch, size, _, channels = images.shape
    patch, _, width = params["patches"].shape
    n = size // patch
    x = images.reshape(batch, n, patch, n, patch * channels)
    x = jnp.einsum("bipjq,pqd->bijd", x, params["patches"]).reshape(batch, n * n, width)
    x = jnp.concatenate([jnp.broadcast_to(params["class"], (batch, 1, width)), x], 1)
    x, blocks = x + params["positions"], params["blocks"]
    if isinstance(blocks, list):
        for p, keys in zip(blocks, jax.random.split(key, (len(blocks), 2)), strict=True):
            x = block(x, p, keys)
    else:
        keys = jax.random.split(key, (len(blocks["up"]), 2))
        x, _ = jax.lax.scan(lambda x, layer: (block(x, *layer), None), x, (blocks, keys))
    logits = norm(x[:, 0], params["norm"]) @ params["head"] + params["head_bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(f32), labels).mean()


def policy(dtype: str, fun):
    cast = jscale.Policy(dtype).cast_to_compute
    return lambda params, images, *more: fun(cast(params), cast(images), *more)


PRECISIONS = {
    "float32": lambda fun: fun,
    "TF32": lambda fun: fun,
    "bfloat16, Policy": functools.partial(policy, "bf16"),
    "float16, Policy": functools.partial(policy, "half"),
    "float16, MPX": None,  # makes a step of its own
    "autocast, all kept": functools.partial(jscale.autocast, recompute=False),
    "autocast": jscale.autocast,
}
# What products of float32 are computed in; it is written at each of them in the program. Without a
# word XLA takes TF32 where a GPU has it.
ALGORITHMS = {"float32": "F32_F32_F32", "TF32": "TF32_TF32_F32"}
NEEDS_NO_SCALE = "float32", "TF32", "bfloat16, Policy"
FEW = "float32", "autocast"

ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=1e-3))


def scaled_step(loss_fn, rule, inner):
    """A train step and what makes its state."""
    tx = jscale.with_loss_scale(inner, rule)

    def step(params, state, *batch):
        loss, grads = jscale.value_and_grad(loss_fn, jscale.loss_scale(state))(params, *batch)
        updates, state = tx.update(grads, state, params, loss=loss)
        return optax.apply_updates(params, updates), state, loss

    return step, tx.init


def step_of(precision: str):
    if precision == "float16, MPX":
        return step_of_mpx()
    rule = jscale.off() if precision in NEEDS_NO_SCALE else jscale.dynamic()
    return scaled_step(PRECISIONS[precision](loss_fn), rule, ADAM)


def step_of_mpx():
    import mpx

    def step(params, state, *batch):
        inner, scale, counter = state
        scaling = mpx.DynamicLossScaling(scale, f32(1), counter=counter)
        loss, scaling, finite, grads = mpx.filter_value_and_grad(loss_fn, scaling)(params, *batch)
        params, inner = mpx.optimizer_update(params, ADAM, inner, grads, finite)
        return params, (inner, scaling.loss_scaling, scaling.counter), loss

    return step, lambda params: (ADAM.init(params), f32(65504), jnp.int32(0))


def step_and_arguments(vit: ViT, batch: int, precision: str):
    step, init = step_of(precision)
    params = parameters(vit)
    images, labels = array(batch, vit.image, vit.image, 3), jax.ShapeDtypeStruct((batch,), "int32")
    key = jax.eval_shape(lambda: jax.random.key(0))
    return step, (params, jax.eval_shape(init, params), images, labels, key)


def measure(vit: ViT, batch: int, precision: str, gpu: str = "H200"):
    """The figures of a train step, and the memory for everything it works on."""
    step, args = step_and_arguments(vit, batch, precision)
    with jax.default_matmul_precision(ALGORITHMS.get(precision)):
        found = figures(step, *args, gpu=gpu, donate_argnums=(0, 1))
    held = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(args))
    return {**found, "and state": found["temp"] + held / 1e6}


@dataclasses.dataclass(frozen=True)
class Config:
    """What vision transformers take on a GPU, by precision."""

    gpu: str = "H200"
    """Which GPU to compile for; it need not be there."""
    batches: tuple[int, ...] = (128, 256, 512, 1024)
    """Batch sizes of the small ViT. All precisions are compiled at the first."""
    base_batches: tuple[int, ...] = (128,)
    """Batch sizes of ViT-B."""
    short: bool = False
    """The small ViT with two blocks, at batch size 128, in two precisions."""


def table(title: str, vit: ViT, batch: int, precisions, gpu: str):
    print(f"{title}, batch size {batch}")
    base = None
    for name in precisions:
        if name == "float16, MPX" and importlib.util.find_spec("mpx") is None:
            print(f"  {name:18s}  not installed: pip install mixed_precision_for_JAX")
            continue
        found = measure(vit, batch, name, gpu)
        base = base or found
        print(f"  {name:18s}", end="")
        columns = ("temp", "9.1f"), ("and state", "9.1f"), ("kernels", "7d"), ("traffic", "9.1f")
        for column, form in columns:
            print(f" {found[column]:{form}} x{base[column] / found[column]:.2f}", end="")
        print("  ", *(f"{n} {dtype}" for dtype, n in found["products"].items()), flush=True)


def main(config: Config):
    described_device(config.gpu)  # or an error before anything is printed
    heads = "       temp MB      and state MB     kernels     traffic MB   products"
    print(f"{config.gpu:18s}{heads}")
    if config.short:
        table("2 blocks", dataclasses.replace(SMALL, blocks=2), 128, FEW, config.gpu)
        return
    for batch in config.batches:
        precisions = PRECISIONS if batch == config.batches[0] else FEW
        table("12 blocks x 256", SMALL, batch, precisions, config.gpu)
    scanned = dataclasses.replace(SMALL, scan=True)
    table("12 blocks x 256, scanned", scanned, config.batches[0], FEW, config.gpu)
    for batch in config.base_batches:
        table("ViT-B", BASE, batch, FEW, config.gpu)


if __name__ == "__main__":
    main(tyro.cli(Config))
