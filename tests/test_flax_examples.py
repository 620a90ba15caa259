"""Flax's examples with DynamicScale, ImageNet's ResNet and WMT's Transformer, in our own words.

Each trains small, over eight devices, as the examples do and with jscale in the place of
DynamicScale. The first steps overflow because of the scale, a later one because of its data.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from flax.training.dynamic_scale import DynamicScale
from helpers import assert_same_bits, bits
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jscale

pytestmark = pytest.mark.usefixtures("standard_promotion")

STEPS, BAD, SAVED = 16, 10, 8  # batches; the one with bad data; when a checkpoint is made
SETTINGS = {"scale": 2.0**23, "growth_interval": 2}
f16, f32 = jnp.float16, jnp.float32


class State(train_state.TrainState):
    batch_stats: Any = None
    dynamic_scale: Any = None


class Port(NamedTuple):
    """An example before and after.

    Attributes:
      before, after: a step: state and batch to state and a dict of what was seen.
      first: the first state, from an optax transform and a DynamicScale, or None.
      inner: the optimizer.
      schedule: its learning rates.
      batches: what is trained on.
    """

    before: Callable[[State, Any], tuple[State, dict[str, jax.Array]]]
    after: Callable[[State, Any], tuple[State, dict[str, jax.Array]]]
    first: Callable[..., State]
    inner: optax.GradientTransformation
    schedule: optax.Schedule
    batches: list[Any]


def over_devices(*spec):
    return NamedSharding(Mesh(np.array(jax.devices()), "batch"), PartitionSpec(*spec))


def placed(state):
    """On all devices and strong-typed, or the first two steps would be compiled each."""
    return jax.device_put(jax.tree.map(np.asarray, state), over_devices())


def skip_by_hand(finite, new, old):
    """What the examples do after a step: the old parameters and optimizer state again."""
    pick = functools.partial(jax.tree.map, functools.partial(jnp.where, finite))
    return new.replace(
        params=pick(new.params, old.params), opt_state=pick(new.opt_state, old.opt_state)
    )


# ResNet with batch statistics; jit divides the batch.


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, 4, (3, 3), use_bias=False, dtype=f16)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=f16)
        x = nn.relu(norm()(conv()(x)))
        x = nn.relu(x + norm()(conv()(x)))
        return nn.Dense(3, dtype=f16)(x.mean((1, 2))).astype(f32)


def resnet() -> Port:
    schedule = optax.linear_schedule(0.0, 0.1, 20)
    inner = optax.sgd(schedule, momentum=0.9, nesterov=True)
    variables = ResNet().init(jax.random.key(0), jnp.ones((1, 6, 6, 3)))

    def first(tx, dynamic_scale=None):
        return State.create(
            apply_fn=ResNet().apply, tx=tx, dynamic_scale=dynamic_scale, **variables
        )

    def loss_of(state, batch):
        def loss_fn(params):
            logits, changed = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["image"],
                mutable=["batch_stats"],
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return jnp.mean(losses), changed["batch_stats"]

        return loss_fn

    @jax.jit
    def before(state, batch):
        grad_fn = state.dynamic_scale.value_and_grad(loss_of(state, batch), has_aux=True)
        dynamic_scale, finite, (loss, stats), grads = grad_fn(state.params)
        new = state.apply_gradients(grads=grads, batch_stats=stats, dynamic_scale=dynamic_scale)
        new = skip_by_hand(finite, new, state)
        return new, {"loss": loss, "finite": finite, "grad_scale": dynamic_scale.scale}

    @jax.jit
    def after(state, batch):
        scale = jscale.loss_scale(state)
        grad_fn = jscale.value_and_grad(loss_of(state, batch), scale, has_aux=True)
        (loss, stats), grads = grad_fn(state.params)
        new = state.apply_gradients(grads=grads)
        metrics = jscale.metrics(new)
        stats = jscale.select(metrics["finite"], stats, state.batch_stats)
        return new.replace(batch_stats=stats), {"loss": loss, **metrics}

    rng = np.random.default_rng(0)
    batches = []
    for step in range(STEPS):
        image = rng.normal(size=(16, 6, 6, 3)).astype(np.float32)
        if step == BAD:
            image[5, 0, 0] = 1e6  # on one device, inf in float16
        batch = {"image": image, "label": rng.integers(0, 3, 16)}
        batches.append(jax.device_put(batch, over_devices("batch")))
    return Port(before, after, first, inner, schedule, batches)


# Transformer with dropout and padding; pmap divides the batch, and averages are taken by name.


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        norm = functools.partial(nn.LayerNorm, dtype=f16)
        dense = functools.partial(nn.Dense, dtype=f16)
        embed = nn.Embed(11, 8, dtype=f16)
        x = embed(tokens)
        attend = nn.MultiHeadDotProductAttention(2, dtype=f16)
        x += attend(norm()(x), mask=nn.make_causal_mask(tokens))
        x += dense(8)(nn.Dropout(0.1, deterministic=False)(nn.relu(dense(16)(norm()(x)))))
        return embed.attend(norm()(x)).astype(f32)


def transformer() -> Port:
    schedule = optax.linear_schedule(0.0, 1e-2, 20)
    inner = optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)
    key, *keys = jax.random.split(jax.random.key(0), 3)
    rngs = dict(zip(("params", "dropout"), keys, strict=True))
    params = Transformer().init(rngs, jnp.ones((1, 5), jnp.int32))

    def first(tx, dynamic_scale=None):
        return State.create(
            apply_fn=Transformer().apply, params=params, tx=tx, dynamic_scale=dynamic_scale
        )

    def loss_of(state, batch):
        dropout = jax.random.fold_in(key, jax.lax.axis_index("batch"))
        dropout = jax.random.fold_in(dropout, state.step)

        def loss_fn(params):
            tokens = batch["tokens"]
            logits = state.apply_fn(params, tokens[:, :-1], rngs={"dropout": dropout})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return jnp.sum(losses * batch["weights"]) / jnp.sum(batch["weights"])

        return loss_fn

    pmap = functools.partial(jax.pmap, axis_name="batch", in_axes=(None, 0), out_axes=(None, None))
    mean = functools.partial(jax.lax.pmean, axis_name="batch")

    @pmap
    def before(state, batch):
        grad_fn = state.dynamic_scale.value_and_grad(loss_of(state, batch), axis_name="batch")
        dynamic_scale, finite, loss, grads = grad_fn(state.params)
        new = state.apply_gradients(grads=grads, dynamic_scale=dynamic_scale)
        new = skip_by_hand(finite, new, state)
        return new, {"loss": mean(loss), "finite": finite, "grad_scale": dynamic_scale.scale}

    @pmap
    def after(state, batch):
        scale = jscale.loss_scale(state)
        loss, grads = jscale.value_and_grad(loss_of(state, batch), scale)(state.params)
        grads, loss = mean((grads, loss))
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params, loss=loss)
        params = optax.apply_updates(state.params, updates)
        new = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        return new, {"loss": loss, **jscale.metrics(new)}

    rng = np.random.default_rng(1)
    batches = []
    for step in range(STEPS):
        tokens = rng.integers(1, 11, (8, 2, 6))
        tokens[:, 0, 4:] = 0
        weights = (tokens[..., 1:] > 0).astype(np.float32)
        if step == BAD:
            weights[3] = 0  # nothing but padding on one device: 0 / 0
        batches.append({"tokens": tokens, "weights": weights})
    return Port(before, after, first, inner, schedule, batches)


class Run(NamedTuple):
    """The state before each step and after the last, and what the steps returned, stacked."""

    states: list[State]
    seen: dict[str, np.ndarray]


def train(step, state, batches) -> Run:
    states, seen = [placed(state)], []
    for batch in batches:
        state, info = step(states[-1], batch)
        states.append(placed(state))
        seen.append(jax.device_get(info))
    return Run(states, {name: np.stack([info[name] for info in seen]) for name in seen[0]})


@pytest.fixture(scope="module", params=[resnet, transformer], ids=["resnet", "transformer"])
def ported(request):
    """The port, and its runs before and after."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        port = request.param()
        before = train(port.before, port.first(port.inner, DynamicScale(**SETTINGS)), port.batches)
        tx = jscale.with_loss_scale(port.inner, jscale.presets.flax(**SETTINGS))
        return port, before, train(port.after, port.first(tx), port.batches)


