"""LoRA over a 4-bit base in float16, with and without a loss scale.

    python experiments/qlora.py             # some 4 minutes on 2 cores; writes runs/qlora
    python experiments/qlora.py --stored nf4 --pretrained 60 --steps 20 --seeds 1    # 30 seconds

The quickstart's transformer has read Python's help texts. The matrices of its blocks are stored in
4 bits with a float32 scale for every 32 weights: NF4 (QLoRA, Dettmers et al., 2023) or int4,
rounded to nearest or by GPTQ. Over them float32 adapters of rank 8 learn Python's source code, with
products in float32, in float16, or in float16 with a dynamic loss scale. `qwix` quantises and adds
adapters (`pip install 'jscale[qlora]'`), since it has NF4, int4 and LoRA for Flax NNX in one; aqt
is for quantised products and has neither NF4 nor adapters. Its GPTQ takes minutes even on this
model, as it compiles each row of a matrix by itself: it collects the statistics, `gptq_levels` does
the rounding.

The loss is as it is, or divided by 256, as accumulated and data-parallel training divide it by a
large token count. A run has failed if its loss on held-out text is not finite, not below that of
the base, or more than 0.05 nats above that of float32 products on the same base. `zeros` are the
adapters' gradients that are zero in float16 alone, and `error` is the distance of the gradient from
that of float32 as a share of it (the median), both at the adapters that float32 found. Expected
(means of ten seeds; the texts differ between Pythons, and with them the digits):

    base        products  divisor  bits/byte          failed  zeros   error  skipped  scale
    float32     float32         1  2.631 +-0.015  from 2.965
    nf4         float32         1  2.644 +-0.025  from 2.993
    nf4         unscaled        1  2.645 +-0.026       0/10   0.00%  0.0025      0.0    2^0
    nf4         scaled          1  2.644 +-0.026       0/10   0.00%  0.0017      0.1    2^20
    nf4         unscaled      256  2.717 +-0.036       3/10   0.26%  0.1561      0.0    2^0
    nf4         scaled        256  2.645 +-0.026       0/10   0.00%  0.0017      0.0    2^20
    int4        float32         1  2.645 +-0.031  from 2.986
    int4        unscaled        1  2.646 +-0.031       0/10   0.00%  0.0026      0.0    2^0
    int4        scaled          1  2.646 +-0.030       0/10   0.00%  0.0017      0.1    2^20
    int4        unscaled      256  2.716 +-0.064       3/10   0.23%  0.1639      0.0    2^0
    int4        scaled        256  2.645 +-0.031       0/10   0.00%  0.0017      0.0    2^20
    int4, GPTQ  float32         1  2.640 +-0.021  from 2.973
    int4, GPTQ  unscaled        1  2.640 +-0.022       0/10   0.00%  0.0026      0.0    2^0
    int4, GPTQ  scaled          1  2.637 +-0.021       0/10   0.00%  0.0018      0.3    2^20
    int4, GPTQ  unscaled      256  2.712 +-0.026       3/10   0.26%  0.1682      0.0    2^0
    int4, GPTQ  scaled        256  2.640 +-0.022       0/10   0.00%  0.0018      0.0    2^20
    Kept: adapters 98 kB, their state 197 kB;
    base: float32 1018 kB, nf4 272 kB, int4 272 kB, int4, GPTQ 272 kB.

NF4 and int4 lose little against a float32 base, and float16 nothing against float32, once there is
a scale. Without one it is as good while the loss is not divided. If it is, all runs end finite and
better than they began, but 3 of 10 on each base fall short by 0.05 nats, and the mean by 0.07 bits,
so that another threshold would count others. What is lost hardly shows as zeros in the adapters'
gradients: a quarter of a percent. But 99 % of them are subnormal, and so are the cotangents of the
logits, at most 2^-17, that all others come from; the gradient is off by some 16 %. A fifth of
QLoRA's float16 runs failed at full size. If activations that overflow were the cause, this small
model, which has none, says nothing about it: a loss scale does not help against them.
"""

