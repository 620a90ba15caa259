"""Autocast of models as each framework writes them: nothing in the model knows of float16."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from helpers import bits

import jscale

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (8, 4))
Y = jnp.arange(8) % 4
SEQUENCE = jax.random.normal(jax.random.key(2), (2, 5, 8))
TOKENS = jnp.array([[1, 2, 3, 4, 5], [6, 0, 1, 6, 2]])
CAUSAL = jnp.tril(jnp.ones((5, 5), bool))
PRODUCTS = ("dot_general", "conv_general_dilated")


def cross_entropy(logits, labels=Y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Case(NamedTuple):
    """A model and its loss.

    Attributes:
      args: makes the arguments of the loss, the model first. NNX changes it in place.
      loss: returns the loss, and what else the forward pass returns.
      products: how many products the forward pass has.
      jit, value_and_grad: the framework's own.
    """

    args: Callable[[], tuple[Any, ...]]
    loss: Callable[..., tuple[jax.Array, Any]]
    products: int
    jit: Any = jax.jit
    value_and_grad: Any = jax.value_and_grad


CASES: dict[str, Callable[[], Case]] = {}


def case(make):
    CASES[make.__name__] = functools.cache(make)
    return CASES[make.__name__]


# Plain JAX.


@case
def dicts():
    def loss(params, x):
        hidden = jnp.tanh(x @ params["in"])
        for layer in params["layers"]:
            hidden = hidden + jax.nn.gelu(hidden @ layer["w"])
        return cross_entropy(hidden @ params["out"]), jnp.mean(hidden, axis=0)

    keys = jax.random.split(KEY, 4)
    layers = [{"w": jax.random.normal(key, (8, 8)) / 3} for key in keys[:2]]
    ends = jax.random.normal(keys[2], (4, 8)), jax.random.normal(keys[3], (8, 4)) / 3
    params = {"in": ends[0], "layers": layers, "out": ends[1]}
    return Case(lambda: (params, X), loss, products=4)


# Linen.


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="wi")(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(x)
        x = nn.Dropout(0.2, deterministic=False)(nn.relu(x))
        return nn.Dense(4, name="wo")(x)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        how = dict(dropout_rate=0.1, deterministic=False, name="attention")
        attention = nn.MultiHeadDotProductAttention(2, **how)
        x = x + attention(nn.LayerNorm()(x), mask=CAUSAL[None, None])
        return x + nn.Dense(8, name="wo")(nn.gelu(x)), None


class LinenStack(nn.Module):
    """Two layers in one scan, each a checkpoint."""

    @nn.compact
    def __call__(self, x):
        block = nn.remat(LinenBlock, prevent_cse=False)
        kinds = dict(variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True})
        return nn.scan(block, length=2, **kinds)(name="blocks")(x, None)[0]


def linen(net, products, loss, x):
    variables = jax.jit(net.init)({"params": KEY, "dropout": KEY}, x)
    others = {name: value for name, value in variables.items() if name != "params"}

    def fun(params, x, key):
        everything = {"params": params, **others}
        return net.apply(everything, x, rngs={"dropout": key}, mutable=[*others])

    def value(params, x, key):
        out, changed = fun(params, x, key)
        return loss(out), changed

    return Case(lambda: (variables["params"], x, KEY), value, products)


def squares(out):
    return jnp.mean(jnp.square(out))


@case
def linen_net():
    return linen(LinenNet(), 2, cross_entropy, X)


@case
def linen_stack():
    return linen(LinenStack(), 2 * 7, squares, SEQUENCE)


# NNX.

on_nnx = functools.partial(Case, jit=nnx.jit, value_and_grad=nnx.value_and_grad)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.wi = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.wo = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.wo(self.dropout(nnx.relu(self.norm(self.wi(x)))))


def nnx_loss(model, x):
    return cross_entropy(model(x)), None


@case
def nnx_net():
    return on_nnx(lambda: (NnxNet(nnx.Rngs(0)), X), nnx_loss, products=2)


@case
def nnx_split():
    """Functional NNX: differentiated is the state of the parameters."""

    def loss(params, others, x):
        model = nnx.merge(graph, params, others, copy=True)
        loss, _ = nnx_loss(model, x)
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    graph, params, others = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param, ...)
    return Case(lambda: (params, others, X), loss, products=2)


class NnxTransformer(nnx.Module):
    """Positions are a float32 table, made where they are needed."""

    def __init__(self, rngs):
        attention = dict(dropout_rate=0.1, deterministic=False, decode=False)
        self.embed = nnx.Embed(7, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs, **attention)
        self.norms = nnx.List([nnx.LayerNorm(8, rngs=rngs) for _ in range(3)])
        self.wi, self.wo = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, tokens):
        angles = jnp.arange(5.0)[:, None] / 10 ** jnp.linspace(0, 2, 8)[None]
        x = self.embed(tokens) + jnp.sin(angles)[None]
        x = x + self.attention(self.norms[0](x), mask=CAUSAL[None, None])
        x = x + self.wo(nnx.gelu(self.wi(self.norms[1](x))))
        return self.embed.attend(self.norms[2](x))


@case
def nnx_transformer():
    def loss(model, tokens):
        return cross_entropy(model(tokens), jnp.roll(tokens, -1, axis=1)), None

    return on_nnx(lambda: (NnxTransformer(nnx.Rngs(0)), TOKENS), loss, products=4 + 2 + 2 + 1)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.wo = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.wo(self.norm(x))))


@nnx.split_rngs(splits=3)
@nnx.vmap(in_axes=0, out_axes=0)
def three_blocks(rngs):
    return NnxBlock(rngs)


@case
def nnx_scan_and_vmap():
    """The same stack of parameters as layers one after the other, then as an ensemble."""

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def layers(x, block):
        return block(x)

    @nnx.vmap(in_axes=(0, None), out_axes=0)
    def ensemble(block, x):
        return block(x)

    def loss(blocks, x):
        return cross_entropy(jnp.mean(ensemble(blocks, layers(x, blocks)), axis=0)), None

    return on_nnx(lambda: (three_blocks(nnx.Rngs(0)), X), loss, products=3 + 1)


@case
def nnx_shared():
    """A student of two models that share a layer, and its teacher in another argument."""

    def args():
        first, second, teacher = (NnxNet(nnx.Rngs(seed)) for seed in range(3))
        second.wi = first.wi
        return nnx.List([first, second]), {"teacher": teacher, "x": X}

    def loss(student, given):
        first, second = student
        assert first.wi is second.wi
        labels = jnp.argmax(given["teacher"](given["x"]), axis=-1)
        return cross_entropy(first(given["x"]) + second(given["x"]), labels), None

    return on_nnx(args, loss, products=4 + 2)


# Equinox.

on_equinox = functools.partial(Case, jit=eqx.filter_jit, value_and_grad=eqx.filter_value_and_grad)


class EqxNet(eqx.Module):
    wi: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    wo: eqx.nn.Linear
    act: Callable  # a leaf that is no array
    steps: jax.Array  # a leaf without a gradient
    name: str = eqx.field(static=True)

    def __init__(self, key):
        keys = jax.random.split(key)
        self.wi = eqx.nn.Linear(4, 8, key=keys[0])
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.2)
        self.wo = eqx.nn.Linear(8, 4, key=keys[1])
        self.act, self.steps, self.name = jax.nn.relu, jnp.array(2), "net"

    def __call__(self, x, state, key):
        x, state = self.norm(self.wi(x), state)
        return self.wo(self.dropout(self.act(x), key=key)), state


def eqx_loss(model, x, state, key):
    assert model.name == "net"
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
    logits, state = batched(x, state, jax.random.split(key, len(x)))
    return cross_entropy(logits), state


@case
def eqx_net():
    model, state = eqx.nn.make_with_state(EqxNet)(KEY)
    return on_equinox(lambda: (model, X, state, KEY), eqx_loss, products=2)


@case
def eqx_attention():
    """Two attention layers in one scan, on a batch, each behind eqx.filter_checkpoint."""

    def loss(layers, x, key):
        arrays, rest = eqx.partition(layers, eqx.is_array)

        def layer(x, arrays):
            attend = eqx.filter_checkpoint(eqx.combine(arrays, rest))
            one = lambda x, key: attend(x, x, x, mask=CAUSAL, key=key)
            return x + jax.vmap(one)(x, jax.random.split(key, len(x))), None

        return squares(jax.lax.scan(layer, x, arrays)[0]), None

    make = lambda key: eqx.nn.MultiheadAttention(2, 8, dropout_p=0.1, key=key)
    layers = eqx.filter_vmap(make)(jax.random.split(KEY))
    return on_equinox(lambda: (layers, SEQUENCE, KEY), loss, products=2 * 6)


# Haiku.


@case
def haiku_net():
    hk = pytest.importorskip("haiku")

    def forward(x):
        x = hk.nets.MLP([8, 8], name="mlp")(x)
        x = hk.BatchNorm(True, True, 0.5)(x, is_training=True)
        x = hk.dropout(hk.next_rng_key(), 0.2, x)
        return hk.Linear(4, name="wo")(x)

    def loss(params, x, state, key):
        logits, state = net.apply(params, state, key, x)
        return cross_entropy(logits), state

    net = hk.transform_with_state(forward)
    params, state = jax.jit(net.init)(KEY, X)
    return Case(lambda: (params, X, state, KEY), loss, products=3)


@case
def haiku_stack():
    hk = pytest.importorskip("haiku")

    def layer(x):
        return x + hk.dropout(hk.next_rng_key(), 0.1, jnp.tanh(hk.Linear(4, name="wo")(x)))

    def loss(params, x, key):
        return cross_entropy(net.apply(params, key, x)), None

    net = hk.transform(lambda x: hk.layer_stack(2)(layer)(x))
    params = jax.jit(net.init)(KEY, X)
    return Case(lambda: (params, X, KEY), loss, products=2)


# The laws.


class Outcome(NamedTuple):
    loss: jax.Array
    grads: Any
    side: Any  # what else the forward pass returned, and what it changed in place
    traces: int
    jaxpr: Any  # of the step, with the backward pass


def run(case, transform):
    """Two steps with the gradient of `transform(loss)`, which change nothing but side state."""
    traces = []

    def step(*args):
        traces.append(1)
        return case.value_and_grad(transform(case.loss), has_aux=True)(*args)

    args, jitted = case.args(), case.jit(step)
    jitted(*args)
    (loss, side), grads = jitted(*args)
    if case.jit is nnx.jit:
        side = nnx.to_pure_dict(nnx.state(args, nnx.Not(nnx.Param)))
    return Outcome(loss, nnx.as_pure(grads), side, len(traces), jaxpr_of(step, case.args()))


def jaxpr_of(fun, args):
    graph, state = None, args
    if any(isinstance(x, nnx.Module) for x in args):
        graph, state = nnx.split(args)
    call = lambda state: fun(*(state if graph is None else nnx.merge(graph, state)))
    return eqx.filter_make_jaxpr(lambda state: jax.tree.leaves(call(state)))(state)[0]


def promotion(name):
    # Haiku's dropout multiplies booleans.
    return jax.numpy_dtype_promotion("standard" if "haiku" in name else "strict")


def explain(name, **options):
    """The products of the forward pass."""
    with promotion(name):
        rows = jscale.explain(CASES[name]().loss, **options)(*CASES[name]().args())
    return [row for row in rows if row.name in PRODUCTS]


def products(jaxpr):
    """The dtypes of operands and results of every product in a jaxpr."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name in PRODUCTS:
            yield tuple(str(x.aval.dtype) for x in (*eqn.invars, *eqn.outvars))
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else [value]:
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from products(inner)


