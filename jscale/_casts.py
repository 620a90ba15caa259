"""Puts the products of a traced program into float16, and leaves the rest as it was written."""

import collections
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import linear_util
from jax.extend.core import JaxprEqn, Var, jaxpr_as_fun
from jax.extend.core.primitives import (
    broadcast_in_dim_p,
    cond_p,
    convert_element_type_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    dot_general_p,
    jit_p,
    remat_p,
    scan_p,
    while_p,
)

from ._calls import FlatCall, Path, flat_call
from ._jaxpr import (
    body,
    convert,
    dtype,
    function,
    in_place_of,
    inputs_of,
    is_f32,
    is_product,
    is_var,
    nbytes,
    passed,
    replace,
    scope,
    shape,
    subjaxprs,
    title,
    var,
)
from ._recompute import keep_products
from ._tree import matches

# The scope of everything that autocast has rewritten. An autocast around it leaves it alone.
MARK = "jscale.autocast"

# What only moves numbers, and one of them to one place, is as exact in float16 as in float32.
_MOVES = frozenset(
    "copy copy_p expand_dims name pcast pvary reshape rev sharding_constraint slice squeeze"
    " transpose".split()
)

# A part of an array is what the array is, as far as its name and its author's wishes go.
_PARTS = frozenset(["dynamic_slice", "split"])

# What is rewritten inside, and whether it recomputes there: a jitted function only if it does not
# fit into a checkpoint around it; a user's checkpoint and a loop without reverse mode not at all.
_CALLS: dict[str, bool | str] = {
    jit_p.name: "nested",
    scan_p.name: True,
    cond_p.name: True,
    "shard_map": True,
    while_p.name: False,
    remat_p.name: False,
}
_CUSTOM = (custom_jvp_call_p.name, custom_vjp_call_p.name)

# What jax.image.resize runs in. Its products interpolate, at HIGHEST precision; that may be the
# session's, too.
_RESIZE = "_resize"


class Options(NamedTuple):
    """What `autocast` was asked for; patterns are split into their components."""

    compute_dtype: Any
    keep: tuple[Path, ...] = ()
    also: tuple[Path, ...] = ()
    f32_results: tuple[Path, ...] = ()
    recompute: bool = True


class Note(NamedTuple):
    """One operation: as which dtype it runs, why, how often."""

    eqn: JaxprEqn
    dtype: Any
    reason: str
    times: int
    callers: tuple[JaxprEqn, ...]  # what it is inside of, innermost first


class Input(NamedTuple):
    """What is known of an input of a jaxpr."""

    path: Path | None = None  # if it is an argument of the function
    narrow: bool = False  # it comes in the compute dtype
    upcast: bool = False  # it was cast to float32 by the author


class Result(NamedTuple):
    """A rewritten jaxpr; the very jaxpr that was given if nothing in it changes."""

    jaxpr: Any
    narrow: tuple[bool, ...]  # which outputs come in the compute dtype
    upcast: tuple[bool, ...]  # which were cast to float32 by the author
    cast: bool  # was there a product to cast
    notes: list[Note]


class Program:
    """The jaxprs of one trace, each rewritten once for each way in which it is called."""

    def __init__(self, options: Options):
        self.options = options
        self.patterns = {*options.keep, *options.also, *options.f32_results}
        self.matched: set[Path] = set()
        self._memo: dict[Any, tuple[Any, Result]] = {}

    @functools.cached_property
    def precision(self) -> Any:
        """The precision of a product whose author asked for none."""
        one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        return jax.make_jaxpr(jax.lax.dot)(one, one).eqns[0].params["precision"]

    def unused(self) -> tuple[str, ...]:
        return tuple(sorted("/".join(pattern) for pattern in self.patterns - self.matched))

    def rewrite(self, jaxpr: Any, **where: Any) -> Result:
        if not self.patterns:
            # Without patterns it does not matter where this is called, if it is not inside another
            # autocast, nor which arguments it is called with.
            where["place"] = tuple(x for x in where["place"] if x in (MARK, _RESIZE))
            where["inputs"] = tuple(x._replace(path=x.path and ()) for x in where["inputs"])
        key = id(jaxpr), *where.values()
        if key not in self._memo:
            # The jaxpr stays alive with its result, or its id might come to mean another.
            self._memo[key] = jaxpr, _Body(self, **where).rewrite(jaxpr)
        return self._memo[key][1]


