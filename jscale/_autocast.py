"""Float16 by operation: the job of torch.autocast, as a transform of functions."""

import collections
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ._calls import flat_call
from ._casts import Options, trace
from ._jaxpr import source, title
from ._tree import describe


def autocast(
    fun: Callable[..., Any],
    compute_dtype: Any = jnp.float16,
    *,
    keep: str | Sequence[str] = (),
    also: str | Sequence[str] = (),
    f32_results: str | Sequence[str] = (),
    recompute: bool = True,
) -> Callable[..., Any]:
    """`fun` with its matrix products in float16, and everything else as it is written.

    The job of `torch.autocast` and apex O1, done to a function: differentiate, vmap, scan or jit
    what it returns. `fun` is traced, and its matrix products, convolutions and ragged products of
    float32 arrays are computed in `compute_dtype`, in the backward pass too. All else, from the
    softmax to the loss, stays in float32. So does a product that

    - works on another dtype in the code, or on what was computed in half precision and then cast to
      float32: dtypes written down win;
    - is a sum of products: a norm, a cosine, a full `tensordot`;
    - asks for a `precision`, as `jax.image.resize` and much of `jnp.linalg` do;
    - is named by `keep`, or is inside another `autocast`, which then decides (with
      `compute_dtype=jnp.float32`: keeps).

    Loops, branches, jitted functions, checkpoints, `shard_map` and functions with their own
    derivatives are rewritten inside (but the rule of a function that has no product itself is not);
    Pallas kernels and foreign calls are not. Results have the dtypes that `fun` gives them. What
    `fun` changes in the variables of NNX modules among its arguments, such as batch statistics, is
    changed. As with `jax.jit`, pass modules as arguments rather than close over them, and in Linen
    and Haiku wrap `apply`, not a module's method.

    Memory: for its backward pass a cast program keeps products, random masks and whatever is not
    cheap to compute again, and recomputes the rest: `jax.checkpoint` with a policy, in parts that
    begin where few bytes cross, such as the residual stream between two blocks. A transformer then
    takes half the memory that it takes in float16 throughout, at a tenth more traffic; nets of
    convolutions or recurrent cells about as much (experiments/autocast_memory.py). Where
    max-pooling follows convolutions, `also="reduce_window_max"` saves more: a maximum commutes with
    rounding. `recompute=False` leaves what is kept to you and to JAX; a `jax.checkpoint` of your
    own inside `fun` stands in any case.

    Patterns (of `keep`, `also`, `f32_results`) are names of operations as `jax.make_jaxpr` prints
    them (`"tanh"`), of jitted functions (`"softplus"`), of scopes, which Linen and Haiku modules
    and `jax.named_scope` make (`"decoder/wo"`), or of an argument that the operation works on, or
    on a slice of (`"layers/*/wo/weight"`, for NNX, Equinox and plain trees): a weight that is
    scaled or joined with another first is not it any more. Each is a run of path components, in
    which `*` and `?` are wildcards. A pattern that matches nothing warns.

    Args:
      fun: function of arrays, pytrees, modules; anything but JAX arrays reaches it as it is.
      compute_dtype: float16, bfloat16, or float32, which changes nothing.
      keep: patterns of products that stay as they are written, such as the `wo` of T5.
      also: patterns of further operations to compute in `compute_dtype`.
      f32_results: patterns of products of float16 arrays that end in float32, because they may
        exceed 65504. Their backward products are in float16.
      recompute: whether the backward pass recomputes what is cheap.

    Returns:
      A function with the arguments and results of `fun`. Use it under `jax.jit`: it traces `fun`
      whenever it is called.

    Raises:
      ValueError, TypeError: an argument is not what it should be.

    >>> import jax, jax.numpy as jnp, jscale
    >>> def loss_fn(w, x):
    ...     return jnp.mean(jax.nn.logsumexp(x @ w, axis=-1))
    >>> w, x = jnp.ones((4, 8)), jnp.ones((2, 4))
    >>> print(jscale.autocast(loss_fn)(w, x).dtype)
    float32
    >>> jscale.explain(loss_fn)(w, x)[0].dtype
    'float16'
    """
    options = _options(compute_dtype, recompute, keep=keep, also=also, f32_results=f32_results)
    _check_function(fun)

    @functools.wraps(fun, updated=())
    def wrapper(*args, **kwargs):
        call = trace(flat_call(fun, args, kwargs, "autocast"), options)
        if call.unused:
            warnings.warn(
                f"autocast: {', '.join(call.unused)} matched no operation, function, scope or "
                "argument; jscale.explain shows what there is.",
                stacklevel=2,
            )
        return call.evaluate()

    # With itself, since functools.wraps copies attributes to whatever is made of this.
    wrapper.autocast_options = wrapper, options  # type: ignore[attr-defined]
    return wrapper


