"""Greedy texts of the real llama-server with busy slots and a draft, against those without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_convert.errors import FailureError

from .caps import Cap
from .measure import ask
from .parity import (
    IDENTICAL,
    MISMATCH,
    TIE,
    Judgement,
    ParityReport,
    PromptParity,
    describe,
    first_difference,
)
from .rescore import Round, rescorer
from .server import LlamaServer

if TYPE_CHECKING:
    from .llama import DFlashLlama
    from .opening import PairOptions
    from .promptset import Prompt

# Micro-batches no larger than what the kernels for few rows take: how prompts of several slots are
# cut into passes then does not matter (docs/parity.md).
MICRO_BATCH = 64

# of all texts together
_COUNTERS = {
    "draft_rounds": "spec_decode_num_drafts_total",
    "draft_n": "spec_decode_num_draft_tokens_total",
    "draft_n_accepted": "spec_decode_num_accepted_tokens_total",
}

Texts = list[tuple[int, ...]]


def server_texts(
    options: PairOptions,
    prompts: Sequence[Sequence[int]],
    *,
    n_predict: int,
    slots: int = 1,
    n_draft: int | None = None,
    on_text: Callable[[], None] = lambda: None,
) -> tuple[Texts, dict[str, float]]:
    """Let a llama-server continue all prompts greedily, `slots` at a time.

    Args:
        options: What to open; the context is that of one slot.
        prompts: Tokens of each prompt.
        n_predict: Tokens of each text.
        slots: Simultaneous requests.
        n_draft: Tokens drafted in every round; None for no draft.
        on_text: Called after each text.

    Returns:
        The texts, and the server's counters.
    """
    with LlamaServer(_arguments(options, slots, n_draft)) as server:

        def one(prompt: Sequence[int]) -> tuple[int, ...]:
            answer = ask(server, prompt, n_predict)
            on_text()
            return answer.tokens

        with ThreadPoolExecutor(slots) as pool:
            return list(pool.map(one, prompts)), server.metrics()


def _arguments(options: PairOptions, slots: int, n_draft: int | None) -> list[str]:
    facts = options.to_json()
    k, v = options.kv_types or ("F16", "F16")
    words: list[Any] = ["-m", options.model, "-c", options.n_ctx * slots, "-np", slots]
    words += ["-b", MICRO_BATCH, "-ub", MICRO_BATCH, "-t", facts["threads"], "--metrics"]
    words += ["-ngl", options.n_gpu_layers if options.n_gpu_layers >= 0 else 999]
    words += ["-fa", "on" if options.flash_attn else "off", "-ctk", k.lower(), "-ctv", v.lower()]
    if n_draft is not None:
        words += ["-md", options.draft, "--spec-type", "draft-dflash"]
        words += ["--spec-draft-n-max", n_draft, "--spec-draft-adaptive", "off"]
    return [str(word) for word in words]


def compare_slots(
    llm: DFlashLlama,
    prompts: Sequence[Prompt],
    encoded: Sequence[Sequence[int]],
    plain: Texts,
    found: Texts,
    counters: dict[str, float],
    *,
    cap: Cap,
    n_predict: int,
) -> ParityReport:
    """Compare what two servers said.

    The passes of busy slots cannot be repeated, so a difference is a `tie` under a weaker rule:
    the target alone, token by token, chooses the plain token, and the other one lies within twice
    the cap. Where scoring is exact the cap is 0 and every difference is a mismatch.
    """
    report = ParityReport(cap, llm.n_draft or 0, n_predict)
    stats = {name: int(counters.get(counter, 0)) for name, counter in _COUNTERS.items()}
    if not stats["draft_n"]:
        raise FailureError("llama-server drafted no token, so there is nothing to compare")
    for prompt, tokens, a, b in zip(prompts, encoded, plain, found, strict=True):
        index = first_difference(a, b)
        difference = None
        if index is not None:
            judgement = _judge(llm, tokens, a, b, index, cap)
            difference = describe(llm, a, b, index, judgement)
        report.prompts.append(
            PromptParity(
                id=prompt.id,
                klass=prompt.klass,
                verdict=difference.judgement.verdict if difference else IDENTICAL,
                n_prompt=len(tokens),
                n_plain=len(a),
                n_speculative=len(b),
                plain_stats={},
                stats=stats,
                difference=difference,
            )
        )
    return report


def _judge(
    llm: DFlashLlama,
    prompt: Sequence[int],
    plain: Sequence[int],
    found: Sequence[int],
    index: int,
    cap: Cap,
) -> Judgement:
    if index >= min(len(plain), len(found)):
        return Judgement(MISMATCH, "one text ends here, the other one goes on")
    with rescorer(llm) as scorer:
        logits = scorer.score(prompt, plain[:index], [Round(i, 1) for i in range(index)])
    margin = float(logits[plain[index]] - logits[found[index]])
    if not np.isfinite(margin):
        return Judgement(MISMATCH, "the target's logits are not finite")
    if logits[plain[index]] < logits.max():
        return Judgement(MISMATCH, "the target alone does not choose the plain token", margin)
    if margin > 2 * cap.value:
        reason = f"margin {margin:.3g}, more than the {2 * cap.value:.3g} of rounding"
        return Judgement(MISMATCH, reason, margin)
    return Judgement(TIE, f"margin {margin:.3g}, within rounding", margin)
