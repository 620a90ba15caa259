from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jscale

PARAMS = {"w": jnp.ones(2)}


def after(rule, steps):
    """The state after updates with (gradient, loss, apply) each."""
    tx = jscale.with_loss_scale(optax.sgd(0.1), rule)
    update = jax.jit(lambda g, s, loss, apply: tx.update(g, s, PARAMS, loss=loss, apply=apply)[1])
    state = tx.init(PARAMS)
    for grad, loss, apply in steps:
        state = update({"w": jnp.full(2, grad)}, state, jnp.float32(loss), jnp.array(apply))
    return state


OK, OVERFLOW, NAN = (1.0, 1.0, True), (np.inf, 1.0, True), (np.nan, np.nan, True)


def test_healthy_training_passes():
    for steps in (
        [],
        [OK],
        [OVERFLOW] * 19,
        [OVERFLOW] * 19 + [OK],
        [OVERFLOW] * 19 + [OK, OVERFLOW],
    ):
        jscale.check(after(jscale.dynamic(2.0**16), steps))


def test_many_skips_in_a_row():
    state = after(jscale.dynamic(2.0**16), [OVERFLOW] * 20)
    with pytest.raises(
        FloatingPointError, match="20 skipped steps in a row; the loss scale is 0.0625"
    ):
        jscale.check(state)
    jscale.check(state, max_skips=21)


def test_overflow_at_the_minimum():
    rule = jscale.dynamic(2, min_scale=1)
    for steps in ([OVERFLOW], [OVERFLOW, OK], [OVERFLOW, OVERFLOW, OK]):
        jscale.check(after(rule, steps))  # the first one brings it there
    with pytest.raises(
        FloatingPointError, match="with the loss scale at its minimum, 1, after 2 skip"
    ):
        jscale.check(after(rule, [OVERFLOW, OVERFLOW]))


def test_a_start_at_the_minimum_has_nowhere_to_fall():
    with pytest.raises(FloatingPointError, match="at its minimum, 1, after 1 skipped step"):
        jscale.check(after(jscale.dynamic(1, min_scale=1), [OVERFLOW]))


def test_a_visit_to_the_minimum_is_forgotten_once_the_scale_has_grown():
    rule = jscale.dynamic(2, min_scale=1, growth_interval=1)
    jscale.check(after(rule, [OVERFLOW, OK, OVERFLOW]))


def test_a_lost_loss_cannot_be_helped_by_the_scale():
    state = after(jscale.dynamic(), [NAN] * 20)
    assert int(state.consecutive_skips) == 20 and not bool(state.loss_finite)
    with pytest.raises(FloatingPointError, match="Lowering the loss scale cannot help"):
        jscale.check(state)
    with pytest.raises(FloatingPointError, match="Lowering the loss scale cannot help"):
        jscale.check(state, allow_nonfinite_loss=True)
    once = after(jscale.dynamic(), [NAN])
    jscale.check(once, allow_nonfinite_loss=True)
    with pytest.raises(FloatingPointError, match="the loss is not finite.*after 1 skipped step"):
        jscale.check(once)


def test_loss_and_gradients_are_judged_apart():
    # d/dp of p + (inf - inf) is 1: applied, and flagged.
    fun = lambda p: p + (jnp.inf - jnp.inf)
    tx = jscale.with_loss_scale(optax.sgd(1.0))
    p = jnp.float32(3)
    loss, grad = jscale.value_and_grad(fun, 8)(p)
    updates, state = tx.update(grad, tx.init(p), p, loss=loss)
    assert float(optax.apply_updates(p, updates)) == 2
    assert bool(state.finite) and not bool(state.loss_finite)
    with pytest.raises(FloatingPointError, match="though the step was applied"):
        jscale.check(state)


def test_vetoes_are_named_as_such():
    state = after(jscale.dynamic(), [(1.0, 1.0, False)] * 20)
    with pytest.raises(
        FloatingPointError, match="had finite gradients: the caller's apply= vetoed it"
    ):
        jscale.check(state)


def test_without_a_scale_only_the_loss_is_judged():
    jscale.check(after(jscale.off(), [OVERFLOW] * 30))
    with pytest.raises(FloatingPointError, match="the loss is not finite"):
        jscale.check(after(jscale.off(), [NAN]))


def test_a_static_scale_has_no_minimum_to_be_at():
    jscale.check(after(jscale.static(8), [OVERFLOW] * 3))
    with pytest.raises(FloatingPointError, match="20 skipped steps in a row"):
        jscale.check(after(jscale.static(8), [OVERFLOW] * 20))


def test_each_of_many_seeds_is_judged_by_itself():
    rule = jscale.dynamic(4, min_scale=1, growth_interval=1)
    seeds = lambda *runs: jax.tree.map(lambda *x: jnp.stack(x), *(after(rule, r) for r in runs))
    # One has been at its minimum and is well again, the other overflows for the first time.
    jscale.check(seeds([OVERFLOW, OVERFLOW, OVERFLOW, OK], [OVERFLOW]))
    with pytest.raises(FloatingPointError, match="the loss is not finite"):
        jscale.check(seeds([OK], [NAN]))
    with pytest.raises(FloatingPointError, match="at its minimum, 1, after 3 skipped steps"):
        jscale.check(seeds([OK], [OVERFLOW] * 3))


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
def test_a_rule_that_loses_its_scale_is_found_out(scale):
    rule = jscale.ScaleRule(jscale.static(8).init, lambda s, o: s._replace(loss_scale=scale))
    with pytest.raises(FloatingPointError, match=f"the loss scale is {scale}: the rule must keep"):
        jscale.check(after(rule, [OK]))


def test_it_belongs_outside_jit_and_takes_a_count():
    with pytest.raises(TypeError, match="must be called outside jit"):
        jax.jit(lambda s: jscale.check(s))(after(jscale.dynamic(), []))
    with pytest.raises(ValueError, match="max_skips must be a whole number from 1"):
        jscale.check(after(jscale.dynamic(), []), max_skips=0)


def test_fields_of_a_rule_do_not_hide_those_of_the_wrapper():
    class State(NamedTuple):
        loss_scale: jax.Array
        grad_norm: jax.Array
        consecutive_skips: jax.Array

    rule = jscale.ScaleRule(lambda: State(8.0, 0.0, 0), lambda state, seen: state)
    with pytest.raises(FloatingPointError, match="20 skipped steps in a row"):
        jscale.check(after(rule, [OVERFLOW] * 20))
