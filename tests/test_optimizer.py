"""The wrapper by itself: its decision, its record, its errors."""

import functools
import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

import jscale

PARAMS = {"w": jnp.ones(2)}
TX = jscale.with_loss_scale(optax.sgd(1.0), jscale.dynamic(8, growth_interval=2))
KEYS = {
    "grad_scale",
    "grad_norm",
    "finite",
    "loss_finite",
    "applied_steps",
    "skipped_steps",
    "consecutive_skips",
}


def grads(value):
    return {"w": jnp.array([0.0, value])}


@jax.jit
def update(state, value, loss, apply):
    return TX.update(grads(value), state, PARAMS, loss=loss, apply=apply)


def test_metrics_have_the_same_keys_before_and_after_a_skip():
    state = TX.init(PARAMS)
    for value in (3.0, np.inf, 3.0):
        assert set(jscale.metrics(state)) == KEYS
        assert all(x.shape == () for x in jscale.metrics(state).values())
        _, state = update(state, value, 1.0, True)
    assert {k: v.item() for k, v in jscale.metrics(state).items()} == {
        "grad_scale": 4,
        "grad_norm": 3,
        "finite": True,
        "loss_finite": True,
        "applied_steps": 2,
        "skipped_steps": 1,
        "consecutive_skips": 0,
    }
    assert set(
        jscale.metrics(jscale.with_loss_scale(optax.sgd(1.0), jscale.off()).init(PARAMS))
    ) == (KEYS - {"grad_norm"})


@pytest.mark.parametrize("scale", [1024, 1024.0, np.float64(1024), jnp.int32(1024)])
@pytest.mark.parametrize("jit", [False, True])
def test_a_scale_set_by_hand_is_one_like_any_other(jit, scale):
    step = jax.jit(TX.update) if jit else TX.update
    state = optax.tree.set(TX.init(PARAMS), loss_scale=scale)
    for expected in 2.0 ** np.arange(9, -3, -1):
        _, state = step(grads(np.inf), state, PARAMS)
        assert jscale.loss_scale(state).dtype == jnp.float32
        assert jscale.loss_scale(state) == expected


class Seen(NamedTuple):
    loss_scale: float
    mean: float


def averages(first):
    """An optimizer and a rule that remember an average, from `first` on."""
    inner = optax.GradientTransformation(
        lambda params: {"mean": first},
        lambda u, s, params=None: (u, {"mean": 0.5 * s["mean"] + 0.5 * optax.tree.norm(u)}),
    )
    rule = jscale.ScaleRule(
        lambda: Seen(8.0, first),
        lambda state, seen: state._replace(mean=0.5 * state.mean + 0.5 * seen.grad_norm),
    )
    return jscale.with_loss_scale(inner), jscale.with_loss_scale(optax.identity(), rule)


def test_a_state_that_begins_as_an_integer_is_not_truncated(standard_promotion):
    for tx in averages(0.0):
        _, state = tx.update(grads(3.0), tx.init(PARAMS), PARAMS)
        assert optax.tree.get(state, "mean") == 1.5
    for tx in averages(0):
        with pytest.raises(
            (TypeError, ValueError), match=r"at mean float32\[\], expected int32\[\]"
        ):
            tx.update(grads(3.0), tx.init(PARAMS), PARAMS)


def test_integer_parameters_may_have_moments(standard_promotion):
    params = {"w": jnp.ones(2), "n": jnp.int32(3)}
    tx = jscale.with_loss_scale(optax.adam(0.1))
    updates, state = tx.update({"w": jnp.ones(2), "n": jnp.int32(0)}, tx.init(params), params)
    assert state.finite and updates["n"] == 0


