"""The claims of experiments/scaler_shootout.py that do not depend on the machine."""

import json

import numpy as np
import pytest
import scaler_shootout as shootout

import jscale


@pytest.fixture(scope="module")
def cells():
    """log_normal on every stream: skipped %, unused bits."""
    seen, decides = shootout.streams(shootout.Config())
    return shootout.measure(jscale.log_normal(), seen, decides)


def test_log_normal_skips_few_steps_and_wastes_few_bits(cells):
    skips, bits = cells["0.5"]
    assert skips <= 0.005 and bits <= 2.3


@pytest.mark.parametrize(
    "stream, skips, bits",
    [
        ("0.25", 0.005, 1.5),
        ("1.0", 0.02, 4.2),
        ("1.5", 0.02, 6),
        ("wanders", 0.01, 2.3),
        ("spikes", 0.12, 2.4),  # of which there are 0.1 %
        ("falls", 0.02, 2.4),
        ("rises", 0.01, 2.5),
        ("jumps", 0.03, 2.5),
        ("surges", 0.02, 2.6),
        ("hidden", 0.12, 3.2),
    ],
)
def test_log_normal_does_not_collapse(cells, stream, skips, bits):
    assert cells[stream][0] <= skips
    assert cells[stream][1] <= bits


def test_the_alarm_comes_before_the_loss_has_doubled():
    _, _, states, data = shootout.replay(shootout.OURS["anticipate(log_normal)"], "diverging")
    alarm = int(np.argmax(states.alarm >= 1))
    assert 0 < alarm < 430
    assert data["loss"][alarm - 10 : alarm].mean() < 2 * data["loss"][200:300].mean()


@pytest.mark.parametrize("run", ["transformer", "convnet", "rnn"])
def test_recorded_runs_cost_few_steps_and_few_bits_and_raise_no_alarm(run):
    skips, bits, states, _ = shootout.replay(shootout.OURS["anticipate(log_normal)"], run)
    assert skips <= 2 and bits <= 3.1
    assert states.alarm.max() < 1


def test_megatrons_rule_has_the_scales_that_were_published():
    bloom = json.loads((shootout.RECORDED / "bloom.json").read_text())["104B"]
    assert shootout.bloom_scales(bloom) == bloom["after"]


def test_a_point_is_beaten_by_a_setting_or_by_a_mixture():
    front = [(1.0, 1.0), (0.0, 3.0)]
    beaten = lambda point: not shootout.not_beaten(point, front, trials=10**9)
    assert beaten((1.1, 1.2)) and beaten((0.6, 2.0)) and beaten((0.0, 4.0))
    assert not beaten((0.3, 2.0)) and not beaten((5.0, 0.5))
