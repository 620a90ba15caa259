"""Reading and rewriting traced programs, with public names of JAX.

What is used here beyond documented names, and is therefore tested on the oldest and the newest JAX
that jscale supports (tests/test_jaxpr.py): `jax.extend.core` for the classes; of an equation
`source_info.name_stack` (and its `stack`) and `source_info.traceback`; of a jaxpr `debug_info`; and
these parameters of primitives: `preferred_element_type`, `precision`, `dimension_numbers`
(products), `new_dtype`, `weak_type`, `sharding` (convert_element_type), `jaxpr` (jit, scan,
checkpoint, shard_map), `branches` (cond), `cond_jaxpr`, `body_jaxpr` (while), `length`, `unroll`,
`reverse` (scan), `name` (jit), `call_jaxpr`, `num_consts`, `jvp_jaxpr_fun`, `fwd_jaxpr_thunk`,
`bwd` (custom_jvp, custom_vjp).
"""

import functools
import itertools
import math
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.extend.core.primitives import convert_element_type_p, scan_p, while_p

Atom = Any  # Var | Literal

_JAX_AND_JSCALE = os.path.dirname(jax.__file__), os.path.dirname(__file__)
_LIBRARIES = sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]


def body(jaxpr: Any) -> Any:
    """The jaxpr itself, whether or not it comes with the values of its constants."""
    # JAX 0.12 has one class for both.
    return jaxpr if ClosedJaxpr is Jaxpr or isinstance(jaxpr, Jaxpr) else jaxpr.jaxpr


def replace(jaxpr: Any, **changes: Any) -> Any:
    """`jaxpr` with other eqns, invars or outvars; constants stay."""
    inner = body(jaxpr)
    counts = len(inner.invars), len(inner.outvars)
    new_counts = tuple(len(changes.get(x, getattr(inner, x))) for x in ("invars", "outvars"))
    if new_counts != counts:  # names are kept for as many
        changes["debug_info"] = inner.debug_info.with_unknown_names()
    new = inner.replace(**changes)
    return new if inner is jaxpr else ClosedJaxpr(new, jaxpr.consts)


def subjaxprs(params: dict[str, Any]) -> Iterator[tuple[str, int | None, Any]]:
    """The jaxprs among the parameters of an equation: (parameter, place in a tuple, jaxpr)."""
    for key, value in params.items():
        if isinstance(value, Jaxpr | ClosedJaxpr):
            yield key, None, value
        elif isinstance(value, tuple):
            for i, item in enumerate(value):
                if isinstance(item, Jaxpr | ClosedJaxpr):
                    yield key, i, item


def is_var(atom: Atom) -> TypeGuard[Var]:
    return not isinstance(atom, Literal)


def dtype(atom: Atom) -> Any:
    return getattr(atom.aval, "dtype", None)


def shape(atom: Atom) -> tuple[Any, ...]:
    return getattr(atom.aval, "shape", ())


def is_key(atom: Atom) -> bool:
    return jax.dtypes.issubdtype(dtype(atom), jax.dtypes.prng_key)


def is_inexact(atom: Atom) -> bool:
    return jax.dtypes.issubdtype(dtype(atom), np.inexact)


def is_f32(atom: Atom) -> bool:
    return dtype(atom) == jnp.float32


def var(like: Atom, new_dtype: Any = None) -> Var:
    """A new variable of the shape (and sharding, and varying axes) of `like`."""
    aval = like.aval
    if new_dtype is not None:
        aval = aval.update(dtype=jnp.dtype(new_dtype), weak_type=False)
    return Var(aval)


def convert(source: Atom, target: Var, eqn: JaxprEqn) -> JaxprEqn:
    """`target = source.astype(target.dtype)`, at the place in the user's code of `eqn`."""
    params = dict(
        new_dtype=dtype(target),
        weak_type=bool(getattr(target.aval, "weak_type", False)),
        sharding=None,
    )
    return eqn.replace(
        primitive=convert_element_type_p,
        invars=[source],
        outvars=[target],
        params=params,
        effects=frozenset(),
    )


def nbytes(atom: Atom) -> int:
    itemsize = getattr(dtype(atom), "itemsize", 0)
    # A dimension that is only known by name (jax.export) counts as one.
    return itemsize * math.prod(n for n in shape(atom) if isinstance(n, int))


