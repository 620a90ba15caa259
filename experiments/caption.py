"""Two towers whose gradients lie binades apart: with one loss scale, and with one for each.

    python experiments/caption.py        # some 2 minutes on 2 cores; writes runs/caption

Images of digits become captions such as "the digit three.", by a small vision transformer in front
of a small text decoder; products are in float16, by `autocast`. The gradients of the vision tower
are multiplied by 2^spread where they leave the decoder, as GLM-130B shrinks those of its embedding:
that stands for weights of losses, gates, units, and whatever else makes towers differ. Adam divides
it out, and float32 learns the same at every spread, to the last bit from -32 up. (Below that Adam's
squares leave float32's range; and with its usual epsilon a tower so small would stand still.)
"One scale" is one `log_normal`; "two scales" has one for each tower, and vision in a `region`.
Expected (means of three seeds; +- is the standard deviation of differences to float32 from the same
seed; zeros are shares of the gradients in the last 50 steps; skipped steps, of 300):

    float32: loss 1.699 +-0.012, accuracy 86.1%

            loss above float32's          accuracy     zeros: text  zeros: vision  skipped
    spread  one scale      two scales     one    two    one    two     one    two  one two
       -36  1.310 +- 0.150 -0.043 +- 0.049  55.0%  86.8%   0.3%   0.3%  99.9%   0.0%   1   1
       -32  0.800 +- 0.251 -0.055 +- 0.029  64.0%  86.9%   0.3%   0.3%  30.3%   0.0%   1   1
       -30  0.069 +- 0.111 -0.021 +- 0.030  84.3%  87.9%   0.3%   0.3%   3.4%   0.0%   2   2
       -28 -0.051 +- 0.034 -0.008 +- 0.008  83.9%  85.6%   0.3%   0.3%   0.8%   0.0%   1   2
        +0 -0.003 +- 0.043 -0.007 +- 0.005  86.9%  85.5%   0.3%   0.3%   0.0%   0.0%   3   2
       +28  0.072 +- 0.086 -0.002 +- 0.043  85.5%  85.1%   1.7%   0.3%   0.0%   0.0%   8   9
       +30  0.379 +- 0.228 -0.002 +- 0.043  84.5%  86.2%   4.5%   0.3%   0.0%   0.0%   8   9
       +32 16.674 +-10.530  0.012 +- 0.075  29.8%  86.1%  71.3%   0.3%  66.7%   0.0%   9  10
       +36 27.405 +- 0.858  0.017 +- 0.069  10.2%  86.6%  99.0%   0.3%  99.3%   0.0%  12  12

So it takes some 30 binades: float16 has 40, and one tower's gradients take up 10 or so. A vision
tower too far below stands still, and the decoder makes do with random features. One too far above
takes all with it, since its gradients come through the decoder, whose backward pass underflows.
With two scales, what is left is within the seeds' noise, and differs most where most are skipped.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import jscale

WIDTH, HEADS, PATCHES, BATCH = 32, 4, 8, 32
LEARNING_RATE, LAST = 2e-3, 50  # LAST: steps that the table averages over
SHOWN = 32  # the spread, in both directions, that the picture looks into
WORDS = "zero one two three four five six seven eight nine".split()
CAPTIONS = [[form.format(w) for w in WORDS] for form in ("a {}.", "the digit {}.", "this is {}.")]
LENGTH = max(len(c) for form in CAPTIONS for c in form)
ALPHABET = "_" + "".join(sorted(set("".join(c for form in CAPTIONS for c in form))))
TOKENS = np.array(  # by form and digit; they begin with "_", and are filled up with it
    [[[ALPHABET.index(c) for c in "_" + x.ljust(LENGTH, "_")] for x in form] for form in CAPTIONS]
)
METHODS = "float32", "one scale", "two scales"
STYLES = {"text": {"color": "C0", "linewidth": 2}, "vision": {"color": "C1", "linewidth": 2}}


@dataclasses.dataclass(frozen=True)
class Config:
    """Two towers whose gradients lie apart: float32, float16 with one loss scale, with two."""

    spreads: tuple[int, ...] = (-36, -30, -28, 0, 28, 30, 36)
    """By how many binades the vision tower's gradients are moved up; -32 and 32 are added."""
    steps: int = 300
    """Training steps of each run."""
    seeds: int = 3
    """Runs of each kind."""
    out: Path = Path("runs/caption")
    """Where the picture goes."""


