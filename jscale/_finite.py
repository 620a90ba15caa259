"""Is a step's gradient finite, and what is kept when it is not."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ._arguments import AxisName, as_axes, as_flag
from ._groups import as_groups, owner_at
from ._tree import (
    PyTree,
    inexact_leaves,
    mismatch,
    path_name,
)


def all_finite(tree: PyTree) -> jax.Array:
    """Whether every element of every floating-point leaf is finite.

    Integers, booleans, PRNG keys, float0, None and Flax's fp8 overwrite leaves are not looked at;
    a tree without floating-point leaves is finite. `with_loss_scale` does not use this helper: it
    reads its flag off the gradient norm, which is inf above 1.8e19 too, where float32 cannot hold
    its square.

    Args:
      tree: any pytree.

    Returns:
      bool[].

    >>> import jax.numpy as jnp, jscale
    >>> bool(jscale.all_finite({"w": jnp.ones(3), "step": jnp.int32(7)}))
    True
    >>> bool(jscale.all_finite({"w": jnp.array([1.0, jnp.nan])}))
    False
    """
    flags = [jnp.all(jnp.isfinite(x)) for x in inexact_leaves(tree)]
    return jnp.all(jnp.stack(flags)) if flags else jnp.array(True)


def varying(x: jax.Array) -> frozenset[str]:
    """The axes of shard_map over which `x` is known to differ."""
    return jax.typeof(x).manual_axis_type.varying


def _tracks_varying_axes(axis: str) -> bool:
    """Whether the enclosing shard_map records which values differ between devices (check_vma)."""
    return axis in varying(lax.axis_index(axis))


def _norm(leaves: list[jax.Array]) -> jax.Array:
    if not leaves:
        return jnp.zeros((), jnp.float32)
    single = lambda x: x.astype(jnp.complex64 if jnp.iscomplexobj(x) else jnp.float32)
    # The same expression as inside optax.clip_by_global_norm, so that XLA computes both once. And
    # leaf by leaf: sums over several would tie their shardings to one another.
    return optax.tree.norm([single(x) for x in leaves])


def global_norm(tree: PyTree, axis_name: AxisName = None) -> jax.Array:
    """Euclidean norm of the floating-point leaves, taken in float32, equal on all devices.

    With `axis_name`, inside shard_map: a leaf that varies over an axis is one device's part of a
    larger array, so its square is summed over the axis; a leaf that does not vary counts once.
    With check_vma=False (and in pmap) JAX does not say which is which: gradients are then taken to
    be averaged already, and the devices' norms are averaged.
    """
    leaves = [jnp.asarray(x) for x in inexact_leaves(tree)]
    axes = as_axes(axis_name)
    if not axes:
        return _norm(leaves)
    if not all(_tracks_varying_axes(a) for a in axes):
        return lax.pmean(_norm(leaves), axes)
    by_axes: dict[tuple[str, ...], list[jax.Array]] = {}
    for x in leaves:
        by_axes.setdefault(tuple(a for a in axes if a in varying(x)), []).append(x)
    total = jnp.zeros((), jnp.float32)
    for spread, group in by_axes.items():
        square = jnp.square(_norm(group))
        total += lax.psum(square, spread) if spread else square
    return jnp.sqrt(total)


def in_array(flag: jax.Array) -> jax.Array:
    """`flag`, read from an array.

    XLA's GPU compiler merges kernels that read the same array, but not those that read the same
    scalar: so the updates of parameters of one shape become one kernel. That is after it has
    divided the program among devices, and the barrier lasts until then.
    """
    return lax.optimization_barrier(jnp.stack([flag, flag]))[0]


def in_one_kernel(flags: PyTree) -> PyTree:
    """`flags`, such that all scalars that are computed from the scalar ones are so in one kernel.

    As in `in_array`, but by an operation: results that only slice the array would not be merged.
    """
    flat, treedef = jax.tree.flatten(flags)
    alike: dict[Any, list[int]] = {}  # in shard_map one that varies would make all others vary
    for i, flag in enumerate(flat):
        if not jnp.ndim(flag):
            alike.setdefault(varying(jnp.asarray(flag)), []).append(i)
    for places in alike.values():
        array = lax.optimization_barrier(jnp.stack(2 * [flat[i] for i in places]))
        for i, one, again in zip(places, array, array[len(places) :], strict=False):
            flat[i] = one & again
    return jax.tree.unflatten(treedef, flat)


def over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`x` for a collective over `axes`; JAX takes none that varies over some of them only."""
    same = tuple(a for a in axes if a not in varying(x))
    return lax.pcast(x, same, to="varying") if 0 < len(same) < len(axes) else x


