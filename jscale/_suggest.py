"""A first scale, from gradients instead of from habit."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._arguments import as_bits
from ._finite import all_finite
from ._grad import value_and_grad
from ._rules import Observation
from ._stats import ZERO, bars, stats
from ._tree import PyTree, describe

_LOWEST, _HIGHEST = -24, 32  # as the rules have them
_LARGE = 10**9


class Suggestion(NamedTuple):
    """What `suggest_scale` found. `print` shows it with the histogram.

    Attributes:
      loss_scale: the suggestion, a power of two.
      largest: the largest power of two, up to 2^32, at which the backward pass of no batch
        overflowed.
      amax: the largest magnitude among the unscaled gradients.
      histogram: from each binary exponent to how many gradients have it, of all batches.
      zeros: how many gradients were zero even at `largest`.
      underflow: the share of the other gradients that float16 would round to zero at `loss_scale`.

    >>> import jscale
    >>> print(jscale.Suggestion(2.0**14, 2.0**16, 0.75, {-2: 1, -1: 3}, 0, 0.0))
    loss scale 2^14; overflow above 2^16; the largest gradient is 0.75
    at that scale float16 rounds 0.00% of the gradients to zero; 0 are zero at any scale
      2^-2     25.00%  #############
      2^-1     75.00%  ########################################
    """

    loss_scale: float
    largest: float
    amax: float
    histogram: dict[int, int]
    zeros: int
    underflow: float

    def __str__(self) -> str:
        power = lambda x: f"2^{math.log2(x):g}"
        above = f"overflow above {power(self.largest)}"
        if self.largest >= 2.0**_HIGHEST:
            above = f"no overflow up to {power(self.largest)}, the largest tried"
        lines = [
            f"loss scale {power(self.loss_scale)}; {above}; "
            f"the largest gradient is {self.amax:.3g}",
            f"at that scale float16 rounds {self.underflow:.2%} of the gradients to zero; "
            f"{self.zeros} are zero at any scale",
        ]
        lines += bars(self.histogram, ZERO - math.log2(self.loss_scale))
        if sum(self.histogram.values()) + self.zeros > _LARGE:
            lines.append(
                "A large model: start lower, at 2^2 say, as metaseq did for OPT-175B. Its first "
                "steps decide, and climbing costs less than skipping."
            )
        return "\n".join(lines)


def suggest_scale(
    fun: Callable[..., Any],
    params: PyTree,
    batches: Iterable[Any],
    *,
    bits: float = 2,
    has_aux: bool = False,
    transform: Callable[..., Any] | None = None,
) -> Suggestion:
    """A first loss scale, from the gradients of a few real batches.

    The backward pass is run at candidate scales until the largest is found at which no batch
    overflows, neither in a gradient that float16 would have to hold nor inside a function that
    `autocast` made. The suggestion is `bits` doublings below it, since other batches have larger
    gradients. Where many gradients are lost even so, the scale is not to blame: look at the
    precision of the loss, and at what its mean is taken over.

    Take batches as training has them, and parameters as it begins; in a warm-up gradients change
    by some doublings. For models of billions of parameters start lower than suggested and let the
    rule grow: metaseq began OPT-175B at 4 (Zhang et al., 2022), since the first steps are the most
    delicate, and each skipped one is dear.

    Args:
      fun: `fun(params, batch)` to the loss, or to `(loss, aux)`; as for `value_and_grad`, and
        wrapped in `autocast` if training does that.
      params: pytree of parameters.
      batches: a list of a few, or an iterator; each is the second argument of `fun`. They are run
        one by one, some ten times.
      bits: doublings between the suggestion and the largest scale that fits.
      has_aux: whether `fun` returns `(loss, aux)`.
      transform: what differentiates, as for `value_and_grad`. Without it, `fun` is jitted. NNX
        modules are changed as in a training step, so give it a copy, `nnx.clone(model)`.

    Returns:
      A `Suggestion`.

    Raises:
      TypeError, ValueError: an argument is not what it should be, there is no batch, or all
        gradients are zero.
      FloatingPointError: the loss or the gradients of a batch are not finite, or too large for
        float16, at any scale.

    >>> import jax, jax.numpy as jnp, jscale
    >>> loss_fn = jscale.autocast(lambda w, x: jnp.mean((x @ w) ** 2))
    >>> w, x = jax.random.normal(jax.random.key(0), (2, 64, 64))
    >>> suggestion = jscale.suggest_scale(loss_fn, w, [x])
    >>> suggestion.loss_scale < suggestion.largest < 65504 / suggestion.amax
    True
    >>> rule = jscale.dynamic(suggestion.loss_scale)
    """
    bits = as_bits(bits, default=2)
    if not callable(fun):
        raise TypeError(
            f"fun must be a function that returns the loss, got {describe(fun)}: "
            "pass the function, not what it returned."
        )
    one = isinstance(batches, str | bytes | tuple | Mapping) or hasattr(batches, "shape")
    if one or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches must be a list or an iterator, got {describe(batches)}: "
            "put a single batch into a list."
        )
    batches = list(batches)
    if not batches:
        raise ValueError("batches is empty: pass a few, in a list.")

    def look(params, batch, scale):
        kind: dict[str, Any] = {} if transform is None else {"transform": transform}
        out, grads = value_and_grad(fun, scale, has_aux=has_aux, **kind)(params, batch)
        loss = out[0] if has_aux else out
        fits = all_finite(grads)
        amax = Observation(fits, grads=grads).amax
        # What float16 would have to hold, were it kept in float16.
        return loss, fits & (amax * scale <= 65504), amax, stats(grads)

    run = jax.jit(look) if transform is None else look
    at = lambda exponent, batch: jax.device_get(run(params, batch, jnp.float32(2.0**exponent)))

    top, exponent = _HIGHEST, 16
    for number, batch in enumerate(batches):
        if not np.isfinite(loss := at(exponent, batch)[0]):
            raise FloatingPointError(
                f"the loss of batch {number} is {loss}: no scale can help. Look at the forward "
                "pass, in float32 first."
            )
        found = _largest_fitting(lambda e: at(e, batch)[1], exponent, top)
        if found is None:
            amax = at(_LOWEST, batch)[2]
            large = (
                f"exceed float16's range ({amax:.3g})" if np.isfinite(amax) else "are not finite"
            )
            raise FloatingPointError(
                f"the gradients of batch {number} {large} even at a scale of 2^{_LOWEST}: "
                "look at the backward pass, in float32 first."
            )
        top = exponent = found
    seen = [at(top, batch) for batch in batches]
    amax = float(max(amax for _, _, amax, _ in seen))
    # Added in float64: float32 stops counting at 2^24.
    add = lambda *x: np.sum(np.float64(x), axis=0)
    counts = jax.tree.map(add, *(found for *_, found in seen))
    if amax == 0:
        raise ValueError(
            f"all gradients are zero, even at a scale of 2^{top}: "
            "the loss does not depend on params, or everything underflows before it reaches them."
        )
    chosen = max(math.floor(top - bits), _LOWEST)
    histogram = counts.histogram()
    lost = sum(n for e, n in histogram.items() if e + chosen < ZERO)
    return Suggestion(
        loss_scale=2.0**chosen,
        largest=2.0**top,
        amax=amax,
        histogram=histogram,
        zeros=int(counts.zeros),
        underflow=lost / sum(histogram.values()),
    )


def _largest_fitting(fits: Callable[[int], bool], exponent: int, top: int) -> int | None:
    """By steps of four and then of one; a scale that fits is taken to mean that all below do."""
    while exponent < top and fits(exponent):
        exponent = min(exponent + 4, top)
    while not fits(exponent):
        exponent -= 1
        if exponent < _LOWEST:
            return None
    return exponent
