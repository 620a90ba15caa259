"""Runs that move between systems, cut anywhere, decide as those that stay."""

import os
import re
import subprocess
import sys
import types
from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from helpers import assert_same_bits
from recordings import leaves_bounds, recordings

import jscale
from jscale import Observation, interop, presets

AFTER = 200  # steps that are compared after a cut


def _torch(p, trace, at):
    return {
        "scale": p["scale"],
        "growth_factor": p["growth_factor"],
        "backoff_factor": p["backoff_factor"],
        "growth_interval": p["growth_interval"],
        "_growth_tracker": kept(trace, "growth_tracker", at, 0),
    }


def _deepspeed(p, trace, at):
    overflows = np.flatnonzero(trace["found_inf"][:at])
    return {
        "cur_scale": p["scale"],
        "cur_iter": at,
        "last_overflow_iter": int(overflows[-1]) if len(overflows) else -1,
        "scale_factor": 2.0,
        "scale_window": p["scale_window"],
    }


def _deepspeed_zero(p, trace, at):
    names = ("min_scale", "delayed_shift", "consecutive_hysteresis")
    return _deepspeed(p, trace, at) | {
        **{name: p[name] for name in names},
        "cur_hysteresis": kept(trace, "hysteresis", at, p["delayed_shift"]),
        "raise_error_at_min_scale": p.get("raise_error_at_min_scale", True),
        "dynamic": True,
        "dtype": "torch.float16",
    }


def _megatron(p, trace, at):
    return {
        "scale": np.float32([p["scale"]]),
        "growth_tracker": kept(trace, "growth_tracker", at, 0),
        "hysteresis_tracker": kept(trace, "hysteresis_tracker", at, p["hysteresis"]),
    }


def _paddle(p, trace, at):
    return {
        "scale": np.float32([p["scale"]]),
        "incr_ratio": p["incr_ratio"],
        "decr_ratio": p["decr_ratio"],
        "incr_every_n_steps": p["incr_every_n_steps"],
        "decr_every_n_nan_or_inf": p["decr_every_n_nan_or_inf"],
        "incr_count": kept(trace, "incr_count", at, 0),
        "decr_count": kept(trace, "decr_count", at, 0),
        "use_dynamic_loss_scaling": True,
    }


def kept(trace, key, at, first):
    """What the recorded scaler held before step `at`."""
    return trace[key][at - 1] if at else first


# The state that the recorded scaler would have saved before step `at`, and the first scale's name.
SAVED = {
    "torch_gradscaler": ("torch", "init_scale", _torch),
    "torch_fsdp_sharded_cpu": ("torch", "init_scale", _torch),
    "apex_amp_lossscaler": (
        "apex",
        "init_scale",
        lambda p, t, at: {
            "loss_scaler0": {"loss_scale": p["scale"], "unskipped": kept(t, "unskipped", at, 0)}
        },
    ),
    "deepspeed_dynamiclossscaler": ("deepspeed", "init_scale", _deepspeed_zero),
    "deepspeed_fp16_optimizer": (
        "deepspeed",
        "init_scale",
        lambda p, t, at: (
            _deepspeed(p, t, at) | {"dynamic_loss_scale": True, "optimizer_state_dict": {}}
        ),
    ),
    "megatron_dynamicgradscaler": ("megatron", "initial_scale", _megatron),
    "keras_lossscaleoptimizer_jax": (
        "keras",
        "initial_scale",
        lambda p, t, at: {
            "dynamic_scale": np.float32(p["scale"]),
            "step_counter": np.int32(kept(t, "step_counter", at, 0)),
        },
    ),
    "paddle_gradscaler_eager": ("paddle", "init_loss_scaling", _paddle),
}


def settings_of(system, params, start):
    """What the state does not say: the rest of the recording's parameters."""
    given = {k: v for k, v in params.items() if k not in (start, "loss_scale")}
    if system == "deepspeed_fp16_optimizer":
        given["min_scale"] = given.pop("min_loss_scale")
    return given


def cuts(trace, n):
    length = (leaves_bounds(trace) or len(trace["scale"])) - 1
    if length <= n:
        return list(range(length))
    return sorted(np.random.default_rng(0).choice(length, n, replace=False).tolist())