import dataclasses
import functools
import importlib.util
import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import quickstart
import qwix
import tyro
from flax import nnx
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure
from qwix.contrib import gptq

import jscale

TARGETS = r"blocks/\d+/(qkv|proj|up|down)"
RANK, ALPHA, TILE = 8, 16.0, 32
BATCH, LEARNING_RATE = 8, 1e-2
LEARNT = "argparse", "dataclasses", "inspect", "logging", "typing", "unittest.mock"
HELD_OUT = "configparser"
WORSE = 0.05 / math.log(2)  # bits: 0.05 nats above float32 on the same base is a failure
STORED = {
    "float32": (None, ["float32"]),
    "nf4": ("nf4", ["nf4"]),
    "int4": (jnp.int4, ["int4", "int4, GPTQ"]),
}
RULES = {
    "float32": jscale.off(),
    "unscaled": jscale.static(1),  # not scaled, but checked for overflow
    "scaled": jscale.dynamic(growth_interval=20),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """LoRA over a 4-bit base in float16, with and without a loss scale."""

    stored: tuple[Literal["nf4", "int4"], ...] = ("nf4", "int4")
    """What the base is stored in, besides float32."""
    divisors: tuple[float, ...] = (1.0, 256.0)
    """What the loss is divided by, as by a large global token count."""
    steps: int = 100
    """Training steps of each run."""
    seeds: int = 10
    """Runs of each kind."""
    pretrained: int = 400
    """Steps that the base is trained before."""
    out: Path = Path("runs/qlora")
    """Where the pretrained base is kept and the picture goes."""


def as_bytes(text):
    return np.frombuffer(text.encode(), np.uint8)


def source(name):
    return Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8")


def batches(text, seed, steps, size):
    """int32[steps, size, CONTEXT + 1]."""
    starts = np.random.default_rng(seed).integers(0, len(text) - quickstart.CONTEXT, (steps, size))
    return text[starts[..., None] + np.arange(quickstart.CONTEXT + 1)].astype(np.int32)


def bits(model, tokens):
    return quickstart.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]) / math.log(2)


def pretrain(steps, folder):
    """The quickstart's model, which has read Python's help texts; kept in a file."""
    model = quickstart.Transformer(nnx.Rngs(0))
    path = folder / f"base-{steps}.msgpack"
    if not path.exists():
        config = quickstart.Config(loss_divisor=1.0)
        model, optimizer = quickstart.create(jscale.off(), config)
        step = quickstart.make_train_step(jnp.float32, 1.0)
        text = as_bytes("".join(topics[name] for name in sorted(topics)))
        for tokens in batches(text, 0, steps, quickstart.BATCH):
            step(model, optimizer, tokens)
        folder.mkdir(parents=True, exist_ok=True)
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        path.write_bytes(flax.serialization.msgpack_serialize(params))
    restored = flax.serialization.msgpack_restore(path.read_bytes())
    nnx.update(model, jax.tree.map(jnp.asarray, nnx.restore_int_paths(restored)))
    return model


def quantised(model, qtype, seed, tokens):
    """The model with matrices stored as `qtype`, or None for float32, and new float32 adapters."""
    how = dict(module_path=TARGETS, weight_qtype=qtype, tile_size=qtype and TILE)
    provider = qwix.LoraProvider([qwix.LoraRule(rank=RANK, alpha=ALPHA, **how)])
    return qwix.apply_lora_to_model(model, provider, tokens, rngs=nnx.Rngs(seed))


def calibrated(adapted, model, batches):
    """`adapted` with the int4 levels that GPTQ finds on these batches."""
    rule = gptq.GptqRule(module_path=TARGETS, weight_qtype=jnp.int4, tile_size=TILE)
    seen = qwix.quantize_model(model, gptq.GptqCalibrationProvider([rule]), batches[0])
    for tokens in batches:
        seen(tokens)
    adapted = nnx.clone(adapted)
    for blocks in zip(adapted.blocks, model.blocks, seen.blocks, strict=True):
        for name in ("qkv", "proj", "up", "down"):
            new, plain, inputs = (getattr(block, name) for block in blocks)
            hessian, q = inputs.kernel_gptq["sum_of_hessian"], new.kernel.array
            q.qvalue[...] = gptq_levels(plain.kernel[...], hessian, q.scale[...])
    return adapted


