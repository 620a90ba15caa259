"""One decision on all devices: under jit with sharded arrays, in shard_map and in pmap."""

import functools
import re

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


@pytest.mark.parametrize("clip", [False, True])
def test_parameters_of_one_shape_keep_their_own_layouts(clip, standard_promotion):
    """Nothing is gathered: sums over several leaves would lay out one as another."""
    mesh, n = make_mesh(8, names=("model",)), 16
    specs = {"gain": P(), "up": P(None, "model"), "bias": P("model"), "down": P("model", None)}
    shapes = {name: (n,) if name in ("gain", "bias") else (n, n) for name in specs}
    params = {name: jnp.ones(shape) / n for name, shape in shapes.items()}
    params = jax.device_put(params, {key: NamedSharding(mesh, spec) for key, spec in specs.items()})
    inner = optax.chain(*[optax.clip_by_global_norm(1.0)] * clip, optax.adam(0.1))

    def loss_fn(p, x):
        return jnp.mean(
            jnp.square(jnp.tanh((x * p["gain"][None]) @ p["up"] + p["bias"][None]) @ p["down"])
        )

    def compiled(tx, scale_of):
        def step(params, state, x):
            grads = jscale.grad(loss_fn, scale_of(state))(params, x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state = jax.jit(tx.init)(params)
        program = jax.jit(step).lower(params, state, jnp.ones((4, n))).compile()
        return program.output_shardings[0], program.as_text()

    bare, bare_text = compiled(inner, lambda state: 1.0)
    scaled, text = compiled(jscale.with_loss_scale(inner), jscale.loss_scale)
    of = lambda sharding: {key: x.spec for key, x in sharding.items()}
    assert of(scaled) == of(bare)
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        count = lambda text: len(re.findall(rf" {collective}(-start)?\(", text))
        assert count(text) <= count(bare_text) + (collective == "all-reduce" and not clip), (
            collective
        )


# In shard_map


def test_what_is_alike_on_all_devices_stays_so_beside_what_differs():
    rules = {"b": jscale.dynamic(), "w": jscale.dynamic()}
    own = jscale.with_loss_scale(optax.sgd(0.5), rules, skip="own")
    one = jscale.with_loss_scale(optax.sgd(0.5))
    params = {"w": jnp.ones(4), "b": jnp.ones(1)}
    specs = {"w": P("data"), "b": P()}
    mesh = make_mesh(4)
    # Replicated results are what check_vma can infer, or it raises.
    update = lambda grads, state: own.update(grads, state, grads)[0]
    step = jax.shard_map(update, mesh=mesh, in_specs=(specs, P()), out_specs=specs)
    np.testing.assert_array_equal(jax.jit(step)(params, own.init(params))["b"], [-0.5])
    told = lambda grads, state: one.update(grads, state, grads)[1].loss_finite
    step = jax.shard_map(told, mesh=mesh, in_specs=(specs, P()), out_specs=P())
    assert jax.jit(step)(params, one.init(params))


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


@pytest.mark.parametrize(
    "rule",
    [
        jscale.dynamic(8),
        jscale.headroom(8),
        jscale.log_normal(8),
        jscale.anticipate(jscale.dynamic(8)),
    ],
    ids=["dynamic", "headroom", "log_normal", "anticipate"],
)
def test_what_differs_over_one_of_two_axes_is_decided_on_over_both(rule):
    def run(tx, g):
        update = lambda g, s: tx.update(g, s, loss=jnp.max(g), apply=jnp.all(g < 5))
        return update(2 * g, update(g, tx.init(g))[1])[1]

    wrap = lambda **kwargs: jscale.with_loss_scale(optax.identity(), rule, **kwargs)
    axes = ("data", "model")
    run_on = functools.partial(run, wrap(axis_name=axes))
    g = jnp.arange(4.0)
    got = shard_map(run_on, make_mesh(4, 2, names=axes), (P("data"),), P(), True)(g)
    want = run(wrap(), g)
    assert (int(want.applied_steps), int(want.skipped_steps)) == (1, 1)
    assert_equal(jscale.metrics(got), jscale.metrics(want))
    assert_equal(got.rule.loss_scale, want.rule.loss_scale)


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


# Whole steps, in each layout and with each kind of scaler

LAYERS = 2
PARAMS = {
    "head": jnp.full((4, 1), 0.5),
    "layers": jnp.stack([jnp.eye(4) + jnp.eye(4, k=1), jnp.eye(4) - jnp.eye(4, k=2)]),
}


def several(rule):
    return {"head": rule, "layers": jscale.stacked(rule, LAYERS)}


counting = jscale.dynamic(8, growth_interval=2)
KINDS = {  # rule, options, accumulation
    "one": (counting, {}, None),
    "one, MultiSteps": (counting, {}, "MultiSteps"),
    "several": (several(counting), {}, None),
    "several, a loop": (several(counting), {}, "loop"),
    "own, MultiSteps": (several(counting), {"skip": "own"}, "MultiSteps"),
    "headroom": (several(jscale.headroom(init_scale=8, window=2)), {}, None),
}


def whole_halves(updates, params):
    return jax.tree.map(lambda u: jnp.clip(jnp.round(2 * u) / 2, -0.5, 0.5), updates)


def exact_optimizer(kind, clip=True, **kwargs):
    """Parameters stay small multiples of 1/2, so that float16 rounds nothing."""
    rule, options, accumulation = KINDS[kind]
    inner = optax.chain(optax.sgd(1.0, momentum=0.5), optax.stateless(whole_halves))
    if clip:
        inner = optax.chain(optax.clip_by_global_norm(2.0**20), inner)
    if accumulation == "MultiSteps":
        inner = optax.MultiSteps(inner, 2)
    return jscale.with_loss_scale(inner, rule, **options, **kwargs)


def loss_of(params, x, scale):
    """Two products in float16, each a region if it has a scale of its own, and a head."""
    half = jnp.float16

    def body(h, layer):
        w, own = layer
        fun = lambda w, h: (half(h) @ half(w)).astype(jnp.float32)
        if own is not None:
            fun = jscale.region(fun, own, scale["head"])
        return fun(w, h), None

    scales = scale["layers"] if isinstance(scale, dict) else None
    h, _ = lax.scan(body, x, (params["layers"], scales))
    return jnp.mean((half(h) @ half(params["head"])).astype(jnp.float32))


def make_step(kind, tx, *, local=lambda p: p, whole=lambda p: p, average=lambda x: x):
    """A step. In shard_map `local` is what one device differentiates, `whole` all of it."""
    rule, _, accumulation = KINDS[kind]
    root = "head" if isinstance(rule, dict) else None

    def step(params, state, x, poison):
        scale = jscale.loss_scale(state)
        loss_fn = lambda params, x: loss_of(whole(params), x, scale)
        value_and_grad = jscale.value_and_grad(loss_fn, scale, root=root)
        own = local(params)
        if accumulation == "loop":
            parts = lax.map(lambda x: value_and_grad(own, x), x.reshape(2, -1, 4))
            loss, grads = jax.tree.map(lambda x: x.mean(0), parts)
        else:
            loss, grads = value_and_grad(own, x)
        loss, grads = average((loss, grads))
        grads = jax.tree.map(jnp.add, grads, poison)
        updates, state = tx.update(grads, state, params, loss=loss)
        return optax.apply_updates(params, updates), state, loss, grads

    return step


def batches():
    """Batches and what is added to the gradients: inf or NaN in one place, of one device."""
    x = jnp.asarray(np.random.RandomState(0).randint(-1, 2, (16, 4)), jnp.float32)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    yield x, zeros
    yield x.at[13, 2].set(1e6), zeros  # inf in float16, in the batch of one device
    yield x, zeros
    yield x, zeros | {"layers": zeros["layers"].at[1, 3, 1].set(INF)}  # in one shard
    yield x, zeros | {"head": zeros["head"].at[1, 0].set(NAN)}
    yield x, zeros


@functools.cache
def on_one_device(kind, clip=True):
    tx = exact_optimizer(kind, clip)
    step = jax.jit(make_step(kind, tx))
    params, state, seen = PARAMS, tx.init(PARAMS), []
    for batch in batches():
        params, state, loss, grads = step(params, state, *batch)
        seen.append(jax.device_get((params, state, loss, grads)))
    m = jscale.metrics(seen[-1][1])
    skipped = [m[key] for key in m if key.startswith("skipped_steps")]
    assert 2 <= max(skipped) <= 3 and not any(np.isnan(p).any() for p in seen[-1][0].values())
    return seen


def assert_every_device_has(got, want, but=()):
    """Where it is not finite, inf and NaN may differ: the sum is taken in another order."""

    def check(path, got, want):
        name = jax.tree_util.keystr(path)
        if any(part in name for part in but):
            return
        plain = lambda x: np.where(np.isfinite(x), x, np.inf)
        # An average of eight equal norms may round once.
        rtol = 2.0**-23 if "grad_norm" in name else 0
        for shard in got.addressable_shards:
            here, there = plain(shard.data), plain(want[shard.index])
            if not np.array_equal(here, there):
                np.testing.assert_allclose(here, there, rtol, err_msg=f"{name}, {shard.device}")

    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map_with_path(check, got, want)


LAYOUTS = {  # mesh, head, layers, batch
    "data": ((8,), P(), P(), P("data")),
    "fsdp": ((4,), P("data"), P(None, "data"), P("data")),
    "tensor": ((1, 4), P("model"), P(None, None, "model"), P("data")),
    "data_model": ((4, 2), P("model"), P(None, "data", "model"), P("data")),
}


@pytest.mark.parametrize(
    "layout, kind",
    [("data_model", kind) for kind in KINDS]
    + [("data", "one, MultiSteps"), ("fsdp", "own, MultiSteps"), ("fsdp", "several, a loop")]
    + [("tensor", "several, a loop")],
)
def test_every_layout_trains_as_one_device(standard_promotion, layout, kind):
    shape, head, layers, data = LAYOUTS[layout]
    mesh = make_mesh(*shape, names=("data", "model")[: len(shape)])
    place = lambda tree, spec: jax.device_put(
        tree, jax.tree.map(lambda s: NamedSharding(mesh, s), spec)
    )
    specs = {"head": head, "layers": layers}
    tx = exact_optimizer(kind)
    step = jax.jit(make_step(kind, tx))
    params = place(PARAMS, specs)
    state = tx.init(params)
    for (x, poison), want in zip(batches(), on_one_device(kind), strict=True):
        params, state, *rest = step(params, state, place(x, data), place(poison, specs))
        assert_every_device_has((params, state, *rest), want)
        if layout != "data":
            assert not params["layers"].sharding.is_fully_replicated


@pytest.mark.parametrize(
    "kind, check_vma",
    [
        ("one, MultiSteps", True),
        ("one, MultiSteps", False),
        ("several, a loop", True),
        ("several, a loop", False),
        ("headroom", False),
    ],
)
def test_data_parallel_steps_in_shard_map_are_those_of_one_device(
    standard_promotion, kind, check_vma
):
    tx = exact_optimizer(kind, axis_name="data")
    step = make_step(
        kind,
        tx,
        local=lambda params: lax.pcast(params, "data", to="varying"),
        average=lambda x: lax.pmean(x, "data"),
    )
    fn = shard_map(step, make_mesh(8), (P(), P(), P("data"), P()), P(), check_vma)
    params, state = PARAMS, tx.init(PARAMS)
    for batch, want in zip(batches(), on_one_device(kind), strict=True):
        params, state, *rest = fn(params, state, *batch)
        assert_every_device_has((params, state, *rest), want)


@pytest.mark.parametrize(
    "kind, check_vma", [("several, a loop", True), ("several, a loop", False), ("headroom", True)]
)
def test_sharded_parameters_in_shard_map_train_as_on_one_device(kind, check_vma):
    # No clipping here: inside shard_map optax's takes the norm of one device's part.
    tx = exact_optimizer(kind, clip=False, axis_name="data")
    specs = {"head": P("data"), "layers": P(None, "data")}

    def average(loss_and_grads):
        loss, grads = loss_and_grads
        # The gradients of what was gathered are summed up and scattered by JAX.
        return lax.pmean(loss, "data"), jax.tree.map(lambda g: g / 4, grads)

    def whole(params):
        gather = lambda x, axis: lax.all_gather(x, "data", axis=axis, tiled=True)
        return {"head": gather(params["head"], 0), "layers": gather(params["layers"], 1)}

    step = make_step(kind, tx, whole=whole, average=average)
    by_shape = {PARAMS[name].shape: spec for name, spec in specs.items()}
    state_specs = jax.tree.map(
        lambda x: by_shape.get(x.shape, P()), jax.eval_shape(tx.init, PARAMS)
    )
    fn = shard_map(
        step,
        make_mesh(4),
        (specs, state_specs, P("data"), specs),
        (specs, state_specs, P(), specs),
        check_vma,
    )
    params, state = PARAMS, tx.init(PARAMS)
    # Without check_vma the parts' norms are averaged, since JAX does not say what is a part.
    but = () if check_vma else ("grad_norm",)
    for batch, want in zip(batches(), on_one_device(kind, clip=False), strict=True):
        params, state, *rest = fn(params, state, *batch)
        assert_every_device_has((params, state, *rest), want, but)


@pytest.mark.parametrize("kind", ["one, MultiSteps", "several"])
def test_steps_in_pmap_are_those_of_one_device(standard_promotion, kind):
    tx = exact_optimizer(kind, axis_name="data")
    step = make_step(kind, tx, average=lambda x: lax.pmean(x, "data"))
    fn = jax.pmap(step, axis_name="data", devices=jax.devices()[:4])
    stack = lambda tree: jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 4), tree)
    params, state = stack((PARAMS, tx.init(PARAMS)))
    for (x, poison), want in zip(batches(), on_one_device(kind), strict=True):
        params, state, *rest = fn(params, state, x.reshape(4, 4, 4), stack(poison))
        assert_every_device_has((params, state, *rest), jax.device_get(stack(want)))
