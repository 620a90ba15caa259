"""Several scales: which governs what, in which order they learn, and what a skip leaves alone."""

import functools
import operator
import warnings
from typing import Any

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers import assert_same_bits, bits
from hypothesis import assume, given, settings, strategies as st
from jax.sharding import AxisType, PartitionSpec as P
from oracle import Dynamic

import jscale

INF, NAN = np.inf, np.nan


def dynamic(scale=8.0, interval=2, **kwargs):
    return jscale.dynamic(scale, growth_interval=interval, **kwargs)


# Which key governs a leaf


class Box(eqx.Module):
    a: Any
    b: Any
    act: Any = eqx.field(static=True, default=None)


def to_state(tree):
    """Dicts only, since nnx.State has no lists."""
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    return {k: to_state(x) for k, x in tree.items()} if isinstance(tree, dict) else tree


def in_a_box(tree):
    items = list(tree.items())
    return Box(dict(items[::2]), dict(items[1::2]))


containers = {
    "dict": lambda tree: tree,
    "frozen": lambda tree: flax.core.freeze(tree),
    "nnx": lambda tree: nnx.State(to_state(tree)),
    "equinox": in_a_box,
}

names = st.sampled_from(["a", "b", "ab", "a/b", "0"])
trees = st.recursive(
    st.sampled_from([1.0, 1.0, 1, None]),
    lambda inner: (
        st.dictionaries(names, inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)
some = functools.partial(st.dictionaries, names, min_size=1, max_size=3)
top = some(trees | some(trees | some(trees)))


def oracle(path, keys):
    return max((k for k in keys if not k or f"{path}/".startswith(f"{k}/")), key=len, default=None)


@pytest.mark.parametrize("container", containers)
def test_the_longest_prefix_governs(container):
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(top, st.data())
    def check(tree, data):
        array = lambda x: np.float32(x) if isinstance(x, float) else np.int32(x)
        tree = containers[container](jax.tree.map(array, tree))
        flat = jax.tree.leaves_with_path(tree)
        paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
        floats = [p for p, (_, x) in zip(paths, flat, strict=True) if x.dtype == np.float32]
        assume(floats)
        starts = ["", "b", "a/x"] + [
            "/".join(path.split("/")[:n]) for path in floats for n in range(1, 5)
        ]
        one = data.draw(st.sampled_from(floats))
        keys = data.draw(st.lists(st.sampled_from(starts), max_size=2))
        keys = dict.fromkeys([*keys, one, one.split("/")[0], ""])
        keys = data.draw(st.permutations(list(keys)[: data.draw(st.integers(1, 5))]))
        scales = {key: 2.0**i for i, key in enumerate(keys)}
        owned = {path: oracle(path, keys) for path in paths}
        governing = {owned[path] for path in floats}
        if None in governing or not set(keys) - {""} <= governing:
            with pytest.raises(ValueError, match="no key is a prefix of|no parameter is under"):
                jscale.unscale(tree, scales)
            return
        for path, new in zip(paths, jax.tree.leaves(jscale.unscale(tree, scales)), strict=True):
            assert float(new) == (1 / scales[owned[path]] if path in floats else 1), path

    check()


def test_a_bare_array_is_under_the_rest():
    assert float(jscale.unscale(jnp.float32(8), {"": 4.0})) == 2
    with pytest.raises(ValueError, match="no key is a prefix of <root> and no parameter"):
        jscale.unscale(jnp.float32(8), {"a": 4.0})


TREE = {"text": {"w": jnp.ones(2), "n": jnp.int32(3)}, "vision": [jnp.ones(2)], "none": None}

entry_points = pytest.mark.parametrize(
    "enter",
    [
        lambda keys: jscale.unscale(TREE, dict.fromkeys(keys, 2.0)),
        lambda keys: jscale.value_and_grad(
            lambda p: jnp.sum(p["w"] * p["v"]), dict.fromkeys(keys, 2.0), root=next(iter(keys))
        )({"w": 1.0, "v": 2.0}),
        lambda keys: jscale.with_loss_scale(
            optax.sgd(1.0), {key: jscale.dynamic() for key in keys}
        ).init(TREE),
        lambda keys: jscale.with_loss_scale(
            optax.sgd(1.0), {key: jscale.dynamic() for key in keys}, skip="own"
        ).init(TREE),
    ],
    ids=["unscale", "value_and_grad", "init", "init_own"],
)


@entry_points
def test_a_gradient_under_no_key_and_a_key_over_none_are_errors(enter):
    with pytest.raises(ValueError) as error:
        enter(["zebra", "", "apple"])
    assert str(error.value) == (
        "no parameter is under 'zebra', 'apple', or none that is trained: "
        "the keys are 'zebra', '', 'apple', and '' would stand for all the rest."
    )
    with pytest.raises(ValueError, match="no key is a prefix of .*: the keys are 'vis'"):
        enter(["vis"])  # not a whole component of a path


def test_update_has_the_same_errors():
    tx = jscale.with_loss_scale(optax.sgd(1.0), {"text": dynamic(), "vision": dynamic()})
    state = tx.init({"text": jnp.ones(2), "vision": jnp.ones(2)})
    with pytest.raises(ValueError, match="no key is a prefix of audio and no parameter is under "):
        tx.update({"text": jnp.ones(2), "audio": jnp.ones(2)}, state)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda: jscale.with_loss_scale(optax.sgd(1.0), {}), "rule is an empty dict"),
        (lambda: jscale.unscale(TREE, {}), "loss_scale is an empty dict"),
        (lambda: jscale.with_loss_scale(optax.sgd(1.0), {"a/": dynamic()}), "has a key 'a/'"),
        (lambda: jscale.with_loss_scale(optax.sgd(1.0), {"/a": dynamic()}), "has a key '/a'"),
        (lambda: jscale.with_loss_scale(optax.sgd(1.0), {"a//b": dynamic()}), "has a key 'a//b'"),
        (lambda: jscale.with_loss_scale(optax.sgd(1.0), {3: dynamic()}), "has a key 3: keys are"),
        (
            lambda: jscale.with_loss_scale(optax.sgd(1.0), {"text": 1024}),
            r"rule\['text'\] must be a ScaleRule, got 1024",
        ),
        (
            lambda: jscale.with_loss_scale(optax.sgd(1.0), {"text": jscale.off()}),
            r"rule\['text'\] is off\(\), which skips nothing: use static\(1\)",
        ),
        (
            lambda: jscale.with_loss_scale(optax.sgd(1.0), {"text": dynamic()}, skip="each"),
            "skip must be 'any' or 'own', got 'each'",
        ),
        (lambda: jscale.unscale(TREE, {"": 0.0}), r"loss_scale\[''\] must be positive"),
        (lambda: jscale.unscale(TREE, {"": "x"}), r"loss_scale\[''\] must be a real number"),
        (lambda: jscale.unscale(TREE, {"": [1.0, 0.0]}), r"loss_scale\[''\] must be positive"),
        (lambda: jscale.select({"a": True}, TREE, TREE), "no key is a prefix of text/n"),
        (lambda: jscale.select({"": 1}, TREE, TREE), r"finite\[''\] must be a boolean scalar"),
        (
            lambda: jscale.value_and_grad(jnp.sum, {"vision": 1.0, "": 1.0}, root="visio"),
            "root must be one of 'vision', '', got 'visio' .did you mean 'vision'",
        ),
        (
            lambda: jscale.value_and_grad(jnp.sum, {"vision": 1.0, "": 1.0}),
            "root must be one of 'vision', '', got None",
        ),
        (
            lambda: jscale.value_and_grad(jnp.sum, {"a": jnp.ones(2), "": 1.0}, root="a"),
            r"loss_scale\['a'\] must be a scalar",
        ),
        (
            lambda: jscale.value_and_grad(jnp.sum, 1.0, root="a"),
            "root='a' names one of several scales, but loss_scale is 1.0",
        ),
        (
            lambda: jscale.with_loss_scale(optax.sgd(1.0), {"": dynamic()}).update(
                TREE, jscale.with_loss_scale(optax.sgd(1.0)).init(TREE), TREE
            ),
            "the state holds a DynamicState, but this rule keeps one state for each of ''",
        ),
    ],
)
def test_a_mistake_is_one_clear_sentence(wrong, words):
    with pytest.raises((TypeError, ValueError), match=words) as error:
        wrong()
    assert len(str(error.value).splitlines()) == 1


