"""Kills a training script in every way that a cluster knows, and compares the bits at the end.

    python experiments/faults.py             # 4 minutes on 2 cores
    python experiments/faults.py --short     # 45 seconds

`restartable.py` trains with jscale and Orbax. It is killed with SIGKILL at random moments, while it
starts, trains or saves; its newest checkpoint is cut short, or one bit of it is flipped; its disk
is full while it saves; it gets a SIGTERM; and one of two processes that train together dies. Each
time it is started again. In the end its parameters, optimizer state, loss scale, counters and
log must be, bit for bit, those of a run that nobody touched. Expected:

       1  SIGTERM to one of two processes
       4  SIGTERM, saved and ended
       3  checkpoint cut short
       2  checkpoint with a flipped bit, found
       3  checkpoint with a flipped bit, harmless
       3  disk full while it saved
      28  killed at another moment
      16  killed while it saved
       3  one of two processes killed
      63  faults injected, 63 survived
    one process: 301 steps, 40 of them skipped, scale 4096: bit for bit the run that nobody touched
    two processes: 35 steps, 5 of them skipped, scale 65536: bit for bit the run that nobody touched

How many steps there are, and which kill falls into a save, depends on the machine. Any difference,
or a process that does not end in a minute, is an error.
"""

import dataclasses
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro

SCRIPT = Path(__file__).with_name("restartable.py")
FOREVER = 10**6  # steps
PATIENCE = 60  # seconds that anything may take


@dataclasses.dataclass(frozen=True)
class Config:
    """Kill a training script in every way that a cluster knows."""

    kills: int = 44
    """How often it is killed with SIGKILL."""
    corruptions: int = 8
    """How often its newest checkpoint is damaged."""
    terms: int = 4
    """How often it gets a SIGTERM."""
    deaths: int = 3
    """How often one of two processes is killed."""
    seed: int = 0
    """Seed of the moments."""
    short: bool = False
    """5 kills, 2 damaged checkpoints, 1 SIGTERM and 1 death."""


class Run:
    """The script, running on a folder."""

    every: list["Run"] = []

    def __init__(self, folder, **options):
        self.folder, self.began = folder, time.monotonic()
        options = {"steps": FOREVER, "cache": folder.parent / "cache", "folder": folder} | options
        arguments = [text for k, v in options.items() for text in (f"--{k}", str(v))]
        folder.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.every.append(self)

    def ready(self):
        """The step that it goes on from."""
        for line in self.process.stdout:
            if line.startswith("at step "):
                return int(line.split()[-1])
        raise SystemExit(f"It did not start:\n{self.end()[1]}")

    def end(self, kill=None):
        """How it ended, and what it said."""
        if kill is not None:
            self.process.send_signal(kill)
        try:
            said = "".join(self.process.communicate(timeout=PATIENCE))
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise SystemExit(f"It did not end within {PATIENCE} seconds.") from None
        return self.process.returncode, said


def unfinished(folder):
    return {(p, p.stat().st_ino) for p in (folder / "checkpoints").glob("*tmp*")}


def is_saving(folder):
    return any((folder / "checkpoints").glob("*tmp*"))


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def checkpoints(folder):
    found = (folder / "checkpoints").iterdir()
    return sorted((p for p in found if p.name.isdigit()), key=lambda p: int(p.name))


def newest(folder):
    return int(checkpoints(folder)[-1].name)


def wait_for(condition):
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit, "it makes no checkpoint"
        time.sleep(0.0005)


def outcome(folder):
    return (folder / "result.json").read_text(), (folder / "log.jsonl").read_text()


# Each of these injects one fault, and says what kind of fault it turned out to be


def kill(folder, moments):
    """SIGKILL while it starts, trains or saves."""
    left = unfinished(folder)
    goal = newest(folder) + 5 * moments.randrange(4)
    run = Run(folder)
    when = moments.choice(["starts", "trains", "saves", "saves"])
    if when == "starts":
        time.sleep(moments.uniform(0, 1.5))
    else:
        run.ready()
        wait_for(lambda: newest(folder) >= goal)
        if when == "saves":
            wait_for(lambda: is_saving(folder))
        time.sleep(moments.uniform(0, 0.01))
    status, _ = run.end(signal.SIGKILL)
    assert status == -signal.SIGKILL, status
    return "killed while it saved" if unfinished(folder) - left else "killed at another moment"