def cases():
    """Recordings with the same settings go through one program."""
    for system, (_, start, _) in SAVED.items():
        groups = {}
        for name, trace in recordings(system).items():
            settings = settings_of(system, trace["params"], start)
            if trace["params"].get("loss_scale", "dynamic") == "dynamic":
                groups.setdefault(str(settings), []).append(name)
        yield from (
            pytest.param(system, names, id=f"{system}-{names[0]}") for names in groups.values()
        )


@pytest.mark.parametrize("system, names", list(cases()))
def test_a_run_that_is_moved_decides_as_the_one_that_stayed(system, names):
    to, start, make = SAVED[system]
    moved = []
    for name in names:
        trace = recordings(system)[name]
        given = settings_of(system, trace["params"], start)
        settings = interop._settings(to, given)
        for at in cuts(trace, 45):
            saved = make({**settings, "scale": trace["scale"][at]}, trace, at)
            rest = {key: value for key, value in given.items() if key not in saved}
            moved.append((f"{name} cut at {at}", trace, at, saved, interop.load(to, saved, **rest)))

    # There: from every cut on, the recorded scales.
    rule = moved[0][-1][0]
    states = jax.tree.map(lambda *xs: jnp.stack(xs), *(state for *_, (_, state) in moved))
    flags = [trace["found_inf"][at : at + AFTER] for _, trace, at, *_ in moved]
    flags = np.array([row + [0] * (AFTER - len(row)) for row in flags]) == 0

    def step(state, finite):
        state = rule.update(state, Observation(finite=finite))
        return state, state.loss_scale

    run = jax.jit(jax.vmap(lambda state, finite: jax.lax.scan(step, state, finite)[1]))
    for (what, trace, at, *_), scales in zip(moved, np.asarray(run(states, flags)), strict=True):
        want = np.float32(trace["scale"][: leaves_bounds(trace)][at + 1 : at + 1 + AFTER])
        np.testing.assert_array_equal(scales[: len(want)], want, err_msg=what)

    # And back: every counter that the recorded scaler held, or one from which it goes on alike.
    for what, _, _, saved, (_, state) in moved:
        if "dynamic_loss_scale" in saved:  # FP16_Optimizer: without hysteresis
            given = {**given, "delayed_shift": 1}
        back = interop.export(to, state, **given)
        assert_same_counters(to, saved, back, what)
        assert_same_bits(interop.load(to, back, **given)[1], state)


def assert_same_counters(to, saved, back, message):
    if to == "deepspeed":
        # The iteration is counted anew: what matters is how far it is from the next growth.
        since = lambda s: s["cur_iter"] - s["last_overflow_iter"] - 1
        assert (since(saved) > 0) == (since(back) > 0), message
        assert (since(saved) - since(back)) % saved["scale_window"] == 0, message
        assert back["cur_hysteresis"] == saved.get("cur_hysteresis", 1), message
        saved = {k: back[k] if k in ("cur_iter", "last_overflow_iter") else saved[k] for k in saved}
        saved = {k: v for k, v in saved.items() if k in back}
        back = {k: v for k, v in back.items() if k in saved}
    if to == "megatron":  # below 0 it counts on, and decides as at 0
        saved = saved | {"hysteresis_tracker": max(saved["hysteresis_tracker"], 0)}
    assert jax.tree.structure(saved) == jax.tree.structure(back), message
    same = jax.tree.map(lambda x, y: bool(np.all(np.float32(x) == np.float32(y))), saved, back)
    assert jax.tree.all(same), (message, saved, back)


FLAGS = np.random.default_rng(1).uniform(size=60) > 0.2


def _flax_step(scale, finite):
    gradient = 1.0 if finite else np.inf
    return scale.value_and_grad(lambda w: w * gradient)(jnp.float32(1)).dynamic_scale


def _jmp_step(scale, finite):
    return scale.adjust(jnp.asarray(finite))


OBJECTS = {
    "flax": (_flax_step, lambda: DynamicScale(growth_interval=3, scale=jnp.float32(64))),
    "jmp": (_jmp_step, lambda: jmp.DynamicLossScale(jnp.float32(64), period=3)),
}


