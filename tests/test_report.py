import base64
import json
import os
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tensorboardX import SummaryWriter
from tensorboardX.event_file_writer import EventFileWriter
from tensorboardX.proto.event_pb2 import Event

from jscale import _digest, _report
from jscale._log_files import Broken, number, open_log, rows
from jscale._report import main

EVIL = '<script>alert(1)</script>"&amp;<img src=x onerror=alert(2)>'


def row(step, scale=1024.0, overflow=False, **more):
    return {
        "step": step,
        "loss": 3.0 - step / 1000,
        "grad_scale": scale,
        "grad_norm": None if overflow else 1.0,
        "finite": not overflow,
    } | more


CLEAN = [row(i) for i in range(40)]
FALL = [row(40 + i, 2.0 ** (9 - i), True) for i in range(5)]


class Page(HTMLParser):
    """The text of a page by kind of element, and proof that elements nest."""

    VOID = {"meta", "img", "br"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.cells, self.images, self.text = [], set(), [[]], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        assert not [name for name, _ in attributes if name.startswith("on")]
        if tag == "img":
            self.images.append(dict(attributes))
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1][-1] += data
        if "style" not in self.open:
            self.text += data


def write(path, lines):
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{line}\n" for line in text))
    return path


@pytest.fixture
def report(tmp_path, capsys):
    def run(log, *options, code=0):
        out = tmp_path / "page.html"
        assert main(["report", str(log), "--out", str(out), *options]) == code
        printed = capsys.readouterr()
        if code:
            return printed.err
        text = out.read_text()
        assert text.startswith("<!DOCTYPE html>")
        return Page(text), printed.out

    return run


def test_the_page_has_pictures_skips_and_advice(tmp_path, report):
    page, printed = report(write(tmp_path / "run.jsonl", CLEAN + FALL))
    assert ["steps", "45, from 0 to 44"] in page.cells
    assert ["skipped", "5 (11.11%)"] in page.cells
    assert ["40 to 44", "5", "2^10 to 2^5", "2.96"] in page.cells
    assert "warning, falling, step 43: the loss scale fell from 2^10 to 2^6" in page.text
    for text in ("45, from 0 to 44", "5 (11.11%)", "warning, falling, step 43"):
        assert text in printed
    assert "\x1b" not in printed
    [image] = page.images
    assert image["alt"] == "Loss and loss scale"
    kind, code = image["src"].split(",")
    assert kind == "data:image/svg+xml;base64"
    assert b"<svg" in base64.b64decode(code)


def test_the_page_needs_nothing_from_elsewhere(tmp_path, report):
    page, _ = report(write(tmp_path / "run.jsonl", CLEAN))
    assert not page.tags & {"script", "link", "iframe", "object", "svg"}
    text = (tmp_path / "page.html").read_text()
    assert "default-src 'none'" in text
    assert "http" not in text.replace("http-equiv", "")


@pytest.mark.parametrize("loss", ["loss", EVIL])
def test_text_of_a_log_is_data(tmp_path, report, loss):
    more = {f"grad_scale/{EVIL}": 4.0, f"grad_norm/{EVIL}": EVIL, loss: EVIL, EVIL: EVIL}
    lines = [row(i) | {f"grad_scale/{EVIL}": 2.0**i, loss: 1.0, EVIL: 1} for i in range(9)]
    lines += [row(9, overflow=True) | more, EVIL, '"' + EVIL]
    folder = tmp_path / "<b>run & 'log'"
    folder.mkdir()
    path = write(folder / "<i>$x.jsonl", lines)
    page, printed = report(path, "--loss", loss)
    assert not page.tags & {"script", "b", "i"}
    assert len(page.images) == 1
    assert EVIL in page.text
    assert "<i>$x.jsonl" in page.text
    assert page.tags <= set(
        "html head meta title style body h1 h2 table tr th td p ul li span img".split()
    )


