"""README's recipe for loggers: what each of them takes, of one scale, of several, of stacks."""

import functools
import json
import logging
import math
import numbers
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tensorboardX import SummaryWriter

import jscale
from jscale._log_files import open_log, rows

PARAMS = {"text": jnp.ones(4), "layers": jnp.ones((8, 2)), "head": jnp.ones(3)}
SEVERAL = {"text": jscale.dynamic(), "layers": jscale.stacked(jscale.dynamic(), 8)}
RULES = {
    "one": jscale.dynamic(),
    "off": jscale.off(),
    "several": SEVERAL | {"head": jscale.dynamic()},
    "rest": SEVERAL | {"": jscale.dynamic()},
}


def flat(metrics):
    """README's: plain floats, and for the layers of a stack `grad_scale/layers/3` and so on."""
    return {
        "/".join([name, *map(str, place)]): float(x)
        for name, value in jax.device_get(metrics).items()
        for place, x in np.ndenumerate(value)
    }


@functools.cache
def train(name):
    """The metrics of three steps, as a train step returns them."""
    rules = RULES[name]
    tx = jscale.with_loss_scale(optax.sgd(0.1), rules)
    several = isinstance(rules, dict)

    @jax.jit
    def step(state, factor):
        scales = jscale.loss_scale(state)
        grads = jax.tree.map(lambda x: factor * x, PARAMS)
        _, state = tx.update(grads, state, PARAMS, loss=jnp.float32(2))
        found = {"loss": jnp.float32(2), **jscale.metrics(state)}
        counted = jscale.stats(grads, scales if several else [""])
        for key, x in counted.items():
            scale = scales[key] if several else scales
            found |= x.metrics(scale, key if several else None)
        return state, found

    state, log = tx.init(PARAMS), []
    for i in range(3):
        state, metrics = step(state, jnp.where(i == 1, jnp.inf, 1.0))
        log.append(metrics)
    return log


@pytest.fixture(params=RULES)
def log(request):
    return train(request.param)


def test_metrics_are_plain_floats_under_the_same_keys_in_every_step(log):
    found = [flat(metrics) for metrics in log]
    assert all(type(x) is float for metrics in found for x in metrics.values())
    assert len({tuple(metrics) for metrics in found}) == 1
    stacked = [key for key in log[0] if log[0][key].ndim]
    for key in stacked:
        assert [found[0][f"{key}/{i}"] for i in range(8)] == log[0][key].tolist()


def test_a_single_scale_needs_no_recipe_beyond_device_get():
    for metrics in train("one"):
        assert {k: float(x) for k, x in jax.device_get(metrics).items()} == pytest.approx(
            flat(metrics), nan_ok=True
        )


def takes_like_wandb(metrics):
    """Run.log: text for keys, numbers for values, what JSON holds; slashes make sections."""
    for key, value in metrics.items():
        assert isinstance(key, str) and isinstance(value, numbers.Number)
    json.dumps(metrics)


def takes_like_mlflow(metrics):
    """log_metrics: names of letters, digits and _-. :/ that are paths; values by float()."""
    for key, value in metrics.items():
        assert re.fullmatch(r"[\w.\- :/]+", key), key
        assert not key.startswith("/") and ".." not in key and "//" not in key
        float(value)


def takes_like_clu(metrics):
    """MetricWriter.write_scalars, of metrax and grain too: a mapping to scalars."""
    for key, value in metrics.items():
        assert isinstance(key, str) and np.ndim(value) == 0 and np.isreal(value)


@pytest.mark.parametrize("takes", [takes_like_wandb, takes_like_mlflow, takes_like_clu])
@pytest.mark.parametrize("name", ["one", "off", "several"])
def test_loggers_take_them_without_adapters(name, takes):
    for metrics in train(name):
        takes(flat(metrics))


def test_the_rest_has_a_name_that_every_logger_takes():
    for metrics in train("rest"):
        takes_like_mlflow(flat(metrics))
        assert "grad_scale/rest" in metrics


def test_tensorboard_gives_back_what_was_logged(tmp_path, log):
    with SummaryWriter(str(tmp_path)) as events:
        for step, metrics in enumerate(log):
            for key, x in flat(metrics).items():
                events.add_scalar(key, x, step)
    found = list(rows(*open_log(tmp_path), lambda size: None))
    assert [row.pop("step") for row in found] == [0, 1, 2]
    for got, metrics in zip(found, log, strict=True):
        assert got == pytest.approx(flat(metrics), rel=1e-6, nan_ok=True)


def test_json_lines_go_into_the_monitor_and_the_pictures(tmp_path, log):
    lines = [json.dumps({"step": i} | flat(metrics)) for i, metrics in enumerate(log)]
    quiet = logging.Logger("test", logging.CRITICAL + 1)
    ours, theirs = (jscale.Monitor(every=1, logger=quiet) for _ in range(2))
    for i, metrics in enumerate(log):
        ours.update(i, metrics)
        theirs.update(i, json.loads(lines[i]))
    assert [a.kind for a in ours.advice] == [a.kind for a in theirs.advice]
    from jscale import plot

    figures = [plot.scale(log), plot.scale([json.loads(line) for line in lines])]
    drawn = [[line.get_ydata().tolist() for line in f.axes[0].get_lines()] for f in figures]
    assert drawn[0] == drawn[1]
    assert math.isfinite(drawn[0][0][0])