def normal(key, *shape):
    return jax.random.normal(key, shape) * shape[0] ** -0.5


def new_block(key):
    keys = jax.random.split(key, 4)
    shapes = {"qkv": (1, 3), "proj": (1, 1), "up": (1, 4), "down": (4, 1)}.items()
    new = lambda key, n, m: normal(key, WIDTH * n, WIDTH * m)
    return {name: new(key, *shape) for key, (name, shape) in zip(keys, shapes, strict=True)}


def new_params(key):
    keys = iter(jax.random.split(key, 8))
    vision = {
        "patch": normal(next(keys), 64 // PATCHES, WIDTH),
        "position": jax.random.normal(next(keys), (PATCHES, WIDTH)),
        "block": new_block(next(keys)),
        "projector": normal(next(keys), WIDTH, WIDTH),
    }
    text = {
        "embed": jax.random.normal(next(keys), (len(ALPHABET), WIDTH)),
        "position": jax.random.normal(next(keys), (LENGTH, WIDTH)),
        "block": new_block(next(keys)),
        "out": normal(next(keys), WIDTH, len(ALPHABET)),
    }
    return {"text": text, "vision": vision}


def norm(x):
    return jax.nn.standardize(x, axis=-1)


def block(p, x, mask):
    q, k, v = jnp.split((norm(x) @ p["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    heads = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, where=mask), v)
    x = x + heads.reshape(x.shape) @ p["proj"]
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


def see(p, images):
    """The vision tower: patches of 2 by 4 pixels, a block, the projector."""
    x = images.reshape(-1, 4, 2, 2, 4).swapaxes(2, 3).reshape(-1, PATCHES, 64 // PATCHES)
    return norm(block(p["block"], x @ p["patch"] + p["position"][None], True)) @ p["projector"]


def read(p, seen, tokens):
    """The text decoder: the logits of the next characters, after what was seen."""
    x = p["embed"][tokens[:, :-1]] + p["position"][None]
    x = jnp.concatenate([seen, x], axis=1)
    mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool)) | (jnp.arange(x.shape[1]) < PATCHES)[None]
    return norm(block(p["block"], x, mask)[:, PATCHES:]) @ p["out"]


def surprise(params, images, tokens, see=see, factor=1.0):
    """What each caption costs in nats; gradients of the vision tower come out times `factor`."""
    seen = see(params["vision"], images)
    fixed, targets = jax.lax.stop_gradient(seen), tokens[:, 1:]
    logits = read(params["text"], fixed + factor * (seen - fixed), tokens)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    return -jnp.sum(picked, axis=-1, where=targets != 0)


def loss_fn(params, scale, factor, images, tokens):
    separate = isinstance(scale, dict)
    tower = jscale.region(see, scale["vision"], scale["text"]) if separate else see
    return jnp.mean(surprise(params, images, tokens, tower, factor))


def make(method):
    """The loss function and the optimizer of a method."""
    adam = optax.adam(LEARNING_RATE, eps=1e-24)
    rule = jscale.log_normal(min_scale=2.0**-60, max_scale=2.0**60)
    if method == "float32":
        return loss_fn, jscale.with_loss_scale(adam, jscale.off())
    rules = {"text": rule, "vision": rule} if method == "two scales" else rule
    return jscale.autocast(loss_fn), jscale.with_loss_scale(adam, rules)


def batch(key, images, labels):
    which, form = jax.random.split(key)
    which = jax.random.randint(which, BATCH, 0, len(labels))
    form = jax.random.randint(form, BATCH, 0, len(CAPTIONS))
    return images[which], jnp.asarray(TOKENS)[form, labels[which]]


@functools.partial(jax.jit, static_argnames=("method", "steps"))
def train(method, steps, seed, factor, images, labels):
    """Final parameters and optimizer state, and what was seen in each step."""
    fun, tx = make(method)
    root = "text" if method == "two scales" else None

    def step(carry, key):
        params, state = carry
        scale = jscale.loss_scale(state)
        grad_fn = jscale.value_and_grad(fun, scale, root=root)
        loss, grads = grad_fn(params, scale, factor, *batch(key, images, labels))
        updates, state = tx.update(grads, state, params, loss=loss)
        seen = {
            "loss": loss,
            "skipped": ~state.finite,
            "zeros": {key: jnp.mean(ravel_pytree(x)[0] == 0) for key, x in grads.items()},
            "scale": scale if root else dict.fromkeys(params, scale),
        }
        return (optax.apply_updates(params, updates), state), seen

    key = jax.random.key(seed)
    params, keys = new_params(key), jax.random.split(jax.random.fold_in(key, 1), steps)
    return jax.lax.scan(step, (params, tx.init(params)), keys)


@jax.jit
def accuracy(params, images, labels):
    """How often the caption of the right digit is the likeliest of ten."""
    cost = lambda tokens: surprise(params, images, jnp.tile(tokens, (len(labels), 1)))
    return jnp.mean(jnp.argmin(jax.vmap(cost)(jnp.asarray(TOKENS[0])), axis=0) == labels)


def run(method, spread, seed, config, data):
    """The numbers of one run; its scales over time; its parameters."""
    (params, state), seen = train(method, config.steps, seed, 2.0**spread, *data["train"])
    jscale.check(state)
    seen = jax.device_get(seen) | {"params": params}
    return seen | {
        "loss": seen["loss"][-LAST:].mean(),
        "accuracy": float(accuracy(params, *data["test"])),
        "skipped": seen["skipped"].sum(),
        "zeros": {key: x[-LAST:].mean() for key, x in seen["zeros"].items()},
    }


def mean(runs, *path):
    return np.mean([functools.reduce(lambda x, key: x[key], path, one) for one in runs])


def table(results, reference):
    losses = np.array([one["loss"] for one in reference])
    above = lambda runs: np.array([one["loss"] for one in runs]) - losses  # from the same seeds
    right = f"accuracy {mean(reference, 'accuracy'):.1%}"
    lines = [
        f"float32: loss {losses.mean():.3f} +-{losses.std():.3f}, {right}\n",
        "        loss above float32's          accuracy     zeros: text  zeros: vision  skipped",
        "spread  one scale      two scales     one    two    one    two     one    two  one two",
    ]
    for spread, (one, two) in results.items():
        cells = [f"{x.mean():6.3f} +-{x.std():6.3f}" for x in (above(one), above(two))]
        for path in ("accuracy",), ("zeros", "text"), ("zeros", "vision"):
            cells += [f"{mean(runs, *path):6.1%}" for runs in (one, two)]
        cells += [f"{mean(runs, 'skipped'):3.0f}" for runs in (one, two)]
        lines.append(f"{spread:+6d} " + " ".join(cells))
    return "\n".join(lines)


def histograms(ax, params, factor, scales, data):
    """Exponents of both towers' float32 gradients times a scale, in the range of float16."""
    grads = jax.grad(loss_fn)(params, 1.0, factor, *batch(jax.random.key(9), *data))
    for key, style in STYLES.items():
        x = np.abs(np.float64(ravel_pytree(grads[key])[0])) * scales[key]
        counts, edges = np.histogram(np.log2(x[x > 0]), np.arange(-60, 21))
        lost = f"{np.mean(x[x > 0] < 2.0**-25):.0%} rounded to zero"
        label = f"{key} at 2^{np.log2(scales[key]):.0f}: {lost}"
        ax.stairs(counts / x.size, edges, label=label, **style)
    for left, kind, right in (-60, "zero", -25), (-25, "subnormal", -14), (16, "inf", 20):
        ax.axvspan(left, right, color="0.92" if kind == "subnormal" else "0.8", zorder=0)
        ax.text((left + right) / 2, 0.26, kind, ha="center", va="center")
    ax.set(xlim=(-60, 20), ylim=(0, 0.36), xlabel="log2 of gradient", ylabel="share of elements")
    ax.legend(loc="upper left")


def draw(path, results, reference, data):
    figure = Figure(figsize=(16, 9), layout="constrained")
    axes = figure.subplots(2, 3)
    for ax, (spread, together) in zip(axes[0], ((SHOWN, 1), (-SHOWN, 1), (SHOWN, 0)), strict=True):
        two = results[spread][1][0]
        scales = {key: x[-1] for key, x in two["scale"].items()}
        # The lower of the two is the largest at which neither tower overflows.
        scales = dict.fromkeys(scales, min(scales.values())) if together else scales
        histograms(ax, two["params"], 2.0**spread, scales, data["train"])
        where = f"vision {SHOWN} binades {'above' if spread > 0 else 'below'} text"
        ax.set_title(f"{where}, {METHODS[1 if together else 2]}")

    over_time, zeros, losses = axes[1]
    for one, two in zip(*results[SHOWN], strict=True):
        over_time.plot(np.log2(one["scale"]["text"]), "k--")
        for key, style in STYLES.items():
            over_time.plot(np.log2(two["scale"][key]), **style)
    over_time.legend(["one scale", *(f"two scales: {key}" for key in STYLES)])
    over_time.set(xlabel="step", ylabel="log2 of the scale, all seeds")
    over_time.set_title(f"vision {SHOWN} binades above text: the scales")

    losses.axhline(mean(reference, "loss"), color="0.8", linewidth=8, label="float32")
    for i, line, colour in ((0, "o--", "k"), (1, "s-", "C2")):
        for key, style in STYLES.items():
            share = [mean(runs[i], "zeros", key) for runs in results.values()]
            zeros.plot(list(results), share, line[1:], label=f"{METHODS[i + 1]}: {key}", **style)
        middle = [mean(runs[i], "loss") for runs in results.values()]
        losses.plot(list(results), middle, line, color=colour, label=METHODS[i + 1])
        for spread, runs in results.items():
            losses.plot([spread] * len(runs[i]), [x["loss"] for x in runs[i]], colour + "_")
    for ax, title, label in (
        (zeros, "Gradients that are zero", f"share, mean of the last {LAST} steps"),
        (losses, "Loss at the end, all seeds and mean", "nats per caption"),
    ):
        ax.set(title=title, ylabel=label, xlabel="binades by which vision is above text")
        ax.legend()
    losses.set(yscale="log", yticks=(ticks := [1, 2, 4, 8, 16, 32]), yticklabels=ticks)
    path.mkdir(parents=True, exist_ok=True)
    figure.savefig(path / "caption.png", dpi=70)


def main():
    config = tyro.cli(Config)
    digits = load_digits()
    images, labels = jnp.asarray(digits.images / 16, jnp.float32), jnp.asarray(digits.target)
    data = {"train": (images[:1437], labels[:1437]), "test": (images[1437:], labels[1437:])}
    runs = lambda *kind: [run(*kind, i, config, data) for i in range(config.seeds)]
    reference = runs("float32", 0)
    spreads = sorted({*config.spreads, -SHOWN, SHOWN})
    results = {s: [runs(method, s) for method in METHODS[1:]] for s in spreads}
    print(table(results, reference))
    draw(config.out, results, reference, data)
    print(f"The picture is {config.out}/caption.png.")


if __name__ == "__main__":
    main()
