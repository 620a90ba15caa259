"""Records what a loss scale has to follow: the gradients of real, small training runs.

At every step of a float32 run it notes log2 of the largest gradient of the parameters, which is
what a rule can see; the loss; and `limit`, log2 of the largest power of two at which the float16
backward pass of the same step does not overflow, which is what decides. `scaler_shootout.py`
replays these against the rules, so that every rule meets the same gradients.

    python experiments/record_amax.py            # some 5 minutes on 2 cores; writes runs/recorded
    python experiments/record_amax.py --runs rnn --steps 100

What is in experiments/recorded was written so, by jax 0.12:

    transformer   300 steps  loss 5.83 to 1.80  log2 amax -5.5 to -1.1   limit 17.0 to 22.0
    convnet      3000 steps  loss 3.57 to 0.01  log2 amax -10.9 to 0.6   limit 15.0 to 23.0
    rnn          2000 steps  loss 4.99 to 1.31  log2 amax -6.5 to -1.3   limit 18.0 to 22.0
    diverging     480 steps  loss 4.99 to 15.68  log2 amax -5.6 to 12.2   limit -25.0 to 21.0

A limit of -25 means that no scale fits, since the forward pass overflows.
"""

import dataclasses
import functools
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import quickstart
import tyro
from flax import nnx

import jscale

NONE = -25  # the limit where no scale fits
TEXT = np.frombuffer("".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


@dataclasses.dataclass(frozen=True)
class Run:
    """A model with its loss, data and optimizer."""

    init: object  # key -> params
    loss: object  # params, batch -> f32[]
    batch: object  # step -> arrays
    tx: optax.GradientTransformation
    steps: int


def cross_entropy(logits, targets):
    """With one use of the logits, so that their cotangents meet in float32."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


def transformer():
    """The quickstart's model and optimizer, with its loss not divided."""
    graph = nnx.split(nnx.eval_shape(lambda: quickstart.Transformer(nnx.Rngs(0))))[0]

    def loss(params, tokens):
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:])

    return Run(
        init=lambda key: nnx.state(quickstart.Transformer(nnx.Rngs(0))),
        loss=loss,
        batch=lambda step: quickstart.batch(TEXT, 0, step),
        tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(quickstart.LEARNING_RATE)),
        steps=300,
    )


def convnet():
    """Gratings of ten directions under noise: three convolutions, ReLU, momentum, cosine decay."""
    sizes = [(5, 5, 1, 16), (3, 3, 16, 32), (3, 3, 32, 64)]
    y, x = np.mgrid[:16, :16]

    def init(key):
        keys = jax.random.split(key, 4)
        he = lambda key, shape: jax.random.normal(key, shape) * (2 / np.prod(shape[:-1])) ** 0.5
        filters = [he(*pair) for pair in zip(keys[:3], sizes, strict=True)]
        return {"filters": filters, "out": he(keys[3], (64, 10))}

    def batch(step):
        rng = np.random.default_rng(step)
        label, phase = rng.integers(0, 10, 32), rng.uniform(0, 2 * np.pi, (32, 1, 1))
        angle = np.pi / 10 * label[:, None, None]
        waves = np.sin(0.9 * (x * np.cos(angle) + y * np.sin(angle)) + phase)
        images = waves + rng.normal(0, 2, waves.shape)
        return images[..., None].astype(np.float32), label.astype(np.int32)

    def loss(params, data):
        h, label = data
        for w in params["filters"]:
            dims = ("NHWC", "HWIO", "NHWC")
            h = jax.nn.relu(jax.lax.conv_general_dilated(h, w, (2, 2), "SAME", None, None, dims))
        return cross_entropy(h.mean((1, 2)) @ params["out"], label)

    schedule = optax.cosine_decay_schedule(0.05, 3000)
    return Run(init, loss, batch, optax.sgd(schedule, momentum=0.9), 3000)


