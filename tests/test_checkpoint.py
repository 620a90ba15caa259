"""Runs that were saved go on as if they had not been, also into another scaler."""

import functools
import itertools
import json
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers import assert_same_bits, bits, raw
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jscale
from jscale import checkpoint

GOLDEN = Path(__file__).parent / "golden" / "checkpoint_v0.json"
INF = jnp.inf

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),  # optax's Adam
    # Orbax, when it reads arrays for which no sharding was given.
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),
]


# Four ways of Orbax to write


def save_now(folder, tree):
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
        writer.save(folder, args=ocp.args.StandardSave(tree))


def save_later(folder, tree):
    writer = ocp.StandardCheckpointer()
    writer.save(folder, tree)
    return writer.close


def save_v1(folder, tree):
    ocp_v1.save(folder, tree)


def save_v1_later(folder, tree):
    return ocp_v1.save_async(folder, tree).result


def restore(folder, target=None):
    with ocp.StandardCheckpointer() as reader:
        return reader.restore(folder, target)


every_way = pytest.mark.parametrize(
    "save, restore",
    [
        (save_now, restore),
        (save_later, restore),
        (save_v1, ocp_v1.load),
        (save_v1_later, ocp_v1.load),
    ],
    ids=["now", "later", "v1", "v1_later"],
)


def through_orbax(folder, tree, target=None):
    save_now(folder, tree)
    return restore(folder, target)


# On other devices


def make_mesh(*shape):
    devices = jax.devices()[: int(np.prod(shape))]
    axes = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def sharding(mesh, x):
    """Parameters and moments sharded over all axes, all else on every device."""
    return NamedSharding(mesh, P(*mesh.axis_names) if x.ndim == 2 else P())


def on(mesh, abstract):
    return jax.tree.map(lambda x: x.update(sharding=sharding(mesh, x)), abstract)


# Exact on the numbers below, so that no order of summation matters; moments are bfloat16.
momentum = optax.chain(
    optax.clip_by_global_norm(2.0**20),
    optax.trace(0.5, accumulator_dtype=jnp.bfloat16),
    optax.scale(-0.5),
)
exact = jscale.with_loss_scale(momentum, jscale.dynamic(8, growth_interval=3, hysteresis=2))


def begin():
    params = {"w": jnp.ones((8, 4)), "b": jnp.ones((8, 2))}
    more = {"key": jax.random.key(3), "seen": jnp.int32(2**24 + 1)}
    return {"params": params, "opt": exact.init(params), **more}


@functools.partial(jax.jit, donate_argnums=0)
def exact_step(run, value):
    grads = jax.tree.map(jnp.ones_like, run["params"])
    grads["w"] = grads["w"].at[5, 1].set(value)  # in one shard
    updates, opt = exact.update(grads, run["opt"], run["params"])
    params = optax.apply_updates(run["params"], updates)
    return {
        "params": params,
        "opt": opt,
        "key": jax.random.fold_in(run["key"], 1),
        "seen": run["seen"] + 1,
    }


@every_way
def test_a_run_goes_on_bitwise_on_any_devices(save, restore, tmp_path):
    values = [1.0, 2.0, INF, 1.0, INF, INF, 1.0, 2.0, 1.0, 1.0]
    alone, want = begin(), []
    for value in values:
        alone = exact_step(alone, value)
        want.append(bits(alone))

    run, abstract = begin(), jax.eval_shape(begin)
    meshes = [(8,), (2,), (1,), (4,), (4, 2)]
    streaks = []
    for hop, shape in enumerate(meshes):
        mesh = make_mesh(*shape)
        if hop == 0:
            run = jax.device_put(run, jax.tree.map(functools.partial(sharding, mesh), run))
        else:
            run = restore(tmp_path / str(hop), on(mesh, abstract))
            assert bits(run) == want[2 * hop - 1]
            assert jax.tree.structure(run) == jax.tree.structure(abstract)
            assert run["params"]["w"].sharding == sharding(mesh, run["params"]["w"])
        for n in (0, 1):
            run = exact_step(run, values[2 * hop + n])
            assert bits(run) == want[2 * hop + n]
        rule = run["opt"].rule
        streaks.append(
            tuple(map(int, (rule.growth_tracker, rule.hysteresis_tracker)))
            + (int(run["opt"].consecutive_skips),)
        )
        wait = save(tmp_path / str(hop + 1), run)
        if wait:
            # What is saved is the state at this moment, whatever the step after it donates.
            exact_step(run, 1.0)
            wait()
    assert streaks == [(2, 2, 0), (1, 1, 0), (0, 0, 2), (2, 0, 0), (1, 2, 0)]