@dataclasses.dataclass(frozen=True)
class Operation:
    """One row of what `explain` shows: operations of one kind that run in one precision.

    Attributes:
      name: the primitive, as `jax.make_jaxpr` prints it.
      dtype: the dtype it is computed in.
      count: how often it runs in a call; the body of a `while` counts once.
      reason: `product`, `as written`, or what else decided.
      sources: the lines it comes from, most frequent first.
    """

    name: str
    dtype: str
    count: int
    reason: str
    sources: tuple[str, ...]


class Explanation(tuple[Operation, ...]):
    """What `explain` found: a tuple of `Operation`, which prints as a table."""

    def __str__(self) -> str:
        rows = [("operation", "dtype", "count", "reason", "where")]
        for row in self:
            more = f", and {len(row.sources) - 2} more" if len(row.sources) > 2 else ""
            where = ", ".join(row.sources[:2]) + more
            rows.append((row.name, row.dtype, str(row.count), row.reason, where))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(lines)

    __repr__ = __str__


def explain(
    fun: Callable[..., Any],
    compute_dtype: Any = jnp.float16,
    *,
    keep: str | Sequence[str] = (),
    also: str | Sequence[str] = (),
    f32_results: str | Sequence[str] = (),
) -> Callable[..., Explanation]:
    """Which operation of `fun` runs in which precision under `autocast`, how often, and why.

    Args:
      fun: a function, or one that `autocast` returned; then its options hold.
      compute_dtype, keep, also, f32_results: as for `autocast`.

    Returns:
      A function with the arguments of `fun` that returns an `Explanation`. It traces `fun` and
      computes nothing; arguments may be arrays or `jax.ShapeDtypeStruct`s.

    >>> import jax, jax.numpy as jnp, jscale
    >>> fun = lambda w, x: jax.nn.softmax(x @ w)
    >>> print(jscale.explain(fun)(jnp.ones((4, 4)), jnp.ones((2, 4))))
    operation         dtype    count  reason      where
    dot_general       float16  1      product     ...
    reduce_max        float32  1      as written  ...
    broadcast_in_dim  float32  2      as written  ...
    stop_gradient     float32  1      as written  ...
    sub               float32  1      as written  ...
    exp               float32  1      as written  ...
    reduce_sum        float32  1      as written  ...
    div               float32  1      as written  ...
    """
    _check_function(fun)
    owner, options = getattr(fun, "autocast_options", [None] * 2)
    if owner is fun:
        fun = fun.__wrapped__
    else:
        options = _options(compute_dtype, keep=keep, also=also, f32_results=f32_results)

    def explained(*args, **kwargs):
        call = trace(flat_call(fun, args, kwargs, "explain"), options)
        lines: dict[Any, collections.Counter[str]] = {}
        for eqn, dtype, reason, times, callers in call.result.notes:
            row = title(eqn), str(dtype), reason
            line = next(filter(None, map(source, (eqn, *callers))), "")
            lines.setdefault(row, collections.Counter())[line] += times
        operations = [
            Operation(name, dtype, counts.total(), reason, tuple(dict(counts.most_common())))
            for (name, dtype, reason), counts in lines.items()
        ]
        return Explanation(sorted(operations, key=lambda row: row.reason == "as written"))

    return explained


def _check_function(fun: Any) -> None:
    if not callable(fun):
        raise TypeError(
            f"fun must be a function, got {describe(fun)}: pass the function, not what it returned."
        )


def _options(compute_dtype: Any, recompute: Any = True, **patterns: str | Sequence[str]) -> Options:
    try:
        dtype = None if compute_dtype in (None, float) else jnp.dtype(compute_dtype)
    except TypeError:
        dtype = None
    if dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"compute_dtype must be float16, bfloat16 or float32, got {compute_dtype!r}."
        )
    if not isinstance(recompute, bool):
        raise TypeError(f"recompute must be True or False, got {recompute!r}.")
    split = {}
    for name, given in patterns.items():
        several = isinstance(given, Sequence) and not isinstance(given, str)
        names: Any = given if several else [given]
        if not all(isinstance(pattern, str) and pattern.strip("/") for pattern in names):
            raise TypeError(
                f"{name} takes names of operations, functions, scopes or parameters, as strings; "
                f"got {given!r}."
            )
        split[name] = tuple(tuple(pattern.strip("/").split("/")) for pattern in names)
    return Options(dtype, recompute=recompute, **split)