@pytest.mark.parametrize("system", OBJECTS)
def test_objects_of_jax_libraries_come_and_go(system, standard_promotion):
    step, make = OBJECTS[system]
    make_again = {"flax": DynamicScale, "jmp": jmp.DynamicLossScale}[system]
    current, objects = make(), []
    for finite in FLAGS:
        objects.append(current)
        current = step(current, bool(finite))
    scale_of = lambda x: float(x.scale if system == "flax" else x.loss_scale)
    for at in range(0, len(FLAGS) - 12, 5):
        rule, state = interop.load(system, objects[at])
        saved = interop.export(system, state, **{OWN[system]: 3})
        back = make_again(**saved)
        for finite, there in zip(FLAGS[at : at + 12], objects[at:], strict=False):
            assert float(state.loss_scale) == scale_of(there) == scale_of(back)
            state = rule.update(state, Observation(finite=bool(finite)))
            back = step(back, bool(finite))


OWN = {"flax": "growth_interval", "jmp": "period"}
TORCH = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 7,
}
MEGATRON = {"scale": 8.0, "growth_tracker": 7, "hysteresis_tracker": 1}
DEEPSPEED = {
    "cur_scale": 8.0,
    "cur_iter": 9,
    "last_overflow_iter": 3,
    "scale_window": 10,
    "delayed_shift": 2,
    "cur_hysteresis": 2,
}
PADDLE = {
    "scale": np.float32([8.0]),
    "incr_ratio": 2.0,
    "decr_ratio": 0.5,
    "incr_every_n_steps": 10,
    "decr_every_n_nan_or_inf": 2,
    "incr_count": 3,
    "decr_count": 1,
    "use_dynamic_loss_scaling": True,
}
KERAS = {"dynamic_scale": 8.0, "step_counter": 3}


