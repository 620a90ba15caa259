"""The script for a GPU, rehearsed: it needs little, keeps its budget, and goes on after a fault."""

import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import on_gpu
import step_times

# A machine that has jax and optax, and perhaps Flax. None in their place makes an import fail.
MISSING = "tyro", "equinox", "orbax", "tqdm", "matplotlib", "sklearn", "tensorboardX", "jmp", "mpx"
START = """
import runpy, sys
sys.modules.update(dict.fromkeys({missing}))
sys.argv = [{script!r}, "--rehearse", {out!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


def results(folder):
    return json.loads((folder / "results.json").read_text())


def test_a_rehearsal_measures_every_part(tmp_path):
    code = START.format(missing=MISSING, script=on_gpu.__file__, out=str(tmp_path / "out"))
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    found = results(tmp_path / "out")
    assert found["rehearsal"]
    assert found["environment"]["jax"] == jax.__version__
    assert not {"jmp", "mpx"} & {*found["environment"]["libraries"]}
    assert [*found["parts"]] == [*on_gpu.parts(rehearse=True)]
    for name, part in found["parts"].items():
        assert part["status"] == "done", part
        assert f"\n{name}\n" in done.stdout
        check = check_training if name == "training on text" else check_times
        check(part["rows"])
    assert [*found["parts"]["12 small leaves, clip"]["rows"]] == found["environment"]["libraries"]


def check_times(rows):
    for row in rows.values():
        assert "ms" in row and "kernels" in row, row
        assert row["ms"] > 0 and row["turns"] == 3
        assert row["bytes_in_all"] > row["temp_bytes"] > 0
        assert row["ratio_quartiles"] == sorted(row["ratio_quartiles"])
    assert next(iter(rows.values()))["ratio_quartiles"] == [1, 1, 1]


def check_training(rows):
    exact, followed = (np.array(rows[k]["bits_per_byte"]) for k in ("float32", "float16, dynamic"))
    assert exact.shape == followed.shape == (30,)
    assert exact[-1] < exact[0] - 0.5
    # A skipped step would be one that is behind; of roundings, 2^-11 of 8 bits is 0.004.
    assert rows["float16, dynamic"]["skipped_steps"] == 0
    np.testing.assert_allclose(followed, exact, atol=0.004)
    assert rows["float16, dynamic"]["greatest_difference"] == abs(followed - exact).max()


def test_without_time_everything_is_skipped_with_a_word(tmp_path, capsys):
    on_gpu.main([str(tmp_path), "--rehearse", "--budget", "0"])
    printed = capsys.readouterr().out
    for name, part in results(tmp_path)["parts"].items():
        assert part["status"] == "skipped" and "s left, needs 30" in part["why"]
        assert f"{name}\n  skipped: {part['why']}\n" in printed


def program(name):
    if name == "faulty":
        raise MemoryError("not enough of it")
    f32 = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    step = lambda params, state, x: (params + x, state, x.sum())
    return step_times.Program(step, lambda params: params * 2, f32, (f32,))


def test_a_fault_is_recorded_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    def fails(left):
        raise RuntimeError("no such kernel")

    times = lambda left: step_times.step_times(["faulty", "sound"], program, left, 3, 0.0)
    parts = {"first": on_gpu.Part(0, fails), "second": on_gpu.Part(0, times)}
    monkeypatch.setattr(on_gpu, "parts", lambda rehearse: parts)
    on_gpu.main([str(tmp_path), "--rehearse"])
    found = results(tmp_path)["parts"]
    assert found["first"]["status"] == "failed"
    assert "RuntimeError: no such kernel" in found["first"]["why"]
    assert "MemoryError: not enough of it" in found["second"]["rows"]["faulty"]["error"]
    assert found["second"]["rows"]["sound"]["ms"] > 0
    assert "ratio_quartiles" not in found["second"]["rows"]["sound"]
    assert "not enough of it" in capsys.readouterr().out


def test_what_there_is_no_time_to_compile_is_left_out():
    left = iter([math.inf, *[0.0] * 9])
    rows = step_times.step_times(["one", "two"], program, lambda: next(left), 3, 0.0)["rows"]
    assert rows["one"]["ms"] > 0
    assert rows["two"] == {"skipped": "0 s left"}
