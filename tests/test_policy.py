import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jscale import Policy

F16, BF16, F32, F64 = map(jnp.dtype, ("float16", "bfloat16", "float32", "float64"))


@pytest.mark.parametrize(
    "text, dtypes",
    [
        ("params=float32,compute=float16,output=float32", (F32, F16, F32)),
        ("p=f32,c=bf16,o=full", (F32, BF16, F32)),
        ("c=f16", (F32, F16, F16)),
        ("p=f16", (F16, F16, F16)),
        (" compute = half , output = full ", (F32, F16, F32)),
        ("half", (F16, F16, F16)),
        ("full", (F32, F32, F32)),
        ("bfloat16", (BF16, BF16, BF16)),
        ("f64", (F64, F64, F64)),
    ],
)
def test_words_mean_what_they_mean_in_jmp(text, dtypes):
    policy = Policy(text)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == dtypes
    assert Policy(str(policy)) == policy
    assert hash(Policy(str(policy))) == hash(policy)


def test_half_is_bfloat16_on_a_tpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert Policy("half") == Policy("bf16")


def test_dtypes_may_be_given_one_by_one_or_once():
    assert Policy(jnp.float32, "f16", np.float32) == Policy("p=f32,c=f16,o=f32")
    assert Policy(jnp.float16) == Policy("f16")
    assert Policy("f16").with_output_dtype("f32") == Policy("p=f16,c=f16,o=f32")
    assert Policy("f64").with_output_dtype("f32") == Policy("p=f64,c=f64,o=f32")


def test_only_real_floating_leaves_are_cast():
    tree = {
        "w": jnp.ones(2),
        "half": jnp.ones(2, jnp.bfloat16),
        "numpy": np.ones(2),
        "int": jnp.arange(2),
        "bool": jnp.array(True),
        "complex": jnp.ones(2, jnp.complex64),
        "key": jax.random.key(0),
        "float0": np.zeros((2,), jax.dtypes.float0),
        "none": None,
        "python": 1.5,
        "function": jax.nn.relu,
        "_overwrite_with_gradient": {"kernel_scale": jnp.ones(1)},
    }
    got = Policy("p=f32,c=f16,o=bf16").cast_to_compute(tree)
    assert {k for k in tree if getattr(got[k], "dtype", None) == F16} == {"w", "half", "numpy"}
    assert all(
        got[k] is tree[k]
        for k in tree
        if k not in ("w", "half", "numpy", "_overwrite_with_gradient")
    )
    assert got["_overwrite_with_gradient"]["kernel_scale"].dtype == F32


def test_each_cast_has_its_dtype():
    policy, x = Policy("p=f32,c=f16,o=bf16"), jnp.ones(2)
    casts = (policy.cast_to_param, policy.cast_to_compute, policy.cast_to_output)
    assert [cast(x).dtype for cast in casts] == [F32, F16, BF16]


@pytest.mark.parametrize(
    "pattern, kept",
    [
        ("norm*", {"block/norm1/scale", "block/norm2/scale"}),
        ("wo", {"block/wo/kernel"}),
        ("block/wo", {"block/wo/kernel"}),
        ("wo/kernel", {"block/wo/kernel"}),
        ("w", set()),
        ("block/kernel", set()),
        ("kernel/wo", set()),
        ("*", {"block/norm1/scale", "block/norm2/scale", "block/wi/kernel", "block/wo/kernel"}),
    ],
)
def test_named_modules_stay_in_float32(pattern, kept):
    module = lambda name: {name: jnp.ones(2)}
    params = {
        "block": {
            "norm1": module("scale"),
            "norm2": module("scale"),
            "wi": module("kernel"),
            "wo": module("kernel"),
        }
    }
    policy = Policy("half", keep_f32=[pattern])
    for cast in (policy.cast_to_compute, policy.cast_to_param):
        flat = jax.tree_util.tree_leaves_with_path(cast(params))
        names = {jax.tree_util.keystr(p, simple=True, separator="/"): x.dtype for p, x in flat}
        assert {name for name, dtype in names.items() if dtype == F32} == kept
    assert policy.with_output_dtype("f32").keep_f32 == (pattern,)
    assert all(x.dtype == F16 for x in jax.tree.leaves(policy.cast_to_output(params)))


def test_block_scales_of_a_quantised_base_can_be_kept():
    base = {"layer": {"qvalue": jnp.zeros((4, 4), jnp.int4), "scale": jnp.ones((4, 1))}}
    got = Policy("half", keep_f32="layer/scale").cast_to_compute(base)
    assert got["layer"]["qvalue"].dtype == jnp.int4 and got["layer"]["scale"].dtype == F32


def test_casts_are_differentiable_and_gradients_come_back_in_the_old_dtype():
    policy = Policy("p=f32,c=f16,o=f32")
    grads = jax.grad(lambda p: jnp.sum(policy.cast_to_compute(p)["w"]).astype(F32))(
        {"w": jnp.ones(2)}
    )
    assert grads["w"].dtype == F32


@pytest.mark.parametrize(
    "args, words",
    [
        (("float17",), "floating-point dtypes, got 'float17'"),
        ((jnp.int8,), "floating-point dtypes"),
        ((jnp.complex64,), "floating-point dtypes"),
        ((16,), "floating-point dtypes, got 16"),
        ((None,), "floating-point dtypes, got None"),
        (("f32", "f16", "int8"), "floating-point dtypes, got 'int8'"),
        (("p=f32,x=f16",), "unknown key 'x'"),
        (("p=f32,params=f16",), "sets 'params' twice"),
        (("p=",), "floating-point dtypes, got ''"),
        (("float",), "floating-point dtypes, got 'float'"),
        ((float,), "floating-point dtypes, got <class 'float'>"),
        (("f32", "f16"), "all three of param_dtype"),
    ],
)
def test_a_bad_policy_is_one_clear_sentence(args, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Policy(*args)


@pytest.mark.parametrize("keep_f32", [[1], [None]])
def test_a_bad_path_is_one_clear_sentence(keep_f32):
    with pytest.raises(TypeError, match="keep_f32 must be parameter paths"):
        Policy("half", keep_f32=keep_f32)
