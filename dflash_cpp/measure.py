"""Speed of several llama-servers on the same prompts, one request at a time, in turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dflash_convert.errors import FailureError

from .server import LlamaServer

_PER_POSITION = re.compile(r'^spec_decode_num_accepted_tokens_per_pos_total\{position="(\d+)"\}$')
_DRAFTS = "spec_decode_num_drafts_total"
_DRAFTED = "spec_decode_num_draft_tokens_total"
_ACCEPTED = "spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True)
class Answer:
    """One completion: its tokens and the server's own timing (milliseconds)."""

    tokens: tuple[int, ...]
    predicted_n: int
    predicted_ms: float


@dataclass
class Lane:
    """One server and what it answered.

    Attributes:
        name: `plain`, `stock`, `ours`.
        server: Started with `--metrics`.
        answers: [repetition][prompt].
        drafts, drafted, accepted: Verification passes, tokens proposed, tokens accepted.
        accepted_per_position: Of all drafts, how many were accepted up to each position.
    """

    name: str
    server: LlamaServer
    answers: list[list[Answer]] = field(default_factory=list)
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float | None:
        """All tokens of all prompts, divided by the sum of each prompt's median time."""
        if not self.answers:
            return None
        tokens = sum(a.predicted_n for a in self.answers[0])
        ms = sum(median(a.predicted_ms for a in runs) for runs in zip(*self.answers, strict=True))
        return 1e3 * tokens / ms if ms > 0 else None

    @property
    def per_repetition(self) -> list[float]:
        """Tokens per second of each repetition over all prompts."""
        speeds = []
        for run in self.answers:
            ms = sum(a.predicted_ms for a in run)
            speeds.append(1e3 * sum(a.predicted_n for a in run) / ms if ms > 0 else 0.0)
        return speeds

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens per verification, the target's own included."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of drafts accepted up to each position, 0 to 1."""
        return [n / self.drafts for n in self.accepted_per_position] if self.drafts else []

    def to_json(self) -> dict[str, Any]:
        """Return the lane as plain data."""
        return {
            "name": self.name,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_repetition": self.per_repetition,
            "draft_rounds": self.drafts or None,
            "draft_n": self.drafted or None,
            "draft_n_accepted": self.accepted if self.drafts else None,
            "mean_accepted_length": self.mean_accepted_length,
            "acceptance_per_position": self.acceptance_per_position or None,
            "predicted_n": [a.predicted_n for a in self.answers[0]] if self.answers else [],
            "predicted_ms": [[a.predicted_ms for a in run] for run in self.answers],
        }


def run_lanes(
    lanes: Sequence[Lane],
    prompts: Sequence[Sequence[int]],
    *,
    n_predict: int,
    repeat: int,
    on_answer: Callable[[], None] = lambda: None,
) -> None:
    """Send every prompt `repeat` times to every lane, greedily, and fill the lanes.

    The lanes take turns prompt by prompt and the order rotates, so that a machine that speeds up
    or slows down does so for all of them.

    Args:
        lanes: Running servers.
        prompts: Token ids.
        n_predict: Tokens per answer.
        repeat: Repetitions.
        on_answer: Called after each of the repeat * len(prompts) * len(lanes) answers.
    """
    for lane in lanes:  # page in the weights, build the graphs, learn costs; not counted
        ask(lane.server, prompts[0], 32)
    before = [lane.server.metrics() for lane in lanes]
    turn = 0
    for _ in range(repeat):
        for lane in lanes:
            lane.answers.append([])
        for prompt in prompts:
            for i in range(len(lanes)):
                lane = lanes[(i + turn) % len(lanes)]
                lane.answers[-1].append(ask(lane.server, prompt, n_predict))
                on_answer()
            turn += 1
    for lane, earlier in zip(lanes, before, strict=True):
        _count(lane, earlier, lane.server.metrics())


def ask(server: LlamaServer, prompt: Sequence[int], n_predict: int) -> Answer:
    """Let a server continue `prompt` greedily, with nothing cached.

    Raises:
        FailureError: The answer has no timing.
    """
    answer = server.post(
        "/completion",
        {
            "prompt": list(prompt),
            "n_predict": n_predict,
            "temperature": 0.0,
            "cache_prompt": False,
            "return_tokens": True,
        },
    )
    timings = answer.get("timings") or {}
    if "predicted_ms" not in timings:
        raise FailureError("llama-server's answer has no timings, expected them in `timings`")
    return Answer(
        tokens=tuple(answer.get("tokens", ())),
        predicted_n=int(timings["predicted_n"]),
        predicted_ms=float(timings["predicted_ms"]),
    )


def same_tokens(a: Lane, b: Lane) -> tuple[int, int]:
    """Count prompts with the same tokens in every repetition of both lanes.

    Returns:
        How many, and of how many.
    """
    prompts = zip(*a.answers, *b.answers, strict=True)
    same = [len({answer.tokens for answer in answers}) == 1 for answers in prompts]
    return sum(same), len(same)


def speed_ratio(fast: Lane, slow: Lane) -> tuple[float, float, float] | None:
    """Compare two lanes repetition by repetition.

    Returns:
        Median, smallest and largest of the ratios of tokens per second; None without answers.
    """
    pairs = zip(fast.per_repetition, slow.per_repetition, strict=True)
    ratios = [f / s for f, s in pairs if f and s]
    return (median(ratios), min(ratios), max(ratios)) if ratios else None


def _count(lane: Lane, before: dict[str, float], after: dict[str, float]) -> None:
    def grown(name: str) -> int:
        return int(after.get(name, 0.0) - before.get(name, 0.0))

    lane.drafts, lane.drafted, lane.accepted = grown(_DRAFTS), grown(_DRAFTED), grown(_ACCEPTED)
    positions = {int(m[1]): name for name in after if (m := _PER_POSITION.match(name))}
    lane.accepted_per_position = [grown(positions[i]) for i in sorted(positions)]
