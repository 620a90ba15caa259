"""Which operation first made inf or NaN, and which lost most of its values, in both passes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ._arguments import as_number
from ._calls import flat_call
from ._grad import value_and_grad
from ._jaxpr import body, function, is_inexact, subjaxprs, var
from ._location import ARGUMENT, CONSTANT, Fault, Location, Underflow, ValueRange, value_range
from ._steps import NO_FAULT, Place, Steps, Value, finite, is_inexact_array, mesh_of
from ._tree import at_least_f32, path_name

# After which an array is still called by the name of its argument.
_SAME = frozenset(
    "broadcast_in_dim convert_element_type copy dynamic_slice gather pcast pvary reduce_precision"
    " reshape sharding_constraint slice squeeze transpose".split()
)
# What only moves numbers.
_MOVES = frozenset(
    "broadcast_in_dim concatenate copy dynamic_slice dynamic_update_slice expand_dims pad reshape"
    " rev select_n slice split squeeze stack transpose unstack".split()
)
# Put in place of inf and NaN, to see whether an operation makes them by itself: what it makes of
# none of these is its own.
_NEUTRAL = (0.0, 0.5, 2.0)
_ORIGINS = 8  # so many faults are told apart at the operands of one operation


def locate(
    fun: Callable[..., Any],
    *args: Any,
    scale: Any = 1.0,
    argnums: Any = 0,
    has_aux: bool = False,
    root: str | None = None,
    transform: Callable[..., Any] = jax.value_and_grad,
    underflow: float | None = 0.5,
    **kwargs: Any,
) -> Location:
    """Which operation of `value_and_grad` first made inf or NaN, and which lost their values.

    Call it outside of jit, with the arguments of a step that was skipped. It runs the forward pass
    and the backward pass of the scaled loss operation by operation, and looks at every result. To
    blame is the first operation that made an inf or NaN of its own which reaches the loss, or else
    a gradient. The -inf of a mask, which softmax takes away again, does not; nor is it to blame for
    what overflowed beside it: each inf and NaN in an array is followed by itself.

    Jitted functions, loops, branches, checkpoints and functions with derivatives of their own are
    gone into; `shard_map` and kernels are looked at as a whole. Arrays may be sharded. An array is
    freed after its last use, so that memory is that of the step without `jit`; but XLA may fuse
    operations and keep float32 within, so what is just about to overflow may not do so in the
    compiled step.

    Args:
      fun: what the step differentiates, `autocast` included; as for `value_and_grad`.
      *args, **kwargs: what `fun` is called with.
      scale: the loss scale of that step, from before its update, which lowered it; or a dict of
        several, as for `value_and_grad`.
      argnums, has_aux, root, transform: as for `value_and_grad`.
      underflow: from which share on a loss of values to zero is reported. None does not look for
        it, and then loops run compiled, and turn by turn only if inf or NaN come out.

    Returns:
      A `Location`, which prints as a report. Modules of Flax NNX among the arguments stay as they
      are.

    Raises:
      TypeError, ValueError: as from `value_and_grad`; or the call is inside of jit.

    >>> import jax.numpy as jnp, jscale
    >>> def loss_fn(w, x):
    ...     logits = (x * w).astype(jnp.float16)
    ...     return jnp.sum(jnp.exp(logits).astype(jnp.float32))
    >>> w, x = jnp.float32([1.0, 2.0]), jnp.float32([3.0, 6.0])
    >>> print(jscale.locate(loss_fn, w, x, scale=2.0**10))
    not finite: loss, gradient; first
    exp, in the forward pass
      at ... (loss_fn)
      takes  float16[2]: 3 to 12
      gives  float16[2]: 20.1 to 20.1, 1 inf
    no operation lost most of its values to zero
    """
    if underflow is not None:
        underflow = as_number("underflow", underflow, "pass a share, or None")
        if not 0 < underflow <= 1:
            raise ValueError(f"underflow must be a share from 0 to 1, or None, got {underflow}.")
    differentiated = value_and_grad(fun, scale, argnums, has_aux, root=root, transform=transform)
    names: list[str] = []

    def results(*args, **kwargs):
        value, grads = differentiated(*args, **kwargs)
        flat = [(p, x) for p, x in jax.tree.leaves_with_path(grads) if isinstance(x, jax.Array)]
        of = lambda path: f"gradient of {path_name(path)}" if path else "gradient"
        names[:] = ["loss", *(of(path) for path, _ in flat)]
        return [value[0] if has_aux else value, *(x for _, x in flat)]

    # NumPy arrays, too, are arguments with a name; in containers that are no modules.
    is_leaf = lambda x: not isinstance(x, tuple | list | dict)
    array = lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) and x.dtype != object else x
    args, kwargs = jax.tree.map(array, (args, kwargs), is_leaf=is_leaf)
    call = flat_call(results, args, kwargs, "locate")
    if not all(map(_is_concrete, call.arrays)):
        raise TypeError(
            "locate runs one operation after the other and looks at the values, so it must be "
            "called with arrays, outside jit, grad and scan."
        )
    with jax.debug_nans(False), jax.debug_infs(False), mesh_of(call.arrays):
        jaxpr = jax.make_jaxpr(call.fun)(*call.arrays)
        run = _Run(underflow is not None)
        arguments = zip(call.arrays, call.paths, strict=True)
        inputs = [run.given(ARGUMENT, Value(x, path=path)) for x, path in arguments]
        # What NNX modules would be changed to comes after the gradients.
        out = run.run(jaxpr, inputs, Place(), results=len(names))
        return run.report(names, out, underflow)


def _is_concrete(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


# Looking at arrays.


@jax.jit
def _count_lost(wide: jax.Array, narrow: jax.Array) -> tuple[jax.Array, jax.Array]:
    nonzero = jnp.isfinite(wide) & (wide != 0)
    return (nonzero & (at_least_f32(narrow) == 0)).sum(), nonzero.sum()


@jax.jit
def _lowest_above(origins: list[jax.Array], above: int) -> jax.Array:
    lowest = [jnp.where(x > above, x, NO_FAULT).min(initial=NO_FAULT) for x in origins]
    return jnp.stack(lowest).min()


@jax.jit
def _bad(x: jax.Array) -> jax.Array:
    return ~jnp.isfinite(at_least_f32(x))


@jax.jit
def _nan(x: jax.Array) -> jax.Array:
    return jnp.isnan(at_least_f32(x))


@jax.jit
def _inf(x: jax.Array) -> jax.Array:
    return jnp.isinf(at_least_f32(x))


@jax.jit
def _any(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([x.any() for x in arrays]).any()


@jax.jit
def _mark(origin: Any, where: jax.Array, number: int) -> jax.Array:
    return jnp.where(where, jnp.int32(number), jnp.asarray(origin, jnp.int32))


@jax.jit
def _put(x: jax.Array, where: jax.Array, value: float) -> jax.Array:
    return jnp.where(where, jnp.asarray(value).astype(x.dtype), x)


def _is_narrow(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", int), jnp.floating) and x.dtype.itemsize < 4


def _range(value: Value) -> ValueRange:
    return value_range("/".join(value.path or ()), value.array)


# Running it.


class _Run(Steps):
    """A run that keeps the faults, by number, and what was lost to zero."""

    def __init__(self, underflow: bool):
        super().__init__(step_loops=underflow)
        self.underflow = underflow
        self.faults: list[Fault] = []
        # An inf that is written in the code or passed in is meant, until it makes a NaN.
        self.meant: set[int] = set()
        self.literals: dict[Any, int] = {}
        self.lost: dict[Any, Underflow] = {}

    def report(self, names: list[str], out: list[Value], threshold: float | None) -> Location:
        nonfinite = [name for name, x in zip(names, out, strict=True) if x.origin is not None]
        first = None
        if nonfinite:
            # If the loss is not finite, gradients follow from that.
            first = self.faults[self.origins(out[:1] if out[0].origin is not None else out)[0]]
        literals = self.literals.values()
        others = [x for i, x in enumerate(self.faults) if x is not first and i not in literals]
        lost = None
        if threshold is not None:
            lost = tuple(x for x in self.lost.values() if x.lost >= threshold * x.nonzero)
        return Location(tuple(nonfinite), first, tuple(others), lost)

    def fault(self, fault: Fault, meant: bool = False) -> int:
        self.faults.append(fault)
        number = len(self.faults) - 1
        self.meant.update([number] if meant else [])
        return number

    # What comes with inf or NaN.

    def constant(self, x: Any) -> Value:
        return self.given(CONSTANT, Value(x))

    def given(self, kind: str, value: Value) -> Value:
        """An argument or a constant. The NaN in it are no good, the inf are meant."""
        if finite([value.array]).all():
            return value
        seen = _range(value)
        origin = jnp.full(seen.shape, NO_FAULT, jnp.int32)
        for count, where in (seen.nans, _nan), (seen.infs, _inf):
            if count:
                record = Fault(kind, False, (), (seen,), "", "", (), "")
                number = self.fault(record, meant=where is _inf)
                origin = _mark(origin, where(value.array), number)
        return value._replace(origin=origin)

    def literal(self, x: np.ndarray, key: Any, eqn: JaxprEqn | None, place: Place) -> Value:
        if np.isfinite(x.astype(complex)).all():
            return Value(x)
        if key not in self.literals:
            at: dict[str, Any] = dict(operation=CONSTANT, backward=False, source="", scope="")
            at |= {} if eqn is None else place.named(eqn)
            note = "takes an inf or NaN that is written in the code"
            seen = (_range(Value(jnp.asarray(x))),)
            self.literals[key] = self.fault(
                Fault(**at, inputs=seen, outputs=(), turns=place.turns, note=note), meant=True
            )
        return Value(x, jnp.full(x.shape, self.literals[key], jnp.int32))

    # What operations make of it.

    def operation(
        self, eqn: JaxprEqn, operands: list[Value], out: Sequence[Any], place: Place
    ) -> list[Value]:
        path = operands[0].path if operands and eqn.primitive.name in _SAME else None
        values = [Value(x, path=path) for x in out]
        bad = [i for i, ok in enumerate(finite(out)) if not ok]
        if bad:
            origins = self.follow(eqn, operands, out, bad, place)
            for i, origin in zip(bad, origins, strict=True):
                values[i] = values[i]._replace(origin=origin)
        if self.underflow:
            self.count_lost(eqn, operands, out, place)
        return values

    def origins(self, values: Sequence[Value]) -> list[int]:
        """The faults that the inf and NaN come from, those to blame first."""
        origins = [x.origin for x in values if x.origin is not None]
        found: list[int] = []
        while origins and len(found) <= _ORIGINS:
            lowest = int(_lowest_above(origins, found[-1] if found else -1))
            if lowest == NO_FAULT:
                break
            found.append(lowest)
        return sorted(found, key=lambda number: (number in self.meant, number))

    def follow(
        self, eqn: JaxprEqn, operands: list[Value], out: Sequence[Any], bad: list[int], place: Place
    ) -> list[jax.Array]:
        """The origins of the results that are not finite; what is made here is a new fault."""
        numbers = self.origins(operands)
        where = [_bad(out[i]) for i in bad]
        if not numbers:
            return self.made(eqn, operands, out, place, where, [NO_FAULT] * len(bad))
        # If there are too many to tell apart, the last one stands for the rest.
        usual = numbers[-1 if len(numbers) > _ORIGINS else 0]
        origins = [_mark(NO_FAULT, x, usual) for x in where]
        if eqn.effects:  # what has effects runs once
            return origins
        if eqn.primitive.name in _MOVES:
            moved = self.memo(_on_origins, eqn)(*map(_origin, operands))
            return [moved[i] for i in bad]

        def without(drop, of):
            """Where `of` holds of the results, whatever is in the place of some inf and NaN."""
            found = [True] * len(bad)
            for neutral in _NEUTRAL:
                arrays = [
                    x.array if x.origin is None else _put(x.array, drop(x), neutral)
                    for x in operands
                ]
                results = self.memo(function, eqn)(*arrays)
                found = [x & of(results[i]) for x, i in zip(found, bad, strict=True)]
            return found

        for number in numbers[::-1] if len(numbers) > 1 else ():
            its = without(lambda x: (x.origin != number) & _bad(x.array), _bad)
            origins = [_mark(x, y & z, number) for x, y, z in zip(origins, its, where, strict=True)]
        own = without(lambda x: _bad(x.array), _bad)
        meant = jnp.array([x for x in numbers if x in self.meant], jnp.int32)
        if meant.size:
            # Of inf alone NaN: what was meant ends here.
            nan = without(lambda x: _nan(x.array), _nan)
            own = [x | (y & jnp.isin(z, meant)) for x, y, z in zip(own, nan, origins, strict=True)]
        own = [x & y for x, y in zip(own, where, strict=True)]
        return self.made(eqn, operands, out, place, own, origins) if _any(own) else origins

    def made(
        self,
        eqn: JaxprEqn,
        operands: list[Value],
        out: Sequence[Any],
        place: Place,
        own: list[Any],
        origins: Sequence[Any],
    ) -> list[jax.Array]:
        """Records a fault, and where it is among the origins."""
        inner = [body(jaxpr).eqns for *_, jaxpr in subjaxprs(eqn.params)]
        fault = Fault(
            **place.named(eqn),
            inputs=tuple(map(_range, operands)),
            outputs=tuple(_range(Value(x)) for x in out),
            turns=place.turns,
            note="looked at as a whole" if any(len(eqns) > 1 for eqns in inner) else "",
        )
        number = self.fault(fault)
        return [_mark(x, y, number) for x, y in zip(origins, own, strict=True)]

    def count_lost(
        self, eqn: JaxprEqn, operands: list[Value], out: Sequence[Any], place: Place
    ) -> None:
        """Compares with the same operation on the same values in float32."""
        reduced = eqn.primitive.name == "reduce_precision"
        places = [i for i, x in enumerate(out) if reduced or _is_narrow(x)]
        if not places or any(subjaxprs(eqn.params)) or eqn.effects:
            return
        arrays = [at_least_f32(x.array) if _is_narrow(x.array) else x.array for x in operands]
        try:
            wide = arrays if reduced else self.memo(_in_float32, eqn)(*arrays)
        except Exception:  # an operation that exists in its own dtype only
            return
        if any(wide[i].shape != out[i].shape for i in places):  # bits, read as a wider dtype
            return
        counts = jax.device_get([_count_lost(wide[i], out[i]) for i in places])
        lost, nonzero = (sum(map(int, x)) for x in zip(*counts, strict=True))
        key = id(eqn), *map(id, place.callers)
        if key in self.lost:
            lost, nonzero = lost + self.lost[key].lost, nonzero + self.lost[key].nonzero
        if nonzero:
            at = dict(**place.named(eqn), dtype=str(out[places[0]].dtype))
            self.lost[key] = Underflow(**at, lost=lost, nonzero=nonzero)


def _origin(x: Value) -> Any:
    if not is_inexact_array(x.array):
        return x.array
    return jnp.full(x.array.shape, NO_FAULT, jnp.int32) if x.origin is None else x.origin


def _on_origins(eqn: JaxprEqn) -> Callable[..., Any]:
    """A move of numbers, as one of their origins."""
    return _retyped(eqn, lambda x: jnp.int32 if is_inexact(x) else None)


def _in_float32(eqn: JaxprEqn) -> Callable[..., Any]:
    """An operation, as one of float32 in the place of narrower types."""
    named = lambda x: isinstance(x, np.dtype) and _is_narrow(jax.ShapeDtypeStruct((), x))
    params = {key: jnp.dtype(jnp.float32) if named(x) else x for key, x in eqn.params.items()}
    wide = lambda x: jnp.float32 if _is_narrow(x.aval) else None
    return _retyped(eqn.replace(params=params), wide)


def _retyped(eqn: JaxprEqn, new: Callable[[Any], Any]) -> Callable[..., Any]:
    invars: list[Any] = [var(x, new(x)) for x in eqn.invars]
    outvars = [var(x, new(x)) for x in eqn.outvars]
    return function(eqn.replace(invars=invars, outvars=outvars))