def less(saved, key):
    return {k: v for k, v in saved.items() if k != key}


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "system, saved, words",
    [
        ("torhc", TORCH, "system must be one of torch, apex,"),
        (TORCH, "torch", "system must be a name such as 'torch', got dict: it comes first"),
        ([], TORCH, "system must be a name such as 'torch', got list"),
        ("torhc", TORCH, "got 'torhc' (did you mean 'torch'?)"),
        ("torch", {}, "this torch state is empty: its scaler was off, or constant."),
        ("torch", "scaler.pt", "this torch state, a str, lacks"),
        ("torch", None, "this torch state, a NoneType, lacks"),
        ("torch", less(TORCH, "_growth_tracker"), "lacks '_growth_tracker'"),
        (
            "torch",
            less(TORCH, "_growth_tracker") | {"growth_tracker": 7},
            "has 'growth_tracker' (did you mean '_growth_tracker'?)",
        ),
        ("torch", TORCH | {"epoch": 3}, "has 'epoch'"),
        ("torch", TORCH | {3: 3}, "has '3'"),
        *(("torch", TORCH | {"scale": x}, "scale must be positive") for x in (0, -1, NAN, INF)),
        ("torch", TORCH | {"scale": 2.0**127}, "scale must be positive, finite and from 2^-126"),
        ("torch", TORCH | {"scale": "big"}, "scale must be a real number, got 'big'"),
        ("torch", TORCH | {"scale": None}, "scale must be a real number, got None"),
        ("torch", TORCH | {"scale": np.ones(2)}, "scale must be one number, got float64[2]"),
        ("torch", TORCH | {"scale": {}}, "scale must be a real number, got dict"),
        ("torch", TORCH | {"growth_factor": 1.0}, "growth_factor must be finite and above 1"),
        ("torch", TORCH | {"growth_interval": 0}, "growth_interval must be a whole number"),
        ("torch", TORCH | {"_growth_tracker": 1.5}, "_growth_tracker must be a whole number"),
        ("torch", TORCH | {"_growth_tracker": NAN}, "_growth_tracker must be a whole number"),
        ("torch", TORCH | {"_growth_tracker": "x"}, "_growth_tracker must be a real number"),
        ("torch", TORCH | {"_growth_tracker": -1}, "_growth_tracker = -1 cannot be where"),
        (
            "torch",
            TORCH | {"_growth_tracker": 2000},
            "_growth_tracker = 2000 cannot be where growth_interval = 2000: pass the settings",
        ),
        ("megatron", MEGATRON | {"hysteresis_tracker": 3}, "where growth_interval = 1000, hyster"),
        ("megatron", MEGATRON | {"scale": 0.5}, "initial_scale must be at least 1.0"),
        ("deepspeed", DEEPSPEED | {"cur_iter": 2}, "cur_iter = 2, last_overflow_iter = 3"),
        ("deepspeed", DEEPSPEED | {"cur_iter": -1}, "cur_iter must be at least 0, and last_overfl"),
        ("deepspeed", DEEPSPEED | {"last_overflow_iter": -2}, "at least -1, got 9 and -2"),
        ("deepspeed", DEEPSPEED | {"cur_hysteresis": 0}, "cur_hysteresis = 0 cannot be"),
        ("deepspeed", DEEPSPEED | {"scale_factor": 3.0}, "scale_factor is 3.0, and must be 2.0"),
        (
            "deepspeed",
            DEEPSPEED | {"dynamic_loss_scale": False},
            "dynamic_loss_scale is False, and must be True: use jscale.static(8.0)",
        ),
        *(
            (
                "deepspeed",
                {"cur_scale": 8.0, "cur_iter": 3, key: False},
                f"{key} is False, and must",
            )
            for key in ("dynamic", "dynamic_loss_scale")
        ),
        (
            "deepspeed",
            DEEPSPEED | {"consecutive_hysteresis": 2},
            "consecutive_hysteresis must be True or False, got 2",
        ),
        (
            "deepspeed",
            DEEPSPEED | {"minimum_scale": 1},
            "has 'minimum_scale' (did you mean 'min_scale'?)",
        ),
        ("paddle", PADDLE | {"decr_count": 2}, "decr_count = 2 cannot be where"),
        ("paddle", PADDLE | {"use_dynamic_loss_scaling": False}, "use jscale.static(8.0)"),
        ("keras", KERAS | {"step_counter": 5000}, "step_counter = 5000 cannot be where"),
        ("keras", types.SimpleNamespace(dynamic_scale=8.0), "lacks 'step_counter'"),
        (
            "apex",
            {"loss_scaler0": {}, "loss_scaler1": {}},
            "has 2 scalers, loss_scaler0, loss_scaler1: pass one of them",
        ),
        ("apex", {"loss_scaler0": {}, "epoch": 3}, "has 'epoch' beside loss_scaler0: pass saved["),
        (
            "apex",
            {"model": {}, "amp": {"loss_scaler0": {}}},
            "has 'model', 'amp': pass saved['amp']",
        ),
        (
            "torch",
            {"model": {}, "scaler": TORCH},
            "'scaler' (did you mean 'scale'?): pass saved['scaler'].",
        ),
        ("apex", {"loss_scale": 2.0**30, "unskipped": 0}, "loss_scale is 1073741824.0, which"),
        ("jmp", jmp.NoOpLossScale(), "this jmp state, a NoOpLossScale, lacks 'counter'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(system, saved, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)) as error:
        interop.load(system, saved)
    assert len(str(error.value).splitlines()) == 1


def test_settings_of_the_run():
    rule, state = interop.load("megatron", MEGATRON, growth_interval=8)
    assert float(rule.update(state, Observation(finite=True)).loss_scale) == 16
    with pytest.raises(ValueError, match="growth_tracker = 7, hysteresis_tracker = 1 cannot be"):
        interop.load("megatron", MEGATRON, growth_interval=7)
    with pytest.raises(TypeError, match=r"no setting 'growth_intervall' \(did you mean 'growth_i"):
        interop.load("megatron", MEGATRON, growth_intervall=8)
    with pytest.raises(TypeError, match="no setting 'initial_scale'"):
        interop.load("megatron", MEGATRON, initial_scale=8)
    # Those given now go before the saved ones.
    rule, state = interop.load("torch", TORCH, growth_interval=8)
    assert float(rule.update(state, Observation(finite=True)).loss_scale) == 2048
    with pytest.raises(ValueError, match="do not reach"):
        interop.load("torch", TORCH, enabled=False)


def test_values_may_be_arrays_tensors_or_attributes():
    tensor = types.SimpleNamespace(item=lambda: 1024.0)
    wrapped = {"scale": tensor, "_growth_tracker": jnp.int32(7), "growth_factor": np.float64(2)}
    want = interop.load("torch", TORCH)[1]
    assert_same_bits(interop.load("torch", TORCH | wrapped)[1], want)
    assert_same_bits(interop.load("torch", types.SimpleNamespace(**TORCH, name="mine"))[1], want)
    assert_same_bits(interop.load("torch", types.MappingProxyType(TORCH | wrapped))[1], want)
    _, state = interop.load("apex", {"loss_scale": 8.0, "unskipped": 3})
    assert (float(state.loss_scale), int(state.growth_tracker)) == (8, 3)
    scaler = types.SimpleNamespace(**DEEPSPEED)
    assert int(interop.load("deepspeed", scaler)[1].growth_tracker) == 4
    assert interop.export("paddle", want)["scale"].shape == (1,)


def test_a_loaded_state_is_one_of_its_rule():
    for system, saved in [("torch", TORCH), ("deepspeed", DEEPSPEED), ("keras", KERAS)]:
        rule, state = interop.load(system, saved)
        typed = lambda x: (x.shape, x.dtype, x.weak_type)
        assert list(map(typed, state)) == list(map(typed, rule.init()))
        assert float(rule.init().loss_scale) == float(state.loss_scale)


def test_what_cannot_be_exported():
    with pytest.raises(TypeError, match="only the states of counting rules can be exported"):
        interop.export("torch", jscale.with_loss_scale(optax.sgd(1.0), jscale.static(8)).init({}))
    with pytest.raises(ValueError, match="no loss scale in this state"):
        interop.export("torch", {})
    state = presets.torch(growth_interval=3000).init()._replace(growth_tracker=jnp.int32(2500))
    with pytest.raises(ValueError, match="growth_tracker = 2500, .* where growth_interval = 2000"):
        interop.export("torch", state)
    assert interop.export("torch", state, growth_interval=3000)["_growth_tracker"] == 2500
    with pytest.raises(TypeError, match="no setting 'interval'"):
        interop.export("torch", state, interval=3000)
    two = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    with pytest.raises(ValueError, match=r"one scale at a time, got float32\[2\]"):
        interop.export("torch", two)
    with pytest.raises(ValueError, match="growth_tracker = -1"):
        interop.export("torch", presets.deepspeed().init())
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda state: interop.export("torch", state))(state)
    with pytest.raises(TypeError, match="system must be a name .*, got DynamicState"):
        interop.export(state, "torch")


def test_a_spent_hysteresis_is_one_overflow_from_a_drop_everywhere():
    spent = presets.megatron().init()._replace(hysteresis_tracker=jnp.int32(0))
    assert interop.export("megatron", spent)["hysteresis_tracker"] == 0
    assert interop.export("deepspeed", spent)["cur_hysteresis"] == 1
    assert interop.export("paddle", spent, decr_every_n_nan_or_inf=3)["decr_count"] == 2


PARAMS = {"w": jnp.ones(2)}
TX = optax.chain(jscale.with_loss_scale(optax.sgd(0.1, momentum=0.9)))


def test_put_changes_the_rules_state_and_nothing_else():
    rule_state = interop.load("torch", TORCH)[1]
    state = TX.init(PARAMS)
    _, state = TX.update({"w": jnp.full(2, jnp.inf)}, state, PARAMS)
    new = interop.put(state, rule_state)
    assert_same_bits(new[0].rule, rule_state)
    assert_same_bits(new[0]._replace(rule=None), state[0]._replace(rule=None))
    nest = interop.put({"opt": [state, jnp.ones(2)]}, rule_state)
    assert_same_bits(nest, {"opt": [new, jnp.ones(2)]})
    saved = flax.serialization.to_state_dict(state)
    assert_same_bits(interop.put(saved, rule_state), flax.serialization.to_state_dict(new))
    assert float(jscale.loss_scale(state)) == 2.0**15  # the one given is as it was

    jax.jit(lambda s: s, donate_argnums=0)(new)
    assert float(rule_state.loss_scale) == 1024  # and what was put in may be put in again

    batched = jax.vmap(TX.init)({"w": jnp.ones((3, 2))})
    assert jscale.loss_scale(interop.put(batched, rule_state)).shape == (3,)


def test_put_works_under_nnx():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    state = interop.put(nnx.state(optimizer), interop.load("torch", TORCH)[1])
    nnx.update(optimizer, state)
    assert float(jscale.loss_scale(optimizer.opt_state)) == 1024
    assert interop.export("torch", optimizer.opt_state) == TORCH


def test_put_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="no loss scale in this state"):
        interop.put({}, presets.torch().init())
    state = TX.init(PARAMS)
    with pytest.raises(ValueError, match="more than one loss scale"):
        interop.put([state, state], presets.torch().init())
    with pytest.raises(TypeError, match=r"than this FairseqState \(unexpected overflows_since"):
        interop.put(state, presets.fairseq().init())
    with pytest.raises(TypeError, match=r"than this dict \(missing growth_tracker"):
        interop.put(state, {"loss_scale": 8.0})
    wrong = presets.torch().init()
    with pytest.raises(TypeError, match=r"at growth_tracker int32\[2\], expected int32\[\]"):
        interop.put(state, wrong._replace(growth_tracker=jnp.zeros(2, jnp.int32)))
    for scale in (0.0, NAN):
        with pytest.raises(ValueError, match="loss_scale must be positive"):
            interop.put(state, wrong._replace(loss_scale=jnp.float32(scale)))
    inner = lambda rule: jscale.with_loss_scale(optax.sgd(1.0), jscale.anticipate(rule))
    with pytest.raises(TypeError, match="unexpected rule/overflows_since_drop"):
        fairseq = jscale.anticipate(presets.fairseq()).init()
        interop.put(inner(presets.torch()).init(PARAMS), fairseq)


