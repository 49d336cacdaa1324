"""Does a draft fit a target: first by the files, then by what it proposes.

Files tell sizes, vocabularies and layers. They do not tell a draft that was trained for another
model of the same shape, or for another revision, or that is broken. For that a few built-in prompts
are continued greedily, with a draft of full length in every round; since each round starts from the
target's own text, the share of accepted proposals at position 1 says how often the draft knows the
target's next token, whatever it got wrong before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_convert.errors import FailureError

from .rounds import Round, greedy_rounds
from .text import encode_prompt

if TYPE_CHECKING:
    from .llama import DFlashLlama
    from .promptset import Prompt

FIT = "fit"
MISFIT = "misfit"  # by the files alone
WRONG = "wrong"
DEAD = "dead"

N_PROMPTS = 4
N_PREDICT = 64

# Accepted share at position 1 below which a draft is taken to be made for something else. Measured
# with the demo's target and its draft, a weak one: 0.49; the same weights fed with the target's
# layers in reverse order: 0.12. Chosen between the two, nearer to the lower one, so that a weak
# draft is not called wrong. What is less wrong is not found: with each layer taken one too early
# it was 0.49, with layers 3 to 5 too early 0.40. No wrong revision of a real model was measured.
MIN_FIRST = 0.2
# Accepted at position 1 by luck: a draft that is right no more often than by drawing tokens of the
# vocabulary blindly knows nothing. So many hits or more would have this probability.
LUCK = 0.01
# A draft whose first proposal is nearly always the same token does not look at the text, unless the
# text really is that token over and over.
SAME_SHARE = 0.9
TEXT_SHARE = 0.5
# Share of rounds without a valid proposal, or with values that are no numbers, that is no accident.
BAD_SHARE = 0.1


@dataclass(frozen=True)
class Counts:
    """What was drafted and accepted in some rounds.

    Attributes:
        rounds: Rounds; `invalid` of them gave no valid proposal, `not_finite` had logits that are
            NaN or infinite.
        tokens: New tokens of the text.
        per_position_drafted, per_position_accepted: By position of the block, from 1.
    """

    rounds: int
    invalid: int
    not_finite: int
    tokens: int
    per_position_drafted: tuple[int, ...]
    per_position_accepted: tuple[int, ...]

    @property
    def drafted(self) -> int:
        """Tokens proposed."""
        return sum(self.per_position_drafted)

    @property
    def accepted(self) -> int:
        """Tokens accepted."""
        return sum(self.per_position_accepted)

    @property
    def first(self) -> float:
        """Accepted share at position 1, 0 to 1; 0 if nothing was drafted."""
        n = self.per_position_drafted[0] if self.per_position_drafted else 0
        return self.per_position_accepted[0] / n if n else 0.0

    @property
    def mean_length(self) -> float | None:
        """Tokens per round, the target's own included."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain data, under the names of llama-server where it has them."""
        return {
            "draft_rounds": self.rounds,
            "draft_rounds_invalid": self.invalid,
            "draft_rounds_not_finite": self.not_finite,
            "emitted_n": self.tokens,
            "draft_n": self.drafted,
            "draft_n_accepted": self.accepted,
            "draft_n_per_pos": list(self.per_position_drafted),
            "draft_n_accepted_per_pos": list(self.per_position_accepted),
            "first_acceptance": self.first,
            "draft_mean_accepted_length": self.mean_length,
        }


