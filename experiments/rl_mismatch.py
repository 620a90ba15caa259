"""The engine that samples and the engine that trains disagree: in bfloat16 eight times more.

    python experiments/rl_mismatch.py             # some 3 minutes on 2 cores
    python experiments/rl_mismatch.py --short     # half a minute; two dtypes and no reward

Reinforcement learning of language models samples with one engine and differentiates with another.
Both have the same weights, but round in other places: here one computes whole sequences, the other
token by token with a cache of keys and values, with products joined or split and attention
normalised later. "Defeating the Training-Inference Mismatch via FP16" (Qi et al., 2025) lays the
collapse of such training in bfloat16 to this gap.

First, models of 4 layers that have learnt some text write 64 texts of 257 bytes. Measured is what
the trainer makes of them: the difference of the log-probabilities of what was written, the
divergence of the two engines over all bytes, and the deviation, between texts, of the differences'
sum. Then models of 2 layers that sort ten digits are trained by reward (REINFORCE, 8 answers to each
of 8 prompts, a reward only for what is right throughout, its mean and deviation over the answers to
a prompt taken off; one step for each batch), float16 with a dynamic loss scale. As a control, a
sampler whose weights are rounded to float8. Expected (means of three seeds and their standard
deviation; the last two measures are those of the last 50 steps, over ten bytes; skipped of 450
steps):

    text                  mean |dlogp|        token KL            std of the sum
      float32             3.4e-07 +-7.6e-09   3.8e-09 +-1.2e-09   7.5e-06 +-4.2e-07
      bfloat16            6.2e-03 +-2.4e-04   3.1e-05 +-1.6e-06   1.3e-01 +-7.3e-03
      float16             7.3e-04 +-3.0e-05   6.7e-07 +-3.5e-08   2.0e-02 +-6.9e-04
      bfloat16 / float16  8.4 +-0.0           47.0 +-0.2          6.4 +-0.4

    reward                    first 50 steps      last 50 steps       mean |dlogp|        std of the sum      skipped  scale
      float32                 0.363 +-0.044       0.660 +-0.055       1.4e-07 +-1.6e-08   1.8e-06 +-8.9e-08   0.0      2^0
      bfloat16                0.380 +-0.041       0.667 +-0.042       4.1e-03 +-2.8e-04   5.4e-02 +-4.3e-03   0.0      2^0
      float16                 0.362 +-0.042       0.665 +-0.040       5.1e-04 +-4.2e-05   6.8e-03 +-3.3e-04   0.7      2^15, 2^17
      float16, float8 sampler 0.356 +-0.034       0.619 +-0.047       5.6e-02 +-7.5e-03   7.1e-01 +-8.4e-02   0.7      2^16, 2^17

Eight is what three bits of mantissa make. But the reward does not feel it here: the three dtypes
end within the spread of the seeds, and bfloat16 even first. An answer has ten bytes, and the
engines' ratio of its probability is within some 5 % of 1. The control's is off by a factor of two,
thirteen times bfloat16's gap, and even that costs but 0.05 of the reward, and breaks nothing. So
this toy shows the gap, but not the collapse that was published for long answers of large models.

Without `xla_allow_excess_precision=false`, XLA on a CPU leaves out roundings to bfloat16 within what
it fuses, which moves log-probabilities by as much as the gap itself; those to float16 it keeps.
"""  # noqa: E501

import dataclasses
import functools
import os
from pydoc_data.topics import topics

# Or XLA may leave out roundings between the operations that it fuses, which are the subject here.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import jscale

HEADS, VOCABULARY = 4, 128
LENGTH = 256  # tokens over which the log-ratio of a sequence is summed
DIGITS, MARK = 10, ord(">")  # the task: "3141592653>1123345569"
PROMPT, WHOLE = DIGITS + 1, 2 * DIGITS + 1
GROUP, GROUPS = 8, 8  # answers to a prompt, prompts in a batch
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
CONTROL = "float16, float8 sampler"  # whose weights are rounded to float8
MEASURES = "mean |dlogp|", "token KL", "std of the sum"  # the last over a sequence


