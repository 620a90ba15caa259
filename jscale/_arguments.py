"""Checks of arguments: the value as it is used, or an error in one sentence."""

import difflib
import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

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


def scale_array(name: str, value: Any, remedy: str, *, layered: bool = False) -> jax.Array:
    """A scale as strong-typed f32[], or f32[n] if `layered`; one on the host is checked."""
    if layered and np.ndim(value) == 1:
        if not isinstance(value, jax.Array):
            value = np.array([as_scale(name, x) for x in value], np.float32)
        check_number(name, jax.ShapeDtypeStruct((), value.dtype), remedy)
    else:
        check_number(name, value, remedy)
        if not isinstance(value, jax.Array):
            as_scale(name, value)
    return jnp.asarray(value, jnp.float32)


def as_count(name: str, value: Any) -> int:
    count = as_number(name, value, "pass a whole number of at least 1")
    if not 1 <= count < 2**31 or count != int(count):
        raise ValueError(
            f"{name} must be a whole number from 1 to 2^31 - 1, got {value!r}: it counts steps."
        )
    return int(count)


def as_power_of_two(name: str, value: Any) -> int:
    """The exponent of a scale that is a power of two."""
    mantissa, exponent = math.frexp(as_scale(name, value))
    if mantissa != 0.5:
        raise ValueError(
            f"{name} must be a power of two, got {value}: "
            f"this rule moves in powers of two, and 2**{exponent - 1} is the next below."
        )
    return exponent - 1


def check_bounds(first: tuple[str, Any], low: tuple[str, Any], high: tuple[str, Any]) -> None:
    """Raises unless the first scale lies between the other two. Each has a name and a value."""
    if low[1] > high[1]:
        raise ValueError(
            f"{low[0]} must not exceed {high[0]}, got {low[1]} > {high[1]}: swap them."
        )
    if first[1] < low[1]:
        raise ValueError(
            f"{first[0]} must be at least {low[1]} ({low[0]}), got {first[1]}: raise it."
        )
    if first[1] > high[1]:
        raise ValueError(
            f"{first[0]} must be at most {high[1]} ({high[0]}), got {first[1]}: lower it."
        )


def as_bits(value: Any, default: int) -> float:
    """A distance from float16's limit."""
    bits = as_number("bits", value, f"{default} is the default")
    if not 0 <= bits <= 40:
        raise ValueError(f"bits must be from 0 to 40, all that float16 has, got {bits}.")
    return bits


def as_switch(name: str, value: Any) -> bool:
    """A setting that is on or off; a word such as "no" would be true."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {describe(value)}.")
    return bool(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest of `known` as the end of a message, or nothing."""
    near = difflib.get_close_matches(name, list(known), 1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


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


def as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    if isinstance(inner, optax.MultiSteps):
        # with_extra_args_support would drop the extra arguments of what its own method returns.
        return optax.GradientTransformationExtraArgs(inner.init, inner.update)
    if isinstance(inner, optax.GradientTransformation):
        return optax.with_extra_args_support(inner)
    raise TypeError(
        f"inner must be an optax.GradientTransformation, got {describe(inner)}: "
        "pass e.g. optax.adamw(3e-4)."
    )
