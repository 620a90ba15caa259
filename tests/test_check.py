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
        FloatingPointError, match="20 steps in a row were skipped; the loss scale is 0.0625"
    ):
        jscale.check(state)
    jscale.check(state, max_skips=21)


def test_overflow_at_the_minimum():
    rule = jscale.dynamic(2, min_scale=1)
    jscale.check(after(rule, [OVERFLOW, OK]))
    with pytest.raises(
        FloatingPointError, match="with the loss scale at its minimum, 1, after 1 skip"
    ):
        jscale.check(after(rule, [OVERFLOW]))


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
        FloatingPointError, match="Gradients are finite: the caller's apply= vetoed"
    ):
        jscale.check(state)


def test_without_a_scale_only_the_loss_is_judged():
    jscale.check(after(jscale.off(), [OVERFLOW] * 30))
    with pytest.raises(FloatingPointError, match="the loss is not finite"):
        jscale.check(after(jscale.off(), [NAN]))


def test_a_static_scale_has_no_minimum_to_be_at():
    jscale.check(after(jscale.static(8), [OVERFLOW] * 3))
    with pytest.raises(FloatingPointError, match="20 steps in a row"):
        jscale.check(after(jscale.static(8), [OVERFLOW] * 20))


def test_many_seeds_at_once():
    states = jax.tree.map(
        lambda *x: jnp.stack(x), after(jscale.dynamic(), [OK]), after(jscale.dynamic(), [NAN])
    )
    with pytest.raises(FloatingPointError, match="the loss is not finite"):
        jscale.check(states)