def test_a_loss_scale_of_one_group_needs_no_root():
    f = jscale.grad(lambda p: p["w"] * 3.0, {"": jnp.float32(8)})
    assert float(f({"w": 1.0})["w"]) == 3


def test_select_chooses_by_prefix():
    old = {"text": {"w": jnp.zeros(2), "b": jnp.zeros(2)}, "n": jnp.int32(0)}
    new = {"text": {"w": jnp.ones(2), "b": jnp.full(2, NAN)}, "n": jnp.int32(1)}
    got = jscale.select({"text": jnp.array(True), "text/b": False, "": jnp.array(True)}, new, old)
    assert_same_bits(got, {**new, "text": {"w": new["text"]["w"], "b": old["text"]["b"]}})


# The order of the dict is that of the backward pass

ORDER = ["text", "layers", "audio", ""]  # neither alphabetical nor its reverse
LAYERS = 3
GROUPS = {
    "text": jnp.ones(2),
    "layers": {"w": jnp.ones((LAYERS, 2)), "b": jnp.ones(LAYERS)},
    "audio": jnp.ones(2),
    "else": {"w": jnp.ones(2), "none": None},
}


def rules():
    stack = jscale.stacked(dynamic(2.0**12), LAYERS)
    return {"text": dynamic(), "layers": stack, "audio": dynamic(2.0, 3), "": dynamic(4.0, 1)}


