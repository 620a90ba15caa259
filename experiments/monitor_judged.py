"""Does Monitor speak up on sick runs, how early, and is it silent on healthy ones?

A byte-level model of four residual layers is trained in float16 in ways that are healthy and in
ways that are not; and runs that were recorded (record_amax.py, BLOOM's log lines) are replayed
under several rules. A row is a kind of run: how many there were, their steps, the steps skipped and
the last losses (means), and each kind of advice with the first step at which a run got it, and how
many of the runs did if not all.

    python experiments/monitor_judged.py            # about 1 minute on 2 cores
    python experiments/monitor_judged.py --steps 220 --seeds 1 --no-recorded    # half of that

Expected:

    run                                runs steps  skips     loss  advice, and at which step first
    healthy, static(2^14)                 3   400    0.0     2.56  -
    healthy, dynamic()                    3   400    2.0     2.58  -
    healthy, dynamic, growth_interval=20  3   400   15.3     2.59  -
    healthy, log_normal()                 3   400    0.0     2.57  -
    healthy, headroom()                   3   400    0.7     2.57  -
    one batch of NaN                      1   400   16.0     2.66  loss 201
    NaN in all data                       1   400  207.0      nan  loss 201
    losses of all sizes                   1   400   26.0 6.54e+03  rising 205, falling 207, high 223, underflow 242
    learning rate x10                     3   400   19.7     26.8  rising 20, falling 365 (1 of 3)
    learning rate x30                     3   400   21.0      867  rising 20, falling 356 (1 of 3)
    loss / 2^16, no scale                 1   400    0.0 0.000348  underflow 3, rising 59
    loss / 2^40, no scale                 1   400    0.0 5.62e-12  zero 20
    static(2^20)                          1   400  400.0     6.17  stuck 5
    growth_interval=5                     1   400   58.0     2.63  skips 302
    recorded, transformer, 13 rules      13   300    1.1     1.85  -
    recorded, convnet, 13 rules          13  3000    6.3   0.0666  falling 2267 (1 of 13)
    recorded, rnn, 13 rules              13  2000    2.1     1.41  -
    recorded, diverging, torch            1   474    4.0     10.4  falling 461, rising 463
    recorded, diverging, Megatron         1   474   21.0     10.4  falling 453, rising 463
    recorded, diverging, log_normal       1   474    2.0     10.4  rising 463
    published, BLOOM 104B                 1     9    6.0     3.94  burst 17065, falling 17067
    published, BLOOM 13B                  1     8    0.0     5.76  falling 29060

The sick data begin at step 201. In BLOOM's 104B run the loss jumps at 17062, where the first
overflow is, and the lines end at 17068; its 13B run has a line every ten steps and jumps at 29050.
From step 475 on no scale fits the recorded diverging run. The one alarm in 39 replays of healthy
runs comes with PopART's rule, which goes up and down by six doublings. The last digits depend on
the versions of Python, which brings the text, and of jax.
"""  # noqa: E501

import dataclasses
import functools
import json
import logging
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from scaler_rules import OTHERS, OURS
from scaler_shootout import replay

import jscale

RECORDED = Path(__file__).parent / "recorded"
WIDTH, LAYERS, CONTEXT, BATCH, RATE = 32, 4, 16, 32, 6e-3
SICK_FROM = 200
LAST = 20
HEALTHY = {
    "static(2^14)": jscale.static(2.0**14),
    "dynamic()": jscale.dynamic(),
    "dynamic, growth_interval=20": jscale.dynamic(growth_interval=20),
    "log_normal()": jscale.log_normal(),
    "headroom()": jscale.headroom(),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What Monitor says of runs that are sick, and that it is silent on healthy ones."""

    steps: int = 400
    """Steps of each run."""
    seeds: int = 3
    """Runs of each healthy kind."""
    recorded: bool = True
    """Replay recorded runs too."""


def new_params(key):
    keys = jax.random.split(key, 4)
    normal = lambda key, *shape: jax.random.normal(key, shape) * shape[-2] ** -0.5
    return {
        "embed": normal(keys[0], WIDTH, 256).T,
        "into": normal(keys[1], CONTEXT * WIDTH, 4 * WIDTH),
        "layers": normal(keys[2], LAYERS, 4 * WIDTH, 4 * WIDTH),
        "out": normal(keys[3], 4 * WIDTH, 256),
    }


def loss_fn(params, tokens, weight):
    x = params["embed"][tokens[:, :-1]].reshape(len(tokens), -1) @ params["into"]
    for w in params["layers"]:
        x = x + jax.nn.relu(x / (1e-6 + jnp.std(x, axis=-1, keepdims=True))) @ w
    logits = x @ params["out"]
    return weight * optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1]).mean()


@functools.partial(jax.jit, static_argnums=0)
def train(rule, key, rate, tokens, weights):
    """The metrics of each step. Weights are what the losses are multiplied with."""
    tx = jscale.with_loss_scale(optax.adam(rate, eps=1e-20), rule)
    half = jscale.autocast(loss_fn)

    def step(carry, batch):
        params, state = carry
        scale = jscale.loss_scale(state)
        loss, grads = jscale.value_and_grad(half, scale)(params, *batch)
        updates, state = tx.update(grads, state, params, loss=loss)
        found = jscale.stats(grads).metrics(scale)
        return (optax.apply_updates(params, updates), state), {
            "loss": loss,
            **jscale.metrics(state),
            **found,
        }

    params = new_params(key)
    return jax.lax.scan(step, (params, tx.init(params)), (tokens, weights))[1]


def batches(steps, seed):
    text = np.frombuffer("".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    starts = np.random.default_rng(seed).integers(0, len(text) - CONTEXT, (steps, BATCH))
    return text[starts[..., None] + np.arange(CONTEXT + 1)].astype(np.int32)


def trained(config):
    """Of each kind of run, the metrics of one after the other."""

    def run(rule, seed=0, rate=1.0, weights=1.0):
        weights = jnp.broadcast_to(jnp.float32(weights), (config.steps,))
        tokens = batches(config.steps, seed)
        return train(rule, jax.random.key(seed), RATE * rate, tokens, weights)

    for name, rule in HEALTHY.items():
        yield f"healthy, {name}", [run(rule, seed) for seed in range(config.seeds)]
    step, quick = np.arange(config.steps), HEALTHY["dynamic, growth_interval=20"]
    yield "one batch of NaN", [run(quick, weights=np.where(step == SICK_FROM, np.nan, 1))]
    yield "NaN in all data", [run(quick, weights=np.where(step >= SICK_FROM, np.nan, 1))]
    spikes = np.where((step >= SICK_FROM) & (step % 2 == 0), 2.0 ** (step // 2 % 4 * 4), 1)
    yield "losses of all sizes", [run(quick, weights=spikes)]
    yield "learning rate x10", [run(quick, seed, rate=10) for seed in range(config.seeds)]
    yield "learning rate x30", [run(quick, seed, rate=30) for seed in range(config.seeds)]
    yield "loss / 2^16, no scale", [run(jscale.static(1), weights=2.0**-16)]
    yield "loss / 2^40, no scale", [run(jscale.static(1), weights=2.0**-40)]
    yield "static(2^20)", [run(jscale.static(2.0**20))]
    yield "growth_interval=5", [run(jscale.dynamic(growth_interval=5))]


def replayed():
    rules = OTHERS | OURS
    for name in ("transformer", "convnet", "rnn"):
        yield f"recorded, {name}, {len(rules)} rules", [recorded(r, name) for r in rules.values()]
    for rule in ("torch", "Megatron", "log_normal"):
        yield f"recorded, diverging, {rule}", [recorded(rules[rule], "diverging")]


def recorded(rule, name):
    """As if the gradients were one number; up to where float16 fails in the forward pass."""
    _, _, states, data = replay(rule, name)
    steps = len(states.loss_scale)
    used = np.append(np.float32(rule.init().loss_scale), states.loss_scale[:-1])
    skipped = np.log2(used) >= data["limit"][:steps].astype(np.float32) + 0.5
    return {
        "loss": data["loss"][:steps],
        "grad_scale": states.loss_scale,
        "grad_norm": np.where(skipped, np.inf, np.exp2(data["log2_amax"][:steps])),
        "finite": ~skipped,
        "skipped_steps": np.cumsum(skipped),
    }


def bloom(lines):
    flags = {"finite": ~np.array(lines["overflow"])} if "overflow" in lines else {}
    return {"loss": np.array(lines["loss"]), "grad_scale": np.float64(lines["after"]), **flags}


def listen(columns, steps=None):
    """A monitor that has read a run."""
    monitor, columns = jscale.Monitor(), jax.device_get(columns)
    for i in range(len(columns["grad_scale"])):
        step = i + 1 if steps is None else steps[i]
        monitor.update(step, {name: x[i] for name, x in columns.items()})
    monitor.flush()
    return monitor


def row(name, runs, monitors):
    first = {}
    for monitor in monitors:
        for kind, step in {a.kind: a.step for a in reversed(monitor.advice)}.items():
            first.setdefault(kind, []).append(step)
    of = lambda n: f" ({n} of {len(runs)})" if n < len(runs) else ""
    kinds = sorted(first.items(), key=lambda item: min(item[1]))
    said = ", ".join(f"{kind} {min(steps)}{of(len(steps))}" for kind, steps in kinds) or "-"
    skips = np.mean([np.sum(~run["finite"]) if "finite" in run else 0 for run in runs])
    loss = np.mean([np.mean(run["loss"][-LAST:]) for run in runs])
    return f"{name:36}{len(runs):3}{len(runs[0]['loss']):6}{skips:7.1f}{loss:9.3g}  {said}"


def main():
    config = tyro.cli(Config)
    print(f"{'run':35}runs steps  skips     loss  advice, and at which step first")
    for name, runs in trained(config):
        print(row(name, jax.device_get(runs), [listen(run) for run in runs]), flush=True)
    if config.recorded:
        for name, runs in replayed():
            print(row(name, runs, [listen(run) for run in runs]), flush=True)
        published = json.loads((RECORDED / "bloom.json").read_text())
        for name in ("104B", "13B"):
            run, steps = bloom(published[name]), published[name]["iteration"]
            print(row(f"published, BLOOM {name}", [run], [listen(run, steps)]))


if __name__ == "__main__":
    logging.getLogger("jscale").setLevel(logging.CRITICAL + 1)  # the table says it
    main()
