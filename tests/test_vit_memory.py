"""What a train step of a small vision transformer takes on an H200. Needs no GPU."""

import re

import gpu_program
import jax
import jax.numpy as jnp
import pytest
import vit_memory
from jax.sharding import SingleDeviceSharding

needs_compiler = pytest.mark.skipif(
    gpu_program.plugin_library() is None or jax.__version_info__ < (0, 12),
    reason="XLA's CUDA compiler of jax 0.12 or newer is not installed: jscale[gpu-program]",
)
TINY = vit_memory.ViT(blocks=1, width=16, hidden=32, heads=2, image=8, classes=10)


# Exact for jax 0.12.0.1; for another, experiments/vit_memory.py --short prints them anew.
@needs_compiler
@pytest.mark.parametrize(
    "precision, temp, kernels, traffic, products",
    [
        ("float32", 359.7, 257, 3188.0, {"f32": 41}),
        ("autocast", 170.8, 290, 2445.7, {"f16": 41}),
    ],
)
def test_a_step_takes_exactly_this(standard_promotion, precision, temp, kernels, traffic, products):
    found = vit_memory.measure(vit_memory.ViT(blocks=2), 128, precision)
    assert [round(found[name], 1) for name in ("temp", "traffic")] == [temp, traffic]
    assert (found["kernels"], found["products"]) == (kernels, products)


@needs_compiler
@pytest.mark.parametrize(
    "precision, says",
    [("float32", "dot_f32_f32_f32"), ("TF32", "dot_tf32_tf32_f32")],
)
def test_the_program_says_what_its_products_are_computed_in(standard_promotion, precision, says):
    sharding = SingleDeviceSharding(gpu_program.described_device("H200"))
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    _, (params, _, *batch) = vit_memory.step_and_arguments(TINY, 8, precision)
    grad = jax.jit(jax.grad(vit_memory.loss_fn))
    with jax.default_matmul_precision(vit_memory.ALGORITHMS[precision]):
        program = grad.lower(*jax.tree.map(placed, (params, *batch))).compile().as_text()
    products = [line for line in program.splitlines() if " dot(" in line]
    assert products
    for line in products:
        assert re.findall(r"algorithm=(\w+)", line) == [says]


def filled(vit):
    """Random parameters."""
    shapes = vit_memory.parameters(vit)
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    draw = lambda key, x: 0.1 * jax.random.normal(key, x.shape)
    return jax.tree.unflatten(treedef, map(draw, keys, leaves))


@pytest.mark.parametrize("precision", ["float16, Policy", "autocast"])
def test_all_precisions_compute_one_function(standard_promotion, precision):
    params, key = filled(TINY), jax.random.key(1)
    images, labels = jax.random.normal(key, (4, 8, 8, 3)), jnp.arange(4)
    fun = lambda name: jax.jit(vit_memory.PRECISIONS[name](vit_memory.loss_fn))
    want = fun("float32")(params, images, labels, key)
    scanned = {**params, "blocks": jax.tree.map(lambda x: x[None], params["blocks"][0])}
    for same in (params, scanned):
        got = fun(precision)(same, images, labels, key)
        assert abs(got - want) < 2**-7 * want  # some roundings of 2^-11