TX = {skip: jscale.with_loss_scale(optax.sgd(1.0), rules(), skip=skip) for skip in ("any", "own")}


def gradients(bad):
    """Finite ones, but for those named in `bad`, of which layers are numbers."""
    at = lambda name: INF if name in bad else 1.0
    stack = jnp.float32([at(layer) for layer in range(LAYERS)])
    return {
        "text": jnp.full(2, at("text")),
        "layers": {"w": jnp.ones((LAYERS, 2)), "b": stack},
        "audio": jnp.full(2, at("audio")),
        "else": {"w": jnp.full(2, at("")), "none": None},
    }


@pytest.fixture(scope="module")
def update():
    """One trace for each way to skip."""
    jitted = {
        skip: jax.jit(lambda g, s, apply, tx=tx: tx.update(g, s, GROUPS, apply=apply))
        for skip, tx in TX.items()
    }
    yield lambda skip, *args: jitted[skip](*args)
    assert all(f._cache_size() <= 1 for f in jitted.values())


# From the loss on, the last layer of a stack first.
BACKWARDS = ["text", *reversed(range(LAYERS)), "audio", ""]
one_step = st.tuples(st.sets(st.sampled_from(BACKWARDS), max_size=2), st.booleans())


@pytest.mark.parametrize("skip", ["any", "own"])
def test_what_comes_after_an_overflow_learns_nothing(skip, update):
    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(st.lists(one_step, min_size=1, max_size=8))
    def check(steps):
        expected = {"text": Dynamic(8, growth_interval=2), "audio": Dynamic(2, growth_interval=3)}
        expected |= {i: Dynamic(2.0**12, growth_interval=2) for i in range(LAYERS)}
        expected |= {"": Dynamic(4, growth_interval=1)}
        group = lambda name: "layers" if isinstance(name, int) else name
        applied, streak = dict.fromkeys(ORDER, 0), dict.fromkeys(ORDER, 0)
        state = TX[skip].init(GROUPS)
        for bad, apply in steps:
            updates, state = update(skip, gradients(bad), state, apply)
            for name in BACKWARDS:
                expected[name].update(name not in bad)
                if name in bad:
                    break
            scales = jscale.loss_scale(state)
            for name, rule in expected.items():
                x = scales[group(name)]
                assert float(x[name] if isinstance(name, int) else x) == rule.scale
            lost = {group(name) for name in bad}
            if skip == "any":
                lost = set(ORDER) if lost else lost
            lost = lost if apply else set(ORDER)
            for key in ORDER:
                applied[key] += key not in lost
                streak[key] = streak[key] + 1 if key in lost else 0
                of = lambda x, key=key: x[key] if isinstance(x, dict) else x
                assert bool(of(state.finite)) == (key not in lost)
                assert int(of(state.applied_steps)) == applied[key]
                assert int(of(state.consecutive_skips)) == streak[key]
            assert float(updates["audio"][0]) == (0 if "audio" in lost else -1)
            assert float(updates["layers"]["b"][0]) == (0 if "layers" in lost else -1)
            norms = state.grad_norm
            finite = [np.isfinite(norms[key]).all() for key in ORDER]
            assert finite == [key not in {group(x) for x in bad} for key in ORDER]

    check()


@pytest.mark.parametrize("skip", ["any", "own"])
def test_state_out_is_of_the_type_of_state_in(skip, update):
    state = TX[skip].init(GROUPS)
    kinds = lambda tree: [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]
    for bad in ({}, {"text"}, {1}):
        _, new = update(skip, gradients(bad), state, True)
        assert jax.tree.structure(new) == jax.tree.structure(state)
        assert kinds(new) == kinds(state)
        assert not any(x.weak_type for x in jax.tree.leaves(new))


