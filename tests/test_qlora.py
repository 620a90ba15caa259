"""The parts of experiments/qlora.py, and what it claims, in a short form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quickstart
from flax import nnx

qwix = pytest.importorskip("qwix")
qlora = pytest.importorskip("qlora")

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),  # qwix reads Variable.value
]

TOKENS = np.random.default_rng(0).integers(0, 256, (2, quickstart.CONTEXT), np.int32)


@pytest.fixture(scope="module")
def model():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "LAYERS", 1)
        return quickstart.Transformer(nnx.Rngs(0))


@pytest.fixture(scope="module")
def int4(model):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return qlora.quantised(model, jnp.int4, 0, TOKENS)


def test_gptq_keeps_the_outputs_nearer_than_rounding_does():
    keys = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(keys[0], (64, 16))
    x = jax.random.normal(keys[1], (256, 64)) @ jax.random.normal(keys[2], (64, 64))
    scale = jnp.max(jnp.abs(w.reshape(2, 32, 16)), axis=1) / 7.5
    full = jnp.repeat(scale, 32, axis=0)
    plain = jnp.clip(jnp.round(w / full), -8, 7)
    levels = qlora.gptq_levels(w, x.T @ x, scale)
    assert levels.dtype == jnp.int4
    off = lambda levels: jnp.linalg.norm(x @ (levels.astype(jnp.float32) * full - w))
    assert off(levels) < 0.8 * off(plain)


def test_gptq_of_uncorrelated_inputs_is_rounding():
    w = jax.random.normal(jax.random.key(0), (32, 4))
    scale = jnp.max(jnp.abs(w), axis=0, keepdims=True) / 7.25  # no ties
    got = qlora.gptq_levels(w, np.eye(32), scale)
    want = np.clip(np.round(np.float64(w) / np.float64(scale)), -8, 7)
    np.testing.assert_array_equal(got.astype(jnp.int32), want)


def test_only_adapters_are_lora_params_and_the_rest_takes_less(model, int4):
    adapters, frozen = nnx.state(int4, nnx.LoRAParam), nnx.state(int4, nnx.Not(nnx.LoRAParam))
    assert {str(x.dtype) for x in jax.tree.leaves(adapters)} == {"float32"}
    assert {str(x.dtype) for x in jax.tree.leaves(frozen)} == {"float32", "int4"}
    assert len(jax.tree.leaves(adapters)) == 2 * 4
    # Four bytes a weight become half a byte, and a scale for each tile.
    quantised = 12 * quickstart.WIDTH**2
    saved = qlora.nbytes(nnx.state(model)) - qlora.nbytes(frozen)
    assert saved == quantised * (4 - 0.5 - 4 / qlora.TILE)


def test_half_a_byte_for_four_bits():
    assert qlora.nbytes({"q": jnp.ones(6, jnp.uint4), "scale": jnp.ones(2, jnp.float16)}) == 7


def test_a_step_moves_adapters_alone_and_without_a_scale_gradients_are_lost(int4):
    graph, adapters, frozen = nnx.split(int4, nnx.LoRAParam, ...)
    tokens = np.random.default_rng(1).integers(0, 256, (4, quickstart.CONTEXT + 1), np.int32)
    grads = {}
    for compute in qlora.RULES:
        step, init = qlora.make_step(graph, compute)
        new, state, found = step(adapters, init(adapters), frozen, tokens, 2.0**14)
        assert jax.tree.structure(new) == jax.tree.structure(adapters)
        grads[compute] = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(found)])
    error = lambda name: jnp.linalg.norm(grads[name] - grads["float32"])
    size = jnp.linalg.norm(grads["float32"])
    assert error("scaled") < 0.02 * size and error("unscaled") > 0.2 * size
    # Those of the first halves, whose second ones are still zero, and hardly any other.
    assert jnp.mean(grads["scaled"] == 0) < jnp.mean(grads["unscaled"] == 0)


def test_qwix_rounds_as_its_scales_say(model, int4):
    q = int4.blocks[0].up.kernel.array
    plain = model.blocks[0].up.kernel[...]
    got = qwix.dequantize(qwix.QArray(q.qvalue[...], q.scale[...], None, jnp.int4))
    half = np.repeat(q.scale[...], qlora.TILE, axis=0) / 2
    assert np.all(np.abs(got - plain) <= half * (1 + 1e-5))
