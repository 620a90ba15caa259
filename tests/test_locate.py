import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jscale
from jscale import _steps


def locate(fun, scale=1.0, **options):
    return lambda *args, **kwargs: jscale.locate(fun, *args, scale=scale, **options, **kwargs)


F16, F32 = jnp.float16, jnp.float32
LAYERS, TURNS = 3, 2
INF, NAN = 1.0, 2.0  # what `spoil` makes of these; 0 does nothing


def uniform(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).uniform(-1, 1, shape), F32)


def line(fun, offset=1):
    """The source of what is `offset` lines below the head of a function."""
    code = fun.__code__
    return f"test_locate.py:{code.co_firstlineno + offset} ({code.co_qualname})"


def indices(fault):
    return tuple(turn.number for turn in fault.turns)


# A net that can be spoilt in many places.


def spoil(x, how):
    return x + jnp.log1p(-how)


@jax.custom_vjp
def spoil_backward(x, how):
    return x


def spoil_cotangent(how, g):
    return g + jnp.log1p(-how), jnp.zeros_like(how)


spoil_backward.defvjp(lambda x, how: (x, how), spoil_cotangent)


def first(x, how):
    return spoil_backward(spoil(x, how["forward"]), how["backward"])


def inner(x, how):
    return first(x, how), None


def layer(x, inputs):
    w, how, nested = inputs
    x = first(jnp.tanh(x @ w), how)
    return lax.scan(inner, x, nested)


def net(params, x, how):
    x = first(x, how["start"])
    x, _ = lax.scan(layer, x, (params["layers"], how["layers"], how["nested"]))
    x = jscale.region(lambda w, x: first(jnp.tanh(x @ w), how["region"]), 4.0, 1.0)(params["w"], x)
    x = jax.checkpoint(lambda w, x: first(jnp.sin(x @ w), how["checkpoint"]))(params["w"], x)
    x = lax.cond(how["jit"]["forward"] < 9, lambda x: first(x, how["branch"]), jnp.sin, x)
    x = jax.jit(lambda x: first(x * 2, how["jit"]))(x)
    return jnp.mean(x**2)


PLACES = {
    "start": (),
    "layers": (LAYERS,),
    "nested": (LAYERS, TURNS),
    "region": (),
    "checkpoint": (),
    "branch": (),
    "jit": (),
}
PARAMS = {"layers": uniform(0, LAYERS, 4, 4), "w": uniform(1, 4, 4)}
X = uniform(2, 2, 4)


def nothing():
    of = lambda shape: {key: np.zeros(shape, np.float32) for key in ("forward", "backward")}
    return {place: of(shape) for place, shape in PLACES.items()}


places = st.sampled_from(sorted(PLACES)).flatmap(
    lambda place: st.tuples(
        st.just(place), st.tuples(*(st.integers(0, n - 1) for n in PLACES[place]))
    )
)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(places, st.sampled_from(["forward", "backward"]), st.sampled_from([INF, NAN]), st.booleans())
def test_wherever_inf_or_nan_is_made_it_is_found(where, phase, kind, cast):
    place, index = where
    how = nothing()
    how[place][phase][index] = kind
    fun = jscale.autocast(net) if cast else net
    found = locate(fun, 8.0)(PARAMS, X, how)
    assert (found.first.operation, found.first.backward) == ("log1p", phase == "backward")
    assert found.first.source == line(spoil if phase == "forward" else first)
    assert indices(found.first) == index
    (out,) = found.first.outputs
    assert (out.infs, out.nans) == ((1, 0) if kind == INF else (0, 1))
    assert ("loss" in found.nonfinite) == (phase == "forward")


