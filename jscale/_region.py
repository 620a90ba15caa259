"""A part of the backward pass that runs at a scale of its own."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._arguments import scale_array
from ._calls import flat_call
from ._finite import everywhere, varying
from ._tree import OVERWRITE_WITH_GRADIENT, at_least_f32, describe, is_inexact


def region(
    fun: Callable[..., Any],
    loss_scale: jax.typing.ArrayLike,
    outer: jax.typing.ArrayLike,
    *,
    stop_nonfinite: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """`fun`, with its backward pass run at another loss scale than what is around it.

    The cotangents of its results are multiplied by `loss_scale / outer` on the way in, and those of
    everything it takes, or closes over, are divided by it on the way out: in float32, and then cast
    back. So a region changes at what scale gradients are computed, and never what they are: outside
    of it, all of them are at `outer`. That holds for parameters too, be they arguments, closed
    over, or shared with another part of the model. They should be float32 there, and cast inside
    the region, as `autocast` does: the gradient of a float16 array is float16 outside as well.

    `with_loss_scale` takes one rule for each region, and `value_and_grad` all the scales:

        scale = jscale.loss_scale(opt_state)   # {"text": f32[], "vision": f32[]}

        def loss_fn(params, images, tokens):
            vision = jscale.region(encoder, scale["vision"], scale["text"])
            return text_loss(params["text"], vision(params["vision"], images), tokens)

        jscale.value_and_grad(loss_fn, scale, root="text")(params, images, tokens)

    Regions nest: the outer scale of the inner one is that of the region around it. In a scanned
    stack of layers, scan over the scales too, and let the body be a region at its own.

    A product may overflow in what it passes on, and in nothing else. Then the region behind it is
    the first whose parameters show it, and its scale falls, in vain. Where every step is skipped
    and only such a scale keeps falling, `stop_nonfinite` on the regions before it gives each
    overflow to the region that made it.

    Modules of Flax NNX are arguments, or `fun` itself, or `fun` is a method of theirs, if it
    changes them; in Linen wrap `apply`, not a module's method, and pass the variables of fp8 layers
    as arguments: what comes back for those that it closes over is taken for gradients.

    Args:
      fun: function of arrays, pytrees, modules; integers, None and all else pass.
      loss_scale: f32[] or a number, the scale in the region.
      outer: f32[] or a number, the scale around it.
      stop_nonfinite: positions of arguments whose cotangents leave the region with zeros in place
        of inf and NaN, so that an overflow inside spares what is behind them, as in DALL-E (Ramesh
        et al., 2021). All else that `fun` takes or closes over then gets NaN, so that the region
        itself counts as overflowed: let that include something that is trained.

    Returns:
      A function with the arguments and results of `fun`. It traces `fun` whenever it is called.

    Raises:
      TypeError, ValueError: an argument is not what it should be; or, from the call, with
        `stop_nonfinite`, `fun` has nothing else that could show an overflow.

    >>> import jax, jax.numpy as jnp, jscale
    >>> half = lambda x: x.astype(jnp.float16)
    >>> tower = lambda w, x: (half(w) * half(x)).astype(jnp.float32)  # gradients pass in float16
    >>> w, x = jnp.float32(1.0), jnp.float32(2.0**-20)
    >>> loss_fn = lambda w, scale: jscale.region(tower, scale, 1.0)(w, x) * 2.0**-10
    >>> print(jax.grad(loss_fn)(w, 1.0) * 2**30, jax.grad(loss_fn)(w, 2.0**20) * 2**30)
    0.0 1.0
    """
    if not callable(fun):
        raise TypeError(
            f"fun must be a function, got {describe(fun)}: pass the function, not what it returned."
        )
    remedy = "pass one of the scales that jscale.loss_scale(opt_state) gives"
    inside = scale_array("loss_scale", loss_scale, remedy)
    around = scale_array("outer", outer, remedy)
    # Whatever it is, it is taken back on the way out; as a number that float32 holds.
    ratio = jnp.clip(inside / around, 2.0**-126, 2.0**126)
    given: Any = stop_nonfinite if isinstance(stop_nonfinite, Sequence) else [stop_nonfinite]
    try:
        stopped = {str(operator.index(i)) for i in given}
    except TypeError:
        raise TypeError(
            f"stop_nonfinite takes positions of arguments, got {stop_nonfinite!r}."
        ) from None

    @functools.wraps(fun, updated=())  # a module's attributes are not those of the region
    def wrapper(*args, **kwargs):
        if any(not 0 <= int(i) < len(args) for i in stopped):
            raise ValueError(
                f"stop_nonfinite is {stop_nonfinite!r}, but the region was called with {len(args)} "
                "arguments by position: count them from 0."
            )
        call = flat_call(fun, args, kwargs, "region")
        # What it closes over becomes arguments too.
        converted, closed_over = jax.closure_convert(call.fun, *call.arrays)
        inputs = [*call.arrays, *closed_over]
        unknown = [False] * len(closed_over)
        is_stopped = [path[0] in stopped for path in call.paths] + unknown
        # What comes back for these is their next value, and no cotangent.
        is_fp8 = [OVERWRITE_WITH_GRADIENT in path for path in call.paths] + unknown
        inputs = _leave(inputs, is_stopped, is_fp8, ratio)
        return call.finish([_at_scale(x, ratio, jnp.multiply) for x in converted(*inputs)])

    return wrapper


def _leave(
    inputs: list[jax.Array], is_stopped: list[bool], is_fp8: list[bool], ratio: jax.Array
) -> list[jax.Array]:
    """What goes into the region; its cotangents leave it."""
    places = [i for i, x in enumerate(inputs) if is_inexact(x) and not is_fp8[i]]
    stopped = [inputs[i] for i in places if is_stopped[i]]
    others = [inputs[i] for i in places if not is_stopped[i]]
    out = list(inputs)
    if stopped:
        if not others:
            raise ValueError(
                "stop_nonfinite names all that the region depends on, so that nothing can show "
                "that it overflowed: pass its parameters by another argument."
            )
        stopped, others = map(iter, _stopping(stopped, others))
        for i in places:
            out[i] = next(stopped) if is_stopped[i] else next(others)
    # One by one: what needs no gradient must not get one because of its neighbours.
    return [
        x if fp8 else _at_scale(x, ratio, jnp.divide) for x, fp8 in zip(out, is_fp8, strict=True)
    ]


def _at_scale(x: jax.Array, ratio: jax.Array, operation: Callable[..., Any]) -> jax.Array:
    """`x`, whose cotangent is multiplied with the ratio, or divided by it."""
    return _identity(operation, x, ratio) if is_inexact(x) else x


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _identity(operation, x, ratio):
    return x


def _rescaled(cotangent, ratio, operation):
    wide = at_least_f32(cotangent)
    return operation(wide, ratio.astype(wide.dtype)).astype(cotangent.dtype)


@_identity.defjvp
def _identity_jvp(operation, primals, tangents):
    (x, ratio), (tangent, _) = primals, tangents
    # In shard_map with check_vma, what the solve is given must vary over the same devices.
    if axes := tuple(varying(tangent) - varying(ratio)):
        ratio = jax.lax.pcast(ratio, axes, to="varying")
    # The public form of a linear function whose transpose one may choose. Each is the transpose of
    # the other in derivatives of derivatives too, so that what is scaled on the way in is scaled
    # back on the way out, whatever is differentiated in which order.
    tangent = jax.lax.custom_linear_solve(
        lambda x: x,
        tangent,
        solve=lambda _, x: x,
        transpose_solve=lambda _, x: _rescaled(x, ratio, operation),
    )
    return _identity(operation, x, primals[1]), tangent


@jax.custom_vjp
def _stopping(stopped, others):
    return stopped, others


def _stopping_bwd(_, cotangents):
    stopped, others = cotangents
    good = jnp.stack([jnp.all(jnp.isfinite(x)) for x in stopped]).all()
    stopped = [jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)) for x in stopped]
    # In shard_map with check_vma, what all devices share is lost if it is lost on one.
    known = lambda x: everywhere(good, tuple(varying(good) - varying(x)))
    others = [jnp.where(known(x), x, jnp.full_like(x, jnp.nan)) for x in others]
    return stopped, others


_stopping.defvjp(lambda stopped, others: ((stopped, others), None), _stopping_bwd)
