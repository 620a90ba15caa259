import json
import logging

import jax
import jax.numpy as jnp
import monitor_judged as judged
import numpy as np
import optax
import pytest

import jscale

NAN, INF = float("nan"), float("inf")


def row(scale=1024.0, overflow=False, loss=1.0, **more):
    norm = INF if overflow else 1.0
    return {"grad_scale": scale, "grad_norm": norm, "finite": not overflow, "loss": loss} | more


def listen(rows, first=1, monitor=None, **kind):
    """Reads rows, one a step, and gives the advice by kind, the first of each."""
    monitor = monitor or jscale.Monitor(**kind)
    for step, metrics in enumerate(rows, first):
        monitor.update(step, metrics)
    monitor.flush()
    return {advice.kind: advice for advice in reversed(monitor.advice)}


CLEAN = [row()] * 30


def drops(n, **more):
    return [row(2.0 ** (10 - i), True, **more) for i in range(1, n + 1)]


def test_a_quiet_run_gets_no_advice():
    assert listen(CLEAN * 40) == {}
    assert listen([row(2.0 ** (32 - i), True) for i in range(16)] + CLEAN) == {}
    sawtooth = [row(2048.0)] * 21 + [row(1024.0, True)] + [row()] * 20
    assert listen(sawtooth * 40) == {}


def test_a_collapse_of_the_scale_is_told_with_its_evidence():
    advice = listen(CLEAN + drops(4, loss=5.0))["falling"]
    assert (advice.step, advice.severity) == (34, "warning")
    assert advice.evidence == {"from": 10, "to": 6, "steps": 4, "since": 30}
    assert "the loss scale fell from 2^10 to 2^6 since step 30, and the loss went from 1 to 5" in (
        advice.text
    )
    assert "falling" not in listen(CLEAN + drops(3))
    # A scale that is lowered without overflow, as forecasting rules do, is no collapse.
    assert listen(CLEAN + [row(2.0 ** (10 - i)) for i in range(9)]) == {}


def test_a_log_of_scales_alone_is_enough_for_a_collapse():
    scales = [2.0**10] * 40 + [2.0**4]
    assert list(listen([{"grad_scale": s} for s in scales])) == ["falling"]


def test_a_burst_is_told_once_and_not_beside_the_fall_that_it_is():
    assert list(listen(CLEAN + [row(overflow=True)] * 2)) == []
    steady = [row(overflow=i % 2 == 0) for i in range(8)]
    assert list(listen(CLEAN + steady)) == ["burst"]
    assert list(listen(CLEAN + drops(6))) == ["falling"]


def test_a_lost_loss_is_not_blamed_on_the_scale():
    """However long it lasts, and whatever the scale does meanwhile."""
    lost = [row(2.0 ** (10 - i), True, NAN) for i in range(30)]
    found = listen(CLEAN + lost)
    assert list(found) == ["loss"]
    assert found["loss"].severity == "error" and found["loss"].step == 31
    assert "Lowering the loss scale cannot help" in found["loss"].text
    assert list(listen([row() | {"loss_finite": False}])) == ["loss"]


def test_gradients_that_no_scale_makes_finite():
    found = listen(CLEAN + drops(20))
    assert found["row"].step == 50
    assert "gradients were not finite in 20 steps in a row" in found["row"].text


def test_a_scale_that_cannot_move():
    found = listen([row(8.0, True)] * 5)
    assert list(found) == ["stuck"] and found["stuck"].step == 5
    assert "lower min_scale" in found["stuck"].text
    assert listen([row(8.0, True)] * 4) == {}


def test_a_veto_is_no_overflow():
    assert listen(CLEAN + [row() | {"finite": False}] * 30) == {}


def test_skips_that_cost_too_much():
    rows = [row(2048.0 if i % 6 else 1024.0, i % 6 == 0) for i in range(400)]
    advice = listen(rows)["skips"]
    assert advice.evidence["rate"] == pytest.approx(1 / 6, abs=0.02)
    assert "17% of the last" in advice.text or "16% of the last" in advice.text
    high = [r | {"underflow": 0.0, "subnormal": 0.0, "headroom": 1.0, "slack": 12.0} for r in rows]
    assert "max_scale=2.0**2 " in listen(high)["high"].text


