"""A training script that may be killed at any moment; experiments/faults.py kills it.

    python experiments/restartable.py --folder runs/restartable --steps 300     # a few seconds

A step's data depend on the seed and the step alone. What is saved, by Orbax, is all that a step
changes: parameters, and an optimizer state in which are the loss scale and its counters. Beside it
are a digest, since Orbax does not notice every flipped bit, and the length of the log, which is cut
back to it on a restart. So a run that was killed ends with the bits of one that was not.

A newest checkpoint that cannot be read is put aside, and the one before it is used. SIGTERM, as
before a preemption, saves and ends; of several processes, any one may get it. Where a checkpoint
cannot be written, the script says so and ends with status 1.
"""

import dataclasses
import hashlib
import io
import json
import os
import resource
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jscale

WIDTH, BATCH = 32, 16
LIMIT = resource.getrlimit(resource.RLIMIT_FSIZE)


@dataclasses.dataclass(frozen=True)
class Config:
    """A training script that may be killed at any moment."""

    folder: Path
    """Where checkpoints, the log and the result go; what is there is gone on with."""
    steps: int = 300
    """Steps in all."""
    every: int = 5
    """Steps from one checkpoint to the next."""
    cache: Path | None = None
    """Folder for compiled programs, for quick restarts."""
    full_after: int | None = None
    """From this step on, no file may be larger than 100 bytes, as if the disk were full."""
    processes: int = 1
    """How many processes train together."""
    process: int = 0
    """Which of them this is."""
    port: int = 0
    """Where process 0 listens, if there are several."""


tx = jscale.with_loss_scale(
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    jscale.dynamic(growth_interval=7, hysteresis=2),
)


def create():
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "up": jax.random.normal(keys[0], (WIDTH, 4 * WIDTH)) / WIDTH**0.5,
        "down": jax.random.normal(keys[1], (4 * WIDTH, 1)) / (4 * WIDTH) ** 0.5,
    }
    return params, tx.init(params)


def batch(step):
    """Inputs and labels; one step in nine has an input that float16 cannot hold."""
    random = np.random.default_rng([0, step])
    x = random.normal(size=(BATCH, WIDTH)).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True))
    if random.random() < 1 / 9:
        x[random.integers(BATCH), 0] = 1e5
    return x, y


@jax.jit
def train_step(params, opt_state, x, y):
    def loss_fn(params):
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)

    scale = jscale.loss_scale(opt_state)
    loss, grads = jscale.value_and_grad(jscale.autocast(loss_fn), scale)(params)
    updates, opt_state = tx.update(grads, opt_state, params, loss=loss)
    metrics = {"loss": loss, **jscale.metrics(opt_state)}
    return optax.apply_updates(params, updates), opt_state, metrics


def digest(tree, log_bytes=0):
    found = hashlib.sha256(str(log_bytes).encode())
    for path, x in jax.tree.leaves_with_path(tree):
        x = np.asarray(x)
        found.update(f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape} ".encode() + x.tobytes())
    return found.hexdigest()


def restore_newest(checkpoints, folder, abstract):
    """The newest checkpoint that is as it was saved: its step, log length and contents."""
    for step in sorted(checkpoints.all_steps(), reverse=True):
        try:
            saved = checkpoints.restore(step, args=ocp.args.StandardRestore(abstract))
            beside = checkpoints.metadata(step).custom_metadata
            log_bytes = beside.get("log_bytes", 0)
            if digest(saved, log_bytes) != beside.get("digest"):
                raise ValueError("its contents are not those that were saved")
            return step, log_bytes, saved
        except Exception as error:
            aside = folder / "unreadable" / f"{step}-{os.getpid()}"
            reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
            if jax.process_index() == 0:
                aside.parent.mkdir(exist_ok=True)
                (folder / "checkpoints" / str(step)).rename(aside)
                print(
                    f"Checkpoint {step} cannot be read: {reason}. It is kept in {aside}, and the "
                    "one before it is used.",
                    file=sys.stderr,
                )
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices(f"{step} aside")
            checkpoints.reload()
    return 0, 0, None


def train(config):
    stopping = []
    if config.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{config.port}",
            config.processes,
            config.process,
            initialization_timeout=30,
            heartbeat_timeout_seconds=10,
            # How long one that has failed waits for the others, which may wait for it.
            shutdown_timeout_seconds=10,
        )
    else:
        signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    whole, spread = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    is_first = jax.process_index() == 0

    folder = config.folder.absolute()
    options = ocp.CheckpointManagerOptions(max_to_keep=3, cleanup_tmp_directories=True)
    checkpoints = ocp.CheckpointManager(folder / "checkpoints", options=options)
    abstract = jax.tree.map(lambda x: x.update(sharding=whole), jax.eval_shape(create))
    start, log_bytes, saved = restore_newest(checkpoints, folder, abstract)
    params, opt_state = saved or jax.jit(create, out_shardings=whole)()
    log = open(folder / "log.jsonl", "a+b") if is_first else io.BytesIO()
    log.truncate(log_bytes)
    print(f"at step {start}", flush=True)

    step = start
    while step < config.steps:
        x, y = (jax.make_array_from_callback(a.shape, spread, lambda i: a[i]) for a in batch(step))
        params, opt_state, metrics = train_step(params, opt_state, x, y)
        step += 1
        row = {"step": step} | {name: np.asarray(v).item() for name, v in metrics.items()}
        log.write(json.dumps(row).encode() + b"\n")
        stop = stopping or (config.processes > 1 and checkpoints.reached_preemption(step))
        if stop or step == config.steps or step % config.every == 0:
            log.flush()
            if is_first:
                os.fsync(log.fileno())
            full = config.full_after is not None and step >= config.full_after
            if full:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, LIMIT[1]))
            length, state = log.tell(), (params, opt_state)
            beside = {"log_bytes": length, "digest": digest(state, length)}
            # It waits for the one before; that one's errors come out here.
            checkpoints.save(step, args=ocp.args.StandardSave(state), custom_metadata=beside)
            if full:
                checkpoints.wait_until_finished()
        if stop:
            break
    checkpoints.wait_until_finished()
    checkpoints.close()
    if step == config.steps and is_first:
        (folder / "result.json").write_text(
            json.dumps({"digest": digest((params, opt_state)), **row})
        )
    print(f"ended at step {step}", flush=True)


def main(config):
    config.folder.mkdir(parents=True, exist_ok=True)
    if config.cache:
        jax.config.update("jax_compilation_cache_dir", str(config.cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    try:
        train(config)
    except (OSError, ValueError) as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, LIMIT)  # or this could not be written to a file
        sys.exit(f"Stopped: {error}. The checkpoints before are in {config.folder}/checkpoints.")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config))