# With every rule, also through dicts and lists


GROUPS = {
    "layers": jscale.stacked(jscale.dynamic(8), 2),
    "a/b": jscale.headroom(),
    "": jscale.dynamic(8, growth_interval=2, hysteresis=2),
}
PARAMS = {
    "layers": jnp.ones((2, 3)),
    "a/b": {"w": jnp.ones(3)},
    "rest": jnp.ones(3),
    "restful": jnp.ones(2),
}
adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, mu_dtype=jnp.bfloat16))
scaled = jscale.with_loss_scale(adam)


def gradients(step):
    grads = jax.tree.map(lambda x: x * 2.0 ** (step % 4), PARAMS)
    if step in (2, 5, 6):
        grads["a/b"]["w"] = grads["a/b"]["w"].at[1].set(INF)
    return grads


RULES = {
    "dynamic": jscale.dynamic(8, growth_interval=2, hysteresis=2),
    "anticipate": jscale.anticipate(jscale.dynamic(8, growth_interval=2)),
    "off": jscale.off(),
}


@pytest.mark.parametrize(
    "rule, skip", [*((rule, "any") for rule in RULES), (GROUPS, "any"), (GROUPS, "own")]
)
def test_a_run_that_stops_goes_on_bitwise(rule, skip, tmp_path):
    tx = jscale.with_loss_scale(adam, RULES[rule] if isinstance(rule, str) else rule, skip=skip)

    @jax.jit
    def step(run, grads):
        params, state = run
        updates, state = tx.update(grads, state, params, loss=jnp.float32(1))
        return optax.apply_updates(params, updates), state

    runs = [(PARAMS, tx.init(PARAMS))]
    for n in range(8):
        runs.append(step(runs[-1], gradients(n)))
    abstract = jax.eval_shape(lambda: runs[0])
    for cut in (3, 6):
        save_now(tmp_path / str(cut), runs[cut])
        run = restore(tmp_path / str(cut), abstract)
        assert_same_bits(run, runs[cut])
        for n in range(cut, 8):
            run = step(run, gradients(n))
        assert_same_bits(run, runs[8])

        # Without a target, Orbax has dicts and lists for the types; attach finds the names.
        params, state = restore(tmp_path / str(cut))
        assert not isinstance(state, jscale.LossScaleState)
        assert_same_bits(checkpoint.attach(tx.init(PARAMS), state), runs[cut][1])
        assert_same_bits(checkpoint.attach(runs[0], (params, state)), runs[cut])


def test_a_streak_goes_on_where_it_was(tmp_path):
    """Two clean steps of four, saved and restored, and two more: the scale doubles."""
    tx = jscale.with_loss_scale(optax.sgd(0.1), jscale.dynamic(8, growth_interval=4))
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for step in range(4):
        if step == 2:
            target = jax.eval_shape(tx.init, PARAMS)
            state = through_orbax(tmp_path / "two", state, target)
        assert jscale.loss_scale(state) == 8
        _, state = update(PARAMS, state, PARAMS)
    assert jscale.loss_scale(state) == 16


# Without a scaler


def varied(tree):
    """`tree` in which no two numbers are alike, as after training."""
    flat, treedef = jax.tree.flatten(tree)
    ends = itertools.accumulate(x.size for x in flat)
    vary = lambda x, end: ~x if x.dtype == bool else 10 + end - np.arange(x.size)
    new = [
        jnp.asarray(vary(x, end).reshape(x.shape), x.dtype)
        for x, end in zip(flat, ends, strict=True)
    ]
    return jax.tree.unflatten(treedef, new)


as_it_was = lambda tree, folder: tree
without_a_target = lambda tree, folder: through_orbax(folder, tree)
as_flax_has_it = lambda tree, folder: flax.serialization.msgpack_restore(
    flax.serialization.to_bytes(tree)
)
every_form = pytest.mark.parametrize("form", [as_it_was, without_a_target, as_flax_has_it])


