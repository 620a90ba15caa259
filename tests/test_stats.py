import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import jscale


def oracle(x):
    """Exponents by math.frexp, in plain Python."""
    counts = {"zero": 0, "lost": 0}
    for value in np.ravel(np.asarray(x, np.float64)):
        value = float(value)
        key = (
            "lost"
            if not math.isfinite(value)
            else "zero"
            if value == 0
            else max(math.frexp(value)[1] - 1, -127)
        )
        counts[key] = counts.get(key, 0) + 1
    return counts


def counted(found):
    zeros, lost = int(np.sum(found.zeros)), int(np.sum(found.nonfinite))
    return {"zero": zeros, "lost": lost} | found.histogram()


LARGE = np.random.default_rng(0).normal(size=(64, 33)) * 2.0 ** np.arange(-33, 0)


@pytest.mark.parametrize(
    "x",
    [
        LARGE.astype(np.float32),
        LARGE.astype(np.float16),
        jnp.asarray(LARGE, jnp.bfloat16),
        np.float32([0.0, -0.0, np.inf, -np.inf, np.nan]),
        np.float32([1, 2, 1.9999999, 2.0**-126, 3.4e38, 65504, 65520]),
        np.float16([2.0**-24, 2.0**-14, 65504]),
        np.zeros((0, 3), np.float32),
        np.float32(3),
    ],
    ids=str,
)
def test_counts_are_those_of_frexp(x):
    got = jax.jit(jscale.stats)({"w": x})
    assert counted(got) == oracle(x)
    assert [(y.dtype, y.shape) for y in got] == [
        (jnp.float32, ()),
        (jnp.float32, (255,)),
        (jnp.float32, ()),
    ]


def test_subnormals_are_counted_where_arithmetic_flushes_them():
    """By their bits: on CPUs 2^-127 == 0."""
    raw = jnp.array([0x00000001, 0x00400000, 0x80000001, 0x00800000, 0], jnp.uint32)
    got = jax.jit(jscale.stats)(jax.lax.bitcast_convert_type(raw, jnp.float32))
    assert counted(got) == {"zero": 1, "lost": 0, -127: 3, -126: 1}


def test_complex_numbers_count_twice_and_others_not_at_all():
    tree = {
        "c": jnp.array([3 + 0.5j]),
        "i": jnp.arange(3),
        "b": jnp.array(True),
        "none": None,
        "key": jax.random.key(0),
        "float": 0.25,
        "_overwrite_with_gradient": jnp.ones(7),
    }
    assert counted(jscale.stats(tree)) == {"zero": 0, "lost": 0, 1: 1, -1: 1, -2: 1}
    empty = jscale.stats({})
    assert counted(empty) == {"zero": 0, "lost": 0}
    assert all(np.isfinite(x) for x in empty.metrics(8).values())


def test_float64_is_counted_as_float32_has_it():
    with jax.enable_x64(True):
        got = jscale.stats(jnp.array([1.0, 1e300, 2.0**-30]))
        assert counted(got) == {"zero": 0, "lost": 1, 0: 1, -30: 1}
        assert got.zeros.dtype == jnp.float32
        assert got.metrics(2.0)["headroom"].dtype == jnp.float32


powers = st.lists(st.integers(-60, 20), min_size=1, max_size=20)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(exponents=powers, scale=st.integers(-24, 40))
def test_shares_are_what_a_cast_to_float16_does(exponents, scale):
    """Off the powers of two: halfway below 2^-24, float16 rounds to zero."""
    x = np.float32(1.25 * 2.0 ** np.array(exponents))
    found = jscale.stats(np.resize(x, 20)).metrics(2.0**scale)
    with np.errstate(over="ignore"):
        half = (np.resize(x, 20) * np.float64(2.0**scale)).astype(np.float16)
    want = {
        "underflow": half == 0,
        "subnormal": (half != 0) & (np.abs(half) < 2.0**-14),
        "overflow": np.isinf(half),
    }
    for name, flags in want.items():
        np.testing.assert_allclose(found[name], flags.mean(), rtol=1e-6)
    room = int(found["headroom"])
    assert 2.0 ** (scale + room) * x.max() < 65504 <= 2.0 ** (scale + room + 1) * x.max() * 1.6
    fall = 2.0 ** (scale - int(found["slack"])) * x.min()
    assert 2.0**-14 <= fall < 2.0**-13