def assert_near(got, want):
    """The same but for float32 numbers, in which a few roundings to float16 may be seen."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in want]
    size = lambda xs: np.sqrt(sum(np.sum(np.square(x)) for x in xs))
    whole = size([x for x, is_float in zip(want, floats, strict=True) if is_float])
    for x, y, is_float in zip(got, want, floats, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        if not is_float:
            assert bits(x) == bits(y)
        else:
            # Most leaves are products of products; some (a bias before a BatchNorm) are all error.
            assert size([x - y]) <= 4 * 2.0**-11 * (size([y]) + whole / 4)


@pytest.mark.parametrize("name", CASES)
def test_only_products_are_in_float16_and_the_rest_is_nearly_as_without(name):
    forward = explain(name)
    assert {(row.dtype, row.reason) for row in forward} == {("float16", "product")}
    assert sum(row.count for row in forward) == CASES[name]().products

    with promotion(name):
        plain, cast = (run(CASES[name](), how) for how in (lambda loss: loss, jscale.autocast))
    for part in ("loss", "grads", "side"):
        assert_near(getattr(cast, part), getattr(plain, part))
    assert cast.traces == plain.traces == 1

    # Backward products too, of which recomputation adds none.
    before, after = list(products(plain.jaxpr)), list(products(cast.jaxpr))
    assert {*before} == {("float32",) * 3}
    assert {*after} == {("float16",) * 3}
    assert len(after) == len(before)


# Names. NNX and Equinox open no scopes: there, layers are found by their parameters.


@pytest.mark.parametrize(
    "name, pattern, count",
    [
        ("dicts", "out", 1),
        ("dicts", "layers/1/w", 1),
        ("dicts", "layers/*/w", 2),
        ("linen_net", "wo", 1),
        ("linen_net", "LinenNet/w?", 2),
        ("linen_net", "wi/kernel", 1),
        ("linen_stack", "blocks/wo", 2),
        ("linen_stack", "attention", 2 * 6),
        ("linen_stack", "attention/query/kernel", 2),
        ("nnx_net", "wo", 1),
        ("nnx_net", "w?/kernel", 2),
        ("nnx_transformer", "attention", 4),  # not q @ k and weights @ v: they use no parameter
        ("nnx_transformer", "attention/out/kernel", 1),
        ("nnx_transformer", "embed", 1),
        ("nnx_scan_and_vmap", "wo/kernel", 3 + 1),
        ("nnx_shared", "wi/kernel", 3),
        ("eqx_net", "wo/weight", 1),
        ("eqx_attention", "*_proj/weight", 2 * 4),
        ("haiku_net", "mlp/linear_0", 1),
        ("haiku_net", "wo/w", 1),
        ("haiku_stack", "wo", 2),
    ],
)
def test_layers_are_kept_in_float32_by_name(name, pattern, count):
    kept = [row for row in explain(name, keep=pattern) if row.dtype == "float32"]
    assert {row.reason for row in kept} == {f"keep={pattern!r}"}
    assert sum(row.count for row in kept) == count


@pytest.mark.parametrize(
    "given, pattern",
    [
        (lambda model: ((nnx.state(model),), {}), "wo/kernel"),
        (lambda model: (({"student": model},), {}), "student/wo/kernel"),
        (lambda model: ((X, model), {}), "1/wo/kernel"),
        (lambda model: ((), {"model": model}), "model/wo/kernel"),
    ],
    ids=["state", "dict", "second argument", "keyword"],
)
def test_the_path_of_an_nnx_parameter_begins_outside_of_its_module(given, pattern):
    def fun(*args, **kwargs):
        is_leaf = lambda x: isinstance(x, NnxNet | nnx.State)
        (net,) = filter(is_leaf, jax.tree.leaves((args, kwargs), is_leaf=is_leaf))
        net = nnx.merge(graph, net) if isinstance(net, nnx.State) else net
        return net(X)

    model = NnxNet(nnx.Rngs(0))
    graph = nnx.graphdef(model)
    args, kwargs = given(model)
    rows = jscale.explain(fun, keep=pattern)(*args, **kwargs)
    assert [row.count for row in rows if row.reason.startswith("keep")] == [1]


# NNX modules change in place.


def values(tree):
    return nnx.to_pure_dict(nnx.state(tree))


def test_nnx_modules_are_changed_wherever_they_are_given():
    def fun(first, rngs, given, *, second, same):
        assert same is first and given["norm"] is second.norm
        return first(X) + second(X) + same(X) + given["norm"](X @ rngs.normal((4, 8))).sum()

    def call(transform):
        first, second = NnxNet(nnx.Rngs(0)), NnxNet(nnx.Rngs(1))
        second.wi = first.wi
        rngs = nnx.Rngs(2)
        variables = jax.tree.leaves(nnx.state([first, second, rngs]), is_leaf=is_variable)
        given = {"norm": second.norm, "none": None, "text": "text"}
        out = transform(fun)(first, rngs, given, second=second, same=first)
        after = jax.tree.leaves(nnx.state([first, second, rngs]), is_leaf=is_variable)
        assert all(x is y for x, y in zip(variables, after, strict=True))
        return out, values([first, second, rngs]), nnx.graphdef([first, second, rngs])

    is_variable = lambda x: isinstance(x, nnx.Variable)
    (want, state, graph), (got, cast_state, cast_graph) = call(lambda f: f), call(jscale.autocast)
    assert_near((got, cast_state), (want, state))
    assert cast_graph == graph
    assert cast_state[0]["dropout"]["rngs"]["count"] == 2


def test_explain_changes_no_module():
    model = NnxNet(nnx.Rngs(0))
    before = bits(values(model))
    jscale.explain(nnx_loss)(model, X)
    assert bits(values(model)) == before


class Odd(nnx.Module):
    """With variables that hold a tree, a number and a NumPy array."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.carry = nnx.Variable((jnp.zeros(4), {"n": jnp.int32(0)}))
        self.calls = nnx.Variable(0)
        self.table = nnx.Variable(np.zeros(2, np.float32))

    def __call__(self, x):
        y = self.linear(x)
        mean, count = self.carry.get_value()
        self.carry.set_value((mean + jnp.mean(y, axis=0), {"n": count["n"] + 1}))
        self.calls.set_value(self.calls.get_value() + 1)
        self.table.set_value(self.table.get_value() + 1)
        return y