@dataclasses.dataclass(frozen=True)
class Config:
    """How far two engines are apart in bfloat16 and in float16, and whether training feels it."""

    seeds: int = 3
    """Models, and runs of each kind."""
    text_steps: int = 100
    """Steps of pre-training on text, before the gap is measured."""
    task_steps: int = 200
    """Supervised steps on the task, before it is trained by reward."""
    steps: int = 450
    """Steps of training by reward."""
    short: bool = False
    """A few steps of one seed, in half a minute: the first table, roughly, and no reward."""


# One model, two engines.


def new_params(key, layers, width, length):
    keys = iter(jax.random.split(key, 9))
    new = lambda *shape, size: size * jax.random.normal(next(keys), shape)
    matrices = lambda n, m: new(layers, n, m, size=n**-0.5)
    return {
        "tokens": new(VOCABULARY, width, size=0.3),
        "places": new(length, width, size=0.3),
        "layers": {name: matrices(width, width) for name in ("query", "key", "value", "out")}
        | {"up": matrices(width, 4 * width), "down": matrices(4 * width, width)}
        | {name: jnp.ones((layers, width)) for name in ("attend", "think")},
        "last": jnp.ones(width),
        "head": new(width, VOCABULARY, size=width**-0.5),
    }


def unit(x):
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def heads(x):
    return x.reshape(*x.shape[:-1], HEADS, -1)


def trainer(params, tokens, dtype):
    """Log-probabilities f32[b, t, v] of what follows each token, of whole sequences at once."""
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    norm = lambda x, gain: unit(x).astype(dtype) * gain
    length = tokens.shape[1]
    seen = jnp.tril(jnp.ones((length, length), bool))

    def block(x, p):
        h = norm(x, p["attend"])
        q, k, v = (heads(h @ p[name]) for name in ("query", "key", "value"))
        scores = jnp.einsum("bthk,bshk->bhts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
        shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(dtype)
        x += jnp.einsum("bhts,bshk->bthk", shares, v).reshape(x.shape) @ p["out"]
        x += jax.nn.gelu(norm(x, p["think"]) @ p["up"]) @ p["down"]
        return x, None

    x = params["tokens"][tokens] + params["places"][:length]
    x, _ = jax.lax.scan(block, x, params["layers"])
    return jax.nn.log_softmax((norm(x, params["last"]) @ params["head"]).astype(jnp.float32))


def sampler_step(params, cache, token, place, dtype):
    """One more token for each sequence: log-probabilities f32[b, v] of the next one, and the cache.

    What it does otherwise than `trainer`, as inference engines do: keys and values come from a
    cache, their products are one, a norm is rounded once, attention is normalised after the product
    with the values, and the last product of a block is summed in two halves, as two devices would.
    """
    norm = lambda x, gain: (unit(x) * gain).astype(dtype)

    def halves(x, w):
        (a, b), (c, d) = jnp.split(x, 2, axis=-1), jnp.split(w, 2)
        return a @ c + b @ d

    def block(x, layer):
        p, (keys, values) = layer
        joined = jnp.concatenate([p["query"], p["key"], p["value"]], axis=1)
        q, k, v = map(heads, jnp.split(norm(x, p["attend"]) @ joined, 3, axis=-1))
        keys, values = keys.at[:, place].set(k), values.at[:, place].set(v)
        scores = jnp.einsum("bhk,bshk->bhs", q, keys).astype(jnp.float32) * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.arange(keys.shape[1]) <= place, scores, -jnp.inf)
        weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = jnp.einsum("bhs,bshk->bhk", weights.astype(dtype), values).astype(jnp.float32)
        mixed = (mixed / weights.sum(axis=-1)[..., None]).astype(dtype)
        x += halves(mixed.reshape(x.shape), p["out"])
        x += halves(jax.nn.gelu(norm(x, p["think"]) @ p["up"]), p["down"])
        return x, (keys, values)

    x = params["tokens"][token] + params["places"][place]
    x, cache = jax.lax.scan(block, x, (params["layers"], cache))
    logits = norm(x, params["last"]) @ params["head"]
    return jax.nn.log_softmax(logits.astype(jnp.float32)), cache


