"""What one call of `DFlashLlama.generate` drafted, accepted and spent."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Session

MODE_DRAFT = "draft-dflash"
MODE_PLAIN = "plain"
RULE_GREEDY = "greedy"
RULE_MATCH = "match"
RULE_REJECT = "reject"


@dataclass(frozen=True)
class DraftStats:
    """Statistics of one generation. Times are milliseconds; None means unknown.

    Attributes:
        mode: `draft-dflash`, or `plain` when speculation did not apply.
        reason: Why it was plain, or what the draft had to do without; None if neither.
        rule: `greedy` (arg-max), `match` (a draft token counts if the sampler chain chooses it) or
            `reject` (rejection sampling with the draft's probabilities).
        rounds: Verification passes with at least one drafted token.
        plain_rounds: Passes of the target without a draft, those of the prompt excepted.
        skipped_rounds: Of these, the ones where a draft would not have paid.
        drafted, accepted: Tokens proposed by the draft; of these, accepted by the target.
        reject_rounds: Of the rounds, those verified by rejection sampling.
        greedy_draft_rounds: Of these, those with the draft's likeliest tokens, not drawn ones.
        visited: Positions where the distributions of target (p) and draft (q) were compared.
        overlap: Mean sum of min(p, q) there: how often a drawn draft token is accepted.
        top: Mean p of the draft's likeliest token there: how often that one is accepted.
        reach: Mean p of all candidates together there: what no draft from them can exceed.
        emitted: Tokens handed to the caller. The last block may hold more than the caller took.
        per_position_drafted, per_position_accepted: The same per position of the block, from 1.
        prompt_tokens: Tokens of the prompt that were decoded; a kept prefix does not count.
        prompt_ms: Until the first token was there: target passes, injection, first sample.
        inject_ms: Taking target features into the draft, the prompt's included.
        draft_ms, verify_ms, sample_ms: Draft passes, target passes, sampling of visited rows.
        total_ms: Time inside the call; the caller's own time between tokens is left out.
    """

    mode: str
    reason: str | None
    rule: str
    rounds: int = 0
    plain_rounds: int = 0
    skipped_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    reject_rounds: int = 0
    greedy_draft_rounds: int = 0
    visited: int = 0
    overlap: float | None = None
    top: float | None = None
    reach: float | None = None
    emitted: int = 0
    per_position_drafted: tuple[int, ...] = ()
    per_position_accepted: tuple[int, ...] = ()
    prompt_tokens: int = 0
    prompt_ms: float = 0.0
    inject_ms: float | None = None
    draft_ms: float | None = None
    verify_ms: float | None = None
    sample_ms: float | None = None
    total_ms: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of the drafted tokens, 0 to 1; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens per verification, the target's own included: 1 + accepted / rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def generation_ms(self) -> float:
        """Time after the first token, in milliseconds."""
        return max(0.0, self.total_ms - self.prompt_ms)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first per second after the first; None for fewer than two tokens."""
        if self.emitted < 2 or self.generation_ms <= 0.0:
            return None
        return 1e3 * (self.emitted - 1) / self.generation_ms

    def to_json(self) -> dict[str, Any]:
        """Return the statistics under the names of llama-server's `timings`, null for unknown.

        `predicted_n` and `predicted_ms` leave out the first token, which belongs to the prompt.
        """
        spoke = self.mode == MODE_DRAFT
        return {
            "mode": self.mode,
            "reason": self.reason,
            "rule": self.rule,
            "prompt_n": self.prompt_tokens,
            "prompt_ms": self.prompt_ms,
            "predicted_n": max(0, self.emitted - 1),
            "predicted_ms": self.generation_ms,
            "predicted_per_second": self.tokens_per_second,
            "emitted_n": self.emitted,
            "total_ms": self.total_ms,
            "draft_rounds": self.rounds if spoke else None,
            "draft_plain_rounds": self.plain_rounds if spoke else None,
            "draft_n_skipped": self.skipped_rounds if spoke else None,
            "draft_n": self.drafted if spoke else None,
            "draft_n_accepted": self.accepted if spoke else None,
            "draft_n_rounds_reject": self.reject_rounds if spoke else None,
            "draft_n_rounds_greedy": self.greedy_draft_rounds if spoke else None,
            "draft_overlap": self.overlap,
            "draft_top": self.top,
            "draft_reach": self.reach,
            "draft_acceptance_rate": self.acceptance_rate,
            "draft_mean_accepted_length": self.mean_accepted_length,
            "draft_n_per_pos": list(self.per_position_drafted) if spoke else None,
            "draft_n_accepted_per_pos": list(self.per_position_accepted) if spoke else None,
            "draft_inject_ms": self.inject_ms,
            "draft_ms": self.draft_ms,
            "draft_verify_ms": self.verify_ms,
            "draft_sample_ms": self.sample_ms,
        }


class Recorder:
    """Collects the statistics of one generation while it runs.

    Args:
        rule: `greedy` or `match`.
        reason: Why the generation is plain; None if it drafts.
        session: The session that drafts; None for a plain generation.
    """

    def __init__(self, rule: str, reason: str | None, session: Session | None):
        self.rule = rule
        self.reason = reason
        self.emitted = 0
        self.prompt_tokens = 0
        self._session = session
        self._n_draft = 0 if session is None else session.n_draft
        self._before = None if session is None else session.stats()
        self._prompt_ms: float | None = None
        self._busy_ms = 0.0
        self._since: float | None = None
        self._final: DraftStats | None = None

    def resume(self) -> None:
        """Start the clock: the caller asked for a token."""
        self._since = time.perf_counter()

    def pause(self) -> None:
        """Stop the clock: a token goes to the caller."""
        if self._since is not None:
            self._busy_ms += 1e3 * (time.perf_counter() - self._since)
            self._since = None
        if self._prompt_ms is None:
            self._prompt_ms = self._busy_ms
        self.emitted += 1

    def fed(self, n_tokens: int) -> None:
        """Count tokens that the target decoded before the first one was there."""
        if self._prompt_ms is None and self._final is None:
            self.prompt_tokens += n_tokens

    def note(self, reason: str) -> None:
        """Say what the draft has to do without."""
        self.reason = reason

    def finish(self) -> None:
        """Freeze the statistics; later calls of the session no longer count."""
        if self._final is None:
            self._final = self.snapshot()
            self._session = None

    def snapshot(self) -> DraftStats:
        """Return the statistics as they are now."""
        if self._final is not None:
            return self._final
        running = 0.0 if self._since is None else 1e3 * (time.perf_counter() - self._since)
        total = self._busy_ms + running
        common: dict[str, Any] = {
            "reason": self.reason,
            "rule": self.rule,
            "emitted": self.emitted,
            "prompt_tokens": self.prompt_tokens,
            "prompt_ms": total if self._prompt_ms is None else self._prompt_ms,
            "total_ms": total,
        }
        before, session = self._before, self._session
        if before is None or session is None or session.closed:
            return DraftStats(mode=MODE_PLAIN if before is None else MODE_DRAFT, **common)
        now = session.stats()
        span = range(self._n_draft)
        if now.n_rounds_reject > before.n_rounds_reject:
            common["rule"] = RULE_REJECT
        visited = now.n_visited - before.n_visited
        if visited:
            common["overlap"] = (now.sum_overlap - before.sum_overlap) / visited
            common["top"] = (now.sum_top - before.sum_top) / visited
            common["reach"] = (now.sum_reach - before.sum_reach) / visited
        return DraftStats(
            mode=MODE_DRAFT,
            rounds=now.n_rounds - before.n_rounds,
            plain_rounds=now.n_plain - before.n_plain,
            skipped_rounds=now.n_skipped - before.n_skipped,
            drafted=now.n_drafted - before.n_drafted,
            accepted=now.n_accepted - before.n_accepted,
            reject_rounds=now.n_rounds_reject - before.n_rounds_reject,
            greedy_draft_rounds=now.n_rounds_greedy - before.n_rounds_greedy,
            visited=visited,
            per_position_drafted=tuple(
                now.n_drafted_per_pos[i] - before.n_drafted_per_pos[i] for i in span
            ),
            per_position_accepted=tuple(
                now.n_accepted_per_pos[i] - before.n_accepted_per_pos[i] for i in span
            ),
            inject_ms=now.t_inject_ms - before.t_inject_ms,
            draft_ms=now.t_draft_ms - before.t_draft_ms,
            verify_ms=now.t_verify_ms - before.t_verify_ms,
            sample_ms=now.t_sample_ms - before.t_sample_ms,
            **common,
        )
