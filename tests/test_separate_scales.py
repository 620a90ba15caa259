"""Separate scales for towers and for losses, by the experiments in a short form."""

import caption
import gan
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits


@pytest.fixture(scope="module")
def digits():
    found = load_digits()
    images, labels = jnp.asarray(found.images / 16, jnp.float32), jnp.asarray(found.target)
    return {"train": (images[:1437], labels[:1437]), "test": (images[1437:1537], labels[1437:1537])}


@pytest.fixture(scope="module")
def tower_run(digits):
    config = caption.Config(steps=250)
    return lambda method, spread: caption.run(method, spread, 0, config, digits)


def test_in_float32_the_spread_of_the_towers_changes_no_bit(standard_promotion, tower_run):
    losses = [tower_run("float32", spread)["loss"] for spread in (-24, 0, 36)]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("spread, lost", [(-34, "vision"), (36, "text")])
def test_one_scale_loses_a_tower_that_a_scale_of_its_own_keeps(
    standard_promotion, tower_run, spread, lost
):
    one, two = tower_run("one scale", spread), tower_run("two scales", spread)
    assert one["zeros"][lost] > 0.25
    assert max(two["zeros"].values()) < 0.02
    reference = tower_run("float32", 0)["loss"]
    assert abs(two["loss"] - reference) < 0.1 * reference
    assert one["loss"] > 1.2 * reference


def test_the_scales_of_two_towers_differ_by_the_spread(standard_promotion, tower_run):
    scale = tower_run("two scales", 36)["scale"]
    assert abs(np.log2(scale["text"][-1] / scale["vision"][-1]) - 36) <= 4


@pytest.fixture(scope="module")
def gan_run():
    config = gan.Config(steps=400)
    return lambda method, spread: gan.run(method, spread, 0, config)


@pytest.mark.parametrize("skips", ["both skip", "own skips"])
def test_a_loss_far_below_the_others_needs_a_scale_of_its_own(standard_promotion, gan_run, skips):
    one, three = gan_run("one scale", -36), gan_run(f"three scales, {skips}", -36)
    assert one["zeros"]["generator"] > 0.5
    assert max(three["zeros"].values()) < 0.02
    assert three["distance"] < one["distance"] / 2


def test_two_networks_skip_the_same_steps_or_each_its_own(standard_promotion, gan_run):
    both = gan_run("three scales, both skip", -36)["skipped"]
    own = gan_run("three scales, own skips", -36)["skipped"]
    assert both["generator"] == both["discriminator"]
    assert own["generator"] < own["discriminator"]  # the generator starts below its best scale