def sample(params, prompts, key, length, dtype):
    """Sequences i32[b, length] that begin with `prompts`, and f32[b, length - 1, v] log-probs."""
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    batch, given = prompts.shape
    layers, width = params["layers"]["attend"].shape
    empty = jnp.zeros((layers, batch, length, HEADS, width // HEADS), dtype)
    prompts = jnp.pad(prompts, ((0, 0), (0, length - given)))

    def step(carry, place):
        token, cache = carry
        logp, cache = sampler_step(params, cache, token, place, dtype)
        drawn = jax.random.categorical(jax.random.fold_in(key, place), logp)
        token = jnp.where(place + 1 < given, prompts[:, place + 1], drawn)
        return (token, cache), (token, logp)

    carry = prompts[:, 0], (empty, empty)
    _, (tokens, logp) = jax.lax.scan(step, carry, jnp.arange(length - 1))
    tokens = jnp.concatenate([prompts[:, :1], tokens.T], axis=1)
    return tokens, logp.swapaxes(0, 1)


def of(logp, tokens):
    """The log-probabilities f32[b, t] of the tokens that came."""
    return jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]


# Pre-training in float32


@functools.partial(jax.jit, static_argnames="first")
def pretrain(params, batches, first):
    """Adam on the cross-entropy of the tokens from `first` on."""
    tx = optax.adam(optax.linear_schedule(3e-3, 3e-4, len(batches)))

    def loss_fn(params, tokens):
        return -jnp.mean(of(trainer(params, tokens[:, :-1], jnp.float32), tokens)[:, first - 1 :])

    def step(carry, tokens):
        params, state = carry
        updates, state = tx.update(jax.grad(loss_fn)(params, tokens), state)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, tx.init(params)), batches)[0][0]


def text(seed, *shape):
    """Pieces of Python's documentation, i32[*shape]."""
    every = np.frombuffer("\n".join(topics.values()).encode("ascii", "ignore"), np.uint8)
    starts = np.random.default_rng(seed).integers(0, len(every) - shape[-1], shape[:-1])
    return jnp.asarray(every[starts[..., None] + np.arange(shape[-1])], jnp.int32)


def puzzles(key, *shape):
    """Digits and the same digits sorted, i32[*shape, WHOLE]."""
    digits = jax.random.randint(key, (*shape, DIGITS), ord("0"), ord("9") + 1)
    mark = jnp.full((*shape, 1), MARK)
    return jnp.concatenate([digits, mark, jnp.sort(digits)], axis=-1)


# The gap


@functools.partial(jax.jit, static_argnames="dtype")
def gap(params, prompts, key, dtype):
    """The `MEASURES`, over texts that the sampler wrote."""
    tokens, sampled = sample(params, prompts, key, LENGTH + 1, dtype)
    trained = trainer(params, tokens[:, :-1], dtype)
    gaps = of(trained, tokens) - of(sampled, tokens)
    divergence = jnp.sum(jnp.exp(sampled) * (sampled - trained), axis=-1)
    return jnp.mean(jnp.abs(gaps)), jnp.mean(divergence), jnp.std(jnp.sum(gaps, axis=1))


def gaps(seed, names, config):
    """What `gap` says in each of the dtypes, of a model that has learnt some text."""
    params = new_params(jax.random.key(seed), 4, 64, LENGTH)
    params = pretrain(params, text(seed, config.text_steps, 8, LENGTH + 1), 1)
    prompts, key = text(1000 + seed, 64, 1), jax.random.key(seed)
    return {name: jax.device_get(gap(params, prompts, key, DTYPES[name])) for name in names}


# Training by reward


def task_model(seed, config):
    """A model that sorts some of the puzzles right."""
    params = new_params(jax.random.key(seed), 2, 32, WHOLE)
    return pretrain(params, puzzles(jax.random.key(seed), config.task_steps, 128), PROMPT)


