"""Start, watch and stop llama-server; the command line of `dflash-cpp serve`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from dflash_convert.errors import FailureError, InputError

from .info import program_path
from .opening import need_file

SPEC_TYPE = "draft-dflash"

# llama-server's spellings of the options that `serve` has to understand itself
MODEL_OPTIONS = ("-m", "--model")
DRAFT_OPTIONS = ("-md", "--draft", "--model-draft", "--spec-draft-model")
HUB_OPTIONS = ("-hf", "-hfr", "--hf-repo")
HUB_DRAFT_OPTIONS = ("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf")
N_MAX_OPTIONS = ("--spec-draft-n-max",)
TYPE_OPTIONS = ("--spec-type",)
# options after which llama-server answers and ends
QUESTIONS = ("-h", "--help", "--usage", "--version", "--list-devices", "--cache-list", "-cl")

_POLL_SECONDS = 0.05
_LOG_TAIL = 12
# llama.cpp logs one line at error level and says in it that it means nothing
_HARMLESS = "this warning is normal"
# a log line of that level, an assertion (`file.cpp:12: what`), whatever calls itself an error
_ERROR_LINE = re.compile(
    r"^(?:[\d.]+ )?E |^[\w./-]+\.(?:c|cpp|cu|cuh|h):\d+: |error", re.IGNORECASE
)

# the address is this machine's: a proxy from the environment has no business in between
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def need_program(name: str) -> Path:
    """Return the path of a built program.

    Raises:
        FailureError: It is not there.
    """
    path = program_path(name)
    if not path.exists():
        raise FailureError(
            f"`{path}` does not exist, expected the built {name}",
            hint="build it with `make build`, or install the package with `pip install .`",
        )
    return path


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


# --- dflash-cpp serve -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ServeCommand:
    """What `serve` runs.

    Attributes:
        argv: Program and arguments.
        n_max: Tokens drafted per round that we chose; None if the user or the server chooses.
    """

    argv: tuple[str, ...]
    n_max: int | None


def serve_command(arguments: Sequence[str]) -> ServeCommand:
    """Make llama-server's command line from the arguments of `dflash-cpp serve`.

    Files given by `-m` and `-md` are checked; everything passes through in order. `--spec-type`
    and `--spec-draft-n-max` (block - 1) are added unless they are there.

    Raises:
        InputError: An option lacks its value, a file is missing, or the pair does not fit.
    """
    rest = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    model, rest = _take(rest, MODEL_OPTIONS)
    draft, rest = _take(rest, DRAFT_OPTIONS)
    for file, hub, option in (
        (model, HUB_OPTIONS, "-m TARGET.gguf"),
        (draft, HUB_DRAFT_OPTIONS, "-md DRAFT.gguf"),
    ):
        if file is None and not _has(rest, hub):
            raise InputError(
                f"{option} is missing, expected a target and its draft",
                hint="dflash-cpp serve -m TARGET.gguf -md DRAFT.gguf [any llama-server option]",
            )
    target_path = need_file(Path(model), "target") if model else None
    draft_path = need_file(Path(draft), "draft") if draft else None
    argv = [str(need_program("llama-server"))]
    argv += ["-m", str(model)] if model else []
    argv += ["-md", str(draft)] if draft else []
    if target_path and draft_path:
        from .session import check_pair

        check_pair(target_path, draft_path)
    if not _has(rest, TYPE_OPTIONS, "LLAMA_ARG_SPEC_TYPE"):
        argv += ["--spec-type", SPEC_TYPE]
    n_max = None
    if draft_path and not _has(rest, N_MAX_OPTIONS, "LLAMA_ARG_SPEC_DRAFT_N_MAX"):
        n_max = block_size(draft_path) - 1
        argv += ["--spec-draft-n-max", str(n_max)]
    return ServeCommand((*argv, *rest), n_max)


def passes_through(arguments: Sequence[str]) -> ServeCommand | None:
    """Return a command for questions that need no pair (`--help`, `--version`, ...), else None."""
    rest = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if not any(a in QUESTIONS for a in rest):
        return None
    return ServeCommand((str(need_program("llama-server")), *rest), None)


def block_size(draft: Path) -> int:
    """Read the block size of a draft (drafted tokens + 1).

    Raises:
        InputError: The file has none.
    """
    from . import _libs

    block = _libs.gguf_uint32(draft, "dflash.block_size")
    if block is None or block < 2:
        raise InputError(f"`{draft}` has no usable `dflash.block_size`, expected a DFlash draft")
    return block


def replace_process(command: ServeCommand) -> NoReturn:
    """Become llama-server, so that signals and the exit code are its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "nt":
        raise SystemExit(subprocess.call(command.argv))
    os.execv(command.argv[0], list(command.argv))