def damage(folder, moments):
    """The newest checkpoint is cut short, or has one bit flipped."""
    *_, before, last = checkpoints(folder)
    files = sorted(p for p in last.rglob("*") if p.is_file() and p.stat().st_size)
    how = moments.choice(["cut", "bit", "bit"])
    if how == "cut":
        for file in files:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        file = moments.choice(files)
        data = bytearray(file.read_bytes())
        data[moments.randrange(len(data))] ^= 1 << moments.randrange(8)
        file.write_bytes(data)
    damaged, good = contents(last), contents(before)
    run = Run(folder)
    start = run.ready()
    _, said = run.end(signal.SIGKILL)
    if start == int(last.name) and how == "bit":
        # The bit is of no account: a time stamp, say. If it is of any, the comparison will tell.
        return "checkpoint with a flipped bit, harmless"
    assert start == int(before.name), said
    assert f"Checkpoint {last.name} cannot be read" in said, said
    [aside] = (folder / "unreadable").glob(f"{last.name}-{run.process.pid}")
    assert contents(aside) == damaged, "what could not be read was changed"
    assert not before.exists() or contents(before) == good, "the checkpoint before was changed"
    return "checkpoint cut short" if how == "cut" else "checkpoint with a flipped bit, found"


def full_disk(folder, moments):
    """No room for a checkpoint."""
    start = newest(folder)
    status, said = Run(folder, full_after=start + moments.randrange(1, 20)).end()
    message = said[said.rindex("Stopped: ") :]
    assert status == 1 and "checkpoint" in message and "File too large" in message, said
    run = Run(folder)
    assert run.ready() == newest(folder) >= start
    run.end(signal.SIGKILL)
    return "disk full while it saved"


def terminate(folder, moments):
    """SIGTERM: it saves and ends."""
    run = Run(folder)
    start = run.ready()
    time.sleep(moments.uniform(0, 0.3))
    status, said = run.end(signal.SIGTERM)
    [step] = [int(x.split()[-1]) for x in said.splitlines() if x.startswith("ended at step")]
    assert status == 0 and step == newest(folder) >= start, said
    return "SIGTERM, saved and ended"


def together(folder, **options):
    """Two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [Run(folder, processes=2, process=i, port=port, **options) for i in range(2)]


def one_dies(folder, moments):
    """One of two processes is killed: the other ends with an error, and soon."""
    runs = together(folder)
    for run in runs:
        run.ready()
    time.sleep(moments.uniform(0, 0.5))
    victim = moments.randrange(2)
    runs[victim].end(signal.SIGKILL)
    status, said = runs[1 - victim].end()
    assert status != 0, said
    return "one of two processes killed"


def one_is_terminated(folder, moments):
    """One of two processes gets a SIGTERM: both save the same step and end."""
    runs = together(folder)
    for run in runs:
        run.ready()
    time.sleep(moments.uniform(0, 0.3))
    runs[moments.randrange(2)].process.send_signal(signal.SIGTERM)
    ended = [run.end() for run in runs]
    last = [int(said.split("ended at step ")[1].split()[0]) for _, said in ended]
    assert [status for status, _ in ended] == [0, 0] and last[0] == last[1], ended
    assert newest(folder) == last[0]
    return "SIGTERM to one of two processes"


def finish(folder, start, moments):
    """The folder's run to its end, and a run that nobody touched: are they the same?"""
    steps = newest(folder) + moments.randrange(8, 40)
    untouched = folder.with_name(folder.name + "-untouched")
    for where, every in ((folder, 5), (untouched, 50)):
        runs = start(where, steps=steps, every=every)
        for status, said in [run.end() for run in runs]:
            assert status == 0, said
    got, want = outcome(folder), outcome(untouched)
    assert got == want, f"the runs differ: {got[0]} and {want[0]}"
    assert len(got[1].splitlines()) == steps
    return json.loads(got[0])


def main(config: Config):
    if config.short:
        config = dataclasses.replace(config, kills=5, corruptions=2, terms=1, deaths=1)
    moments, counts, began = random.Random(config.seed), {}, time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="faults-"))
    alone, pair = scratch / "alone", scratch / "pair"

    def inject(fault, folder):
        kind = fault(folder, moments)
        counts[kind] = counts.get(kind, 0) + 1

    first = Run(alone, steps=15)  # compiles, and makes checkpoints to damage
    first.end()
    faults = [kill] * config.kills + [damage] * config.corruptions
    faults += [full_disk] * (1 if config.short else 3) + [terminate] * config.terms
    moments.shuffle(faults)
    for fault in faults:
        if fault is damage and len(checkpoints(alone)) < 2:
            Run(alone, steps=newest(alone) + 10).end()
        inject(fault, alone)
    results = [finish(alone, lambda *a, **k: [Run(*a, **k)], moments)]

    for fault in [one_dies] * config.deaths + [one_is_terminated]:
        inject(fault, pair)
    results.append(finish(pair, together, moments))

    for kind in sorted(counts):
        print(f"{counts[kind]:4d}  {kind}")
    print(f"{sum(counts.values()):4d}  faults injected, {sum(counts.values())} survived")
    for name, result in zip(("one process", "two processes"), results, strict=True):
        print(
            f"{name}: {result['step']} steps, {result['skipped_steps']} of them skipped, scale "
            f"{result['grad_scale']:g}: bit for bit the run that nobody touched"
        )
    print(f"{time.monotonic() - began:.0f} seconds")
    shutil.rmtree(scratch)


if __name__ == "__main__":
    try:
        main(tyro.cli(Config))
    finally:
        for run in Run.every:
            run.process.kill()
