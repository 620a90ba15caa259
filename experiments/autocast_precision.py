"""Whose float16 gradients are nearer to exact ones: autocast's, or those of float16 layers?

Three ways to put the products of one model into float16, on the same float32 parameters, data and
loss scale, with the loss in float32: `jscale.autocast` of the model as it is written; all float16,
as with jmp (parameters and inputs cast, so that everything is float16 but what Flax's norms compute
inside); and Flax's own `dtype=float16` layers. The error of a gradient is its distance from the
float64 gradient, over the norm of that: the median of the seeds, and the worst of any parameter in
any seed. `rounded` is the float32 gradient at parameters and inputs rounded to float16.

    python experiments/autocast_precision.py        # 1 minute on 2 cores

With jax 0.12:

                  float32  rounded  autocast  all float16  Flax float16  nearest  products
    transformer   5.1e-07  7.4e-04   1.1e-03      1.3e-03       1.3e-03  5/5      13/13
      worst       7.3e-07  9.8e-04   1.6e-03      3.2e-03       3.2e-03
    convnet       4.6e-07  4.5e-04   7.6e-04      1.0e-03       1.0e-03  5/5      7/7
      worst       1.3e-06  8.4e-04   1.3e-03      1.9e-03       1.8e-03
    lstm          2.1e-07  3.5e-04   4.5e-04      1.2e-03       1.1e-03  5/5      129/129
      worst       3.9e-07  6.5e-04   8.8e-04      1.8e-03       2.1e-03
    contrastive   3.7e-07  4.9e-04   8.1e-04      1.4e-03       1.4e-03  5/5      5/5
      worst       8.4e-07  9.5e-04   1.9e-03      2.9e-03       2.9e-03
    convnet-relu  3.1e-07  1.0e-02   1.4e-02      1.3e-02       1.3e-02  2/5      7/7
      worst       1.0e-06  5.0e-02   5.6e-02      6.4e-02       6.4e-02

Autocast is nearest in each seed (`nearest`; also in each of 20) with as many float16 products, and
60 to 80 % of its error is there already with `rounded`, which no float16 product escapes. The worst
parameters of float16 layers are often biases, whose gradients they add up in float16. Of the last
model nothing is claimed: a ReLU's gate that falls the other way changes the gradient by a jump, and
the few that do (some 2 in 10,000) hide all else. In 60 seeds the three were alike there.

A CPU stands for a GPU here: on both, XLA adds up float16 products, convolutions and their gradients
in float32 and rounds once; other sums of float16 numbers it adds up in float16.
"""

import dataclasses
import functools
import sys
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import linen as nn

import jscale

WAYS = ("float32", "rounded", "autocast", "all float16", "Flax float16")


def at_least_f32(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Transformer(nn.Module):
    """Tokens to logits. Softmax is in float32 among float16 layers too, as careful authors do."""

    depth: int
    dtype: Any = None
    loss = staticmethod(cross_entropy)

    @staticmethod
    def data(key):
        tokens = jax.random.randint(key, (8, 33), 0, 64)
        return (tokens[:, :-1],), tokens[:, 1:]

    @nn.compact
    def __call__(self, tokens):
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        norm = lambda x: nn.LayerNorm(dtype=self.dtype)(x)
        x = nn.Embed(64, 64, dtype=self.dtype)(tokens)
        x = x + nn.Embed(32, 64, dtype=self.dtype)(jnp.arange(32))
        causal = jnp.tril(jnp.ones((32, 32), bool))
        for _ in range(self.depth):
            q, k, v = jnp.split(dense(192)(norm(x)).reshape(8, 32, 4, 48), 3, axis=-1)
            scores = at_least_f32(jnp.einsum("bqhd,bkhd->bhqk", q, k)) / 4
            weights = nn.softmax(jnp.where(causal, scores, -1e9)).astype(v.dtype)
            x = x + dense(64)(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))
            x = x + dense(64)(nn.gelu(dense(256)(norm(x))))
        return dense(64)(norm(x))


class ConvNet(nn.Module):
    """Images to logits: residual blocks, normed by the statistics of the batch."""

    depth: int
    dtype: Any = None
    activation: Any = nn.silu
    loss = staticmethod(cross_entropy)

    @staticmethod
    def data(key):
        keys = jax.random.split(key)
        images = jax.random.normal(keys[0], (16, 16, 16, 3))
        return (images,), jax.random.randint(keys[1], (16,), 0, 10)

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = lambda x: nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)
        for i in range(self.depth):
            width, stride = 16 << i, 1 + (i > 0)
            y = self.activation(norm(conv(width, (3, 3), stride)(x)))
            x = norm(conv(width, (3, 3))(y)) + conv(width, (1, 1), stride)(x)
            x = self.activation(x)
        return nn.Dense(10, dtype=self.dtype)(x.mean((1, 2)))


class LSTM(nn.Module):
    """Sequences to themselves, four steps late."""

    depth: int
    dtype: Any = None
    loss = staticmethod(lambda y, late: jnp.square(y - late)[:, 4:].mean())

    @staticmethod
    def data(key):
        x = jax.random.normal(key, (16, 32, 16))
        return (x,), jnp.roll(x, 4, axis=1)

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            zeros = jnp.zeros((16, 64), x.dtype)
            x = nn.RNN(nn.OptimizedLSTMCell(64, dtype=self.dtype))(x, initial_carry=(zeros, zeros))
        return nn.Dense(16, dtype=self.dtype)(x)


