"""One small language model, trained in five precisions by one loop.

    python experiments/quickstart.py             # all five, 2 minutes on 2 cores (or: make demo)
    python experiments/quickstart.py --precision float16-dynamic --steps 1000
    python experiments/quickstart.py --resume    # goes on after Ctrl-C, or with more --steps

A transformer of 2 layers, written in float32, learns the bytes of Python's own help texts;
`jscale.autocast` computes its matrix products in the precision of the run. The loss is divided by
256, as data-parallel and accumulated training divide it by a large token count. Most gradients are
then too small for float16 and come out as zero, unless the loss is scaled. Expected, on 2 cores:

    run              bits/byte  zero gradients  skipped  final scale  seconds
    float32              2.690            0.0%        0          2^0     27.4
    bfloat16             2.690            0.0%        0          2^0     40.5
    float16              5.184           91.9%        0          2^0     20.4
    float16-static       2.690            0.0%        0         2^10     17.5
    float16-dynamic      2.695            0.0%        3         2^27     15.1

The text differs between versions of Python, and with it the last digits; without a scale the loss
moves about, and has ended between 5.0 and 5.3.
"""

import dataclasses
import functools
import json
import math
import shlex
import signal
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro
from flax import nnx
from jax.flatten_util import ravel_pytree
from quickstart_pictures import draw, power
from tensorboardX import SummaryWriter
from tqdm import tqdm

import jscale

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 96, 2, 4, 64, 32
LEARNING_RATE = 2e-3
LOG_EVERY = 10  # steps between two looks at the device
LAST = 30  # steps that the table averages over


@dataclasses.dataclass(frozen=True)
class Config:
    """One small language model, trained in five precisions by one loop."""

    precision: Literal[
        "all", "float32", "bfloat16", "float16", "float16-static", "float16-dynamic"
    ] = "all"
    """Which of the five runs to do; plain float16 is unscaled."""
    steps: int = 300
    """Training steps of each run."""
    loss_divisor: float = 256.0
    """What the loss is divided by, as by a large global token count."""
    init_scale: float = 2.0**16
    """Dynamic loss scale: its value at the first step."""
    growth_interval: int = 20
    """Dynamic loss scale: clean steps before it doubles. Long runs usually use 2000."""
    seed: int = 0
    """Seed of the parameters and of the order of the data."""
    out: Path = Path("runs/quickstart")
    """Results folder; if it already holds results, a numbered one beside it is used."""
    resume: bool = False
    """Go on from the last checkpoints in --out."""
    checkpoint_every: int = 100
    """Steps between two checkpoints."""


