"""Two networks and three losses, of which one lies binades apart: one loss scale, or three.

    python experiments/gan.py            # some 2 minutes on 2 cores; writes runs/gan
    python experiments/gan.py --spreads 0 --steps 500 --seeds 1

A generator learns eight heaps of points on a circle. The losses are its own, the discriminator's,
and a penalty on the discriminator's slope, which is a `jscale.grad` inside the loss. Products are
in float16, by `autocast`. Each loss has a scale with a state of its own, from
`with_loss_scale(optax.identity(), rule)`: its updates are the gradients, or nothing if that loss
overflowed. Two optimizers then apply their steps if neither of them has an overflow to skip for
("both skip"), or each by itself ("own skips"). "One scale" is one such state for all three.

The generator's loss is multiplied by 2^spread, and Adam divides that out again, so that float32
learns the same (but for rounding: at -32 some of Adam's squares leave float32's range). Expected
(means of three seeds, and their standard deviation; the share of gradients that are zero; the steps
that generator and discriminator skipped, of 2000):

                                    energy                    zeros                 skipped
    spread                          distance         modes   gener. discr. penalty  g     d
         0 float32                 0.0118 +-0.0014    7.7    0.0%   0.0%   0.0%     0     0
       -32 one scale               1.4336 +-0.3170    1.3   94.1%   0.0%   0.0%    17    17
       -32 three scales, both skip 0.0115 +-0.0013    6.7    0.0%   0.1%   0.0%    54    54
       -32 three scales, own skips 0.0140 +-0.0022    6.3    0.0%   0.1%   0.0%    15    25
       -24 one scale               0.0106 +-0.0019    7.3    8.8%   0.1%   0.0%    10    10
       -24 three scales, both skip 0.0109 +-0.0006    8.0    0.0%   0.1%   0.0%    55    55
       -24 three scales, own skips 0.0100 +-0.0012    7.7    0.0%   0.1%   0.0%    22    24
        +0 one scale               0.0107 +-0.0014    8.0    0.0%   0.1%   0.0%    10    10
        +0 three scales, both skip 0.0106 +-0.0011    8.0    0.0%   0.1%   0.0%    45    45
        +0 three scales, own skips 0.0100 +-0.0008    7.3    0.0%   0.1%   0.0%    30    23
       +24 one scale               0.0115 +-0.0022    7.7    0.0%   1.5%   1.1%    23    23
       +24 three scales, both skip 0.0103 +-0.0022    7.7    0.0%   0.1%   0.0%    66    66
       +24 three scales, own skips 0.0119 +-0.0035    7.0    0.0%   0.1%   0.0%    33    28
       +32 one scale               0.0200 +-0.0039    6.0    0.0%  86.6% 100.0%    28    28
       +32 three scales, both skip 0.0113 +-0.0014    7.7    0.0%   0.1%   0.0%    56    56
       +32 three scales, own skips 0.0115 +-0.0009    7.3    0.0%   0.1%   0.0%    27    27

By themselves, at a spread of 0, the three losses need no separate scales: the best ones lie within
4 binades. One scale is enough from -24 to 24, where the first gradients are lost; at -32 the
generator's are, and it learns nothing; at 32 the penalty and most of the discriminator's are, which
is worse than float32, but learns still. Three scales follow float32 at all of them, within the
spread of the seeds. So they do whoever skips: both networks skip about as often as the two by
themselves together, and with some 50 of 2000 steps the difference cannot be seen here.
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

import jscale

WIDTH, LATENT, BATCH = 64, 4, 128
MODES, DEVIATION = 8, 0.05
LEARNING_RATE, GAMMA = 3e-3, 1.0
RATE = 0.05  # of overflows that the rules aim at: a high one, so that there are some
LOOK = 100  # steps between two looks at the generator
SHOWN = -32  # the spread that the picture looks into
NAMES = "generator", "discriminator", "penalty"
METHODS = "float32", "one scale", "three scales, both skip", "three scales, own skips"


@dataclasses.dataclass(frozen=True)
class Config:
    """Two networks and three losses: float32, float16 with one loss scale, with three."""

    spreads: tuple[int, ...] = (-24, 0, 24, 32)
    """By how many binades the generator's loss is moved up; -32 always is among them."""
    steps: int = 2000
    """Training steps of each run."""
    seeds: int = 3
    """Runs of each kind."""
    out: Path = Path("runs/gan")
    """Where the picture goes."""


def new_mlp(key, *widths):
    keys = jax.random.split(key, len(widths) - 1)
    he = lambda key, n, m: jax.random.normal(key, (n, m)) * (2 / n) ** 0.5
    return [
        {"w": he(key, n, m), "b": jnp.zeros(m)}
        for key, n, m in zip(keys, widths[:-1], widths[1:], strict=True)
    ]


def mlp(params, x):
    for p in params[:-1]:
        x = jax.nn.gelu(x @ p["w"] + p["b"][None])
    return x @ params[-1]["w"] + params[-1]["b"][None]