def gptq_levels(w, hessian, scale):
    """Frantar et al., 2022: rounds row by row, and lets the rows below make up for the error."""
    w, hessian = np.array(w, np.float64), np.array(hessian, np.float64)
    scale = np.repeat(scale, len(w) // len(scale), axis=0)
    hessian += 0.01 * np.mean(np.diag(hessian)) * np.eye(len(w))
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    levels = np.zeros(w.shape)
    for i, row in enumerate(w):
        levels[i] = np.clip(np.round(row / scale[i]), -8, 7)
        error = (row - levels[i] * scale[i]) / upper[i, i]
        w[i + 1 :] -= np.outer(upper[i, i + 1 :], error)
    return jnp.asarray(levels, jnp.int4)


def make_step(graph, compute):
    """One training step; the divisor of the loss is an argument."""
    dtype = jnp.float32 if compute == "float32" else jnp.float16

    @functools.partial(jscale.autocast, compute_dtype=dtype)
    def loss_fn(adapters, frozen, tokens, divisor):
        model = nnx.merge(graph, adapters, frozen)
        loss = quickstart.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        return loss / divisor, loss

    def optimizer(divisor):
        # Gradients are smaller by the divisor, and so are the norm to clip at and Adam's epsilon.
        adam = optax.adam(LEARNING_RATE, eps=1e-8 / divisor)
        inner = optax.chain(optax.clip_by_global_norm(1 / divisor), adam)
        return jscale.with_loss_scale(inner, RULES[compute])

    @jax.jit
    def step(adapters, state, frozen, tokens, divisor):
        grad = jscale.value_and_grad(loss_fn, jscale.loss_scale(state), has_aux=True)
        (_, loss), grads = grad(adapters, frozen, tokens, divisor)  # of the adapters alone
        updates, state = optimizer(divisor).update(grads, state, adapters, loss=loss)
        return optax.apply_updates(adapters, updates), state, grads

    return step, optimizer(1.0).init


def nbytes(tree):
    """As stored: two 4-bit numbers in a byte, as a GPU has them."""
    each = lambda x: (jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo)(x.dtype)
    return sum(x.size * each(x).bits // 8 for x in jax.tree.leaves(tree))


def train_all(config):
    """Results by base, precision and divisor; exponents of gradients; sizes of what is kept."""
    model = pretrain(config.pretrained, config.out)
    learnt = as_bytes("".join(map(source, LEARNT)))
    held_out = batches(as_bytes(source(HELD_OUT)), 0, 1, 64)[0]
    sample = batches(learnt, 0, 8, quickstart.BATCH)[..., :-1]
    seeds = range(config.seeds)
    fresh = [nnx.state(quantised(model, None, seed, sample[0]), nnx.LoRAParam) for seed in seeds]
    texts = [batches(learnt, seed, config.steps + 1, BATCH) for seed in seeds]

    results, exponents, sizes = {}, {}, {"adapters": nbytes(fresh[0])}
    for qtype, bases in [STORED[name] for name in ("float32", *config.stored)]:
        adapted = quantised(model, qtype, 0, sample[0])
        graph, _, _ = nnx.split(adapted, nnx.LoRAParam, ...)
        steps = {compute: make_step(graph, compute) for compute in RULES}

        @jax.jit
        def evaluate(adapters, frozen):
            return bits(nnx.merge(graph, adapters, frozen), held_out)

        def run(compute, divisor, seed, frozen):
            (step, init), adapters = steps[compute], fresh[seed]
            state = init(adapters)
            for tokens in texts[seed][:-1]:
                last = state
                adapters, state, _ = step(adapters, last, frozen, tokens, divisor)
            sizes["state"] = nbytes(state.inner)
            # The scale of `last` was in use, where that of `state` may have grown untried.
            return adapters, last, float(evaluate(adapters, frozen)), int(state.skipped_steps)

        def gradient(compute, divisor, seed, frozen, adapters, state):
            """At given adapters, on text that no step has seen."""
            _, _, grads = steps[compute][0](adapters, state, frozen, texts[seed][-1], divisor)
            return ravel_pytree(grads)[0]

        for base in bases:
            adapted = calibrated(adapted, model, sample) if base == "int4, GPTQ" else adapted
            frozen = nnx.state(adapted, nnx.Not(nnx.LoRAParam))
            sizes[base] = nbytes(frozen)
            start = float(evaluate(fresh[0], frozen))  # the second halves of new adapters are zero
            ends = [run("float32", 1.0, seed, frozen) for seed in seeds]
            results[base, "float32", 1.0] = [{"start": start, "bits": end[2]} for end in ends]
            for divisor in config.divisors if qtype else ():
                true = [
                    gradient("float32", divisor, seed, frozen, *end[:2])
                    for seed, end in zip(seeds, ends, strict=True)
                ]
                exponents[base, divisor] = jscale.stats(true)
                for compute in ("unscaled", "scaled"):
                    runs = results[base, compute, divisor] = []
                    for seed, end, want in zip(seeds, ends, true, strict=True):
                        _, last, found, skipped = run(compute, divisor, seed, frozen)
                        got = gradient(compute, divisor, seed, frozen, end[0], last)
                        error = optax.tree.norm(got - want) / optax.tree.norm(want)
                        runs.append(
                            {
                                "bits": found,
                                "failed": not found < min(start, end[2] + WORSE),
                                "zeros": float(jnp.mean(got == 0) - jnp.mean(want == 0)),
                                "error": float(jnp.where(jnp.isnan(error), jnp.inf, error)),
                                "skipped": skipped,
                                "scale": float(jscale.loss_scale(last)),
                            }
                        )
    return results, exponents, sizes


def table(results):
    lines = [
        "base        products  divisor  bits/byte          failed  zeros   error  skipped  scale"
    ]
    for (base, compute, divisor), runs in results.items():
        column = lambda key: [one[key] for one in runs]
        found = column("bits")
        line = f"{base:11} {compute:9}{divisor:8g}  {np.mean(found):.3f} +-{np.std(found):.3f}"
        if "error" in runs[0]:
            line += f"{sum(column('failed')):8}/{len(runs)}{np.mean(column('zeros')):8.2%}"
            line += f"{np.median(column('error')):8.4f}{np.mean(column('skipped')):9.1f}"
            line += f"    2^{np.log2(np.median(column('scale'))):.0f}"
        else:
            line += f"  from {runs[0]['start']:.3f}"
        lines.append(line)
    return "\n".join(lines)


def memory(sizes):
    own = {"adapters": sizes["adapters"], "their state": sizes["state"]}
    bases = {name: size for name, size in sizes.items() if name not in ("adapters", "state")}
    show = lambda all: ", ".join(f"{name} {size / 1000:.0f} kB" for name, size in all.items())
    return f"Kept: {show(own)}; base: {show(bases)}."


def draw(path, exponents, results):
    """Where the gradients of adapters lie for the largest divisor, without and with a scale."""
    base, divisor = max(exponents, key=lambda key: key[1])
    scaled = np.median([one["scale"] for one in results[base, "scaled", divisor]])
    with jscale.plot.style():
        figure = Figure(figsize=(8, 5.5), layout="constrained")
        for ax, scale in zip(figure.subplots(2, sharex=True), (1.0, scaled), strict=True):
            jscale.plot.exponents(exponents[base, divisor], scale, ax, formats=["float16"])
            ax.set_title(f"adapters over {base}, loss / {divisor:g}, scale 2^{np.log2(scale):.0f}")
        figure.savefig(path, dpi=80)


def main():
    config = tyro.cli(Config)
    results, exponents, sizes = train_all(config)
    print(table(results))
    print(memory(sizes))
    draw(config.out / "qlora.png", exponents, results)
    print(f"The picture is {config.out}/qlora.png.")


if __name__ == "__main__":
    main()
