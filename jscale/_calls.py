"""A call of any function as one from arrays to arrays, which JAX can trace."""

import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ._tree import path_parts

Path = tuple[str, ...]


class FlatCall(NamedTuple):
    """A call without what is no JAX array: numbers, NumPy arrays, functions, configuration.

    Attributes:
      fun: from arrays to a list of arrays.
      arrays: what `fun` was called with.
      paths: where they are among the arguments: a position, a name or `self`, and on from there.
      finish: what the call returns, from what `fun` returned when it was last traced.
    """

    fun: Callable[..., list[jax.Array]]
    arrays: list[jax.Array]
    paths: list[Path]
    finish: Callable[[list[jax.Array]], Any]


def flat_call(fun: Callable[..., Any], args: Any, kwargs: Any, caller: str) -> FlatCall:
    """The call `fun(*args, **kwargs)`.

    Modules of Flax NNX among the arguments are passed as their state, and what `fun` changes in it
    is written back by `finish`. `fun` may be such a module, or a method of one. `caller` is who
    speaks in errors.
    """
    fun, args, write_back, name = _without_modules(fun, args, kwargs, caller)
    located, tree = jax.tree.flatten_with_path(args)
    leaves = [x for _, x in located]
    traced = jax.Array | jax.ShapeDtypeStruct  # these for `explain`
    places = [i for i, x in enumerate(leaves) if isinstance(x, traced)]
    returned: Any = None

    def flat(*arrays):
        nonlocal returned
        given = list(leaves)
        for i, x in zip(places, arrays, strict=True):
            given[i] = x
        try:
            value = fun(*jax.tree.unflatten(tree, given))
        except Exception as error:
            if type(error).__name__ == "TraceContextError":  # of Flax NNX
                error.add_note(
                    f"{caller} traces its function by itself: pass a module that changes as an "
                    "argument, or as the function, rather than close over it."
                )
            raise
        out, out_tree = jax.tree.flatten(value)
        # What is not an array is handed through; holding arrays here would leak tracers.
        returned = [None if isinstance(x, jax.Array) else (x,) for x in out], out_tree
        return [x for x in out if isinstance(x, jax.Array)]

    def finish(arrays):
        others, out_tree = returned
        rest = iter(arrays)
        out = [x[0] if x else next(rest) for x in others]
        return write_back(jax.tree.unflatten(out_tree, out))

    paths = [name(path_parts(located[i][0])) for i in places]
    return FlatCall(flat, [leaves[i] for i in places], paths, finish)


def _is_module(x: Any) -> bool:
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Pytree | nnx.Variable)


def _without_modules(fun: Any, args: Any, kwargs: Any, caller: str) -> Any:
    """The function, its arguments, what finishes its value, and how a path in them is called."""
    bound: list[Any] = []
    if _is_module(fun):
        fun, bound = type(fun).__call__, [fun]
    elif isinstance(fun, types.MethodType) and _is_module(fun.__self__):
        fun, bound = fun.__func__, [fun.__self__]
    located, tree = jax.tree.flatten_with_path((bound, args, kwargs), is_leaf=_is_module)
    leaves = [x for _, x in located]
    parts = [path_parts(path) for path, _ in located]
    names = [("self", *p[2:]) if p[0] == "0" else p[1:] for p in parts]
    modules = [x for x in leaves if _is_module(x)]
    if not modules:
        call = lambda args, kwargs: fun(*args, **kwargs)
        return call, (args, kwargs), lambda out: out, lambda path: path[1:]

    nnx: Any = sys.modules["flax.nnx"]
    module_names = [name for name, x in zip(names, leaves, strict=True) if _is_module(x)]
    graph, state = nnx.split(modules)
    others = [None if _is_module(x) else x for x in leaves]
    changed: list[Any] = []  # paths in the state

    def of_state(state, others):
        before = dict(nnx.to_flat_state(nnx.as_pure(state)))
        copies = nnx.merge(graph, state)
        rest = iter(copies)
        given = [next(rest) if _is_module(x) else y for x, y in zip(leaves, others, strict=True)]
        bound, args, kwargs = jax.tree.unflatten(tree, given)
        out = fun(*bound, *args, **kwargs)
        if nnx.graphdef(copies) != graph:
            raise ValueError(
                f"{caller} writes back the variables that an NNX module has, but the function gave "
                "it a new one, or changed another attribute: create them when the module is made, "
                "call train() or eval() before, or split and merge the module yourself."
            )
        after = nnx.to_flat_state(nnx.as_pure(nnx.state(copies)))
        new = [(path, x) for path, x in after if x is not before.get(path)]
        changed[:] = [path for path, _ in new]
        return out, [x for _, x in new]

    def write_back(value):
        out, new = value
        nnx.update(modules, nnx.from_flat_state([*zip(changed, new, strict=True)]))
        return out

    def name(path):
        argument, index, *rest = path
        return (*(module_names if argument == "0" else names)[int(index)], *rest)

    return of_state, (state, others), write_back, name
