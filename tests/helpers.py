"""Equality of bits: -0.0 differs from 0.0, and NaN equals NaN."""

import jax
import jax.numpy as jnp
import numpy as np


def raw(x):
    """The bits of an array with its dtype and shape, out of reach of donation."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return str(x.dtype), x.shape, np.asarray(x).tobytes()


def bits(tree):
    return [raw(x) for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert raw(g) == raw(w), jax.tree_util.keystr(path)
