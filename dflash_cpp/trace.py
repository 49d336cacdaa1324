"""What the draft saw in every round, for people and as JSON; `trace_page` makes a page of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_convert.console import printable

from .rounds import Round
from .text import TokenText

if TYPE_CHECKING:
    from llama_cpp import Llama

ACCEPTED = "accepted"
REJECTED = "rejected"
UNREACHED = "not reached"  # after a rejected proposal: the target was not asked
UNDRAFTED = "not drafted"  # the draft was cut before this position

N_CANDIDATES = 16  # shown of a draft without selector, which scores the whole vocabulary


@dataclass(frozen=True)
class Candidate:
    """A token that the draft considered.

    Attributes:
        score: What decides: logit + bilinear term of the selector; None without a selector.
        logit: After output multiplier and soft cap.
    """

    token: int
    score: float | None
    logit: float


@dataclass(frozen=True)
class Position:
    """One position of a block.

    Attributes:
        number: From 1.
        candidates: By descending logit.
        chosen: The proposal; None where the draft was cut.
        outcome: `accepted`, `rejected`, `not reached` or `not drafted`.
        target: The target's token here; None where it was not asked.
    """

    number: int
    candidates: tuple[Candidate, ...]
    chosen: int | None
    outcome: str
    target: int | None

    @property
    def rank(self) -> int | None:
        """Place of the target's token among the candidates, from 1; None if it is not there."""
        ids = [c.token for c in self.candidates]
        return ids.index(self.target) + 1 if self.target in ids else None


@dataclass(frozen=True)
class TracedRound:
    """One round.

    Attributes:
        number: From 1.
        pos, anchor: Position and id of the last token of the text before the round.
        positions: Of the block, the anchor's left out.
        n_drafted, n_accepted: Proposals; of these, accepted.
        said: The target's own token after them; None if the text ends with a proposal.
        invalid: The draft gave no valid proposal.
    """

    number: int
    pos: int
    anchor: int
    positions: tuple[Position, ...]
    n_drafted: int
    n_accepted: int
    said: int | None
    invalid: bool

    def to_json(self) -> dict[str, Any]:
        """Return the round as plain data."""
        return {
            "pos": self.pos,
            "anchor": self.anchor,
            "draft_n": self.n_drafted,
            "draft_n_accepted": self.n_accepted,
            "target": self.said,
            "invalid": self.invalid,
            "positions": [
                {
                    "position": p.number,
                    "chosen": p.chosen,
                    "outcome": p.outcome,
                    "target": p.target,
                    "target_rank": p.rank,
                    "candidates": [c.token for c in p.candidates],
                    "scores": [c.score for c in p.candidates],
                    "logits": [c.logit for c in p.candidates],
                }
                for p in self.positions
            ],
        }


@dataclass(frozen=True)
class Trace:
    """A text and how it came about.

    Attributes:
        rounds: In order.
        tokens: New tokens of the text, the one before the first round included.
        accepted: For each whether it was an accepted proposal.
        pieces: Bytes of every token that occurs, control tokens spelt out.
    """

    rounds: tuple[TracedRound, ...]
    tokens: tuple[int, ...]
    accepted: tuple[bool, ...]
    pieces: dict[int, bytes]

    def text(self, token: int | None) -> str:
        """Return a token's text for people; an empty string for None."""
        return "" if token is None else visible(self.pieces[token])

    def to_json(self) -> dict[str, Any]:
        """Return the trace as plain data; pieces that are not UTF-8 have `\\xNN` for such bytes."""
        return {
            "tokens": list(self.tokens),
            "accepted": [int(a) for a in self.accepted],
            "rounds": [r.to_json() for r in self.rounds],
            "pieces": {
                str(token): piece.decode("utf-8", "backslashreplace")
                for token, piece in sorted(self.pieces.items())
            },
        }


def visible(piece: bytes) -> str:
    """Return a token's bytes as one line of text: escapes for controls and broken UTF-8."""
    text = piece.decode("utf-8", "backslashreplace").replace("\n", "\\n").replace("\t", "\\t")
    return printable(text)


