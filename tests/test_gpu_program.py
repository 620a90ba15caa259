"""What the compiled program for an H200 pays for loss scaling. Needs no GPU."""

import gpu_structure
import jax
import pytest

pytestmark = pytest.mark.skipif(
    gpu_structure.plugin_library() is None or jax.__version_info__ < (0, 12),
    reason="XLA's CUDA compiler of jax 0.12 or newer is not installed: jscale[gpu-program]",
)


@pytest.mark.parametrize("clip, kernels, traffic", [(False, 84, 1.0181), (True, 10, 1.0005)])
def test_a_scaled_step_costs_next_to_nothing(standard_promotion, clip, kernels, traffic):
    base = gpu_structure.measure(clip, scaled=False)
    scaled = gpu_structure.measure(clip, scaled=True)
    assert scaled["kernels"] - base["kernels"] <= kernels
    assert scaled["traffic"] <= traffic * base["traffic"]
    assert scaled["temp"] <= base["temp"] + 0.01  # MB: room for the scalars of the state