@functools.partial(jax.jit, static_argnames=("kind", "steps"))
def train(params, seed, kind, steps):
    """Samples with one engine, and follows the gradient of the other, once for each batch."""
    dtype = DTYPES[kind.split(",")[0]]
    coarse = lambda p: p.astype(jnp.float8_e4m3fn).astype(p.dtype) if kind == CONTROL else p
    rule = jscale.dynamic(growth_interval=400) if dtype == jnp.float16 else jscale.off()
    tx = jscale.with_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(6e-4)), rule)

    def step(carry, key):
        params, state = carry
        puzzle_key, key = jax.random.split(key)
        right = jnp.repeat(puzzles(puzzle_key, GROUPS), GROUP, axis=0)
        tokens, sampled = sample(jax.tree.map(coarse, params), right[:, :PROMPT], key, WHOLE, dtype)
        sampled = of(sampled, tokens)[:, PROMPT - 1 :]
        reward = jnp.all(tokens == right, axis=1).astype(jnp.float32).reshape(GROUPS, GROUP)
        mean, deviation = (f(reward, axis=1, keepdims=True) for f in (jnp.mean, jnp.std))
        advantage = jnp.ravel((reward - mean) / (deviation + 1e-3))[:, None]

        def loss_fn(params):
            logp = of(trainer(params, tokens[:, :-1], dtype), tokens)[:, PROMPT - 1 :]
            return -jnp.mean(advantage * logp), logp - sampled

        scale = jscale.loss_scale(state)
        (loss, gaps), grads = jscale.value_and_grad(loss_fn, scale, has_aux=True)(params)
        updates, state = tx.update(grads, state, params, loss=loss)
        seen = jnp.mean(reward), jnp.mean(jnp.abs(gaps)), jnp.std(jnp.sum(gaps, axis=1))
        return (optax.apply_updates(params, updates), state), seen

    keys = jax.random.split(jax.random.key(seed), steps)
    (_, state), (reward, *gaps) = jax.lax.scan(step, (params, tx.init(params)), keys)
    return {"reward": reward, "gaps": gaps, **jscale.metrics(state)}


def spread(values, form):
    return f"{f'{np.mean(values):{form}} +-{np.std(values):{form}}':20}"


def main(config: Config):
    names = list(DTYPES)
    trained = [*names, CONTROL]
    if config.short:
        names = trained = names[1:]
        config = Config(seeds=1, text_steps=10, task_steps=10, steps=10)
    seeds = range(config.seeds)

    found = [gaps(seed, names, config) for seed in seeds]
    print(f"{'text':22}" + "".join(f"{measure:20}" for measure in MEASURES))
    of_measure = lambda name, i: np.array([one[name][i] for one in found])
    for name in names:
        print(f"  {name:20}" + "".join(spread(of_measure(name, i), ".1e") for i in range(3)))
    ratios = (of_measure("bfloat16", i) / of_measure("float16", i) for i in range(3))
    print(f"  {'bfloat16 / float16':20}" + "".join(spread(ratio, ".1f") for ratio in ratios))

    models = [task_model(seed, config) for seed in seeds]
    titles = "first 50 steps", "last 50 steps", MEASURES[0], MEASURES[2]
    print(f"\n{'reward':26}" + "".join(f"{title:20}" for title in titles) + "skipped  scale")
    for name in trained:
        each = enumerate(models)
        runs = [jax.device_get(train(model, seed, name, config.steps)) for seed, model in each]
        rewards = np.array([one["reward"] for one in runs])
        cells = [spread(x.mean(axis=1), ".3f") for x in (rewards[:, :50], rewards[:, -50:])]
        for i in range(2):
            cells.append(spread([one["gaps"][i][-50:].mean() for one in runs], ".1e"))
        skipped = np.mean([one["skipped_steps"] for one in runs])
        scales = {f"2^{np.log2(one['grad_scale']):.0f}" for one in runs}
        print(f"  {name:24}{''.join(cells)}{skipped:<8.1f} {', '.join(sorted(scales))}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Config))