def rnn(tx, steps):
    """A recurrent language model on bytes, 48 steps back, tanh."""

    def init(key):
        keys = jax.random.split(key, 3)
        normal = lambda key, *shape: jax.random.normal(key, shape) / shape[0] ** 0.5
        return {
            "embed": normal(keys[0], 128, 64) * 8,
            "recur": jnp.concatenate([normal(keys[1], 64, 128), jnp.eye(128)]),
            "out": normal(keys[2], 128, 128),
        }

    def batch(step):
        rng = np.random.default_rng(step)
        starts = rng.integers(0, len(TEXT) - 49, 32)
        return (TEXT[starts[:, None] + np.arange(49)] & 127).astype(np.int32)

    def loss(params, tokens):
        def turn(h, x):
            h = jnp.tanh(jnp.concatenate([x, h], -1) @ params["recur"])
            return h, h

        xs = jnp.moveaxis(params["embed"][tokens[:, :-1]], 1, 0)
        _, hs = jax.lax.scan(turn, jnp.zeros((32, 128)), xs)
        return cross_entropy(jnp.moveaxis(hs, 0, 1) @ params["out"], tokens[:, 1:])

    return Run(init, loss, batch, tx, steps)


RUNS = {
    "transformer": transformer,
    "convnet": convnet,
    "rnn": lambda: rnn(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adam(optax.warmup_constant_schedule(0.0, 2e-3, 300)),
        ),
        2000,
    ),
    # The learning rate rises until it is far too high, and nothing is clipped.
    "diverging": lambda: rnn(optax.sgd(optax.linear_schedule(0.0, 3.0, 800), momentum=0.9), 480),
}


def record(run):
    """log2 amax, loss and limit of each step."""
    half = jscale.autocast(run.loss)

    def fits(k, params, batch):
        grads = jscale.grad(half, jnp.ldexp(jnp.float32(1), k))(params, batch)
        return jnp.isfinite(optax.tree.norm(grads))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, k, batch):
        loss, grads = jax.value_and_grad(run.loss)(params, batch)
        amax = jscale.Observation(True, grads=grads).amax
        # From where it was: upwards by at most 3 while it fits, or downwards until it does.
        first, start = fits(k, params, batch), k

        def up(carry):
            k, _ = carry
            more = fits(k + 1, params, batch)
            return k + more.astype(jnp.int32), more

        def down(carry):
            k, _ = carry
            enough = fits(k, params, batch)
            return k - (~enough).astype(jnp.int32), enough

        k, _ = jax.lax.while_loop(
            lambda c: c[1] & (c[0] < start + 3), up, (k - (~first).astype(jnp.int32), first)
        )
        k, _ = jax.lax.while_loop(lambda c: ~c[1] & (c[0] > NONE), down, (k, first))
        k = jnp.maximum(k, NONE)
        updates, state = run.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, k, (loss, jnp.log2(amax), k)

    params = run.init(jax.random.key(0))
    state, k, rows = run.tx.init(params), jnp.int32(16), []
    for i in range(run.steps):
        params, state, k, row = step(params, state, k, run.batch(i))
        rows.append(row)
    return np.array(jax.device_get(rows), np.float32).T


@dataclasses.dataclass(frozen=True)
class Config:
    """Record the gradients of small training runs."""

    runs: tuple[str, ...] = tuple(RUNS)
    """Which runs."""
    steps: int | None = None
    """Fewer steps than each run has."""
    out: Path = Path("runs/recorded")
    """Where the files go."""


def main():
    config = tyro.cli(Config)
    config.out.mkdir(parents=True, exist_ok=True)
    for name in config.runs:
        run = RUNS[name]()
        run = dataclasses.replace(run, steps=min(config.steps or run.steps, run.steps))
        loss, log2_amax, limit = record(run)
        path = config.out / f"{name}.npz"
        np.savez_compressed(path, loss=loss, log2_amax=log2_amax, limit=limit.astype(np.int8))
        ranges = [f"{x.min():.1f} to {x.max():.1f}" for x in (log2_amax, limit)]
        print(
            f"{name:12}{len(loss):5} steps  loss {loss[0]:.2f} to {loss[-1]:.2f}  log2 amax "
            f"{ranges[0]:13}  limit {ranges[1]}"
        )


if __name__ == "__main__":
    main()