def real_points(key, n):
    """Points near eight places on a circle."""
    which, noise = jax.random.split(key)
    angle = jax.random.randint(which, n, 0, MODES) * (2 * jnp.pi / MODES)
    places = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)
    return places + DEVIATION * jax.random.normal(noise, (n, 2))


def generator_loss(generator, discriminator, z, real, factor):
    return factor * jnp.mean(jax.nn.softplus(-mlp(discriminator, mlp(generator, z))))


def discriminator_loss(discriminator, generator, z, real):
    on_fake, on_real = mlp(discriminator, mlp(generator, z)), mlp(discriminator, real)
    return jnp.mean(jax.nn.softplus(on_fake)) + jnp.mean(jax.nn.softplus(-on_real))


def penalty_loss(discriminator, real):
    """The squared slope at real points (Mescheder et al., 2018), by a gradient in the loss."""
    total = lambda x: jnp.sum(mlp(discriminator, x))
    slope = jscale.grad(total, 2.0**8)(real)  # one example's, so it hardly changes
    return GAMMA / 2 * jnp.mean(jnp.sum(slope**2, axis=-1))


def energy(a, b):
    """The energy distance of two samples."""
    mean = lambda a, b: jnp.mean(jnp.linalg.norm(a[:, None] - b[None], axis=-1))
    return 2 * mean(a, b) - mean(a, a) - mean(b, b)