@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.lists(places, min_size=2, max_size=3, unique=True))
def test_of_several_the_first_is_found_and_the_others_are_listed(wheres):
    how = nothing()
    for place, index in wheres:
        how[place]["forward"][index] = NAN
    order = [(p, i) for p in PLACES for i in np.ndindex(PLACES[p]) if p not in ("layers", "nested")]
    loops = [
        x
        for n in range(LAYERS)
        for x in [("layers", (n,)), *(("nested", (n, m)) for m in range(TURNS))]
    ]
    order = [order[0], *loops, *order[1:]]
    found = locate(net)(PARAMS, X, how)
    place, index = min(wheres, key=order.index)
    assert indices(found.first) == index and found.first.source == line(spoil)
    forward = [x for x in found.others if not x.backward]
    assert [indices(x) for x in forward] == [i for _, i in sorted(wheres, key=order.index)[1:]]


def test_of_a_healthy_net_nothing_is_said():
    for scale in (1.0, 2.0**20):
        found = locate(net, scale)(PARAMS, X, nothing())
        assert found == ((), None, (), ())
    finite, hint, lost = str(found).splitlines()
    assert finite == "the loss and all gradients are finite" and "autocast included" in hint
    assert lost == "no operation lost most of its values to zero"


# Masks.


def attention(w, x, mask):
    scores = x @ w @ x.T
    return jnp.mean(jax.nn.softmax(mask(scores), axis=-1) @ x)


LOWER = np.tril(np.ones((4, 4), bool))
MASKS = {
    "where": lambda s: jnp.where(LOWER, s, -jnp.inf),
    "log": lambda s: s + jnp.log(LOWER.astype(np.float32)),
    "bias": lambda s: s + np.where(LOWER, np.float32(0), np.float32(-np.inf)),
    "where of log": lambda s: jnp.where(LOWER, s, jnp.log(jnp.zeros_like(s))),
}
ATTENTION = uniform(3, 4, 4), uniform(4, 4, 4)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("cast", [False, True])
def test_masks_are_not_blamed(name, cast):
    fun = functools.partial(attention, mask=MASKS[name])
    found = locate(jscale.autocast(fun) if cast else fun)(*ATTENTION)
    assert found.first is None and found.nonfinite == ()


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_not_blamed_for_what_overflows_beside_them(name):
    w, x = ATTENTION
    w = jnp.abs(w)
    x = x.at[3, 0].set(1e30)  # the last query sees everything
    found = locate(functools.partial(attention, mask=MASKS[name]))(w, x)
    assert found.first.operation == "dot_general"
    assert found.first.source == line(attention)
    assert found.nonfinite == ("loss", "gradient")


def test_a_row_that_is_all_masked_is_blamed_where_it_turns_to_nan():
    mask = lambda s: jnp.where(LOWER & (np.arange(4) > 0)[:, None], s, -jnp.inf)
    found = locate(functools.partial(attention, mask=mask))(*ATTENTION)
    assert found.first.operation == "sub" and found.first.source == line(attention, 2)
    assert found.first.outputs[0].nans == 4 and found.first.inputs[0].infs > 0


def test_reductions_from_infinity_are_not_blamed():
    def loss(x):
        padded = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "SAME")
        return (
            jnp.max(x, initial=-jnp.inf)
            + jnp.min(x, where=x > 0, initial=jnp.inf)
            + jnp.sum(padded)
        )

    assert locate(loss)(X).first is None


def test_an_infinity_in_the_code_is_blamed_if_nothing_else_is():
    found = locate(lambda w: jnp.sum(w) + jnp.inf)(X)
    assert found.first.operation == "add" and "written in the code" in found.first.note
    assert found.nonfinite == ("loss",) and found.others == ()


def test_where_does_not_hide_a_derivative():
    fun = lambda w: jnp.sum(jnp.where(w > 0, jnp.sqrt(jnp.maximum(w, 0.0)), 0.0))
    found = locate(fun)(jnp.array([0.0, 1.0]))
    assert found.nonfinite == ("gradient",)
    assert found.first.backward or found.first.operation in ("div", "rsqrt", "pow")
    assert found.first.outputs[0].infs == 1