def five_precisions(config):
    """The dtype of the matrix products, and the rule for the loss scale."""
    dynamic = jscale.dynamic(config.init_scale, growth_interval=config.growth_interval)
    return {
        "float32": (jnp.float32, jscale.off()),
        "bfloat16": (jnp.bfloat16, jscale.off()),
        "float16": (jnp.float16, jscale.static(1)),  # not scaled, but checked for overflow
        "float16-static": (jnp.float16, jscale.static(1024)),
        "float16-dynamic": (jnp.float16, dynamic),
    }


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.proj = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        qkv = self.qkv(self.norm1(x)).reshape(*x.shape[:2], HEADS, -1)
        q, k, v = jnp.split(qkv, 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        causal = jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool))
        weights = jax.nn.softmax(scores, where=causal)
        heads = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + self.proj(heads.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """Bytes in, logits out, as one writes it in float32."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)  # a row for each byte; the output shares it
        self.position = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(CONTEXT))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def cross_entropy(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def create(rule, config):
    model = Transformer(nnx.Rngs(config.seed))
    # Gradients are smaller by the divisor, and so are the norm to clip at and Adam's epsilon.
    small = 1 / config.loss_divisor
    adam = optax.adam(LEARNING_RATE, eps=1e-8 * small)
    tx = jscale.with_loss_scale(optax.chain(optax.clip_by_global_norm(small), adam), rule)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def make_train_step(dtype, divisor):
    """The training step, which is the same for all five."""

    @functools.partial(jscale.autocast, compute_dtype=dtype)
    def loss_fn(model, tokens):
        loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        return loss / divisor, loss

    @functools.partial(nnx.jit, donate_argnames=("model", "optimizer"))
    def train_step(model, optimizer, tokens):
        scale = jscale.loss_scale(optimizer.opt_state)
        (_, loss), grads = jscale.value_and_grad(
            loss_fn, scale, has_aux=True, transform=nnx.value_and_grad
        )(model, tokens)
        optimizer.update(model, grads, loss=loss)
        return {
            "bits_per_byte": loss / math.log(2),
            "zero_share": jnp.mean(ravel_pytree(grads)[0] == 0),
            **jscale.metrics(optimizer.opt_state),
            "grad_scale": scale,  # the one that this step used, where metrics has the next one
        }

    return train_step


def batch(text, seed, step):
    """A function of seed and step alone, so that a resumed run sees the same data."""
    starts = np.random.default_rng([seed, step]).integers(0, len(text) - CONTEXT, BATCH)
    return text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)


class Log:
    """The metrics of one run: in memory, as JSON lines, and as TensorBoard events."""

    def __init__(self, folder, start):
        path = folder / "metrics.jsonl"
        # A run that was killed may have logged steps after its last checkpoint: they come again.
        lines = path.read_text().splitlines(keepends=True)[:start] if start else []
        path.write_text("".join(lines))
        self.rows = [json.loads(line) for line in lines]
        self.file = path.open("a")
        self.events = SummaryWriter(str(folder), purge_step=start)

    def write(self, pending):
        for metrics in jax.device_get(pending):  # only here does the host wait for the device
            row = {"step": len(self.rows) + 1} | {k: x.item() for k, x in metrics.items()}
            # JSON has no inf, which the norm of overflowed gradients is.
            row = {k: x if math.isfinite(x) else None for k, x in row.items()}
            self.rows.append(row)
            self.file.write(json.dumps(row) + "\n")
            for k, x in row.items():
                if x is not None:
                    self.events.add_scalar(k, x, row["step"])
        self.file.flush()
        pending.clear()


def train(name, dtype, rule, text, config, interrupted):
    """Train up to `config.steps`, from the last checkpoint if there is one."""
    folder = config.out.absolute() / name
    folder.mkdir(exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=3, enable_async_checkpointing=False)
    checkpoints = ocp.CheckpointManager(folder / "checkpoints", options=options)
    start = checkpoints.latest_step() or 0
    new = functools.partial(create, rule, config)
    if start:
        # Shapes and dtypes of parameters, moments, counters and loss scale; nothing is computed.
        graph, abstract = nnx.split(nnx.eval_shape(new))
        state = checkpoints.restore(start, args=ocp.args.StandardRestore(abstract))
        model, optimizer = nnx.merge(graph, state)
    else:
        model, optimizer = new()

    train_step = make_train_step(dtype, config.loss_divisor)
    log, pending, began = Log(folder, start), [], time.perf_counter()
    bar = tqdm(desc=f"{name:15}", initial=start, total=config.steps)
    for step in range(start, config.steps):
        pending.append(train_step(model, optimizer, batch(text, config.seed, step)))
        done = step + 1
        save = interrupted or done == config.steps or done % config.checkpoint_every == 0
        if save or done % LOG_EVERY == 0:
            log.write(pending)
            row = log.rows[-1]
            shown = {"bits": f"{row['bits_per_byte']:.3f}", "grad_scale": power(row["grad_scale"])}
            bar.set_postfix(shown, refresh=False)
            bar.update(done - bar.n)
            jscale.check(optimizer.opt_state)
        if save:
            state = nnx.state((model, optimizer))
            checkpoints.save(done, args=ocp.args.StandardSave(state))
        if interrupted:
            break
    seconds = time.perf_counter() - began
    for resource in (bar, log.file, log.events, checkpoints):
        resource.close()
    columns = {k: np.array([row[k] for row in log.rows]) for k in log.rows[0]}
    return model, columns, seconds


def table(results):
    lines = [f"{'run':15}  bits/byte  zero gradients  skipped  final scale  seconds"]
    for name, (_, columns, seconds) in results.items():
        bits, zeros = (columns[k][-LAST:].mean() for k in ("bits_per_byte", "zero_share"))
        skipped, scale = (columns[k][-1] for k in ("skipped_steps", "grad_scale"))
        lines.append(
            f"{name:15}{bits:11.3f}{zeros:16.1%}{skipped:9}{power(scale):>13}{seconds:9.1f}"
        )
    return "\n".join(lines)


def claim_folder(config, settings):
    """Where results go: never over others, and with --resume only on a run with these settings."""
    out, number = config.out, 1
    if config.resume:
        if not (out / "config.json").exists():
            sys.exit(f"--resume: there is nothing to resume in {out}.")
        for name, before in json.loads((out / "config.json").read_text()).items():
            if before != settings[name]:
                sys.exit(f"--resume: {out} was started with {name} {before}, not {settings[name]}.")
        return out
    while (out / "config.json").exists():
        number += 1
        out = Path(f"{config.out}-{number}")
    if number > 1:
        print(f"{config.out} has results already; these go to {out}.")
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(settings))
    return out


def main():
    config = tyro.cli(Config)
    for name, least in (("steps", 1), ("checkpoint_every", 1), ("seed", 0)):
        if getattr(config, name) < least:
            option = name.replace("_", "-")
            sys.exit(f"--{option} must be at least {least}, got {getattr(config, name)}.")
    if not 0 < config.loss_divisor < math.inf:
        sys.exit(f"--loss-divisor must be positive and finite, got {config.loss_divisor}.")
    try:
        runs = five_precisions(config)
    except ValueError as error:
        sys.exit(str(error))
    if config.precision != "all":
        runs = {config.precision: runs[config.precision]}

    text = "".join(topics[name] for name in sorted(topics))
    text = np.frombuffer(text.encode(), np.uint8)
    # What a resumed run must share with its beginning; the text differs between Pythons.
    names = ("loss_divisor", "init_scale", "growth_interval", "seed")
    settings = {name: getattr(config, name) for name in names} | {"text_bytes": len(text)}
    asked = config.out
    try:
        config = dataclasses.replace(config, out=claim_folder(config, settings))
    except OSError as error:
        sys.exit(f"--out: {error}.")

    interrupted = []

    def finish_step(signum, frame):
        interrupted.append(signum)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("\nFinishing this step and saving; Ctrl-C again stops at once.", file=sys.stderr)

    signal.signal(signal.SIGINT, finish_step)
    results = {}
    for name, (dtype, rule) in runs.items():
        try:
            results[name] = train(name, dtype, rule, text, config, interrupted)
        except FloatingPointError as error:
            sys.exit(f"{name}: {error}")
        if interrupted:
            again = sys.argv + ["--resume"] * (not config.resume)
            again += ["--out", str(config.out)] * (config.out != asked)
            print(f"Stopped and saved. To go on: {shlex.join([sys.executable, *again])}")
            sys.exit(130)

    model, _, _ = next(iter(results.values()))
    tokens = batch(text, config.seed, config.steps)
    grads = jax.grad(cross_entropy)(model(tokens[:, :-1]), tokens[:, 1:]) / config.loss_divisor
    draw(config.out, results, grads)
    print(table(results))
    print(f"Pictures, metrics and checkpoints are in {config.out}.")


if __name__ == "__main__":
    main()
