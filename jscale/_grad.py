"""Gradients of a scaled loss, handed out unscaled."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ._arguments import check_real_scalar, scale_array
from ._groups import as_groups, map_groups, owners, root_of
from ._tree import PyTree, at_least_f32, describe, map_inexact, newest_cotangents

_REMEDY = "pass jscale.loss_scale(opt_state), or a number"


def scale_loss(loss: float | jax.Array, loss_scale: jax.typing.ArrayLike) -> jax.Array:
    """The loss times the scale, in float32.

    One of the parts that `value_and_grad` is made of, for hand-written loops; undo it with
    `unscale` and the same scale. Compute the loss itself in float32: a float16 loss receives the
    scale as a float16 cotangent, which overflows from 2^16 on.

    Args:
      loss: floating-point scalar.
      loss_scale: f32[] or a number.

    Returns:
      f32[] (f64[] for a float64 loss).

    Raises:
      TypeError, ValueError: the loss is not a real floating-point scalar.

    >>> import jax.numpy as jnp, jscale
    >>> float(jscale.scale_loss(jnp.float16(3), 2.0**15))   # float16 itself ends at 65504
    98304.0
    """
    remedy = "cast it to float32" if hasattr(loss, "dtype") else "return the loss"
    check_real_scalar("the loss", loss, remedy)
    wide = at_least_f32(loss)
    return wide * scale_array("loss_scale", loss_scale, _REMEDY).astype(wide.dtype)


def unscale(
    tree: PyTree, loss_scale: jax.typing.ArrayLike | Mapping[str, jax.typing.ArrayLike]
) -> PyTree:
    """Gradients divided by the scale that scaled the loss, in float32.

    Args:
      tree: pytree of gradients. Integers, booleans, float0, None, PRNG keys and Flax's fp8
        overwrite leaves pass through.
      loss_scale: f32[] or a number: the scale that scaled, not the one adjusted after it. Or a dict
        of them, for backward passes written by hand, each at its own scale: every leaf is divided
        by that of the longest key that its path begins with, which is f32[n] for a stack of n
        layers. (What leaves a `region` is at the scale around it.)

    Returns:
      The same tree in float32 (complex64 for complex; float64 stays float64).

    Raises:
      TypeError, ValueError: a scale is invalid; a leaf is under no key, or a key over no leaf.

    >>> import jax.numpy as jnp, jscale
    >>> jscale.unscale({"n": jnp.int32(3), "w": jnp.float16([2048.0])}, 1024)
    {'n': Array(3, dtype=int32), 'w': Array([2.], dtype=float32)}
    >>> grads = {"head": jnp.float32(8), "layers": jnp.float32([8, 8])}
    >>> jscale.unscale(grads, {"head": 2, "layers": jnp.float32([4, 8])})
    {'head': Array(4., dtype=float32), 'layers': Array([2., 1.], dtype=float32)}
    """
    several = isinstance(loss_scale, Mapping)
    given = as_groups("loss_scale", loss_scale) if several else {"": loss_scale}
    name = (lambda key: f"loss_scale[{key!r}]") if several else (lambda key: "loss_scale")
    scales = {key: scale_array(name(key), x, _REMEDY, layered=several) for key, x in given.items()}

    def divide(x, scale):
        x = at_least_f32(x)
        return x / (scale if scale.dtype == x.dtype else scale.astype(x.dtype))

    return map_groups(divide, tree, scales)


def value_and_grad(
    fun: Callable[..., Any],
    loss_scale: jax.typing.ArrayLike | Mapping[str, jax.typing.ArrayLike],
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    root: str | None = None,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Callable[..., Any]:
    """`jax.value_and_grad` with the backward pass run at `loss_scale`.

    The loss is multiplied by the scale and the gradients are divided by it inside one call, so what
    comes out is never scaled: clip, accumulate, average over devices and log as usual. Where the
    backward pass overflowed, gradients are inf or NaN, which `with_loss_scale` acts on.

    Compute the loss in float32. A float16 loss receives the scale as its cotangent, which in
    float16 is inf from 2^16 on; 2^15 is used in place of 2^16, the usual first scale, and above it
    gradients overflow, so that a dynamic scale turns back.

    Inside shard_map, average the *unscaled* gradients, in float32. With check_vma, JAX itself sums
    the gradients of replicated parameters, in whatever dtype they have where they meet the data;
    make them varying first (`jax.lax.pcast(params, axis, to="varying")`) and average with
    `jax.lax.pmean` afterwards. That reads the same with and without check_vma.

    With several scales, `fun` uses the others in a `region` each; the loss and what is in no region
    is at that of `root`.

    Args:
      fun: function of parameters (and anything else) to a scalar loss, or to `(loss, aux)`.
      loss_scale: f32[] or a number; usually `jscale.loss_scale(opt_state)`. Or a dict from prefixes
        of parameter paths to scales, if the optimizer has several.
      argnums: as in `jax.value_and_grad`, or what `transform` takes (`nnx.DiffState`, …).
      has_aux: whether `fun` returns `(loss, aux)`.
      root: the key of the scale that the loss is multiplied with, if there are several.
      transform: what differentiates: `jax.value_and_grad`, `nnx.value_and_grad`,
        `eqx.filter_value_and_grad`, or a `functools.partial` of one with further options.

    Returns:
      A function with the arguments of `fun` that returns `(loss, grads)`, or
      `((loss, aux), grads)`: loss and gradients unscaled, in float32 (complex64 for complex).

    Raises:
      TypeError, ValueError: the loss is not a real floating-point scalar, or the scale is invalid;
        of several scales, a gradient is under no key, or a key over no gradient.

    >>> import jax.numpy as jnp, jscale
    >>> loss_fn = lambda w, x: jnp.sum(w * x)
    >>> w, x = jnp.ones(3), jnp.array([2.0, 4.0, 6.0])
    >>> loss, grads = jscale.value_and_grad(loss_fn, 2.0**16)(w, x)
    >>> print(loss, grads)
    12.0 [2. 4. 6.]
    """
    if not callable(fun):
        raise TypeError(
            f"fun must be a function that returns the loss, got {describe(fun)}: "
            "pass the function, not what it returned."
        )
    name = "loss_scale" if root is None else f"loss_scale[{root!r}]"
    scale = scale_array(name, root_of(loss_scale, root), _REMEDY)

    @functools.wraps(fun)
    def scaled(*args, **kwargs):
        out = fun(*args, **kwargs)
        if isinstance(out, tuple) and not has_aux:
            raise TypeError(
                "the loss function returned a tuple: return the loss alone, or pass has_aux=True."
            )
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"with has_aux=True the loss function must return (loss, aux), got {describe(out)}."
            )
        loss, aux = out if has_aux else (out, None)
        used = scale
        if getattr(loss, "dtype", None) == jnp.float16:
            used = jnp.where(scale == 2.0**16, 2.0**15, scale)
        product = scale_loss(loss, used)
        return product, (at_least_f32(loss), used, aux)

    # Equinox's transforms take no argnums: they differentiate the first argument.
    where = {} if argnums == 0 else {"argnums": argnums}
    differentiated = transform(scaled, has_aux=True, **where)

    @functools.wraps(fun)
    def wrapper(*args, **kwargs):
        result = differentiated(*args, **kwargs)
        if not (isinstance(result[0], tuple) and len(result[0]) == 2):
            raise TypeError(
                f"transform must return value and gradient, as jax.value_and_grad: got {transform}."
            )
        (_, (loss, used, aux)), grads = result
        if isinstance(loss_scale, Mapping):  # or only the optimizer would tell of a misspelt key
            owners(grads, loss_scale)
        grads = unscale(grads, used)
        if remembered := newest_cotangents(grads):
            # fp8 layers clip inf, so that it shows in what they remember alone.
            seen = jnp.stack([jnp.all(jnp.isfinite(x)) for x in remembered]).all()
            grads = map_inexact(lambda _, g: jnp.where(seen, g, jnp.nan), grads)
        return ((loss, aux), grads) if has_aux else (loss, grads)

    return wrapper


def grad(
    fun: Callable[..., Any],
    loss_scale: jax.typing.ArrayLike | Mapping[str, jax.typing.ArrayLike],
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    root: str | None = None,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Callable[..., Any]:
    """`jax.grad` with the backward pass run at `loss_scale`; see `value_and_grad`.

    Args:
      fun, loss_scale, argnums, has_aux, root: as for `value_and_grad`.
      transform: what differentiates; it returns value and gradient, as for `value_and_grad`.

    Returns:
      A function with the arguments of `fun` that returns the unscaled float32 gradients, or
      `(grads, aux)`.

    >>> import jscale
    >>> print(jscale.grad(lambda x: x**2, 1024)(3.0))
    6.0
    """
    with_value = value_and_grad(fun, loss_scale, argnums, has_aux, root=root, transform=transform)

    @functools.wraps(fun)
    def wrapper(*args, **kwargs):
        value, grads = with_value(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapper
