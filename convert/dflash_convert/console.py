"""The one place that prints: data to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, Protocol

from .errors import shorten

JSON_SCHEMA_VERSION = 1

_ANSI = {
    "bold": "\x1b[1m",
    "dim": "\x1b[2m",
    "red": "\x1b[31m",
    "green": "\x1b[32m",
    "yellow": "\x1b[33m",
    "blue": "\x1b[34m",
    "magenta": "\x1b[35m",
    "cyan": "\x1b[36m",
}
_ANSI_OFF = "\x1b[0m"
STYLES = tuple(_ANSI)

_PLAIN_SECONDS = 10.0
_PLAIN_FRACTION = 0.1


class Ticker(Protocol):
    """What `Console.progress` yields."""

    def advance(self, amount: int) -> None:
        """Count `amount` further units (bytes, tokens, ...) as done."""


def printable(text: str) -> str:
    """Escape control characters, so that names from a file cannot drive the terminal."""
    return "".join(
        c
        if c in "\n\t" or (c.isprintable() and not "\ud800" <= c <= "\udfff")
        else c.encode("unicode_escape", "surrogatepass").decode("ascii")
        for c in text
    )


def use_colour(stream: IO[str]) -> bool:
    """Tell whether `stream` is a terminal that wants colour (NO_COLOR and TERM=dumb say no)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def human_bytes(count: float) -> str:
    """Format a number of bytes for people, in powers of 1024: `3.58 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


class Console:
    """Output of one command in one of three modes: for people, quiet (`-q`) or `--json`.

    A command calls `text`, `table`, `json` and `result` one after the other; each acts only in
    the mode it belongs to, so the command itself never asks which mode is on.

    Args:
        json: Print exactly one JSON document on stdout and nothing for people.
        quiet: Print only what `result` is given.
        verbose: 0, 1 (`-v`: `detail` lines) or 2 (`-vv`: native logs as well, by the caller).
        progress: False for `--no-progress`.
        stdout, stderr: Streams to use instead of those of the process.
    """

    def __init__(
        self,
        *,
        json: bool = False,
        quiet: bool = False,
        verbose: int = 0,
        progress: bool = True,
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
    ):
        self.as_json = json
        self.quiet = quiet
        self.verbose = verbose
        self.show_progress = (
            progress and not json and not quiet and not env_true("HF_HUB_DISABLE_PROGRESS_BARS")
        )
        self._stdout = stdout
        self._stderr = stderr

    # Looked up late, so that a replaced sys.stdout (tests, redirection) is honoured.
    @property
    def stdout(self) -> IO[str]:
        """The stream for data."""
        return self._stdout or sys.stdout

    @property
    def stderr(self) -> IO[str]:
        """The stream for everything that is not data."""
        return self._stderr or sys.stderr

    @property
    def for_people(self) -> bool:
        """True when neither `--json` nor `-q` was given."""
        return not (self.as_json or self.quiet)

    # --- stdout -------------------------------------------------------------------------------

    def text(self, message: str = "", *, style: str | None = None) -> None:
        """Print a line for people on stdout."""
        if self.for_people:
            self._write(self.stdout, printable(message) + "\n", style)

    def stream(self, piece: str, *, style: str | None = None) -> None:
        """Print a piece of generated text on stdout as it is, without a line end, at once."""
        if not self.as_json:
            self._write(self.stdout, piece, style)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        title: str | None = None,
        right: Sequence[str] = (),
    ) -> None:
        """Print a table for people on stdout.

        Args:
            columns: Headings.
            rows: Cells, one per heading; each is printed with `str`, None as nothing.
            title: A line above the table.
            right: Headings of the columns to align right.
        """
        if not self.for_people:
            return
        from rich.box import SIMPLE_HEAD
        from rich.console import Console as RichConsole
        from rich.table import Table
        from rich.text import Text

        colour = use_colour(self.stdout)
        grid = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
        terminal = _is_terminal(self.stdout)
        for name in columns:
            grid.add_column(
                Text(printable(name)),
                justify="right" if name in right else "left",
                no_wrap=True,
                overflow="ellipsis" if terminal else "ignore",
            )
        for row in rows:
            grid.add_row(*("" if c is None else Text(printable(str(c))) for c in row))
        # A pipe has no width: nothing is cut there, so that grep and awk see whole cells.
        rich = RichConsole(
            file=self.stdout,
            width=None if terminal else 100_000,
            force_terminal=colour,
            no_color=not colour,
            highlight=False,
            markup=False,
            emoji=False,
            safe_box=not _can_encode(self.stdout, "\u2500\u2026"),
        )
        with rich.capture() as captured:
            rich.print(grid)
        if title is not None:
            self.text(title, style="bold")
        lines = [line.rstrip() for line in captured.get().splitlines()]
        self._write(self.stdout, "\n".join(lines) + "\n")

    def json(self, document: Mapping[str, Any]) -> None:
        """Print the one JSON document of a `--json` run on stdout; NaN and infinity become null."""
        if self.as_json:
            whole = {"schema": JSON_SCHEMA_VERSION, **document}
            text = json.dumps(_finite(whole), indent=2, allow_nan=False, default=str)
            self._write(self.stdout, text + "\n")

    def result(self, value: object) -> None:
        """Print the one value that `-q` asks for (a path or a number)."""
        if self.quiet and not self.as_json:
            self._write(self.stdout, f"{value}\n")

    # --- stderr -------------------------------------------------------------------------------

    def info(self, message: str) -> None:
        """Print a line on stderr for people."""
        if self.for_people:
            self._write(self.stderr, printable(message) + "\n")

    def detail(self, message: str) -> None:
        """Print a line on stderr with `-v`."""
        if self.verbose:
            self._write(self.stderr, printable(message) + "\n")

    def warning(self, message: str) -> None:
        """Print a warning on stderr, in every mode."""
        self._labelled("warning", message, "yellow")

    def error(self, message: str, hint: str | None = None, problems: Sequence[str] = ()) -> None:
        """Print `error: ...` on stderr, its problems one a line, a blank line and `hint: ...`."""
        self._labelled("error", message, "red")
        for problem in shorten(problems):
            self._write(self.stderr, f"  - {printable(problem)}\n")
        if hint:
            self._write(self.stderr, "\n")
            self._labelled("hint", hint, "cyan")

    @contextmanager
    def progress(self, description: str, total: int, unit: str = "B") -> Iterator[Ticker]:
        """Show progress on stderr: a bar on a terminal, else a line each 10 s or 10 %.

        Args:
            description: What is going on.
            total: Number of units until it is done.
            unit: `B` for bytes (shown with a rate and the time left), or another word.
        """
        if not self.show_progress or total <= 0:
            yield _Silent()
        elif use_colour(self.stderr):
            with _rich_bar(self.stderr, description, total, unit) as ticker:
                yield ticker
        else:
            yield _PlainTicker(self, description, total, unit)

    # --- helpers ------------------------------------------------------------------------------

    def _labelled(self, label: str, message: str, style: str) -> None:
        self._write(self.stderr, f"{label}:", style)
        self._write(self.stderr, f" {printable(message)}\n")

    def _write(self, stream: IO[str], text: str, style: str | None = None) -> None:
        if style is not None and use_colour(stream):
            text = f"{_ANSI[style]}{text}{_ANSI_OFF}"
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = _encoding(stream)
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


class _Silent:
    def advance(self, amount: int) -> None:
        """Count nothing."""


class _PlainTicker:
    """Progress for logs: a line whenever 10 s passed or 10 % were added."""

    def __init__(self, console: Console, description: str, total: int, unit: str):
        self._console = console
        self._description = description
        self._total = total
        self._unit = unit
        self._done = 0
        self._started = self._last_time = time.monotonic()
        self._last_done = 0

    def advance(self, amount: int) -> None:
        """Count `amount` further units."""
        self._done += amount
        now = time.monotonic()
        step = (self._done - self._last_done) / self._total
        # Short work stays silent: nobody needs ten lines for the first two seconds.
        if now - self._started < 2 or (
            now - self._last_time < _PLAIN_SECONDS and step < _PLAIN_FRACTION
        ):
            return
        self._last_time, self._last_done = now, self._done
        rate = self._done / (now - self._started)
        left = (self._total - self._done) / rate if rate else 0.0
        shown = f"{human_bytes(rate)}/s" if self._unit == "B" else f"{rate:.1f} {self._unit}/s"
        percent = 100 * self._done / self._total
        self._console.info(f"{self._description}: {percent:.0f} % ({shown}, {left:.0f} s left)")


@contextmanager
def _rich_bar(stream: IO[str], description: str, total: int, unit: str) -> Iterator[Ticker]:
    from rich.console import Console as RichConsole
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = (
        (DownloadColumn(binary_units=True), TransferSpeedColumn())
        if unit == "B"
        else (MofNCompleteColumn(), TextColumn(unit, markup=False))
    )
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *counts,
        TimeRemainingColumn(),
        console=RichConsole(file=stream, markup=False, highlight=False),
        transient=True,
    )
    with bar:
        task = bar.add_task(description, total=total)

        class _Bar:
            def advance(self, amount: int) -> None:
                """Count `amount` further units."""
                bar.advance(task, amount)

        yield _Bar()


def env_true(name: str) -> bool:
    """Tell whether the environment variable `name` is set to 1, true, yes or on."""
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")


def _is_terminal(stream: IO[str]) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def _can_encode(stream: IO[str], text: str) -> bool:
    try:
        text.encode(_encoding(stream))
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _encoding(stream: IO[str]) -> str:
    return getattr(stream, "encoding", None) or "ascii"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_finite(v) for v in value]
    return value