@dataclass(frozen=True)
class PairCheck:
    """The answer.

    Attributes:
        verdict: `fit`, `misfit` (by the files), `wrong` (another model or revision) or `dead`.
        reasons: Sentences behind a verdict other than `fit`.
        total: Counts of all prompts; None where the files already do not fit.
        prompts: Counts by prompt.
    """

    verdict: str
    reasons: tuple[str, ...]
    total: Counts | None = None
    prompts: tuple[tuple[Prompt, Counts], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain data."""
        return {
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "measured": self.total and self.total.to_json(),
            "prompts": [{"id": p.id, "class": p.klass} | c.to_json() for p, c in self.prompts],
            "thresholds": {
                "first_acceptance": MIN_FIRST,
                "luck": LUCK,
                "same_proposal": SAME_SHARE,
                "bad_rounds": BAD_SHARE,
            },
        }


def check_pair(
    llm: DFlashLlama,
    prompts: Sequence[Prompt],
    *,
    n_predict: int = N_PREDICT,
    chat: bool | None = None,
    on_prompt: Callable[[], object] = lambda: None,
) -> PairCheck:
    """Measure an open pair and judge it.

    Args:
        llm: A pair opened with `adaptive=False` and `draft_trace=True`.
        prompts: Texts to continue.
        chat: As `encode_prompt`.
        n_predict: Tokens per prompt, about; a text may end sooner.
        on_prompt: Called after every prompt.

    Raises:
        FailureError: No text gave a single round.
    """
    every: list[Round] = []
    counted = []
    for prompt in prompts:
        rounds = list(greedy_rounds(llm, encode_prompt(llm, prompt.text, chat=chat), n_predict))
        every += rounds
        counted.append((prompt, count(rounds)))
        on_prompt()
    if not every:
        raise FailureError(
            f"the target ends its answer at once in each of {len(prompts)} prompts, expected text "
            "to compare proposals with",
            hint="check the target alone: llama-cli -m TARGET.gguf",
        )
    verdict, reason = judge(every, llm.n_vocab())
    return PairCheck(verdict, (reason,) if reason else (), count(every), tuple(counted))


def count(rounds: Sequence[Round]) -> Counts:
    """Count what some rounds drafted and accepted."""
    import numpy as np

    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for r in rounds:
        drafted.update(range(len(r.trace.draft)))
        accepted.update(range(r.trace.n_accepted if r.trace.draft else 0))
    width = max(drafted, default=-1) + 1
    return Counts(
        rounds=len(rounds),
        invalid=sum(r.invalid for r in rounds),
        not_finite=sum(not np.isfinite(r.trace.logits).all() for r in rounds),
        tokens=sum(len(r.tokens) for r in rounds),
        per_position_drafted=tuple(drafted[i] for i in range(width)),
        per_position_accepted=tuple(accepted[i] for i in range(width)),
    )


def judge(rounds: Sequence[Round], n_vocab: int) -> tuple[str, str | None]:
    """Judge what was measured; the constants above say where the limits are, and why there.

    Args:
        rounds: At least one.
        n_vocab: Tokens of the vocabulary.

    Returns:
        The verdict, and the reason if it is not `fit`.
    """
    counts = count(rounds)
    bad = max(counts.invalid, counts.not_finite)
    if bad > BAD_SHARE * counts.rounds:
        return DEAD, (
            f"the draft computes no valid proposal, or values that are no numbers, in {bad} of "
            f"{counts.rounds} rounds: its weights are damaged, or overflow in their type"
        )
    first = [r.trace.draft[0] for r in rounds if r.trace.draft]
    hits = counts.per_position_accepted[0] if first else 0
    if at_least(hits, len(first), 1 / n_vocab) > LUCK:
        return DEAD, (
            f"{hits} of {len(first)} first proposals are accepted, no more than by blind guessing: "
            "the draft is untrained or damaged, or made for a model that has nothing to do with "
            "this target"
        )
    said = Counter(r.tokens[0] for r in rounds)
    ((token, same),) = Counter(first).most_common(1)
    if same >= SAME_SHARE * len(first) and said[token] < TEXT_SHARE * counts.rounds:
        return DEAD, (
            f"the first proposal is the same token ({token}) in {same} of {len(first)} rounds: the "
            "draft does not look at the text"
        )
    if counts.first < MIN_FIRST:
        return WRONG, (
            f"{hits} of {len(first)} first proposals are accepted ({100 * counts.first:.0f} %), "
            f"expected {100 * MIN_FIRST:.0f} % at least: the draft was probably trained for "
            "another model of this shape, or for another revision of this one"
        )
    return FIT, None


def at_least(hits: int, n: int, p: float) -> float:
    """Return the probability of `hits` or more successes in `n` trials of probability `p`."""
    fewer = (math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(hits))
    return 1.0 - math.fsum(fewer)


def table(result: PairCheck) -> tuple[list[str], list[list[str]], list[str]]:
    """Return headings, rows and right-aligned headings of a table of the prompts."""
    columns = ["prompt", "tokens", "rounds", "drafted", "accepted", "first", "length"]
    rows = [
        [
            prompt.id,
            str(c.tokens),
            str(c.rounds),
            str(c.drafted),
            str(c.accepted),
            f"{100 * c.first:.0f} %",
            "-" if c.mean_length is None else f"{c.mean_length:.2f}",
        ]
        for prompt, c in result.prompts
    ]
    return columns, rows, columns[1:]


def summary(result: PairCheck) -> list[str]:
    """Return the lines that follow the table."""
    lines = []
    if (c := result.total) is not None and c.mean_length is not None:
        shares = [
            f"{100 * a / d:.0f}" if d else "-"
            for a, d in zip(c.per_position_accepted, c.per_position_drafted, strict=True)
        ]
        lines.append(
            f"mean accepted length {c.mean_length:.2f}; accepted per position, %: "
            f"{' '.join(shares) or '-'}"
        )
    words = {
        FIT: "the draft fits the target",
        MISFIT: "draft and target do not fit",
        WRONG: "wrong target or wrong revision",
        DEAD: "dead draft",
    }
    if len(result.reasons) == 1:
        lines.append(f"{words[result.verdict]}: {result.reasons[0]}")
    else:
        lines.append(words[result.verdict] + (":" if result.reasons else ""))
        lines += [f"  - {reason}" for reason in result.reasons]
    return lines