@functools.partial(jax.jit, static_argnames=("kind", "steps"))
def train(kind, steps, seed, factor, own):
    """Points of the trained generator, and what was seen on the way."""
    dtype = jnp.float32 if kind == "float32" else jnp.float16
    rule = jscale.log_normal(overflow_rate=RATE, min_scale=2.0**-60, max_scale=2.0**60)
    rule = jscale.off() if kind == "float32" else rule
    scaler = jscale.with_loss_scale(optax.identity(), rule)  # hands on gradients, or nothing
    sharing = {"all": NAMES} if kind == "one scale" else {name: (name,) for name in NAMES}
    # Whether a step of these is applied, the scalers decide.
    adam = optax.adam(LEARNING_RATE, b1=0.5, b2=0.99, eps=1e-24)
    optimizer = jscale.with_loss_scale(adam, jscale.off())
    half = functools.partial(jscale.autocast, compute_dtype=dtype)

    def step(carry, key):
        (g, d), scalers, optimizers = carry
        z_key, real_key = jax.random.split(key)
        z, real = jax.random.normal(z_key, (BATCH, LATENT)), real_points(real_key, BATCH)
        scale = {
            name: jscale.loss_scale(scalers[shared])
            for shared, names in sharing.items()
            for name in names
        }
        losses = {
            "generator": (generator_loss, g, d, z, real, factor),
            "discriminator": (discriminator_loss, d, g, z, real),
            "penalty": (penalty_loss, d, real),
        }
        grads = {
            name: jscale.grad(half(loss), scale[name])(*args)
            for name, (loss, *args) in losses.items()
        }
        zeros = {name: jnp.mean(ravel_pytree(x)[0] == 0) for name, x in grads.items()}
        finite = {}
        for shared, names in sharing.items():
            mine = {name: grads[name] for name in names}
            mine, scalers[shared] = scaler.update(mine, scalers[shared])
            grads |= mine
            finite |= dict.fromkeys(names, scalers[shared].finite)

        apply = finite["generator"], finite["discriminator"] & finite["penalty"]
        apply = [jnp.where(own, go, apply[0] & apply[1]) for go in apply]
        total = grads["generator"], jax.tree.map(jnp.add, *[grads[x] for x in NAMES[1:]])
        new = []
        for params, grad, state, go in zip((g, d), total, optimizers, apply, strict=True):
            updates, state = optimizer.update(grad, state, params, apply=go)
            new.append((optax.apply_updates(params, updates), state))
        players, optimizers = zip(*new, strict=True)
        return (players, scalers, optimizers), {"zeros": zeros, "scale": scale}

    def sample(g, key):
        z_key, real_key = jax.random.split(key)
        return mlp(g, jax.random.normal(z_key, (1000, LATENT))), real_points(real_key, 1000)

    def stretch(carry, keys):
        carry, seen = jax.lax.scan(step, carry, keys)
        return carry, (seen, energy(*sample(carry[0][0], keys[0])))

    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), (steps // LOOK, LOOK))
    g_key, d_key = jax.random.split(jax.random.key(seed))
    params = new_mlp(g_key, LATENT, WIDTH, WIDTH, 2), new_mlp(d_key, 2, WIDTH, WIDTH, 1)
    like = dict(zip(NAMES, (params[0], params[1], params[1]), strict=True))
    scalers = {
        shared: scaler.init({name: like[name] for name in names})
        for shared, names in sharing.items()
    }
    carry = params, scalers, tuple(map(optimizer.init, params))
    (params, scalers, optimizers), (seen, distances) = jax.lax.scan(stretch, carry, keys)
    return {
        "points": sample(params[0], jax.random.key(0))[0],
        "distances": distances,
        "skipped": dict(zip(NAMES[:2], [state.skipped_steps for state in optimizers], strict=True)),
        **jax.tree.map(jnp.ravel, seen),
    }


def run(method, spread, seed, config):
    """What `train` saw, and the numbers that the table shows."""
    kind, own = method.split(",")[0], method.endswith("own skips")
    seen = jax.device_get(train(kind, config.steps, seed, 2.0**spread, own))
    angle = 2 * np.pi / MODES * np.arange(MODES)
    places = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    near = np.linalg.norm(seen["points"][:, None] - places, axis=-1) < 3 * DEVIATION
    return seen | {
        "distance": seen["distances"][-5:].mean(),
        "modes": np.sum(near.mean(0) > 0.25 / MODES),
        "zeros": {name: x[-len(x) // 4 :].mean() for name, x in seen["zeros"].items()},
    }


def mean(runs, *path):
    return np.mean([functools.reduce(lambda x, key: x[key], path, one) for one in runs])


def row(runs):
    distances = [one["distance"] for one in runs]
    cells = [f"{np.mean(distances):.4f} +-{np.std(distances):.4f}{mean(runs, 'modes'):7.1f} "]
    cells += [f"{mean(runs, 'zeros', name):6.1%}" for name in NAMES]
    cells += [f"{mean(runs, 'skipped', name):5.0f}" for name in NAMES[:2]]
    return " ".join(cells)


def table(results, reference):
    lines = [
        "                                energy                    zeros                 skipped",
        "spread                          distance         modes   gener. discr. penalty  g     d",
        f"     0 {METHODS[0]:24}{row(reference)}",
    ]
    for spread, by_method in results.items():
        lines += [f"{spread:+6d} {name:24}{row(runs)}" for name, runs in by_method.items()]
    return "\n".join(lines)


def draw(path, results, reference):
    figure = Figure(figsize=(16, 10), layout="constrained")
    axes = figure.subplots(2, 3)
    shown = results[SHOWN]
    one, own = METHODS[1], METHODS[3]
    where = f"generator's loss {abs(SHOWN)} binades down"
    real = real_points(jax.random.key(0), 1000)
    titles = METHODS[0], f"{where}, one scale", f"{where}, three scales"
    for ax, title, runs in zip(axes[0], titles, (reference, shown[one], shown[own]), strict=True):
        ax.plot(*real.T, ".", color="0.8", label="data")
        ax.plot(*runs[0]["points"].T, "C0.", markersize=3, label="generated")
        ax.set(title=title, xlim=(-2, 2), ylim=(-1.5, 1.5), aspect="equal")
        ax.legend(loc="upper right")

    over_time, scales, zeros = axes[1]
    for name, runs, style in (
        (METHODS[0], reference, {"color": "0.7", "linewidth": 4}),
        (one, shown[one], {"color": "k", "linestyle": "--"}),
        (own, shown[own], {"color": "C2"}),
    ):
        for i, seen in enumerate(runs):
            step = LOOK * np.arange(1, len(seen["distances"]) + 1)
            over_time.plot(step, seen["distances"], label=None if i else name, **style)
    over_time.set(title=where, xlabel="step", ylabel="energy distance, all seeds", yscale="log")
    over_time.legend(loc="center right")

    alone = np.log2(shown[one][0]["scale"]["generator"])
    scales.plot(alone, "k--", linewidth=1, zorder=3, label="one scale")
    for i, name in enumerate(NAMES):
        scales.plot(np.log2(shown[own][0]["scale"][name]), color=f"C{i}", label=name)
        for method, line in ((one, "o--"), (own, "s-")):
            share = [mean(by_method[method], "zeros", name) for by_method in results.values()]
            label = f"{'one scale' if method == one else 'three scales'}: {name}"
            zeros.plot(list(results), share, line, color=f"C{i}", label=label)
    scales.set(title=f"{where}: the scales", xlabel="step", ylabel="log2 of the scale, first seed")
    zeros.set(title="Gradients that are zero", xlabel="binades by which the generator's loss is up")
    zeros.set(ylabel="share in the last quarter of the steps")
    scales.legend()
    zeros.legend()
    path.mkdir(parents=True, exist_ok=True)
    figure.savefig(path / "gan.png", dpi=70)


def main():
    config = tyro.cli(Config)
    runs = lambda method, spread: [run(method, spread, i, config) for i in range(config.seeds)]
    reference = runs(METHODS[0], 0)
    spreads = sorted({*config.spreads, SHOWN})
    results = {s: {method: runs(method, s) for method in METHODS[1:]} for s in spreads}
    print(table(results, reference))
    draw(config.out, results, reference)
    print(f"The picture is {config.out}/gan.png.")


if __name__ == "__main__":
    main()