values = st.sampled_from([0.0, 1.0, -1.0, 1e18, 1e20, np.inf, -np.inf, np.nan])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(values, values, st.booleans()), min_size=1, max_size=12))
def test_the_record_adds_up(steps):
    state, applied, streak = TX.init(PARAMS), 0, 0
    rule = jscale.dynamic(8, growth_interval=2)
    rule_state = rule.init()
    for value, loss, apply in steps:
        updates, state = update(state, value, loss, apply)
        # 1e20 is an overflow: float32 cannot hold its square.
        clean = bool(abs(value) < 1e19)
        applied += clean and apply
        streak = 0 if clean and apply else streak + 1
        rule_state = rule.update(rule_state, jscale.Observation(finite=clean))
        assert bool(state.finite) == (clean and apply)
        assert bool(jnp.isfinite(state.grad_norm)) == clean
        assert bool(state.loss_finite) == bool(np.isfinite(loss))
        assert float(state.rule.loss_scale) == float(rule_state.loss_scale)
        assert int(state.consecutive_skips) == streak
        want = -np.float32([0.0, value]) if clean and apply else np.float32([-0.0, -0.0])
        assert np.asarray(updates["w"]).tobytes() == want.tobytes()
    assert int(state.applied_steps) == applied
    assert int(state.skipped_steps) == len(steps) - applied


