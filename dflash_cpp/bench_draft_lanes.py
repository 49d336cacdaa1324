"""The builds that `dflash-cpp bench-draft` compares, each behind its dflash-draft-round."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash_convert.errors import FailureError

PROGRAM = "dflash-draft-round"
OURS, STOCK = "ours", "stock"

# stock drafts n + 1 rows, reserves for its target's micro-batch, injects slot by slot
_OUR_WAY = ("--whole-block", "--block-batch", "--all-together")

# our kernels and fused nodes left out
_BASE_KERNELS = {"GGML_DFLASH_SMALL_BATCH": "0", "GGML_DFLASH_DRAFT_OPS": "0"}

_CLOSE_SECONDS = 5.0
_LAST_LINES = 3


@dataclass(frozen=True)
class DraftLane:
    """One build.

    Attributes:
        name: In results: `ours` or `stock`.
        program: Its dflash-draft-round.
        arguments: How its llama-server would drive the draft.
        environment: Variables to set.
    """

    name: str
    program: Path
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def make_lanes(ours: Path, stock: Path | None) -> list[DraftLane]:
    """Return the lanes in the order of the tables."""
    lanes = [] if stock is None else [DraftLane(STOCK, stock)]
    return [*lanes, DraftLane(OURS, ours, _OUR_WAY)]


def base_kernels_lane(ours: Path) -> DraftLane:
    """Return our lane with the base's kernels and graph, whose rounding is that of stock."""
    return DraftLane(OURS, ours, _OUR_WAY, _BASE_KERNELS)


class DraftRounds:
    """A running dflash-draft-round.

    Args:
        lane: What to start.
        arguments: Files and options that all lanes share.

    Attributes:
        facts: What it says about the draft: `block`, `causal`, `n_vocab` and so on.

    Raises:
        FailureError: It does not start, or cannot load the pair.
    """

    def __init__(self, lane: DraftLane, arguments: Sequence[str]):
        self.lane = lane
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [str(lane.program), *arguments, *lane.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **lane.environment},
            # Ctrl-C in the terminal goes to us
            start_new_session=True,
        )
        try:
            self.facts = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, *words: object) -> dict[str, Any]:
        """Send a command and return the answer.

        Raises:
            FailureError: It failed or ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(" ".join(map(str, words)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None
        return self._answer()

    def close(self) -> None:
        """End it."""
        process = self._process
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                # what was never read by the process cannot be flushed any more
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._errors.close()

    def __enter__(self) -> DraftRounds:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._death()
        answer = dict(json.loads(line))
        if "error" in answer:
            raise FailureError(f"{self.lane.name}: {answer['error']}")
        return answer

    def _death(self) -> FailureError:
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return FailureError(f"{self.lane.name}: {PROGRAM} {how}", problems=lines[-_LAST_LINES:])
