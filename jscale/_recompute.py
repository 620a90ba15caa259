"""What a cast program keeps for its backward pass: products, and little else.

Between two products everything is computed again from the products before it, by `jax.checkpoint`.
Where that should start afresh a program is cut: at its waists, where few bytes cross. So a residual
stream is kept once a block.
"""

import collections
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Var
from jax.extend.core.primitives import custom_jvp_call_p, custom_vjp_call_p, jit_p

from ._jaxpr import (
    below_common_scope,
    body,
    dtype,
    in_place_of,
    is_inexact,
    is_key,
    is_product,
    is_var,
    nbytes,
    passed,
    replace,
    shape,
    subjaxprs,
    var,
)

# A cut keeps at most 1/32 of the bytes that are recomputed behind it, or less if that takes less
# memory: what all cuts keep adds up, while one part at a time is recomputed, of which XLA holds
# about 1/8 at once. So a net of few layers is cut twice a layer, a deep one once
# (experiments/autocast_memory.py, vit_memory.py).
CUTS = 32, 64, 128
HELD = 8

# What XLA fuses into its neighbours costs little to compute again. Whatever is not named here is
# kept: sorts, gathers, collectives, convolutions, random bits, kernels that JAX cannot look into.
_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp
    complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2
    expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul ne
    neg nextafter not one_minus_square or polynomial population_count pow real reduce_precision rem
    round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square stop_gradient sub tan tanh xor
"""
_MOVES = """
    broadcast_in_dim concatenate dynamic_slice expand_dims iota pad pcast pvary reshape rev
    sharding_constraint slice split squeeze stack transpose