def test_nnx_variables_may_hold_anything():
    plain, cast = Odd(nnx.Rngs(0)), Odd(nnx.Rngs(0))
    call = lambda model: model(X)
    assert_near(jscale.autocast(call)(cast), call(plain))
    mean, count = cast.carry.get_value()
    assert_near(mean, plain.carry.get_value()[0])
    assert (int(count["n"]), cast.calls.get_value()) == (1, 1)
    np.testing.assert_array_equal(cast.table.get_value(), np.ones(2))


class Growing(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.calls = nnx.Linear(4, 4, rngs=rngs), 0

    def __call__(self, x):
        y = self.linear(x)
        self.calls += 1
        self.last = nnx.Variable(jnp.mean(y, axis=0))
        return y


def test_new_variables_and_attributes_of_nnx_modules_are_an_error():
    model = Growing(nnx.Rngs(0))
    with pytest.raises(ValueError, match="create them when the module is made"):
        jscale.autocast(lambda model: model(X))(model)
    assert model.calls == 0 and not hasattr(model, "last")


def test_a_float32_table_undoes_a_policy_but_not_autocast():
    case = CASES["nnx_transformer"]()
    model, tokens = case.args()
    graph, params, others = nnx.split(model, nnx.Param, ...)
    half = nnx.merge(graph, jscale.Policy("half").cast_to_compute(params), others)
    with jax.numpy_dtype_promotion("standard"):
        assert {*products(jaxpr_of(case.loss, (half, tokens)))} == {("float32",) * 3}
    assert {row.dtype for row in explain("nnx_transformer")} == {"float16"}


# Methods.


class NnxDecorated(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

    @functools.partial(jscale.autocast, keep="norm")
    def __call__(self, x):
        return self.norm(self.linear(x))


class EqxDecorated(eqx.Module):
    linear: eqx.nn.Linear

    @jscale.autocast
    def __call__(self, x):
        return jax.vmap(self.linear)(x)


@pytest.mark.parametrize(
    "model", [NnxDecorated, lambda: EqxDecorated(eqx.nn.Linear(4, 4, key=KEY))]
)
def test_autocast_decorates_a_method(model):
    want = type(model()).__call__.__wrapped__(model(), X)
    assert_near(model()(X), want)
    assert {*products(jaxpr_of(lambda model, x: model(x), (model(), X)))} == {("float16",) * 3}


# Losses of optax.

LOSSES = {
    "softmax_cross_entropy": lambda z: optax.softmax_cross_entropy(z, jax.nn.one_hot(Y, 4)),
    "with_integer_labels": cross_entropy,
    "sigmoid": lambda z: optax.sigmoid_binary_cross_entropy(z, jax.nn.one_hot(Y, 4)),
    "focal": lambda z: optax.sigmoid_focal_loss(z, jax.nn.one_hot(Y, 4)),
    "huber": lambda z: optax.huber_loss(z, X),
    "cosine": lambda z: optax.cosine_distance(z, X),
    "kl": lambda z: optax.kl_divergence(jax.nn.log_softmax(z), jax.nn.softmax(X)),
}


def test_losses_of_optax_stay_in_float32(standard_promotion):
    def losses(w, x):
        logits = x @ w
        values = {name: jnp.mean(loss(logits)) for name, loss in LOSSES.items()}
        return sum(values.values()), values

    w = jax.random.normal(KEY, (4, 4))
    rows = jscale.explain(losses)(w, X)
    assert [(row.name, row.count) for row in rows if row.dtype == "float16"] == [("dot_general", 1)]
    plain, cast = (
        jax.jit(jax.value_and_grad(fun, has_aux=True))(w, X)
        for fun in (losses, jscale.autocast(losses))
    )
    assert_near(cast, plain)


# Training.


class Loop(NamedTuple):
    """A training loop.

    Attributes:
      step: trains on X and Y and returns the loss.
      state: something that holds the loss scale.
      traces: grows by one when the step is traced.
    """

    step: Callable[[], jax.Array]
    state: Callable[[], Any]
    traces: list[int]


def optimizer():
    # A first scale at which everything overflows, so that there is a warm-up.
    return jscale.with_loss_scale(optax.adamw(0.02), jscale.dynamic(2.0**24))


class LinenState(train_state.TrainState):
    batch_stats: Any
    key: jax.Array


def linen_loop():
    traces = []

    @jax.jit
    def step(state):
        traces.append(1)
        key, dropout = jax.random.split(state.key)

        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            how = dict(rngs={"dropout": dropout}, mutable=["batch_stats"])
            logits, changed = state.apply_fn(variables, X, **how)
            return cross_entropy(logits), changed["batch_stats"]

        scale = jscale.loss_scale(state)
        (loss, stats), grads = jscale.value_and_grad(loss_fn, scale, has_aux=True)(state.params)
        new = state.apply_gradients(grads=grads)
        changed, before = (stats, key), (state.batch_stats, state.key)
        stats, key = jscale.select(new.opt_state.finite, changed, before)
        return new.replace(batch_stats=stats, key=key), loss

    net = LinenNet()
    variables = jax.jit(net.init)({"params": KEY, "dropout": KEY}, X)
    state = LinenState.create(
        apply_fn=jscale.autocast(net.apply), tx=optimizer(), key=KEY, **variables
    )
    now = {"state": state}

    def run():
        now["state"], loss = step(now["state"])
        return loss

    return Loop(run, lambda: now["state"], traces)


def nnx_loop():
    traces = []

    @nnx.jit
    def step(model, optimizer):
        traces.append(1)
        not_trained = (nnx.BatchStat, nnx.RngState)
        before = nnx.as_pure(nnx.state(model, not_trained))
        scale = jscale.loss_scale(optimizer.opt_state)
        loss_fn = jscale.autocast(lambda model: cross_entropy(model(X)))
        loss, grads = jscale.value_and_grad(loss_fn, scale, transform=nnx.value_and_grad)(model)
        optimizer.update(model, grads, loss=loss)
        after = nnx.as_pure(nnx.state(model, not_trained))
        finite = jscale.metrics(optimizer.opt_state)["finite"]
        nnx.update(model, jscale.select(finite, after, before))
        return loss

    model = NnxNet(nnx.Rngs(0))
    opt = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)
    return Loop(lambda: step(model, opt), lambda: opt.opt_state, traces)


def eqx_loop():
    tx, traces = optimizer(), []

    @eqx.filter_jit
    def step(model, state, opt_state, key):
        traces.append(1)
        scale = jscale.loss_scale(opt_state)
        key, dropout = jax.random.split(key)
        (loss, new_state), grads = jscale.value_and_grad(
            jscale.autocast(eqx_loss), scale, has_aux=True, transform=eqx.filter_value_and_grad
        )(model, X, state, dropout)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, opt_state, params, loss=loss)
        state = jscale.select(opt_state.finite, new_state, state)
        return eqx.apply_updates(model, updates), state, opt_state, key, loss

    model, state = eqx.nn.make_with_state(EqxNet)(KEY)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    now = {"carry": (model, state, opt_state, KEY)}

    def run():
        *now["carry"], loss = step(*now["carry"])
        return loss

    return Loop(run, lambda: now["carry"][2], traces)


@pytest.mark.parametrize("loop", [linen_loop, nnx_loop, eqx_loop])
def test_a_model_learns_and_after_a_warm_up_no_step_is_skipped(loop, standard_promotion):
    loop = loop()
    losses = [float(loop.step()) for _ in range(15)]
    warm = jscale.metrics(loop.state())
    losses += [float(loop.step()) for _ in range(25)]
    end = jscale.metrics(loop.state())
    assert 0 < int(warm["skipped_steps"]) < 15
    assert int(end["skipped_steps"]) == int(warm["skipped_steps"])
    assert np.mean(losses[-5:]) < 0.7 * losses[0]
    assert np.isfinite(losses).all()
    assert len(loop.traces) == 1
    jscale.check(loop.state())