def test_what_is_off_stays_off():
    make = lambda rule: jscale.with_loss_scale(optax.sgd(1.0), rule).init(PARAMS)
    off, static = jscale.off(), jscale.static(8)
    for saved in (lambda x: x, flax.serialization.to_state_dict):
        with pytest.raises(TypeError, match="their types differ"):
            interop.put(saved(make(off)), static.init())
        with pytest.raises(TypeError, match="their types differ"):
            interop.put(saved(make(static)), off.init())
    assert_same_bits(interop.put(make(off), off.init()), make(off))


def test_several_rules_are_put_together_and_exported_one_by_one():
    rules = {"w": jscale.dynamic(8.0), "": jscale.static(8.0)}
    state = jscale.with_loss_scale(optax.sgd(1.0), rules).init({"w": jnp.ones(2), "v": jnp.ones(2)})
    new = {"w": interop.load("torch", TORCH)[1], "": jscale.static(4).init()}
    state = interop.put(state, new)
    assert_same_bits(state.rule, new)
    with pytest.raises(ValueError, match="several, '', 'w': pass the state of one rule"):
        interop.export("torch", state)
    assert interop.export("torch", state.rule["w"]) == TORCH


class _Nested(NamedTuple):
    loss_scale: jax.Array
    rule: jscale.DynamicState