def make_trace(llm: Llama, rounds: Sequence[Round]) -> Trace:
    """Arrange rounds for showing.

    Args:
        llm: The target; only its vocabulary is used.
        rounds: From `greedy_rounds`.
    """
    traced = tuple(_traced(i, r) for i, r in enumerate(rounds, 1))
    tokens = [rounds[0].trace.anchor] if rounds else []
    accepted = [False] * len(tokens)
    for found, shown in zip(rounds, traced, strict=True):
        tokens += found.tokens
        accepted += [i < shown.n_accepted for i in range(len(found.tokens))]
    used = set(tokens)
    for r in traced:
        for p in r.positions:
            used.update(c.token for c in p.candidates)
            used.update(t for t in (p.chosen, p.target) if t is not None)
    words = TokenText(llm, special=True)
    pieces = {token: words.piece(token) for token in used}
    return Trace(traced, tuple(tokens), tuple(accepted), pieces)


def _traced(number: int, r: Round) -> TracedRound:
    draft = r.trace.draft
    n_accepted = r.trace.n_accepted if draft else 0
    positions = []
    for i in range(len(r.trace.logits)):
        if i < n_accepted:
            outcome = ACCEPTED
        elif i >= len(draft):
            outcome = UNDRAFTED
        elif i == n_accepted and r.said is not None:
            outcome = REJECTED
        else:
            outcome = UNREACHED
        chosen = draft[i] if i < len(draft) else None
        target = chosen if i < n_accepted else r.said if i == n_accepted else None
        positions.append(Position(i + 1, _candidates(r, i), chosen, outcome, target))
    return TracedRound(
        number=number,
        pos=r.trace.pos,
        anchor=r.trace.anchor,
        positions=tuple(positions),
        n_drafted=len(draft),
        n_accepted=n_accepted,
        said=r.said,
        invalid=r.invalid,
    )


def _candidates(r: Round, i: int) -> tuple[Candidate, ...]:
    import numpy as np

    ids, logits = r.trace.candidates[i], r.trace.logits[i]
    scores: list[float | None] = [float(s) for s in r.trace.scores[i]]
    if not len(ids):
        ids = np.argsort(-logits, kind="stable")[:N_CANDIDATES].astype(np.int32)
        scores = [None] * len(ids)
    return tuple(
        Candidate(int(token), score, float(logits[token]))
        for token, score in zip(ids, scores, strict=True)
    )


# --- for people -----------------------------------------------------------------------------------

COLUMNS = ("position", "outcome", "rank", "candidate", "id", "score", "logit", "")
RIGHT = ("position", "rank", "id", "score", "logit")


def headline(trace: Trace, r: TracedRound) -> str:
    """Return one line about a round."""
    line = f"round {r.number}, after {r.pos + 1} tokens, the last one `{trace.text(r.anchor)}`: "
    if r.invalid:
        line += "no valid proposal, "
    line += f"drafted {r.n_drafted}, accepted {r.n_accepted}"
    return line if r.said is None else f"{line}, then the target says `{trace.text(r.said)}`"


def rows(trace: Trace, r: TracedRound, top: int = N_CANDIDATES) -> list[list[str]]:
    """Return the rows of a round's table, under `COLUMNS`: one for each candidate.

    Args:
        trace: The whole.
        r: One of its rounds.
        top: Candidates of each position at most; what was chosen or said is shown in any case.
    """
    lines = []
    for p in r.positions:
        head = [str(p.number), p.outcome]
        for rank, c in enumerate(p.candidates, 1):
            notes = note(p, c.token)
            if rank > top and not notes:
                continue
            score = "" if c.score is None else f"{c.score:.3f}"
            cells = [str(rank), trace.text(c.token), str(c.token), score, f"{c.logit:.3f}", notes]
            lines.append([*head, *cells])
            head = ["", ""]
        if p.target is not None and p.rank is None:
            cells = ["-", trace.text(p.target), str(p.target), "", "", "target, no candidate"]
            lines.append([*head, *cells])
    return lines


def note(p: Position, token: int) -> str:
    """Say what a candidate was: `chosen`, `target`, both or nothing."""
    return ", ".join(
        word
        for word, t in (("chosen", p.chosen), ("target", p.target))
        if t is not None and t == token
    )


def summary(trace: Trace) -> list[str]:
    """Return the lines that follow the tables."""
    drafted = sum(r.n_drafted for r in trace.rounds)
    accepted = sum(r.n_accepted for r in trace.rounds)
    n = len(trace.rounds)
    if not n:
        return ["the text ends before a round could begin"]
    asked = [p for r in trace.rounds for p in r.positions if p.outcome == REJECTED]
    among = sum(p.rank is not None for p in asked)
    return [
        f"{n} rounds, drafted {drafted}, accepted {accepted}; mean accepted length "
        f"{1 + accepted / n:.2f}",
        f"where a proposal was rejected, the target's token was a candidate in {among} of "
        f"{len(asked)} cases",
    ]