@every_form
@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: optax.chain(optax.identity(), tx)])
def test_a_state_without_a_scaler_is_the_inner_one(form, wrap, tmp_path):
    bare, tx = wrap(adam), wrap(jscale.with_loss_scale(adam))
    saved, state = varied(bare.init(PARAMS)), tx.init(PARAMS)
    got = checkpoint.attach(state, form(saved, tmp_path / "saved"))
    assert_same_bits(checkpoint.detach(got), saved)
    fresh = jscale.metrics(state)
    assert all(raw(x) == raw(fresh[name]) for name, x in jscale.metrics(got).items())
    assert jax.tree.structure(got) == jax.tree.structure(state)


def test_the_target_for_a_state_without_a_scaler_comes_from_eval_shape(tmp_path):
    tx, saved, mesh = scaled, varied(adam.init(PARAMS)), make_mesh(2)
    target = jax.eval_shape(lambda: checkpoint.detach(tx.init(PARAMS)))
    assert jax.tree.structure(target) == jax.tree.structure(saved)
    spread = through_orbax(tmp_path / "saved", saved, on(mesh, target))
    state = checkpoint.attach(tx.init(PARAMS), spread)
    assert_same_bits(state.inner, saved)
    assert state.inner[1][0].mu["layers"].sharding == sharding(mesh, PARAMS["layers"])


def test_a_train_state_keeps_what_is_around_the_scaler(tmp_path):
    def steps(tx, n):
        make = lambda: TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
        step, state = jax.jit(lambda state, grads: state.apply_gradients(grads=grads)), make()
        for i in range(n):
            state = step(state, gradients(i))
        return state

    saved = steps(adam, 2)  # its step is an array, where the fresh one has a Python int
    state = steps(jscale.with_loss_scale(adam), 0)
    assert isinstance(state.step, int)
    for number, form in enumerate((as_it_was, without_a_target, as_flax_has_it)):
        got = checkpoint.attach(state, form(saved, tmp_path / str(number)))
        assert bits((got.step, got.params, got.opt_state.inner)) == bits(
            (saved.step, saved.params, saved.opt_state)
        )
    got = checkpoint.attach(state, without_a_target(steps(adam, 0), tmp_path / "first"))
    assert type(got.step) is int and got.step == 0


def test_a_state_of_an_nnx_optimizer(tmp_path):
    def make(tx, *values):
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        for value in values:
            grads = jax.tree.map(lambda x: jnp.full_like(x, value), nnx.state(model, nnx.Param))
            optimizer.update(model, grads)
        return optimizer

    inner, several = optax.adam(0.1), {"kernel": jscale.dynamic(), "": jscale.dynamic()}
    bare = nnx.state(make(inner, 1.0, 2.0))
    one = nnx.state(make(jscale.with_loss_scale(inner), 1.0, 2.0, INF))
    inside = lambda state: checkpoint.detach(state)["opt_state"]
    assert_same_bits(inside(one), bare["opt_state"])
    for number, (saved, skips) in enumerate(((bare, 0), (one, 1))):
        for rule in (None, several):
            optimizer = make(jscale.with_loss_scale(inner, rule))
            state = nnx.state(optimizer)
            again = through_orbax(tmp_path / f"{number}{rule is None}", saved)
            for form in (saved, again, nnx.as_pure(saved)):
                got = checkpoint.attach(state, form)
                assert jax.tree.structure(got) == jax.tree.structure(state)
                assert bits(inside(got)) == bits(bare["opt_state"])
                nnx.update(optimizer, got)
                assert jscale.metrics(optimizer.opt_state)["skipped_steps"] == skips
                scale = 2.0 ** (16 - skips)
                scales = jscale.loss_scale(optimizer.opt_state)
                assert set(jax.tree.leaves(jax.tree.map(float, scales))) == {scale}


def test_a_state_with_nothing_inside_detaches_to_nothing():
    tx = jscale.with_loss_scale(optax.sgd(0.1))
    assert checkpoint.detach(tx.init(PARAMS)) == optax.sgd(0.1).init(PARAMS)
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    state = nnx.state(nnx.Optimizer(model, tx, wrt=nnx.Param))
    bare = nnx.state(nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))
    assert bits(checkpoint.detach(state)) == bits(bare)
    assert_same_bits(checkpoint.attach(state, bare), state)


