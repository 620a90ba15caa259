"""Which dtype parameters, computation and outputs have: whole-tree casts, as jmp does them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._tree import PyTree, map_inexact, matches, path_name

_NAMES = {
    "full": "float32",
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    **{name: name for name in ("float64", "float32", "float16", "bfloat16")},
}
_ROLES = {"p": "p", "params": "p", "c": "c", "compute": "c", "o": "o", "output": "o"}


def _half() -> str:
    return "bfloat16" if jax.default_backend() == "tpu" else "float16"


def _dtype(value: Any) -> Any:
    name = value
    if isinstance(value, str):
        name = _half() if value == "half" else _NAMES.get(value)
    try:
        # None and Python's float would silently mean float64.
        dtype = None if name is None or name is float else jnp.dtype(name)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"a policy is made of floating-point dtypes, got {value!r}: use full, half, "
            "f16, bf16, f32, f64 (or float16, bfloat16, float32, float64), or a dtype."
        )
    return dtype


def _parse(text: str) -> tuple[Any, Any, Any]:
    if "=" not in text:
        return (_dtype(text),) * 3
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in _ROLES:
            raise ValueError(
                f"unknown key {key!r} in policy {text!r}: "
                "use params=, compute= and output= (or p=, c=, o=)."
            )
        if _ROLES[key] in found:
            raise ValueError(f"policy {text!r} sets {key!r} twice: keep one of the two.")
        found[_ROLES[key]] = _dtype(value)
    param = found.get("p", jnp.dtype(jnp.float32))
    compute = found.get("c", param)
    return param, compute, found.get("o", compute)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes of parameters, of computation and of outputs, cast over whole trees.

    The job of `jmp.Policy`, with its string forms. Only real floating-point leaves are cast;
    integers, booleans, complex numbers, PRNG keys, None and Flax's fp8 overwrite leaves stay.

    A policy says nothing about operations: where a float32 array meets a float16 one, JAX computes
    in float32, and so does all that follows. Cast inputs too, and give Flax modules their `dtype=`
    instead: some, such as `nnx.Embed`, fix it when they are made, from the parameters' own.

    Args:
      param_dtype: dtype in which parameters are stored. Alone it stands for all three, and it may
        be a whole policy in words: `"params=float32,compute=float16,output=float32"` (or `p=`,
        `c=`, `o=`; params default to float32, compute to params, output to compute), or `"half"`
        (bfloat16 on TPU, float16 elsewhere) for all three.
      compute_dtype: dtype of the forward and backward pass.
      output_dtype: dtype in which results leave the model.
      keep_f32: parameter paths that stay float32 in `cast_to_param` and `cast_to_compute`. Each
        is a run of path components as `jax.tree_util.keystr` names them, with shell wildcards:
        `"norm*"` keeps every module of that name at any depth, `"decoder/wo"` one inside another.
        Upper and lower case differ: Linen's are `"*Norm*"`.

    Raises:
      ValueError: a dtype is unknown or not floating-point.
      TypeError: only one of compute_dtype and output_dtype is given.

    >>> import jax.numpy as jnp, jscale
    >>> policy = jscale.Policy("params=float32,compute=float16,output=float32", keep_f32=["norm*"])
    >>> print(policy)
    params=float32,compute=float16,output=float32
    >>> params = {"dense": jnp.ones(2), "norm1": {"scale": jnp.ones(2)}, "step": 0}
    >>> half = policy.cast_to_compute(params)
    >>> print(half["dense"].dtype, half["norm1"]["scale"].dtype, half["step"])
    float16 float32 0
    """

    param_dtype: Any
    compute_dtype: Any = None
    output_dtype: Any = None
    keep_f32: Sequence[str] = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self):
        given = self.param_dtype, self.compute_dtype, self.output_dtype
        if (self.compute_dtype is None) != (self.output_dtype is None):
            raise TypeError(
                "Policy takes one dtype (or string) for all, or all three of param_dtype, "
                f"compute_dtype and output_dtype; got {given}."
            )
        if self.compute_dtype is None and isinstance(self.param_dtype, str):
            given = _parse(self.param_dtype)
        elif self.compute_dtype is None:
            given = (self.param_dtype,) * 3
        keep = self.keep_f32
        keep = (keep,) if isinstance(keep, str) else tuple(keep)
        if not all(isinstance(pattern, str) for pattern in keep):
            raise TypeError(f"keep_f32 must be parameter paths, as strings, got {keep!r}.")
        names = [field.name for field in dataclasses.fields(self)]
        for name, value in zip(names, (*map(_dtype, given), keep), strict=True):
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return f"params={self.param_dtype},compute={self.compute_dtype},output={self.output_dtype}"

    def _kept(self, path: Any) -> bool:
        parts = path_name(path).split("/")
        return any(matches(parts, pattern.split("/")) for pattern in self.keep_f32)

    def _cast(self, tree: PyTree, dtype: Any, keep: bool) -> PyTree:
        def cast(path, x):
            if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            return x.astype(jnp.float32 if keep and self._kept(path) else dtype)

        return map_inexact(cast, tree)

    def cast_to_param(self, tree: PyTree) -> PyTree:
        """`tree` with floating-point leaves in `param_dtype`, kept paths in float32."""
        return self._cast(tree, self.param_dtype, keep=True)

    def cast_to_compute(self, tree: PyTree) -> PyTree:
        """`tree` with floating-point leaves in `compute_dtype`, kept paths in float32."""
        return self._cast(tree, self.compute_dtype, keep=True)

    def cast_to_output(self, tree: PyTree) -> PyTree:
        """`tree` with floating-point leaves in `output_dtype`."""
        return self._cast(tree, self.output_dtype, keep=False)

    def with_output_dtype(self, output_dtype: Any) -> "Policy":
        """The same policy with another output dtype."""
        return dataclasses.replace(self, output_dtype=output_dtype)