"""
_REDUCTIONS = frozenset(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum".split()
)
RECOMPUTED = _REDUCTIONS.union(f"{_ELEMENTWISE} {_MOVES}".split())

# The exceptions are the statistics of a batch: a reduction of so many numbers to one, which takes
# kernels of its own to repeat and next to no memory to keep.
STATISTIC = 1024

# Derived again wherever it is needed, rather than carried over a cut.
_TRIVIAL = frozenset(_MOVES.split()) | {"convert_element_type"}

# A recomputed loop would hold the recomputed values of all its turns at once: what is inside a loop
# is recomputed inside it. A user's own checkpoint stands.
_ALONE = frozenset(["checkpoint", "cond", "remat", "remat2", "scan", "shard_map", "while"])

# The name of random draws in a program, by which they are kept, or what they compare to: of a
# dropout mask booleans. What it is drawn from would be four times as large, or drawn twice.
_DRAW = "jscale.draw"
_COMPARISONS = frozenset("eq ge gt le lt ne".split())


def _is_recomputed(name: str, params: dict[str, Any]) -> bool:
    if name == "name":
        return params["name"] != _DRAW
    if name in (custom_jvp_call_p.name, jit_p.name):  # such as relu
        inside = [eqn for _, _, jaxpr in subjaxprs(params) for eqn in body(jaxpr).eqns]
        return all(_is_recomputed(eqn.primitive.name, eqn.params) for eqn in inside)
    return name in RECOMPUTED


def _policy(primitive: Any, *avals: Any, **params: Any) -> bool:
    if primitive.name in _REDUCTIONS:
        sizes = [avals[0].shape[axis] for axis in params["axes"]]
        return math.prod(n for n in sizes if isinstance(n, int)) >= STATISTIC  # b, in jax.export
    return not _is_recomputed(primitive.name, params)


@functools.cache
def _example(prevent_cse: bool) -> JaxprEqn:
    """An equation that is a checkpoint, for its primitive and parameters."""
    example = jax.checkpoint(lambda x: x, policy=_policy, prevent_cse=prevent_cse)
    return jax.make_jaxpr(example)(jax.ShapeDtypeStruct((), "float32")).eqns[0]


class _Facts(NamedTuple):
    recomputed: int  # bytes
    product: bool
    random: bool
    alone: bool


class _Look:
    """Facts about equations and all that is inside them, worked out once for each inner jaxpr."""

    def __init__(self):
        self._seen = {}

    def __call__(self, eqn: JaxprEqn) -> _Facts:
        name = eqn.primitive.name
        facts = _Facts(
            recomputed=sum(map(nbytes, eqn.outvars)) if name in RECOMPUTED else 0,
            product=is_product(eqn),
            random=name.startswith(("random_", "rng_", "threefry")),
            alone=name in _ALONE or bool(eqn.effects) or _is_kept_complex(eqn),
        )
        for _, _, jaxpr in subjaxprs(eqn.params):
            if id(jaxpr) not in self._seen:
                inside = [*map(self, body(jaxpr).eqns), _Facts(0, False, False, False)]
                # The jaxpr stays alive with its facts, or its id might come to mean another.
                self._seen[id(jaxpr)] = jaxpr, inside
            recomputed, *flags = zip(facts, *self._seen[id(jaxpr)][1], strict=True)
            facts = _Facts(sum(recomputed), *map(any, flags))
        return facts


def _is_kept_complex(eqn: JaxprEqn) -> bool:
    """Whether a checkpoint would keep complex numbers, which JAX 0.12 cannot differentiate."""
    kept = not any(subjaxprs(eqn.params)) and not _is_recomputed(eqn.primitive.name, eqn.params)
    return kept and any(jnp.issubdtype(dtype(x), jnp.complexfloating) for x in eqn.outvars)


def _inputs(eqn: JaxprEqn) -> Iterator[Var]:
    return (x for x in eqn.invars if is_var(x))


def _is_scalar(eqn: JaxprEqn) -> bool:
    """Whether this computes numbers, such as the ratio of two scales, that cost nothing."""
    scalar = all(shape(x) == () for x in eqn.outvars)
    return scalar and _is_recomputed(eqn.primitive.name, eqn.params)


def _is_edge(eqn: JaxprEqn) -> bool:
    """Whether only the derivative does anything, as at the edge of a `region`."""
    custom = eqn.primitive in (custom_jvp_call_p, custom_vjp_call_p)
    return custom and None not in passed(eqn)


def _edges_first(eqns: Sequence[JaxprEqn]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Edges that inputs of the program go through, with the scalars that they take; and the rest.

    Weights that a region is given are inputs still, and no less at hand at a cut. In front of all
    parts, they do not keep these from being alike.
    """
    maker = {x: eqn for eqn in eqns for x in eqn.outvars}
    first: dict[int, JaxprEqn] = {}

    def comes_first(eqn: JaxprEqn) -> bool:
        if not _is_edge(eqn) and not _is_scalar(eqn):
            return False
        if not all(comes_first(maker[x]) for x in _inputs(eqn) if x in maker):
            return False
        first[id(eqn)] = eqn
        return True

    for eqn in eqns:
        if _is_edge(eqn):
            comes_first(eqn)
    return [*first.values()], [eqn for eqn in eqns if id(eqn) not in first]


def _roots(eqns: Sequence[JaxprEqn]) -> dict[Var, frozenset[Var]]:
    """What a variable is trivially derived from, if that is less than itself; else itself.

    What comes from outside `eqns` is at hand and does not count.
    """
    roots: dict[Var, frozenset[Var]] = {}
    for eqn in eqns:
        for x in eqn.outvars:
            roots[x] = frozenset([x])
            if eqn.primitive.name in _TRIVIAL or _is_edge(eqn) or _is_scalar(eqn):
                origin = frozenset().union(*(roots.get(y, ()) for y in _inputs(eqn)))
                if sum(map(nbytes, origin)) < nbytes(x):
                    roots[x] = origin
    return roots