def test_the_same_steps_are_skipped_at_the_same_scales(ported):
    _, before, after = ported
    finite = after.seen["finite"]
    assert not finite[0] and not finite[BAD]
    assert np.any(np.diff(after.seen["grad_scale"]) > 0)
    for name in ("finite", "grad_scale"):
        np.testing.assert_array_equal(after.seen[name], before.seen[name])


def test_the_losses_are_those_of_dynamic_scale(ported):
    _, before, after = ported
    np.testing.assert_allclose(after.seen["loss"], before.seen["loss"], rtol=1e-6)


def test_a_skip_moves_the_step_counter_of_train_state_and_nothing_else(ported):
    _, _, after = ported
    kept = lambda state: (state.params, state.batch_stats, state.opt_state.inner)
    pairs = itertools.pairwise(after.states)
    for (old, new), finite in zip(pairs, after.seen["finite"], strict=True):
        assert int(new.step) == int(old.step) + 1
        assert (bits(kept(new)) == bits(kept(old))) == (not finite)


@pytest.mark.parametrize("ported", [resnet], indirect=True, ids=["resnet"])
def test_statistics_of_a_skipped_step_that_went_through_no_select_stay_nan(ported):
    """As in Flax's example, which restores parameters and optimizer state alone."""
    _, before, _ = ported
    state = before.states[-1]
    assert jscale.all_finite((state.params, state.opt_state))
    assert not jscale.all_finite(state.batch_stats)


