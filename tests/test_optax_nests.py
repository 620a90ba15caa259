"""The wrapper inside and around the transformations of optax."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, raw

import jscale

# optax mixes dtypes in many places: a float to an int32 power, a bool times a float.
pytestmark = pytest.mark.usefixtures("standard_promotion")

INF, NAN = jnp.inf, jnp.nan


def make_params():
    return {
        "b": jnp.array([0.5, -0.0, 2.0]),
        "w": jnp.array([[1.0, -0.0, 0.25], [-3.0, 0.0, 8.0]]),
    }


def make_grads(value=1.0):
    return {"b": jnp.array([0.5, 1.0, -2.0]), "w": jnp.full((2, 3), 0.25).at[0, 1].set(value)}


def stepper(tx):
    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def mask(params):
    return {name: name == "w" for name in params}


def schedule(count):
    return 0.1 / (1.0 + count)


INNER = {
    "adam": lambda: optax.adam(0.1),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "lion": lambda: optax.lion(0.1),
    "lamb": lambda: optax.lamb(0.1),
    "muon": lambda: optax.contrib.muon(0.1),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "clip_decay_schedule": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.1),
        optax.scale_by_schedule(schedule),
        optax.scale(-1.0),
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=schedule),
    "masked": lambda: optax.masked(optax.adam(0.1), mask),
    "partition": lambda: optax.partition(
        {"w": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.9)}, {"w": "w", "b": "b"}
    ),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "noise": lambda: optax.chain(optax.add_noise(0.01, 0.55, 0), optax.sgd(0.1)),
}
every_inner = pytest.mark.parametrize("name", INNER)


@every_inner
def test_a_skipped_step_never_happened(name):
    # Good and bad steps give what the good ones give alone; one compiled program does both runs.
    tx = jscale.with_loss_scale(INNER[name](), jscale.static(8))
    step = stepper(tx)
    params, state = want, want_state = make_params(), tx.init(make_params())
    for value in (NAN, 1.0, INF, -INF, 3.0):
        params, state = step(params, state, make_grads(value))
        if np.isfinite(value):
            want, want_state = step(want, want_state, make_grads(value))
        assert bool(state.finite) == np.isfinite(value)
        assert_same_bits(params, want)
        assert_same_bits(state.inner, want_state.inner)
    assert int(state.applied_steps) == 2 and int(state.skipped_steps) == 3
    assert jscale.all_finite((params, state))


def avals(tree):
    describe = lambda x: (x.shape, x.dtype, x.weak_type)
    return jax.tree.map(lambda x: describe(jax.typeof(x) if hasattr(x, "aval") else x), tree)


@every_inner
def test_state_out_has_the_types_of_state_in(name):
    tx = jscale.with_loss_scale(INNER[name]())
    params = make_params()
    state = tx.init(params)
    _, out = jax.eval_shape(stepper(tx), params, state, make_grads())
    assert jax.tree.structure(out) == jax.tree.structure(state)
    assert avals(out) == avals(state)


def test_a_weak_type_in_the_inner_state_does_not_survive_init():
    weak = optax.GradientTransformation(
        lambda params: jnp.asarray(1.0) * 1,
        lambda updates, state, params=None: (updates, 2 * state),
    )
    assert weak.init(None).weak_type
    tx = jscale.with_loss_scale(weak)
    state = tx.init(make_params())
    _, out = jax.eval_shape(tx.update, make_grads(), state, make_params())
    assert not state.inner.weak_type
    assert avals(out) == avals(state)


def test_a_python_number_in_the_inner_state_becomes_an_array():
    counting = optax.GradientTransformation(
        lambda params: {"rate": 0.5, "count": 0},
        lambda updates, state, params=None: (updates, {**state, "count": state["count"] + 1}),
    )
    tx = jscale.with_loss_scale(counting)
    state = tx.init(make_params())
    _, out = jax.eval_shape(tx.update, make_grads(), state, make_params())
    assert avals(out) == avals(state)


@every_inner
def test_no_buffer_is_held_twice(name):
    params = make_params()
    state = jscale.with_loss_scale(INNER[name]()).init(params)
    leaves = [x for x in jax.tree.leaves((params, state)) if x.size]
    keys = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    pointers = [x.unsafe_buffer_pointer() for x in leaves if not keys(x)]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["adam", "sgd", "adafactor", "multi_steps", "inject_hyperparams"])
def test_off_is_bitwise_the_bare_optimizer(name, dtype):
    cast = functools.partial(jax.tree.map, lambda x: x.astype(dtype))
    inner = INNER[name]()
    tx = jscale.with_loss_scale(inner, jscale.off())
    params = bare_params = cast(make_params())
    state, bare = tx.init(params), inner.init(params)
    step, bare_step = stepper(tx), stepper(inner)
    for value in (1.0, -2.0, INF, 1.0):
        params, state = step(params, state, cast(make_grads(value)))
        bare_params, bare = bare_step(bare_params, bare, cast(make_grads(value)))
        assert_same_bits(params, bare_params)
        assert_same_bits(state.inner, bare)
    assert "grad_norm" not in jscale.metrics(state) and jscale.metrics(state)["grad_scale"] == 1
    assert float(jscale.loss_scale(state)) == 1.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("w", [2.0, np.float64(2.0), np.full(2, 2.0)], ids=type)
def test_off_takes_what_the_bare_optimizer_takes(w):
    tx, bare = jscale.with_loss_scale(optax.sgd(0.1), jscale.off()), optax.sgd(0.1)
    grads = {"w": jnp.ones(np.shape(w))}
    got, _ = tx.update(grads, tx.init({"w": w}), {"w": w})
    assert_same_bits(got, bare.update(grads, bare.init({"w": w}), {"w": w})[0])


def test_numpy_numbers_in_the_state_of_the_optimizer_are_as_under_jit():
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    tx, w = jscale.with_loss_scale(inner), jnp.ones(2)
    state = optax.tree.set(tx.init(w), learning_rate=np.float64(0.05))
    assert_same_bits(tx.update(w, state, w)[0], jax.jit(tx.update)(w, state, w)[0])


def test_off_gives_narrow_gradients_of_wide_parameters_on_as_they_are():
    tx, bare = jscale.with_loss_scale(optax.sgd(0.1), jscale.off()), optax.sgd(0.1)
    grads = {"w": jnp.array([0.1, 3.0], jnp.bfloat16)}
    params = {"w": jnp.ones(2)}
    got, _ = tx.update(grads, tx.init(params), params)
    assert_same_bits(got, bare.update(grads, bare.init(params), params)[0])


def test_off_keeps_a_weak_type_of_the_inner_state():
    weak = optax.GradientTransformation(
        lambda params: jnp.asarray(0.5) * 1,
        lambda updates, state, params=None: (jax.tree.map(lambda u: u * state, updates), state),
    )
    tx = jscale.with_loss_scale(weak, jscale.off())
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    updates, state = tx.update(params, tx.init(params), params)
    assert state.inner.weak_type and updates["w"].dtype == jnp.bfloat16


# Around the wrapper


def wrapped():
    return jscale.with_loss_scale(optax.adam(0.1), jscale.dynamic(8))


AROUND = {
    "chain": lambda tx: optax.chain(optax.identity(), tx),
    "partition": lambda tx: optax.partition(
        {"scaled": tx, "plain": optax.sgd(0.1)}, {"w": "scaled", "b": "plain"}
    ),
    "multi_transform": lambda tx: optax.multi_transform(
        {"scaled": tx, "frozen": optax.set_to_zero()}, lambda p: {"w": "scaled", "b": "frozen"}
    ),
    "masked": lambda tx: optax.masked(tx, mask),
    "inject_hyperparams": lambda _: optax.inject_hyperparams(
        lambda learning_rate: jscale.with_loss_scale(optax.adam(learning_rate), jscale.dynamic(8))
    )(learning_rate=0.1),
}


@pytest.mark.parametrize("name", AROUND)
def test_inside_another_transformation(name):
    tx = AROUND[name](wrapped())
    step = stepper(tx)
    params, state = make_params(), tx.init(make_params())
    assert float(jscale.loss_scale(state)) == 8.0
    params, state = step(params, state, make_grads())
    # What the wrapper governs here steps as adam does.
    adam = optax.adam(0.1)
    want, _ = stepper(adam)(make_params(), adam.init(make_params()), make_grads())
    np.testing.assert_array_equal(params["w"], want["w"])

    after, state = step(params, state, make_grads(INF))
    assert_same_bits(after["w"], params["w"])
    assert float(jscale.loss_scale(state)) == 4.0
    assert not jscale.metrics(state)["finite"]
    assert step(after, state, make_grads())[0]["w"][0, 1] != params["w"][0, 1]


def test_multi_steps_around_the_wrapper_is_multi_steps_around_the_optimizer():
    multi = optax.MultiSteps(jscale.with_loss_scale(optax.sgd(0.5), jscale.dynamic(8)), 2)
    params, state = make_params(), multi.init(make_params())
    plain = optax.MultiSteps(optax.sgd(0.5), 2)
    want, plain_state = make_params(), plain.init(make_params())
    step, plain_step = stepper(multi), stepper(plain)
    for value in (1.0, 3.0, 5.0, 7.0):
        params, state = step(params, state, make_grads(value))
        want, plain_state = plain_step(want, plain_state, make_grads(value))
        jax.tree.map(np.testing.assert_array_equal, params, want)
    assert int(jscale.metrics(state)["applied_steps"]) == 2
    assert float(jscale.loss_scale(state)) == 8.0


@pytest.mark.parametrize(
    "inner",
    [
        wrapped,
        lambda: optax.chain(optax.clip(1.0), wrapped()),
        lambda: optax.MultiSteps(wrapped(), 2),
        lambda: optax.masked(wrapped(), mask),
    ],
    ids=["bare", "chain", "multi_steps", "masked"],
)
def test_a_wrapper_inside_a_wrapper_raises(inner):
    with pytest.raises(ValueError, match="has a loss scale already"):
        jscale.with_loss_scale(inner()).init(make_params())


# Inside the wrapper


def test_accumulation_drops_the_bad_micro_batch_and_lengthens_its_window():
    tx = jscale.with_loss_scale(optax.MultiSteps(optax.sgd(1.0), 4), jscale.dynamic(8))
    step = stepper(tx)
    params = {"w": jnp.zeros(())}
    state = tx.init(params)
    trail = []
    for g in (1.0, INF, 1.0, 1.0, 1.0, 1.0, NAN, 1.0, 1.0, 1.0):
        params, state = step(params, state, {"w": jnp.asarray(g)})
        assert jscale.all_finite(state.inner)
        trail.append(float(params["w"]))
    assert trail == [0, 0, 0, 0, -1, -1, -1, -1, -1, -2]
    assert int(state.skipped_steps) == 2 and int(state.inner.gradient_step) == 2
    assert float(jscale.loss_scale(state)) == 2.0


class Seen(NamedTuple):
    loss: jax.Array
    apply: jax.Array
    temperature: jax.Array


def recorder():
    """Keeps the extra arguments that reached it."""

    def update(updates, state, params=None, *, loss, apply, temperature):
        del state, params
        return updates, Seen(loss, apply, temperature)

    start = Seen(jnp.zeros(()), jnp.array(False), jnp.zeros(()))
    return optax.GradientTransformationExtraArgs(lambda params: start, update)


@pytest.mark.parametrize(
    "inner",
    [
        recorder,
        lambda: optax.chain(optax.clip(1.0), recorder()),
        lambda: optax.MultiSteps(recorder(), 1),
    ],
    ids=["bare", "chain", "multi_steps"],
)
def test_extra_arguments_reach_the_inner_optimizer(inner):
    tx = jscale.with_loss_scale(inner())
    extra = {"loss": jnp.float32(3), "apply": jnp.array(True), "temperature": jnp.float32(5)}
    _, state = jax.jit(tx.update)(make_grads(), tx.init(make_params()), make_params(), **extra)
    for name, value in extra.items():
        np.testing.assert_array_equal(optax.tree.get(state.inner, name), value)


def test_extra_arguments_unknown_to_the_inner_optimizer_are_dropped():
    tx = jscale.with_loss_scale(optax.sgd(0.5))
    grads = make_grads()
    updates, _ = tx.update(grads, tx.init(grads), grads, loss=jnp.float32(3), value=1)
    np.testing.assert_array_equal(updates["b"], -0.5 * grads["b"])


def test_an_optimizer_that_takes_no_extra_arguments_is_given_none():
    plain = optax.GradientTransformationExtraArgs(
        lambda params: (), lambda updates, state, params=None: (updates, state)
    )
    tx = jscale.with_loss_scale(plain)
    updates, _ = tx.update(make_grads(), tx.init(make_params()), make_params())
    assert_same_bits(updates, make_grads())


def test_lookahead():
    tx = jscale.with_loss_scale(
        optax.lookahead(optax.sgd(1.0), sync_period=2, slow_step_size=0.5), jscale.dynamic(8)
    )
    params = optax.LookaheadParams.init_synced({"w": jnp.zeros(2)})
    state = tx.init(params)
    step = stepper(tx)
    fast, slow = [], []
    for g in (1.0, INF, 1.0, NAN, 1.0):
        before = params
        params, state = step(params, state, {"w": jnp.array([1.0, g])})
        if not np.isfinite(g):
            assert_same_bits(params, before)
        fast.append(float(params.fast["w"][1]))
        slow.append(float(params.slow["w"][1]))
    assert fast == [-1, -1, -1, -1, -2]
    assert slow == [0, 0, -1, -1, -1]


def test_apply_if_finite_inside_never_gives_in():
    # Alone it applies the NaN after its third error.
    tx = jscale.with_loss_scale(optax.apply_if_finite(optax.sgd(1.0), 3))
    step = stepper(tx)
    params = {"w": jnp.ones(2)}
    state = tx.init(params)
    for _ in range(10):
        params, state = step(params, state, {"w": jnp.array([1.0, NAN])})
    np.testing.assert_array_equal(params["w"], [1.0, 1.0])
    assert int(state.inner.total_notfinite) == 0 and int(state.consecutive_skips) == 10


def test_the_inner_optimizer_sees_parameters_in_float32():
    decay = optax.GradientTransformation(lambda params: (), lambda u, s, params: (params, s))
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    tx = jscale.with_loss_scale(decay)
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["w"].dtype == jnp.float32


def test_float16_gradients_do_not_meet_float32_moments():
    tx = jscale.with_loss_scale(optax.apply_if_finite(optax.adam(0.1), 3))
    params = {"w": jnp.ones(2)}
    updates, state = tx.update({"w": jnp.float16([1, 2])}, tx.init(params), params)
    assert updates["w"].dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(state.inner)} == {
        jnp.dtype(t) for t in ("float32", "int32", "bool")
    }


@pytest.mark.parametrize(
    "clip",
    [
        optax.clip(1.0),
        optax.clip_by_global_norm(1.0),
        optax.zero_nans(),
        optax.keep_params_nonnegative(),
    ],
    ids=["clip", "global_norm", "zero_nans", "nonnegative"],
)
@pytest.mark.parametrize("value", [INF, NAN])
def test_nothing_inside_hides_an_overflow(clip, value):
    tx = jscale.with_loss_scale(optax.chain(clip, optax.sgd(1.0)), jscale.dynamic(8))
    params = make_params()
    params_after, state = stepper(tx)(params, tx.init(params), make_grads(value))
    assert_same_bits(params_after, params)
    assert float(jscale.loss_scale(state)) == 4.0
    assert not np.isfinite(state.grad_norm)


@pytest.mark.parametrize("scale", [2.0**-5, 1.0, 2.0**10, 2.0**16])
def test_clipping_sees_unscaled_gradients(scale):
    target = jnp.array([0.3, 0.4])
    _, grads = jscale.value_and_grad(lambda p: jnp.sum(p * target), scale)(jnp.ones(2))
    tx = jscale.with_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    updates, state = tx.update(grads, tx.init(grads), grads)
    np.testing.assert_array_equal(updates, -target)
    np.testing.assert_array_equal(state.grad_norm, jnp.linalg.norm(target))


def test_clipping_takes_its_norm_in_float32():
    # In float16 the norm is inf, and the clipped update 0.
    grads = {"w": jnp.full(4, 300, jnp.float16)}
    tx = jscale.with_loss_scale(optax.clip_by_global_norm(1.0))
    updates, state = tx.update(grads, tx.init({"w": jnp.ones(4)}))
    np.testing.assert_array_equal(updates["w"], jnp.full(4, 0.5))
    assert float(state.grad_norm) == 600.0


def test_moments_decay_schedule_and_counts_stand_still_on_a_skip():
    tx = jscale.with_loss_scale(
        optax.chain(
            optax.scale_by_adam(),
            optax.add_decayed_weights(0.1),
            optax.scale_by_schedule(lambda count: -0.1 / (1.0 + count)),
        )
    )
    step = stepper(tx)
    params = {"w": jnp.ones(2)}
    state = tx.init(params)
    for _ in range(3):
        params, state = step(params, state, {"w": jnp.full(2, NAN)})
    np.testing.assert_array_equal(params["w"], [1.0, 1.0])
    adam, _, schedule = state.inner
    assert int(adam.count) == int(schedule.count) == 0
    np.testing.assert_array_equal(adam.nu["w"], [0.0, 0.0])


@pytest.mark.parametrize("rule", [jscale.dynamic(), jscale.off()], ids=["dynamic", "off"])
def test_moments_and_counts_stand_still_on_a_veto(rule):
    tx = jscale.with_loss_scale(optax.adam(0.1), rule)
    params = make_params()
    state = tx.init(params)
    for apply in (True, False):
        before = state
        updates, state = tx.update(make_grads(), before, params, apply=jnp.array(apply))
    assert_same_bits(state.inner, before.inner)
    assert_same_bits(optax.apply_updates(params, updates), params)


def test_negative_zero_keeps_its_sign():
    zeros = {
        "f32": jnp.array([-0.0, 0.0]),
        "bf16": jnp.array([-0.0, 0.0], jnp.bfloat16),
        "c64": jnp.array([complex(-0.0, -0.0), complex(0.0, -0.0), complex(-0.0, 0.0)]),
    }
    tx = jscale.with_loss_scale(optax.sgd(0.1, momentum=0.9))
    params, _ = stepper(tx)(zeros, tx.init(zeros), jax.tree.map(lambda x: x + NAN, zeros))
    assert_same_bits(params, zeros)


def test_four_bits_beside_the_parameters():
    params = {"w": jnp.ones(2), "q": jnp.ones(2, jnp.int4)}
    grads = {"w": jnp.ones(2), "q": jnp.zeros(2, jnp.int4)}
    parts = {"t": optax.sgd(0.5), "f": optax.set_to_zero()}
    tx = jscale.with_loss_scale(optax.partition(parts, {"w": "t", "q": "f"}))
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["q"].dtype == jnp.int4
    np.testing.assert_array_equal(updates["w"], [-0.5, -0.5])


# Trees and dtypes


def test_complex_gradients_keep_their_imaginary_part():
    w = jnp.array([1 + 2j, -3 + 0.5j])
    loss = lambda w: jnp.sum(jnp.abs(w) ** 2)
    want = jax.grad(loss)(w)
    _, grads = jscale.value_and_grad(loss, 2.0**10)(w)
    assert grads.dtype == jnp.complex64
    np.testing.assert_array_equal(grads, want)
    tx = jscale.with_loss_scale(optax.adam(0.1))
    updates, state = tx.update(grads, tx.init(w), w)
    assert updates.dtype == jnp.complex64
    np.testing.assert_allclose(state.grad_norm, np.linalg.norm(want), rtol=1e-6)


@pytest.mark.parametrize("value", [complex(INF, 0), complex(0, INF), complex(0, NAN)])
def test_either_part_of_a_complex_gradient_overflows(value):
    w = jnp.array([1 + 2j, -0.0 - 0.0j])
    tx = jscale.with_loss_scale(optax.adam(0.1))
    params, state = stepper(tx)(w, tx.init(w), jnp.array([1j, value]))
    assert_same_bits(params, w)
    assert not state.finite and not jscale.all_finite(jnp.array([value]))


def other_leaves():
    return {
        "bool": jnp.array([True, False]),
        "empty": jnp.zeros((0, 3), jnp.int32),
        "int": jnp.arange(2),
        "int8": jnp.int8([-3, 3]),
        "key": jax.random.key(0),
        "none": None,
        "raw_key": jax.random.PRNGKey(0),
        "tree": {},
    }


def test_leaves_without_a_gradient_pass_through():
    other = {**other_leaves(), "float0": np.zeros((2,), jax.dtypes.float0)}
    assert jscale.all_finite(other) and jscale.all_finite({}) and jscale.all_finite(None)
    for x, y in zip(
        jax.tree.leaves(jscale.unscale(other, 1024.0)), jax.tree.leaves(other), strict=True
    ):
        assert x is y

    tx = jscale.with_loss_scale(optax.identity())
    params = {**other, "w": jnp.ones(2), "nothing": jnp.zeros((0,))}
    grads = {**other, "w": jnp.array([3.0, 4.0]), "nothing": jnp.zeros((0,))}
    updates, state = tx.update(grads, tx.init(params), params)
    assert_same_bits(updates, grads)
    assert float(state.grad_norm) == 5.0
    updates, state = tx.update({**grads, "w": jnp.array([INF, 1.0])}, state, params)
    assert not state.finite
    assert raw(updates["w"]) == raw(jnp.array([-0.0, -0.0]))
    np.testing.assert_array_equal(updates["int"], [0, 0])
    assert updates["none"] is None and updates["key"] is other["key"]


@pytest.mark.parametrize("tree", [{}, {"a": None}, {"n": jnp.arange(2)}, {"e": jnp.zeros((0, 2))}])
def test_a_tree_without_gradients_is_finite(tree):
    tx = jscale.with_loss_scale(optax.identity(), jscale.dynamic(8, growth_interval=1))
    _, state = jax.jit(tx.update)(tree, tx.init(tree), tree)
    assert state.finite and float(state.grad_norm) == 0.0
    assert float(jscale.loss_scale(state)) == 16.0


def test_gradients_of_integers_are_float0_and_pass_through():
    params = {"w": jnp.ones(2), "n": jnp.arange(2)}
    loss = lambda p: jnp.sum(p["w"] * p["n"].astype(jnp.float32))
    allow = functools.partial(jax.value_and_grad, allow_int=True)
    _, grads = jscale.value_and_grad(loss, 8.0, transform=allow)(params)
    assert grads["n"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(grads["w"], [0.0, 1.0])
    tx = jscale.with_loss_scale(optax.masked(optax.adam(0.1), {"w": True, "n": False}))
    updates, state = tx.update(grads, tx.init(params), params)
    assert state.finite and updates["n"] is grads["n"]


def test_parameters_without_a_gradient_may_be_none():
    tx = jscale.with_loss_scale(optax.identity())
    params = make_params()
    updates, state = tx.update({"b": None, "w": jnp.full((2, 3), INF)}, tx.init(params), params)
    assert updates["b"] is None and not state.finite


def test_gradients_of_single_examples_have_an_axis_in_front():
    private = optax.contrib.differentially_private_aggregate(1.0, 0.0, jax.random.key(0))
    tx = jscale.with_loss_scale(private)
    params = {"w": jnp.ones(2)}
    grads = {"w": jnp.array([[3.0, 4.0], [0.0, 1.0]])}
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], [0.3, 0.9], rtol=1e-6)


def test_float16_parameters_are_warned_about_and_seen_in_float32():
    params = {"enc": {"w": jnp.full(2, 300, jnp.float16)}, "b": jnp.ones(2)}
    tx = jscale.with_loss_scale(optax.adam(0.1))
    with pytest.warns(UserWarning, match=r"float16: enc/w\. ") as warned:
        state = tx.init(params)
    assert warned[0].filename == __file__
    assert {x.dtype for x in jax.tree.leaves(state.inner)} == {
        jnp.dtype("float32"),
        jnp.dtype("int32"),
    }
    # In float16 nu of 300 is inf, and eps of 1e-8 is 0, so that a zero gradient gives 0 / 0.
    grads = {"enc": {"w": jnp.float16([300, 0])}, "b": jnp.ones(2)}
    updates, state = tx.update(grads, state, params)
    assert state.finite and jscale.all_finite((updates, state))
    new = optax.apply_updates(params, updates)
    assert new["enc"]["w"].dtype == jnp.float16
    assert float(updates["enc"]["w"][1]) == 0.0


@pytest.mark.parametrize(
    "grads, message",
    [
        ({"a": {"w": jnp.ones(2)}}, "missing a/b"),
        ({"a": {"w": jnp.ones(2), "b": jnp.ones(1), "c": jnp.ones(1)}}, "unexpected a/c"),
        (
            {"a": {"w": jnp.ones(3), "b": jnp.ones(1)}},
            r"at a/w float32\[3\], expected float32\[2\]",
        ),
        (jnp.ones(2), "unexpected <root>"),
    ],
)
def test_gradients_that_do_not_match_raise_with_the_path(grads, message):
    params = {"a": {"w": jnp.ones(2), "b": jnp.ones(1)}}
    tx = jscale.with_loss_scale(optax.sgd(0.1))
    with pytest.raises(ValueError, match=message):
        tx.update(grads, tx.init(params), params)


def test_gradients_that_do_not_match_the_fast_parameters_of_lookahead_raise():
    tx = jscale.with_loss_scale(optax.lookahead(optax.sgd(1.0), 2, 0.5))
    params = optax.LookaheadParams.init_synced({"w": jnp.zeros(2)})
    with pytest.raises(ValueError, match="unexpected v; missing w"):
        tx.update({"v": jnp.zeros(2)}, tx.init(params), params)


# Transformations of JAX


def dyadic():
    """An optimizer without rounding on these numbers, so that differently compiled runs agree."""
    return optax.sgd(0.5, momentum=0.5)


def test_vmap_over_seeds():
    tx = jscale.with_loss_scale(dyadic(), jscale.dynamic(8, growth_interval=2))
    step = stepper(tx)
    values = jnp.array([[1.0, 2.0, 3.0], [1.0, INF, 3.0], [NAN, NAN, NAN], [4.0, 5.0, INF]])
    stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
    params = stack([make_params()] * 4)
    state = jax.vmap(tx.init)(params)
    for t in range(3):
        grads = stack([make_grads(v) for v in values[:, t]])
        params, state = jax.vmap(step)(params, state, grads)
    np.testing.assert_array_equal(jscale.loss_scale(state), [16.0, 4.0, 1.0, 8.0])
    for seed, row in enumerate(values):
        alone, alone_state = make_params(), tx.init(make_params())
        for value in row:
            alone, alone_state = step(alone, alone_state, make_grads(value))
        assert_same_bits(jax.tree.map(lambda x: x[seed], (params, state)), (alone, alone_state))


def test_scan_over_steps():
    tx = jscale.with_loss_scale(dyadic(), jscale.dynamic(8, growth_interval=2))
    step = stepper(tx)
    values = jnp.array([1.0, INF, 2.0, 3.0, NAN, 1.0])
    start = make_params(), tx.init(make_params())

    def body(carry, value):
        params, state = step(*carry, make_grads(value))
        return (params, state), jscale.metrics(state)["grad_scale"]

    got, scales = jax.lax.scan(body, start, values)
    want = start
    for value in values:
        want = step(*want, make_grads(value))
    np.testing.assert_array_equal(scales, [8, 4, 4, 8, 4, 4])
    assert_same_bits(got, want)


# Several losses, several optimizers


def test_two_optimizers_adjust_one_scale_once():
    # The scale has a life of its own: one rule state beside two bare optimizers.
    rule = jscale.dynamic(8, growth_interval=2)
    optimizers = {"gen": optax.adam(0.1), "disc": optax.sgd(0.1, momentum=0.9)}

    @jax.jit
    def step(params, states, rule_state, x):
        scale = rule_state.loss_scale
        grads = {
            name: jscale.grad(lambda p: jnp.sum(p * x[name]), scale)(params[name])
            for name in optimizers
        }
        finite = jscale.all_finite(grads)
        new_params, new_states = {}, {}
        for name, tx in optimizers.items():
            updates, new_states[name] = tx.update(grads[name], states[name], params[name])
            new_params[name] = optax.apply_updates(params[name], updates)
        params, states = jscale.select(finite, (new_params, new_states), (params, states))
        return params, states, rule.update(rule_state, jscale.Observation(finite=finite))

    params = {"gen": jnp.ones(2), "disc": jnp.ones(3)}
    states = {name: tx.init(params[name]) for name, tx in optimizers.items()}
    carry = params, states, rule.init()
    good = {"gen": jnp.ones(2), "disc": jnp.ones(3)}
    scales = []
    for x in (good, good, good):
        carry = step(*carry, x)
        scales.append(float(carry[2].loss_scale))
    before = carry
    carry = step(*carry, {**good, "disc": jnp.full(3, INF)})
    assert scales == [8.0, 16.0, 16.0]
    assert float(carry[2].loss_scale) == 8.0
    assert_same_bits(carry[:2], before[:2])


def test_off_narrows_what_was_widened_beside_none_and_in_lookahead():
    half = {"w": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(1, jnp.bfloat16)}
    wide = {"w": jnp.array([0.1, 3.0]), "b": None}
    narrow = {"w": wide["w"].astype(jnp.bfloat16), "b": None}
    plain = optax.sgd(0.1)
    ahead = optax.lookahead(optax.sgd(0.1), 2, 0.5)
    synced = optax.LookaheadParams.init_synced({"w": half["w"]})
    for inner, params, given, want in (
        (plain, half, wide, narrow),
        (ahead, synced, {"w": wide["w"]}, {"w": narrow["w"]}),
    ):
        tx = jscale.with_loss_scale(inner, jscale.off())
        got, _ = tx.update(given, tx.init(params), params)
        bare, _ = inner.update(want, inner.init(params), params)
        assert_same_bits(got, bare)
