"""What float16 weights with float32 copies cost on a GPU, read off the program; no GPU needed.

XLA's CUDA compiler is asked for one AdamW step of gpu_structure.py's transformer, with 43 million
weights, on described H200s: with the weights in float32, cast in the loss, and in float16, with
`jscale.with_master_weights` and without. The loss is scaled, gradients are clipped, weights and
state are donated.

    pip install '.[gpu-program,experiments]'              # jax 0.12 or newer
    python experiments/master_memory.py                   # 3 minutes on 2 cores
    python experiments/master_memory.py --short           # one device, 40 seconds

With jax 0.12.0.1, for each device:

    H200                          MB: held  temporary  traffic  gathered   kernels
    one device
      float32, cast in the loss      525.7      711.6   6375.5       0.0       390
      float16 + copies               612.3      626.1   6322.0       0.0       361
      float16                        439.2      622.9   5942.6       0.0       359
    8 devices, weights and state sharded
      float32, cast in the loss       65.7      157.8   1535.8      22.6       408
      float16 + copies                76.5      189.5   1529.1      22.6       361
      float16                         54.9      154.2   1481.7      22.6       359
    8 devices, state alone sharded
      float32, cast in the loss      217.2      167.6   1589.6      21.6       371
      float16 + copies               152.3      121.1   1351.6      10.8       347
      float16                        130.6      121.1   1308.3      10.8       346

Copies hold 2 bytes a weight more, and on one device they save as much: what was cast for the two
passes is what is held. Where weights are sharded too, XLA casts before it gathers, and it costs
memory. They pay where every device holds all weights and a part of the state: 29 % less memory, and
half of what is gathered. Elsewhere float32 weights are as cheap, and simpler.
"""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import optax
import tyro
from gpu_program import count, described_devices, parse
from gpu_structure import transformer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jscale

KINDS = ("float32, cast in the loss", "float16 + copies", "float16")
LAYOUTS = {  # devices; whether weights and state are sharded
    "one device": (1, False, False),
    "8 devices, weights and state sharded": (8, True, True),
    "8 devices, state alone sharded": (8, False, True),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What float16 weights with float32 copies cost on GPUs."""

    gpu: str = "H200"
    """Which GPU to compile for; it need not be there."""
    short: bool = False
    """One device only."""


def measure(kind, devices, weights_sharded, state_sharded, gpu):
    """Of one device's program: MB held between steps, temporary, moved and gathered; kernels."""
    tx = jscale.with_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    if kind == "float16 + copies":
        tx = jscale.with_master_weights(tx)
    loss_fn, weights, data = transformer(6)
    if kind != KINDS[0]:
        weights = jax.tree.map(lambda x: x.update(dtype=jnp.float16), weights)

    def step(weights, state, *data):
        loss, grads = jscale.value_and_grad(loss_fn, jscale.loss_scale(state))(weights, *data)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    chips = described_devices(gpu, f"1x1x{devices}")
    mesh = Mesh(chips[:devices], ("data",), axis_types=(AxisType.Auto,))
    own = lambda x, split: NamedSharding(mesh, P("data") if split and x.ndim else P())
    place = lambda tree, split: jax.tree.map(lambda x: x.update(sharding=own(x, split)), tree)
    weights = place(weights, weights_sharded)
    state = place(jax.eval_shape(tx.init, weights), state_sharded)
    data = place(data, devices > 1)
    stay = jax.tree.map(lambda x: x.sharding, (weights, state))
    options = {"donate_argnums": (0, 1), "out_shardings": (*stay, NamedSharding(mesh, P()))}
    compiled = jax.jit(step, **options).lower(weights, state, *data).compile()

    memory, text = compiled.memory_analysis(), compiled.as_text()
    found = count(text)
    known = {i.name: i for body in parse(text).values() for i in body}
    gathers = [i for i in known.values() if i.operation.removesuffix("-start") == "all-gather"]
    gathered = sum(known[x].size for i in gathers for x in i.operands) / 1e6
    megabytes = (memory.argument_size_in_bytes / 1e6, memory.temp_size_in_bytes / 1e6)
    return *megabytes, found["traffic"], gathered, found["kernels"]


def main(config: Config):
    described_devices(config.gpu)  # or an error before anything is printed
    warnings.filterwarnings("ignore", "parameters in float16")
    print(f"{config.gpu:29s} MB: held  temporary  traffic  gathered   kernels")
    for layout, how in [*LAYOUTS.items()][: 1 if config.short else None]:
        print(layout)
        for kind in KINDS:
            held, temporary, traffic, gathered, kernels = measure(kind, *how, config.gpu)
            print(f"  {kind:28s}{held:8.1f}{temporary:11.1f}{traffic:9.1f}", end="")
            print(f"{gathered:10.1f}{kernels:10d}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Config))
