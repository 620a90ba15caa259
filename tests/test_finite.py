import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits
from hypothesis import given, settings, strategies as st

import jscale
from jscale._finite import global_norm

FLOATS = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64]
OTHERS = [
    None,
    jnp.arange(3),
    jnp.array([True, False]),
    jax.random.key(0),
    jax.random.PRNGKey(0),
    np.zeros((2,), jax.dtypes.float0),
    jnp.zeros((2,), jnp.int4),
]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(FLOATS), max_size=3),
    st.lists(st.sampled_from(OTHERS), max_size=3),
    st.sampled_from([0.0, 1.0, np.inf, -np.inf, np.nan]),
)
def test_all_finite_looks_at_every_float_and_at_nothing_else(dtypes, others, value):
    floats = [jnp.zeros((3,), d).at[1].set(jnp.asarray(value, d)) for d in dtypes]
    tree = {"floats": floats, "others": others, "empty": jnp.zeros((0, 4))}
    assert bool(jscale.all_finite(tree)) == (not floats or bool(np.isfinite(value)))


def test_all_finite_sees_both_parts_of_a_complex_number():
    for z in (complex(0, np.inf), complex(np.nan, 0)):
        assert not bool(jscale.all_finite({"z": jnp.array([z], jnp.complex64)}))


def test_a_python_number_is_a_leaf_like_any_other():
    assert bool(jscale.all_finite([1.0, 1j, 3]))
    for bad in (np.inf, complex(0, np.nan)):
        assert not bool(jscale.all_finite([1.0, bad]))


def test_the_largest_float16_is_finite_and_its_sum_overflow_is_not_seen():
    assert bool(jscale.all_finite(jnp.full(4, 65504, jnp.float16)))
    assert not bool(jnp.isfinite(jnp.sum(jnp.full(4, 30000, jnp.float16), dtype=jnp.float16)))
    assert bool(jscale.all_finite(jnp.full(4, 30000, jnp.float16)))


def test_norm_is_taken_in_float32():
    assert float(global_norm({"w": jnp.array([300], jnp.float16)})) == 300
    assert float(global_norm({"z": jnp.array([3 + 4j], jnp.complex64)})) == 5
    assert float(global_norm(OTHERS)) == 0
    assert global_norm({}).dtype == jnp.float32


def test_norm_is_optax_norm_so_that_both_are_computed_once():
    tree = {"a": jnp.ones(3), "b": jnp.ones((2, 2)), "z": jnp.ones(2, jnp.complex64)}
    ours, theirs = (str(jax.make_jaxpr(norm)(tree)) for norm in (global_norm, optax.tree.norm))
    assert ours == theirs


def test_norm_overflows_only_above_1e19():
    assert bool(jnp.isfinite(global_norm(jnp.float32(1e18))))
    assert not bool(jnp.isfinite(global_norm(jnp.float32(1e20))))


@pytest.mark.parametrize("finite", [True, False])
def test_select_keeps_every_bit_of_what_it_chooses(finite):
    old = {
        "f": jnp.array([-0.0, jnp.nan, 1.0]),
        "h": jnp.array([6e-8, -0.0], jnp.float16),
        "i": jnp.arange(3),
        "b": jnp.array([True, False]),
        "raw": jax.random.PRNGKey(1),
        "none": None,
        "empty": jnp.zeros((0,)),
    }
    new = jax.tree.map(jnp.zeros_like, old)
    got = jscale.select(jnp.array(finite), new, old)
    assert_same_bits(got, new if finite else old)


def test_select_takes_typed_keys_and_static_leaves():
    old = {"key": jax.random.key(0), "act": jax.nn.relu, "name": "x", "eps": 1e-6}
    new = {**old, "key": jax.random.key(1)}
    got = jscale.select(False, new, old)
    assert bool(got["key"] == old["key"])
    assert got["act"] is jax.nn.relu and got["name"] == "x" and got["eps"] == 1e-6
    assert bool(jscale.select(True, new, old)["key"] == new["key"])


def test_static_leaves_are_compared_by_value():
    old, new = ({"name": "".join(["re", "lu"]), "eps": float("1e-6")} for _ in range(2))
    assert jscale.select(True, new, old) == old
    nan = {"fill": float("nan")}
    assert jscale.select(True, nan, nan)["fill"] is nan["fill"]


def test_a_number_may_have_become_an_array():
    got = jscale.select(True, {"step": jnp.float32(2)}, {"step": 1.0})
    assert float(got["step"]) == 2


def test_select_gives_the_dtypes_of_old():
    got = jscale.select(True, {"ema": jnp.ones(2, jnp.float32)}, {"ema": jnp.zeros(2, jnp.float16)})
    assert got["ema"].dtype == jnp.float16


@pytest.mark.parametrize(
    "new, old, words",
    [
        ({"a": jnp.ones(2)}, {"b": jnp.ones(2)}, "unexpected a; missing b"),
        ({"a": {"w": jnp.ones(2)}}, {"a": {"w": jnp.ones(3)}}, r"at a/w float32\[2\], expected"),
        ([jnp.ones(2)], (jnp.ones(2),), "the containers are of different types"),
        ({"f": jax.nn.relu}, {"f": jax.nn.gelu}, "between arrays only, but at f new has"),
        ({"f": None}, {"f": jnp.ones(2)}, "at f None, expected float32"),
    ],
)
def test_select_names_where_two_trees_differ(new, old, words):
    with pytest.raises(ValueError, match=words):
        jscale.select(True, new, old)


def test_a_long_list_of_paths_is_cut():
    layers = lambda n: {f"layer{i}": jnp.ones(1) for i in range(n)}
    with pytest.raises(ValueError, match="missing layer0, .*, layer4 and 2 more"):
        jscale.select(True, {}, layers(7))
    with pytest.raises(ValueError, match="layer4 and 1 more"):
        jscale.select(True, {}, layers(6))
    with pytest.raises(ValueError, match=r"layer4\.$"):
        jscale.select(True, {}, layers(5))


@pytest.mark.parametrize("finite", [1, jnp.float32(1), jnp.nan, "yes", [True]])
def test_the_flag_of_select_is_a_boolean(finite):
    with pytest.raises(TypeError, match="finite must be a boolean scalar"):
        jscale.select(finite, jnp.ones(2), jnp.zeros(2))
    with pytest.raises(ValueError, match=r"finite must be a boolean scalar, got bool\[2\]"):
        jscale.select(jnp.array([True, False]), jnp.ones((2, 2)), jnp.zeros((2, 2)))


def test_select_narrows_nothing():
    with pytest.raises(ValueError, match="would narrow steps from int64 to int32: enable"):
        jscale.select(False, {"steps": np.array(2**40)}, {"steps": np.array(2**40)})


@pytest.mark.parametrize("new", [jnp.float32(0.5), 0.5, jnp.complex64(1j)])
def test_select_truncates_nothing(new):
    old = {"ema": jnp.float32(0) if jnp.iscomplexobj(new) else 0}
    with pytest.raises(ValueError, match="at ema .*, expected"):
        jscale.select(True, {"ema": new}, old)


def test_select_is_one_where_under_vmap():
    finite = jnp.array([True, False])
    got = jax.vmap(jscale.select)(finite, jnp.ones((2, 3)), jnp.zeros((2, 3)))
    np.testing.assert_array_equal(got, [[1, 1, 1], [0, 0, 0]])