@pytest.mark.parametrize("first", [0, 5, 15])
def test_faults_side_by_side_in_an_array_are_told_apart(first):
    def loss(w):
        x = jnp.stack([jnp.log(x) for x in w])
        return jnp.sum(lax.slice_in_dim(x.reshape(4, 5).reshape(20), first, 20))

    found = locate(loss)([jnp.float32(0)] * 20)
    logs = [x for x in found.others if x.operation == "log"]
    assert found.first.operation == "log" and len(logs) == 19
    assert found.nonfinite[0] == "loss" and found.first.inputs[0].name == f"0/{first}"


def test_which_of_several_alone_would_do_is_seen_in_sums_and_products():
    def loss(w):
        x = jnp.stack([jnp.log(w[0]), jnp.exp(w[1]), w[2]])  # both overflow
        picked = x * jnp.array([0.0, 1.0, 1.0])  # of 0 * inf comes NaN
        return jnp.sum(jnp.where(jnp.arange(3) > 0, picked, 0.0))

    found = locate(loss)(jnp.array([0.0, 1e3, 1.0]))
    assert found.first.operation == "exp"


# Where things come from.


@pytest.mark.parametrize("as_numpy", [False, True])
def test_arguments_that_come_with_nan_are_named(as_numpy):
    x = np.array(X)
    x[1, 2] = np.nan
    batch = {"image": x if as_numpy else jnp.asarray(x)}
    found = locate(lambda w, batch: jnp.sum(batch["image"] @ w))(PARAMS["w"], batch)
    assert found.first.operation == "argument"
    (seen,) = found.first.outputs
    assert (seen.name, seen.shape, seen.nans) == ("1/image", (2, 4), 1)
    assert str(found).splitlines()[1:3] == [
        "argument",
        f"  is     1/image float32[2,4]: {seen.smallest:.3g} to {seen.largest:.3g}, 1 nan",
    ]


def test_parameters_are_named_through_casts_and_loops():
    def step(x, w):
        return x + jnp.sum(jnp.exp(w.T)), None

    fun = lambda p: lax.scan(step, 0.0, p["layers"])[0]
    found = locate(fun)({"layers": jnp.zeros((3, 2, 2)).at[1, 0, 0].set(100.0)})
    assert found.first.operation == "exp" and found.first.inputs[0].name == "0/layers/1"
    assert found.first.inputs[0].largest == 100.0 and indices(found.first) == (1,)


def test_lines_are_those_of_the_call_and_scopes_those_around():
    def loss(w):
        a = jax.nn.relu(w)
        with jax.named_scope("decoder"):
            b = jax.nn.relu(a)
            with jax.named_scope("wo"):
                return jnp.sum(jax.nn.silu(b * 1e30) * 1e30)

    found = locate(loss)(X)
    assert found.first.source == line(loss, 5) and found.first.scope == "decoder/wo"
    assert f"at {line(loss, 5)} in decoder/wo" in str(found)


def test_a_jitted_function_that_is_called_twice_has_two_places():
    double = jax.jit(lambda x: x * 2.0**100)

    def loss(w):
        with jax.named_scope("one"):
            x = double(w)
        with jax.named_scope("two"):
            return jnp.sum(double(x))

    assert locate(loss)(X).first.scope == "two"


def test_loops_without_length_count_their_turns():
    def grow(state):
        return state[0] + 1, state[1] * 2.0**30

    def loss(w):
        _, x = lax.while_loop(lambda s: s[0] < 6, grow, (0, lax.stop_gradient(w)))
        return jnp.sum(x * w)

    found = locate(loss)(jnp.ones(2))
    assert found.first.source == line(grow) and indices(found.first) == (4,)
    assert found.first.turns[0].loop == "while" and found.first.turns[0].length is None


def test_only_the_branch_that_is_taken_counts():
    branches = [lambda x: x, lambda x: jnp.log(x - x)]
    fun = lambda w, i: jnp.sum(lax.switch(i, branches, w))
    assert locate(fun)(X, 0).first is None
    assert locate(fun)(X, jnp.int32(1)).first.operation == "log"


def test_backward_turns_of_a_scan_are_those_of_its_slices():
    def step(x, w):
        return x * w, x

    fun = lambda w: jnp.sum(lax.scan(step, 1.0, w)[1] * 1e-30)
    w = jnp.array([1e-30, 1e20, 1e20, 1e20, 1.0])
    found = locate(fun, 2.0**120)(w)
    assert found.nonfinite == ("gradient",)
    assert found.first.backward and found.first.turns[0].length == 5
    oracle, g = [], np.float32(0)
    with np.errstate(over="ignore"):
        for i in (4, 3, 2, 1, 0):
            g = np.float32(g * w[i]) + np.float32(2.0**120) * np.float32(1e-30)
            oracle += [] if np.isfinite(g) else [i]
    assert indices(found.first) == (oracle[0],)


def test_a_loop_of_no_turns_and_a_loop_that_stacks():
    fun = lambda w: jnp.sum(lax.scan(lambda c, _: (c, c), w, None, length=0)[1]) + jnp.sum(w)
    assert locate(fun)(X).first is None
    found = locate(lambda w: jnp.sum(lax.map(lambda x: jnp.log(x - 2), w)))(jnp.arange(4.0))
    assert (found.first.operation, indices(found.first)) == ("log", (0,))
    assert [indices(x) for x in found.others if not x.backward] == [(1,), (2,)]


def test_scales_groups_and_aux_are_those_of_value_and_grad():
    fun = lambda p, x: (
        jnp.sum((x.astype(F16) * p["a"]["w"].astype(F16)).astype(F32)),
        jnp.log(-x * x),
    )
    params = {"a": {"w": jnp.ones(3)}, "b": jnp.ones(3)}
    scales = {"a": 2.0**17, "": 1.0}
    found = locate(fun, scales, has_aux=True, root="a")(params, x=jnp.ones(3))
    assert found.nonfinite == ("gradient of a/w",)
    assert (found.first.operation, found.first.backward) == ("convert_element_type", True)
    assert found.first.inputs[0].largest == 2.0**17
    assert locate(fun, scales, has_aux=True, root="")(params, x=jnp.ones(3)).first is None
    found = locate(fun, 2.0**17, argnums=(0, 1), has_aux=True)(params, jnp.ones(3))
    assert found.nonfinite == ("gradient of 0/a/w", "gradient of 1")


# Underflow.


def rounded(x):
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(np.float16)


@pytest.mark.parametrize("exponent", [-10, -20, -26])
def test_lost_shares_are_those_of_numpy(exponent):
    x = np.asarray(uniform(5, 8, 8)) * np.float32(2.0**exponent)
    x[0, :3] = 0

    def loss(w):
        half = w.astype(F16)
        product = half * half
        return jnp.sum((product @ half).astype(F32))

    found = locate(loss, underflow=1e-6)(jnp.asarray(x))
    forward = {row.operation: row for row in found.underflow if not row.backward}
    half = rounded(x)
    wide = half.astype(np.float32) ** 2
    product = rounded(wide)
    matrix = product.astype(np.float32) @ half.astype(np.float32)
    for name, full in (("convert_element_type", x), ("mul", wide), ("dot_general", matrix)):
        lost, nonzero = np.sum((full != 0) & (rounded(full) == 0)), np.sum(full != 0)
        if lost:
            assert (forward[name].lost, forward[name].nonzero) == (lost, nonzero)
            assert forward[name].dtype == "float16" and forward[name].share == lost / nonzero
        else:
            assert name not in forward


def test_a_larger_scale_loses_less():
    fun = jscale.autocast(lambda w, x: jnp.mean(jnp.tanh(x @ w) @ w) * 2.0**-24)
    found = locate(fun)(PARAMS["w"], X)
    assert {(x.operation, x.backward) for x in found.underflow} == {("convert_element_type", True)}
    assert all(x.share == 1.0 for x in found.underflow) and "100.0% of" in str(found)
    assert locate(fun, 2.0**16)(PARAMS["w"], X).underflow == ()


def test_what_the_turns_of_a_loop_lose_is_added_up():
    step = lambda c, x: (c + x.astype(F16).astype(F32), None)
    xs = 2.0 ** -jnp.arange(20.0, 28.0)
    found = locate(lambda w: lax.scan(step, 0.0, w)[0], underflow=0.1)(xs)
    (row,) = (x for x in found.underflow if not x.backward)
    assert (row.lost, row.nonzero) == (3, 8)  # 2^-25 is half of the smallest, and rounds to even


def test_float32_and_casts_of_zeros_lose_nothing():
    fun = lambda w: jnp.sum(w * 1e-30 * 1e-30) + jnp.sum((w * 0).astype(F16)).astype(F32)
    assert locate(fun)(X).underflow == ()
    assert locate(fun, underflow=None)(X).underflow is None


# Frameworks, devices, memory.


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.layer(x))


def test_modules_of_nnx_are_named_and_not_changed():
    model = Model(nnx.Rngs(0))
    model.layer.kernel[...] = model.layer.kernel[...].at[0, 0].set(1e30)
    loss = lambda model, x: jnp.mean((model(x) * 1e20) ** 2)
    before = nnx.to_pure_dict(nnx.state(model))
    found = locate(loss, transform=nnx.value_and_grad)(model, X)
    after = nnx.to_pure_dict(nnx.state(model))
    assert found.first is not None and found.first.source
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: (x == y).all(), before, after)))
    loss = lambda model, x: jnp.sum(jnp.exp(model.layer.kernel[...]))
    found = locate(loss, transform=nnx.value_and_grad)(model, X)
    assert found.first.inputs[0].name.startswith("0/layer/kernel")
    assert found.nonfinite[0] == "loss" and found.nonfinite[1].startswith(
        "gradient of layer/kernel"
    )


class Pair(eqx.Module):
    layers: list

    def __call__(self, x):
        return self.layers[1](self.layers[0](x))


