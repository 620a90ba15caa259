"""The optax wrapper: apply the step or skip it, then adjust the scale."""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._finite import AxisName, axes_of, everywhere, global_norm, select, strong
from ._rules import Observation, OffState, ScaleRule, dynamic
from ._tree import (
    PyTree,
    at_least_f32,
    boolean_scalar,
    describe,
    is_inexact,
    listing,
    map_inexact,
    mismatch,
    path_name,
    real_scalar,
    same_structure,
)


class LossScaleState(NamedTuple):
    """State of `with_loss_scale`. Every field describes the last update.

    Attributes:
      rule: state of the scale rule; `rule.loss_scale` is the scale for the next step.
      finite: bool[], the flag that decided: the gradients and their norm were finite, on every
        device, and `apply` did not veto. Use it with `select`.
      grad_norm: f32[], norm of the unscaled gradients before anything clipped them; inf or NaN
        where they overflowed. None under `off`, which does not look.
      loss_finite: bool[], whether the last `loss=` passed to `update` was finite.
      applied_steps: i32[], steps applied so far (micro-batches, around `optax.MultiSteps`).
      skipped_steps: i32[], steps skipped so far.
      consecutive_skips: i32[], steps skipped in a row up to now.
      inner: state of the wrapped optimizer.

    >>> import jax.numpy as jnp, jscale, optax
    >>> jscale.with_loss_scale(optax.sgd(0.1)).init({"w": jnp.ones(2)})._fields[:3]
    ('rule', 'finite', 'grad_norm')
    """

    rule: Any
    finite: jax.Array
    grad_norm: jax.Array | None
    loss_finite: jax.Array
    applied_steps: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array
    inner: Any


def _is_state(x: Any) -> bool:
    # nnx.State and flax.serialization turn a NamedTuple into a mapping from its field names,
    # and leave out a field without leaves.
    return isinstance(x, LossScaleState) or (
        isinstance(x, Mapping) and set(LossScaleState._fields) - {"grad_norm", "inner"} <= set(x)
    )


def _find(tree: PyTree) -> list[tuple[Any, Any]]:
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_state)
    return [(path, x) for path, x in flat if _is_state(x)]


def _field(node: Any, name: str) -> Any:
    return node.get(name) if isinstance(node, Mapping) else getattr(node, name)


def find_state(state: PyTree) -> dict[str, Any]:
    """The one `LossScaleState` in `state`, as a dict of its fields but `inner`, in plain arrays."""
    found = _find(state)
    if len(found) != 1:
        where = ", ".join(path_name(path) for path, _ in found)
        raise ValueError(
            f"more than one loss scale in this state, at {where}: pass the part that you mean."
            if found
            else f"no loss scale in this state ({describe(state)}): "
            "wrap the optimizer with jscale.with_loss_scale, and pass its state."
        )
    node = found[0][1]
    # An NNX optimizer keeps each array in a Variable, a tree with one leaf.
    unwrap = lambda x: None if x is None else next(iter(jax.tree.leaves(x)), None)
    fields = {name: unwrap(_field(node, name)) for name in LossScaleState._fields[1:-1]}
    rule = _field(node, "rule")
    names = list(rule) if isinstance(rule, Mapping) else rule._fields
    return {**fields, "rule": {name: unwrap(_field(rule, name)) for name in names}}


def loss_scale(state: PyTree) -> jax.Array:
    """The scale for the next backward pass.

    Args:
      state: any nest that holds one `LossScaleState`: an optax state, a Flax TrainState, the
        `opt_state` of an `nnx.Optimizer`, an `nnx.State`.

    Returns:
      f32[].

    Raises:
      ValueError: there is no loss scale in `state`, or more than one (the message lists them).

    >>> import jax.numpy as jnp, jscale, optax
    >>> tx = optax.chain(jscale.with_loss_scale(optax.adam(1e-3)))
    >>> float(jscale.loss_scale(tx.init({"w": jnp.ones(3)})))
    65536.0
    """
    return find_state(state)["rule"]["loss_scale"]