def _cut(
    eqns: Sequence[JaxprEqn],
    facts: Sequence[_Facts],
    roots: dict[Var, frozenset[Var]],
    needed: set[Var],
    ratio: int,
) -> tuple[float, list[int]]:
    """Where the parts of a run begin, each at the narrowest place before a product; and its cost.

    The cost is in bytes: what the cuts keep, and what is held while the largest part is recomputed.
    """
    last = {x: i for i, eqn in enumerate(eqns) for x in _inputs(eqn)}
    last.update(dict.fromkeys(needed, len(eqns)))
    ends: dict[int, list[Var]] = {}
    users: collections.Counter[Var] = collections.Counter()  # of a root, among what crosses here
    crossing = recomputed = kept = largest = 0
    starts: list[int] = [0]
    waist, product = None, False  # since the last cut
    for i, eqn in enumerate(eqns):
        if facts[i].product and waist is not None:
            bytes_kept, start, before = waist
            starts.append(start)
            kept, largest = kept + bytes_kept, max(largest, before)
            recomputed, waist = recomputed - before, None
        product = product or bool(facts[i].product)
        for x in eqn.outvars:
            if last.get(x, i) > i:
                ends.setdefault(last[x], []).append(x)
                crossing += sum(nbytes(root) for root in roots[x] if not users[root])
                users.update(roots[x])
        for x in ends.pop(i, ()):
            users.subtract(roots[x])
            crossing -= sum(nbytes(root) for root in roots[x] if not users[root])
        recomputed += facts[i].recomputed
        if product and recomputed >= ratio * crossing and (waist is None or crossing <= waist[0]):
            waist = crossing, i + 1, recomputed
    return kept + max(largest, recomputed) / HELD, starts


@functools.cache
def _name_example() -> JaxprEqn:
    example = functools.partial(checkpoint_name, name=_DRAW)
    return jax.make_jaxpr(example)(jax.ShapeDtypeStruct((), "float32")).eqns[0]


def _with_named_draws(jaxpr: Any, look: _Look) -> Any:
    """The same program with names for what is drawn, in jitted functions without products too."""
    users: dict[Any, set[str]] = collections.defaultdict(set)
    for eqn in body(jaxpr).eqns:
        for x in _inputs(eqn):
            users[x].add(eqn.primitive.name)
    for x in filter(is_var, body(jaxpr).outvars):
        users[x].add("return")
    compared: set[Var] = set()
    eqns: list[JaxprEqn] = []
    for eqn in body(jaxpr).eqns:
        drawn: dict[Var, Var] = {}
        if compared.intersection(_inputs(eqn)):
            drawn = {x: var(x) for x in eqn.outvars}
        elif look(eqn).random and not look(eqn).product:
            if not any(is_inexact(x) for x in eqn.invars if is_var(x)):
                compared.update(x for x in eqn.outvars if users[x] and users[x] <= _COMPARISONS)
                drawn = {x: var(x) for x in eqn.outvars if not is_key(x) and x not in compared}
            elif eqn.primitive is jit_p:
                inner = _with_named_draws(eqn.params["jaxpr"], look)
                eqn = eqn.replace(params={**eqn.params, "jaxpr": inner})
        eqns.append(eqn.replace(outvars=[drawn.get(x, x) for x in eqn.outvars]) if drawn else eqn)
        for x, unnamed in drawn.items():
            eqns.append(in_place_of(eqn, _name_example(), invars=[unnamed], outvars=[x]))
    return replace(jaxpr, eqns=eqns)


def _structure(eqns: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Var]) -> Any:
    """Equal for lists of equations that differ in nothing but their variables."""
    number: dict[Var, int] = {}

    def atom(x):
        if not is_var(x):
            return repr(x), x.aval
        return number.setdefault(x, len(number)), x.aval

    def value(x):
        try:
            hash(x)
        except TypeError:
            return id(x)
        return x

    def parameters(eqn):
        return tuple((name, value(x)) for name, x in eqn.params.items())

    return (
        *map(atom, inputs),
        *(
            (
                eqn.primitive,
                parameters(eqn),
                str(eqn.source_info.name_stack),
                *map(atom, eqn.invars),
                *map(atom, eqn.outvars),
            )
            for eqn in eqns
        ),
        *map(atom, outputs),
    )


