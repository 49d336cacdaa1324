"""Errors that a user can cause, and how a command line ends with one of them."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from .console import Console

MAX_LISTED = 20

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_INPUT = 2
EXIT_INTERRUPTED = 130

_OS_SENTENCES = {
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "permission denied",
    errno.EPERM: "operation not permitted",
    errno.EROFS: "the file system is read-only",
    errno.ENOENT: "no such file or directory",
    errno.EISDIR: "is a directory, expected a file",
    errno.ENOTDIR: "a part of the path is not a directory",
    errno.ENAMETOOLONG: "the file name is too long",
    errno.EMFILE: "too many open files",
    errno.EFBIG: "the file is larger than the file system or the process limit allows",
    errno.EIO: "input/output error while reading or writing",
}


class DFlashError(Exception):
    """An error with one clear sentence, an optional hint, and the exit code it stands for.

    Args:
        message: What was found and what was expected, without a full stop at the end.
        hint: What to do about it, with the user's own arguments; None for none.
        problems: Every single problem behind `message`, worst first.
    """

    exit_code = EXIT_FAILURE

    def __init__(self, message: str, *, hint: str | None = None, problems: Iterable[str] = ()):
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.problems = tuple(problems)

    def __str__(self) -> str:
        if not self.problems:
            return self.message
        return "\n  - ".join([f"{self.message}:", *shorten(self.problems)])


class InputError(DFlashError):
    """Bad usage or bad input: a wrong argument, file, checkpoint or pair (exit code 2)."""

    exit_code = EXIT_INPUT


class FailureError(DFlashError):
    """The input was fine but the work failed: I/O, verification, a lost process (exit code 1)."""

    exit_code = EXIT_FAILURE


def shorten(problems: Iterable[str], limit: int = MAX_LISTED) -> list[str]:
    """Return at most `limit` problems, followed by a count of those left out."""
    listed = list(problems)
    if len(listed) <= limit:
        return listed
    return [*listed[:limit], f"... and {len(listed) - limit} more"]


def explain(exc: BaseException) -> DFlashError | None:
    """Turn an exception that outside conditions can cause into a DFlashError.

    Returns:
        The error to show, or None when `exc` is a defect of the program itself.
    """
    if isinstance(exc, DFlashError):
        return exc
    if isinstance(exc, MemoryError):
        return FailureError("out of memory", hint="close other programs or use a machine with more")
    if isinstance(exc, OSError) and exc.errno is not None:
        reason = _OS_SENTENCES.get(exc.errno) or (exc.strerror or "operating system error").lower()
        path = exc.filename if exc.filename2 is None else exc.filename2
        where = f"`{path}`: " if path not in (None, "") else ""
        return FailureError(f"{where}{reason}")
    return None


# --- running a Typer app ----------------------------------------------------------------------


class _Terminated(BaseException):
    """SIGTERM as an exception, so that `finally` blocks remove temporary files."""


def _raise_terminated(signum: int, frame: object) -> NoReturn:
    raise _Terminated


def run_cli(
    app: Any, args: Sequence[str] | None = None, *, prog_name: str | None = None
) -> NoReturn:
    """Run a Typer app and leave the process with the documented exit code.

    0 done, 1 failure, 2 bad usage or input, 130 Ctrl-C, 143 SIGTERM. Errors appear on stderr as
    `error: ...`, a blank line and `hint: ...`; a traceback only when DFLASH_DEBUG=1 is set.

    Args:
        app: A `typer.Typer`, made with `rich_markup_mode=None`.
        args: Command line without the program's name; None for that of the process.
        prog_name: Name for usage lines; None to detect it.
    """
    import typer

    from .console import Console

    console = Console()
    # Refused outside the main thread, where the host program owns the signals.
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        code = app(args=args, prog_name=prog_name, standalone_mode=False)
        if code == EXIT_INTERRUPTED:
            console.error("interrupted")
        _leave(code if isinstance(code, int) else 0)
    except _Terminated:
        console.error("terminated")
        _leave(128 + signal.SIGTERM)
    except (KeyboardInterrupt, typer.Abort):
        console.error("interrupted")
        _leave(EXIT_INTERRUPTED)
    except BrokenPipeError:
        _leave(EXIT_FAILURE)
    except typer.TyperException as exc:
        _report_usage(console, exc)
        _leave(EXIT_INPUT)
    except Exception as exc:  # the last line of defence: see `_report`
        _leave(_report(console, exc))


def _report(console: Console, exc: Exception) -> int:
    """Print any exception as an error; return the exit code."""
    from .console import env_true

    if env_true("DFLASH_DEBUG"):
        traceback.print_exception(exc, file=console.stderr)
    known = explain(exc)
    if known is None:
        known = DFlashError(
            f"unexpected {type(exc).__name__}: {exc}".strip(),
            hint="this is a defect of the program; run again with DFLASH_DEBUG=1 for the traceback "
            "and report it",
        )
    console.error(known.message, known.hint, known.problems)
    return known.exit_code


def _report_usage(console: Console, exc: Any) -> None:
    """Print Typer's complaint about the command line in the house form."""
    message = str(exc.format_message()) if hasattr(exc, "format_message") else str(exc)
    if type(exc).__name__ == "NoArgsIsHelpError":  # not exported by Typer; its message is the help
        console.info(message)
        return
    message = message.strip().rstrip(".").replace("Value error, ", "")
    context = getattr(exc, "ctx", None)
    hint = None
    if context is not None:
        hint = f"see `{context.command_path} --help`"
    console.error(message[:1].lower() + message[1:], hint)


def _leave(code: int) -> NoReturn:
    """Flush and exit; a reader that closed the pipe is no error worth a message."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (BrokenPipeError, ValueError):
            # Python would complain again at shutdown: give it a sink to flush into.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
