"""One training on one device, on eight, or in several processes: the same decisions everywhere.

    python experiments/data_parallel.py                   # eight devices, 25 seconds on 2 cores
    python experiments/data_parallel.py --devices 1
    python experiments/data_parallel.py --processes 2     # or 4; each has its part of the devices
    python experiments/data_parallel.py --short           # two of the layouts, with several scales

A stack of layers in float16 learns to predict a sine. At five steps one example of the batch, and
so one device of one process, has an input that float16 cannot hold. There is one loss scale, or one
for the head and each layer, with regions. In every layout, each device must skip the steps that a
device skips that trains alone on the whole batch, and have its scales and counters, bit for bit, at
every step. Losses and parameters differ as far as sums are rounded in another order.
Expected, with the largest difference of a parameter:

    8 devices, 1 processes            skipped  scales at the end   loss, alone  decisions  differ by
    data parallel    one scale              5  2^13             0.5617 0.5617    the same  2.0e-04
    FSDP             one scale              5  2^13             0.5617 0.5617    the same  2.0e-04
    tensor parallel  one scale              5  2^13             0.5617 0.5617    the same  3.1e-04
    data x model     one scale              5  2^13             0.5617 0.5617    the same  3.0e-04
    shard_map        one scale              5  2^13             0.5617 0.5617    the same  1.8e-04
    data parallel    several                5  2^13 2^13 2^13   0.5617 0.5617    the same  2.0e-04
    FSDP             several                5  2^13 2^13 2^13   0.5617 0.5617    the same  2.0e-04
    tensor parallel  several                5  2^13 2^13 2^13   0.5617 0.5617    the same  3.1e-04
    data x model     several                5  2^13 2^13 2^13   0.5617 0.5617    the same  3.0e-04
    shard_map        several                5  2^13 2^13 2^13   0.5617 0.5617    the same  1.8e-04
    All devices decided alike, as one device does.
"""

import dataclasses
import hashlib
import os
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jscale

WIDTH, LAYERS, BATCH = 16, 2, 32
OVERFLOWS = {3: 0, 4: 31, 11: 9, 12: 17, 21: 30}  # at which step, in which example
PATIENCE = 120  # seconds


@dataclasses.dataclass(frozen=True)
class Config:
    """One training on one device, on eight, or in several processes."""

    devices: int = 8
    """Devices in all: 1, or a multiple of 2 and of --processes, up to 32."""
    processes: int = 1
    """Processes that they are in."""
    steps: int = 30
    """Training steps."""
    short: bool = False
    """FSDP and shard_map only, and several scales."""
    process: int | None = None
    """Which of the processes this is; the script itself starts them."""
    port: int = 0
    """Where the first of them listens."""


# Layouts: shape of the mesh, how head and layers are sharded, and the axis inside shard_map.


def layouts(config):
    n = config.devices
    two = (n // 2, 2) if n > 1 else (1, 1)
    found = {
        "data parallel": ((n, 1), P(), P(), None),
        "FSDP": ((n, 1), P("data"), P(None, "data"), None),
        "tensor parallel": ((1, n), P("model"), P(None, None, "model"), None),
        "data x model": (two, P("model"), P(None, "data", "model"), None),
        "shard_map": ((n, 1), P(), P(), "data"),
    }
    return {k: found[k] for k in ("FSDP", "shard_map")} if config.short else found


def rules(config):
    # Below what makes float16 overflow by itself. That depends on the parts that sums are taken in:
    # in shard_map each device averages over fewer examples, so that its cotangents are larger.
    one = jscale.dynamic(2**10, growth_interval=4, hysteresis=2, max_scale=2**13)
    several = {"head": one, "layers": jscale.stacked(one, LAYERS)}
    return {"several": several} if config.short else {"one scale": one, "several": several}


def parameters():
    random = np.random.default_rng(0)
    normal = lambda *shape: (random.normal(size=shape) / WIDTH**0.5).astype(np.float32)
    return {"head": normal(WIDTH, 1), "layers": normal(LAYERS, WIDTH, WIDTH)}


def batch(step):
    random = np.random.default_rng([1, step])
    x = random.normal(size=(BATCH, WIDTH)).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True))
    if step in OVERFLOWS:
        x[OVERFLOWS[step], 0] = 1e5
    return x, y


def make_step(rule, axis):
    """A training step, and its optimizer; in shard_map over `axis`."""
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    tx = jscale.with_loss_scale(inner, rule, axis_name=axis)
    several = isinstance(rule, dict)

    def step(params, opt_state, x, y):
        scale = jscale.loss_scale(opt_state)

        def loss_fn(params):
            layer = lambda w, h: jnp.tanh(h @ w)
            h = x
            for i in range(LAYERS):
                at = jscale.region(layer, scale["layers"][i], scale["head"]) if several else layer
                h = at(params["layers"][i], h)
            return jnp.mean((h @ params["head"] - y) ** 2)

        half = jscale.autocast(loss_fn)
        value_and_grad = jscale.value_and_grad(half, scale, root="head" if several else None)
        # With shard_map, what each device differentiates is its own, and is averaged in float32.
        own = lax.pcast(params, axis, to="varying") if axis else params
        loss, grads = value_and_grad(own)
        if axis:
            loss, grads = lax.pmean((loss, grads), axis)
        updates, opt_state = tx.update(grads, opt_state, params, loss=loss)
        decided = jscale.metrics(opt_state)
        for name in [name for name in decided if name.startswith("grad_norm")]:
            del decided[name]  # a sum, and so rounded
        return optax.apply_updates(params, updates), opt_state, {"loss": loss, "decided": decided}

    return step, tx