def test_put_reaches_the_state_of_a_rule_within_a_rule():
    inner = presets.torch(8.0)
    rule = jscale.ScaleRule(lambda: _Nested(jnp.float32(4), inner.init()), lambda s, o: s)
    state = jscale.with_loss_scale(optax.sgd(1.0), rule).init(PARAMS)
    wanted = _Nested(jnp.float32(2), interop.load("torch", TORCH)[1])
    assert_same_bits(interop.put(state, wanted).rule, wanted)


def test_what_flax_writes_lacks_the_settings_which_are_given_again():
    scale = DynamicScale(growth_interval=30, fin_steps=jnp.int32(7), scale=jnp.float32(8))
    saved = flax.serialization.to_state_dict(scale)
    assert saved.keys() == {"fin_steps", "scale"}
    rule, state = interop.load("flax", saved, growth_interval=30)
    assert (state.loss_scale, state.growth_tracker) == (8, 7)
    wanted = interop.load("flax", scale)
    assert_same_bits(state, wanted[1])
    clean = jscale.Observation(finite=True)
    for _ in range(40):
        state = rule.update(state, clean)
    assert state.loss_scale == 16
    with pytest.raises(ValueError, match="fin_steps"):
        interop.load("flax", {"scale": 8.0})


def test_no_other_system_is_imported():
    code = (
        "import sys, jscale.interop\n"
        "print({'torch', 'keras', 'flax', 'jmp', 'apex', 'paddle'} & set(sys.modules))"
    )
    path = os.pathsep.join(sys.path)
    env = os.environ | {"PYTHONPATH": path}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert out.stdout.strip() == "set()", out.stderr
