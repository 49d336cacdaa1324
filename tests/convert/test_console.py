"""The output object and the end of a command line."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys

import pytest

from dflash_convert.console import Console, human_bytes, printable, use_colour
from dflash_convert.errors import DFlashError, FailureError, InputError, explain, shorten


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def console(**options: object) -> tuple[Console, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Console(stdout=out, stderr=err, **options), out, err  # type: ignore[arg-type]


def everything(c: Console) -> None:
    c.text("text")
    c.table(("a", "b"), [(1, "x"), (22, None)], right=("a",))
    c.json({"n": float("nan"), "list": (1, float("inf"))})
    c.result("value")
    c.info("info")
    c.detail("detail")
    c.warning("careful")


def test_for_people() -> None:
    c, out, err = console(verbose=1)
    everything(c)
    lines = out.getvalue().splitlines()
    assert lines[0] == "text"
    assert [line.split() for line in lines[1:] if line.strip("-─ ")] == [
        ["a", "b"],
        ["1", "x"],
        ["22"],
    ]
    assert err.getvalue() == "info\ndetail\nwarning: careful\n"


def test_json_is_one_document() -> None:
    c, out, err = console(json=True)
    everything(c)
    assert json.loads(out.getvalue()) == {"schema": 1, "n": None, "list": [1, None]}
    assert err.getvalue() == "warning: careful\n"


def test_quiet_prints_the_result_only() -> None:
    c, out, err = console(quiet=True)
    everything(c)
    assert (out.getvalue(), err.getvalue()) == ("value\n", "warning: careful\n")


def test_a_pipe_gets_whole_cells_and_a_terminal_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    long = "x" * 500
    c, out, _ = console()
    c.table(("name",), [(long,)])
    assert long in out.getvalue()
    terminal = Terminal()
    Console(stdout=terminal).table(("name",), [(long,)])
    assert long not in terminal.getvalue()


def test_markup_in_cells_is_text() -> None:
    c, out, _ = console()
    c.table(("name",), [("[bold]x[/bold] :smile:",)])
    assert "[bold]x[/bold] :smile:" in out.getvalue()


def test_colour_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    Console(stdout=terminal).stream("piece", style="green")
    assert terminal.getvalue() == "\x1b[32mpiece\x1b[0m"
    assert not use_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_colour(terminal)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not use_colour(terminal)


def test_text_that_the_stream_cannot_encode() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(stdout=stream).text("grün")
    assert raw.getvalue() == b"gr\\xfcn\n"


def test_printable_escapes_what_drives_a_terminal() -> None:
    assert printable("a\x1b[2J\x07\nb\tc\udc80é") == "a\\x1b[2J\\x07\nb\tc\\udc80é"


def test_progress_lines_off_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("dflash_convert.console.time.monotonic", lambda: now)
    c, _, err = console()
    with c.progress("reading", 1000) as ticker:
        for _ in range(100):
            now += 0.5
            ticker.advance(10)
    lines = err.getvalue().splitlines()
    assert 9 <= len(lines) <= 11
    assert lines[0] == "reading: 10 % (20 B/s, 45 s left)"
    quiet, _, err = console(progress=False)
    with quiet.progress("reading", 1000) as ticker:
        now += 100
        ticker.advance(1000)
    assert err.getvalue() == ""


def test_sizes() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 3.5 * 2**30, 2**41)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "3.50 GiB",
        "2.00 TiB",
    ]


def test_problems_are_listed_up_to_a_limit() -> None:
    assert shorten(map(str, range(22))) == [*map(str, range(20)), "... and 2 more"]
    c, _, err = console()
    c.error("found this", "do that", [str(i) for i in range(30)])
    assert err.getvalue().startswith("error: found this\n  - 0\n")
    assert err.getvalue().endswith("  - ... and 10 more\n\nhint: do that\n")


def test_errors_and_their_codes() -> None:
    assert (InputError("a").exit_code, FailureError("b").exit_code) == (2, 1)
    assert str(InputError("a", problems=["b"])) == "a:\n  - b"
    known = explain(OSError(errno.ENOSPC, "No space", "/x/y"))
    assert isinstance(known, FailureError)
    assert known.message == "`/x/y`: no space left on the device"
    assert explain(MemoryError()).message == "out of memory"  # type: ignore[union-attr]
    assert explain(ValueError("a defect")) is None
    error = DFlashError("x")
    assert explain(error) is error


_APP = """
import sys, typer
from dflash_convert.errors import InputError, run_cli
app = typer.Typer(rich_markup_mode=None)
@app.command()
def go(kind: str):
    if kind == "defect": raise RuntimeError("unforeseen")
    if kind == "input": raise InputError("found", hint="do")
    if kind == "ctrl-c": raise KeyboardInterrupt
    if kind == "memory": raise MemoryError
    if kind == "os": open("/nothing/at/all")
    if kind == "three": raise typer.Exit(3)
run_cli(app, sys.argv[1:], prog_name="go")
"""


@pytest.mark.parametrize(
    ("kind", "code", "text"),
    [
        ("fine", 0, ""),
        ("defect", 1, "error: unexpected RuntimeError: unforeseen\n\nhint: this is a defect"),
        ("input", 2, "error: found\n\nhint: do\n"),
        ("ctrl-c", 130, "error: interrupted\n"),
        ("memory", 1, "error: out of memory\n"),
        ("os", 1, "error: `/nothing/at/all`: no such file or directory\n"),
        ("three", 3, ""),
    ],
)
def test_run_cli(kind: str, code: int, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _APP, kind], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(text)
    assert ("Traceback" in done.stderr) is False