def inputs_of(eqn: JaxprEqn, parameter: str, jaxpr: Any) -> list[int | None]:
    """Which operand each input of an inner jaxpr is; None for what a loop carries."""
    inner, count = body(jaxpr), len(eqn.invars)
    carried = 0
    if eqn.primitive is while_p:
        carried = len(eqn.outvars)
    elif eqn.primitive is scan_p:  # what it stacks has one dimension more outside
        pairs = zip(inner.outvars, eqn.outvars, strict=True)
        carried = sum(shape(x) == shape(y) for x, y in pairs)
        slices = zip(inner.invars, eqn.invars, strict=True)
        constants = sum(shape(x) == shape(y) for x, y in slices) - carried
        return [
            None if constants <= i < constants + carried else i for i in range(len(inner.invars))
        ]
    first = len(inner.invars) - carried
    # First come the index of a branch, or the constants of a loop's condition.
    start = 0 if parameter == "cond_jaxpr" else count - len(inner.invars)
    return [*range(start, start + first), *([None] * carried)]


def passed(eqn: JaxprEqn) -> list[Atom | None]:
    """For each result of a custom_jvp or custom_vjp the operand that it is; None if computed."""
    inner = body(eqn.params["call_jaxpr"])
    operand = dict(zip(inner.invars, eqn.invars, strict=True))
    return [operand.get(x) if is_var(x) else None for x in inner.outvars]


def is_product(eqn: JaxprEqn) -> bool:
    """Whether this is what matrix units are for."""
    # The primitive ragged_dot_general is not among JAX's public names.
    return eqn.primitive.name in ("dot_general", "conv_general_dilated", "ragged_dot_general")


def scope(eqn: JaxprEqn) -> tuple[str, ...]:
    """Names of the scopes (and transforms) in which an equation was traced, outermost first."""
    return tuple(filter(None, re.split(r"[/()]", str(eqn.source_info.name_stack))))


def is_backward(eqn: JaxprEqn) -> bool:
    """Whether an equation was traced by the transposition of another program."""
    return "transpose(" in str(eqn.source_info.name_stack)


def below_common_scope(eqns: Sequence[JaxprEqn]) -> tuple[Any, list[JaxprEqn]]:
    """The source of the scope that all share, and the equations with scopes relative to it."""
    sources = [eqn.source_info for eqn in eqns]
    levels = zip(*(source.name_stack.stack for source in sources), strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda names: len(set(names)) == 1, levels))
    stack = type(sources[0].name_stack)
    relative = [
        eqn.replace(source_info=x.replace(name_stack=stack(x.name_stack.stack[shared:])))
        for eqn, x in zip(eqns, sources, strict=True)
    ]
    return sources[0].replace(name_stack=stack(sources[0].name_stack.stack[:shared])), relative


def title(eqn: JaxprEqn) -> str:
    """`dot_general`, or `softplus` for a jitted function of that name."""
    name = eqn.params.get("name")
    return name if isinstance(name, str) and any(subjaxprs(eqn.params)) else eqn.primitive.name


def source(eqn: JaxprEqn) -> str:
    """`file.py:12 (function)`: the user's line that this equation comes from."""
    traceback = eqn.source_info.traceback
    frames: list[Any] = [] if traceback is None else traceback.frames
    outside = [f for f in frames if not f.file_name.startswith(_JAX_AND_JSCALE)]
    users = [f for f in outside if not f.file_name.startswith(_LIBRARIES)]
    for frame in users or outside:
        return f"{os.path.basename(frame.file_name)}:{frame.line_num} ({frame.function_name})"
    return ""


def in_place_of(eqn: JaxprEqn, example: JaxprEqn, **changes: Any) -> JaxprEqn:
    """The operation of `example` at the place in the user's code of `eqn`."""
    operation = dict(primitive=example.primitive, params=example.params, effects=example.effects)
    return eqn.replace(**{**operation, **changes})


@functools.cache
def _empty() -> Any:
    return body(jax.make_jaxpr(lambda: [])())


def function(eqn: JaxprEqn) -> Callable[..., list[Any]]:
    """What an equation computes, as a function of its operands."""
    invars: list[Atom] = [var(x) for x in eqn.invars]
    outvars = [var(x) for x in eqn.outvars]
    alone = eqn.replace(invars=invars, outvars=outvars)
    jaxpr = replace(_empty(), invars=invars, outvars=outvars, eqns=[alone], effects=eqn.effects)
    return jaxpr_as_fun(jaxpr if ClosedJaxpr is Jaxpr else ClosedJaxpr(jaxpr, ()))
