"""What separate scales cost on a GPU, read off the compiled program; no GPU needed.

XLA's CUDA compiler is asked for one AdamW step of two transformers on a described H200: two towers
of three blocks each, of which one is a region; and a scanned stack in which each layer is one.

    pip install '.[gpu-program,experiments]'              # jax 0.12 or newer
    python experiments/region_cost.py                     # 6 minutes on 2 cores
    python experiments/region_cost.py --short             # 1 minute

With jax 0.12.0.1:

    H200                             kernels        traffic MB           temp MB          products
    two towers, autocast
      one scale                          404   +0   15194.1 x1.0000     852.5 x1.0000       108
      two scales                         405   +1   15194.1 x1.0000     852.5 x1.0000       108
      a region                           406   +2   15194.1 x1.0000     852.5 x1.0000       108
    two towers, autocast, clip_by_global_norm
      one scale                          411   +0   15208.3 x1.0000     852.5 x1.0000       108
      two scales                         413   +2   15208.3 x1.0000     852.5 x1.0000       108
      a region                           415   +4   15208.3 x1.0000     852.5 x1.0000       108
    two towers, float16, clip_by_global_norm
      one scale                          364   +0   13828.4 x1.0000    1759.3 x1.0000       108
      two scales                         366   +2   13828.4 x1.0000    1759.3 x1.0000       108
      a region                           368   +4   13828.4 x1.0000    1759.3 x1.0000       108
    6 layers, autocast
      one scale                          501   +0   18721.4 x1.0000    1243.2 x1.0000       111
      two scales, a region a layer       508   +7   18721.4 x1.0000    1218.0 x0.9798       111
      stacked                            509   +8   18721.5 x1.0000    1218.0 x0.9798       111
      stacked, stop_nonfinite            545  +44   19061.3 x1.0182    1211.4 x0.9744       111
    6 layers, autocast, clip_by_global_norm
      one scale                          502   +0   18721.4 x1.0000    1243.2 x1.0000       111
      two scales, a region a layer       511   +9   18721.4 x1.0000    1218.0 x0.9798       111
      stacked                            522  +20   18891.5 x1.0091    1218.0 x0.9798       111
      stacked, stop_nonfinite            558  +56   19231.2 x1.0272    1211.4 x0.9744       111
    12 layers, autocast, clip_by_global_norm
      one scale                          952   +0   37232.0 x1.0000    2130.3 x1.0000       219
      two scales, a region a layer       967  +15   37232.0 x1.0000    2105.2 x0.9882       219
      stacked                            978  +26   37572.2 x1.0091    2105.2 x0.9882       219

A region adds two kernels at most, in a loop about one for each turn, but no product, no traffic
and no memory; a second rule adds one or two. A scale for each layer costs no more than one for all
of them, until there is clipping: the norm of each layer is not what clipping computes, so that it
takes 11 kernels and one more read of the stack's gradients, however many layers there are. With
`stop_nonfinite` there are six more for each layer, and 1.8 % more traffic.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import tyro
from autocast_memory import (
    BATCH,
    LENGTH,
    WIDTH,
    array,
    block,
    f16,
    f32,
    mean_square,
    transformer_arguments,
)
from gpu_program import described_device, figures

import jscale

TOWERS = ("one scale", "two scales", "a region")
STACKS = ("one scale", "two scales, a region a layer", "stacked", "stacked, stop_nonfinite")

# A model: loss function, parameters, data, rules, and the group that the loss is in.


def two_towers(kind: str, blocks: int = 3):
    """A vision tower, whose result joins the text tower, which has as many blocks."""
    tower = transformer_arguments()[0][:1] * blocks
    params = {"text": tower, "vision": tower}
    rules = {"text": jscale.dynamic(), "vision": jscale.dynamic()}

    def loss_fn(params, images, tokens, y, scale, dtype=f32):
        def tower(params, x):
            x = x.astype(dtype)
            for p in params:
                x = block(p, x, dtype)
            return x

        vision = tower
        if kind == "a region":
            vision = jscale.region(tower, scale["vision"], scale["text"])
        seen = vision(params["vision"], images)
        return mean_square(tower(params["text"], tokens.astype(dtype) + seen), y)

    data = [array(BATCH, LENGTH, WIDTH)] * 3
    return loss_fn, params, data, jscale.dynamic() if kind == "one scale" else rules, "text"


def layers(kind: str, n: int = 6):
    """A stack of layers in a scan, each a region of its own, and a head."""
    stack, x, y = transformer_arguments(n)
    params = {"head": array(WIDTH, WIDTH), "layers": stack}
    one = kind == "two scales, a region a layer"
    rules = {
        "head": jscale.dynamic(),
        "layers": jscale.dynamic() if one else jscale.stacked(jscale.dynamic(), n),
    }

    def loss_fn(params, x, y, scale, dtype=f32):
        layer = lambda p, x: block(p, x.astype(dtype), dtype).astype(f32)

        def body(x, layer_and_scale):
            p, own = layer_and_scale
            stop = {"stop_nonfinite": 1} if "stop" in kind else {}
            at = layer if own is None else jscale.region(layer, own, scale["head"], **stop)
            return at(p, x), None

        scales = None if kind == "one scale" else jnp.broadcast_to(scale["layers"], n)
        x, _ = jax.lax.scan(body, x, (params["layers"], scales))
        return mean_square(x.astype(dtype) @ params["head"].astype(dtype), y)

    return loss_fn, params, [x, y], jscale.dynamic() if kind == "one scale" else rules, "head"


def measure(model, precision: str = "autocast", clip: bool = True, gpu: str = "H200"):
    """The figures of a step of AdamW."""
    loss_fn, params, data, rule, root = model
    tx = optax.adamw(1e-3)
    tx = jscale.with_loss_scale(
        optax.chain(optax.clip_by_global_norm(1.0), tx) if clip else tx, rule
    )
    root = root if isinstance(rule, dict) else None

    def step(params, state, *data):
        scale = jscale.loss_scale(state)
        if precision == "autocast":
            fun = jscale.autocast(lambda *args: loss_fn(*args, scale=scale))
        else:
            fun = lambda *args: loss_fn(*args, scale=scale, dtype=f16)
        loss, grads = jscale.value_and_grad(fun, scale, root=root)(params, *data)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = jax.eval_shape(tx.init, params)
    return figures(step, params, state, *data, gpu=gpu, donate_argnums=(0, 1))


@dataclasses.dataclass(frozen=True)
class Config:
    """What separate scales cost on a GPU."""

    gpu: str = "H200"
    """Which GPU to compile for; it need not be there."""
    short: bool = False
    """Towers of one block each, and a stack of 6 layers, with clipping and autocast alone."""


def table(title, make, kinds, precision, clip, gpu):
    print(f"{title}, {precision}{', clip_by_global_norm' if clip else ''}")
    base = None
    for kind in kinds:
        found = measure(make(kind), precision, clip, gpu)
        base = base or found
        kernels = found["kernels"], f"{found['kernels'] - base['kernels']:+d}"
        print(f"  {kind:30s} {kernels[0]:7d} {kernels[1]:>4}", end="")
        for key in ("traffic", "temp"):
            print(f" {found[key]:9.1f} x{found[key] / base[key]:.4f}", end="")
        print(f" {sum(found['products'].values()):9d}", flush=True)


def main(config: Config):
    described_device(config.gpu)  # or an error before anything is printed
    columns = f"{'kernels':>7s}        traffic MB           temp MB          products"
    print(f"{config.gpu:32s} {columns}")
    ways = [("autocast", True)]
    if not config.short:
        ways = [("autocast", False), *ways]
    towers = functools.partial(two_towers, blocks=1 if config.short else 3)
    for precision, clip in [*ways, *([] if config.short else [("float16", True)])]:
        table("two towers", towers, TOWERS, precision, clip, config.gpu)
    for precision, clip in ways:
        table("6 layers", layers, STACKS, precision, clip, config.gpu)
    if not config.short:
        twelve = functools.partial(layers, n=12)
        table("12 layers", twelve, STACKS[:3], "autocast", True, config.gpu)


if __name__ == "__main__":
    main(tyro.cli(Config))