def test_detach_has_no_answer_where_each_group_has_its_own_state():
    own = jscale.with_loss_scale(adam, GROUPS, skip="own")
    with pytest.raises(ValueError, match=r"state\.inner\[key\]"):
        checkpoint.detach(own.init(PARAMS))
    with pytest.raises(ValueError, match="make the optimizer with skip='own'"):
        checkpoint.attach(scaled.init(PARAMS), varied(own.init(PARAMS)))


# From one rule to another


COUNTS = ("finite", "applied_steps", "skipped_steps", "consecutive_skips", "loss_finite")


@every_form
@pytest.mark.parametrize(
    "before, after",
    [
        (jscale.dynamic(64), jscale.headroom()),
        (jscale.headroom(init_scale=64), jscale.dynamic()),
        (jscale.dynamic(64), jscale.anticipate(jscale.headroom())),
        (jscale.anticipate(jscale.dynamic(64)), jscale.presets.torch()),
        (jscale.static(16), jscale.dynamic()),
        (jscale.dynamic(64), jscale.static(2)),
    ],
)
def test_a_new_rule_starts_at_the_scale_of_the_old_one(before, after, form, tmp_path):
    old, new = jscale.with_loss_scale(adam, before), jscale.with_loss_scale(adam, after)
    saved, fresh = varied(old.init(PARAMS)), new.init(PARAMS)
    got = checkpoint.attach(fresh, form(saved, tmp_path / "saved"))
    assert jscale.loss_scale(got) == jscale.loss_scale(saved) != jscale.loss_scale(fresh)
    assert bits([getattr(got, name) for name in COUNTS]) == bits(
        [getattr(saved, name) for name in COUNTS]
    )
    assert_same_bits(got.inner, saved.inner)
    # All else of the rule is as it starts, the scale of a rule inside excepted.
    rename = lambda path, x, like: like if jax.tree_util.keystr(path).endswith("scale") else x
    assert_same_bits(jax.tree.map_with_path(rename, got.rule, fresh.rule), fresh.rule)
    jax.eval_shape(new.update, PARAMS, got, PARAMS)


def test_a_rule_inside_a_rule_starts_there_too():
    saved = jscale.with_loss_scale(adam, jscale.dynamic(32)).init(PARAMS)
    new = jscale.with_loss_scale(adam, jscale.anticipate(jscale.headroom()))
    assert checkpoint.attach(new.init(PARAMS), saved).rule.rule.loss_scale == 32


@pytest.mark.parametrize(
    "after, scale",
    [
        (jscale.dynamic(8, max_scale=8), 8),
        (jscale.headroom(init_scale=2**10, min_scale=2**10), 2**10),
        (jscale.static(2), 2),
        (jscale.headroom(), 64),  # a power of two, and no more than one doubling
    ],
)
def test_the_bounds_of_a_new_rule_apply_from_its_first_update_on(after, scale):
    saved = jscale.with_loss_scale(optax.sgd(0.1), jscale.dynamic(48)).init(PARAMS)
    new = jscale.with_loss_scale(optax.sgd(0.1), after)
    state = checkpoint.attach(new.init(PARAMS), saved)
    assert jscale.loss_scale(state) == 48
    _, state = new.update(PARAMS, state, PARAMS)
    assert jscale.loss_scale(state) == scale


def test_the_scale_of_off_is_no_others():
    off, on_ = (jscale.with_loss_scale(adam, rule) for rule in (jscale.off(), jscale.dynamic(8)))
    saved = varied(off.init(PARAMS))
    got = checkpoint.attach(on_.init(PARAMS), saved)
    assert jscale.loss_scale(got) == 8 and got.applied_steps == saved.applied_steps > 1
    saved = varied(on_.init(PARAMS))
    back = checkpoint.attach(off.init(PARAMS), saved)
    assert jscale.loss_scale(back) == 1 and back.skipped_steps == saved.skipped_steps > 1
    assert back.grad_norm is None


# Several scales


