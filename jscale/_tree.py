"""Which leaves a loss scale may touch, and how a leaf is named in a message."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Flax's fp8 layers return the next value of these variables as their "gradient"
# (flax.linen.fp8_ops); it is neither a gradient nor a parameter.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"

PyTree = Any


def is_inexact(x: Any) -> bool:
    """Whether `x` is a real or complex floating-point array or number (not float0, int, bool, key)."""
    if isinstance(x, float | complex):
        return True
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def at_least_f32(x: Any) -> jax.Array:
    """`x` in float32 (complex64 for complex); float64 and complex128 keep their precision."""
    x = jnp.asarray(x)
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    # Naming the dtype also drops a weak type, which would cost a second trace.
    return jax.lax.convert_element_type(x, jnp.float32 if narrow else x.dtype)


def path_name(path: Any) -> str:
    """A key path as people write it: `encoder/0/kernel`; the root is `<root>`."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "<root>"


def _is_gradient(path: Any, x: Any) -> bool:
    return is_inexact(x) and not any(
        getattr(key, "key", None) == OVERWRITE_WITH_GRADIENT for key in path
    )


def map_inexact(fn: Callable[..., Any], tree: PyTree) -> PyTree:
    """`fn(path, leaf)` on every inexact leaf; all others, and fp8 overwrite leaves, pass through."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: fn(path, x) if _is_gradient(path, x) else x, tree
    )


def inexact_leaves(tree: PyTree) -> list[Any]:
    """The leaves that `map_inexact` visits, in tree order."""
    return [x for path, x in jax.tree_util.tree_leaves_with_path(tree) if _is_gradient(path, x)]


def _shape(x: Any) -> tuple[int, ...] | None:
    return getattr(x, "shape", None)


def describe(x: Any) -> str:
    """`float32[8,3]` for an array, the type's name for anything else."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return type(x).__name__


def mismatch(tree: PyTree, reference: PyTree, *, allow_none: bool = False) -> str | None:
    """Says where `tree` differs from `reference` in paths or shapes, or None if it does not.

    `allow_none` lets `tree` hold None where `reference` holds a leaf (a parameter without gradient).
    """

    def leaves(t):
        flat = jax.tree_util.tree_leaves_with_path(t, is_leaf=lambda x: x is None)
        return {path_name(path): x for path, x in flat}

    got, want = leaves(tree), leaves(reference)
    extra = [p for p, x in got.items() if p not in want and x is not None]
    missing = [p for p, x in want.items() if p not in got and x is not None]
    if extra or missing:
        sides = [
            f"{label} {', '.join(paths[:5])}{', …' if len(paths) > 5 else ''}"
            for label, paths in (("unexpected", extra), ("missing", missing))
            if paths
        ]
        return "; ".join(sides)
    for path, x in got.items():
        ref = want.get(path)
        if x is None and allow_none:
            continue
        if (x is None) != (ref is None) or _shape(x) != _shape(ref):
            return f"at {path} {describe(x)}, expected {describe(ref)}"
    return None
