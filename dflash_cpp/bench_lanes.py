"""What `dflash-cpp bench` measures: ways of decoding, the servers behind them, single requests."""

from __future__ import annotations

import contextlib
import hashlib
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_convert.errors import FailureError

from .server import SPEC_TYPE, LlamaServer

PLAIN, STOCK_PLAIN, ADAPTIVE = "plain", "stock-plain", "adaptive"

# groups that `--lanes` can leave out; `plain` is always measured, for it is what ratios refer to
GROUPS = ("stock", "adaptive", "fixed")

_PER_POSITION = re.compile(r'^spec_decode_num_accepted_tokens_per_pos_total\{position="(\d+)"\}$')
_COUNTERS = {
    "draft_n_rounds": "spec_decode_num_drafts_total",
    "draft_n": "spec_decode_num_draft_tokens_total",
    "draft_n_accepted": "spec_decode_num_accepted_tokens_total",
}
_SUMS = ("draft_n_rounds", "draft_n_skipped", "draft_n", "draft_n_accepted")
_LISTS = ("draft_n_per_pos", "draft_n_accepted_per_pos")

_REQUEST_SECONDS = 3600.0
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class BenchLane:
    """One way of decoding.

    Attributes:
        name: In results: `plain`, `stock-plain`, `stock-3`, `adaptive`, `fixed-3`.
        words: In tables.
        stock: Whether the unpatched server decodes.
        arguments: What makes its llama-server decode so; empty without a draft.
    """

    name: str
    words: str
    stock: bool
    arguments: tuple[str, ...] = ()

    @property
    def drafts(self) -> bool:
        """Whether there is a draft."""
        return bool(self.arguments)

    @property
    def plain(self) -> str:
        """Name of the lane of the same build without a draft."""
        return STOCK_PLAIN if self.stock else PLAIN


def make_lanes(
    draft: Path, n_draft: Sequence[int], n_max: int, groups: Sequence[str]
) -> list[BenchLane]:
    """Return the lanes in the order of the tables.

    Args:
        draft: GGUF file.
        n_draft: Fixed numbers of drafted tokens per round.
        n_max: Ceiling of the adaptive lane.
        groups: Of `GROUPS`.
    """

    def spec(n: int) -> tuple[str, ...]:
        return ("-md", str(draft), "--spec-type", SPEC_TYPE, "--spec-draft-n-max", str(n))

    lanes = [BenchLane(PLAIN, "plain", False)]
    if "stock" in groups:
        lanes.append(BenchLane(STOCK_PLAIN, "stock, plain", True))
        lanes += [BenchLane(f"stock-{n}", f"stock, {n} drafted", True, spec(n)) for n in n_draft]
    if "adaptive" in groups:
        adaptive = (*spec(n_max), "--spec-draft-adaptive", "on")
        lanes.append(BenchLane(ADAPTIVE, "ours, adaptive", False, adaptive))
    if "fixed" in groups:
        off = ("--spec-draft-adaptive", "off")
        lanes += [
            BenchLane(f"fixed-{n}", f"ours, {n} drafted", False, (*spec(n), *off)) for n in n_draft
        ]
    return lanes


class Servers:
    """The servers of the lanes, started when they are first needed.

    Args:
        target: GGUF file.
        stock: The unpatched llama-server; None if no lane needs it.
        n_ctx: Tokens of context of each slot.
        threads: CPU threads of each server.
        extra: Further arguments of every server.
        warm_up: Token ids that a new server answers before anything is measured.
        n_warm_up: Tokens of that answer.
        one_at_a_time: Stop the server that runs before another one starts.
    """

    def __init__(
        self,
        target: Path,
        stock: Path | None,
        *,
        n_ctx: int,
        threads: int,
        extra: Sequence[str],
        warm_up: Sequence[int],
        n_warm_up: int,
        one_at_a_time: bool,
    ):
        self._target = target
        self._stock = stock
        self._n_ctx = n_ctx
        self._threads = threads
        self._extra = tuple(extra)
        self._warm_up = list(warm_up)
        self._n_warm_up = n_warm_up
        self._one_at_a_time = one_at_a_time
        self._running: dict[str, LlamaServer] = {}
        self._slots = 0

    def get(self, lane: BenchLane, slots: int) -> LlamaServer:
        """Return the lane's server with so many slots; all servers with another number end.

        Raises:
            FailureError: It does not start.
        """
        if slots != self._slots:
            self.close()
            self._slots = slots
        if lane.name not in self._running:
            if self._one_at_a_time:
                self.close()
            server = LlamaServer(
                self._arguments(lane, slots), program=self._stock if lane.stock else None
            )
            self._running[lane.name] = server
            # page in the weights, build the graphs, learn the costs; not counted
            ask_together(lane, server, [self._warm_up] * slots, self._n_warm_up, 0.0)
        return self._running[lane.name]

    def stop(self, lane: BenchLane) -> None:
        """Stop the lane's server if it runs."""
        if server := self._running.pop(lane.name, None):
            server.close(_CLOSE_SECONDS)

    def close(self) -> None:
        """Stop all servers."""
        with _uninterrupted():
            while self._running:
                self._running.popitem()[1].close(_CLOSE_SECONDS)

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _arguments(self, lane: BenchLane, slots: int) -> list[str]:
        context = str(slots * self._n_ctx)
        common = ["-m", str(self._target), "-c", context, "-np", str(slots)]
        return [*common, "-t", str(self._threads), "--metrics", *lane.arguments, *self._extra]


# --- requests -------------------------------------------------------------------------------------


