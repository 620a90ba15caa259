"""Which leaves a loss scale may touch, and how a leaf is named in a message."""

import functools
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp

# Flax's fp8 layers return the next value of these variables as their "gradient"
# (flax.linen.fp8_ops); it is neither a gradient nor a parameter.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"

PyTree = Any


def is_inexact(x: Any) -> bool:
    """Whether `x` is a floating-point or complex array or number (not float0, int, bool, key)."""
    if isinstance(x, float | complex):
        return True
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def at_least_f32(x: Any) -> Any:
    """`x` in float32 (complex64 for complex); float64 and complex128 keep their precision."""
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        x = jnp.asarray(x)
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    dtype = jnp.float32 if narrow else x.dtype
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=dtype)
    # A weak type would cost a second trace.
    return jax.lax.convert_element_type(x, dtype) if narrow or x.weak_type else x


def strong(x: Any) -> Any:
    """`x` as an array without a weak type; anything but an array or a number is left as it is."""
    if isinstance(x, bool | int | float | complex):
        x = jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


def path_name(path: Any) -> str:
    """A key path as people write it: `encoder/0/kernel`; the root is `<root>`."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "<root>"


def path_parts(path: Any) -> tuple[str, ...]:
    """The components of a key path; none for the root."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a run of path components matches a pattern, component by component, `*` and all."""
    starts = range(len(parts) - len(pattern) + 1)
    return any(all(map(fnmatchcase, parts[start:], pattern)) for start in starts)


def is_gradient(path: Any, x: Any) -> bool:
    """Whether the leaf `x` at `path` is what a loss scale may touch."""
    return is_inexact(x) and not any(
        getattr(key, "key", None) == OVERWRITE_WITH_GRADIENT for key in path
    )


def map_inexact(fn: Callable[..., Any], tree: PyTree) -> PyTree:
    """`fn(path, leaf)` on every inexact leaf; others and fp8 overwrite leaves pass through."""
    return jax.tree.map_with_path(lambda path, x: fn(path, x) if is_gradient(path, x) else x, tree)


def wide(tree: PyTree) -> PyTree:
    """`tree` with its floating-point leaves in float32 at least."""
    return map_inexact(lambda _, x: at_least_f32(x), tree)


def inexact_leaves(tree: PyTree) -> list[Any]:
    """The leaves that `map_inexact` visits, in tree order."""
    return [x for path, x in jax.tree.leaves_with_path(tree) if is_gradient(path, x)]


def newest_cotangents(tree: PyTree) -> list[Any]:
    """The largest cotangents of this step, of which Flax's fp8 layers keep a history in a tree."""
    flat = jax.tree.leaves_with_path(tree)
    history = [x for path, x in flat if path_parts(path)[-1:] == ("output_grad_amax_history",)]
    return [x[..., 0] for x in history if is_inexact(x)]  # the newest is the first


def _shape(x: Any) -> tuple[int, ...] | None:
    return () if isinstance(x, int | float | complex) else getattr(x, "shape", None)


def describe(x: Any) -> str:
    """`float32[8,3]` for an array, the value for a number or string, else the name of the type."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    simple = x is None or isinstance(x, bool | int | float | complex | str)
    return repr(x) if simple and len(repr(x)) < 40 else type(x).__name__


def listing(paths: list[str]) -> str:
    """The first few of `paths`, for a message."""
    return ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")


def _fits(x: Any, reference: Any) -> bool:
    """Whether the dtype of `reference` can hold the fractions and complex numbers of `x`."""
    rank = lambda x: is_inexact(x) and 1 + jnp.iscomplexobj(x)
    dtype = lambda x: getattr(x, "dtype", type(x))
    return dtype(x) == dtype(reference) or rank(x) <= rank(reference)


def mismatch(
    tree: PyTree,
    reference: PyTree,
    *,
    allow_none: bool = False,
    shapes: bool = True,
    kinds: Callable[[Any], bool] = lambda path: False,
) -> str | None:
    """Says how `tree` differs from `reference` in structure or shapes, or None if it does not.

    With `allow_none`, `tree` may hold None where `reference` holds a leaf. Where `kinds` says so of
    a path, `reference` must be able to hold the kind of number that `tree` has there.
    """
    is_leaf = lambda x: x is None
    flatten: Any = functools.partial(jax.tree.flatten_with_path, is_leaf=is_leaf)
    (got, got_def), (want, want_def) = flatten(tree), flatten(reference)
    if got_def != want_def:
        have, need = ({path_name(path): None for path, _ in flat} for flat in (got, want))
        sides = {
            "unexpected": [name for name in have if name not in need],
            "missing": [name for name in need if name not in have],
        }
        said = [f"{side} {listing(names)}" for side, names in sides.items() if names]
        return "; ".join(said) or "the containers are of different types"
    for (path, x), (_, ref) in zip(got, want, strict=True):
        same = (x is None) == (ref is None) and (not shapes or _shape(x) == _shape(ref))
        same = same and (_fits(x, ref) or not kinds(path))
        if not same and not (allow_none and x is None):
            return f"at {path_name(path)} {describe(x)}, expected {describe(ref)}"
    return None