@pytest.mark.parametrize("skip", ["any", "own"])
def test_donated_scanned_and_vmapped(skip, update):
    tx = TX[skip]
    states = [tx.init(GROUPS)]
    batches = [gradients(bad) for bad in ({}, {2}, {"audio"})]
    for g in batches:
        states.append(update(skip, g, states[-1], True)[1])
    stack = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    step = lambda s, g: (tx.update(g, s, GROUPS)[1], None)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state, stack):
        scanned, _ = jax.lax.scan(step, state, stack)
        return scanned

    first = tx.init(GROUPS)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(first)]
    assert len(pointers) == len(set(pointers))
    assert_same_bits(run(first, stack), states[-1])
    each = jax.jit(jax.vmap(lambda g: step(states[0], g)[0]))(stack)
    for i, g in enumerate(batches):
        want = update(skip, g, states[0], True)[1]
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], each), want)
    shapes = {x.shape for k, x in jscale.metrics(each).items() if k != "grad_scale/layers"}
    assert shapes == {(3,), (3, LAYERS)}
    jscale.check(each)


# What a skip leaves alone


def schedule(step):
    return 0.5 / (1.0 + step)


INNERS = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)),
    "multi_steps": lambda: optax.MultiSteps(optax.sgd(0.5, momentum=0.5), 2),
    "injected": lambda: optax.inject_hyperparams(optax.sgd)(schedule, momentum=0.9),
}


def compiled(inner, update):
    """Op by op where rounding could depend on fusion; MultiSteps is slow that way, and exact."""
    return jax.jit(update) if inner == "multi_steps" else update


PAIR = {"text": {"w": jnp.float32([1, -2]), "b": jnp.float32(3)}, "image": jnp.float32([0.5, 4])}
FLAGS = [(1, 1, 1), (1, 0, 1), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1), (1, 1, 1), (1, 1, 1)]


def pair_gradients(i, text, image):
    return {
        "text": {"w": jnp.float32([1 + i, -3]), "b": jnp.float32(2 if text else NAN)},
        "image": jnp.float32([0.25 * i, 5 if image else INF]),
    }


@pytest.mark.parametrize("inner", INNERS)
def test_own_is_as_if_each_group_were_trained_alone(inner, standard_promotion):
    rules = {"text": dynamic(2.0**14), "image": dynamic(2.0**4, 1)}
    tx = jscale.with_loss_scale(INNERS[inner](), rules, skip="own")
    alone = {k: jscale.with_loss_scale(INNERS[inner](), rule) for k, rule in rules.items()}
    update = compiled(inner, tx.update)
    update_alone = {k: compiled(inner, one.update) for k, one in alone.items()}
    params, state = PAIR, tx.init(PAIR)
    apart = {k: (PAIR[k], alone[k].init(PAIR[k])) for k in rules}
    for i, (text, image, apply) in enumerate(FLAGS):
        grads, extra = pair_gradients(i, text, image), {"apply": bool(apply), "loss": float(i)}
        if inner != "adamw":
            extra = {"apply": bool(apply)}
        updates, state = update(grads, state, params, **extra)
        params = optax.apply_updates(params, updates)
        for k in rules:
            p, old = apart[k]
            u, new = update_alone[k](grads[k], old, p, **extra)
            if k == "image" and not text:
                new = new._replace(rule=old.rule)
            apart[k] = optax.apply_updates(p, u), new
            assert bits(updates[k]) == bits(u)
            assert bits(params[k]) == bits(apart[k][0])
            assert bits(state.inner[k]) == bits(new.inner)
            assert new.finite or bits(new.inner) == bits(old.inner)
            assert bits(state.rule[k]) == bits(new.rule)
            for field in ("finite", "grad_norm", "applied_steps", "skipped_steps"):
                assert bits(getattr(state, field)[k]) == bits(getattr(new, field))
    assert {k: int(x) for k, x in state.applied_steps.items()} == {"text": 5, "image": 4}


