"""What loss scaling adds to the messages between GPUs, read off the compiled program; needs no GPU.

XLA's CUDA compiler is asked for the program of one AdamW step of a stack of layers on described
H200s, with and without jscale: data parallel, and FSDP-like, with parameters, gradients and
moments sharded. Counted are the collectives that each device takes part in, and their bytes.

    pip install '.[gpu-program]'                  # jax 0.12 or newer
    python experiments/collective_cost.py         # 1 minute on 2 cores
    python experiments/collective_cost.py --short # 8 devices only

With jax 0.12.0.1:

                                                                 unscaled                with jscale
    H200                                       collectives      MB  bytes collectives      MB  bytes
    data parallel, 8 devices, 4 layers                   2   8.397      4           2   8.397      4
    data parallel, 8 devices, 12 layers                  2  25.190      4           2  25.190      4
    data parallel, 32 devices, 4 layers                  2   8.397      4           2   8.397      4
    data parallel, 256 devices, 4 layers                 2   8.397      4           2   8.397      4
    data parallel, clip, 8 devices, 4 layers             2   8.397      4           2   8.397      4
    data parallel, clip, 8 devices, 12 layers            2  25.190      4           2  25.190      4
    data parallel, clip, 32 devices, 4 layers            2   8.397      4           2   8.397      4
    data parallel, clip, 256 devices, 4 layers           2   8.397      4           2   8.397      4
    FSDP, 8 devices, 4 layers                            3   9.446      4           3   9.446      8
    FSDP, 8 devices, 12 layers                           3  28.340      4           3  28.340      8
    FSDP, 32 devices, 4 layers                           3   8.659      4           3   8.659      8
    FSDP, 256 devices, 4 layers                          3   8.430      4           3   8.430      8
    FSDP, clip, 8 devices, 4 layers                      3   9.446      8           3   9.446     12
    FSDP, clip, 8 devices, 12 layers                     3  28.340      8           3  28.340     12
    FSDP, clip, 32 devices, 4 layers                     3   8.659      8           3   8.659     12
    FSDP, clip, 256 devices, 4 layers                    3   8.430      8           3   8.430     12

MB is what one device gives to collectives of more than 1 KB, gradients and gathered parameters;
bytes is what it gives to those of less. Nothing is sent that was not sent anyway: where gradients
are sharded, their norm rides on the all-reduce of the loss, as 4 bytes more.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import optax
import tyro
from gpu_program import COLLECTIVES, described_devices, parse
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from peer_steps import make_step

WIDTH, BATCH = 1024, 4096
TOPOLOGIES = {8: "1x1x8", 32: "1x4x8", 256: "1x32x8"}
SMALL = 1024  # bytes
SIZES = (8, 4), (8, 12), (32, 4), (256, 4)


@dataclasses.dataclass(frozen=True)
class Config:
    """What loss scaling adds to the messages between GPUs."""

    gpu: str = "H200"
    """Which GPU to compile for; it need not be there."""
    short: bool = False
    """8 devices only."""


def loss_fn(params, x, y):
    for layer in params:
        half = lambda a: a.astype(jnp.float16)
        x = jnp.tanh(half(x) @ half(layer["w"]) + half(layer["b"]))
    return jnp.mean((x.astype(jnp.float32) - y) ** 2)


def measure(layout, devices=8, layers=4, clip=True, scaled=True, gpu="H200"):
    """How many collectives of each kind, and how many bytes they have; small ones by themselves."""
    mesh = Mesh(described_devices(gpu, TOPOLOGIES[devices]), ("data",), axis_types=(AxisType.Auto,))
    spread = NamedSharding(mesh, P("data"))
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    tx = optax.adamw(1e-3)
    tx = optax.chain(optax.clip_by_global_norm(1.0), tx) if clip else tx
    step, init = make_step("jscale" if scaled else "unscaled", loss_fn, tx)

    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    params = [{"w": array(WIDTH, WIDTH), "b": array(WIDTH)} for _ in range(layers)]
    own = lambda x: spread if layout == "FSDP" and x.ndim else NamedSharding(mesh, P())
    params, state = jax.tree.map(lambda x: place(x, own(x)), (params, jax.eval_shape(init, params)))
    data = [place(array(BATCH, WIDTH), spread)] * 2
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, *data).compile()
    computations = parse(compiled.as_text())
    known = {i.name: i for body in computations.values() for i in body}
    found: collections.Counter[str] = collections.Counter()
    for i in known.values():
        kind = i.operation.removesuffix("-start")
        if kind in COLLECTIVES:
            size = sum(known[x].size for x in i.operands)  # what this device gives
            found[kind if size > SMALL else "small"] += 1
            found["MB" if size > SMALL else "small bytes"] += size / 1e6 if size > SMALL else size
    return found


def main(config: Config):
    described_devices(config.gpu)  # or an error before anything is printed
    title = f"{'collectives':>12s}{'MB':>8s}{'bytes':>7s}"
    print(f"{'':42s}{'unscaled':>27s}{'with jscale':>27s}\n{config.gpu:42s}{title}{title}")
    for layout in ("data parallel", "FSDP"):
        for clip in (False, True):
            for devices, layers in [(8, 4)] if config.short else SIZES:
                name = f"{layout}{', clip' if clip else ''}, {devices} devices, {layers} layers"
                print(f"{name:42s}", end="")
                for scaled in (False, True):
                    got = measure(layout, devices, layers, clip, scaled, config.gpu)
                    number = sum(got[kind] for kind in (*COLLECTIVES, "small"))
                    print(f"{number:12d}{got['MB']:8.3f}{got['small bytes']:7d}", end="")
                print(flush=True)


if __name__ == "__main__":
    main(tyro.cli(Config))
