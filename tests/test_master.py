"""Float32 copies of half-precision parameters."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers import assert_same_bits, bits
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jscale

INF = jnp.inf
HALF = [jnp.float16, jnp.bfloat16]
each_half = pytest.mark.parametrize("dtype", HALF)

# optax.apply_updates adds float32 to float16.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def params(dtype=jnp.float16):
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "w": jax.random.normal(keys[0], (64,)).astype(dtype),
        "b": jax.random.normal(keys[1], (3,)),
        "none": None,
    }


def grads(step):
    draw = lambda shape, i: jax.random.normal(jax.random.key(7 * step + i), shape)
    return {"w": draw((64,), 0), "b": draw((3,), 1), "none": None}


def bad(step):
    return grads(step) | {"w": grads(step)["w"].at[5].set(INF)}


def adamw():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def scaled(rule=None, **options):
    return jscale.with_master_weights(jscale.with_loss_scale(adamw(), rule, **options))


def train(tx, p, gradients, state=None):
    state = tx.init(p) if state is None else state

    @jax.jit
    def step(p, state, g):
        updates, state = tx.update(g, state, p)
        return optax.apply_updates(p, updates), state

    for g in gradients:
        p, state = step(p, state, g)
    return p, state


def in_float32(p, state):
    """As the docstring has it."""
    return jax.tree.map(lambda p, m: p if m is None else m, p, state.master)


def assert_rounded(p, state):
    assert_same_bits(p, jax.tree.map(lambda p, x: x.astype(p.dtype), p, in_float32(p, state)))


def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


# Training


@each_half
@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: tx,
        jscale.with_loss_scale,
        lambda tx: jscale.with_loss_scale(tx, jscale.off()),
        lambda tx: jscale.with_loss_scale(tx, {"w": jscale.dynamic(), "b": jscale.dynamic()}),
        lambda tx: jscale.with_loss_scale(optax.MultiSteps(tx, 2)),
    ],
    ids=["bare", "scaled", "off", "groups", "MultiSteps"],
)
def test_it_trains_as_float32_does_and_the_model_has_it_rounded(dtype, wrap):
    inner = wrap(adamw())
    gradients = [grads(i) for i in range(30)]
    p, state = train(jscale.with_master_weights(inner), params(dtype), gradients)
    alone, inner_state = train(inner, wide(params(dtype)), gradients)
    assert p["w"].dtype == dtype
    assert_rounded(p, state)
    full = in_float32(p, state)
    # XLA may contract p + u in one program and not in the other: a step is 1e-3, its rounding 1e-7.
    for got, want in zip(jax.tree.leaves(full), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    assert jax.tree.structure(state.inner) == jax.tree.structure(inner_state)
    assert jnp.all(full["w"] != wide(params(dtype))["w"])


def test_without_copies_small_steps_are_lost():
    gradients = [jnp.ones(1)] * 100
    lost, _ = train(optax.sgd(1e-4), jnp.ones(1, jnp.float16), gradients)
    kept, _ = train(
        jscale.with_master_weights(optax.sgd(1e-4)), jnp.ones(1, jnp.float16), gradients
    )
    assert float(lost[0]) == 1 and float(kept[0]) == np.float16(0.99)


@pytest.mark.parametrize("largest", [2.0**-11, -(2.0**-12)])
def test_a_float16_gain_of_one_is_moved_by_no_step_up_to(largest):
    """So that Adam with a learning rate of 2.4e-4 freezes a LayerNorm."""
    apply = lambda u: optax.apply_updates(jnp.ones((), jnp.float16), jnp.float32(u))
    assert apply(largest) == 1 and apply(1.001 * largest) != 1


def test_what_is_float32_has_no_copy_and_gets_the_updates_of_inner():
    p = wide(params()) | {"n": jnp.int32(7)}
    g = grads(0) | {"n": jnp.int32(0)}
    tx = jscale.with_master_weights(optax.sgd(0.1))
    updates, state = tx.update(g, tx.init(p), p)
    assert not jax.tree.leaves(state.master)
    assert_same_bits(updates, optax.sgd(0.1).update(g, optax.sgd(0.1).init(p), p)[0])
    assert train(tx, {"n": None}, [{"n": None}])[0] == {"n": None}


def test_a_parameter_without_a_gradient_keeps_its_copy():
    tx, p = jscale.with_master_weights(optax.sgd(1.0)), params()
    updates, state = tx.update(grads(0) | {"w": None}, tx.init(p), p)
    assert updates["w"] is None and jnp.any(updates["b"] != 0)
    assert_same_bits(state.master, tx.init(p).master)


# Rounding


def finite_patterns(dtype):
    """All finite numbers of `dtype`, but those that a CPU takes for zero in float32."""
    x = np.arange(2**16, dtype=np.uint16).view(np.dtype(dtype))
    magnitude = np.abs(x.astype(np.float32))
    return x[np.isfinite(magnitude) & ((magnitude == 0) | (magnitude >= 2.0**-126))]


given_updates = pytest.mark.parametrize("relative", [True, False], ids=["relative", "absolute"])


identity = jscale.with_master_weights(optax.identity())


@jax.jit
def add(p, state, u):
    updates, state = identity.update(u, state, p)
    return optax.apply_updates(p, updates), state


@each_half
@given_updates
@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    u=st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False),
        st.integers(-30, 20).map(lambda e: -1.0 - 2.0**e),
        st.integers(-30, 20).map(lambda e: 2.0**e - 1),
    )
)
def test_every_half_precision_number_is_its_copy_rounded(dtype, relative, u):
    before = finite_patterns(dtype)
    old = before.astype(np.float32)
    with np.errstate(over="ignore"):
        u = old * np.float32(u) if relative else np.full_like(old, u)
        # Neither by what a CPU takes for zero, nor by what leaves float32 when rounded up.
        u = np.where((np.abs(u) >= 2.0**-100) & (np.abs(u) < 2.0**127), u, np.float32(0))
        copy = old + u
        want = copy.astype(before.dtype).astype(np.float32)
    p = jnp.asarray(before)
    p, state = add(p, identity.init(p), jnp.asarray(u))
    got = np.asarray(p).astype(np.float32)
    np.testing.assert_array_equal(state.master, copy)
    # The exception that the docstring makes: what is left of a weight, and what it may miss.
    falls = np.abs(copy) < 2.0**-13 * np.abs(old)
    np.testing.assert_array_equal(got[~falls], want[~falls])
    assert np.all(np.abs(got[falls] - want[falls]) <= 2.0**-24 * np.abs(old[falls]))
    # The next step puts it right.
    p, _ = add(p, state, jnp.zeros_like(state.master))
    np.testing.assert_array_equal(np.asarray(p).astype(np.float32), want)


def test_a_copy_beyond_float16_is_inf_in_the_model_and_check_says_that_all_is_lost():
    tx = jscale.with_master_weights(jscale.with_loss_scale(optax.sgd(1.0), jscale.dynamic(8)))
    p = jnp.full(2, 64992.0, jnp.float16)
    p, state = train(tx, p, [jnp.array([-1000.0, 0.0])])
    assert_rounded(p, state)
    assert p[0] == INF and state.master[0] == 65992 and state.inner.finite
    p, state = train(tx, p, [jnp.array([jnp.nan, 1.0])] * 60, state)
    np.testing.assert_array_equal(p, jnp.array([INF, 64992], jnp.float16))
    with pytest.raises(FloatingPointError, match="60 skipped steps in a row"):
        jscale.check(state)


# A skip


RULES = {"w": jscale.dynamic(8), "b": jscale.dynamic(8)}


@each_half
@pytest.mark.parametrize(
    "rule, options",
    [(None, {}), (RULES, {}), (RULES, {"skip": "own"})],
    ids=["one", "any", "own"],
)
def test_a_skip_leaves_both_and_nobody_is_warned(dtype, rule, options):
    tx = scaled(rule, **options)
    odd = jnp.array([-0.0, 0.0, 65504, -INF, jnp.finfo(dtype).tiny, 3 * 2.0**-24]).astype(dtype)
    start = params(dtype) | {"b": params()["b"].at[0].set(-0.0)}
    start["w"] = jnp.concatenate([start["w"][:58], odd])
    state = tx.init(start)  # warnings are errors
    p, after = train(tx, start, [bad(0)], state)
    one = "own" in options.values()
    keep = (lambda tree: tree["w"]) if one else (lambda tree: tree)
    kept = lambda p, state: bits((keep(p), keep(state.master), keep(state.inner.inner)))
    assert kept(p, after) == kept(start, state)
    assert bits(p["b"]) != bits(start["b"]) if one else not after.inner.finite


def test_a_veto_and_the_loss_reach_the_scaler():
    tx = scaled()
    start, state = params(), tx.init(params())
    updates, after = tx.update(grads(0), state, start, apply=False, loss=jnp.nan)
    assert bits((optax.apply_updates(start, updates), after.master)) == bits((start, state.master))
    found = jscale.metrics(after)
    assert found["skipped_steps"] == 1 and not found["loss_finite"]


# Company


@pytest.mark.parametrize(
    "inner",
    [
        optax.adamw(1e-3),
        jscale.with_loss_scale(optax.adamw(1e-3)),
        optax.contrib.schedule_free_sgd(0.1, warmup_steps=2),  # keeps the parameters in its state
        optax.MultiSteps(optax.adamw(1e-3), 2).gradient_transformation(),
    ],
    ids=["adamw", "scaled", "schedule_free", "MultiSteps"],
)
def test_state_in_is_of_the_type_of_state_out_and_shares_no_buffer(inner):
    tx = jscale.with_master_weights(inner)
    p = {"w": params()["w"]}
    g = {"w": grads(0)["w"]}
    state = tx.init(p)
    typed = lambda tree: [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]
    assert typed(jax.eval_shape(tx.update, g, state, p)[1]) == typed(state)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.master))
    step = jax.jit(lambda p, s: tx.update(g, s, p), donate_argnums=(0, 1))
    step(p, state)  # a buffer that is in both could not be donated twice


def accumulated(tx):
    return optax.MultiSteps(tx, 2).gradient_transformation()


@pytest.mark.parametrize("outside", [True, False])
def test_accumulation_around_and_inside(outside):
    """In float32 both times, and a window is one step."""
    sgd = optax.sgd(2.0**-14)
    p = jnp.ones(4, jnp.float16)
    gradients = [jnp.full(4, x) for x in (1.0, 3.0, 5.0, 7.0)]
    make = jscale.with_master_weights
    tx = accumulated(make(sgd)) if outside else make(jscale.with_loss_scale(accumulated(sgd)))
    after, state = train(tx, p, gradients)
    own = state.inner_opt_state if outside else state
    np.testing.assert_array_equal(own.master, jnp.full(4, 1 - 8 * 2.0**-14))
    assert_rounded(after, own)
    if not outside:
        again, state = train(tx, after, [jnp.full(4, INF)], state)
        assert bits((again, state.master)) == bits((after, own.master))


def test_masked_and_partitioned_parameters_have_copies_only_where_they_are_trained():
    p = {"base": jnp.ones(4, jnp.float16), "lora": jnp.ones(2, jnp.float16), "n": jnp.int32(3)}
    g = {"base": None, "lora": jnp.full(2, 1e-4), "n": None}
    labels = {"base": "frozen", "lora": "trained", "n": "frozen"}
    own = jscale.with_master_weights(jscale.with_loss_scale(optax.sgd(1.0)))
    tx = optax.partition({"trained": own, "frozen": optax.set_to_zero()}, labels)
    state = tx.init(p)
    copies = state.inner_states["trained"].inner_state.master
    assert [x.shape for x in jax.tree.leaves(copies)] == [(2,)]
    apply = lambda p, u: p if u is None else optax.apply_updates(p, u)
    for _ in range(20):
        updates, state = tx.update(g, state, p)
        p = jax.tree.map(apply, p, updates, is_leaf=lambda x: x is None)
    np.testing.assert_array_equal(p["lora"], jnp.full(2, 1 - 20e-4, jnp.float16))
    assert bits((p["base"], p["n"])) == bits((jnp.ones(4, jnp.float16), jnp.int32(3)))


class Net(nnx.Module):
    """A product in float16, and a norm in float32."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs, param_dtype=jnp.float16)
        self.norm = nnx.LayerNorm(2, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


X = jax.random.normal(jax.random.key(1), (8, 3))


def test_flax_nnx():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, scaled(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss_fn = lambda model: jnp.mean(jnp.square(model(x).astype(jnp.float32) - 1.0))
        scale = jscale.loss_scale(optimizer.opt_state)
        loss, g = jscale.value_and_grad(loss_fn, scale, transform=nnx.value_and_grad)(model)
        optimizer.update(model, g, loss=loss)
        return loss

    kept = lambda: bits(
        nnx.state((model, optimizer.opt_state.master, optimizer.opt_state.inner.inner))
    )
    before, first = kept(), step(model, optimizer, X)
    assert kept() != before
    master = optimizer.opt_state.master
    assert not jax.tree.leaves(master["norm"])
    copy = master["linear"]["kernel"][...]
    assert_same_bits(model.linear.kernel[...], copy.astype(jnp.float16))
    before = kept()
    step(model, optimizer, X.at[0, 0].set(INF))
    assert kept() == before and not optimizer.opt_state.inner.finite[...]
    for _ in range(20):
        loss = step(model, optimizer, X)
    assert loss < first


def test_equinox():
    model = eqx.nn.MLP(3, "scalar", 8, 2, dtype=jnp.float16, key=jax.random.key(0))
    tx = scaled(jscale.dynamic(2.0**10))
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, x):
        loss_fn = lambda model, x: jnp.mean(jnp.square(jax.vmap(model)(x).astype(jnp.float32) - 1))
        value_and_grad = jscale.value_and_grad(
            loss_fn, jscale.loss_scale(state), transform=eqx.filter_value_and_grad
        )
        loss, g = value_and_grad(model, x.astype(jnp.float16))
        arrays = eqx.filter(model, eqx.is_inexact_array)
        updates, state = tx.update(g, state, arrays, loss=loss)
        arrays = optax.apply_updates(arrays, updates)
        return eqx.combine(arrays, model), state, loss

    losses = []
    for x in (X, X.at[0, 0].set(INF), *[X] * 20):
        before = bits((eqx.filter(model, eqx.is_array), state.master))
        model, state, loss = step(model, state, x)
        losses.append(loss)
        arrays = eqx.filter(model, eqx.is_inexact_array)
        assert_rounded(arrays, state)
        assert (bits((arrays, state.master)) == before) == (not state.inner.finite)
    assert state.inner.skipped_steps == 1 and losses[-1] < losses[0]


# Devices


def test_copies_are_sharded_as_their_parameters_and_train_as_on_one_device():
    """Adam's operations are one for each element, so that all bits are those of one device."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = jscale.with_master_weights(jscale.with_loss_scale(optax.adamw(1e-3)))
    spec = {"w": P("data"), "b": P(), "none": None}
    place = lambda tree: jax.tree.map(
        lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, spec
    )

    @jax.jit
    def step(p, state, g):
        updates, state = tx.update(g, state, p)
        return optax.apply_updates(p, updates), state

    alone = params(), tx.init(params())
    for init in (tx.init, jax.jit(tx.init)):
        spread = place(params()), init(place(params()))
        assert spread[1].master["w"].sharding.spec == P("data")
    for g in (grads(0), bad(1), grads(2)):
        alone, spread = step(*alone, g), step(*spread, place(g))
        # The norm sums in another order.
        drop = lambda s: s._replace(inner=s.inner._replace(grad_norm=None))
        assert_same_bits((spread[0], drop(spread[1])), (alone[0], drop(alone[1])))
        for x in (spread[0]["w"], spread[1].master["w"]):
            assert x.sharding.spec == P("data")
    text = step.lower(*spread, place(grads(0))).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text


# Checkpoints


def through_orbax(folder, tree, target=None):
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
        writer.save(folder, args=ocp.args.StandardSave(tree))
    with ocp.StandardCheckpointer() as reader:
        return reader.restore(folder, target)


reads_without_shardings = pytest.mark.filterwarnings("ignore:Sharding info not provided")
BEFORE = [grads(0), grads(1), bad(2)]  # saved right after a skip
LATER = [grads(3), bad(4), grads(5)]


@reads_without_shardings
@each_half
def test_a_run_goes_on_from_its_parameters_and_state(tmp_path, dtype):
    tx = scaled()
    saved = train(tx, params(dtype), BEFORE)
    target = jax.eval_shape(lambda: (params(dtype), tx.init(params(dtype))))
    p, state = through_orbax(tmp_path / "a", saved, target)
    assert_same_bits((p, state), saved)
    assert_same_bits(train(tx, p, LATER, state), train(tx, *saved[:1], LATER, saved[1]))


@reads_without_shardings
@each_half
def test_a_run_goes_on_from_the_float32_parameters_alone(tmp_path, dtype):
    """The recipe of the docstring."""
    tx = scaled()
    p, state = train(tx, params(dtype), BEFORE)
    saved = {"params": in_float32(p, state), "opt_state": state.inner}
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(saved["params"]))
    # What the same run without copies would save, too.
    whole = wide(params(dtype))
    target = jax.eval_shape(lambda: {"params": whole, "opt_state": scaler().init(whole)})
    got = through_orbax(tmp_path / "a", saved, target)

    full, like = got["params"], jax.eval_shape(lambda: params(dtype))
    new = jax.tree.map(lambda p, x: x.astype(p.dtype), like, full)
    master = jax.tree.map(lambda p, x: None if p.dtype == x.dtype else x, new, full)
    restored = new, jscale.MasterWeightsState(master, got["opt_state"])
    assert_same_bits(restored, (p, state))
    assert_same_bits(train(tx, new, LATER, restored[1]), train(tx, p, LATER, state))


def scaler():
    return jscale.with_loss_scale(adamw())


@reads_without_shardings
def test_attach_and_detach_leave_the_copies_alone(tmp_path):
    tx = scaled()
    p, state = train(tx, params(), BEFORE)
    # Orbax makes dicts of the state if it has no target.
    loose = through_orbax(tmp_path / "a", state)
    assert_same_bits(jscale.checkpoint.attach(tx.init(params()), loose), state)
    bare = jscale.with_master_weights(adamw())
    assert jax.tree.structure(jscale.checkpoint.detach(state)) == jax.tree.structure(bare.init(p))
    # A scaler for a run that had none, and one with other groups.
    _, before = train(bare, params(), [grads(0), grads(1)])
    for rule in (None, RULES):
        new = jscale.checkpoint.attach(scaled(rule).init(params()), before)
        assert_same_bits((new.master, new.inner.inner), (before.master, before.inner))
        assert new.inner.applied_steps == 0


def test_errors_say_what_to_do():
    with pytest.raises(TypeError, match=r"inner must be an optax\.GradientTransformation, got 3"):
        jscale.with_master_weights(3)
    tx = jscale.with_master_weights(optax.sgd(0.1))
    with pytest.raises(ValueError, match="pass them to update"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    p = {"w": jnp.ones(2, jnp.float16)}
    updates, state = tx.update({"w": jnp.ones(2)}, tx.init(p), p)
    p = eqx.apply_updates(p, updates)
    with pytest.raises(ValueError, match=r"w is float32\[2\], but was narrower: .*optax.apply_up"):
        tx.update({"w": jnp.ones(2)}, state, p)


def test_inside_a_loss_scale_it_could_not_tell_what_is_float16():
    tx = jscale.with_loss_scale(jscale.with_master_weights(optax.sgd(0.1)))
    with pytest.raises(ValueError, match="put it around"):
        tx.init(params())


def test_a_skip_does_not_correct_a_last_bit_that_was_missed(standard_promotion):
    # float32 cannot hold the way from 1024 to -0.01: the parameter misses its rounded copy.
    tx = jscale.with_master_weights(jscale.with_loss_scale(optax.sgd(1.0), jscale.static(1)))
    p = jnp.full(1, 1024, jnp.float16)
    state = tx.init(p)
    step = jax.jit(tx.update)
    for grad in (jnp.full(1, 0.1), None, jnp.full(1, jnp.inf)):
        before = p, state.master
        updates, state = step(state.master + 165 * 2.0**-14 if grad is None else grad, state, p)
        p = optax.apply_updates(p, updates)
    assert not state.inner.finite and p[0] != state.master.astype(p.dtype)[0]
    assert_same_bits((p, state.master), before)


def test_multi_steps_may_be_given_as_it_is(standard_promotion):
    tx = jscale.with_master_weights(optax.MultiSteps(optax.sgd(0.1), 2))
    p = jnp.ones(2, jnp.float16)
    state = tx.init(p)
    for _ in range(2):
        updates, state = tx.update(jnp.ones(2), state, p)
        p = optax.apply_updates(p, updates)
    np.testing.assert_array_equal(p, np.full(2, 0.9, np.float16))


def test_a_state_of_another_transformation_is_refused():
    tx = jscale.with_master_weights(optax.sgd(0.1))
    with pytest.raises(TypeError, match="must be a MasterWeightsState, got EmptyState"):
        tx.update(jnp.ones(2), optax.EmptyState(), jnp.ones(2))