@pytest.mark.parametrize("inner", INNERS)
def test_any_is_as_if_there_were_one_group_but_for_the_scales(inner, standard_promotion):
    rules = {"text": dynamic(2.0**14), "image": dynamic(2.0**4, 1)}
    tx = jscale.with_loss_scale(INNERS[inner](), rules)
    one = jscale.with_loss_scale(INNERS[inner]())
    update, update_one = compiled(inner, tx.update), compiled(inner, one.update)
    params, state = PAIR, tx.init(PAIR)
    want, single = PAIR, one.init(PAIR)
    for i, (text, image, apply) in enumerate(FLAGS):
        grads, extra = pair_gradients(i, text, image), {"apply": bool(apply)}
        updates, new = update(grads, state, params, **extra)
        if not (text and image and apply):
            assert_same_bits(new.inner, state.inner)
            assert all(not np.any(u) and np.signbit(u).all() for u in jax.tree.leaves(updates))
        u, single = update_one(grads, single, want, **extra)
        params, state = optax.apply_updates(params, updates), new
        want = optax.apply_updates(want, u)
        assert_same_bits(params, want)
        assert_same_bits(state.inner, single.inner)
        assert_same_bits((state.finite, state.skipped_steps), (single.finite, single.skipped_steps))
    assert int(state.applied_steps) == 3


def test_own_leaves_what_is_in_no_group_to_none():
    """Integers need no key; they go with the first one."""
    params = {"text": jnp.ones(2), "image": jnp.ones(2), "step": jnp.int32(3), "key": None}
    grads = {
        "text": jnp.ones(2),
        "image": jnp.full(2, INF),
        "step": np.zeros((), jax.dtypes.float0),
        "key": None,
    }
    tx = jscale.with_loss_scale(
        optax.identity(), {"text": dynamic(), "image": dynamic()}, skip="own"
    )
    updates, state = tx.update(grads, tx.init(params), params)
    assert updates["step"] is grads["step"] or updates["step"].dtype == jax.dtypes.float0
    assert updates["key"] is None
    np.testing.assert_array_equal(updates["text"], [1, 1])
    np.testing.assert_array_equal(updates["image"], [0, 0])
    assert {k: bool(x) for k, x in state.finite.items()} == {"text": True, "image": False}


@pytest.mark.parametrize("skip", ["any", "own"])
def test_a_parameter_without_a_gradient_is_left_alone(skip):
    params = {"text": jnp.ones(2), "image": {"w": jnp.ones(2), "frozen": jnp.ones(2)}}
    grads = {"text": jnp.ones(2), "image": {"w": jnp.ones(2), "frozen": None}}
    rules = {"text": dynamic(), "image": dynamic()}
    tx = jscale.with_loss_scale(optax.sgd(1.0), rules, skip=skip)
    updates, state = tx.update(grads, tx.init(params), params)
    assert updates["image"]["frozen"] is None and bool(jscale.metrics(state)["finite"])


@pytest.mark.parametrize("skip", ["any", "own"])
def test_norms_that_are_finite_one_by_one(skip):
    """Clipping takes the norm of all that `inner` sees; float32 cannot hold this one."""
    params = {"text": jnp.zeros(2), "image": jnp.zeros(2)}
    grads = jax.tree.map(lambda x: x + 1.1e19, params)
    tx = jscale.with_loss_scale(
        optax.clip_by_global_norm(1.0), {"text": dynamic(), "image": dynamic()}, skip=skip
    )
    updates, state = tx.update(grads, tx.init(params), params)
    assert all(np.isfinite(x) for x in state.grad_norm.values())
    if skip == "any":
        assert not state.finite
        np.testing.assert_array_equal(updates["text"], [0, 0])
    for g in updates.values():  # clipped, or dropped
        assert not np.any(g) or abs(np.linalg.norm(np.float64(g)) - 1) < 1e-6


def test_half_precision_parameters_are_named():
    tx = jscale.with_loss_scale(optax.sgd(1.0), {"a": dynamic(), "": dynamic()}, skip="own")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tx.init({"a": {"w": jnp.ones(2, jnp.float16)}, "b": jnp.ones(2)})
    assert ["parameters in float16: a/w" in str(w.message) for w in caught] == [True]
    assert caught[0].filename == __file__


def test_a_wrapped_optimizer_may_not_be_wrapped_again():
    once = jscale.with_loss_scale(optax.sgd(1.0))
    for skip in ("any", "own"):
        tx = jscale.with_loss_scale(once, {"a": dynamic(), "": dynamic()}, skip=skip)
        with pytest.raises(ValueError, match="has a loss scale already"):
            tx.init({"a": jnp.ones(2), "b": jnp.ones(2)})