def test_skips_between_the_rows_are_counted_by_their_counter():
    rows = [row(skipped_steps=30 * i) for i in range(40)]
    monitor = jscale.Monitor(every=1)
    for i, metrics in enumerate(rows):
        monitor.update(100 * i, metrics | {"finite": i % 2 == 0, "grad_norm": 1.0})
    assert "1170 skipped" in monitor.report()
    rows = [row(overflow=i % 2 == 0, skipped_steps=30 * i) for i in range(40)]
    for i, metrics in enumerate(rows):
        monitor.update(10_000 + 100 * i, metrics)
    assert any(a.kind == "skips" and a.evidence["rate"] > 0.25 for a in monitor.advice)


def test_a_flat_scale_with_room_to_grow():
    advice = listen([row(1.0)] * 3100)["flat"]
    assert (advice.step, advice.severity) == (3001, "info")
    assert "growth_interval=" in advice.text
    assert listen([row(2.0**13)] * 3100) == {}
    # Where statistics say that nothing is lost, there is nothing to gain.
    healthy = {"underflow": 0.0, "subnormal": 0.001, "headroom": 9.0, "slack": 0.0}
    assert listen([row(1.0) | healthy] * 3100) == {}


def test_gradients_that_underflow():
    lost = {"underflow": 0.4, "subnormal": 0.2, "headroom": 9.0, "slack": -5.0}
    advice = listen([row() | lost] * 3)["underflow"]
    assert advice.step == 3
    assert "60% of the nonzero gradients are too small" in advice.text
    assert "room for 9 doublings" in advice.text
    assert "with region" in listen([row() | lost | {"headroom": 0.0}] * 3)["underflow"].text
    assert listen([row() | lost] * 2 + CLEAN) == {}
    assert listen([row() | {"grad_norm": 0.0}] * 20)["zero"].step == 20


def test_off_is_not_told_about_scales():
    off = jscale.metrics(jscale.with_loss_scale(optax.sgd(1.0), jscale.off()).init({}))
    lost = {"underflow": 0.9, "subnormal": 0.0, "headroom": 9.0, "slack": 0.0}
    assert listen([off | lost | {"loss": 1.0}] * 3100) == {}
    assert list(listen([off | {"loss": INF}])) == ["loss"]


def test_a_loss_that_rises_above_where_it_began():
    found = listen([row(loss=2.0)] * 30 + [row(loss=9.0)] * 20)
    assert list(found) == ["rising"]
    assert listen([row(loss=-2.0)] * 30 + [row(loss=9.0)] * 20) == {}
    assert listen([row(loss=2.0)] * 30 + [row(loss=0.1)] * 30 + [row(loss=0.9)] * 30) == {}


def groups(text=False, vision=False, scales=(8.0, 8.0)):
    norms = [INF if bad else 1.0 for bad in (text, vision)]
    return {
        "grad_scale/text": scales[0],
        "grad_scale/vision": scales[1],
        "grad_norm/text": norms[0],
        "grad_norm/vision": norms[1],
        "finite": not (text or vision),
    }


def test_the_group_that_most_overflows_begin_at_is_named():
    rows = [groups(vision=i % 9 == 0, scales=(8.0, 8.0 + i % 2)) for i in range(200)]
    assert "began at the scale of vision" in listen(rows)["group"].text
    # Both overflow: nothing says at which it began.
    both = [groups(i % 9 == 0, i % 9 == 0, scales=(8.0 + i % 2, 8.0)) for i in range(200)]
    assert "group" not in listen(both)


def test_in_a_stack_the_layer_that_comes_first_backwards_is_named():
    overflow = np.array([True, True, True, False])
    rows = [
        {
            "grad_scale/layers": jnp.full(4, 8.0 + i % 2),
            "grad_norm/layers": np.where(overflow & (i % 9 == 0), INF, 1),
            "finite": i % 9 != 0,
        }
        for i in range(200)
    ]
    assert "began at the scale of layers/2" in listen(rows)["group"].text


