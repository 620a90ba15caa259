"""Small learning rates: weights in float16 do not move, unless updates add up in float32.

    python experiments/master_weights.py           # 1 minute on 2 cores
    python experiments/master_weights.py --short   # 20 seconds

As Micikevicius et al. (2018) say, who keep float32 copies for it. A perceptron of two hidden layers
learns, from 16 characters of Python's own help texts, the next one, in 600 steps; with weights that

- are float32, and cast to float16 for each product;
- are float16;
- are float16, with copies: `jscale.with_master_weights`.

In all of them products are in float16, the loss is scaled by 256, and moments are float32. Printed
are bits per character of held-out text; and of the weights that have a gradient, how many a step
leaves as they are, where updates add up: the weights themselves, or their copies. With Python 3.13:

                      bits per character           weights unchanged
                  float32  float16   copies    float32  float16   copies
    Adam   1e-03    2.933    2.933    2.933       0.0%     7.4%     0.0%
    Adam   1e-04    4.009    4.034    4.009       0.0%    40.6%     0.0%
    Adam   3e-05    4.359    4.531    4.359       0.0%    53.4%     0.0%
    Adam   1e-05    5.634    6.398    5.634       0.0%    81.9%     0.0%
    SGD    3e-01    2.979    2.979    2.979       0.0%     5.8%     0.0%
    SGD    3e-02    3.940    3.949    3.940       0.0%    34.2%     0.0%
    SGD    3e-03    4.826    5.138    4.826       0.0%    80.0%     0.0%

At 1e-3 it makes no difference; the smaller the rate, the more is lost. With copies, all is as in
float32. (These runs are short: at the smallest rates nothing has trained long.)
"""

import dataclasses
import functools
import math
import warnings
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import jscale

CONTEXT, EMBEDDING, WIDTH, BATCH = 16, 16, 128, 256
RATES = {"Adam": (1e-3, 1e-4, 3e-5, 1e-5), "SGD": (0.3, 0.03, 0.003)}
WEIGHTS = ("float32", "float16", "copies")


@dataclasses.dataclass(frozen=True)
class Config:
    """Small learning rates, with and without float32 copies of float16 weights."""

    steps: int = 600
    """Training steps of each run."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    short: bool = False
    """The smallest rate of each optimizer only."""


def read_text():
    """The text as numbers of characters, and how many there are."""
    text = np.array(list("".join(topics[name] for name in sorted(topics))))
    characters, numbers = np.unique(text, return_inverse=True)
    return numbers.astype(np.int32), len(characters)


def windows(text, starts):
    return text[starts[..., None] + np.arange(CONTEXT + 1)]


def new_weights(characters, key):
    sizes = {
        "embed": (characters, EMBEDDING),
        "first": (CONTEXT * EMBEDDING, WIDTH),
        "second": (WIDTH, WIDTH),
        "head": (WIDTH, characters),
    }
    keys = jax.random.split(key, len(sizes))
    draw = lambda key, shape: jax.random.normal(key, shape) / math.sqrt(shape[0])
    weights = {name: draw(k, s) for k, (name, s) in zip(keys, sizes.items(), strict=True)}
    return weights | {"bias1": jnp.zeros(WIDTH), "bias2": jnp.zeros(WIDTH)}


@jscale.autocast
def loss_fn(weights, window):
    w = jax.tree.map(lambda x: x.astype(jnp.float32), weights)  # or sums would be in float16 too
    x = (w["embed"] * 4)[window[:, :-1]].reshape(len(window), -1)
    x = jnp.tanh(x @ w["first"] + w["bias1"])
    x = jnp.tanh(x @ w["second"] + w["bias2"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ w["head"], window[:, -1]).mean()


@functools.partial(jax.jit, static_argnames=("optimizer", "kind"))
def train(weights, batches, rate, optimizer, kind):
    """The weights after training, and the share of them that a step left as they were."""
    inner = optax.adam(rate) if optimizer == "Adam" else optax.sgd(rate)
    tx = jscale.with_loss_scale(inner, jscale.static(256))
    if kind == "copies":
        tx = jscale.with_master_weights(tx)
    if kind != "float32":
        weights = jax.tree.map(lambda x: x.astype(jnp.float16), weights)

    def step(carry, window):
        weights, state = carry
        grads = jscale.grad(loss_fn, jscale.loss_scale(state))(weights, window)
        updates, new = tx.update(grads, state, weights)
        after = optax.apply_updates(weights, updates)
        sums = (state.master, new.master) if kind == "copies" else (weights, after)
        same = jax.tree.map(lambda g, a, b: jnp.sum((g != 0) & (a == b)), grads, *sums)
        used = jax.tree.map(jnp.count_nonzero, grads)
        return (after, new), optax.tree.sum(same) / optax.tree.sum(used)

    (weights, _), same = jax.lax.scan(step, (weights, tx.init(weights)), batches)
    return weights, same.mean()


def main(config: Config):
    warnings.filterwarnings("ignore", "parameters in float16")  # which is the point
    text, characters = read_text()
    end = len(text) * 9 // 10
    random = np.random.default_rng(config.seed)
    batches = windows(text, random.integers(0, end - CONTEXT, (config.steps, BATCH)))
    held_out = windows(text, random.integers(end, len(text) - CONTEXT, 4096))
    weights = new_weights(characters, jax.random.key(config.seed))
    evaluate = jax.jit(loss_fn)

    columns = "".join(f"{kind:>9s}" for kind in WEIGHTS)
    print(f"{'':18s}bits per character           weights unchanged\n{'':12s}{columns}  {columns}")
    for optimizer, rates in RATES.items():
        for rate in rates[-1:] if config.short else rates:
            print(f"{optimizer:5s}{rate:7.0e}", end="", flush=True)
            runs = [train(weights, batches, rate, optimizer, kind) for kind in WEIGHTS]
            bits = [float(evaluate(after, held_out)) / math.log(2) for after, _ in runs]
            print("".join(f"{x:9.3f}" for x in bits), end="  ")
            print("".join(f"{float(same):9.1%}" for _, same in runs), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Config))
