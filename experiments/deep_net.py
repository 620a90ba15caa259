"""One scale for each layer, where the gradients of a net span more than float16 holds.

A net of tanh layers finds the 64 pixels of a digit among 448 of noise. Each layer passes half of
its cotangent on, as MuZero does at each step of its model (Schrittwieser et al., 2020), so that the
forward pass is an ordinary one, while gradients halve from layer to layer. Those of the weights and
the cotangents are float16: all at one scale, or each layer of a scan in a region at its own.

    pip install '.[experiments]'
    python experiments/deep_net.py                                        # 1 minute on 2 cores
    python experiments/deep_net.py --depths 12 --trained 12 --steps 20 --seeds 2       # for CI

Expected: of the first layer's gradient the share of zeros, and the error relative to float32, with
no scale, with the best power of two, and with one scale a layer; then training, mean and range of
three seeds.

    the first layer's gradient        1        best scale      one a layer
    layers  its largest     zeros   error   scale zeros   error   zeros   error
        12  2^-19.3        11.41%  0.8686  2^21     0.00%  0.0017    0.00%  0.0017
        24  2^-31.7       100.00%  1.0000  2^21     0.02%  0.0041    0.00%  0.0023
        28  2^-35.7       100.00%  1.0000  2^22     0.27%  0.0291    0.00%  0.0026
        32  2^-39.7       100.00%  1.0000  2^22     4.14%  0.4451    0.00%  0.0028
        36  2^-43.8       100.00%  1.0000  2^22   100.00%  1.0000    0.00%  0.0029

    trained                   loss, last 20 steps    % wrong, test images    skipped
     24 float32              0.238 (0.221 to 0.264)    13.2 (11.4 to 16.2)        0
     24 one scale, static    0.238 (0.221 to 0.264)    13.2 (11.4 to 16.2)        0
     24 one scale, dynamic   0.248 (0.225 to 0.268)    14.5 (12.5 to 17.2)        5
     24 one scale, headroom  0.238 (0.221 to 0.264)    13.4 (11.4 to 16.2)        0
     24 one a layer          0.238 (0.221 to 0.264)    13.2 (11.4 to 16.2)        0
     36 float32              0.271 (0.241 to 0.297)    15.7 (13.5 to 18.5)        0
     36 one scale, static    0.582 (0.564 to 0.595)    23.1 (20.2 to 25.3)        7
     36 one scale, dynamic   0.710 (0.660 to 0.804)    26.7 (23.6 to 29.6)        6
     36 one scale, headroom  1.131 (0.997 to 1.199)    41.6 (37.4 to 46.1)        0
     36 one a layer          0.271 (0.241 to 0.297)    15.5 (13.1 to 18.2)        0

With 24 layers the largest gradient falls by 23 binades from the last to the first: one well chosen
scale is as good as many. The dynamic one is behind because it starts at 2^16 and climbs. With 36
layers, and 35 binades, no single scale will do: what saves the first layer overflows in the last.
One a layer trains as float32 does. The static scale is a quarter of the best of the table, which
would overflow in most steps; of 2^18 to 2^22 it is the one with the least loss after training.

The rule of the layers is `headroom`, from scales that one batch in float32 suggests.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import jscale

f16, f32 = jnp.float16, jnp.float32
WIDTH, BATCH, PIXELS, NOISE = 128, 128, 64, 448


@dataclasses.dataclass(frozen=True)
class Config:
    """One loss scale against one for each layer, in a very deep net."""

    depths: tuple[int, ...] = (12, 24, 28, 32, 36)
    """Layers of the nets whose gradients are compared."""
    trained: tuple[int, ...] = (24, 36)
    """Layers of the nets that are trained."""
    steps: int = 200
    """Training steps."""
    seeds: int = 3
    """How many runs of each kind."""
    out: Path = Path("runs/deep_net")
    """Where the picture goes."""


def init(key, depth):
    first, layers, head = jax.random.split(key, 3)
    orthogonal = jax.nn.initializers.orthogonal()
    scaled = lambda key, *shape: jax.random.normal(key, shape) * shape[0] ** -0.5
    return {
        "first": scaled(first, PIXELS + NOISE, WIDTH),
        "layers": jax.vmap(lambda key: orthogonal(key, (WIDTH, WIDTH)))(
            jax.random.split(layers, depth)
        ),
        "head": scaled(head, WIDTH, 10),
    }


def layer(w, x, dtype):
    """Passes on half of its cotangent."""
    y = jnp.tanh(x.astype(dtype) @ w.astype(dtype))
    half = 0.5 * y
    return half + jax.lax.stop_gradient(half)


def outputs(params, x, scale=None):
    """In float32 without a scale, all in float16 at one, or every layer in a region at its own."""
    dtype = f32 if scale is None else f16

    def at(own, **options):
        fun = functools.partial(layer, dtype=dtype)
        if not isinstance(scale, dict):
            return fun
        wide = lambda w, x: fun(w, x).astype(f32)  # what passes between the regions
        return jscale.region(wide, own, scale["head"], **options)

    of = lambda name: scale[name] if isinstance(scale, dict) else None
    x = at(of("first"))(params["first"], x)
    body = lambda x, layer: (at(layer[1], stop_nonfinite=1)(layer[0], x), None)
    x, _ = jax.lax.scan(body, x, (params["layers"], of("layers")))
    return (x.astype(dtype) @ params["head"].astype(dtype)).astype(f32)


def loss_fn(params, x, y, scale=None):
    logits = outputs(params, x, scale)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def gradients(params, x, y, scale=None):
    """Loss and unscaled gradients."""
    fun = functools.partial(loss_fn, scale=scale)
    root = "head" if isinstance(scale, dict) else None
    return jscale.value_and_grad(fun, 1.0 if scale is None else scale, root=root)(params, x, y)


@functools.cache
def digits():
    images, labels = load_digits(return_X_y=True)
    return np.float32((images - 8) / 6), np.int32(labels)


def batch(key, test=False):
    """Images among as many pixels of noise again, seven times; the first layer has to find them."""
    images, labels = digits()
    chosen, noise = jax.random.split(key)
    low, high = (1500, len(labels)) if test else (0, 1500)
    i = jnp.arange(low, high) if test else jax.random.randint(chosen, (BATCH,), low, high)
    x = jnp.asarray(images)[i]
    noise = jax.random.normal(noise, (len(i), NOISE))
    return jnp.concatenate([x, noise], 1), jnp.asarray(labels)[i]


# The first layer's gradient.


def zeros_and_error(grads, reference):
    """For each layer: its share of zeros, and its error relative to float32."""
    norms = lambda g: jnp.append(
        jnp.linalg.norm(g["first"]), jnp.linalg.norm(g["layers"], axis=(1, 2))
    )
    zeros = lambda g, of: jnp.mean((g == 0) & (of != 0), axis=(-1, -2))
    lost = jax.tree.map(zeros, grads, reference)
    error = norms(jax.tree.map(jnp.subtract, grads, reference)) / norms(reference)
    return jnp.append(lost["first"], lost["layers"]), error


@jax.jit
def at_one_scale(params, data):
    """For every power of two that does not overflow: zeros and error of each layer."""
    _, reference = gradients(params, *data)

    def at(exponent):
        _, grads = gradients(params, *data, jnp.ldexp(jnp.float32(1), exponent))
        return jscale.all_finite(grads), *zeros_and_error(grads, reference)

    return jax.lax.map(at, jnp.arange(40))


def best_of(params, data):
    """log2 of the scale with the least error in the first layer; zeros, errors at 1, and at it."""
    finite, zeros, error = map(np.asarray, at_one_scale(params, data))
    best = min(range(finite.sum()), key=lambda e: (error[e, 0].round(4), -e))
    return best, (zeros[0], error[0]), (zeros[best], error[best])


def per_layer(rule, depth):
    return {"head": rule, "layers": jscale.stacked(rule, depth), "first": rule}


def started(state, params, data):
    """A state of rules for each layer with the scales that one batch in float32 suggests."""
    _, grads = gradients(params, *data)
    amax = jax.tree.map(lambda g: jnp.max(jnp.abs(g), axis=(-1, -2)), grads)
    fitting = jax.tree.map(lambda x: jnp.ldexp(1.0, 13 - jnp.frexp(x)[1]), amax)
    rule = {key: x._replace(loss_scale=fitting[key]) for key, x in state.rule.items()}
    return state._replace(rule=rule)


@functools.partial(jax.jit, static_argnames="depth")
def compare(params, data, depth):
    """The gradients in float32, those in float16 with a scale for each layer, and the scales."""
    _, reference = gradients(params, *data)
    rule = per_layer(jscale.headroom(), depth)
    state = jscale.with_loss_scale(optax.identity(), rule).init(params)
    scale = jscale.loss_scale(started(state, params, data))
    _, grads = gradients(params, *data, scale)
    return reference, grads, scale


# Training.


def adam():
    """With an eps that gradients of 2^-46 exceed, as the usual 1e-8 does not.

    It must not be smaller either: float32 cannot hold the squares of what is below 1e-19.
    """
    return optax.adam(3e-4, eps=1e-17)


RULES = {
    "float32": lambda best, depth: None,
    "one scale, static": lambda best, depth: jscale.static(2.0 ** (best - 2)),
    "one scale, dynamic": lambda best, depth: jscale.dynamic(growth_interval=20),
    "one scale, headroom": lambda best, depth: jscale.headroom(max_scale=2.0**80),
    "one a layer": lambda best, depth: per_layer(jscale.headroom(max_scale=2.0**80), depth),
}


@functools.partial(jax.jit, static_argnames=("kind", "best", "depth", "steps"))
def train(key, kind, best, depth, steps):
    """Losses and scales by step, how many steps were skipped, and the share of wrong answers."""
    init_key, tested, *keys = jax.random.split(key, steps + 2)
    params = init(init_key, depth)
    rule = RULES[kind](best, depth)
    tx = jscale.with_loss_scale(adam(), jscale.off() if rule is None else rule)
    state = tx.init(params)
    state = started(state, params, batch(tested)) if isinstance(rule, dict) else state

    def step(carry, key):
        params, state = carry
        scale = None if rule is None else jscale.loss_scale(state)
        loss, grads = gradients(params, *batch(key), scale)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), (loss, jscale.loss_scale(state))

    (params, state), (losses, scales) = jax.lax.scan(step, (params, state), jnp.stack(keys))
    x, y = batch(tested, test=True)
    wrong = outputs(params, x, scale=None if rule is None else 1.0).argmax(-1) != y
    return losses, scales, state.skipped_steps, wrong.mean()


# The picture.


def draw(path, depth, exponents, zeros, best, fitting, runs):
    """Exponents and zeros by layer, for one net; scales and losses of its training."""
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    figure.suptitle(f"{depth} tanh layers: one loss scale against one for each layer")
    (ax1, ax2), (ax3, ax4) = figure.subplots(2, 2)
    x = np.arange(depth + 1)
    ax1.fill_between(x, -24 - best, 16 - best, color="C3", alpha=0.2, lw=0)
    ax1.fill_between(x, -24 - fitting, 16 - fitting, color="C0", alpha=0.2, lw=0)
    ax1.plot(x, -24 - fitting, "C0", lw=1)
    ax1.plot(x, exponents[0], "k", label="largest")
    ax1.plot(x, exponents[1], "k--", label="median")
    ax1.text(1, 14 - best, f"float16 at one scale, $2^{{{best}}}$", color="C3", va="top")
    ax1.text(1, -26 - best, "float16 at one scale a layer", color="C0", va="top")
    ax1.set(title="gradients of the weights, and what float16 holds of them", ylabel="log2")
    ax1.legend(loc="lower right")
    for (name, y), color in zip(zeros.items(), ("C3", "C0"), strict=True):
        ax2.plot(x, 100 * y, color, label=name)
    ax2.set(title="gradients that are zero in float16", ylabel="% of a layer's")
    ax2.legend()
    for ax in (ax1, ax2):
        ax.set_xlabel("layer, from the input on")
    scales = runs["one a layer"][1]
    steps = np.arange(1, 1 + len(scales["first"]))
    shown = np.linspace(0, depth - 1, 5).round().astype(int)
    for i, layer in enumerate(shown):
        color = f"{0.75 * i / len(shown)}"
        ax3.plot(
            steps, np.log2(scales["layers"][:, layer]), color=color, label=f"layer {layer + 1}"
        )
    for name, style in (("first", "C0"), ("head", "C2")):
        ax3.plot(steps, np.log2(scales[name]), style, label=name)
    ax3.plot(steps, np.log2(runs["one scale, dynamic"][1]), "C1", label="one scale, dynamic")
    ax3.set(title="loss scales while it trains", xlabel="step", ylabel="log2")
    ax3.set_ylim(top=ax3.get_ylim()[1] + 14)
    ax3.legend(loc="upper center", ncols=4)
    colors = {
        "float32": "k",
        "one scale, static": "C3",
        "one scale, dynamic": "C1",
        "one scale, headroom": "C4",
        "one a layer": "C0",
    }
    smooth = lambda x: np.convolve(x, np.ones(10) / 10, "valid") if len(x) >= 10 else x
    for name, (losses, *_) in runs.items():
        curves = np.array([smooth(x) for x in losses])
        ax4.plot(
            curves.mean(0),
            color=colors[name],
            label=name,
            ls="--" if name == "one a layer" else "-",
        )
        ax4.fill_between(
            range(curves.shape[1]),
            curves.min(0),
            curves.max(0),
            color=colors[name],
            alpha=0.15,
            lw=0,
        )
    ax4.set(title="loss, mean of 10 steps; shaded: all seeds", xlabel="step", ylim=(0, None))
    ax4.legend()
    path.mkdir(parents=True, exist_ok=True)
    figure.savefig(path / "deep_net.png", dpi=70)


def main(config: Config):
    data = batch(jax.random.key(0))
    print("the first layer's gradient        1        best scale      one a layer")
    print("layers  its largest     zeros   error   scale zeros   error   zeros   error")
    found = {}
    for depth in sorted({*config.depths, *config.trained}):
        params = init(jax.random.key(1), depth)
        reference, grads, scales = compare(params, data, depth)
        best, at_one, at_best = best_of(params, data)
        own = zeros_and_error(grads, reference)
        found[depth] = params, reference, scales, best, at_best, own
        largest = np.log2(np.abs(reference["first"]).max())
        print(f"{depth:6d}  2^{largest:<10.1f}", end="")
        for (zeros, error), scale in ((at_one, ""), (at_best, f"  2^{best:<3d}"), (own, "")):
            print(f"{scale} {100 * zeros[0]:7.2f}% {error[0]:7.4f}", end="")
        print(flush=True)

    print("\ntrained                   loss, last 20 steps    % wrong, test images    skipped")
    for depth in config.trained:
        best, runs = found[depth][3], {}
        for kind in RULES:
            keys = jax.random.split(jax.random.key(2), config.seeds)
            out = [jax.device_get(train(key, kind, best, depth, config.steps)) for key in keys]
            losses, wrong = np.array([o[0] for o in out]), 100 * np.array([o[3] for o in out])
            last = losses[:, -20:].mean(1)
            runs[kind] = losses, out[0][1]
            print(f"{depth:3d} {kind:20s} {spread(last, 3):>22s} {spread(wrong, 1):>22s}", end="")
            print(f" {max(int(o[2]) for o in out):8d}", flush=True)
    params, reference, scales, best, at_best, own = found[depth]
    by_layer = lambda fn: np.append(fn(reference["first"]), [fn(g) for g in reference["layers"]])
    exponents = [np.log2(by_layer(lambda g, f=f: f(np.abs(g)))) for f in (np.max, np.median)]
    fitting = np.log2(np.append(scales["first"], scales["layers"]))
    zeros = {f"one scale, $2^{{{best}}}$": at_best[0], "one a layer": own[0]}
    draw(config.out, depth, exponents, zeros, best, fitting, runs)
    print(f"\nwrote {config.out / 'deep_net.png'}")


def spread(values, digits):
    return f"{values.mean():.{digits}f} ({values.min():.{digits}f} to {values.max():.{digits}f})"


if __name__ == "__main__":
    main(tyro.cli(Config))