def test_a_scale_that_holds_because_another_one_falls_is_not_stuck():
    falling = [groups(True, True, (2.0**-i, 8.0)) for i in range(12)]
    assert listen(falling) == {}
    stuck = listen([groups(True, True)] * 5)["stuck"].text
    assert "the loss scale of text stayed at 8" in stuck and "goes for vision." in stuck


def test_metrics_of_groups_layers_and_statistics_are_understood(standard_promotion):
    rules = {"text": jscale.dynamic(8), "layers": jscale.stacked(jscale.dynamic(8), 3)}
    tx = jscale.with_loss_scale(optax.sgd(0.1), rules)
    params = {"text": jnp.ones(2), "layers": jnp.ones((3, 4))}
    grads = {"text": jnp.ones(2), "layers": jnp.ones((3, 4)).at[1].set(2.0**-30)}
    state, monitor = tx.init(params), jscale.Monitor(every=1)
    for step in range(3):
        scales = jscale.loss_scale(state)
        found = jscale.stats(grads, scales)
        _, state = tx.update(grads, state, params)
        metrics = jscale.metrics(state)
        for key, scale in scales.items():
            metrics |= found[key].metrics(scale, key)
        advice = monitor.update(step, metrics)
    [advice] = advice
    assert advice.kind == "underflow" and "the loss scale of layers/1, 2^3" in advice.text
    names = [line.split(" is ")[0] for line in monitor.report().splitlines()[1:5]]
    assert names == [
        f"the loss scale of {name}" for name in ("layers/0", "layers/1", "layers/2", "text")
    ]


def test_copies_under_vmap_are_judged_apart():
    rows = [
        {"grad_scale": np.array([8.0, 8.0]), "grad_norm": np.array([1.0, INF]), "loss": np.ones(2)}
    ] * 5
    assert "the loss scale of copy 1 stayed" in listen(rows)["stuck"].text


def test_the_same_is_said_again_only_after_a_while():
    monitor = jscale.Monitor(jscale.Thresholds(repeat=100))
    listen([row(8.0, True)] * 250, monitor=monitor)
    assert [a.step for a in monitor.advice if a.kind == "stuck"] == [5, 106, 207]


def test_steps_that_come_again_after_a_restart_are_forgotten():
    monitor = jscale.Monitor(every=1)
    listen(CLEAN + drops(4), monitor=monitor)
    again = listen(drops(4), first=31, monitor=monitor)
    assert again["falling"].evidence["from"] == 10
    assert [a.step for a in monitor.advice] == [34, 34]
    assert listen(CLEAN * 5, first=1, monitor=jscale.Monitor()) == {}


def test_numbers_of_any_kind_and_none_at_all():
    line = json.loads('{"grad_scale": 8, "grad_norm": null, "finite": false, "loss": "2.5"}')
    assert list(listen([line] * 5)) == ["stuck"]
    assert list(listen([{"loss": None}])) == ["loss"]
    odd = {"loss": "a word", "grad_scale": [], "note": object(), 7: 1, "grad_norm": np.ones(3)}
    assert listen([odd, {}, {"grad_scale": jnp.bfloat16(8)}, {"loss": np.ones(0)}]) == {}
    assert list(listen([{"grad_scale": 0.0}])) == ["invalid"]


def test_arrays_are_fetched_together_and_nothing_is_kept_that_is_not_read(monkeypatch):
    calls = []
    fetch = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: calls.append(x) or fetch(x))
    monitor = jscale.Monitor(every=10)
    for step in range(35):
        monitor.update(step, {"grad_scale": jnp.float32(8), "activations": jnp.ones(9)})
    assert len(calls) == 3
    assert all("activations" not in metrics for call in calls for _, metrics in call)
    assert "35 steps seen" in monitor.report()