def train(rule, layout, config, devices):
    """Parameters, and loss and decisions of each step, as this process sees them."""
    shape, head, layers, axis = layout
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    place = lambda x, spec: jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, spec), lambda index: x[index]
    )
    step, tx = make_step(rule, axis)
    if axis:
        specs = P(), P(), P(axis), P(axis)
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P())
    step = jax.jit(step)
    params = {
        k: place(x, spec) for (k, x), spec in zip(parameters().items(), (head, layers), strict=True)
    }
    opt_state = jax.jit(tx.init)(params)
    rows = []
    for number in range(config.steps):
        data = (place(x, P("data")) for x in batch(number))
        params, opt_state, row = step(params, opt_state, *data)
        # One after the other: programs that run at once may wait for each other on few cores.
        rows.append(jax.tree.map(on_all_devices, jax.block_until_ready(row)))
    return params, rows


def on_all_devices(x):
    """The value of a replicated array, the same on every device of this process."""
    copies = [np.asarray(shard.data) for shard in x.addressable_shards]
    assert all(copy.tobytes() == copies[0].tobytes() for copy in copies), "devices differ"
    return copies[0]


def everywhere_the_same(decided):
    """Whether all processes have these decisions."""
    data = b"".join(x.tobytes() for x in jax.tree.leaves(decided))
    mine = np.frombuffer(hashlib.sha256(data).digest(), np.uint32)
    return (np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, 8) == mine).all()


def compare(config):
    first = jax.process_index() == 0
    say = lambda *texts: print(*texts, flush=True) if first else None
    title = f"{config.devices} devices, {config.processes} processes"
    say(f"{title:32s}  skipped  scales at the end   loss, alone  decisions  differ by")
    failed = False
    for kind, rule in rules(config).items():
        alone = (1, 1), P(), P(), None
        want_params, want = train(rule, alone, config, jax.local_devices()[:1])
        for name, layout in layouts(config).items():
            params, rows = train(rule, layout, config, jax.devices())
            decided, expected = ([row["decided"] for row in r] for r in (rows, want))
            same = jax.tree.map(np.array_equal, decided, expected)
            same = all(jax.tree.leaves(same)) and everywhere_the_same(decided)
            apart = max(
                np.abs(shard.data - np.asarray(want_params[k])[shard.index]).max()
                for k, x in params.items()
                for shard in x.addressable_shards
            )
            last = rows[-1]["decided"]
            scales = [last[k].ravel() for k in last if k.startswith("grad_scale")]
            scales = " ".join(f"2^{np.log2(x):.0f}" for x in np.concatenate(scales))
            loss, lone = (float(np.mean([row["loss"] for row in r[-5:]])) for r in (rows, want))
            say(
                f"{name:16s} {kind:15s} {int(last['skipped_steps']):8d}  {scales:16s} {loss:.4f}"
                f" {lone:.4f} {'the same' if same else 'DIFFERENT':>11s}  {apart:.1e}"
            )
            failed |= not same or not apart < 1e-3
    if failed:
        sys.exit("Not all is as on one device.")
    say("All devices decided alike, as one device does.")


def spawn(config):
    """Several processes of this script; ends with an error if one of them does, or if they hang."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *sys.argv, "--port", str(port), "--process"]
    running = [subprocess.Popen([*command, str(i)]) for i in range(config.processes)]
    began = time.monotonic()
    try:
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running):
                sys.exit("One of the processes failed.")
            if time.monotonic() - began > PATIENCE:
                sys.exit(f"The processes did not end within {PATIENCE} seconds.")
            time.sleep(0.05)
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        sys.exit("One of the processes failed.")


def main(config: Config):
    n = config.devices
    if n < 1 or BATCH % n or (n > 1 and n % 2) or n % config.processes:
        sys.exit(f"--devices must be 1, or even, and divide {BATCH}: got {n}.")
    if config.processes > 1 and config.process is None:
        return spawn(config)
    os.environ.pop("XLA_FLAGS", None)  # where the number of devices may be set otherwise
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", n // config.processes)
    if config.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{config.port}",
            config.processes,
            config.process,
            initialization_timeout=60,
            heartbeat_timeout_seconds=30,
            shutdown_timeout_seconds=10,  # one that failed waits for the others, and they for it
        )
    compare(config)


if __name__ == "__main__":
    main(tyro.cli(Config))
