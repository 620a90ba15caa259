"""Which of several scales governs a leaf: dicts from a prefix of parameter paths to a value."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ._arguments import did_you_mean
from ._tree import PyTree, describe, is_gradient, listing, path_name, path_parts


def shown(key: str, keys: Collection[str] = ()) -> str:
    """What a group is called in logs and messages."""
    return key or ("*" if "rest" in keys else "rest")


def as_groups(name: str, given: Any) -> dict[str, Any]:
    """`given`, in its order, if its keys can be prefixes of paths."""
    if not given:
        raise ValueError(f"{name} is an empty dict: give it at least one group, such as ''.")
    for key in given:
        if not isinstance(key, str) or key != key.strip("/") or "//" in key:
            raise ValueError(
                f"{name} has a key {key!r}: keys are prefixes of parameter paths such as "
                "'vision' or 'text/decoder', and '' stands for all the rest."
            )
    return dict(given)


def _longest(path: Any, keys: Collection[str]) -> str | None:
    parts = "/".join(path_parts(path)).split("/")  # Haiku has slashes in the names of modules
    prefixes = ("/".join(parts[:n]) for n in range(len(parts), -1, -1))
    return next((prefix for prefix in prefixes if prefix in keys), None)


def _uncovered(paths: list[str]) -> str:
    return f"no key is a prefix of {listing(paths)}"


def _keys(keys: Iterable[str]) -> str:
    return (
        f"the keys are {listing([repr(key) for key in keys])}, and '' would stand for all the rest"
    )


def owner_at(path: Any, keys: Collection[str]) -> str:
    """The longest of `keys` that a path begins with."""
    owner = _longest(path, keys)
    if owner is None:
        raise ValueError(f"{_uncovered([path_name(path)])}: {_keys(keys)}.")
    return owner


def owners(tree: PyTree, keys: Collection[str]) -> list[str]:
    """For each leaf of `tree`, in tree order, the longest of `keys` that its path begins with.

    Leaves that are no gradients need not be under a key; they go with the first one.

    Raises:
      ValueError: a gradient is under no key, or a key but '' is over none.
    """
    flat = jax.tree.leaves_with_path(tree)
    if not any(is_gradient(path, x) for path, x in flat):
        # Such as the placeholder for parameters of optax.tree_utils.tree_map_params.
        return [next(iter(keys))] * len(flat)
    found = [_longest(path, keys) for path, _ in flat]
    gradients = [
        (path, key) for (path, x), key in zip(flat, found, strict=True) if is_gradient(path, x)
    ]
    uncovered = [path_name(path) for path, key in gradients if key is None]
    unused = [repr(key) for key in keys if key and key not in {key for _, key in gradients}]
    if uncovered or unused:
        said = [_uncovered(uncovered)] if uncovered else []
        said += (
            [f"no parameter is under {listing(unused)}, or none that is trained"] if unused else []
        )
        raise ValueError(f"{' and '.join(said)}: {_keys(keys)}.")
    first = next(iter(keys))
    return [first if key is None else key for key in found]


def part(tree: PyTree, owned: list[str], key: str) -> PyTree:
    """`tree` with the gradients that `key` governs, and None elsewhere."""
    flat, treedef = jax.tree.flatten_with_path(tree)
    kept = [
        x if owner == key and is_gradient(path, x) else None
        for (path, x), owner in zip(flat, owned, strict=True)
    ]
    return jax.tree.unflatten(treedef, kept)


def root_of(loss_scale: Any, root: str | None) -> Any:
    """The one scale that the loss itself is multiplied with."""
    if not isinstance(loss_scale, Mapping):
        if root is not None:
            raise TypeError(
                f"root={root!r} names one of several scales, but loss_scale is "
                f"{describe(loss_scale)}: leave root out, or pass a dict of scales."
            )
        return loss_scale
    groups = as_groups("loss_scale", loss_scale)
    if root is None and len(groups) == 1:
        [root] = groups
    if root not in groups:
        raise ValueError(
            f"root must be one of {listing([repr(key) for key in groups])}, got {root!r}"
            f"{did_you_mean(str(root), groups)}: it names the scale that the loss itself is at."
        )
    return groups[root]


def map_groups(fn: Callable[..., Any], tree: PyTree, values: Mapping[str, jax.Array]) -> PyTree:
    """`fn(leaf, value)` on every gradient, with the value of its group; all else passes through.

    A value for each layer of a stack comes in the shape in which it broadcasts.
    """
    flat, treedef = jax.tree.flatten_with_path(tree)
    owned = owners(tree, values)
    new = [
        fn(x, over_layers(values[key], path, x)) if is_gradient(path, x) else x
        for (path, x), key in zip(flat, owned, strict=True)
    ]
    return jax.tree.unflatten(treedef, new)


def over_layers(values: jax.Array, path: Any, x: Any) -> jax.Array:
    """Values for the layers of a stack, in the shape in which they broadcast to `x`."""
    _check_layers(values.shape, path, x)
    return values.reshape(values.shape + (1,) * (jnp.ndim(x) - 1)) if values.ndim else values


def check_layers(shape: tuple[int, ...], tree: PyTree) -> None:
    """Raises unless every gradient begins with the axis of a scale of this shape."""
    for path, x in jax.tree.leaves_with_path(tree):
        if is_gradient(path, x):
            _check_layers(shape, path, x)


def _check_layers(shape: tuple[int, ...], path: Any, x: Any) -> None:
    if shape and jnp.shape(x)[:1] != shape:
        raise ValueError(
            f"{path_name(path)} is {describe(x)}, but its group has a scale for each of {shape[0]} "
            "layers: give stacked the number of layers, and what belongs to none a key of its own."
        )
