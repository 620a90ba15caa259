import json

import jax
import jax.numpy as jnp
import optax
import pytest

import jscale
from jscale import amp

F16, BF16, F32 = map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32))


@pytest.mark.parametrize(
    "config, dtype, norm",
    [
        ("fp16", F16, None),
        ("float16", F16, None),
        ("bf16", BF16, None),
        ("fp32", F32, None),
        ("no", F32, None),
        ({}, F32, None),
        ({"fp16": True}, F16, None),
        ({"fp16": True, "bf16": False, "max_grad_norm": 1.0}, F16, 1.0),
        ({"bf16": True, "max_grad_norm": 0}, BF16, None),
        ({"fp16": {"enabled": True}, "gradient_clipping": 0.5}, F16, 0.5),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, BF16, None),
        ({"fp16": {"enabled": False}}, F32, None),
        ({"fp16": True, "deepspeed": {"fp16": {"enabled": "auto"}}}, F16, None),
        ({"deepspeed": {"fp16": {"enabled": "auto"}}}, F32, None),
        ({"bf16": True, "deepspeed": {"fp16": {"enabled": "auto"}}}, BF16, None),
        ({"fp16": True, "deepspeed": {"gradient_clipping": "auto"}, "max_grad_norm": 2}, F16, 2.0),
        ({"fp16": True, "deepspeed": {"zero_optimization": {"stage": 2}}}, F16, None),
    ],
)
def test_what_is_computed_how(config, dtype, norm):
    made = amp(config)
    assert (made.compute_dtype, made.max_grad_norm) == (dtype, norm)
    scaled = not isinstance(made.rule.init(), jscale.OffState)
    assert scaled == (dtype == F16)


def scales(rule, flags):
    state = rule.init()
    for finite in flags:
        yield float(state.loss_scale)
        state = rule.update(state, jscale.Observation(finite=finite))
    yield float(state.loss_scale)


def test_deepspeeds_settings_are_the_presets():
    block = dict(
        enabled=True,
        loss_scale=0,
        initial_scale_power=4,
        loss_scale_window=2,
        hysteresis=1,
        consecutive_hysteresis=True,
        min_loss_scale=0.5,
    )
    wanted = jscale.presets.deepspeed(16, 2, 0.5, 1, True)
    flags = [True] * 6 + [False] * 8 + [True] * 3
    assert [*scales(amp({"fp16": block}).rule, flags)] == [*scales(wanted, flags)]
    auto = {"enabled": True, **dict.fromkeys(["loss_scale", "initial_scale_power"], "auto")}
    default = jscale.presets.deepspeed()
    assert [*scales(amp({"fp16": auto}).rule, flags)] == [*scales(default, flags)]


def test_a_loss_scale_that_is_not_0_is_constant():
    rule = amp({"fp16": {"enabled": True, "loss_scale": 128}}).rule
    assert [*scales(rule, [True, False])] == [128] * 3


def test_fp16_of_hugging_face_is_torchs_scaler():
    flags = [False, True, False]
    assert [*scales(amp({"fp16": True}).rule, flags)] == [*scales(jscale.presets.torch(), flags)]


def test_a_path_is_read(tmp_path):
    path = tmp_path / "zero2.json"
    config = {"fp16": {"enabled": True, "loss_scale": 8}, "train_batch_size": 32}
    path.write_text(json.dumps(config))
    for given in (path, str(path), {"deepspeed": str(path)}):
        assert [*scales(amp(given).rule, [True])] == [8, 8]


@pytest.mark.parametrize(
    "config, error, said",
    [
        ("fp61", ValueError, "'fp61'.*did you mean 'fp16'"),
        ("nowhere.json", ValueError, "neither a precision nor a file"),
        (16, TypeError, "got 16"),
        (None, TypeError, "got None"),
        ({"fp_16": True}, ValueError, "unknown key fp_16: did you mean fp16"),
        ({"fp16": {"hysterisis": 2}}, ValueError, "fp16.hysterisis: did you mean fp16.hysteresis"),
        ({"gradient_cliping": 1}, ValueError, "did you mean gradient_clipping"),
        ({"fp16": True, "bf16": True}, ValueError, "both on"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ValueError, "both on"),
        ({"fp16": "yes"}, TypeError, "fp16 must be true or false, got 'yes'"),
        ({"fp16": {"enabled": 1}}, TypeError, "fp16.enabled must be true or false, got 1"),
        ({"fp16": {"enabled": True, "hysteresis": 0}}, ValueError, "fp16.hysteresis"),
        ({"fp16": {"enabled": True, "loss_scale": "big"}}, TypeError, "fp16.loss_scale"),
        ({"fp16": True, "max_grad_norm": -1}, ValueError, "max_grad_norm"),
        ({"fp16": True, "max_grad_norm": 1, "gradient_clipping": 2}, ValueError, "differ"),
        ({"deepspeed": 3}, TypeError, "deepspeed must hold a dict"),
    ],
)
def test_mistakes_name_the_key(config, error, said):
    with pytest.raises(error, match=said):
        amp(config)


def test_a_file_that_is_not_json_is_an_error(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text("{fp16: true")
    with pytest.raises(ValueError, match="is not JSON"):
        amp(path)
    path.write_text("[1]")
    with pytest.raises(TypeError, match="must hold a dict"):
        amp(path)


@pytest.mark.parametrize("config", ["fp16", "bf16", "fp32", {"fp16": True, "max_grad_norm": 1.0}])
def test_the_same_loop_runs_in_every_precision(config, standard_promotion):
    made = amp(config)
    tx = made.optimizer(optax.adam(0.05))
    key = jax.random.key(0)
    params = {"w": jax.random.normal(key, (8, 8)) / 3, "v": jnp.ones((8, 1)) / 8}
    x = jax.random.normal(key, (16, 8))

    def loss_fn(params, x):
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - x[:, :1]) ** 2)

    @jax.jit
    def step(params, opt_state):
        loss, grads = made.value_and_grad(loss_fn, opt_state)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    for _ in range(60):
        params, opt_state, loss = step(params, opt_state)
        losses.append(float(loss))
    assert losses[-1] < 0.2 * losses[0]
    products = [
        row.dtype
        for row in jscale.explain(jscale.autocast(loss_fn, made.compute_dtype))(params, x)
        if row.name == "dot_general"
    ]
    assert set(products) == {made.compute_dtype.name}