def everywhere(flag: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Whether `flag` holds on all devices of `axes`."""
    return lax.psum(over((~flag).astype(jnp.int32), axes), axes) == 0 if axes else flag


def _pick(finite: jax.Array, path: Any, n: Any, o: Any) -> Any:
    if hasattr(n, "dtype") or hasattr(o, "dtype"):
        array = lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x)
        kept, n = array(o), array(n)
        n = n if n.dtype == kept.dtype else n.astype(kept.dtype)
        return lax.select(finite, n, kept)
    if n is o or n == o:
        return o
    raise ValueError(
        f"select can choose between arrays only, but at {path_name(path)} new has {n!r} "
        f"and old {o!r}: make it an array, or leave it out."
    )


def choose(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`select` for trees that are known to match."""
    return jax.tree.map_with_path(functools.partial(_pick, finite), new, old)


def select(
    finite: bool | jax.Array | Mapping[str, bool | jax.Array], new: PyTree, old: PyTree
) -> PyTree:
    """`new` where the step was applied, else `old`, bit for bit, with the types of `old`.

    For whatever a step changes outside the optimizer: batch statistics, an average of the
    parameters, dropout keys. NaN-safe, since it selects and never multiplies. Flax NNX modules
    change in place: take `old` with `nnx.as_pure(nnx.state(model, ...))` before the step, or it is
    the new state already.

    Args:
      finite: bool[], usually `opt_state.finite` after the update; or a dict of flags by prefixes of
        paths, as `with_loss_scale(..., skip="own")` has, of which the longest decides.
      new: pytree as this step left it.
      old: pytree as it was before the step; same structure and shapes.

    Returns:
      A pytree with the structure, shapes and dtypes of `old`. Leaves that are not arrays
      (functions, strings, Python numbers) must be equal in both and are returned as they are.

    Raises:
      TypeError: `finite` is not a boolean.
      ValueError: the two trees differ in structure, in a shape, or in a leaf that is not an array;
        or a leaf would lose what it holds: a fraction to an integer, 64 bits since JAX runs without
        x64; or it is under no key.

    >>> import jax.numpy as jnp, jscale
    >>> old, new = {"mean": jnp.zeros(2)}, {"mean": jnp.array([jnp.nan, 1.0])}
    >>> jscale.select(jnp.array(False), new, old)
    {'mean': Array([0., 0.], dtype=float32)}
    """
    if not isinstance(finite, Mapping):
        flag = as_flag("finite", finite)
        flag_at = lambda path: flag
    else:
        groups = as_groups("finite", finite)
        flags = {key: as_flag(f"finite[{key!r}]", x) for key, x in groups.items()}
        flag_at = lambda path: flags[owner_at(path, flags)]
    if difference := mismatch(new, old, kinds=lambda path: True):
        raise ValueError(
            f"select needs trees of one structure, but new is not like old: {difference}."
        )

    def pick(path, n, o):
        whole = getattr(o, "dtype", None)
        if isinstance(o, np.ndarray | np.generic) and (kept := jnp.asarray(o).dtype) != whole:
            raise ValueError(
                f"select would narrow {path_name(path)} from {whole} to {kept}: "
                "enable jax_enable_x64, or make it a narrower array."
            )
        return _pick(flag_at(path), path, n, o)

    return jax.tree.map_with_path(pick, new, old)
