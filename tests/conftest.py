import os

# Before JAX starts: eight devices on the host, for the sharded tests.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import pytest

# A silent upcast in a mixed-precision library is a fault: strict makes it an error.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def standard_promotion():
    """For code of others that mixes dtypes: optax's Adam raises a float to an int32 power."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
