"""Greedy decoding of one prompt round by round, with all that the draft saw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_convert.errors import InputError

from .text import usable_context

if TYPE_CHECKING:
    from .llama import DFlashLlama
    from .session import RoundTrace


@dataclass(frozen=True)
class Round:
    """One round: a draft and what the target made of it.

    Attributes:
        trace: What the draft saw and proposed; no positions if nothing valid came out of it.
        tokens: New tokens of the text: the accepted proposals, then the target's own. The latter
            is missing where an accepted proposal ends the text.
        invalid: The draft's pass failed or gave no valid token.
        ends: The last token ends the text.
    """

    trace: RoundTrace
    tokens: tuple[int, ...]
    invalid: bool
    ends: bool

    @property
    def said(self) -> int | None:
        """The target's own token, after the accepted proposals; None if there is none."""
        n = self.trace.n_accepted if self.trace.draft else 0
        return self.tokens[n] if n < len(self.tokens) else None


def greedy_rounds(llm: DFlashLlama, prompt: Sequence[int], n_predict: int) -> Iterator[Round]:
    """Continue a prompt greedily and yield every round as soon as it is complete.

    The first token comes from the prompt's own pass, before any round.

    Args:
        llm: A pair opened with `draft_trace=True`; its memory is cleared first.
        prompt: Tokens to continue.
        n_predict: Tokens after which no further round begins; the last one may exceed it.

    Raises:
        InputError: The context has no room for prompt, tokens and a block.
    """
    import llama_cpp

    session = llm._session
    assert session is not None  # opened with a draft
    n_ctx = usable_context(llm)
    room = n_ctx - len(prompt) - session.block_size
    if room < n_predict:
        raise InputError(
            f"{len(prompt)} prompt tokens, {n_predict} more and a block of {session.block_size} "
            f"exceed the context of {n_ctx}",
            hint="use a larger -c/--ctx-size, a shorter prompt or a smaller -n/--n-predict",
        )
    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    llm.reset()
    generator = llm.generate(prompt, temp=0.0)
    try:
        token = next(generator)
        n_tokens = 1
        ends = bool(llama_cpp.llama_vocab_is_eog(vocab, token))
        while n_tokens < n_predict and not ends:
            before = int(session.stats().n_invalid)
            tokens = [next(generator)]
            trace = session.trace()
            invalid = int(session.stats().n_invalid) > before
            n_accepted = trace.n_accepted if trace.draft else 0
            ends = bool(llama_cpp.llama_vocab_is_eog(vocab, tokens[-1]))
            while len(tokens) <= n_accepted and not ends:
                tokens.append(next(generator))
                ends = bool(llama_cpp.llama_vocab_is_eog(vocab, tokens[-1]))
            n_tokens += len(tokens)
            yield Round(trace, tuple(tokens), invalid, ends)
    finally:
        generator.close()