class _Body:
    """The body of one jaxpr while it is rewritten.

    A product is computed in the compute dtype. Its result is widened where an operation needs it as
    it was written; from product to product it stays narrow.
    """

    def __init__(
        self,
        program: Program,
        *,
        place: Path,  # scopes and jitted functions around this body
        inputs: Sequence[Input],
        hand_out_narrow: bool,  # whether outputs may come in the compute dtype
        in_loop: bool,
        recompute: bool | str,  # "nested": unless it fits into a checkpoint around it
    ):
        self.program, self.options, self.place = program, program.options, place
        self.inputs, self.hand_out_narrow = inputs, hand_out_narrow
        self.in_loop, self.recompute = in_loop, recompute
        self.dtype = program.options.compute_dtype
        self.eqns: list[JaxprEqn] = []
        self.notes: list[Note] = []
        self.cast = False
        self.path: dict[Var, Path] = {}
        self.narrow: dict[Var, Var] = {}  # what a variable is the exact widening of
        self.waiting: dict[Var, JaxprEqn | None] = {}  # widenings nothing has asked for yet
        self.uses: collections.Counter[Var] = collections.Counter()
        self.same: dict[Var, Var] = {}  # variables that turned out to be others
        self.upcast: set[Var] = set()  # float32 by the author's wish

    def rewrite(self, jaxpr: Any) -> Result:
        inner = body(jaxpr)
        invars = list(inner.invars)
        self.path |= {x: () for x in inner.constvars}  # an argument without a name
        for i, (x, known) in enumerate(zip(inner.invars, self.inputs, strict=True)):
            if known.path is not None:
                self.path[x] = known.path
            if known.upcast:
                self.upcast.add(x)
            if known.narrow:
                invars[i] = self.narrow[x] = var(x, self.dtype)
                self.waiting[x] = None  # the equation that wants it makes it
        for eqn in inner.eqns:
            self.uses.update(filter(is_var, eqn.invars))
        self.uses.update(filter(is_var, inner.outvars))
        for eqn in inner.eqns:
            self.equation(eqn)
        hand_out = [self.hand_out_narrow and self.stays_narrow(self.read(x)) for x in inner.outvars]
        outvars = [
            self.narrow[self.read(x)] if narrow else self.wide(x, inner.eqns[-1:])
            for x, narrow in zip(inner.outvars, hand_out, strict=True)
        ]
        upcast = tuple(is_var(x) and self.read(x) in self.upcast for x in inner.outvars)
        old = [*inner.invars, *inner.eqns, *inner.outvars]
        if [*map(id, [*invars, *self.eqns, *outvars])] == [*map(id, old)]:
            return Result(jaxpr, (False,) * len(outvars), upcast, False, self.notes)
        changes = dict(invars=invars, outvars=outvars, eqns=self.eqns)
        new = replace(jaxpr, **changes)
        if self.cast and self.recompute:
            nested = self.recompute == "nested"
            new = keep_products(new, in_loop=self.in_loop, nested=nested)
        return Result(new, tuple(hand_out), upcast, self.cast, self.notes)

    # Reading variables.

    def read(self, x: Any) -> Any:
        return self.same.get(x, x) if is_var(x) else x

    def wide(self, x: Any, at: Sequence[JaxprEqn]) -> Any:
        """`x` as it was written."""
        x = self.read(x)
        if is_var(x) and x in self.waiting:
            self.eqns.append(self.waiting.pop(x) or convert(self.narrow[x], x, at[0]))
        return x

    def low(self, x: Any, eqn: JaxprEqn) -> Any:
        """`x`, in float32 as written, in the compute dtype."""
        if self.stays_narrow(self.read(x)):
            return self.narrow[self.read(x)]
        x = self.wide(x, [eqn])
        # A cast for every use, which XLA merges: so the cotangents of all uses meet in float32.
        rounded = var(x, self.dtype)
        self.eqns.append(convert(x, rounded, eqn))
        return rounded

    def stays_narrow(self, x: Any) -> bool:
        """Whether `x` may be used as it came out of a product, without being widened.

        Only by its single use: the cotangents of several must meet in float32. That of a confident
        softmax is what two of them leave of each other.
        """
        return is_var(x) and x in self.narrow and self.uses[x] == 1

    def matched(self, eqn: JaxprEqn) -> set[Path]:
        """The patterns that name the operation, what it is in, or an argument it works on."""
        patterns = self.program.patterns
        if not patterns:
            return set()
        operands = [self.read(x) for x in eqn.invars if is_var(x)]
        names = [(*self.place, *scope(eqn), title(eqn))]
        names += [self.path[x] for x in operands if x in self.path]
        found = {p for p in patterns if any(matches(name, p) for name in names)}
        self.program.matched |= found
        return found

    # Emitting equations.

    def note(self, eqn: JaxprEqn, dtype: Any, reason: str) -> None:
        self.notes.append(Note(eqn, dtype, reason, 1, ()))

    def take_notes(self, result: Result, caller: JaxprEqn, times: int = 1) -> None:
        for note in result.notes:
            callers = (*note.callers, caller)
            self.notes.append(note._replace(times=note.times * times, callers=callers))

    def emit(self, eqn: JaxprEqn, invars: list[Any], **changes: Any) -> None:
        if changes or any(x is not y for x, y in zip(invars, eqn.invars, strict=True)):
            eqn = eqn.replace(invars=invars, **changes)
        self.eqns.append(eqn)

    def as_written(self, eqn: JaxprEqn, reason: str = "as written") -> None:
        self.note(eqn, dtype(eqn.outvars[0]) if eqn.outvars else None, reason)
        self.emit(eqn, [self.wide(x, [eqn]) for x in eqn.invars])

    def narrow_operands(self, eqn: JaxprEqn) -> list[Any]:
        return [self.low(x, eqn) if is_f32(x) else self.wide(x, [eqn]) for x in eqn.invars]

    def in_compute_dtype(self, eqn: JaxprEqn, reason: str, **params: Any) -> None:
        """The operation on operands in the compute dtype; its results wait to be widened."""
        self.note(eqn, self.dtype, reason)
        invars = self.narrow_operands(eqn)
        outvars = [var(x, self.dtype) if is_f32(x) else x for x in eqn.outvars]
        self.emit(eqn, invars, outvars=outvars, params={**eqn.params, **params})
        for x, new in zip(eqn.outvars, outvars, strict=True):
            if new is not x:
                self.narrow[x], self.waiting[x] = new, convert(new, x, eqn)

    def equation(self, eqn: JaxprEqn) -> None:
        name = eqn.primitive.name
        matched = self.matched(eqn)
        if is_product(eqn):
            self.product(eqn, matched)
        elif name == convert_element_type_p.name:
            self.conversion(eqn)
        elif name in _CALLS:
            self.call(eqn)
        elif name in _CUSTOM:
            self.custom(eqn)
        elif self.moves(eqn) and self.stays_narrow(self.read(eqn.invars[0])):
            self.in_compute_dtype(eqn, "moves float16")
            self.inherit(eqn)
        elif any(_has_product(jaxpr) for _, _, jaxpr in subjaxprs(eqn.params)):
            self.as_written(eqn, "opaque")
        elif self.may_follow(eqn, matched):
            self.in_compute_dtype(eqn, _asked("also", self.options.also, matched))
        else:
            self.as_written(eqn)
            if self.moves(eqn) or name in _PARTS:
                self.inherit(eqn)

    def may_follow(self, eqn: JaxprEqn, matched: set[Path]) -> bool:
        """Whether an operation that is no product is to be in the compute dtype, and can be."""
        if not matched.intersection(self.options.also) or matched.intersection(self.options.keep):
            return False
        named = any(isinstance(x, np.dtype) for x in eqn.params.values())
        foreign = bool(eqn.effects) or eqn.primitive.name.endswith(("callback", "ffi_call"))
        foreign |= any(subjaxprs(eqn.params))  # how scatter-add adds is written for float32
        return any(map(is_f32, filter(is_var, eqn.invars))) and not named and not foreign

    def moves(self, eqn: JaxprEqn) -> bool:
        name = eqn.primitive.name
        if name == broadcast_in_dim_p.name:  # x[None]
            return is_var(eqn.invars[0]) and nbytes(eqn.invars[0]) == nbytes(eqn.outvars[0])
        return name in _MOVES and is_var(eqn.invars[0])

    def inherit(self, eqn: JaxprEqn) -> None:
        """What is known of the operand is known of the result."""
        x = self.read(eqn.invars[0])
        for y in eqn.outvars:
            if is_var(x) and x in self.path:
                self.path[y] = self.path[x]
            if is_var(x) and x in self.upcast:
                self.upcast.add(y)

    def conversion(self, eqn: JaxprEqn) -> None:
        x, (y,) = self.read(eqn.invars[0]), eqn.outvars
        if not is_var(x) or dtype(x) == dtype(y) or eqn.params.get("sharding") is not None:
            self.as_written(eqn)
        elif dtype(x) == self.dtype and is_f32(y):
            self.note(eqn, dtype(y), "as written")
            self.narrow[y] = x
            self.waiting[y] = eqn if x is eqn.invars[0] else eqn.replace(invars=[x])
        elif self.stays_narrow(x) and dtype(y) == self.dtype:
            self.note(eqn, dtype(y), "as written")
            self.same[y] = self.narrow[x]
        else:
            self.as_written(eqn)
        self.inherit(eqn)
        # A half precision argument may only be stored so. What was computed in half precision and
        # then cast is wanted in float32.
        stored = is_var(x) and x in self.path
        if dtype(x) in (jnp.float16, jnp.bfloat16) and is_f32(y) and not stored:
            if MARK not in (*self.place, *scope(eqn)):
                self.upcast.add(y)

    def product(self, eqn: JaxprEqn, matched: set[Path]) -> None:
        reason = self.left_alone(eqn, matched)
        if reason is not None:
            self.as_written(eqn, reason)
            return
        self.cast = True
        # A precision (the session's) is one of float32 products.
        narrow = dict(preferred_element_type=self.dtype, precision=None)
        if not matched.intersection(self.options.f32_results):
            self.in_compute_dtype(eqn, "product", **narrow)
            return
        self.note(eqn, self.dtype, _asked("f32_results", self.options.f32_results, matched))
        invars = self.narrow_operands(eqn)
        out = var(eqn.outvars[0], self.dtype)
        product = eqn.replace(invars=invars, outvars=[out], params={**eqn.params, **narrow})
        self.eqns.append(_equation(_with_f32_result(product), invars, eqn))

    def left_alone(self, eqn: JaxprEqn, matched: set[Path]) -> str | None:
        """Why a product runs as it was written, if it does."""
        # The operands and the result; a ragged product has sizes too.
        dtypes = {str(dtype(x)) for x in [*eqn.invars[:2], *eqn.outvars]}
        if self.dtype == jnp.float32:
            return "compute_dtype=float32"
        if MARK in (*self.place, *scope(eqn)):
            return "an autocast inside decides"
        if dtypes != {"float32"}:
            return f"{', '.join(sorted(dtypes))} in the code"
        if matched.intersection(self.options.keep):
            return _asked("keep", self.options.keep, matched)
        if _RESIZE in self.place:
            return "jax.image.resize"
        precision = eqn.params["precision"]
        if precision not in (None, self.program.precision, (jax.lax.Precision.DEFAULT,) * 2):
            return "a precision in the code"
        if eqn.primitive.name == dot_general_p.name:
            # A norm, a cosine, a weighted mean: all of both operands is summed up (or batched).
            contracted, batch = eqn.params["dimension_numbers"]
            ranks = [len(c) + len(b) for c, b in zip(contracted, batch, strict=True)]
            if not contracted[0]:
                return "no sum"
            if ranks == [len(shape(x)) for x in eqn.invars]:
                return "a sum of products"
        if self.upcast.intersection(self.read(x) for x in eqn.invars if is_var(x)):
            return "cast to float32 in the code"
        return None

    # Equations with jaxprs inside.

    def call(self, eqn: JaxprEqn) -> None:
        """A jitted function, loop, branch, checkpoint or shard_map, with its body rewritten."""
        name = eqn.primitive.name
        jitted = name == jit_p.name
        times = eqn.params["length"] if name == scan_p.name else 1
        # A length that only has a name, in jax.export, is one of a loop.
        unrolled = name == scan_p.name and isinstance(times, int) and eqn.params["unroll"] >= times
        loop = name == cond_p.name or (name == scan_p.name and not unrolled)
        operands = [self.read(x) for x in eqn.invars]
        params, cast, narrow = dict(eqn.params), False, set()
        for key, i, jaxpr in subjaxprs(eqn.params):
            inputs = []
            for x, at in zip(body(jaxpr).invars, inputs_of(eqn, key, jaxpr), strict=True):
                known = Input() if at is None else self.known(operands[at])
                # A slice of what a scan runs over has a single use, as a constant of it has not.
                sliced = at is not None and shape(x) != shape(operands[at])
                if not known.narrow or not (jitted or name == remat_p.name or sliced):
                    known = known._replace(narrow=False)
                else:
                    narrow.add(at)
                inputs.append(known)
            result = self.program.rewrite(
                jaxpr,
                place=(*self.place, *scope(eqn), *([title(eqn)] if jitted else [])),
                inputs=tuple(inputs),
                hand_out_narrow=jitted,
                in_loop=self.in_loop or loop,
                recompute=self.recompute and _CALLS[name],
            )
            self.take_notes(result, eqn, times)
            cast |= result.cast
            if key != "cond_jaxpr":
                self.upcast.update(itertools.compress(eqn.outvars, result.upcast))
            new = result.jaxpr
            params[key] = new if i is None else (*params[key][:i], new, *params[key][i + 1 :])
        if all(params[key] is eqn.params[key] for key in params):
            self.emit(eqn, [self.wide(x, [eqn]) for x in eqn.invars])
            return
        self.cast |= cast
        invars = [
            self.narrow[x] if i in narrow else self.wide(x, [eqn]) for i, x in enumerate(operands)
        ]
        outvars = list(eqn.outvars)
        for j, (x, comes_narrow) in enumerate(zip(eqn.outvars, result.narrow, strict=True)):
            if comes_narrow:
                outvars[j] = self.narrow[x] = var(x, self.dtype)
                self.waiting[x] = convert(outvars[j], x, eqn)
        self.emit(eqn, invars, outvars=outvars, params=params)

    def known(self, x: Any) -> Input:
        if not is_var(x):
            return Input()
        return Input(self.path.get(x), self.stays_narrow(x), x in self.upcast)

    def custom(self, eqn: JaxprEqn) -> None:
        """A function with a derivative of its own: it and its rule, if it has products."""
        operands = [self.read(x) for x in eqn.invars]
        known = tuple(self.known(x)._replace(narrow=False) for x in operands)
        where: dict[str, Any] = dict(
            place=(*self.place, *scope(eqn)),
            hand_out_narrow=False,
            in_loop=self.in_loop,
            recompute=False,
        )
        params = dict(eqn.params)
        result = self.program.rewrite(params["call_jaxpr"], inputs=known, **where)
        self.take_notes(result, eqn)
        self.upcast.update(itertools.compress(eqn.outvars, result.upcast))
        for x, y in zip(passed(eqn), eqn.outvars, strict=True):  # as at the edge of a region
            if self.read(x) in self.path:
                self.path[y] = self.path[self.read(x)]
        invars = [self.wide(x, [eqn]) for x in eqn.invars]
        if result.jaxpr is params["call_jaxpr"]:
            self.emit(eqn, invars)
            return
        self.cast |= result.cast
        options, primals = self.options._replace(recompute=False), known[params["num_consts"] :]

        def rewrite(jaxpr):
            more = (Input(),) * (len(body(jaxpr).invars) - len(primals))  # tangents
            return Program(options).rewrite(jaxpr, inputs=(*primals, *more), **where).jaxpr

        def backward(rule, *args):
            call = flat_call(rule, args, {}, "autocast")
            return trace(call, options, where["place"], named=False).evaluate()

        params["call_jaxpr"] = result.jaxpr
        for rule in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk"):
            if rule in params:
                params[rule] = _around(params[rule], lambda f, *xs: _first(rewrite, f(*xs)))
        if "bwd" in params:
            params["bwd"] = _around(params["bwd"], backward)
        self.emit(eqn, invars, params=params)


