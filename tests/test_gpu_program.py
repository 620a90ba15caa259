"""What compiled programs for an H200 pay for loss scales and for autocast. Needs no GPU."""

import autocast_memory
import collective_cost
import gpu_program
import gpu_structure
import jax
import jax.numpy as jnp
import pytest
import region_cost

pytestmark = pytest.mark.skipif(
    gpu_program.plugin_library() is None or jax.__version_info__ < (0, 12),
    reason="XLA's CUDA compiler of jax 0.12 or newer is not installed: jscale[gpu-program]",
)


# Exact, so that a change in jscale shows. Where a new jax moves them, renew them from what
# `python experiments/gpu_structure.py --all --libraries unscaled jscale` prints, if it is no worse.
@pytest.mark.parametrize(
    "case, kernels, traffic, temp",
    [
        ("AdamW", 38, 1.0180, 1.0000),
        ("AdamW, clip", -36, 1.0000, 1.0000),
        ("FSDP over 8, clip", 1, 1.0000, 0.9046),
        ("300 small leaves", 35, 1.0325, 0.9749),
    ],
)
def test_what_a_scaled_step_costs(standard_promotion, case, kernels, traffic, temp):
    base = gpu_structure.measure(case, "unscaled")
    scaled = gpu_structure.measure(case, "jscale")
    ratio = lambda key: round(scaled[key] / base[key], 4)
    added = scaled["kernels"] - base["kernels"], ratio("traffic"), ratio("temp")
    assert added == (kernels, traffic, temp)
    # Parameters and state are updated in place. Nobody reads the last step's flag and norm.
    assert base["copied"] == 0 and scaled["copied"] == 5
    assert scaled["products"] == base["products"]
    assert scaled["collectives"] == base["collectives"]


def test_a_region_costs_two_kernels(standard_promotion):
    apart = region_cost.measure(region_cost.two_towers("two scales", blocks=1))
    region = region_cost.measure(region_cost.two_towers("a region", blocks=1))
    assert region["kernels"] <= apart["kernels"] + 2
    assert region["products"] == apart["products"]
    assert region["traffic"] <= 1.0001 * apart["traffic"]
    assert region["temp"] <= apart["temp"] + 0.01  # MB


# With clipping, the norm of each layer is one more read of the stack's gradients.
@pytest.mark.parametrize("clip, kernels, traffic", [(False, 1, 1.0001), (True, 11, 1.0101)])
def test_a_scale_for_each_layer_costs_no_more_than_one(standard_promotion, clip, kernels, traffic):
    one = region_cost.measure(region_cost.layers("two scales, a region a layer"), clip=clip)
    each = region_cost.measure(region_cost.layers("stacked"), clip=clip)
    assert each["kernels"] <= one["kernels"] + kernels
    assert each["products"] == one["products"]
    assert each["traffic"] <= traffic * one["traffic"]
    assert each["temp"] <= one["temp"] + 0.01  # MB


# Shares of what all float16 by hand takes, rounded up to the next hundredth.
@pytest.mark.parametrize(
    "model, memory, kernels",
    [
        ("transformer", 0.47, 1.17),
        ("transformer-scan", 0.40, 0.72),
        ("resnet", 1.02, 1.11),
        ("lstm", 1.07, 0.80),
        ("unet", 0.50, 1.10),
    ],
)
def test_autocast_costs_little_beside_all_float16(standard_promotion, model, memory, kernels):
    by_hand = autocast_memory.measure(model, "all float16")
    cast = autocast_memory.measure(model, "autocast")
    assert cast["temp"] <= memory * by_hand["temp"]
    assert cast["kernels"] <= kernels * by_hand["kernels"]
    assert [*cast["products"]] == ["f16"]
    assert cast["products"] == by_hand["products"]


def test_a_loop_counts_as_often_as_it_runs():
    def unrolled(x, ws):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    def loop(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    x, w = (
        jax.ShapeDtypeStruct((64, 256), jnp.float16),
        jax.ShapeDtypeStruct((256, 256), jnp.float16),
    )
    apart = gpu_program.figures(unrolled, x, [w] * 7)
    ws = jax.ShapeDtypeStruct((7, 256, 256), jnp.float16)
    together = gpu_program.figures(loop, x, ws)
    assert together["products"] == apart["products"] == {"f16": 7}
    # Of the stacked matrices each turn reads its own, and XLA copies that out first.
    assert apart["traffic"] < together["traffic"] < 1.5 * apart["traffic"]


@pytest.mark.parametrize(
    "layout, clip, devices, layers",
    [
        ("data parallel", True, 8, 2),
        ("FSDP", False, 8, 2),
        ("FSDP", True, 8, 6),
        ("FSDP", True, 32, 2),
    ],
)
def test_a_scaled_step_sends_four_bytes_more(standard_promotion, layout, clip, devices, layers):
    measure = lambda scaled: collective_cost.measure(layout, devices, layers, clip, scaled)
    base, scaled = measure(False), measure(True)
    # They ride on the all-reduce of the loss, and no gradient is gathered.
    assert scaled.pop("small bytes") <= base.pop("small bytes") + 4
    assert scaled == base