def scales(rule, value):
    """A state whose scales are `value`: a number, or for a dict of rules a dict."""
    tx = jscale.with_loss_scale(adam, rule)
    state = tx.init(PARAMS)
    put = lambda state, x: state._replace(
        loss_scale=jnp.asarray(x, jnp.float32), growth_tracker=state.growth_tracker + 5
    )
    several = isinstance(rule, dict)
    new = {k: put(state.rule[k], value[k]) for k in rule} if several else put(state.rule, value)
    return state._replace(rule=new)


one, stack = jscale.dynamic(), jscale.stacked(jscale.dynamic(), 2)


def assert_donatable(tree):
    """No two leaves share a buffer."""
    data = lambda x: (
        jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )
    pointers = [data(x).unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]
    assert len(set(pointers)) == len(pointers)


@every_form
@pytest.mark.parametrize(
    "before, had, after, want",
    [
        (one, 4.0, {"a/b": one, "": one}, {"a/b": 4.0, "": 4.0}),
        ({"a/b": one, "": one}, {"a/b": 4.0, "": 2.0}, one, 2.0),
        ({"a/b": one, "": one}, {"a/b": 2.0, "": 4.0}, one, 2.0),
        ({"": one, "a/b": one}, {"": 2.0, "a/b": 4.0}, {"a/b": one, "": one}, None),
        (
            {"a/b": one, "": one},
            {"a/b": 4.0, "": 2.0},
            {"a/b/w": one, "layers": one, "": one},
            {"a/b/w": 4.0, "layers": 2.0, "": 2.0},
        ),
        (
            {"a/b/w": one, "layers": one, "": one},
            {"a/b/w": 4.0, "layers": 16.0, "": 8.0},
            {"a": one, "": one},
            {"a": 4.0, "": 8.0},
        ),
        (
            {"rest": one, "": one},
            {"rest": 4.0, "": 2.0},
            {"restful": one, "": one},
            {"restful": 2.0, "": 2.0},
        ),
        (
            {"restful": one, "": one},
            {"restful": 2.0, "": 4.0},
            {"rest": one, "": one},
            {"rest": 4.0, "": 4.0},
        ),
        ({"": one}, {"": 2.0}, one, 2.0),
        (one, 4.0, {"layers": stack, "": one}, {"layers": [4.0, 4.0], "": 4.0}),
        ({"layers": stack, "": one}, {"layers": [8.0, 4.0], "": 6.0}, one, 4.0),
        (
            {"layers": stack, "": one},
            {"layers": [8.0, 4.0], "": 16.0},
            {"layers": one, "": one},
            {"layers": 4.0, "": 16.0},
        ),
    ],
)
def test_a_group_starts_where_what_governed_its_parameters_was(
    before, had, after, want, form, tmp_path
):
    saved = scales(before, had)
    tx = jscale.with_loss_scale(adam, after)
    got = checkpoint.attach(tx.init(PARAMS), form(saved, tmp_path / "saved"))
    want = had if want is None else want
    assert jax.tree.map(lambda x: x.tolist(), jscale.loss_scale(got)) == want
    # The counts of the rule come with it.
    is_rule = lambda x: isinstance(x, jscale.DynamicState)
    rules = jax.tree.leaves(got.rule, is_leaf=is_rule)
    assert all((rule.growth_tracker == 5).all() for rule in rules)
    assert_donatable(got)


def test_groups_get_copies_of_what_is_no_parameters():
    inner = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1))
    own = jscale.with_loss_scale(inner, GROUPS, skip="own").init(PARAMS)
    saved = inner.init(PARAMS)
    got = checkpoint.attach(own, saved)
    assert_donatable(got)
    keys = [got.inner[key][0].rng_key for key in GROUPS]
    assert list(map(raw, keys)) == [raw(saved[0].rng_key)] * 3


def test_every_group_starts_with_its_part_of_the_wrapped_optimizers_state(tmp_path):
    own = jscale.with_loss_scale(adam, GROUPS, skip="own")
    with_scaler, bare = varied(scaled.init(PARAMS)), varied(adam.init(PARAMS))
    for number, saved in enumerate((with_scaler, bare)):
        inner = getattr(saved, "inner", saved)
        for form in (as_it_was, without_a_target):
            got = checkpoint.attach(own.init(PARAMS), form(saved, tmp_path / f"{number}"))
            parts = {key: got.inner[key][1][0] for key in GROUPS}
            assert {int(part.count) for part in parts.values()} == {int(inner[1][0].count)}
            assert raw(parts["layers"].mu["layers"]) == raw(inner[1][0].mu["layers"])
            assert raw(parts["a/b"].nu["a/b"]["w"]) == raw(inner[1][0].nu["a/b"]["w"])
            assert raw(parts[""].mu["rest"]) == raw(inner[1][0].mu["rest"])
            skipped = saved.skipped_steps if saved is with_scaler else 0
            assert set(map(int, got.skipped_steps.values())) == {int(skipped)}
            assert_donatable(got)


