"""What `locate` reports: records, and how they print."""

import collections
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._steps import Turn
from ._tree import at_least_f32

ARGUMENT, CONSTANT = "argument", "constant"  # what comes with inf or NaN and is no operation


class ValueRange(NamedTuple):
    """An array as `locate` reports it.

    Attributes:
      name: the argument that it is, or is a slice or a cast of: a position or name, and the path
        from there; else ''.
      dtype, shape: its type.
      smallest, largest: among the magnitudes of its finite values that are not zero; 0.0 if there
        are none.
      infs, nans: how many there are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    smallest: float
    largest: float
    infs: int
    nans: int

    def __str__(self) -> str:
        magnitudes = f"{self.smallest:.3g} to {self.largest:.3g}" if self.largest else "zeros"
        size = math.prod(self.shape)
        said = [] if size and self.infs + self.nans == size else [magnitudes]
        said += [f"{n} {what}" for n, what in ((self.infs, "inf"), (self.nans, "nan")) if n]
        typed = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        return f"{f'{self.name} ' if self.name else ''}{typed}: {', '.join(said)}"


@jax.jit
def _measure(x: jax.Array) -> tuple[jax.Array, ...]:
    x = jnp.abs(at_least_f32(x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)))
    finite = jnp.isfinite(x)
    smallest = jnp.min(jnp.where(finite & (x != 0), x, jnp.inf), initial=jnp.inf)
    largest = jnp.max(jnp.where(finite, x, 0), initial=0)
    return smallest, largest, jnp.isinf(x).sum(), jnp.isnan(x).sum()


def value_range(name: str, x: Any) -> ValueRange:
    """What is to be said of an array; of keys and references only the type."""
    smallest = largest = infs = nans = 0
    if isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.number):
        smallest, largest, infs, nans = jax.device_get(_measure(x))
    smallest = smallest if largest else 0
    typed = name, str(x.dtype), tuple(x.shape)
    return ValueRange(*typed, float(smallest), float(largest), int(infs), int(nans))


class Fault(NamedTuple):
    """An operation that made inf or NaN; or `argument` or `constant`, if these came with one.

    Attributes:
      operation: the primitive, as `jax.make_jaxpr` prints it.
      backward: whether it is in the backward pass.
      inputs, outputs: what it took and gave.
      source: `file.py:12 (function)`. A backward operation has the line of the forward one.
      scope: the named scopes and modules (of Linen or Haiku) that it is in: `decoder/wo`.
      turns: the turn of each loop that it is in, outermost first.
      note: what else is to be said.
    """

    operation: str
    backward: bool
    inputs: tuple[ValueRange, ...]
    outputs: tuple[ValueRange, ...]
    source: str
    scope: str
    turns: tuple[Turn, ...]
    note: str

    def __str__(self) -> str:
        lines = [self.operation]
        if self.operation not in (ARGUMENT, CONSTANT):
            lines[0] += f", in the {'backward' if self.backward else 'forward'} pass"
            where = f" in {self.scope}" if self.scope else ""
            lines.append(f"  at {self.source or 'an unknown line'}{where}")
        lines += [f"  {turn}" for turn in self.turns]
        for verb, values in (
            ("takes", self.inputs),
            ("gives" if self.inputs else "is", self.outputs),
        ):
            lines += [f"  {verb:5}  {x}" for x in values[:8]]
            lines += [f"  {verb:5}  {len(values) - 8} more"] if len(values) > 8 else []
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])


class Underflow(NamedTuple):
    """An operation in half precision (or fp8) that gave zeros for values that are none.

    Attributes:
      operation, backward, source, scope: as of a `Fault`.
      dtype: the dtype of its results.
      lost: how many of its results are zero, but not if it is computed in float32.
      nonzero: how many are not zero in float32. In a loop, both are of all turns together.
    """

    operation: str
    dtype: str
    backward: bool
    source: str
    scope: str
    lost: int
    nonzero: int

    @property
    def share(self) -> float:
        return self.lost / self.nonzero


class Location(NamedTuple):
    """What `locate` found. `print` shows it as a report.

    Attributes:
      nonfinite: the results that are inf or NaN: `loss`, `gradient of decoder/wo`.
      first: what they come from: the first operation whose inf or NaN alone make the loss inf or
        NaN, or, if the loss is finite, a gradient. None if all results are finite.
      others: what else made inf or NaN, in the order in which it ran.
      underflow: the operations that lost most of their values to zero, in the same order; None if
        they were not looked for.
    """

    nonfinite: tuple[str, ...]
    first: Fault | None
    others: tuple[Fault, ...]
    underflow: tuple[Underflow, ...] | None

    def __str__(self) -> str:
        if self.first is None:
            parts = [
                "the loss and all gradients are finite",
                "if the step was skipped: was this what it differentiates, autocast included, and "
                "its scale, from before the update?",
            ]
        else:
            more = f" and {len(self.nonfinite) - 5} more" if len(self.nonfinite) > 5 else ""
            parts = [f"not finite: {', '.join(self.nonfinite[:5])}{more}; first", str(self.first)]
        if self.others:
            parts.append("inf or NaN also from" if self.first else "inf or NaN without effect from")
            counts = collections.Counter(map(_row, self.others))
            parts += _table((*x, f"{n} times" if n > 1 else "") for x, n in counts.items())
        if self.underflow:
            parts.append("zeros in the place of other values from")
            parts += _table((*_row(x), f"{x.share:.1%} of {x.nonzero}") for x in self.underflow)
        elif self.underflow is not None:
            parts.append("no operation lost most of its values to zero")
        return "\n".join(parts)


def _row(x: Fault | Underflow) -> tuple[str, ...]:
    where = f"{x.source} {x.scope}".strip()
    if isinstance(x, Underflow):
        dtype = x.dtype
    else:
        dtype = x.outputs[0].dtype if x.outputs else ""
        where = where or ", ".join(y.name for y in x.outputs)
    return x.operation, dtype, "backward" if x.backward else "forward", where


def _table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    rows = [*rows]
    shown = rows[:20]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in shown]
    return lines + ([f"  and {len(rows) - 20} more"] if len(rows) > 20 else [])