def metrics(state: PyTree) -> dict[str, jax.Array]:
    """What to log each step: the same keys every time, all unscaled, all 0-d arrays.

    Args:
      state: as for `loss_scale`.

    Returns:
      `grad_scale` (the scale for the next step), `grad_norm`, `finite`, `loss_finite`,
      `applied_steps`, `skipped_steps`, `consecutive_skips`, as `LossScaleState` describes them.
      Under `off`, `grad_scale` is 1 and `grad_norm`, which is not looked at, is absent.

    >>> import jax.numpy as jnp, jscale, optax
    >>> tx = jscale.with_loss_scale(optax.adam(1e-3), jscale.static(1024))
    >>> m = jscale.metrics(tx.init({"w": jnp.ones(3)}))
    >>> float(m["grad_scale"]), int(m["skipped_steps"])
    (1024.0, 0)
    """
    found = find_state(state)
    rule = found.pop("rule")
    return {"grad_scale": rule["loss_scale"]} | {k: v for k, v in found.items() if v is not None}


def _as_parameters(grads: PyTree, params: PyTree) -> PyTree:
    """Gradients in the dtype of their parameters, where that is the narrower one."""
    if params is None or not same_structure(grads, params):
        return grads
    narrow = lambda g, p: (
        g.astype(p.dtype) if is_inexact(p) and at_least_f32(p).dtype == g.dtype != p.dtype else g
    )
    return jax.tree.map(narrow, grads, params)


def _f32(tree: PyTree) -> PyTree:
    return map_inexact(lambda _, x: at_least_f32(x), tree)


def _nothing(x: Any, finite: jax.Array) -> Any:
    """`x`, or on a skipped step what adds nothing: -0.0, since -0.0 + 0.0 would lose its sign."""
    if not hasattr(x, "dtype"):
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.where(finite, x, jnp.asarray(complex(-0.0, -0.0), x.dtype))
    if jnp.issubdtype(x.dtype, jnp.number):
        return jnp.where(finite, x, jnp.asarray(-0.0, x.dtype))
    return x


def _unshared(tree: PyTree, params: PyTree) -> PyTree:
    """`tree` with copies of what it holds twice or shares with `params`, as donation needs it."""
    seen = {id(x) for x in jax.tree.leaves(params)}

    def own(x):
        if id(x) in seen and isinstance(x, jax.Array):
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(own, tree)


def _first_rule_state(rule: ScaleRule) -> Any:
    """What `rule.init` returns, as strong-typed arrays with a float32 scale."""
    state = rule.init()
    if "loss_scale" not in getattr(state, "_fields", ()):
        raise TypeError(
            "a scale rule's init must return a NamedTuple of arrays with a field loss_scale, "
            f"got {describe(state)}."
        )
    if texts := [x for x in jax.tree.leaves(state) if isinstance(x, str)]:
        raise TypeError(
            f"a scale rule's state must hold arrays and numbers only, got {texts[0]!r}."
        )
    state = jax.tree.map(lambda x: strong(jnp.asarray(x)), state)
    return state._replace(loss_scale=jnp.asarray(state.loss_scale, jnp.float32))


def _next_rule_state(rule: ScaleRule, state: Any, observation: Observation) -> Any:
    new = rule.update(state, observation)
    if difference := mismatch(new, state):
        raise TypeError(
            f"a scale rule's update must return a state like the one it was given: {difference}."
        )
    return jax.tree.map(lambda n, o: jnp.asarray(n, o.dtype), new, state)


def _check_rule_state(state: Any, expected: Any) -> None:
    if not same_structure(state, expected):
        raise TypeError(
            f"the state holds a {describe(state)}, but this rule keeps a {describe(expected)}: "
            "go on with the rule that made the state, or put a state of this rule in its place, "
            "e.g. state._replace(rule=rule.init())."
        )