# Versions


def golden():
    is_array = lambda x: isinstance(x, list) and isinstance(x[0], str)
    array = lambda x: np.array(x[1], x[0]) if is_array(x) else x
    return jax.tree.map(array, json.loads(GOLDEN.read_text()), is_leaf=is_array)


@every_form
def test_a_file_of_an_older_version_restores(form, tmp_path):
    tx = jscale.with_loss_scale(optax.adam(0.1))
    state = tx.init({"w": jnp.ones(2)})
    got = checkpoint.attach(state, form(golden(), tmp_path / "saved"), version=0)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    assert got.rule[:3] == (4096, 7, 1) and not got.finite and got.grad_norm == 0.5
    assert (got.applied_steps, got.skipped_steps, got.consecutive_skips) == (2**24 + 1, 3, 1)
    moments = got.inner[0]
    assert moments.count == 2**24 + 1 and moments.mu["w"].tolist() == [0.25, -0.5]
    assert moments.nu["w"].tolist() == np.float32([0.0625, 1e-30]).tolist()
    assert got.loss_finite and got.rule.steps_at_min == 0  # which it did not have
    jscale.check(got)


def test_the_version_goes_beside_what_is_saved(tmp_path):
    tx, saved = scaled, varied(scaled.init(PARAMS))
    beside = {"jscale": checkpoint.VERSION}
    with ocp.CheckpointManager(tmp_path / "manager") as manager:
        manager.save(1, args=ocp.args.StandardSave(saved), custom_metadata=beside)
        manager.wait_until_finished()
        version = manager.metadata(1).custom_metadata["jscale"]
        again = manager.restore(1, args=ocp.args.StandardRestore())
    assert_same_bits(checkpoint.attach(tx.init(PARAMS), again, version=version), saved)

    ocp_v1.save(tmp_path / "v1", saved, custom_metadata=beside)
    version = ocp_v1.metadata(tmp_path / "v1").custom_metadata["jscale"]
    again = ocp_v1.load(tmp_path / "v1")
    assert_same_bits(checkpoint.attach(tx.init(PARAMS), again, version=version), saved)


def test_a_newer_version_is_refused():
    state = scaled.init(PARAMS)
    with pytest.raises(ValueError, match="of version 2, .* reads up to 1: update jscale"):
        checkpoint.attach(state, state, version=checkpoint.VERSION + 1)
    with pytest.raises(TypeError, match="version must be a real number"):
        checkpoint.attach(state, state, version="1")


# What does not fit


def changed(**fields):
    return lambda state: state._replace(**fields)


