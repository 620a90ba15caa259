import dataclasses
import json
import re

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
        ("FP16", F16, None),
        ("float16", F16, None),
        ("bf16", BF16, None),
        ("fp32", F32, None),
        ("no", F32, None),
        ("16-mixed", F16, None),
        ("bf16-mixed", BF16, None),
        ("32-true", F32, None),
        ({}, F32, None),
        ({"fp16": True}, F16, None),
        ({"fp16": True, "bf16": False, "max_grad_norm": 1.0}, F16, 1.0),
        ({"bf16": True, "max_grad_norm": 0}, BF16, None),
        ({"fp16": {"enabled": True}, "gradient_clipping": 0.5}, F16, 0.5),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, BF16, None),
        ({"fp16": {"enabled": False}}, F32, None),
        ({"fp16": True, "deepspeed": {"fp16": {"enabled": "auto"}}}, F16, None),
        ({"fp16": False, "deepspeed": {"fp16": {"enabled": "auto"}}}, F32, None),
        ({"fp16": True, "deepspeed": {"fp16": {"loss_scale": 8}}}, F16, None),
        ({"fp16": True, "deepspeed": None, "max_grad_norm": None}, F16, None),
        ({"fp16": {}, "amp": {"enabled": False}, "torch_autocast": {}}, F32, None),
        ({"bf16": True, "deepspeed": {"fp16": {"enabled": "auto"}}}, BF16, None),
        ({"fp16": True, "deepspeed": {"gradient_clipping": "auto"}, "max_grad_norm": 2}, F16, 2.0),
        ({"fp16": True, "deepspeed": {"zero_optimization": {"stage": 2}}}, F16, None),
        (
            {"bf16": True, "deepspeed": {b: {"enabled": "auto"} for b in ("fp16", "bf16")}},
            BF16,
            None,
        ),
        ({"bf16": {"enabled": True, "immediate_grad_update": True}}, BF16, None),
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


BLOCK = {"enabled": True}


@pytest.mark.parametrize(
    "config, error, said",
    [
        ("fp61", ValueError, "'fp61' is neither a precision nor .* (did you mean 'fp16'?)"),
        ("nowhere.json", ValueError, "neither a precision nor a file .* precisions are fp16,"),
        ({"deepspeed": "fp16"}, ValueError, "deepspeed: 'fp16' is not a file .* (No such file"),
        (16, TypeError, "got 16"),
        (None, TypeError, "got None"),
        ({"fp_16": True}, ValueError, "unknown key fp_16 (did you mean 'fp16'?)"),
        ({"learning_rate": 1}, ValueError, "unknown key learning_rate.*pass only .* 'deepspeed')}"),
        ({"deepspeed": {"max_grad_norm": 1}}, ValueError, "unknown key deepspeed.max_grad_norm"),
        ({"fp16": {"hysterisis": 2}}, ValueError, "fp16.hysterisis (did you mean 'hysteresis'?)"),
        ({"gradient_cliping": 1}, ValueError, "(did you mean 'gradient_clipping'?)"),
        # Two keys that contradict each other: both are named.
        ({"fp16": True, "bf16": True}, ValueError, "fp16 and bf16 are both on"),
        (
            {"fp16": True, "deepspeed": {"bf16": BLOCK}},
            ValueError,
            "fp16 and deepspeed.bf16.enabled are both on",
        ),
        (
            {"fp16": False, "deepspeed": {"fp16": BLOCK}},
            ValueError,
            "fp16 is False and deepspeed.fp16.enabled is True: give one",
        ),
        (
            {"fp16": True, "deepspeed": {"fp16": {"enabled": False}}},
            ValueError,
            "fp16 is True and deepspeed.fp16.enabled is False",
        ),
        (
            {"fp16": BLOCK | {"hysteresis": 2}, "deepspeed": {"fp16": {"hysteresis": 1}}},
            ValueError,
            "fp16.hysteresis is 2 and deepspeed.fp16.hysteresis is 1",
        ),
        (
            {"fp16": True, "max_grad_norm": 1, "deepspeed": {"gradient_clipping": 2}},
            ValueError,
            "max_grad_norm is 1.0 and deepspeed.gradient_clipping is 2.0",
        ),
        (
            {"deepspeed": {"fp16": {"enabled": "auto"}}},
            ValueError,
            'deepspeed.fp16.enabled is "auto", and nothing decides it: .* {"fp16": True, "deepsp',
        ),
        ({"bf16": {"enabled": "auto"}, "fp16": False}, ValueError, 'bf16.enabled is "auto"'),
        # What jscale does not do.
        ({"amp": BLOCK}, ValueError, "amp is on, which is torch's or apex's: use fp16 or bf16"),
        ({"deepspeed": {"torch_autocast": BLOCK}}, ValueError, "deepspeed.torch_autocast is on"),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, ValueError, "grads is on, but optim"),
        ({"bf16": {"bf16_optimizer_states": True}}, ValueError, "bf16.bf16_optimizer_states is on"),
        # Values, in a block that is off too.
        ({"fp16": "yes"}, TypeError, "fp16 must be True or False, got 'yes'"),
        ({"fp16": {"enabled": 1}}, TypeError, "fp16.enabled must be True or False, got 1"),
        ({"fp16": {"hysteresis": 0}}, ValueError, "amp: fp16.hysteresis must be a whole number"),
        ({"fp16": {"loss_scale": "big"}}, TypeError, "amp: fp16.loss_scale must be a real number"),
        ({"fp16": {"loss_scale": 1e300}}, ValueError, "amp: fp16.loss_scale must be positive"),
        ({"fp16": {"min_loss_scale": -1}}, ValueError, "amp: fp16.min_loss_scale must be positive"),
        ({"fp16": {"loss_scale_window": 1.5}}, ValueError, "amp: fp16.loss_scale_window must be"),
        *(
            ({"fp16": {"initial_scale_power": x}}, ValueError, "fp16.initial_scale_power must be a")
            for x in (1.5, 127, 10**400, float("nan"))
        ),
        (
            {"fp16": BLOCK | {"initial_scale_power": 2, "min_loss_scale": 8}},
            ValueError,
            "fp16.min_loss_scale must not exceed 2^initial_scale_power, got 8.0 > 4.0",
        ),
        ({"bf16": {"check_grad_overflow": "no"}}, TypeError, "bf16.check_grad_overflow must be"),
        ({"deepspeed": {"fp16": {"enabled": 1}}}, TypeError, "deepspeed.fp16.enabled must be"),
        ({"fp16": True, "max_grad_norm": -1}, ValueError, "max_grad_norm must be finite"),
        *(({"deepspeed": x}, TypeError, "deepspeed must hold a dict") for x in (3, 0, False, [])),
    ],
    ids=str,
)
def test_mistakes_name_the_key(config, error, said):
    pattern = ".*".join(map(re.escape, said.split(".*")))
    with pytest.raises(error, match=pattern) as raised:
        amp(config)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("block", [{"loss_scale": 0}, {"loss_scale": "auto"}])