def _take(arguments: list[str], names: Sequence[str]) -> tuple[str | None, list[str]]:
    """Remove every `NAME VALUE` and `NAME=VALUE`; return the last value."""
    value: str | None = None
    rest: list[str] = []
    i = 0
    while i < len(arguments):
        name, equals, inline = arguments[i].partition("=")
        if arguments[i] in names:
            if i + 1 == len(arguments):
                raise InputError(
                    f"`{arguments[i]}` needs a value, expected the path of a GGUF file"
                )
            value = arguments[i + 1]
            i += 2
        elif equals and name in names:
            value = inline
            i += 1
        else:
            rest.append(arguments[i])
            i += 1
    return value, rest


def _has(arguments: Sequence[str], names: Sequence[str], variable: str | None = None) -> bool:
    """Tell whether an option is given, by one of its names or by llama.cpp's variable for it."""
    if variable is not None and os.environ.get(variable):
        return True
    return any(a.partition("=")[0] in names for a in arguments)


# --- a server as a child process ------------------------------------------------------------------


class LlamaServer:
    """llama-server as a child process on a free local port.

    Args:
        arguments: Its arguments without `--host` and `--port`.
        program: The executable; None for the built one.
        log: File for its output; None for a temporary one that `close` removes.
        ready_seconds: How long loading may take.

    Raises:
        FailureError: It ended or was not ready in time; the message holds its own error lines.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        program: Path | None = None,
        log: Path | None = None,
        ready_seconds: float = 120.0,
    ):
        import tempfile

        self.program = program or need_program("llama-server")
        self._own_log = log is None
        if log is None:
            handle, name = tempfile.mkstemp(prefix="llama-server-", suffix=".log")
            os.close(handle)
            log = Path(name)
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.argv = [
            str(self.program), *arguments, "--host", "127.0.0.1", "--port", str(self.port)
        ]  # fmt: skip
        self._stream: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._stream = log.open("wb")
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=self._stream,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal goes to us; we then stop the server in order.
                start_new_session=True,
            )
            self._wait_ready(ready_seconds)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Id of the process, 0 when there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def close(self, seconds: float = 10.0) -> None:
        """Stop the server; kill it when it does not end in time."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._stream is not None:
            self._stream.close()
        if self._own_log:
            with contextlib.suppress(OSError):
                self.log.unlink()

    def __enter__(self) -> LlamaServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- requests -----------------------------------------------------------------------------

    def get(self, path: str, *, timeout: float = 30.0) -> bytes:
        """Return the body of a GET request."""
        return self._request(urllib.request.Request(self.url + path), timeout)

    def post(self, path: str, body: dict[str, Any], *, timeout: float = 600.0) -> dict[str, Any]:
        """Send a JSON object and return the one that comes back."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode("utf-8"),
            headers={"Content-Type": "application/json"},
        )
        return dict(json.loads(self._request(request, timeout)))

    def metrics(self) -> dict[str, float]:
        """Return the counters of `/metrics` (the server needs `--metrics`), labels included."""
        values = {}
        for line in self.get("/metrics").decode("utf-8").splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                values[name.removeprefix("llamacpp:")] = float(value)
        return values

    def _request(self, request: urllib.request.Request, timeout: float) -> bytes:
        try:
            with _opener.open(request, timeout=timeout) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as exc:
            said = exc.read().decode("utf-8", "replace").strip()
            raise FailureError(f"llama-server answers {exc.code}: {said[:500]}") from exc
        except (urllib.error.URLError, TimeoutError, ConnectionError) as exc:
            if not self.running:
                raise self._death() from exc
            raise FailureError(f"llama-server does not answer: {exc}") from exc

    # --- starting -----------------------------------------------------------------------------

    def _wait_ready(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not self.running:
                raise self._death()
            request = urllib.request.Request(self.url + "/health")
            try:
                # Before the model is loaded the server answers 503, or nobody listens yet.
                with _opener.open(request, timeout=5.0):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(_POLL_SECONDS)
        raise FailureError(
            f"llama-server was not ready after {seconds:.0f} s", problems=self._errors()
        )

    def _death(self) -> FailureError:
        code = self._process.poll() if self._process else None
        how = f"was killed by signal {-code}" if code and code < 0 else f"ended with code {code}"
        return FailureError(f"llama-server {how}", problems=self._errors())

    def _errors(self) -> list[str]:
        """Return what the log calls an error, or its last lines if it calls nothing so."""
        lines = self.log.read_text("utf-8", "replace").splitlines() if self.log.exists() else []
        errors = [x for x in lines if _ERROR_LINE.search(x) and _HARMLESS not in x]
        return (errors or lines)[-_LOG_TAIL:]