def with_moments(fn):
    def change(state):
        clip, (moments, *rest) = state.inner
        return state._replace(inner=(clip, (fn(moments), *rest)))

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (
            with_moments(lambda m: m._replace(nu=m.nu | {"rest": jnp.ones(4)})),
            r"different inner/1/0/nu/rest \(float32\[4\], not float32\[3\]\)",
        ),
        (
            with_moments(lambda m: m._replace(mu=jax.tree.map(jnp.float32, m.mu))),
            r"different inner/1/0/mu/a/b/w \(float32\[3\], not bfloat16\[3\]\), .*layers",
        ),
        (
            with_moments(lambda m: m._replace(count=jnp.float32(16777217))),
            r"different inner/1/0/count \(float32\[\], not int32\[\]\)",
        ),
        (
            with_moments(lambda m: m._replace(nu={**m.nu, "more": jnp.ones(3)})),
            "unexpected inner/1/0/nu/more[.]",
        ),
        (
            with_moments(lambda m: m._replace(nu={k: m.nu[k] for k in ("rest", "restful")})),
            "missing inner/1/0/nu/a/b/w, inner/1/0/nu/layers[.]",
        ),
        (lambda state: state._asdict() | {"mood": jnp.ones(())}, "unexpected mood[.]"),
        (lambda state: {"rule": state.rule, "skipped_steps": state.skipped_steps}, "missing inner"),
        (lambda state: {}, "missing inner/1/0/count, .* and 4 more"),
        (lambda state: (state,), "missing .*; unexpected 0/"),
        (changed(applied_steps=jnp.float32(1)), r"different applied_steps \(float32\[\], not int"),
        (changed(rule=jscale.StaticState(jnp.float32(0))), "the saved rule/loss_scale must be pos"),
        (changed(rule=jscale.StaticState(jnp.float32(jnp.nan))), "must be positive, finite"),
        (changed(rule=jscale.StaticState(np.float64(8))), r"\(float64\[\], not float32\[\]\)"),
        (changed(rule={"text": {"scale": np.float32(8)}}), "no loss_scale in the rules text"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_paths(change, message):
    state = scaled.init(PARAMS)
    saved = change(varied(state))
    before = bits((state, saved))
    with pytest.raises(ValueError, match=message):
        checkpoint.attach(state, saved)
    assert bits((state, saved)) == before


def test_a_stack_of_another_height_is_refused():
    tall = jscale.with_loss_scale(optax.sgd(0.1), {"": jscale.stacked(jscale.dynamic(), 3)})
    params = {"w": jnp.ones((2, 1))}
    low = jscale.with_loss_scale(optax.sgd(0.1), {"": stack}).init(params)
    with pytest.raises(ValueError, match=r"different rule//loss_scale \(float32\[3\], not float32"):
        checkpoint.attach(low, tall.init({"w": jnp.ones((3, 1))}))


def test_it_takes_one_scaler_and_values():
    state = scaled.init(PARAMS)
    for fn in (checkpoint.detach, lambda state: checkpoint.attach(state, state)):
        with pytest.raises(ValueError, match="no loss scale"):
            fn(adam.init(PARAMS))
        with pytest.raises(ValueError, match="more than one loss scale"):
            fn({"a": state, "b": state})
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(checkpoint.attach)(state, state)
    with pytest.raises(TypeError, match="a ShapeDtypeStruct at rule/loss_scale: restore"):
        checkpoint.attach(state, jax.eval_shape(lambda: state))


# Where arrays go


def test_arrays_go_where_the_state_has_them():
    saved, mesh = varied(scaled.init(PARAMS)), make_mesh(2)
    state = jax.jit(scaled.init, out_shardings=NamedSharding(mesh, P()))(PARAMS)
    abstract = jax.eval_shape(lambda: state)
    for like in (state, on(mesh, abstract)):
        for form in (saved, jax.device_get(saved)):
            got = checkpoint.attach(like, form)
            assert_same_bits(got, saved)
            assert all(
                x.sharding.device_set == set(mesh.devices.flat) for x in jax.tree.leaves(got)
            )
    with pytest.raises(ValueError, match="missing rule/loss_scale"):
        checkpoint.attach(on(mesh, abstract), saved.inner)


def test_what_orbax_committed_to_one_device_steps_with_sharded_parameters(tmp_path):
    tx, mesh = scaled, make_mesh(8)
    params = {"w": jnp.ones((8, 2))}
    saved = through_orbax(tmp_path / "saved", tx.init(params))
    params = jax.device_put(params, NamedSharding(mesh, P("data")))
    state = checkpoint.attach(tx.init(params), saved)
    _, state = jax.jit(tx.update)(params, state, params)
    assert state.inner[1][0].mu["w"].sharding == params["w"].sharding


def test_moments_are_passed_on_and_not_copied():
    saved = varied(adam.init(PARAMS))
    got = checkpoint.attach(scaled.init(PARAMS), saved)
    assert got.inner[1][0].mu["rest"] is saved[1][0].mu["rest"]


def test_functions_in_a_nest_stay():
    saved = {"act": jax.nn.relu, "opt": varied(scaled.init(PARAMS))}
    state = {"act": jax.nn.relu, "opt": scaled.init(PARAMS)}
    for form in (saved, {"opt": saved["opt"]}):
        got = checkpoint.attach(state, form)
        assert got["act"] is jax.nn.relu
        assert_same_bits(got["opt"], saved["opt"])