def test_settings_that_nothing_turns_on_warn(block):
    with pytest.warns(UserWarning, match="fp16 block has settings, but no .* float32") as warned:
        assert amp({"fp16": block}).compute_dtype == F32
    assert warned[0].filename == __file__


def test_a_file_that_is_not_json_is_an_error(tmp_path):
    path = tmp_path / "broken.json"
    for content in (b"{fp16: true", b'{"fp16": "\xff"}'):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not JSON in UTF-8"):
            amp(path)
    path.write_text("[1]")
    with pytest.raises(TypeError, match="must hold a dict"):
        amp({"deepspeed": path})
    with pytest.raises(ValueError, match="Is a directory"):
        amp(tmp_path)


def test_overflows_of_bfloat16_are_skipped_if_asked_for():
    tx = amp({"bf16": {"enabled": True, "check_grad_overflow": True}}).optimizer(optax.sgd(1.0))
    state = tx.update(jnp.float32(jnp.inf), tx.init(jnp.ones(())), jnp.ones(()))[1]
    assert (float(jscale.loss_scale(state)), int(state.skipped_steps)) == (1, 1)


def test_clipping_goes_inside_accumulation():
    half = amp({"fp16": True, "max_grad_norm": 1.0})
    steps = optax.MultiSteps(optax.sgd(1.0), 2)
    with pytest.raises(ValueError, match=r"chain\(optax.clip_by_global_norm\(1.0\), tx\), k\)"):
        half.optimizer(steps)
    tx = dataclasses.replace(half, max_grad_norm=None).optimizer(steps)
    assert tx.init(jnp.ones(2)).inner.mini_step == 0
    with pytest.raises(TypeError, match="axis_name must be"):
        half.optimizer(optax.sgd(1.0), axis_name=3)


@pytest.mark.parametrize(
    "made, shown",
    [
        (amp("bf16"), "Amp(bfloat16)"),
        (
            amp({"fp16": True, "max_grad_norm": 2}),
            "Amp(float16, max_grad_norm=2.0, first scale 2^16)",
        ),
        (amp({"fp16": BLOCK | {"loss_scale": 1000}}), "Amp(float16, first scale 1000)"),
        (
            dataclasses.replace(amp("fp16"), rule={"a": jscale.dynamic(), "": jscale.static(1)}),
            "Amp(float16, rules for 'a', '')",
        ),
    ],
)
def test_it_shows_what_it_does(made, shown):
    assert repr(made) == shown


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
