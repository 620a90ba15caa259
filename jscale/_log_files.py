"""Reading logs of runs row by row: JSON lines, and TensorBoard's event files."""

import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STEP_KEYS = ("step", "_step", "global_step", "iteration")
_FORMATS = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}  # TensorFlow's numbers of dtypes
_SANE = 2**26  # bytes of a record


class Unreadable(Exception):
    """Says in one sentence what is wrong with a log, and what would do."""


class Broken(str):
    """In the place of a row: what could not be read, and where."""


def open_log(path: Path) -> tuple[str, list[Path]]:
    """What kind of log is at `path`, and its files in order."""
    if path.is_file():
        return ("events" if ".tfevents." in path.name else "lines"), [path]
    if not path.is_dir():
        raise Unreadable(f"there is no file or folder {path}.")
    # Their names begin with the time.
    events = sorted(x for x in path.iterdir() if ".tfevents." in x.name and x.is_file())
    if events:
        return "events", events
    lines = sorted(path.glob("*.jsonl"))
    if len(lines) == 1:
        return "lines", lines
    below = sorted({x.parent.name for x in path.glob("*/*") if _is_log(x)})[:5]
    hint = f": name one of its folders, such as {', '.join(below)}" if below else ""
    if lines:
        hint = f": name one of its files, such as {', '.join(x.name for x in lines[:5])}"
    raise Unreadable(f"{path} holds no event files and no single .jsonl file{hint}.")


def rows(kind: str, files: list[Path], progress: Callable[[int], None]) -> Iterator[Any]:
    """A dict for each line or step, or a `Broken`. `progress` is told the bytes of each."""
    for file in files:
        yield from (_events if kind == "events" else _lines)(file, progress)


def _is_log(path: Path) -> bool:
    return path.suffix == ".jsonl" or ".tfevents." in path.name


def _lines(path: Path, progress: Callable[[int], None]) -> Iterator[Any]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            progress(len(line))
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            yield row if isinstance(row, dict) else Broken(f"line {number}")


def _events(path: Path, progress: Callable[[int], None]) -> Iterator[Any]:
    """The scalars that were written for one step in a row become one dict."""
    try:
        from tensorboardX.proto.event_pb2 import Event
    except ImportError as error:
        raise Unreadable(f"{path.name} needs a reader: pip install tensorboardX.") from error
    row: dict[str, Any] = {}
    with path.open("rb") as file:
        while head := file.read(12):
            # Length, its checksum, the event, its checksum.
            size = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else _SANE + 1
            body = file.read(size + 4) if size <= _SANE else b""
            progress(len(head) + len(body))
            try:
                if len(body) != size + 4:
                    raise ValueError
                event = Event.FromString(body[:-4])
            except Exception:
                yield from [row] if row else []
                yield Broken(f"the end of {path.name}, from byte {file.tell() - len(body)}")
                return
            for value in event.summary.value:
                number = _scalar(value)
                if number is None:
                    continue
                if row and (row["step"] != event.step or value.tag in row):
                    yield row
                    row = {}
                row |= {"step": event.step, value.tag: number}
    yield from [row] if row else []


def _scalar(value: Any) -> float | None:
    if value.HasField("simple_value"):
        return value.simple_value
    tensor, form = value.tensor, _FORMATS.get(value.tensor.dtype)
    if not value.HasField("tensor") or form is None:
        return None
    if len(tensor.tensor_content) == struct.calcsize(form):
        return float(struct.unpack(form, tensor.tensor_content)[0])
    values = [*tensor.float_val, *tensor.double_val, *tensor.int_val, *tensor.int64_val]
    return float(values[0]) if len(values) == 1 else None


def number(x: Any) -> Any:
    """A float, or a list of them; None if it is neither.

    JSON's null is what is not finite; what float32 cannot hold is infinite.
    """
    if isinstance(x, list):
        several = [number(y) for y in x]
        return several if several and all(isinstance(y, float) for y in several) else None
    try:
        found = math.nan if x is None else float(x)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None
    return math.copysign(math.inf, found) if abs(found) >= 2.0**128 else found