# Devices


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("skip", ["any", "own"])
def test_devices_agree_group_by_group(check_vma, skip):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    order = {"text": dynamic(), "layers": jscale.stacked(dynamic(), 2), "audio": dynamic()}
    tx = jscale.with_loss_scale(optax.sgd(1.0), order, skip=skip, axis_name="d")
    params = {"text": jnp.ones(1), "layers": jnp.ones((2, 1)), "audio": jnp.ones(1)}

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("d"), P()), out_specs=P("d"), check_vma=check_vma
    )
    def run(state, value, apply):
        layers = jnp.stack([jnp.ones(1), value])
        grads = {"text": jnp.ones(1), "layers": layers, "audio": jnp.ones(1)}
        allowed = apply | (jax.lax.axis_index("d") != 1)
        updates, state = tx.update(grads, state, params, apply=allowed, loss=jnp.sum(value))
        out = jscale.loss_scale(state), state.finite, state.loss_finite, updates["audio"]
        # Stacked, so that each device tells what it decided.
        return jax.tree.map(
            lambda x: x.astype(jnp.float32)[None] + allowed.astype(jnp.float32) * 0, out
        )

    run_one = lambda bad, apply: run(tx.init(params), jnp.ones(4).at[2].set(bad), apply)
    scales, finite, loss_finite, update = jax.tree.map(np.asarray, run_one(INF, True))
    assert (scales["text"] == 8).all() and (scales["audio"] == 8).all()
    np.testing.assert_array_equal(scales["layers"], np.tile([8, 4], (4, 1)))
    assert not loss_finite.any()
    if skip == "own":
        assert finite["text"].all() and finite["audio"].all() and not finite["layers"].any()
        assert (update == -1).all()
    else:
        assert not finite.any() and not update.any()
    _, finite, loss_finite, update = run_one(1.0, False)  # one device vetoes for all
    assert not any(np.any(x) for x in jax.tree.leaves(finite)) and loss_finite.all()
    assert not np.any(update)


# What is seen from outside


def states(update, skip, steps):
    state = TX[skip].init(GROUPS)
    for bad in steps:
        _, state = update(skip, gradients(bad), state, True)
    return state


def test_metrics_have_the_same_keys_every_time(update):
    norms = {f"{name}/{key or 'rest'}" for name in ("grad_scale", "grad_norm") for key in ORDER}
    own = ("finite", "applied_steps", "skipped_steps", "consecutive_skips")
    for steps in ([], [{}], [{2}], [{2}, {"text"}]):
        seen = jscale.metrics(states(update, "any", steps))
        assert set(seen) == norms | set(own) | {"loss_finite"}
        assert {k for k, x in seen.items() if x.shape} == {"grad_scale/layers", "grad_norm/layers"}
        seen = jscale.metrics(states(update, "own", steps))
        each = {f"{name}/{key or 'rest'}" for name in own for key in ORDER}
        assert set(seen) == norms | each | {"finite", "loss_finite"}
        assert bool(seen["finite"]) == (steps in ([], [{}]))


@functools.cache
def two_groups(skip, text, image):
    tx = jscale.with_loss_scale(optax.sgd(1.0), {"text": text, "image": image}, skip=skip)
    params = {"text": jnp.ones(1), "image": jnp.ones(1)}
    return tx.init(params), jax.jit(lambda g, s, **kwargs: tx.update(g, s, params, **kwargs)[1])


def check_after(skip, text, image, steps, loss=0.0, apply=True):
    state, update = two_groups(skip, text, image)
    for good in steps:
        text, image = (jnp.full(1, 1.0 if g else INF) for g in good)
        state = update({"text": text, "image": image}, state, loss=loss, apply=apply)
    jscale.check(state)


@pytest.mark.parametrize("skip", ["any", "own"])
def test_check_looks_for_the_group_that_is_to_blame(skip):
    floor, free = dynamic(1, min_scale=1), dynamic(2.0**20)
    check = functools.partial(check_after, skip)
    check(floor, free, [(1, 1)] * 3 + [(1, 0)])
    # The second has long been at its minimum, and receives the overflow of the first.
    check(free, dynamic(1, 1000, min_scale=1), [(1, 1)] * 3 + [(0, 0)] * 3)
    check(free, floor, [(0, 0), (1, 0), (1, 1)])
    with pytest.raises(FloatingPointError, match="the loss scale of image at its minimum, 1, aft"):
        check(free, floor, [(1, 0)] * 3)
    with pytest.raises(FloatingPointError, match="the loss scale of text at its minimum, 1, aft"):
        check(floor, free, [(0, 1)] * 3)
    with pytest.raises(
        FloatingPointError, match="40 skipped .*; the loss scale of image is 9.5.* G"
    ):
        check(free, free, [(1, 0)] * 40)
    with pytest.raises(FloatingPointError, match="of image is .* of text is .*apply= vetoed it"):
        check(free, free, [(1, 1)] * 40, apply=False)
    with pytest.raises(FloatingPointError, match="the loss is not finite"):
        check(free, free, [(1, 1)], loss=NAN)