@pytest.mark.parametrize("rule", [jscale.dynamic(1.0), jscale.static(1.0)])
def test_a_scale_of_one_is_a_scale_like_any_other(rule):
    tx = jscale.with_loss_scale(optax.sgd(1.0), rule)
    updates, state = tx.update(grads(np.inf), tx.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(updates["w"], [0, 0])
    assert not bool(state.finite)


def test_a_veto_counts_without_a_scale_too():
    tx = jscale.with_loss_scale(optax.sgd(1.0), jscale.off())
    updates, state = tx.update(grads(1.0), tx.init(PARAMS), PARAMS, apply=jnp.array(False))
    np.testing.assert_array_equal(updates["w"], [0, 0])
    assert (int(state.applied_steps), int(state.skipped_steps)) == (0, 1)


def test_a_veto_says_nothing_against_the_scale():
    state = TX.init(PARAMS)
    for _ in range(2):
        _, state = update(state, 1.0, 1.0, False)
    assert float(jscale.loss_scale(state)) == 16 and int(state.consecutive_skips) == 2


def test_a_start_far_too_high_settles_and_goes_on_after_a_restart():
    tx = jscale.with_loss_scale(optax.sgd(1.0), jscale.dynamic(2.0**32, growth_interval=2))
    update = jax.jit(lambda g, s: tx.update(g, s, PARAMS)[1])
    state = tx.init(PARAMS)
    for _ in range(20):
        state = update(grads(np.inf), state)
    leaves, structure = jax.tree.flatten(state)
    state = jax.tree.unflatten(structure, [jnp.asarray(np.array(x)) for x in leaves])
    for _ in range(2):
        state = update(grads(1.0), state)
    assert float(jscale.loss_scale(state)) == 2.0**13
    assert (int(state.applied_steps), int(state.skipped_steps)) == (2, 20)


def test_gradients_that_are_zero_for_ever_bring_the_scale_to_its_maximum():
    tx = jscale.with_loss_scale(optax.sgd(1.0), jscale.dynamic(4, growth_interval=1, max_scale=16))
    state = tx.init(PARAMS)
    for _ in range(5):
        _, state = tx.update(grads(0.0), state, PARAMS)
    seen = jscale.metrics(state)
    assert (float(seen["grad_scale"]), float(seen["grad_norm"])) == (16, 0)


def test_a_rule_of_ones_own_is_held_to_the_type_of_its_state():
    def rule(update):
        return jscale.ScaleRule(lambda: jscale.StaticState(jnp.float32(8)), update)

    for four in (jnp.float16(4), 4.0, np.float64(4)):
        loose = jscale.ScaleRule(lambda: jscale.StaticState(8), lambda s, o, x=four: type(s)(x))
        tx = jscale.with_loss_scale(optax.sgd(1.0), loose)
        first = tx.init(PARAMS)
        _, state = tx.update(grads(1.0), first, PARAMS)
        for scale in (first.rule.loss_scale, state.rule.loss_scale):
            assert scale.dtype == jnp.float32 and not scale.weak_type
        assert float(jscale.loss_scale(state)) == 4
    for update in (
        lambda s, o: {"loss_scale": 4.0},
        lambda s, o: s._replace(loss_scale=jnp.ones(3)),
    ):
        tx = jscale.with_loss_scale(optax.sgd(1.0), rule(update))
        with pytest.raises(TypeError, match="must return a state like the one it was given"):
            tx.update(grads(1.0), tx.init(PARAMS), PARAMS)


def test_a_rule_may_start_from_python_numbers():
    class Counting(NamedTuple):
        loss_scale: jax.Array
        steps: jax.Array

    rule = jscale.ScaleRule(lambda: Counting(8, 0), lambda s, o: s._replace(steps=s.steps + 1))
    tx = jscale.with_loss_scale(optax.sgd(1.0), rule)
    state = tx.init(PARAMS)
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    carry, _ = jax.lax.scan(
        lambda s, _: (tx.update(grads(1.0), s, PARAMS)[1], None), state, length=3
    )
    assert int(carry.rule.steps) == 3


def test_a_lost_loss_is_remembered_until_another_is_passed():
    _, state = update(TX.init(PARAMS), 1.0, np.nan, True)
    _, state = TX.update(grads(1.0), state, PARAMS)
    assert not state.loss_finite
    _, state = update(state, 1.0, 1.0, True)
    assert state.loss_finite


@pytest.mark.parametrize("loss", [2.0, jnp.float16(2), np.float64(2)])
def test_a_rule_sees_the_loss_in_float32(loss):
    seen = []
    rule = jscale.ScaleRule(jscale.static(8).init, lambda s, o: seen.append(o.loss) or s)
    tx = jscale.with_loss_scale(optax.sgd(1.0), rule)
    tx.update(grads(1.0), tx.init(PARAMS), PARAMS, loss=loss)
    assert float(seen[0]) == 2 and seen[0].dtype == jnp.float32


def test_functions_among_the_updates_are_left_alone():
    tree = {"w": jnp.ones(2), "act": jax.nn.relu}
    tx = jscale.with_loss_scale(optax.identity())
    updates, _ = tx.update(tree, tx.init(tree), tree)
    assert updates["act"] is jax.nn.relu


def test_a_rule_sees_loss_and_unscaled_gradients():
    seen = []
    rule = jscale.ScaleRule(
        lambda: jscale.StaticState(jnp.float32(8)), lambda s, o: seen.append(o) or s
    )
    tx = jscale.with_loss_scale(optax.clip_by_global_norm(0.5), rule)
    tx.update(grads(3.0), tx.init(PARAMS), PARAMS, loss=jnp.float32(2))
    (observed,) = seen
    assert (float(observed.loss), float(observed.amax), float(observed.grad_norm)) == (2, 3, 3)


def test_off_trains_bfloat16_parameters_as_the_bare_optimizer_does():
    inner = optax.sgd(0.1, momentum=0.9)
    tx = jscale.with_loss_scale(inner, jscale.off())
    loss_fn = lambda p: jnp.sum(jnp.square(p["w"] * 3)).astype(jnp.float32)
    bare_params = params = {"w": jnp.asarray([1.0, 0.3, -2.0], jnp.bfloat16)}
    bare, state = inner.init(params), tx.init(params)

    def step(carry, _):
        params, state = carry
        grads = jscale.grad(loss_fn, jscale.loss_scale(state))(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def bare_step(carry, _):
        params, state = carry
        updates, state = inner.update(jax.grad(loss_fn)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.lax.scan(step, (params, state), length=5)
    (bare_params, bare), _ = jax.lax.scan(bare_step, (bare_params, bare), length=5)
    np.testing.assert_array_equal(params["w"], bare_params["w"])
    for ours, theirs in zip(jax.tree.leaves(state.inner), jax.tree.leaves(bare), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_no_buffer_is_held_twice_though_the_optimizer_would():
    shared = optax.GradientTransformation(
        lambda params: [params["w"], z := jnp.zeros(2), z], lambda g, s, p=None: (g, s)
    )
    params = {"w": jnp.ones(2)}
    state = jscale.with_loss_scale(shared).init(params)
    pointers = {x.unsafe_buffer_pointer() for x in (params["w"], *state.inner)}
    assert len(pointers) == 4


def test_a_state_can_be_made_for_abstract_parameters():
    abstract = jax.eval_shape(lambda: {"w": jnp.ones(2, jnp.bfloat16)})
    state = jscale.with_loss_scale(optax.trace(0.9)).init(abstract)
    assert state.inner.trace["w"].dtype == jnp.float32


def test_functions_in_the_state_of_the_optimizer_are_left_alone():
    shared = optax.GradientTransformation(
        lambda params: [jax.nn.relu, jax.nn.relu], lambda g, s, p=None: (g, s)
    )
    assert jscale.with_loss_scale(shared).init(PARAMS).inner == [jax.nn.relu, jax.nn.relu]


def test_a_rule_sees_the_loss_of_all_devices():
    rule = jscale.ScaleRule(
        lambda: jscale.StaticState(1024.0),
        lambda s, o: s._replace(
            loss_scale=jnp.where(o.loss == 1.5, s.loss_scale / 2, s.loss_scale)
        ),
    )
    tx = jscale.with_loss_scale(optax.sgd(1.0), rule, axis_name="d")
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=spec("d"), out_specs=spec("d"), check_vma=False
    )
    def scales(loss):
        _, state = tx.update(grads(1.0), tx.init(PARAMS), PARAMS, loss=loss[0])
        return jscale.loss_scale(state)[None]

    np.testing.assert_array_equal(scales(jnp.arange(4.0)), np.full(4, 512))


def growing_state():
    return optax.GradientTransformation(
        lambda params: {}, lambda updates, state, params=None: (updates, {"seen": jnp.ones(())})
    )


@pytest.mark.parametrize(
    "wrong, words",
    [
        (
            lambda: jscale.with_loss_scale(optax.sgd(1.0), 1024),
            "rule must be a ScaleRule, got 1024",
        ),
        (
            lambda: jscale.with_loss_scale(optax.sgd(1.0), jscale.dynamic),
            "rule must be a ScaleRule",
        ),
        (
            lambda: jscale.with_loss_scale(optax.sgd),
            "inner must be an optax.GradientTransformation",
        ),
        (lambda: TX.update(grads(1.0), optax.sgd(1.0).init(PARAMS), PARAMS), "LossScaleState, got"),
        (lambda: update(TX.init(PARAMS), 1.0, jnp.ones(3), True), r"loss= must be a scalar, got"),
        (lambda: update(TX.init(PARAMS), 1.0, 1.0, 1), r"apply= must be a boolean scalar, got"),
        (lambda: TX.update(grads(1.0), TX.init(PARAMS), PARAMS, loss="x"), "loss= must be a real"),
        (lambda: jscale.with_loss_scale(optax.sgd(1.0), axis_name=3), "axis_name must be"),
        (
            lambda: jscale.with_loss_scale(optax.sgd(1.0)).update(
                grads(1.0),
                jscale.with_loss_scale(optax.sgd(1.0), jscale.off()).init(PARAMS),
                PARAMS,
            ),
            "the state holds a OffState, but this rule keeps a DynamicState: go on with",
        ),
        (
            lambda: jscale.with_loss_scale(
                optax.sgd(1.0), jscale.ScaleRule(lambda: jnp.ones(()), lambda s, o: s)
            ),
            "init must return a NamedTuple of arrays with a field loss_scale, got float32",
        ),
        (
            lambda: jscale.with_loss_scale(
                optax.sgd(1.0),
                jscale.ScaleRule(lambda: jscale.DynamicState(8.0, 0, 1, "never"), lambda s, o: s),
            ),
            "state must hold arrays and numbers only, got 'never'",
        ),
        (lambda: jscale.loss_scale(optax.sgd(1.0).init(PARAMS)), "no loss scale in this state"),
        (lambda: jscale.loss_scale([TX.init(PARAMS)] * 2), "more than one loss scale .* at 0, 1"),
        (
            lambda: (tx := jscale.with_loss_scale(growing_state())).update(
                grads(1.0), tx.init(PARAMS), PARAMS
            ),
            "structure and the types of its state, or a step could not be skipped: unexpected seen",
        ),
    ],
)
def test_a_mistake_is_one_clear_sentence(wrong, words):
    with pytest.raises((TypeError, ValueError), match=words) as error:
        wrong()
    assert len(str(error.value).splitlines()) == 1


def test_making_an_optimizer_starts_no_backend():
    # jax.distributed.initialize must come before the first computation.
    code = "import jscale, optax; jscale.with_loss_scale(optax.adam(1e-3))"
    env = {**os.environ, "JAX_PLATFORMS": "a_platform_that_does_not_exist"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    computing = f"{code}; import jax; jax.numpy.ones(())"
    assert subprocess.run(
        [sys.executable, "-c", computing], env=env, capture_output=True
    ).returncode