def _around(rule: Any, fun: Callable[..., Any]) -> Any:
    """The rule of a derivative, as JAX holds it, called by `fun(rule, *args)`."""
    return linear_util.wrap_init(
        functools.partial(fun, rule.call_wrapped), debug_info=rule.debug_info
    )


def _first(fun: Callable[..., Any], items: tuple[Any, ...]) -> tuple[Any, ...]:
    return fun(items[0]), *items[1:]


def _has_product(jaxpr: Any) -> bool:
    eqns = body(jaxpr).eqns
    return any(is_product(e) or any(_has_product(j) for *_, j in subjaxprs(e.params)) for e in eqns)


def _asked(option: str, patterns: Sequence[Path], matched: set[Path]) -> str:
    """`keep='wo'`: the option and the pattern by which an operation was asked for."""
    return f"{option}={'/'.join(next(p for p in patterns if p in matched))!r}"


# Products with float32 results.


def _equation(fun: Any, invars: list[Any], eqn: JaxprEqn) -> JaxprEqn:
    """The single equation that `fun` is, with these operands and the results of `eqn`."""
    operands = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in invars]
    (new,) = body(jax.make_jaxpr(fun)(*operands)).eqns
    return in_place_of(eqn, new, invars=invars)


def _with_f32_result(eqn: JaxprEqn) -> Any:
    """A product in the compute dtype whose result is float32, and whose cotangent is not."""
    narrow = function(eqn)
    wide = function(
        eqn.replace(
            outvars=[var(eqn.outvars[0], jnp.float32)],
            params={**eqn.params, "preferred_element_type": jnp.dtype(jnp.float32)},
        )
    )
    product = jax.custom_jvp(wide)

    @product.defjvp
    def _(primals, tangents):
        _, (tangent,) = jax.jvp(narrow, primals, tangents)
        return product(*primals), [tangent.astype(jnp.float32)]

    return product


# Functions of pytrees.


class Call(NamedTuple):
    """A call of a function, traced and rewritten."""

    flat: FlatCall
    result: Result
    unused: tuple[str, ...]  # patterns that matched nothing

    def evaluate(self) -> Any:
        with jax.named_scope(MARK):
            return self.flat.finish(jaxpr_as_fun(self.result.jaxpr)(*self.flat.arrays))


def trace(call: FlatCall, options: Options, place: Path = (), named: bool = True) -> Call:
    """The call with its products in the compute dtype.

    Args:
      named: whether arguments can be meant by patterns.
    """
    program = Program(options)
    result = program.rewrite(
        jax.make_jaxpr(call.fun)(*call.arrays),
        place=place,
        inputs=tuple(Input(path if named else None) for path in call.paths),
        hand_out_narrow=False,
        in_loop=False,
        recompute=options.recompute,
    )
    return Call(call, result, program.unused())
