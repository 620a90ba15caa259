"""Checks of arguments: the value as it is used, or an error in one sentence."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._tree import describe

AxisName = str | Sequence[str] | None

# What a scale may be: XLA may multiply by 1 / scale (on CPUs it does, from jax 0.12), so that must
# be normal in float32 too.
LOWEST, HIGHEST = 2.0**-126, 2.0**126


def check_number(name: str, value: Any, remedy: str) -> None:
    """Raises unless `value` is a real scalar, of an integer or floating-point type."""
    if hasattr(value, "dtype"):
        real = jnp.issubdtype(value.dtype, jnp.number) and value.dtype.kind != "c"
    else:
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real:
        raise TypeError(f"{name} must be a real number, got {describe(value)}: {remedy}.")
    if np.ndim(value) != 0:
        raise TypeError(f"{name} must be a scalar, got {describe(value)}: {remedy}.")


def as_number(name: str, value: Any, remedy: str) -> float:
    """A configuration number as a float."""
    check_number(name, value, remedy)
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be known when the rule is made, got a tracer: {remedy}.")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def as_scale(name: str, value: Any) -> float:
    """`value` as a legal scale: positive, and normal in float32 together with its reciprocal."""
    remedy = "pass a positive number, best a power of two such as 2**16"
    scale = as_number(name, value, remedy)
    if not LOWEST <= scale <= HIGHEST:
        raise ValueError(
            f"{name} must be positive, finite and from 2^-126 to 2^126, got {scale}: {remedy}."
        )
    return scale


def as_count(name: str, value: Any) -> int:
    count = as_number(name, value, "pass a whole number of at least 1")
    if not 1 <= count < 2**31 or count != int(count):
        raise ValueError(
            f"{name} must be a whole number from 1 to 2^31 - 1, got {value!r}: it counts steps."
        )
    return int(count)


def check_real_scalar(name: str, x: Any, remedy: str) -> None:
    """Raises unless `x` is a real floating-point scalar."""
    floating = isinstance(x, float) or (
        hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    )
    if not floating:
        raise TypeError(
            f"{name} must be a real floating-point scalar, got {describe(x)}: {remedy}."
        )
    if jnp.ndim(x) != 0:
        raise ValueError(
            f"{name} must be a scalar, got {describe(x)}: reduce it, e.g. with jnp.mean."
        )


def as_flag(name: str, x: Any) -> jax.Array:
    """`x` as bool[]."""
    if not isinstance(x, bool) and getattr(x, "dtype", None) != jnp.bool_:
        raise TypeError(f"{name} must be a boolean scalar, got {describe(x)}.")
    if jnp.ndim(x) != 0:
        raise ValueError(
            f"{name} must be a boolean scalar, got {describe(x)}: use jnp.all or vmap."
        )
    return jnp.asarray(x)


def as_axes(axis_name: AxisName) -> tuple[str, ...]:
    if axis_name is None:
        return ()
    names = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis_name must be the name of an axis, or several, got {axis_name!r}.")
    return tuple(names)