def test_schedules_count_the_applied_steps(ported):
    port, _, after = ported
    steps = np.cumsum(after.seen["finite"])
    np.testing.assert_array_equal(after.seen["applied_steps"], steps)
    for state, n in zip(after.states[1:], steps, strict=True):
        for count in optax.tree.get_all_with_path(state.opt_state.inner, "count"):
            assert int(count[1]) == n
    assert port.schedule(steps[-1]) < port.schedule(STEPS)


@pytest.mark.parametrize("ported", [transformer], indirect=True, ids=["transformer"])
def test_the_step_after_a_skip_has_another_dropout_mask(ported):
    """Since its key is made from TrainState.step, which counts skipped steps as well."""
    port, _, after = ported
    assert not after.seen["finite"][0]
    _, again = port.after(after.states[1], port.batches[0])
    assert again["loss"] != after.seen["loss"][0]


@pytest.mark.parametrize("ported", [transformer], indirect=True, ids=["transformer"])
def test_a_loss_that_is_lost_on_one_device_is_told_from_an_overflow(ported):
    _, _, after = ported
    lost = np.arange(STEPS) == BAD
    np.testing.assert_array_equal(np.isnan(after.seen["loss"]), lost)
    np.testing.assert_array_equal(after.seen["loss_finite"], ~lost)
    assert after.seen["finite"].sum() < STEPS - 1


def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(ported):
    port, _, after = ported
    saved = flax.serialization.to_bytes(after.states[SAVED])
    state = flax.serialization.from_bytes(after.states[0], saved)
    state = train(port.after, state, port.batches[SAVED:]).states[-1]
    assert_same_bits(state.replace(tx=None), after.states[-1].replace(tx=None))


@pytest.mark.parametrize("ported", [resnet], indirect=True, ids=["resnet"])
def test_a_run_goes_on_from_a_checkpoint_of_dynamic_scale(ported):
    port, before, _ = ported
    first = port.first(port.inner, DynamicScale(**SETTINGS))
    old = flax.serialization.from_bytes(first, flax.serialization.to_bytes(before.states[SAVED]))

    rule, rule_state = jscale.interop.load("flax", old.dynamic_scale)
    tx = jscale.with_loss_scale(port.inner, rule)
    opt_state = jscale.checkpoint.attach(tx.init(old.params), old.opt_state)
    opt_state = jscale.interop.put(opt_state, rule_state)
    state = old.replace(tx=tx, opt_state=opt_state, dynamic_scale=None)

    seen = train(port.after, state, port.batches[SAVED:]).seen
    for name in ("finite", "grad_scale"):
        np.testing.assert_array_equal(seen[name], before.seen[name][SAVED:])
    np.testing.assert_allclose(seen["loss"], before.seen["loss"][SAVED:], rtol=1e-6)