def test_control_characters_do_nothing_on_a_terminal(tmp_path, report):
    lines = [row(i) | {"grad_scale/\x1b[31m\x07": 2.0**i} for i in range(9)]
    page, printed = report(write(tmp_path / "a\x1b]0;x.jsonl", lines))
    assert "\x1b" not in printed and "\x07" not in printed
    assert len(page.images) == 1


def test_an_empty_log_has_a_page(tmp_path, report):
    page, printed = report(write(tmp_path / "run.jsonl", []))
    assert ["steps", "none"] in page.cells
    assert not page.images
    assert "no advice" in printed


BROKEN = ["{", "", "[1, 2]", "null", "[" * 50_000, '{"step": 1e999, "loss": 2', "\x00\x01"]


def test_broken_lines_are_left_out_and_told(tmp_path, report):
    lines = CLEAN[:20] + BROKEN + CLEAN[20:]
    page, printed = report(write(tmp_path / "run.jsonl", lines))
    told = "Not readable: line 21, line 23, line 24, line 25, line 26… (6 in all)."
    assert told in page.text and told in printed
    assert ["steps", "40, from 0 to 39"] in page.cells


def test_bytes_of_any_kind_are_no_log(tmp_path, report):
    path = tmp_path / "run.jsonl"
    path.write_bytes(bytes(range(256)) * 99)
    assert "is not JSON lines" in report(path, code=2)


def test_numbers_that_json_does_not_have(tmp_path, report):
    lines = [*CLEAN, '{"step": 40, "loss": NaN, "grad_scale": 8, "grad_norm": Infinity}']
    lines += ['{"step": 41, "loss": "inf", "grad_scale": "nan"}', {"step": 42, "loss": 10**400}]
    page, _ = report(write(tmp_path / "run.jsonl", lines))
    assert ["loss", "from 3 to 2.961; 3 not finite"] in page.cells
    assert "error, loss, step 40: the loss is not finite" in page.text
    assert "error, invalid, step 41" in page.text


def test_gaps_restarts_and_rows_without_a_step_are_told(tmp_path, report):
    lines = CLEAN[:30] + CLEAN[20:25] + [row(i) for i in range(50, 60)]
    lines += [{k: x for k, x in row(60).items() if k != "step"}]
    lines += [row(0) | {"step": None}, row(0) | {"step": "x"}]
    page, _ = report(write(tmp_path / "run.jsonl", lines))
    facts = {line[0]: line[1] for line in page.cells if len(line) == 2}
    assert facts["steps"] == "43, from 0 to 62"
    assert facts["went back"] == "from 29 to 20; what came last counts"
    assert facts["gaps"] == "29 to 50"
    assert facts["no step"] == "3 rows, numbered after those before"


def test_other_names_are_found_by_options(tmp_path, report):
    lines = [{f"train/{k}": x for k, x in line.items()} for line in CLEAN]
    path = write(tmp_path / "run.jsonl", lines)
    page, _ = report(path)
    assert "No grad_scale is logged; other keys are train/step, train/loss" in page.text
    page, printed = report(path, "--prefix", "train/", "--loss", "grad_norm")
    assert ["loss scale", "2^10; it was from 2^10 to 2^10"] in page.cells
    assert ["grad_norm", "from 1 to 1"] in page.cells


def test_rows_with_few_or_many_keys_lose_nothing(tmp_path, report):
    lines = []
    for i in range(40):
        lines += [{f"norm/{j}": 1.0 for j in range(300)} | row(i), {"step": i + 0.5, "loss": 2.0}]
    lines = [x | {"step": i} for i, x in enumerate(lines)]
    page, _ = report(write(tmp_path / "run.jsonl", lines))
    assert ["loss scale", "2^10; it was from 2^10 to 2^10"] in page.cells
    assert ["loss", "from 3 to 2"] in page.cells
    assert ["skipped", "0 (0.00%)"] in page.cells


