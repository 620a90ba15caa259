"""One decision on all devices: under jit with sharded arrays, in shard_map and in pmap."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jscale

INF, NAN = jnp.inf, jnp.nan


def make_mesh(*shape, names=("data",)):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def optimizer(**kwargs):
    """Exact on the numbers below, so that no order of summation matters."""
    inner = optax.chain(optax.clip_by_global_norm(2.0**20), optax.sgd(0.5, momentum=0.5))
    return jscale.with_loss_scale(inner, jscale.dynamic(8, growth_interval=2), **kwargs)


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def shard_map(fn, mesh, in_specs, out_specs, check_vma):
    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
    return jax.jit(mapped)


both_modes = pytest.mark.parametrize("check_vma", [True, False])


# Under jit


@pytest.mark.parametrize(
    "mesh, specs",
    [
        (make_mesh(8), {"w": P("data"), "b": P()}),
        (make_mesh(4, 2, names=("data", "model")), {"w": P("data", "model"), "b": P("model")}),
    ],
    ids=["data", "data_model"],
)
def test_sharded_gradients_are_decided_on_as_a_whole(mesh, specs):
    tx = optimizer()
    params = {"w": jnp.ones((8, 2)), "b": jnp.full(2, 2.0)}

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    place = lambda tree: jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs
    )
    sharded = place(params)
    alone = params, tx.init(params)
    spread = sharded, jax.jit(tx.init)(sharded)
    for value in (1.0, 2.0, INF, 4.0, NAN):
        # The bad element lies in one shard.
        grads = {"w": jnp.ones((8, 2)).at[5, 1].set(value), "b": jnp.ones(2)}
        alone = step(*alone, grads)
        spread = step(*spread, place(grads))
        assert_equal(spread, alone)
        assert bool(spread[1].finite) == np.isfinite(value)
    assert not spread[0]["w"].sharding.is_fully_replicated
    assert int(spread[1].skipped_steps) == 2


def test_a_whole_step_over_a_data_and_a_model_axis():
    mesh = make_mesh(4, 2, names=("data", "model"))
    tx = optimizer()

    def loss_fn(params, x):
        hidden = jnp.float16(x) @ jnp.float16(params["in"])
        return jnp.mean((hidden @ jnp.float16(params["out"])).astype(jnp.float32))

    @jax.jit
    def step(params, state, x):
        loss, grads = jscale.value_and_grad(loss_fn, jscale.loss_scale(state))(params, x)
        updates, state = tx.update(grads, state, params, loss=loss)
        return optax.apply_updates(params, updates), state, loss

    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    params = {"in": jnp.ones((2, 4)), "out": jnp.ones((4, 1))}
    sharded = {"in": put(params["in"], None, "model"), "out": put(params["out"], "model", None)}
    x = jnp.arange(16.0).reshape(8, 2)
    alone = params, tx.init(params), None
    spread = sharded, jax.jit(tx.init)(sharded), None
    for batch in (x, x.at[7, 1].set(1e6)):
        alone = step(*alone[:2], batch)
        spread = step(*spread[:2], put(batch, "data"))
        assert_equal(spread, alone)
    assert int(alone[1].skipped_steps) == int(alone[1].applied_steps) == 1
    assert not alone[1].loss_finite


# In shard_map


@both_modes
@pytest.mark.parametrize("devices, value", [(4, INF), (8, NAN)])
def test_an_overflow_on_one_device_is_skipped_on_all(devices, value, check_vma):
    tx = optimizer(axis_name="data")

    def run(params, grads):
        state = tx.init(params)
        updates, state = tx.update({"w": grads}, state, params)
        new = optax.apply_updates(params, updates)
        # Stacked, so that each device tells what it decided.
        stack = lambda x: x.reshape(1, *x.shape)
        return jax.tree.map(stack, (new["w"], state.finite, jscale.loss_scale(state)))

    grads = jnp.ones(devices).at[1].set(value)
    fn = shard_map(run, make_mesh(devices), (P(), P("data")), P("data"), check_vma)
    new, finite, scale = fn({"w": jnp.ones(1)}, grads)
    assert_equal(new, jnp.ones((devices, 1)))
    assert_equal(finite, jnp.zeros(devices, bool))
    assert_equal(scale, jnp.full(devices, 4.0))
    new, finite, scale = fn({"w": jnp.ones(1)}, jnp.ones(devices))
    assert_equal(new, jnp.full((devices, 1), 0.5))
    assert_equal(finite, jnp.ones(devices, bool))
    assert_equal(scale, jnp.full(devices, 8.0))


def averaged_step(tx, loss_fn, axis):
    """Data-parallel training, for both modes of shard_map; one device alone with `axis` None."""

    def step(params, state, x):
        local = lax.pcast(params, axis, to="varying") if axis else params
        loss, grads = jscale.value_and_grad(loss_fn, jscale.loss_scale(state))(local, x)
        if axis:
            loss, grads = lax.pmean((loss, grads), axis)
        updates, state = tx.update(grads, state, params, loss=loss)
        return optax.apply_updates(params, updates), state, loss, grads

    return step


@both_modes
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_training_in_shard_map_is_training_on_one_device(dtype, check_vma):
    def loss_fn(params, x):
        return jnp.mean((x.astype(dtype) @ params["w"].astype(dtype)).astype(jnp.float32))

    params = {"w": jnp.ones(2)}
    x = jnp.arange(16.0).reshape(8, 2)
    alone = jax.jit(averaged_step(optimizer(), loss_fn, None))
    spread = shard_map(
        averaged_step(optimizer(axis_name="data"), loss_fn, "data"),
        make_mesh(4),
        (P(), P(), P("data")),
        P(),
        check_vma,
    )
    one = many = params, optimizer().init(params)
    for batch in (x, x.at[5, 0].set(INF), x, x):
        *one, loss, grads = alone(*one, batch)
        *many, many_loss, many_grads = spread(*many, batch)
        assert_equal((many, many_loss), (one, loss))
        # NaN and inf may differ where the sum is taken in another order.
        assert_equal(jnp.isfinite(many_grads["w"]), jnp.isfinite(grads["w"]))
        if jscale.all_finite(grads):
            assert_equal(many_grads, grads)
    assert_equal(grads["w"], x.mean(0))
    assert int(one[1].skipped_steps) == 1 and float(jscale.loss_scale(one[1])) == 8.0


@both_modes
def test_float16_gradients_are_averaged_in_float32(check_vma):
    def run(w, x):
        w = lax.pcast(w, "data", to="varying")
        loss_fn = lambda w: jnp.sum((w * x).astype(jnp.float32))
        half = jax.grad(loss_fn)(w)
        grads = jscale.grad(loss_fn, 1.0)(w)
        return lax.pmean(half, "data"), lax.pmean(grads, "data")

    fn = shard_map(run, make_mesh(4), (P(), P("data")), P(), check_vma)
    half, grads = fn(jnp.ones(1, jnp.float16), jnp.full(4, 30000, jnp.float16))
    assert half.dtype == jnp.float16 and not jnp.isfinite(half)  # the mean of 4 x 30000
    assert grads.dtype == jnp.float32
    assert_equal(grads, jnp.float32([30000]))


def test_the_norm_of_sharded_gradients_is_the_norm_of_the_whole():
    # No clip_by_global_norm here: inside shard_map optax's takes the norm of one device's part.
    tx = jscale.with_loss_scale(optax.sgd(0.5, momentum=0.5), axis_name="data")

    def run(params, values):
        def body(carry, value):
            params, state = carry
            grads = jax.tree.map(lambda p: p * value, params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), (state.finite, state.grad_norm)

        return lax.scan(body, (params, tx.init(params)), values)

    # Each device holds two elements of w and all of b.
    specs = {"w": P("data"), "b": P()}
    state_specs = jax.tree.map(lambda _: P(), jax.eval_shape(tx.init, {"w": 0.0, "b": 0.0}))
    trace = state_specs.inner[0]._replace(trace=specs)
    state_specs = state_specs._replace(inner=(trace, *state_specs.inner[1:]))
    params = {"w": jnp.arange(8.0), "b": jnp.array([3.0, 4.0])}
    fn = shard_map(run, make_mesh(4), (specs, P()), ((specs, state_specs), P()), True)
    (new, state), (finite, norms) = fn(params, jnp.array([1.0, NAN, INF]))
    assert_equal(finite, jnp.array([True, False, False]))
    assert_equal(norms[0], jnp.sqrt(jnp.float32(140 + 25)))
    assert_equal(new, jax.tree.map(lambda x: x - 0.5 * x, params))
    assert_equal(state.inner[0].trace, params)


def test_a_rule_sees_the_norm_of_the_whole():
    by_norm = jscale.ScaleRule(
        init=lambda: jscale.StaticState(jnp.ones(())),
        update=lambda state, seen: jscale.StaticState(seen.grad_norm),
    )
    tx = jscale.with_loss_scale(optax.identity(), by_norm, axis_name=["data"])
    run = lambda g: jscale.loss_scale(tx.update(g, tx.init(g))[1]).reshape(1)
    fn = shard_map(run, make_mesh(4), (P("data"),), P("data"), True)
    assert_equal(fn(jnp.array([1.0, -5.0, 3.0, 1.0])), jnp.full(4, 6.0))


@pytest.mark.parametrize("spec", [P("data"), P()], ids=["sharded", "replicated"])
@both_modes
def test_a_rule_sees_the_largest_gradient_of_all_devices(spec, check_vma):
    by_amax = jscale.ScaleRule(
        init=lambda: jscale.StaticState(jnp.ones(())),
        update=lambda state, seen: jscale.StaticState(seen.amax),
    )
    tx = jscale.with_loss_scale(optax.identity(), by_amax, axis_name="data")
    run = lambda g: jscale.loss_scale(tx.update(g, tx.init(g))[1]).reshape(1)
    fn = shard_map(run, make_mesh(4), (spec,), P("data"), check_vma)
    assert_equal(fn(jnp.array([1.0, -7.0, 3.0, 2.0])), jnp.full(4, 7.0))


def test_the_norm_over_two_axes():
    tx = optimizer(axis_name=("data", "model"))
    specs = {"both": P("data", "model"), "one": P("model"), "none": P()}
    grads = {
        "both": jnp.arange(8.0).reshape(4, 2),
        "one": jnp.array([1.0, 2.0]),
        "none": jnp.ones(1),
    }
    fn = shard_map(
        lambda g: tx.update(g, tx.init(g))[1].grad_norm,
        make_mesh(4, 2, names=("data", "model")),
        (specs,),
        P(),
        True,
    )
    assert_equal(fn(grads), jnp.sqrt(jnp.float32(140 + 5 + 1)))


@both_modes
def test_averaged_gradients_have_the_norm_that_one_device_sees(check_vma):
    tx = optimizer(axis_name="data")

    def run(params, grads):
        return tx.update({"w": lax.pmean(grads, "data")}, tx.init(params), params)[1].grad_norm

    fn = shard_map(run, make_mesh(4), (P(), P("data")), P(), check_vma)
    grads = jnp.array([[3.0, 0.0], [3.0, 8.0], [3.0, 8.0], [3.0, 0.0]]).reshape(8)
    assert_equal(fn({"w": jnp.ones(2)}, grads), jnp.float32(5))


@both_modes
def test_a_veto_of_one_device_holds_on_all(check_vma):
    tx = optimizer(axis_name="data")

    def run(params, apply):
        grads = {"w": jnp.ones(2)}
        updates, state = tx.update(grads, tx.init(params), params, apply=apply[0])
        return optax.apply_updates(params, updates)["w"], jscale.metrics(state)

    fn = shard_map(run, make_mesh(4), (P(), P("data")), P(), check_vma)
    for apply, want in ((jnp.ones(4, bool).at[2].set(False), 1.0), (jnp.ones(4, bool), 0.5)):
        new, m = fn({"w": jnp.ones(2)}, apply)
        assert_equal(new, jnp.full(2, want))
        assert bool(m["finite"]) == (want != 1.0)
        assert float(m["grad_scale"]) == 8.0  # a veto is no overflow


@both_modes
@pytest.mark.parametrize("apply", [True, False])
def test_a_veto_may_be_a_python_bool(apply, check_vma):
    tx = optimizer(axis_name="data")
    run = lambda g: tx.update(g, tx.init(g), apply=apply)[1].finite
    fn = shard_map(run, make_mesh(4), (P(),), P(), check_vma)
    assert bool(fn(jnp.ones(2))) is apply


@both_modes
def test_a_loss_that_is_nan_on_one_device_is_flagged_on_all(check_vma):
    tx = optimizer(axis_name="data")

    def run(params, loss):
        _, state = tx.update({"w": jnp.ones(2)}, tx.init(params), params, loss=loss[0])
        return state.finite.reshape(1), state.loss_finite.reshape(1)

    fn = shard_map(run, make_mesh(4), (P(), P("data")), P("data"), check_vma)
    finite, loss_finite = fn({"w": jnp.ones(2)}, jnp.ones(4).at[3].set(NAN))
    # Gradients decide; the loss is reported.
    assert_equal(finite, jnp.ones(4, bool))
    assert_equal(loss_finite, jnp.zeros(4, bool))


def test_pmap():
    tx = optimizer(axis_name="data")

    def step(params, state, grads):
        updates, state = tx.update(lax.pmean(grads, "data"), state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.ones(2)}
    stack = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * 4), tree)
    spread = stack((params, tx.init(params)))
    alone = params, tx.init(params)
    fn = jax.pmap(step, axis_name="data", devices=jax.devices()[:4])
    update = jax.jit(optimizer().update)
    for value in (1.0, INF, 1.0):
        grads = jnp.ones((4, 2)).at[1, 0].set(value)
        spread = fn(*spread, {"w": grads})
        updates, state = update({"w": grads.mean(0)}, alone[1], alone[0])
        alone = optax.apply_updates(alone[0], updates), state
    assert_equal(spread, stack(alone))
    assert int(alone[1].skipped_steps) == 1


@both_modes
@pytest.mark.parametrize("bad", range(4))
def test_amax_of_a_nan_on_any_device_is_inf(bad, check_vma):
    amax = lambda g: jscale.Observation(False, grads=g, axis_name="data").amax
    fn = shard_map(amax, make_mesh(4), (P("data"),), P(), check_vma)
    assert_equal(fn(jnp.ones(4).at[bad].set(jnp.nan)), jnp.inf)


@both_modes
def test_as_large_a_gradient_fits_as_on_one_device(check_vma):
    tx = optimizer(axis_name="data")
    run = lambda g: tx.update(g, tx.init(g))[1].finite
    fn = shard_map(run, make_mesh(4), (P(),), P(), check_vma)
    assert bool(fn(jnp.array([0, 1.5e19])))
    assert not bool(fn(jnp.array([0, 2e19])))
