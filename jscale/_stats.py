"""Where the exponents of a tree lie, and what float16 loses of them at a given scale."""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._arguments import scale_array
from ._groups import as_groups, check_layers, owners, part, shown
from ._tree import PyTree, describe, is_gradient, path_name

# float16: to zero below 2^-25, with fewer bits below 2^-14, to inf from 2^16 on (65520, to be
# exact, but a histogram of exponents does not tell the two apart).
ZERO, NORMAL, LIMIT = -25, -14, 16
_BIAS = 127
_TAIL = 0.001
# Many threads that add to one counter wait for each other, and gradients share few exponents.
_LANES = 1024


class Stats(NamedTuple):
    """How many numbers have which exponent, as `stats` counts them. `print` shows the histogram.

    All fields are counts, so they add up: `jax.lax.psum(found, axis)` over devices that hold
    parts, `jax.tree.map(jnp.add, a, b)` over batches. They are float32, exact up to 2^24, since the
    elements of a large model overflow int32. The methods work inside jit and on the host. What they
    return is per layer if the counts are.

    Attributes:
      zeros: f32[], how many numbers are 0.
      exponents: f32[255], how many have the exponents -127, …, 127, that is magnitudes from 2^e to
        2^(e + 1); -127 stands for all of float32's subnormals.
      nonfinite: f32[], how many are inf or NaN.

    >>> import jax.numpy as jnp, jscale
    >>> print(jscale.stats({"w": jnp.array([0.75, -0.5, 0.25, 0.0])}))
    3 nonzero numbers; 1 zero; 0 inf or NaN
      2^-2     33.33%  ####################
      2^-1     66.67%  ########################################
    """

    zeros: jax.Array
    exponents: jax.Array
    nonfinite: jax.Array

    def share(self, low: float, high: float, loss_scale: jax.typing.ArrayLike = 1.0) -> jax.Array:
        """Share of the nonzero numbers whose magnitude, scaled, is from 2^low to 2^high.

        Exact if the scale is a power of two and the bounds are whole; else the numbers of one
        exponent are taken to be spread evenly over its binade.
        """
        scaled = self._scale_bits(loss_scale)[..., None] + self._e()
        below = lambda bound: jnp.clip(bound - scaled, 0, 1)
        inside = jnp.sum(self.exponents * (below(high) - below(low)), axis=-1)
        return inside / jnp.maximum(jnp.sum(self.exponents, axis=-1), 1)

    def quantile(self, q: float) -> jax.Array:
        """The exponent that a share `q` of the nonzero numbers lie below; -127 if all are zero."""
        seen = jnp.cumsum(self.exponents, axis=-1)
        return jnp.argmax(seen > q * seen[..., -1:], axis=-1).astype(jnp.float32) - _BIAS

    def metrics(
        self, loss_scale: jax.typing.ArrayLike = 1.0, key: str | None = None
    ) -> dict[str, jax.Array]:
        """What to log, and what `Monitor` reads.

        Args:
          loss_scale: the scale that these gradients, unscaled, were computed at; f32[n] for counts
            of n layers.
          key: of several groups, the name of this one: `underflow/text` and so on.

        Returns:
          `zero_share`, of all; `underflow`, `subnormal` and `overflow`, the shares of nonzero
          numbers that float16 makes zero, keeps with fewer bits, or makes inf at that scale;
          `median_exponent`; `headroom`, by how many doublings the scale could grow before the
          largest overflows; `slack`, by how many it could fall before one in 1000 is subnormal.
          All are finite.
        """
        total, bits = jnp.sum(self.exponents, axis=-1), self._scale_bits(loss_scale)
        largest = jnp.max(jnp.where(self.exponents > 0, self._e(), -_BIAS), axis=-1)
        everything = jnp.maximum(self.zeros + total + self.nonfinite, 1)
        found = {
            "zero_share": self.zeros / everything,
            "underflow": self.share(-math.inf, ZERO, loss_scale),
            "subnormal": self.share(ZERO, NORMAL, loss_scale),
            "overflow": self.share(LIMIT, math.inf, loss_scale),
            "median_exponent": self.quantile(0.5),
            "headroom": LIMIT - 1 - largest - bits,
            "slack": self.quantile(_TAIL) - NORMAL + bits,
        }
        return {f"{name}/{shown(key)}" if key is not None else name: x for name, x in found.items()}

    def _e(self) -> jax.Array:
        return jnp.broadcast_to(jnp.arange(255, dtype=jnp.float32) - _BIAS, self.exponents.shape)

    def _scale_bits(self, loss_scale: jax.typing.ArrayLike) -> jax.Array:
        """log2 of the scale, exact for powers of two."""
        scale = scale_array("loss_scale", loss_scale, "pass the loss scale", layered=True)
        mantissa, exponent = jnp.frexp(scale)
        bits = exponent.astype(jnp.float32) - 1 + jnp.log2(2 * mantissa)
        return jnp.broadcast_to(bits, self.zeros.shape)

    def histogram(self) -> dict[int, int]:
        """On the host: from each exponent to how many numbers have it, of all layers."""
        counts = np.asarray(self.exponents, np.float64).reshape(-1, 255).sum(axis=0)
        return {i - _BIAS: int(n) for i, n in enumerate(counts) if n}

    def __str__(self) -> str:
        if isinstance(self.zeros, jax.core.Tracer):
            return repr(self)
        histogram = self.histogram()
        zeros, nonfinite = (int(np.sum(x)) for x in (self.zeros, self.nonfinite))
        total = sum(histogram.values())
        head = f"{total} nonzero numbers; {zeros} zero; {nonfinite} inf or NaN"
        return "\n".join([head, *bars(histogram)])