def test_a_scale_between_powers_of_two_takes_a_part_of_a_binade():
    found = jscale.stats(jnp.full(4, 2.0**-26))
    assert float(found.metrics(1.0)["underflow"]) == 1
    assert float(found.metrics(2.0)["underflow"]) == 0
    np.testing.assert_allclose(found.metrics(2**0.25)["underflow"], 0.75, rtol=1e-6)


def test_quantiles_leave_their_share_below():
    found = jscale.stats(jnp.array([2.0**-9] + [2.0**-3] * 5 + [1.0] * 4 + [0.0] * 90))
    assert [float(found.quantile(q)) for q in (0, 0.09, 0.11, 0.5, 0.61, 0.99)] == [
        -9,
        -9,
        -3,
        -3,
        0,
        0,
    ]


TREE = {
    "text": {"w": jnp.full((2, 3), 2.0**-3), "b": jnp.zeros(5)},
    "layers": jnp.exp2(-jnp.arange(4.0))[:, None] * jnp.ones((4, 6)),
}


def test_groups_and_layers_add_up_to_the_whole():
    scales = {"text": jnp.float32(8), "layers": jnp.float32([1, 2, 4, 8])}
    by_group = jax.jit(jscale.stats)(TREE, scales)
    whole = jscale.stats(TREE)
    rows = by_group["layers"]
    assert rows.exponents.shape == (4, 255)
    assert [int(jnp.argmax(row)) - 127 for row in rows.exponents] == [0, -1, -2, -3]
    summed = jax.tree.map(lambda a, b: a + jnp.sum(b, axis=0), by_group["text"], rows)
    assert bits(summed) == bits(whole)
    assert bits(jscale.stats(TREE["layers"], layers=True)) == bits(rows)
    assert counted(rows) == oracle(TREE["layers"])
    named = jscale.stats(TREE, ["text/w", ""])
    assert counted(named["text/w"]) == {"zero": 0, "lost": 0, -3: 6}
    metrics = rows.metrics(scales["layers"], "layers")
    assert metrics["headroom/layers"].tolist() == [15, 15, 15, 15]
    assert set(named[""].metrics(key="")) >= {"underflow/rest"}


def test_all_that_is_a_gradient_is_counted_under_some_layer():
    with pytest.raises(ValueError, match="layers=True needs a leading axis of layers"):
        jscale.stats({"a": jnp.ones((4, 2)), "b": jnp.ones(3)}, layers=True)
    with pytest.raises(ValueError, match=re.escape("b is float32[3], but its group has a scale")):
        jscale.stats({"b": jnp.ones(3)}, {"b": jnp.ones(4)})
    with pytest.raises(ValueError, match="no key is a prefix of b"):
        jscale.stats({"a": jnp.ones(3), "b": jnp.ones(3)}, ["a"])
    with pytest.raises(TypeError, match="groups must be a list of prefixes or a dict, got 'a'"):
        jscale.stats({"a": jnp.ones(3)}, "a")


@pytest.mark.parametrize("spec", [("a", "b"), (None, "b"), (("a", "b"),)])
def test_whole_arrays_are_counted_where_they_lie(spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jnp.asarray(np.float32(LARGE[:, :32]))
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    compiled = jax.jit(jscale.stats).lower(placed).compile()
    assert "all-gather" not in compiled.as_text()
    assert counted(compiled(placed)) == oracle(x)


@pytest.mark.parametrize("check_vma", [True, False])
def test_parts_on_devices_add_up(check_vma):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.asarray(np.float32(LARGE))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec("d"),
        out_specs=PartitionSpec(),
        check_vma=check_vma,
    )
    def count(part):
        return jax.lax.psum(jscale.stats(part), "d")

    assert counted(jax.jit(count)(x)) == oracle(x)


def test_copies_are_counted_apart_under_vmap():
    x = jnp.asarray(np.float32(LARGE)).reshape(4, 16, 33)
    apart = jax.jit(jax.vmap(jscale.stats))(x)
    assert bits(apart) == bits(jscale.stats(x, layers=True))


def test_counts_beyond_what_float32_counts_one_by_one_are_right():
    """A running float32 sum of ones stops at 2^24."""
    got = jax.jit(lambda: jscale.stats(jnp.broadcast_to(jnp.float32(1), (2**24 + 2**20,))))()
    assert counted(got) == {"zero": 0, "lost": 0, 0: 2**24 + 2**20}


def test_it_prints_inside_jit_and_out():
    assert str(jscale.stats(jnp.zeros(3))) == "0 nonzero numbers; 3 zero; 0 inf or NaN"
    shown = []
    jax.eval_shape(lambda x: shown.append(str(jscale.stats(x))), jnp.ones(3))
    assert "Stats(" in shown[0]