def ask(
    lane: BenchLane, server: LlamaServer, prompt: Sequence[int], n_predict: int, temp: float
) -> dict[str, Any]:
    """Let a server continue `prompt`, with nothing cached.

    Returns:
        `prompt_n`, `prompt_ms`, `predicted_n`, `predicted_ms`, `tokens` (a digest of the token
        ids) and, with a draft, the counters of the server's `timings`; what stock's answers lack
        comes from its `/metrics`.

    Raises:
        FailureError: The server fails, or its answer has no timings.
    """
    answers, counters, _ = _ask_all(lane, server, [prompt], n_predict, temp)
    return answers[0] | counters


def ask_together(
    lane: BenchLane,
    server: LlamaServer,
    prompts: Sequence[Sequence[int]],
    n_predict: int,
    temp: float,
) -> dict[str, Any]:
    """Send all prompts at the same time, one request each.

    Returns:
        `wall_s` from the first request sent to the last answer received, `predicted_n` of all
        answers together, the draft's counters of all, and `answers` one by one.

    Raises:
        FailureError: As `ask`.
    """
    answers, counters, wall_s = _ask_all(lane, server, prompts, n_predict, temp)
    predicted_n = sum(a["predicted_n"] for a in answers)
    return {"wall_s": wall_s, "predicted_n": predicted_n, "answers": answers, **counters}


def _ask_all(
    lane: BenchLane,
    server: LlamaServer,
    prompts: Sequence[Sequence[int]],
    n_predict: int,
    temp: float,
) -> tuple[list[dict[str, Any]], dict[str, Any], float]:
    """Return the answers, the draft's counters of all together, and the seconds it took."""
    before = _metrics(lane, server)
    ready = threading.Barrier(len(prompts))

    def one(prompt: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any], float, float]:
        ready.wait()
        started = time.perf_counter()
        answer, timings = _complete(server, prompt, n_predict, temp)
        return answer, timings, started, time.perf_counter()

    pool = ThreadPoolExecutor(len(prompts))
    try:
        done = [f.result() for f in [pool.submit(one, p) for p in prompts]]
    except BaseException:
        # what was sent would run to its end, and a busy llama-server does not heed SIGTERM
        ready.abort()
        with _uninterrupted():
            server.close(0.0)
        raise
    finally:
        pool.shutdown()
    answers, timings, started, ended = zip(*done, strict=True)
    counters = _draft_counters(lane, list(timings), before, _metrics(lane, server))
    return list(answers), counters, max(ended) - min(started)


def _complete(
    server: LlamaServer, prompt: Sequence[int], n_predict: int, temp: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    answer = server.post(
        "/completion",
        # without a seed: one of its own would hold sampled drafts at their full length
        {
            "prompt": list(prompt),
            "n_predict": n_predict,
            "temperature": temp,
            "cache_prompt": False,
            "return_tokens": True,
        },
        timeout=_REQUEST_SECONDS,
    )
    timings = answer.get("timings") or {}
    if "predicted_ms" not in timings or "prompt_ms" not in timings:
        raise FailureError("llama-server's answer has no timings, expected them in `timings`")
    tokens = ",".join(map(str, answer.get("tokens", ())))
    return {
        "prompt_n": int(timings["prompt_n"]),
        "prompt_ms": float(timings["prompt_ms"]),
        "predicted_n": int(timings["predicted_n"]),
        "predicted_ms": float(timings["predicted_ms"]),
        "tokens": hashlib.sha256(tokens.encode("ascii")).hexdigest()[:16],
    }, timings


def _metrics(lane: BenchLane, server: LlamaServer) -> dict[str, float]:
    return server.metrics() if lane.stock and lane.drafts else {}


def _draft_counters(
    lane: BenchLane,
    timings: list[dict[str, Any]],
    before: dict[str, float],
    after: dict[str, float],
) -> dict[str, Any]:
    """Return the counters of one or more answers together; empty without a draft."""
    if not lane.drafts:
        return {}
    if lane.stock:

        def grown(name: str) -> int:
            return int(after.get(name, 0.0) - before.get(name, 0.0))

        positions = {int(m[1]): name for name in after if (m := _PER_POSITION.match(name))}
        counted: dict[str, Any] = {key: grown(name) for key, name in _COUNTERS.items()}
        return counted | {
            "draft_n_accepted_per_pos": [grown(positions[i]) for i in sorted(positions)]
        }
    counters: dict[str, Any] = {key: sum(int(t.get(key, 0)) for t in timings) for key in _SUMS}
    return counters | {key: add_up([t.get(key, []) for t in timings]) for key in _LISTS}


def add_up(lists: Sequence[Sequence[int]]) -> list[int]:
    """Add lists of different lengths position by position."""
    width = max(map(len, lists), default=0)
    return [sum(x[i] for x in lists if i < len(x)) for i in range(width)]


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore signals for a moment: a second Ctrl-C must not leave servers behind."""
    before: list[tuple[int, Any]] = []
    # Refused outside the main thread, which gets the signals anyway.
    with contextlib.suppress(ValueError):
        for number in (signal.SIGINT, signal.SIGTERM):
            before.append((number, signal.signal(number, signal.SIG_IGN)))
    try:
        yield
    finally:
        for ignored, handler in before:
            signal.signal(ignored, handler)


@contextlib.contextmanager
def hang_up_terminates() -> Iterator[None]:
    """Treat a closed terminal like SIGTERM, which stops the servers; nohup stays respected."""
    number = getattr(signal, "SIGHUP", None)
    if number is None or signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return
    try:
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGTERM))
    except ValueError:  # outside the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL)
