"""Autocast's gradients against those of float16 layers, by the experiment in its smallest form."""

import autocast_precision
import pytest


@pytest.mark.parametrize("name", autocast_precision.CLAIMED)
def test_autocast_is_nearer_to_exact_gradients_than_float16_layers(standard_promotion, name):
    config = autocast_precision.Config(seeds=1, depth=1)
    errors, worst, products = autocast_precision.compare(name, config)
    for way in ("all float16", "Flax float16"):
        assert errors["autocast"] < errors[way]
        assert worst["autocast"] < worst[way]
        # Not by computing less in float16.
        assert products["autocast"] == products[way]
    assert errors["float32"] < [1e-5]  # the float64 gradients are those of the same function