def test_what_is_no_gradient_needs_no_key_whatever_the_optimizer_makes_of_it():
    params = {"text": jnp.ones(2), "step": jnp.int32(3)}
    tx = jscale.with_loss_scale(optax.stateless(to_floats), {"text": dynamic()}, skip="own")
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["step"].dtype == jnp.float32


def to_floats(updates, params=None):
    return jax.tree.map(lambda x: x.astype(jnp.float32), updates)


def test_check_names_the_layer(update):
    with pytest.raises(FloatingPointError, match="the loss scale of layers/1 is 0.00390625"):
        jscale.check(states(update, "own", [{1}] * 20), max_skips=5)


def test_a_rule_that_loses_its_scale_is_named():
    rule = jscale.ScaleRule(jscale.static(8).init, lambda s, o: s._replace(loss_scale=0.0))
    with pytest.raises(FloatingPointError, match=r"the loss scale of image is 0\.0: the rule must"):
        check_after("any", dynamic(), rule, [(1, 1)])


# In the company of others


@pytest.mark.parametrize("skip", ["any", "own"])
def test_checkpoints_bring_a_state_back(skip, tmp_path, update):
    params = {"text": {"decoder": jnp.ones(2), "w": jnp.ones(2)}, "image": jnp.ones((2, 1))}
    rules = {"text/decoder": dynamic(), "image": jscale.stacked(dynamic(2.0), 2), "": dynamic(4.0)}
    tx = jscale.with_loss_scale(optax.adam(schedule), rules, skip=skip)
    first = tx.init(params)
    with jax.numpy_dtype_promotion("standard"):
        _, state = tx.update(params | {"image": jnp.float32([[1], [INF]])}, first, params)
    serial = flax.serialization
    raw = serial.to_state_dict(state)
    for got in (
        serial.from_state_dict(first, raw),
        serial.from_bytes(first, serial.to_bytes(state)),
    ):
        assert jax.tree.structure(got) == jax.tree.structure(state)
        assert bits(got) == bits(state)
    assert_same_bits(jscale.metrics(raw), jscale.metrics(state))
    assert_same_bits(jscale.loss_scale(raw), jscale.loss_scale(state))
    jscale.check(raw)
    if skip == "any":
        return
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        got = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: first))
    assert_same_bits(got, state)
    with jax.numpy_dtype_promotion("standard"):
        assert_same_bits(tx.update(params, got, params), tx.update(params, state, params))


class Pair(nnx.Module):
    def __init__(self):
        self.text = nnx.Param(jnp.float32([1, 2]))
        self.image = nnx.Param(jnp.float32([1, 2]))


@pytest.mark.parametrize("skip", ["any", "own"])
def test_an_nnx_optimizer(skip):
    model = Pair()
    rules = {"text": dynamic(2.0), "image": dynamic(2.0**15)}
    inner = optax.sgd(0.5, momentum=0.5)
    optimizer = nnx.Optimizer(model, jscale.with_loss_scale(inner, rules, skip=skip), wrt=nnx.Param)

    def loss_fn(model, scale):
        half = lambda m: m.image[...].astype(jnp.float16) * jnp.float16(4)
        image = jscale.region(half, scale["image"], scale["text"])(model)
        return jnp.sum(model.text[...]) + jnp.sum(image.astype(jnp.float32))

    @nnx.jit
    def step(model, optimizer):
        scale = jscale.loss_scale(optimizer.opt_state)
        f = jscale.value_and_grad(
            lambda m: loss_fn(m, scale), scale, root="text", transform=nnx.value_and_grad
        )
        loss, grads = f(model)
        optimizer.update(model, grads, loss=loss)
        return jscale.metrics(optimizer.opt_state)

    metrics = [step(model, optimizer) for _ in range(3)]
    assert [float(m["grad_scale/image"]) for m in metrics] == [2.0**14, 2.0**13, 2.0**13]
    assert [bool(m["finite"]) for m in metrics] == [False, False, True]
    np.testing.assert_array_equal(model.image[...], [-1, 0])
    text = [0.5, 1.5] if skip == "any" else [-1.125, -0.125]  # 0.5, 0.75 and 0.875
    np.testing.assert_array_equal(model.text[...], text)
    jscale.check(optimizer.opt_state)