def test_modules_of_equinox_are_named():
    model = Pair([eqx.nn.Linear(4, 4, use_bias=False, key=jax.random.key(i)) for i in range(2)])
    model = eqx.tree_at(lambda m: m.layers[1].weight, model, jnp.full((4, 4), 3e38))
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x))
    found = locate(jscale.autocast(loss), transform=eqx.filter_value_and_grad)(model, X)
    assert found.first.operation == "convert_element_type"
    assert found.first.inputs[0].name == "0/layers/1/weight"
    assert found.first.outputs[0].infs == 16


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays_are_looked_at_as_one(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x = uniform(6, 16, 4).at[9, 1].set(1e30)
    sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
    w = jax.device_put(PARAMS["w"], NamedSharding(mesh, P()))

    def loss(w, x):
        return jnp.sum(lax.scan(lambda x, _: (x * x, None), x @ w, None, length=1)[0])

    found, plain = locate(loss)(w, sharded), locate(loss)(PARAMS["w"], x)
    assert found.first.operation == plain.first.operation == "mul"
    shown = lambda x: [(y.shape, y.infs, y.nans) for y in (*x.inputs, *x.outputs)]
    assert shown(found.first) == shown(plain.first) and found.first.outputs[0].infs == 4
    assert found.first.source == plain.first.source and indices(found.first) == (0,)
    assert found.nonfinite == plain.nonfinite


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shard_map_is_looked_at_as_a_whole(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    per_device = lambda w, x: lax.psum(jnp.sum(jnp.exp(x * w[:1])), "data")
    summed = jax.shard_map(per_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    x = jax.device_put(uniform(6, 16, 4), NamedSharding(mesh, P("data")))
    w = jax.device_put(PARAMS["w"], NamedSharding(mesh, P()))
    assert locate(summed)(w, x).first is None
    found = locate(summed)(w * 1e4, x)
    assert (found.first.operation, found.first.note) == ("shard_map", "looked at as a whole")
    assert found.nonfinite == ("loss", "gradient")


def test_arrays_are_freed_after_their_last_use(monkeypatch):
    def loss(w):
        x = lax.stop_gradient(w)
        for _ in range(40):
            x = jnp.sin(x)

        def step(c, _):
            return jnp.cos(c), None

        x, _ = lax.scan(step, x, None, length=10)
        return jnp.mean(x * w)

    w = jnp.ones((64, 64))
    counts = []
    look = _steps._all_finite
    live = lambda: sum(x.shape == w.shape for x in jax.live_arrays())

    def counting(arrays):
        counts.append(live())
        return look(arrays)

    before = live()
    monkeypatch.setattr(_steps, "_all_finite", counting)
    locate(loss)(w)
    locate(jax.jit(loss))(w)
    assert len(counts) > 100 and max(counts) <= before + 3
    assert live() == before


def test_a_finite_loop_runs_compiled_if_only_inf_and_nan_are_looked_for(monkeypatch):
    turns = []
    at = _steps.Value.at
    monkeypatch.setattr(_steps.Value, "at", lambda x, i: turns.append(i) or at(x, i))
    locate(net, underflow=None)(PARAMS, X, nothing())
    assert turns == []
    locate(net)(PARAMS, X, nothing())
    assert set(turns) == set(range(LAYERS))
    how = nothing()
    how["nested"]["backward"][2, 0] = NAN
    found = locate(net, underflow=None)(PARAMS, X, how)
    assert found[:3] == locate(net)(PARAMS, X, how)[:3] and indices(found.first) == (2, 0)


def test_keys_and_references_pass():
    def loss(w, key):
        step = lambda c, k: (c * jax.random.bernoulli(k, 0.9, c.shape).astype(F32), k)
        c, keys = lax.scan(step, w, jax.random.split(key, 3))
        cell = jax.new_ref(jnp.zeros(4))
        cell[...] = c * jax.random.uniform(keys[0])
        return jnp.sum(jnp.log(cell[...] - 2))

    found = locate(loss)(jnp.ones(4), jax.random.key(0))
    assert found.first.operation == "log" and found.first.outputs[0].nans == 4


def test_a_report_has_all_that_is_known_and_not_too_much():
    def grow(w):
        return jnp.exp(w * 9)

    def loss(w):
        with jax.named_scope("part"):
            xs = [grow(w) for _ in range(12)]
        small = (w * 1e-9).astype(F16).astype(F32)
        return jnp.sum(jnp.concatenate([*xs, small]))

    assert str(locate(loss)(jnp.array([10.0, 1.0]))).splitlines() == [
        "not finite: loss, gradient; first",
        "exp, in the forward pass",
        f"  at {line(grow)} in part",
        "  takes  float32[2]: 9 to 90",
        "  gives  float32[2]: 8.1e+03 to 8.1e+03, 1 inf",
        "inf or NaN also from",
        f"  exp  float32  forward  {line(grow)} part  11 times",
        "zeros in the place of other values from",
        f"  convert_element_type  float16  forward  {line(loss, 3)}  100.0% of 2",
    ]


# Errors.


def test_errors_say_what_to_do():
    with pytest.raises(TypeError, match="fun must be a function"):
        locate(3.0)()
    with pytest.raises(ValueError, match="underflow must be a share"):
        locate(net, underflow=2)(PARAMS)
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda x: locate(jnp.sum)(x).first)(X)
    with pytest.raises(TypeError, match="outside jit"):
        locate(jnp.sum)(jax.ShapeDtypeStruct((2,), F32))
    with pytest.raises(TypeError, match="has_aux"):
        locate(lambda x: (x, x))(1.0)
    with pytest.raises(ValueError, match="loss_scale"):
        locate(jnp.sum, -1.0)(X)


def test_numbers_and_keywords_are_arguments():
    found = locate(lambda x, *, by: x / by)(3.0, by=jnp.float32(0))
    assert found.first.operation == "div" and found.first.inputs[1].name == "by"
    assert found.nonfinite == ("loss", "gradient")


def test_nan_debugging_does_not_interfere():
    with jax.debug_nans(True):
        found = locate(lambda w: jnp.sum(jnp.log(w - 2)))(X)
    assert found.first.operation == "log"