def test_layers_and_groups_are_told_apart(tmp_path, report):
    groups = {"grad_scale/text": 4.0, "grad_scale/layers": [1.0, 8.0, 2.0, 4.0, 4.0, 4.0]}
    lines = [
        {"step": i, "finite": i != 5, "grad_norm/text": None if i == 5 else 1} for i in range(9)
    ]
    lines = [line | groups | {"grad_norm/layers": [1.0] * 6} for line in lines]
    page, _ = report(write(tmp_path / "run.jsonl", lines))
    assert ["loss scale text", "2^2; it was from 2^2 to 2^2"] in page.cells
    assert ["loss scale layers", "2^2; it was from 2^0 to 2^3"] in page.cells
    assert ["5", "1", "text: 2^2 to 2^2", ""] in page.cells
    assert page.images[0]["alt"] == "Loss scale"


def write_events(folder, lines):
    with SummaryWriter(str(folder)) as events:
        for line in lines:
            for key, x in line.items():
                if key != "step" and x is not None:
                    events.add_scalar(key, x, line["step"])


def test_event_files_give_the_same_page_as_json_lines(tmp_path, report):
    lines = [line | {"finite": int(line["finite"])} for line in CLEAN + FALL]
    write_events(tmp_path / "run", lines)
    got, _ = report(tmp_path / "run")
    want, _ = report(write(tmp_path / "run.jsonl", lines))
    assert got.cells == want.cells
    assert got.text.replace("run", "") == want.text.replace("run.jsonl", "")
    file = next((tmp_path / "run").iterdir())
    assert report(file)[0].cells == got.cells


def test_event_files_of_a_resumed_run_are_read_in_order(tmp_path, report):
    write_events(tmp_path, CLEAN[:30])
    first = next(tmp_path.glob("*.tfevents.*"))
    first.rename(tmp_path / "events.out.tfevents.1000000000.host")
    write_events(tmp_path, CLEAN[20:])
    page, _ = report(tmp_path)
    assert ["steps", "40, from 0 to 39"] in page.cells
    assert ["went back", "from 29 to 20; what came last counts"] in page.cells


def test_an_event_file_that_ends_too_soon_is_read_up_to_there(tmp_path, report):
    write_events(tmp_path, CLEAN)
    path = next(tmp_path.glob("*.tfevents.*"))
    path.write_bytes(path.read_bytes()[:-5])
    page, _ = report(tmp_path)
    assert ["steps", "40, from 0 to 39"] in page.cells
    assert "Not readable: the end of events.out" in page.text
    path.write_bytes(b"\xff" * 300)
    assert "is not an event file" in report(path, code=2)


def test_scalars_that_tensorflow_writes_as_tensors(tmp_path):
    writer = EventFileWriter(str(tmp_path))
    event = Event(step=7)
    for tag, dtype, content in (("loss", 1, b"\0\0\x80?"), ("grad_scale", 9, bytes([2] + [0] * 7))):
        value = event.summary.value.add(tag=tag)
        value.tensor.dtype, value.tensor.tensor_content = dtype, content
    value = event.summary.value.add(tag="grad_norm")
    value.tensor.dtype = 2
    value.tensor.double_val.append(0.5)
    event.summary.value.add(tag="note").tensor.dtype = 7
    writer.add_event(event)
    writer.close()
    found = list(rows(*open_log(tmp_path), lambda size: None))
    assert found == [{"step": 7, "loss": 1.0, "grad_scale": 2.0, "grad_norm": 0.5}]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda folder: folder / "nothing", "there is no file or folder"),
        (lambda folder: folder, "holds no event files and no single .jsonl file"),
        (lambda folder: write(folder / "a.jsonl", ["x"]), "is not JSON lines: one object"),
    ],
)
def test_what_cannot_be_read_is_one_sentence_and_exit_code_2(tmp_path, report, make, message):
    assert message in report(make(tmp_path), code=2)
    assert not (tmp_path / "page.html").exists()