# Several losses, several optimizers


def test_a_scaler_without_an_optimizer_for_each_of_several_losses():
    """apex's num_losses: one state each; their unscaled gradients are added."""
    scaler = jscale.with_loss_scale(optax.identity(), dynamic())
    params = {"w": jnp.float32([1, 2])}
    losses = [
        lambda p, x: jnp.sum(p["w"] * x),
        lambda p, x: 3.0 * jnp.sum((p["w"].astype(jnp.float16) * x.astype(jnp.float16)) * 1).astype(
            jnp.float32
        ),
    ]  # fmt: skip
    states = [scaler.init(params) for _ in losses]

    @jax.jit
    def step(states, x):
        parts, new = [], []
        for loss, state in zip(losses, states, strict=True):
            grads = jscale.grad(loss, jscale.loss_scale(state))(params, x)
            part, state = scaler.update(grads, state, params)
            parts.append(part)
            new.append(state)
        return jax.tree.map(operator.add, *parts), new

    total, states = step(states, jnp.float32([5, -7]))
    np.testing.assert_array_equal(total["w"], [20, -28])
    assert [int(s.skipped_steps) for s in states] == [0, 0]
    total, states = step(states, jnp.float32([5, 1e5]))  # too large for float16
    np.testing.assert_array_equal(total["w"], np.float32([5, 1e5]))
    assert [float(jscale.loss_scale(s)) for s in states] == [16, 4]
    assert [int(s.skipped_steps) for s in states] == [0, 1]


def test_losses_at_different_scales_add_up_exactly():
    """apex#179: not (g1 * 2^15 + g2 * 2) / 2^15."""
    f = lambda w: w * 1.0
    total = jscale.grad(f, 2.0**15)(1.0) + jscale.grad(f, 2.0)(1.0)
    assert float(total) == 2


def test_what_overflowed_adds_nothing():
    scaler = jscale.with_loss_scale(optax.identity(), dynamic())
    params = jnp.float32([1, 2, 3])
    part, _ = scaler.update(jnp.float32([INF, 1, NAN]), scaler.init(params), params)
    other = jnp.float32([-0.0, 0.0, 2.0**-149])
    np.testing.assert_array_equal(np.signbit(part + other), np.signbit(other))
    assert np.asarray(part).tobytes() == np.float32([-0.0] * 3).tobytes()


@pytest.mark.parametrize("d_good, g_good", [(1, 1), (0, 1), (1, 0)])
def test_two_optimizers_share_a_scale_that_moves_once_in_a_step(d_good, g_good):
    scaler = jscale.with_loss_scale(optax.identity(), dynamic(8.0, 2))
    params = {"d": jnp.ones(2), "g": jnp.ones(2)}
    optimizers = {
        k: jscale.with_loss_scale(optax.sgd(0.5, momentum=0.5), jscale.off()) for k in params
    }
    states = {k: tx.init(params[k]) for k, tx in optimizers.items()}
    grads = {"d": jnp.full(2, 1.0 if d_good else INF), "g": jnp.full(2, 1.0 if g_good else NAN)}
    _, scale = scaler.update(grads, scaler.init(params), params)
    good = d_good and g_good
    assert float(jscale.loss_scale(scale)) == (8 if good else 4)
    for k, tx in optimizers.items():
        updates, state = tx.update(grads[k], states[k], params[k], apply=scale.finite)
        np.testing.assert_array_equal(updates, np.full(2, -0.5 if good else -0.0))
        assert int(state.skipped_steps) == (not good)
        if not good:
            assert_same_bits(state.inner, states[k].inner)
    if good:
        _, scale = scaler.update(grads, scale, params)
        assert float(jscale.loss_scale(scale)) == 16


def test_two_optimizers_on_their_own_skip_on_their_own():
    tx = jscale.with_loss_scale(optax.sgd(0.5), dynamic(8.0, 2))
    params = {"d": jnp.ones(2), "g": jnp.ones(2)}
    grads = {"d": jnp.ones(2), "g": jnp.full(2, INF)}
    out = {k: tx.update(grads[k], tx.init(params[k]), params[k]) for k in params}
    assert {k: float(jscale.loss_scale(s)) for k, (_, s) in out.items()} == {"d": 8, "g": 4}
    assert {k: float(u[0]) for k, (u, _) in out.items()} == {"d": -0.5, "g": 0}