def _checkpoint(
    eqns: Sequence[JaxprEqn],
    maker: dict[Var, tuple[int, JaxprEqn]],
    roots: dict[Var, frozenset[Var]],
    needed: set[Var],
    prevent_cse: bool,
    shared: dict[Any, Any],
) -> JaxprEqn:
    """One equation for `eqns`; what they trivially derive from others is derived inside it.

    Parts that are alike share a jaxpr, which JAX differentiates and transposes once: a layer that
    is called forty times is traced in little more than the time of one.
    """
    made = {x for eqn in eqns for x in eqn.outvars}
    derived: dict[int, JaxprEqn] = {}  # by their places in the program
    inputs: dict[Var, None] = {}
    visited = [*reversed(eqns)]
    while visited:
        for x in _inputs(visited.pop()):
            if x in maker and x not in roots[x] and x not in made:
                place, eqn = maker[x]
                if place not in derived:
                    derived[place] = eqn
                    visited.append(eqn)
            elif x not in made:
                inputs[x] = None
    outvars = [x for eqn in eqns for x in eqn.outvars if x in needed]
    source, relative = below_common_scope(eqns)
    body = [*(derived[place] for place in sorted(derived)), *relative]
    example = _example(prevent_cse)
    key = _structure(body, [*inputs], outvars)
    if key not in shared:
        changes = dict(invars=[*inputs], outvars=outvars, eqns=body)
        shared[key] = replace(example.params["jaxpr"], **changes)
    params = {**example.params, "jaxpr": shared[key]}
    ends = dict(invars=[*inputs], outvars=outvars)
    return in_place_of(eqns[0], example, params=params, source_info=source, **ends)


def keep_products(jaxpr: Any, *, in_loop: bool, nested: bool = False) -> Any:
    """The same program in checkpoints that keep products for the backward pass.

    Args:
      jaxpr: what to rewrite. Nothing inside its loops is touched.
      in_loop: whether it is the body of a loop. Then XLA cannot merge what is recomputed with what
        the forward pass computed, and no barrier between them is needed.
      nested: leave it as it is if it would be one checkpoint: it fits into another.
    """
    look = _Look()
    if any(look(eqn).random for eqn in body(jaxpr).eqns):
        jaxpr = _with_named_draws(jaxpr, look)
    inner = body(jaxpr)
    # A loop would store what goes through an edge in front of its parts once for each turn.
    edges, eqns = ([], inner.eqns) if in_loop else _edges_first(inner.eqns)
    facts = [*map(look, eqns)]
    alone = [i for i, fact in enumerate(facts) if fact.alone]
    needed = {x for x in inner.outvars if is_var(x)}
    backwards: list[JaxprEqn] = []

    def emit(eqn: JaxprEqn) -> None:
        needed.difference_update(eqn.outvars)
        needed.update(_inputs(eqn))
        backwards.append(eqn)

    checkpoints = 0
    shared: dict[Any, Any] = {}
    for before, after in reversed([*itertools.pairwise([-1, *alone, len(facts)])]):
        if after < len(facts):
            emit(eqns[after])
        run, looks = eqns[before + 1 : after], facts[before + 1 : after]
        roots, maker = _roots(run), {x: at for at in enumerate(run) for x in at[1].outvars}
        _, starts = min(_cut(run, looks, roots, needed, ratio) for ratio in CUTS)
        for start, stop in reversed([*itertools.pairwise([*starts, len(run)])]):
            if any(look.product for look in looks[start:stop]):
                emit(_checkpoint(run[start:stop], maker, roots, needed, not in_loop, shared))
                checkpoints += 1
            else:
                for eqn in reversed(run[start:stop]):
                    if needed.intersection(eqn.outvars):
                        emit(eqn)
    if nested and checkpoints <= 1 and not alone:
        return jaxpr
    return replace(jaxpr, eqns=[*edges, *backwards[::-1]])
