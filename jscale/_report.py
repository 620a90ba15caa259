"""One HTML page, and a short text, from the log of a run: `python -m jscale report`."""

import argparse
import base64
import html
import io
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from ._digest import Digest, bursts, facts, problems
from ._log_files import Unreadable, open_log, rows
from ._plot_run import Run, read

_COLORS = {"info": "36", "warning": "33", "error": "31"}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111; background: #fff;
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1, p, li, td, .facts th { overflow-wrap: anywhere }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
img { width: 100%; height: auto }
table { border-collapse: collapse } th, td { padding: .15rem 1rem .15rem 0; text-align: left;
  vertical-align: top; border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums }
th { font-weight: 600 } li { margin: .5rem 0 }
.error, .warning { font-weight: 600 } .error { color: #a00 } .warning { color: #850 }
"""


def pictures(digest: Digest, run: Run) -> list[tuple[str, str]]:
    """Each with its title, as SVG in a data URI, where no text of a log can become markup."""
    from . import plot

    log, figures = digest.table(), {}
    with plot.style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name in letters that the font lacks
        if run.scales and len(run.loss):
            figures["Loss and loss scale"] = plot.loss_and_scale(log, loss=digest.loss)
        elif run.scales:
            figures["Loss scale"] = plot.scale(log)
        elif len(run.loss):
            figures["Loss"] = plot.loss(log, loss=digest.loss)
        found = []
        for title, figure in figures.items():
            out = io.BytesIO()
            figure.savefig(out, format="svg", metadata={"Date": None})
            code = base64.b64encode(out.getvalue()).decode()
            found.append((title, f"data:image/svg+xml;base64,{code}"))
    return found


def page(name: str, digest: Digest, run: Run, images: list[tuple[str, str]], note: str) -> str:
    e = html.escape

    def table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), of: str = "") -> str:
        first = "".join(f"<th>{e(x)}</th>" for x in head)
        lines = [f"<tr>{first}</tr>"] if head else []
        for row in rows:
            cells = "".join(f"<td>{e(x)}</td>" for x in row[1:])
            tag = "td" if head else "th"
            lines.append(f"<tr><{tag}>{e(row[0])}</{tag}>{cells}</tr>")
        return f'<table class="{of}">\n' + "\n".join(lines) + "\n</table>"

    advice = "".join(
        f'<li><span class="{a.severity}">{a.severity}, {a.kind}</span>, {e(str(a))}</li>\n'
        for a in digest.monitor.advice
    )
    lines = [f"<p>{e(text)}</p>" for text in problems(digest, run)]
    skips = bursts(run)
    head = ("steps", "skipped", "loss scale", digest.loss)
    parts = [
        f"<h1>{e(name)}</h1>",
        *lines,
        table(facts(digest, run), of="facts"),
        "<h2>Advice</h2>",
        f"<ul>\n{advice}</ul>" if advice else "<p>None.</p>",
        *(f'<h2>{e(t)}</h2>\n<p><img alt="{e(t)}" src="{uri}"></p>' for t, uri in images),
        f"<p>{e(note)}</p>" if note else "",
        "<h2>Skipped steps</h2>",
        table(skips, head) if skips else "<p>None.</p>",
    ]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{e(name)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def summary(name: str, digest: Digest, run: Run, colored: bool) -> str:
    """The short form, for a terminal: control characters of a log do nothing there."""
    lines = [name, *problems(digest, run)]
    lines += [f"{title:12} {value}" for title, value in facts(digest, run)]
    clean = lambda x: "".join(c if c.isprintable() else "?" for c in x)
    lines = [clean(line) for line in lines]
    for a in digest.monitor.advice:
        label = f"{a.severity}, {a.kind}"
        label = f"\x1b[{_COLORS[a.severity]}m{label}\x1b[0m" if colored else label
        lines.append(f"{label}, {clean(str(a))}")
    return "\n".join(lines if digest.monitor.advice else [*lines, "no advice"])


class _Progress:
    """A line on a terminal, and nothing elsewhere."""

    def __init__(self, total: int):
        self.total, self.done, self.shown = total, 0, 0
        self.on = sys.stderr.isatty() and total > 2**22

    def __call__(self, size: int) -> None:
        self.done += size
        if self.on and self.done - self.shown > self.total // 100:
            self.shown = self.done
            print(f"\rreading, {self.done / self.total:.0%}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.on:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def report(path: Path, out: Path, loss: str = "loss", prefix: str = "") -> str:
    """Writes the page; returns the short form."""
    kind, files = open_log(path)
    progress = _Progress(sum(file.stat().st_size for file in files))
    digest = Digest(loss, prefix)
    for row in rows(kind, files, progress):
        digest.add(row)
    progress.close()
    digest.monitor.flush()
    if digest.breaks and not digest.wanted:
        what = "an event file" if kind == "events" else "JSON lines: one object in each line"
        raise Unreadable(f"{path} is not {what}.")
    run, images, note = read(digest.table(), loss), [], ""
    try:
        images = pictures(digest, run)
    except ImportError as error:
        note = f"No pictures: {error}"
    name = path.absolute().name
    out.write_text(page(name, digest, run, images, note), encoding="utf-8", errors="replace")
    colored = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return summary(name, digest, run, colored)


def main(argv: Sequence[str] | None = None) -> int:
    about = "Float16 training in JAX: tools for the command line."
    parser = argparse.ArgumentParser("python -m jscale", description=about)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "report",
        help="an HTML page from the log of a run",
        description="Reads the log of a run and writes one HTML page that needs nothing else: "
        "pictures of the loss and the loss scale, advice, skipped steps. Prints a short form.",
        epilog="Exit codes: 0, the page is written; 2, bad usage, or RUN cannot be read.",
    )
    command.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        help="JSON lines, a dict of metrics in each; or a folder with TensorBoard's event files",
    )
    command.add_argument("--out", type=Path, default=Path("report.html"), metavar="PAGE.html",
                         help="where the page goes (default: %(default)s)")  # fmt: skip
    command.add_argument("--loss", default="loss", metavar="KEY",
                         help="the key of the loss (default: %(default)s)")  # fmt: skip
    command.add_argument("--prefix", default="", metavar="TEXT",
                         help="what keys begin with, such as train/")  # fmt: skip
    given = parser.parse_args(argv)
    if given.out.suffix not in (".html", ".htm"):
        command.error(f"--out must end in .html, got {given.out}")
    try:
        print(report(given.run, given.out, given.loss, given.prefix))
    except (Unreadable, OSError) as error:
        print(f"python -m jscale report: {error}", file=sys.stderr)
        return 2
    print(f"\nThe page is {given.out}.")
    return 0
