"""The main job in a short form, as a user starts it."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

SCRIPT = Path(__file__).parent.parent / "experiments" / "quickstart.py"
RUNS = ("float32", "bfloat16", "float16", "float16-static", "float16-dynamic")
# A scale at the edge of overflow: steps are skipped before and after the interruption.
RULE = ("--init-scale", 2.0**27, "--growth-interval", 2)


def start(*args):
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}  # one device, as a user has
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


def run(*args):
    with start(*args) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def saved_steps(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def saved(folder):
    """Parameters, optimizer and loss scale of the last checkpoint."""
    path = folder / "checkpoints" / str(saved_steps(folder)[-1]) / "default"
    with ocp.StandardCheckpointer() as checkpointer:
        return jax.tree.map(np.asarray, checkpointer.restore(path.absolute()))


def test_interrupted_resumed_and_whole(tmp_path):
    """One test, since its runs are expensive: Ctrl-C, resume, the same in one go, five times."""
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    args = ("--precision", "float16-dynamic", "--out", parts, *RULE)
    with start(*args, "--steps", 1000, "--checkpoint-every", 7) as process:
        seen = []
        for line in process.stderr:
            seen.append(line)
            if "bits=" in line:  # the first look at the device
                break
        process.send_signal(signal.SIGINT)
        stopped, err = process.communicate()
    assert process.returncode == 130, "".join(seen) + err
    assert "--resume" in stopped

    # As if it had been killed a little later: logged on, with half a line at the end.
    log = parts / "float16-dynamic" / "metrics.jsonl"
    log.write_text(log.read_text() + '{"step": 100000}\n{"ste')
    steps = saved_steps(parts / "float16-dynamic")[-1] + 8
    run(*args, "--steps", steps, "--checkpoint-every", 7, "--resume")
    assert len(saved_steps(parts / "float16-dynamic")) <= 3

    printed = run("--out", whole, "--steps", steps, *RULE)
    check_table_and_files(whole, steps, printed)
    check_bitwise_equal(parts / "float16-dynamic", whole / "float16-dynamic")
    check_scaling_brings_gradients_back(whole)


def check_table_and_files(folder, steps, printed):
    names = [line.split()[0] for line in printed.splitlines()]
    assert names[:6] == ["run", *RUNS]
    for name in ("quickstart", "loss_curves", "loss_scale", "gradient_histogram"):
        assert (folder / f"{name}.png").stat().st_size > 10_000
    for name in RUNS:
        assert [row["step"] for row in rows(folder / name)] == list(range(1, steps + 1))
        assert saved_steps(folder / name) == [steps]
        assert list((folder / name).glob("events.out.tfevents.*"))


def check_bitwise_equal(parts, whole):
    assert (parts / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    resumed, uninterrupted = saved(parts), saved(whole)
    assert jax.tree.structure(resumed) == jax.tree.structure(uninterrupted)
    assert len(jax.tree.leaves(resumed)) > 3 * 28  # parameters, two moments, and the loss scale
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(uninterrupted), strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    finite = [row["finite"] for row in rows(parts)]
    assert not all(finite[:-8])
    assert not all(finite[-8:])


def check_scaling_brings_gradients_back(folder):
    zeros = {name: np.mean([row["zero_share"] for row in rows(folder / name)]) for name in RUNS}
    assert zeros["float16"] > 10 * zeros["float16-dynamic"]
    assert zeros["float16"] > 10 * zeros["float16-static"]


@pytest.fixture(scope="module")
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "args, message",
    [
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--checkpoint-every -1", "--checkpoint-every must be at least 1"),
        ("--loss-divisor 0", "--loss-divisor must be positive"),
        ("--growth-interval 0", "growth_interval must be a whole number"),
        ("--init-scale nan", "init_scale must be positive"),
        ("--resume", "nothing to resume"),
    ],
)
def test_bad_options_are_one_sentence(quickstart, monkeypatch, tmp_path, args, message):
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--out", str(tmp_path), *args.split()])
    with pytest.raises(SystemExit, match=message):
        quickstart.main()
    assert not list(tmp_path.iterdir())


def test_results_are_never_overwritten(quickstart, tmp_path):
    config = quickstart.Config(out=tmp_path / "demo")
    folders = [quickstart.claim_folder(config, {"seed": 0}).name for _ in range(3)]
    assert folders == ["demo", "demo-2", "demo-3"]
    again = quickstart.Config(out=tmp_path / "demo", resume=True)
    assert quickstart.claim_folder(again, {"seed": 0}) == again.out
    with pytest.raises(SystemExit, match="was started with seed 0, not 1"):
        quickstart.claim_folder(again, {"seed": 1})