def with_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps,
    rule: ScaleRule | None = None,
    *,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip the steps of `inner` whose gradients are not finite, and adjust the loss scale.

    The gradients given to `update` are unscaled, as `jscale.value_and_grad` returns them. A step is
    applied if their norm, taken in float32, is finite. A norm above 1.8e19, whose square float32
    cannot hold, counts as an overflow too: second moments would be inf for ever. A skip leaves the
    whole state of `inner` as it was, bit for bit, schedules and step counts included, and returns
    updates of -0.0, which add nothing. (On a CPU, where float32 subnormals count as zero, adding
    anything outside the jitted step flushes a subnormal parameter; `select` does not.) `inner` sees
    gradients and parameters in float32.

    Put clipping, decay, accumulation and everything else inside: what is chained in front hides
    overflows, what is chained behind is not skipped. `optax.MultiSteps` may be given as it is; a
    skipped micro-batch is dropped and its window takes one more. (Around the wrapper, MultiSteps
    would keep the first inf in its sum for ever.)

    Args:
      inner: the optimizer.
      rule: `dynamic` (the default), `static`, `off`, or any `ScaleRule`.
      axis_name: inside shard_map or pmap, the axis or axes over which all devices must decide
        alike. Not needed under jit, whatever the shardings. An `inner` that takes norms itself, as
        clipping does, sees one device's gradients there.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `LossScaleState`. `update` takes
      two further arguments: `loss=` (unscaled, for rules and `check`) and `apply=` (bool[], False
      skips the step whatever its gradients; the rule does not count that as an overflow). These
      and all others reach `inner`; leave them out where it refuses arguments that it does not know,
      as optax's line searches do.

    Raises:
      TypeError: `inner`, `rule` or `axis_name` has the wrong type.
      ValueError: from `init`, if `inner` has a loss scale already; from `update`, if the gradients
        do not match the parameters.

    >>> import jax.numpy as jnp, jscale, optax
    >>> tx = jscale.with_loss_scale(optax.sgd(0.1), jscale.dynamic(8))
    >>> params = {"w": jnp.ones(2)}
    >>> state = tx.init(params)
    >>> updates, state = tx.update({"w": jnp.array([1.0, jnp.inf])}, state, params)
    >>> print(updates["w"], jscale.loss_scale(state), state.skipped_steps)
    [-0. -0.] 4.0 1
    """
    rule = dynamic() if rule is None else rule
    if not isinstance(rule, ScaleRule):
        raise TypeError(
            f"rule must be a ScaleRule, got {describe(rule)}: "
            "use jscale.dynamic(), jscale.static(1024) or jscale.off()."
        )
    if isinstance(inner, optax.MultiSteps):
        # Its own gradient_transformation() would drop the extra arguments.
        tx = optax.GradientTransformationExtraArgs(inner.init, inner.update)
    elif isinstance(inner, optax.GradientTransformation):
        tx = optax.with_extra_args_support(inner)
    else:
        raise TypeError(
            f"inner must be an optax.GradientTransformation, got {describe(inner)}: "
            "pass e.g. optax.adamw(3e-4)."
        )

    axes = axes_of(axis_name)
    rule_type = jax.eval_shape(lambda: _first_rule_state(rule))
    is_off = isinstance(rule_type, OffState)

    def init(params: PyTree) -> LossScaleState:
        if not is_off:
            _warn_about_half(params)
        inner_state = tx.init(params if is_off else _f32(params))
        if nested := _find(inner_state):
            where = ", ".join(path_name(path) for path, _ in nested)
            raise ValueError(
                f"the wrapped optimizer has a loss scale already (in its state at {where}): "
                "use with_loss_scale once, outermost."
            )
        return LossScaleState(
            rule=_first_rule_state(rule),
            finite=jnp.array(True),
            grad_norm=None if is_off else jnp.zeros((), jnp.float32),
            loss_finite=jnp.array(True),
            applied_steps=jnp.zeros((), jnp.int32),
            skipped_steps=jnp.zeros((), jnp.int32),
            consecutive_skips=jnp.zeros((), jnp.int32),
            inner=inner_state if is_off else _unshared(jax.tree.map(strong, inner_state), params),
        )

    def update(updates, state, params=None, *, loss=None, apply=None, **extra_args):
        if not isinstance(state, LossScaleState):
            raise TypeError(
                f"state must be a LossScaleState, got {describe(state)}: pass what init returned."
            )
        _check_rule_state(state.rule, rule_type)
        given = {"loss": loss, "apply": apply}
        extra_args |= {name: value for name, value in given.items() if value is not None}

        loss_finite = state.loss_finite
        if loss is not None:
            real_scalar("loss=", loss, "pass the loss that value_and_grad returned")
            loss = jnp.asarray(loss, jnp.float32)
            loss = jax.lax.pmean(loss, axes) if axes else loss
            loss_finite = jnp.isfinite(loss)
        allowed = None if apply is None else everywhere(boolean_scalar("apply=", apply), axes)

        if is_off:
            grads = _as_parameters(updates, params)
        else:
            _check_gradients(updates, params)
            grads, params = _f32(updates), _f32(params)
        # The norm comes first: a clip or an average would hide an overflow.
        norm = None if is_off else global_norm(grads, axes)
        grads_finite = jnp.array(True) if norm is None else jnp.isfinite(norm)
        finite = grads_finite if allowed is None else grads_finite & allowed

        updates, inner_state = tx.update(grads, state.inner, params, **extra_args)
        if not is_off:
            _check_updates(updates, params)
        if not is_off or allowed is not None:
            if difference := mismatch(inner_state, state.inner):
                raise ValueError(
                    "the wrapped optimizer must keep the structure of its state, "
                    f"or a step could not be skipped: {difference}."
                )
            updates = jax.tree.map(lambda u: _nothing(u, finite), updates)
            inner_state = select(finite, inner_state, state.inner)
        # Added, not selected: XLA makes one kernel fewer of it.
        count = lambda flag, n: n + flag.astype(n.dtype)
        return updates, LossScaleState(
            rule=_next_rule_state(rule, state.rule, Observation(grads_finite, loss, grads, axes)),
            finite=finite,
            grad_norm=norm,
            loss_finite=loss_finite,
            applied_steps=count(finite, state.applied_steps),
            skipped_steps=count(~finite, state.skipped_steps),
            consecutive_skips=jnp.where(finite, 0, state.consecutive_skips + 1),
            inner=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _warn_about_half(params: PyTree) -> None:
    flat = jax.tree_util.tree_leaves_with_path(params)
    half = [path_name(path) for path, x in flat if getattr(x, "dtype", None) == jnp.float16]
    if half:
        warnings.warn(
            f"parameters in float16: {listing(half)}. Updates below 2^-11 of a weight are rounded "
            "away: keep them in float32 and cast inside the loss function, e.g. with "
            "jscale.Policy.cast_to_compute.",
            stacklevel=3,
        )


def _check_gradients(grads: PyTree, params: PyTree | None) -> None:
    """Structures only: an `inner` may average the gradients of single examples itself."""
    if isinstance(params, optax.LookaheadParams):
        params = params.fast
    if params is None:
        return
    if difference := mismatch(grads, params, allow_none=True, shapes=False):
        raise ValueError(
            f"the gradients do not match the parameters: {difference}. "
            "Differentiate with respect to what the optimizer was initialised with."
        )


def _check_updates(updates: PyTree, params: PyTree | None) -> None:
    if params is None:
        return
    if difference := mismatch(updates, params, allow_none=True):
        raise ValueError(
            f"the updates do not match the parameters: {difference}. "
            "Gradients need the shapes of the parameters: average over examples first."
        )