def test_a_folder_of_runs_names_them(tmp_path, report):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "metrics.jsonl", CLEAN)
    assert "such as one, two" in report(tmp_path, code=2)
    assert report(tmp_path / "one")[0].images


def test_a_log_is_never_overwritten(tmp_path):
    path = write(tmp_path / "run.jsonl", CLEAN)
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(path), "--out", str(path)])
    assert stopped.value.code == 2
    assert len(path.read_text().splitlines()) == 40


def test_without_matplotlib_the_page_says_so(tmp_path, report, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    page, _ = report(write(tmp_path / "run.jsonl", CLEAN + FALL))
    assert "No pictures: pictures need matplotlib" in page.text
    assert "warning, falling" in page.text


def test_a_long_log_takes_seconds_and_its_end_is_not_missed(tmp_path, report):
    """A tenth of a million lines here; ten times as many take some ten times as long."""
    n = 100_000
    path = tmp_path / "run.jsonl"
    with path.open("w") as file:
        for i in range(n):
            overflow = i > n - 30 or i % 2000 == 1999
            file.write(json.dumps(row(i, 2.0 ** min(20, n - 10 - i), overflow)) + "\n")
    began = time.process_time()
    page, _ = report(path)
    assert time.process_time() - began < 30  # some 4 here
    assert ["steps", "100,000, from 0 to 99,999"] in page.cells
    assert "warning, falling, step 99974" in page.text
    assert (tmp_path / "page.html").stat().st_size < 500_000
    assert len([x for x in page.cells if len(x) == 4]) < 210


def test_many_skips_are_not_taken_for_a_burst(tmp_path, report, monkeypatch):
    monkeypatch.setattr(_digest, "_LOUD", 100)
    monkeypatch.setattr(_digest, "_QUIET", 10)
    lines = [row(i, 2.0, i % 30 == 29) | {"skipped_steps": (i + 1) // 30} for i in range(9000)]
    page, _ = report(write(tmp_path / "run.jsonl", lines))
    assert "burst" not in page.text
    assert "None." in page.text
    facts = {line[0]: line[1] for line in page.cells if len(line) == 2}
    assert facts["skipped"] == "300 (3.33%)"
    assert "where something happens" in facts["advice"]


def test_numbers_are_floats_or_lists_of_them():
    assert number([1, None, True])[::2] == [1.0, 1.0]
    assert (
        number("x") is None and number({}) is None and number([[]]) is None and number([]) is None
    )
    assert number(-(10**400)) == number("-inf") or number(10**400) == float("inf")
    assert number(1e39) == float("inf") and number(-3e38) == -3e38
    assert Broken("line 3") == "line 3"


def start(*args, **kind):
    env = {k: x for k, x in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-m", "jscale", *map(str, args)]
    root = Path(__file__).parent.parent
    return subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, **kind)


def test_as_a_command(tmp_path):
    path, out = write(tmp_path / "run.jsonl", CLEAN + FALL), tmp_path / "page.html"
    done = start("report", path, "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == f"The page is {out}."
    assert Page(out.read_text()).images
    helped = start("report", "--help")
    assert helped.returncode == 0
    for text in ("RUN", "--out PAGE.html", "--loss KEY", "--prefix TEXT", "Exit codes"):
        assert text in helped.stdout
    assert start("report").returncode == 2


def test_colours_and_progress_are_for_terminals_alone(tmp_path, report, monkeypatch, capsys):
    path = write(tmp_path / "run.jsonl", CLEAN + FALL)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b[33mwarning, falling\x1b[0m, step 43" in report(path)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in report(path)[1]

    def read(size=2**23):
        progress = _report._Progress(size)
        progress(size // 2)
        progress.close()
        return capsys.readouterr().err

    assert read() == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert "reading, 50%" in read() and read().endswith("\x1b[K")
    assert read(1000) == ""  # done before it could be read
