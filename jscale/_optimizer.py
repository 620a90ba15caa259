"""The optax wrapper: apply the step or skip it, then adjust the scale."""

import itertools
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._arguments import AxisName, as_axes, as_flag, as_transformation, check_real_scalar
from ._finite import choose, everywhere, global_norm, in_array, in_one_kernel, over
from ._groups import as_groups, check_layers, owners, part
from ._master import MasterWeightsState
from ._rules import Observation, OffState, ScaleRule, as_rule, dynamic
from ._state import LossScaleState, find_all
from ._tree import (
    PyTree,
    at_least_f32,
    describe,
    is_inexact,
    listing,
    mismatch,
    path_name,
    path_parts,
    strong,
    wide,
)


def _differentiated(params: PyTree) -> PyTree:
    """Those of `params` that have gradients: the fast ones of optax.lookahead's two sets."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def _as_parameters(grads: PyTree, params: PyTree) -> PyTree:
    """Gradients in the dtype of their parameters, where that is the narrower one."""
    params = _differentiated(params)
    if params is None or mismatch(grads, params, allow_none=True, shapes=False):
        return grads
    widened = lambda g, p: (
        g is not None
        and p is not None
        and is_inexact(p)
        and at_least_f32(p).dtype == jnp.result_type(g) != jnp.result_type(p)
    )
    narrow = lambda g, p: g.astype(p.dtype) if widened(g, p) else g
    return jax.tree.map(narrow, grads, params, is_leaf=lambda x: x is None)


def _as_rules(rule: Any) -> dict[str, ScaleRule]:
    """Rules by the prefix of the paths that they govern; one alone governs all."""
    several = isinstance(rule, Mapping)
    rules = as_groups("rule", rule) if several else {"": dynamic() if rule is None else rule}
    for key, one in rules.items():
        name = f"rule[{key!r}]" if several else "rule"
        as_rule(name, one)
        if several and isinstance(one.init(), OffState):
            raise ValueError(
                f"{name} is off(), which skips nothing: use static(1) for a part without a scale, "
                "or off() for all."
            )
    return rules


def _apply_own(
    tx: optax.GradientTransformationExtraArgs, rules: Mapping[str, ScaleRule]
) -> optax.GradientTransformationExtraArgs:
    """`tx` for each group by itself, with a state by group."""

    def only(tree, key):  # by its own structure: gradients may be None where parameters are not
        flat, treedef = jax.tree.flatten(tree)
        pairs = zip(flat, owners(tree, rules), strict=True)
        own = [x if key == owner else optax.MaskedNode() for x, owner in pairs]
        return jax.tree.unflatten(treedef, own)

    def init(params):
        return {key: tx.init(only(params, key)) for key in rules}

    def update(updates, state, params=None, **extra_args):
        new, parts = {}, {}
        for key in rules:
            own = None if params is None else only(params, key)
            part, new[key] = tx.update(only(updates, key), state[key], own, **extra_args)
            parts[key] = iter(jax.tree.leaves(part))
        whole = [next(parts[owner]) for owner in owners(updates, rules)]
        return jax.tree.unflatten(jax.tree.structure(updates), whole), new

    return optax.GradientTransformationExtraArgs(init, update)


def _nothing(x: Any, finite: jax.Array) -> Any:
    """`x`, or on a skipped step what adds nothing: -0.0, since -0.0 + 0.0 would lose its sign."""
    number = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.number)
    if not number:
        return x
    nothing = -np.zeros((), x.dtype)
    return jnp.where(finite, x, nothing.astype(x.dtype))  # NumPy negates int4 to int8


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
    # Copies: a rule may hand out the same array again, and its state is donated.
    state = jax.tree.map(lambda x: strong(jnp.array(x)), state)
    if state.loss_scale.ndim > 1:
        raise TypeError(
            f"a scale rule's loss_scale must be a scalar, or one for each layer of a stack, "
            f"got {describe(state.loss_scale)}."
        )
    return state._replace(loss_scale=jnp.asarray(state.loss_scale, jnp.float32))


def _typed(state: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), state, like)


def _next_rule_state(rule: ScaleRule, state: Any, observation: Observation) -> Any:
    new = rule.update(state, observation)
    if difference := mismatch(new, state, kinds=lambda path: True):
        raise TypeError(
            f"a scale rule's update must return a state like the one it was given: {difference}."
        )
    return _typed(new, state)


def _kind(rule_state: Any) -> str:
    if isinstance(rule_state, Mapping):
        return f"one state for each of {listing([repr(key) for key in rule_state])}"
    return f"a {describe(rule_state)}"


def _check_rule_state(state: Any, expected: Any) -> None:
    if difference := mismatch(state, expected):
        raise TypeError(
            f"the state holds {_kind(state)}, but this rule keeps {_kind(expected)}: "
            "go on with the rule that made the state, or take it over by "
            f"jscale.checkpoint.attach(tx.init(params), state). The difference: {difference}."
        )


def _warn_about_half(params: PyTree) -> None:
    flat = jax.tree.leaves_with_path(params)
    half = [path_name(path) for path, x in flat if getattr(x, "dtype", None) == jnp.float16]
    if half:
        warnings.warn(
            f"parameters in float16: {listing(half)}. Updates below 2^-12 of a weight are rounded "
            "away: keep them in float32 and cast inside the loss function, e.g. with "
            "jscale.Policy.cast_to_compute, or put jscale.with_master_weights around this.",
            stacklevel=3,
        )


def _check_gradients(grads: PyTree, params: PyTree | None) -> None:
    """Structures only: an `inner` may average the gradients of single examples itself."""
    params = _differentiated(params)
    if params is None:
        return
    if difference := mismatch(grads, params, allow_none=True, shapes=False):
        raise ValueError(
            f"the gradients do not match the parameters: {difference}. "
            "Differentiate with respect to what the optimizer was initialised with."
        )


def _check_inner(new: PyTree, old: PyTree, params: PyTree) -> None:
    whole = {path_parts(p) for p, x in jax.tree.leaves_with_path(params) if not is_inexact(x)}

    def kinds(path):  # integer parameters may have moments of integers, which nobody reads
        parts = path_parts(path)
        return not any(parts[i:] in whole for i in range(len(parts) + 1))

    if difference := mismatch(new, old, kinds=kinds):
        raise ValueError(
            "the wrapped optimizer must keep the structure and the types of its state, "
            f"or a step could not be skipped: {difference}."
        )


def _check_updates(updates: PyTree, params: PyTree | None) -> None:
    if params is None:
        return
    if difference := mismatch(updates, params, allow_none=True):
        raise ValueError(
            f"the updates do not match the parameters: {difference}. "
            "Gradients need the shapes of the parameters: average over examples first."
        )


def with_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps,
    rule: ScaleRule | Mapping[str, ScaleRule] | None = None,
    *,
    axis_name: AxisName = None,
    skip: Literal["any", "own"] = "any",
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
    would keep the first inf in its sum for ever.) What `inner` differentiates by itself, as SAM's
    opaque mode and line searches do, is neither scaled nor looked at; and where it reads the loss,
    a step needs `apply=jnp.isfinite(loss)`.

    Frozen parameters stay outside: differentiate what is trained, and give that alone to `init` and
    `update` (`nnx.DiffState(0, nnx.LoRAParam)` with `wrt=nnx.LoRAParam`; `eqx.partition`). Where
    one tree has both, put the wrapper inside `optax.partition({"trained": with_loss_scale(tx),
    "frozen": optax.set_to_zero()}, labels)`: around it, the frozen ones' gradients have a say.

    A dict of rules has a scale for each `region` of the backward pass. Its keys are prefixes of
    parameter paths, of which the longest wins; they come in the order of the backward pass, from
    the loss on, as an overflow does. So when the gradients of one group overflow, the rules of the
    groups after it, which may have received them, learn nothing from the step and hold their state.
    A region far off the others wants other bounds, such as `dynamic(max_scale=2.0**60)`; and what
    is unscaled is small again, so look at Adam's eps.

    Several losses have a scaler each, `with_loss_scale(optax.identity(), rule)`: its updates are
    the gradients of that loss, or -0.0 where they overflowed. Their sum goes to an optimizer in
    `with_loss_scale(inner, off())` with `apply=` what their states' `finite` say together. Several
    optimizers share a scale by one such scaler over the gradients of all.

    Args:
      inner: the optimizer.
      rule: `dynamic` (the default), `static`, `off`, or any `ScaleRule`; or a dict of them, in
        which `stacked(rule, n)` has a scale for each layer of a scanned stack.
      axis_name: inside shard_map or pmap, the axis or axes over which all devices must decide
        alike. Not needed under jit, whatever the shardings. An `inner` that takes norms itself, as
        clipping does, sees one device's gradients there.
      skip: with a dict of rules, whether `"any"` overflow drops the whole step, or each group drops
        its `"own"`. Then each has a state of `inner` of its own, with its moments, schedules and
        counts, and `inner` sees one group at a time: clipping is by the norm of the group.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `LossScaleState`. `update` takes
      two further arguments: `loss=` (unscaled, for rules and `check`) and `apply=` (bool[], False
      skips the step whatever its gradients; the rule does not count that as an overflow). These
      and all others reach `inner`; leave them out where it refuses arguments that it does not know,
      as optax's line searches do.

    Raises:
      TypeError: `inner`, `rule` or `axis_name` has the wrong type; from `update`, `loss=` or
        `apply=` has, or the state is that of another rule or another `skip`.
      ValueError: `skip` is neither, or a dict of rules has `off()`; from `init`, if `inner` has a
        loss scale already; from `update`, if the gradients do not match the parameters; from both,
        if a gradient is under no key of a dict of rules, or a key over none.

    >>> import jax.numpy as jnp, jscale, optax
    >>> tx = jscale.with_loss_scale(optax.sgd(0.1), jscale.dynamic(8))
    >>> params = {"w": jnp.ones(2)}
    >>> state = tx.init(params)
    >>> updates, state = tx.update({"w": jnp.array([1.0, jnp.inf])}, state, params)
    >>> print(updates["w"], jscale.loss_scale(state), state.skipped_steps)
    [-0. -0.] 4.0 1

    Two scales, of which one was too large:

    >>> rules = {"text": jscale.dynamic(8), "vision": jscale.dynamic(8)}
    >>> tx = jscale.with_loss_scale(optax.sgd(0.1), rules, skip="own")
    >>> params = {"text": jnp.ones(2), "vision": jnp.ones(2)}
    >>> grads = {"text": jnp.ones(2), "vision": jnp.full(2, jnp.inf)}
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> print(updates, {key: float(x) for key, x in jscale.loss_scale(state).items()})
    {'text': Array([-0.1, -0.1], dtype=float32), 'vision': Array([-0., -0.], dtype=float32)} \
    {'text': 8.0, 'vision': 4.0}
    """
    rules = _as_rules(rule)
    tx = as_transformation(inner)
    if skip not in ("any", "own"):
        raise ValueError(f"skip must be 'any' or 'own', got {skip!r}: see the docstring.")
    several = isinstance(rule, Mapping)
    by_group = several and skip == "own"
    tx = _apply_own(tx, rules) if by_group else tx

    # In the state, what there is for each rule is a dict only if there may be several.
    pack = (lambda parts: parts) if several else (lambda parts: parts[""])
    unpack = (lambda packed: packed) if several else (lambda packed: {"": packed})
    axes = as_axes(axis_name)
    first = lambda: pack({key: _first_rule_state(one) for key, one in rules.items()})
    rule_type = jax.eval_shape(first)
    is_off = isinstance(rule_type, OffState)

    def init(params: PyTree) -> LossScaleState:
        if by_group and params is not _differentiated(params):
            raise ValueError(
                "optax.lookahead has two sets of parameters, which skip='own' cannot tell apart by "
                "group: use skip='any'."
            )
        owned = owners(_differentiated(params), rules) if several else []
        for key, one in unpack(rule_type).items():
            of_group = part(_differentiated(params), owned, key) if several else params
            check_layers(one.loss_scale.shape, of_group)
        inner_state = tx.init(params if is_off else wide(params))
        kept = jax.tree.leaves(inner_state, is_leaf=lambda x: isinstance(x, MasterWeightsState))
        if any(isinstance(x, MasterWeightsState) for x in kept):
            raise ValueError(
                "with_master_weights is inside with_loss_scale, where it cannot tell what needs a "
                "copy: put it around, with_master_weights(with_loss_scale(...))."
            )
        if not is_off:
            _warn_about_half(params)
        if nested := find_all(inner_state):
            where = ", ".join(path_name(path) for path, _ in nested)
            raise ValueError(
                f"the wrapped optimizer has a loss scale already (in its state at {where}): "
                "use with_loss_scale once, outermost."
            )
        norm = lambda one: jnp.zeros(one.loss_scale.shape, jnp.float32)
        new = lambda x: {key: jnp.array(x) for key in rules} if by_group else jnp.array(x)
        return LossScaleState(
            rule=first(),
            finite=new(True),
            grad_norm=None if is_off else pack({k: norm(x) for k, x in unpack(rule_type).items()}),
            loss_finite=jnp.array(True),
            applied_steps=new(jnp.int32(0)),
            skipped_steps=new(jnp.int32(0)),
            consecutive_skips=new(jnp.int32(0)),
            inner=inner_state if is_off else _unshared(jax.tree.map(strong, inner_state), params),
        )

    def update(updates, state, params=None, *, loss=None, apply=None, **extra_args):
        if not isinstance(state, LossScaleState):
            raise TypeError(
                f"state must be a LossScaleState, got {describe(state)}: pass what init returned."
            )
        _check_rule_state(state.rule, rule_type)
        # A scale that was set by hand may be a Python number, or an int32.
        state = state._replace(rule=_typed(state.rule, rule_type))
        if isinstance(state.finite, Mapping) != by_group:
            raise TypeError(
                f"the state is not one of skip={skip!r}: go on with the setting that made it, or "
                "pass what init returns."
            )
        loss_finite = state.loss_finite
        if loss is not None:
            extra_args["loss"] = loss
            check_real_scalar("loss=", loss, "pass the loss that value_and_grad returned")
            loss = jnp.asarray(loss, jnp.float32)
            loss = jax.lax.pmean(over(loss, axes), axes) if axes else loss
            loss_finite = jnp.isfinite(loss)
        allowed = None
        if apply is not None:
            extra_args["apply"] = apply
            allowed = everywhere(as_flag("apply=", apply), axes)

        if is_off:
            grads = _as_parameters(updates, params)
        else:
            _check_gradients(updates, params)
            grads, params = wide(updates), wide(params)
        # The norm comes first: a clip or an average would hide an overflow.
        owned = owners(grads, rules) if several else []
        seen = {key: part(grads, owned, key) for key in rules} if several else {"": grads}
        # In the order of the rules: a traced dict has its keys sorted.
        norms = {key: _norm(seen[key], unpack(rule_type)[key], axes) for key in rules}
        clean, learns, finite = _verdicts(norms, together=not by_group)
        if by_group:
            finite = {key: jnp.all(flag) for key, flag in clean.items()}
        if allowed is not None:
            finite = jax.tree.map(lambda flag: flag & allowed, finite)

        updates, inner_state = tx.update(grads, state.inner, params, **extra_args)
        if not is_off:
            _check_updates(updates, params)
        if not is_off or allowed is not None:
            _check_inner(inner_state, state.inner, updates if params is None else params)
            read = jax.tree.map(in_array, finite)
            flat, treedef = jax.tree.flatten(updates)
            flags = map(read.get, owned) if by_group else itertools.repeat(read)
            updates = jax.tree.unflatten(treedef, map(_nothing, flat, flags))
            inner_state = jax.tree.map(choose, read, inner_state, state.inner)

        decided = finite, clean, learns, loss_finite
        finite, clean, learns, loss_finite = in_one_kernel(decided)
        new_rules = {}
        for key, old in unpack(state.rule).items():
            observation = Observation(clean[key], loss, seen[key], axes)
            new = _next_rule_state(rules[key], old, observation)
            new_rules[key] = choose(learns[key], new, old) if key in learns else new
        count = lambda flag, n: n + flag.astype(n.dtype)
        return updates, LossScaleState(
            rule=pack(new_rules),
            finite=finite,
            grad_norm=None if is_off else pack(norms),
            loss_finite=loss_finite,
            applied_steps=jax.tree.map(count, finite, state.applied_steps),
            skipped_steps=jax.tree.map(lambda f, n: count(~f, n), finite, state.skipped_steps),
            consecutive_skips=jax.tree.map(
                lambda f, n: jnp.where(f, 0, n + 1), finite, state.consecutive_skips
            ),
            inner=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _norm(grads: PyTree, rule_state: Any, axes: tuple[str, ...]) -> jax.Array | None:
    """The norm of a group's gradients, or of each of its layers; None if nobody looks."""
    if isinstance(rule_state, OffState):
        return None
    check_layers(rule_state.loss_scale.shape, grads)
    if not rule_state.loss_scale.shape:
        return global_norm(grads, axes)
    return jax.vmap(lambda one: global_norm(one, axes))(grads)


def _verdicts(
    norms: dict[str, Any], together: bool
) -> tuple[dict[str, jax.Array], dict[str, jax.Array], Any]:
    """Whether each group is finite, for those after the first whether all before it are, and all.

    If they are applied `together`, so must be the norm of them all, which clipping takes.
    """
    if None in norms.values():
        always = jnp.array(True)
        return {key: always for key in norms}, {}, always
    finite = {key: jnp.isfinite(norm) for key, norm in norms.items()}
    if len(norms) == 1:
        (flag,), (norm,) = finite.values(), norms.values()
        if not norm.ndim:  # one norm by itself is the norm of all
            return finite, {}, flag
    # Sums over the groups: a chain of flags would be repeated in each update that reads its end.
    pairs = zip(finite.values(), norms.values(), strict=True)
    squares: Any = [jnp.sum(jnp.where(flag, jnp.square(norm), 0)) for flag, norm in pairs]
    fits = map(jnp.isfinite, jnp.cumsum(jnp.stack(squares)) if together else squares)
    clean = {key: flag & fit for (key, flag), fit in zip(finite.items(), fits, strict=True)}
    sound = jnp.cumsum(jnp.stack([~jnp.all(flag) for flag in clean.values()])) == 0
    *before, all_sound = sound
    return clean, dict(zip([*norms][1:], before, strict=True)), all_sound
