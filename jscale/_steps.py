"""A traced program, run one operation after the other."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import (
    cond_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    jit_p,
    remat_p,
    scan_p,
    while_p,
)

from ._calls import Path
from ._casts import MARK
from ._jaxpr import (
    body,
    dtype,
    function,
    is_backward,
    is_inexact,
    is_var,
    scope,
    shape,
    source,
)
from ._tree import at_least_f32

NO_FAULT = 2**31 - 1  # the origin of a finite value

# Where there is a jaxpr to go into, under this parameter.
_CALLS = {
    jit_p.name: "jaxpr",
    remat_p.name: "jaxpr",
    "closed_call": "call_jaxpr",
    custom_jvp_call_p.name: "call_jaxpr",
    custom_vjp_call_p.name: "call_jaxpr",
}
# What JAX puts among the scopes.
_TRANSFORMS = ("jvp", "transpose", "vmap", "checkpoint", "rematted_computation", MARK)


def is_inexact_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)


@jax.jit
def _all_finite(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(at_least_f32(x)).all() for x in arrays])


def finite(arrays: Sequence[Any]) -> np.ndarray:
    """For each array whether all of it is finite; waits for them, once."""
    places = [i for i, x in enumerate(arrays) if is_inexact_array(x)]
    found = np.ones(len(arrays), bool)
    if places:
        found[places] = _all_finite([arrays[i] for i in places])
    return found


def mesh_of(arrays: Sequence[jax.Array]) -> Any:
    """A context. Explicit shardings, if there are any, need their mesh for numbers in the code."""
    meshes = {getattr(x.sharding, "mesh", None) for x in arrays}
    explicit = [x for x in meshes if x and jax.sharding.AxisType.Explicit in x.axis_types]
    return jax.set_mesh(explicit[0]) if explicit else contextlib.nullcontext()


class Turn(NamedTuple):
    """One turn of a loop.

    Attributes:
      loop: `scan` or `while`.
      number: which turn, from 0. Of a scan, also in the backward pass: what it slices its operands
        with.
      length: how many turns there are; None if only running the loop tells.
      source: the line of the loop.
    """

    loop: str
    number: int
    length: int | None
    source: str

    def __str__(self) -> str:
        of = "" if self.length is None else f" of {self.length}"
        at = f" at {self.source}" if self.source else ""
        return f"turn {self.number}{of} (from 0) of the {self.loop}{at}"


class Value(NamedTuple):
    """An array of a run.

    Attributes:
      origin: int32 of the same shape, for each inf and NaN the number of what it comes from; None
        if there are none.
      path: of the argument that it is.
    """

    array: Any
    origin: jax.Array | None = None
    path: Path | None = None

    def at(self, index: int) -> "Value":
        take = lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
        origin = None if self.origin is None else take(self.origin)
        return Value(take(self.array), origin, self.path and (*self.path, str(index)))


def _stack(values: Sequence[Value]) -> Value:
    array = jnp.stack([x.array for x in values])
    if all(x.origin is None for x in values):
        return Value(array)
    none = jnp.full(array.shape[1:], NO_FAULT, jnp.int32)
    return Value(array, jnp.stack([none if x.origin is None else x.origin for x in values]))


class Place(NamedTuple):
    """Where an equation is: what it is inside of, and in which turns of loops."""

    callers: tuple[JaxprEqn, ...] = ()  # innermost first
    turns: tuple[Turn, ...] = ()

    def inside(self, eqn: JaxprEqn, *turn: Turn) -> "Place":
        return Place((eqn, *self.callers), (*self.turns, *turn))

    def source(self, eqn: JaxprEqn) -> str:
        # What is inside a function of JAX has no line of the user's, but its call has.
        return next(filter(None, map(source, (eqn, *self.callers))), "")

    def named(self, eqn: JaxprEqn) -> dict[str, Any]:
        chain = (eqn, *self.callers)
        names = [x for e in reversed(chain) for x in scope(e) if x not in _TRANSFORMS]
        for n in range(len(names) // 2, 0, -1):  # a checkpoint repeats those around it
            if names[:n] == names[n : 2 * n]:
                names = names[n:]
        return dict(
            operation=eqn.primitive.name,
            backward=any(map(is_backward, chain)),
            source=self.source(eqn),
            scope="/".join(names),
        )


class Steps:
    """One run of a program. What is to be found out about it is in the methods that are missing."""

    def __init__(self, step_loops: bool):
        # Or only those whose results are not all finite.
        self.step_loops = step_loops
        self._memo: dict[Any, Any] = {}

    def constant(self, x: Any) -> Value:
        """An array that the function closes over."""
        raise NotImplementedError

    def literal(self, x: np.ndarray, key: Any, eqn: JaxprEqn | None, place: Place) -> Value:
        """A number in the code; `eqn` is None if it is a result. `key` tells it from others."""
        raise NotImplementedError

    def operation(
        self, eqn: JaxprEqn, operands: list[Value], out: Sequence[Any], place: Place
    ) -> list[Value]:
        """The values of an operation that has run."""
        raise NotImplementedError

    def memo(self, make: Callable[..., Any], of: Any, *args: Any) -> Any:
        """`make(of, *args)`, once."""
        key = make, id(of)
        if key not in self._memo:
            # The object stays alive with what it led to, or its id might come to mean another.
            self._memo[key] = of, make(of, *args)
        return self._memo[key][1]

    def run(
        self, jaxpr: Any, args: list[Value], place: Place, results: int | None = None
    ) -> list[Value]:
        """The (first) results. `args` is emptied: nothing but this may keep the arrays alive."""
        inner = body(jaxpr)
        plan, unused = self.memo(_plan, inner, results)
        env = dict(zip(inner.invars, args, strict=True))
        args.clear()
        constants = getattr(jaxpr, "consts", ())
        env.update(zip(inner.constvars, map(self.constant, constants), strict=True))
        for x in unused:
            env.pop(x, None)
        for eqn, free, kept in plan:
            operands = [self.read(env, x, place, eqn, i) for i, x in enumerate(eqn.invars)]
            for x in free:
                env.pop(x, None)
            out = self.equation(eqn, operands, place)
            env.update((eqn.outvars[i], out[i]) for i in kept)
            del operands, out
        outvars = inner.outvars[:results]
        return [self.read(env, x, place, None, i) for i, x in enumerate(outvars)]

    def read(self, env: Any, x: Any, place: Place, eqn: JaxprEqn | None, i: int) -> Value:
        if is_var(x):
            return env[x]
        array, key = np.asarray(x.val, dtype(x)), (id(x if eqn is None else eqn), i)
        return self.literal(array, key, eqn, place) if is_inexact(x) else Value(array)

    def equation(self, eqn: JaxprEqn, operands: list[Value], place: Place) -> list[Value]:
        name = eqn.primitive.name
        if name in _CALLS:
            return self.run(eqn.params[_CALLS[name]], operands, place.inside(eqn))
        if name == cond_p.name:
            branch = eqn.params["branches"][int(operands.pop(0).array)]
            return self.run(branch, operands, place.inside(eqn))
        in_turns = {scan_p.name: self.scan, while_p.name: self.loop}.get(name)
        if in_turns is None or eqn.params.get("length") == 0:
            out = self.memo(function, eqn)(*(x.array for x in operands))
            return self.operation(eqn, operands, out, place)
        if not self.step_loops:
            out = self.memo(function, eqn)(*(x.array for x in operands))
            if finite(out).all():
                return [*map(Value, out)]
            del out
        return in_turns(eqn, operands, place)

    def scan(self, eqn: JaxprEqn, operands: list[Value], place: Place) -> list[Value]:
        jaxpr, length, reverse = (eqn.params[key] for key in ("jaxpr", "length", "reverse"))
        inner = body(jaxpr)
        same = lambda xs, ys: sum(shape(x) == shape(y) for x, y in zip(xs, ys, strict=True))
        carried, whole = same(inner.outvars, eqn.outvars), same(inner.invars, eqn.invars)
        constants, xs = operands[: whole - carried], operands[whole:]
        carry = operands[whole - carried : whole]
        operands.clear()
        stacks: list[Any] = []
        for i in range(length)[:: -1 if reverse else 1]:
            turn = Turn("scan", i, length, place.source(eqn))
            args = [*constants, *carry, *(x.at(i) for x in xs)]
            carry.clear()
            out = self.run(jaxpr, args, place.inside(eqn, turn))
            carry = out[:carried]
            stacks.append(out[carried:])
        ys = zip(*(stacks[::-1] if reverse else stacks), strict=True)
        del stacks
        return [*carry, *map(_stack, ys)]

    def loop(self, eqn: JaxprEqn, operands: list[Value], place: Place) -> list[Value]:
        test, step = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        first, last = (len(body(x).invars) - len(eqn.outvars) for x in (test, step))
        for_test, for_step = operands[:first], operands[first : first + last]
        carry = operands[first + last :]
        operands.clear()
        for i in itertools.count():
            inside = place.inside(eqn, Turn("while", i, None, place.source(eqn)))
            (go_on,) = self.run(test, [*for_test, *carry], inside)
            if not bool(go_on.array):
                return carry
            args = [*for_step, *carry]
            carry.clear()
            carry = self.run(step, args, inside)
        raise AssertionError  # for mypy: there is no last turn


def _plan(jaxpr: Any, results: int | None) -> Any:
    """What to run, what to free before it runs and what of it to keep; which inputs are not used.

    What no result needs is left out, if nothing else is done by it.
    """
    needed = set(filter(is_var, jaxpr.outvars[:results]))
    plan = []
    for eqn in reversed(jaxpr.eqns):
        kept = [i for i, x in enumerate(eqn.outvars) if x in needed]
        if kept or eqn.effects:
            free = {x for x in eqn.invars if is_var(x)} - needed
            needed |= free
            plan.append((eqn, free, kept))
    return plan[::-1], {*jaxpr.invars, *jaxpr.constvars} - needed