class Contrastive(nn.Module):
    """Sets to unit vectors, by attention; each is to find its noisy copy among its neighbours.

    Masks, logsumexp and norms, in the model and in the loss.
    """

    depth: int
    dtype: Any = None

    @staticmethod
    def data(key):
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (16, 12, 32))
        x = jnp.concatenate([x, x + 0.3 * jax.random.normal(keys[1], x.shape)])
        mask = jnp.arange(12) < jax.random.randint(keys[2], (32, 1), 4, 13)
        i = jnp.arange(16)
        return (x, mask), abs(i[:, None] - i[None, :]) < 12

    @nn.compact
    def __call__(self, x, mask):
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        for _ in range(self.depth):
            x = nn.gelu(dense(64)(x))
        x = dense(64)(x)
        scores = dense(1, use_bias=False)(x)[..., 0]
        pooled = jnp.sum(nn.softmax(jnp.where(mask, scores, -1e9))[..., None] * x, axis=1)
        a, b = jnp.split(pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True), 2)
        return a @ b.T, pooled

    @staticmethod
    def loss(outputs, near):
        similarity, pooled = outputs
        logits = jnp.where(near, 10 * similarity, -1e9)
        total = nn.logsumexp(logits, axis=1)
        loss = jnp.mean(total - jnp.diagonal(logits)) + 1e-2 * jnp.square(total).mean()
        return loss + 1e-2 * jnp.linalg.norm(pooled)


CLAIMED = dict(transformer=Transformer, convnet=ConvNet, lstm=LSTM, contrastive=Contrastive)
MODELS = CLAIMED | {"convnet-relu": functools.partial(ConvNet, activation=nn.relu)}


@dataclasses.dataclass(frozen=True)
class Config:
    """Errors of float16 gradients: autocast, all float16, and Flax's float16 layers."""

    models: tuple[Literal[*MODELS], ...] = tuple(MODELS)
    """Which models to measure."""
    seeds: int = 5
    """How many draws of parameters and data."""
    depth: int = 2
    """How many blocks or layers each model has."""
    loss_scale: float = 2.0**10
    """The same for all; nothing overflows."""


def to(dtype, tree):
    return jscale.Policy(dtype).cast_to_compute(tree)


def make_loss(model, way):
    """The loss as a function of float32 parameters."""
    if way == "Flax float16":
        model = model.clone(dtype=jnp.float16)

    def loss_fn(params, inputs, targets):
        if way == "all float16":
            params, inputs = to(jnp.float16, (params, inputs))
        outputs, _ = model.apply({"params": params}, *inputs, mutable=["batch_stats"])
        return model.loss(jax.tree.map(at_least_f32, outputs), targets)

    return jscale.autocast(loss_fn) if way == "autocast" else loss_fn


def f16_products(loss_fn, *args):
    """`5/6`: of six products in the forward pass five run in float16."""
    names = "dot_general", "conv_general_dilated"
    rows = [row for row in jscale.explain(loss_fn, jnp.float32)(*args) if row.name in names]
    low = sum(row.count for row in rows if row.dtype == "float16")
    return f"{low}/{sum(row.count for row in rows)}"


def compare(name, config):
    """By way: the error in each seed; the largest of any parameter; how many float16 products."""
    model = MODELS[name](config.depth)
    losses = {way: make_loss(model, way) for way in WAYS}
    runs = {way: jax.jit(jscale.grad(fun, config.loss_scale)) for way, fun in losses.items()}
    runs["rounded"] = runs["float32"]
    errors, worst = {way: [] for way in WAYS}, dict.fromkeys(WAYS, 0.0)

    @jax.jit
    def draw(seed):
        keys = jax.random.split(jax.random.key(seed))
        inputs, targets = model.data(keys[0])
        return (model.init(keys[1], *inputs)["params"], inputs), targets

    for seed in range(config.seeds):
        args, targets = jax.device_get(draw(seed))
        rounded = to(np.float32, to(np.float16, args))
        with jax.enable_x64(True):
            exact = jax.device_get(runs["float32"](*to(np.float64, args), to(np.float64, targets)))
        exact = jax.tree.leaves(exact)
        norms = [np.linalg.norm(x) for x in exact]
        for way, run in runs.items():
            grads = jax.device_get(run(*(rounded if way == "rounded" else args), targets))
            pairs = zip(jax.tree.leaves(grads), exact, strict=True)
            apart = [np.linalg.norm(x - y) for x, y in pairs]
            errors[way].append(np.linalg.norm(apart) / np.linalg.norm(norms))
            worst[way] = max(worst[way], *np.divide(apart, norms))
            if not np.isfinite(errors[way][-1]):
                sys.exit(f"{name}, {way}: overflow at --loss-scale {config.loss_scale:g}.")
    args = jax.device_put((*args, targets))
    return errors, worst, {way: f16_products(losses[way], *args) for way in WAYS[2:]}


def main():
    config = tyro.cli(Config)
    print(f"{'':12}", *WAYS, "nearest", "products", sep="  ")
    for name in config.models:
        errors, worst, products = compare(name, config)
        nearest = sum(np.argmin([errors[way] for way in WAYS[2:]], axis=0) == 0)
        medians = [f"{np.median(errors[way]):{len(way)}.1e}" for way in WAYS]
        f16 = " ".join({*products.values()})
        print(f"{name:12}", *medians, f"{f'{nearest}/{config.seeds}':7}", f16, sep="  ")
        print(f"{'  worst':12}", *(f"{worst[way]:{len(way)}.1e}" for way in WAYS), sep="  ")


if __name__ == "__main__":
    main()