def test_what_is_kept_is_bounded():
    monitor = jscale.Monitor(jscale.Thresholds(window=50, repeat=1), every=1)
    for step in range(1000):
        monitor.update(step, row(2.0 ** (step % 7), step % 3 == 0))
    [scale] = monitor._scales.values()
    assert len(scale.overflows) <= 50 and len(scale.moves) <= 256
    assert len(monitor.advice) <= 256 and len(monitor._losses) <= 256


def test_advice_is_logged_and_raises_where_asked(caplog):
    with caplog.at_level(logging.INFO, "jscale"):
        listen([row(8.0, True)] * 5)
    assert caplog.records[0].levelno == logging.ERROR
    assert caplog.records[0].getMessage().startswith("step 5: gradients overflowed 5 times")
    for raise_on in (["stuck"], ["error"]):
        monitor = jscale.Monitor(raise_on=raise_on)
        with pytest.raises(FloatingPointError, match="step 5: gradients overflowed"):
            listen([row(8.0, True)] * 5, monitor=monitor)
        assert "stuck" in monitor.report()
    listen([row(8.0, True)] * 5, raise_on=["loss"])


def test_the_report():
    monitor = jscale.Monitor()
    assert monitor.report() == "no metrics were seen"
    listen([row()] * 30 + drops(4), monitor=monitor)
    lines = monitor.report().splitlines()
    assert lines[:3] == [
        "34 steps seen, up to 34; 4 skipped",
        "the loss is 1",
        "the loss scale is 2^6; it was from 2^6 to 2^10",
    ]
    assert lines[3].startswith("warning, falling, step 34: the loss scale fell")


def test_bad_arguments_are_one_sentence():
    for make, words in [
        (lambda: jscale.Monitor(every=0), "every must be a whole number"),
        (lambda: jscale.Monitor(raise_on="error"), "raise_on must be a list"),
        (lambda: jscale.Monitor(raise_on=["eror"]), "got 'eror'"),
        (lambda: jscale.Monitor({}), "thresholds must be a Thresholds"),
        (lambda: jscale.Thresholds(fall=0), "fall must be positive"),
        (lambda: jscale.Thresholds(window=1.5), "window must be a whole number"),
        (lambda: jscale.Monitor().update(1, [1.0]), "metrics must be a dict"),
        (lambda: jax.jit(lambda x: jscale.Monitor().update(1, {"loss": x}))(1.0), "outside jit"),
    ]:
        with pytest.raises((TypeError, ValueError), match=words):
            make()


def test_published_lines_of_bloom_raise_the_alarm_while_they_go_on():
    published = json.loads((judged.RECORDED / "bloom.json").read_text())
    first = lambda name: judged.listen(
        judged.bloom(published[name]), published[name]["iteration"]
    ).advice[0]
    assert (first("104B").kind, first("104B").step) == ("burst", 17065)
    assert (first("13B").kind, first("13B").step) == ("falling", 29060)


@pytest.mark.parametrize("name", ["transformer", "convnet", "rnn"])
@pytest.mark.parametrize("rule", ["torch", "Megatron", "window 16", "log_normal"])
def test_healthy_recorded_runs_raise_no_alarm(name, rule):
    rules = judged.OTHERS | judged.OURS
    assert not judged.listen(judged.recorded(rules[rule], name)).advice


@pytest.mark.parametrize("rule, step", [("torch", 462), ("Megatron", 455), ("DeepSpeed", 463)])
def test_a_diverging_run_is_told_before_float16_fails(rule, step):
    """From step 474 on no scale fits."""
    found = {
        a.kind: a.step
        for a in judged.listen(judged.recorded(judged.OTHERS[rule], "diverging")).advice
    }
    assert found["falling"] <= step
    assert min(found.values()) < 474


def test_metrics_by_other_names_are_not_called_healthy():
    monitor = jscale.Monitor(every=1)
    monitor.update(0, {"train/loss": np.nan, "train/grad_scale": 1.0})
    assert "none of their metrics are known" in monitor.report()
    with pytest.raises(TypeError, match="step must be a whole number, got None"):
        monitor.update(None, {"loss": 1.0})