def stats(
    tree: PyTree,
    groups: Collection[str] | Mapping[str, Any] | None = None,
    *,
    layers: bool = False,
) -> Any:
    """Counts the binary exponents of a tree of gradients, or of parameters or activations.

    Meant for every 100th step or so: give the train step a static argument that asks for it. The
    program for a GPU reads each array once, has as many kernels as for the norm, and 1 MB of
    temporary memory. On a CPU a million elements take some 2 ms, six times as long as their norm;
    larger arrays up to 100 times as long, and 12 bytes for each element of the largest.

    Inside shard_map every device counts what it holds: sum up with `jax.lax.psum`. Under jit the
    counts are those of the whole arrays.

    Gradients that were computed in float16 have lost what they lost: it is among the zeros. What
    tells is the share that is subnormal, since where many are, many more were below.

    Args:
      tree: any pytree; float16 and bfloat16 are counted as they are, float64 as float32 has it, of
        complex numbers both parts. Integers, booleans, keys, None are not looked at.
      groups: prefixes of paths, of which the longest decides, for counts of each; the dict of
        scales that `loss_scale` returns will do, and a group with a scale for each of n layers is
        counted layer by layer.
      layers: every array has a leading axis of layers, as `jax.lax.scan` takes them: the counts are
        of each layer, f32[n] and f32[n,255].

    Returns:
      A `Stats`, or a dict of them by group.

    Raises:
      TypeError, ValueError: a leaf is under no group, a group over no leaf, or an array has not
        that leading axis.

    >>> import jax.numpy as jnp, jscale
    >>> grads = {"text": jnp.array([2.0**-10, 2.0**-30]), "vision": jnp.array([2.0**-20, 0.0])}
    >>> found = jscale.stats(grads).metrics(loss_scale=2.0**4)
    >>> print(f"{found['underflow']:.2f} {found['subnormal']:.2f} {found['headroom']}")
    0.33 0.33 21.0
    >>> found = jscale.stats(grads, ["text", "vision"])
    >>> {name: float(x) for name, x in found["vision"].metrics(2.0**4, "vision").items()}
    {'zero_share/vision': 0.5, 'underflow/vision': 0.0, ..., 'slack/vision': -2.0}
    """
    if groups is None:
        return _count(tree, _layers_of(tree) if layers else None)
    several = isinstance(groups, Mapping)
    if isinstance(groups, str):
        raise TypeError(f"groups must be a list of prefixes or a dict, got {groups!r}.")
    given = as_groups("groups", groups if several else dict.fromkeys(groups))
    owned, found = owners(tree, given), {}
    for key, scale in given.items():
        own = part(tree, owned, key)
        n = np.shape(scale)[0] if np.ndim(scale) else _layers_of(own) if layers else None
        found[key] = _count(own, n)
    return found


def _gradients(tree: PyTree) -> list[tuple[Any, Any]]:
    return [(path, x) for path, x in jax.tree.leaves_with_path(tree) if is_gradient(path, x)]


def _layers_of(tree: PyTree) -> int:
    flat = _gradients(tree)
    for path, x in flat:
        if jnp.shape(x)[:1] != jnp.shape(flat[0][1])[:1] or not jnp.ndim(x):
            raise ValueError(
                f"layers=True needs a leading axis of layers, of one length, in every array, but "
                f"{path_name(flat[0][0])} is {describe(flat[0][1])} and {path_name(path)} is "
                f"{describe(x)}: count them apart, with groups."
            )
    return jnp.shape(flat[0][1])[0] if flat else 0


def _count(tree: PyTree, layers: int | None) -> Stats:
    rows = 1 if layers is None else layers
    lanes = max(32, _LANES // max(rows, 1))
    counts = jnp.zeros((rows * 257, lanes), jnp.int32)
    check_layers(() if layers is None else (layers,), tree)
    for _, x in _gradients(tree):
        x = jnp.asarray(x)
        for y in (x.real, x.imag) if jnp.iscomplexobj(x) else (x,):
            place, lane = _place(y, layers is not None), _number(y.shape) % lanes
            counts = counts.at[place, lane.astype(jnp.int32)].add(1, mode="promise_in_bounds")
    shape = (257,) if layers is None else (layers, 257)
    counts = jnp.sum(counts.astype(jnp.float32), axis=1).reshape(shape)
    return Stats(counts[..., 0], counts[..., 1:256], counts[..., 256])


def _place(x: jax.Array, layered: bool) -> jax.Array:
    """0 for zero, 256 for inf and NaN, else the biased exponent plus 1; and 257 for each layer.

    The bits are read, since the arithmetic of some devices takes subnormals for zero.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    place = (bits >> 23) + (bits != 0).astype(jnp.int32)
    return place + 257 * lax.broadcasted_iota(jnp.int32, x.shape, 0) if layered else place


def _number(shape: tuple[int, ...]) -> jax.Array:
    """The number of each element. A reshape would gather what is spread over devices."""
    number, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        number += lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
        stride *= shape[axis]
    return number


def bars(histogram: Mapping[int, int], lost: float = -math.inf) -> list[str]:
    """A line for each exponent, marked where below `lost`."""
    if not histogram:
        return []
    total, most, lines = sum(histogram.values()), max(histogram.values()), []
    for exponent in range(min(histogram), max(histogram) + 1):
        count = histogram.get(exponent, 0)
        bar = "#" * max(round(40 * count / most), min(count, 1))
        mark = "  lost" if count and exponent < lost else ""
        lines.append(f"  {f'2^{exponent}':7}{count / total:8.2%}  {bar}{mark}".rstrip())
    return lines
