"""Does greedy speculative decoding give the text of greedy plain decoding?

Where the texts part, the prefix is scored again by the target alone: token by token as plain
decoding did, and in the same blocks as verification did. Only if the target alone then chooses the
same two tokens is the difference a `tie`. See docs/parity.md for the rule and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dflash_convert.errors import FailureError, InputError

from .caps import Cap
from .promptset import Prompt
from .rescore import Rescorer, Round, rescorer
from .text import TokenText, encode_prompt, usable_context

if TYPE_CHECKING:
    import numpy as np

    from .llama import DFlashLlama

IDENTICAL = "identical"
TIE = "tie"
MISMATCH = "mismatch"
VERDICTS = (IDENTICAL, TIE, MISMATCH)


@dataclass(frozen=True)
class Judgement:
    """What re-scoring says about one difference.

    Attributes:
        verdict: `tie` or `mismatch`.
        reason: Why, in one sentence.
        margin: A[plain token] - A[speculative token]; A are the logits of plain decoding.
        margin_blocks: B[speculative token] - B[plain token]; B are those of block decoding.
        delta: Largest |A - B| over the vocabulary.
        bound: 2 * delta; no rounding of this size can undo a larger margin.
    """

    verdict: str
    reason: str
    margin: float | None = None
    margin_blocks: float | None = None
    delta: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class Difference:
    """The first place where the two texts of a prompt part.

    Attributes:
        index: Counted in generated tokens from 0.
        plain, speculative: The two tokens; None where a text had already ended.
        plain_text, speculative_text: The same as text.
    """

    index: int
    plain: int | None
    speculative: int | None
    plain_text: str
    speculative_text: str
    judgement: Judgement


@dataclass(frozen=True)
class PromptParity:
    """The comparison of one prompt."""

    id: str
    klass: str
    verdict: str
    n_prompt: int
    n_plain: int
    n_speculative: int
    plain_stats: dict[str, Any]
    stats: dict[str, Any]
    difference: Difference | None = None


@dataclass
class ParityReport:
    """All prompts of one run."""

    cap: Cap
    n_draft: int
    n_predict: int
    prompts: list[PromptParity] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Number of prompts per verdict."""
        return {v: sum(p.verdict == v for p in self.prompts) for v in VERDICTS}

    @property
    def compared(self) -> int:
        """Tokens compared: all up to the first difference of each prompt, that one included."""
        ends = (p.difference.index + 1 if p.difference else p.n_plain for p in self.prompts)
        return sum(ends)

    @property
    def verdict(self) -> str:
        """The worst verdict of any prompt."""
        return next((v for v in reversed(VERDICTS) if self.counts[v]), IDENTICAL)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data; keys are documented in docs/parity.md."""
        results = []
        for prompt in self.prompts:
            entry = asdict(prompt)
            entry["class"] = entry.pop("klass")
            difference = entry.pop("difference")
            if difference is not None:
                difference |= difference.pop("judgement")
                del difference["verdict"]
            entry["first_difference"] = difference
            results.append(entry)
        return {
            "verdict": self.verdict,
            "counts": self.counts,
            "n_draft": self.n_draft,
            "n_predict": self.n_predict,
            "delta_cap": asdict(self.cap),
            "prompts": results,
        }


def judge(a: np.ndarray, b: np.ndarray, plain: int, speculative: int, cap: float) -> Judgement:
    """Decide whether rounding explains that two decoders chose different tokens.

    It does if the target alone, without any draft, chooses the one token in passes of one row and
    the other in passes of a block, and if the two scorings are no further apart than rounding.

    Args:
        a: float32 [n_vocab], logits of the common prefix scored in the passes of plain decoding.
        b: float32 [n_vocab], the same scored in the passes of speculative decoding.
        plain: Token that plain decoding chose.
        speculative: Token that speculative decoding chose.
        cap: Largest |a - b| that may count as rounding.
    """
    import numpy as np

    both_ruled_out = np.isneginf(a) & np.isneginf(b)
    with np.errstate(invalid="ignore"):
        distance = np.abs(np.where(both_ruled_out, 0.0, a.astype(np.float64) - b))
    delta = float(distance.max())
    if not np.isfinite(delta):
        return Judgement(MISMATCH, "the target's logits are not finite")
    margin = float(a[plain]) - float(a[speculative])
    margin_blocks = float(b[speculative]) - float(b[plain])
    bound = 2.0 * delta
    if a[plain] < a.max():
        reason = "the target alone, one row at a time, does not choose the plain token"
    elif b[speculative] < b.max():
        reason = "the target alone, in the same blocks, does not choose the speculative token"
    elif delta > cap:
        reason = f"blocks change a logit by {delta:.3g}, more than the {cap:.3g} of rounding"
    else:
        reason = (
            f"the target alone does the same; margin {margin:.3g}, bound {bound:.3g} "
            f"(largest change of a logit {delta:.3g})"
        )
        return Judgement(TIE, reason, margin, margin_blocks, delta, bound)
    return Judgement(MISMATCH, reason, margin, margin_blocks, delta, bound)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first index at which two texts differ; None if they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def greedy(
    llm: DFlashLlama, prompt: Sequence[int], n_predict: int
) -> tuple[list[int], list[Round]]:
    """Decode greedily from an empty memory.

    Returns:
        At most `n_predict` tokens, an end-of-generation token included, and the passes of the
        target that produced all but the first of them.

    Raises:
        InputError: The prompt leaves no room in the context.
    """
    import llama_cpp

    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    n_ctx = usable_context(llm)
    room = min(n_predict, n_ctx - len(prompt))
    if room < 1:
        raise InputError(
            f"the prompt has {len(prompt)} tokens, expected fewer than the context's {n_ctx}",
            hint="use a larger -c/--ctx-size",
        )
    llm.reset()
    tokens: list[int] = []
    rounds: list[Round] = []
    drafted = 0
    # the first token comes from the prompt's logits; the target's own token ends every pass
    round_over = False
    generator = llm.generate(prompt, temp=0.0)
    try:
        for token in generator:
            if round_over:
                before, drafted = drafted, llm.last_stats.drafted if llm.last_stats else 0
                rounds.append(Round(len(tokens) - 1, 1 + drafted - before))
            round_over = not llm.last_token_drafted
            tokens.append(token)
            if len(tokens) >= room or llama_cpp.llama_vocab_is_eog(vocab, token):
                break
    finally:
        generator.close()
    return tokens, rounds


@dataclass(frozen=True)
class PlainTexts:
    """Plain greedy texts, per prompt: its tokens, the text with its passes, the statistics."""

    prompts: list[list[int]] = field(default_factory=list)
    texts: list[tuple[list[int], list[Round]]] = field(default_factory=list)
    stats: list[dict[str, Any]] = field(default_factory=list)


def plain_texts(
    llm: DFlashLlama,
    prompts: Sequence[Prompt],
    n_predict: int,
    chat: bool | None = None,
    on_decoded: Callable[[], None] = lambda: None,
) -> PlainTexts:
    """Decode every prompt plainly; see `check_parity`. Leaves `speculate` off."""
    llm.speculate = False
    plain = PlainTexts([encode_prompt(llm, p.text, chat=chat) for p in prompts])
    for tokens in plain.prompts:
        plain.texts.append(greedy(llm, tokens, n_predict))
        plain.stats.append(llm.last_stats.to_json() if llm.last_stats else {})
        on_decoded()
    return plain


def check_parity(
    llm: DFlashLlama,
    prompts: Sequence[Prompt],
    *,
    n_predict: int,
    cap: Cap,
    chat: bool | None = None,
    plain: PlainTexts | None = None,
    on_decoded: Callable[[], None] = lambda: None,
) -> ParityReport:
    """Decode every prompt plainly and speculatively by the same build and compare.

    Args:
        llm: An open pair; `speculate` is switched off and on again.
        prompts: What to decode.
        n_predict: Tokens per prompt.
        cap: From `delta_cap`.
        chat: See `text.encode_prompt`.
        plain: What `plain_texts` gave for the same target and settings; None to decode it here.
        on_decoded: Called after each decoding: one per prompt, and one more without `plain`.
    """
    plain = plain or plain_texts(llm, prompts, n_predict, chat, on_decoded)
    llm.speculate = True
    report = ParityReport(cap, llm.n_draft or 0, n_predict)
    rows = zip(prompts, plain.prompts, plain.texts, plain.stats, strict=True)
    for prompt, tokens, expected, before in rows:
        found = greedy(llm, tokens, n_predict)
        stats = llm.last_stats.to_json() if llm.last_stats else {}
        index = first_difference(expected[0], found[0])
        difference = None
        if index is not None:
            with rescorer(llm) as scorer:
                judgement = _rescore(scorer, tokens, expected, found, index, cap)
            difference = describe(llm, expected[0], found[0], index, judgement)
        report.prompts.append(
            PromptParity(
                id=prompt.id,
                klass=prompt.klass,
                verdict=difference.judgement.verdict if difference else IDENTICAL,
                n_prompt=len(tokens),
                n_plain=len(expected[0]),
                n_speculative=len(found[0]),
                plain_stats=before,
                stats=stats,
                difference=difference,
            )
        )
        on_decoded()
    if not any(p.stats.get("draft_n") for p in report.prompts):
        # "identical" would be true but say nothing
        reason = next((p.stats.get("reason") for p in report.prompts if p.stats), None)
        raise FailureError(
            f"no token was drafted, so there is nothing to compare ({reason or 'texts too short'})",
            hint="use longer prompts, a larger -n/--n-predict, or see `dflash-cpp info`",
        )
    return report


def _rescore(
    scorer: Rescorer,
    prompt: Sequence[int],
    plain: tuple[Sequence[int], Sequence[Round]],
    speculative: tuple[Sequence[int], Sequence[Round]],
    index: int,
    cap: Cap,
) -> Judgement:
    for which, (text, _) in (("plain", plain), ("speculative", speculative)):
        if index >= len(text):
            return Judgement(MISMATCH, f"the {which} text ends here, the other one goes on")
    prefix = plain[0][:index]
    a, b = (scorer.score(prompt, prefix, rounds) for _, rounds in (plain, speculative))
    return judge(a, b, plain[0][index], speculative[0][index], cap.value)


def describe(
    llm: DFlashLlama,
    plain: Sequence[int],
    speculative: Sequence[int],
    index: int,
    judgement: Judgement,
) -> Difference:
    """Return the difference of two texts at `index`, with its tokens as text."""

    def at(tokens: Sequence[int]) -> tuple[int | None, str]:
        if index >= len(tokens):
            return None, ""
        piece = TokenText(llm, special=True).piece(tokens[index])
        return tokens[index], piece.decode("utf-8", "replace")

    (a, a_text), (b, b_text) = at(plain), at(speculative)
    return Difference(index, a, b, a_text, b_text, judgement)


# --- for people -----------------------------------------------------------------------------------


def table(report: ParityReport) -> tuple[list[str], list[list[object]], list[str]]:
    """Return columns, rows and right-aligned columns of the report's table."""
    columns = ["prompt", "class", "tokens", "accepted length", "verdict", "first difference"]
    rows: list[list[object]] = []
    for prompt in report.prompts:
        length = prompt.stats.get("draft_mean_accepted_length")
        where = ""
        if prompt.difference is not None:
            d = prompt.difference
            where = f"token {d.index}: {d.plain_text!r} / {d.speculative_text!r}"
        rows.append(
            [
                prompt.id,
                prompt.klass,
                prompt.n_speculative,
                "" if length is None else f"{length:.2f}",
                prompt.verdict,
                where,
            ]
        )
    return columns, rows, ["tokens", "accepted length"]


def summary(report: ParityReport) -> list[str]:
    """Return the lines below the table: every difference explained, then the counts."""
    lines = []
    for prompt in report.prompts:
        if prompt.difference is not None:
            d = prompt.difference
            lines.append(f"{prompt.id}: {prompt.verdict} at token {d.index}: {d.judgement.reason}")
    counts = ", ".join(f"{n} {verdict}" for verdict, n in report.counts.items())
    lines.append(f"{len(report.prompts)} prompts: {counts}")
    cap = report.cap
    origin = "" if cap.measured else " (not measured for this backend and type)"
    if cap.value == 0:
        lines.append("scoring in blocks is exact here, so no difference is excused as rounding")
    elif lines[:-1]:
        lines.append(f"rounding cap for {cap.backend} {cap.type}: {cap.value:g}{origin}")
    return lines
