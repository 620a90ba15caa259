"""Processes that train together decide alike, and end together."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def run(*arguments, seconds=150):
    """What a script says, in an interpreter without the settings of these tests."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(EXPERIMENTS.parent)}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


@pytest.fixture(scope="module", autouse=True)
def loopback(tmp_path_factory):
    """Skips where processes cannot be joined: no gloo, or no loopback interface."""
    script = tmp_path_factory.mktemp("join") / "join.py"
    script.write_text(
        "import socket, jax\n"
        "with socket.socket() as s:\n"
        "    s.bind(('127.0.0.1', 0)); port = s.getsockname()[1]\n"
        "jax.config.update('jax_cpu_collectives_implementation', 'gloo')\n"
        "jax.distributed.initialize(f'127.0.0.1:{port}', 1, 0, initialization_timeout=20)\n"
        "assert jax.devices()\n"
    )
    try:
        found = run(script, seconds=60)
    except subprocess.TimeoutExpired:
        pytest.skip("a process cannot join itself by loopback within a minute")
    if found.returncode:
        pytest.skip(f"processes cannot be joined here: {found.stderr.strip().splitlines()[-1]}")


def test_processes_decide_as_one_device():
    # An overflow is in the batch of one of the processes. The script compares scales and counters
    # of every step with those of one device, and between the processes.
    found = run(
        *(EXPERIMENTS / "data_parallel.py", "--short"),
        *("--processes", 2, "--devices", 2),
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert "All devices decided alike, as one device does." in found.stdout
    rows = re.findall(r"^(FSDP|shard_map) +several +5 .* the same ", found.stdout, re.M)
    assert rows == ["FSDP", "shard_map"], found.stdout


def test_a_process_that_fails_takes_the_others_with_it(tmp_path):
    # The others wait for it in a collective, and it waits for them when it ends: not for ever.
    script = tmp_path / "fails.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(EXPERIMENTS)!r})\n"
        "import data_parallel, jax, tyro\n"
        "compare = data_parallel.compare\n"
        "def failing(config):\n"
        "    if config.process == 1:\n"
        "        raise OSError('no disk')\n"
        "    compare(config)\n"
        "data_parallel.compare = failing\n"
        "data_parallel.main(tyro.cli(data_parallel.Config))\n"
    )
    found = run(script, "--short", "--processes", 2, "--devices", 2)
    assert found.returncode != 0
    assert "no disk" in found.stderr and "One of the processes failed." in found.stderr
