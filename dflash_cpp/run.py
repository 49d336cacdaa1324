"""Generate text from one prompt, tell drafts apart, compare with plain decoding."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_convert.errors import InputError

from .parity import first_difference
from .stats import RULE_REJECT
from .text import TokenText, usable_context

if TYPE_CHECKING:
    from .llama import DFlashLlama
    from .stats import DraftStats

# why a text ended
STOP_END = "end"
STOP_LENGTH = "length"
STOP_CONTEXT = "context"

OnText = Callable[[str, bool], None]

# C0 and C1 control characters but tab and line feed: generated text must not drive a terminal
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")


@dataclass(frozen=True)
class Sampling:
    """Sampler settings; the names and defaults are llama.cpp's, but for the temperature.

    Attributes:
        temp: 0 is greedy.
        seed: None for a new one each run.
    """

    temp: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int | None = None

    def with_seed(self) -> Sampling:
        """Return the same settings with a definite seed, so that a second run can repeat it."""
        if self.seed is not None:
            return self
        return Sampling(**{**vars(self), "seed": random.SystemRandom().randrange(2**31)})

    def keywords(self) -> dict[str, Any]:
        """Return keywords of `Llama.generate`."""
        return {k: v for k, v in vars(self).items() if k != "seed"}


@dataclass(frozen=True)
class Generation:
    """One generated text.

    Attributes:
        tokens: Generated tokens, the end-of-generation token included.
        drafted: For each whether it was an accepted draft.
        text: What they spell; control tokens spell nothing.
        stop: `end`, `length` or `context`.
        stats: What the model counted.
        seconds: Wall time from the call to the last token.
    """

    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]
    text: str
    stop: str
    stats: DraftStats
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the generation as plain data."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "drafted": [int(d) for d in self.drafted],
            "stop": self.stop,
            "seconds": self.seconds,
            "stats": self.stats.to_json(),
        }


@dataclass(frozen=True)
class Comparison:
    """A speculative text beside the plain one of the same prompt.

    Attributes:
        plain: The plain text.
        first_difference: Index of the first token that differs; None if all are the same.
        speed_ratio: Tokens per second, speculative / plain; None if a text is too short.
    """

    plain: Generation
    first_difference: int | None
    speed_ratio: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return {
            "plain": self.plain.to_json(),
            "same_tokens": self.first_difference is None,
            "first_difference": self.first_difference,
            "speed_ratio": self.speed_ratio,
        }


def generate(
    llm: DFlashLlama,
    prompt: Sequence[int],
    *,
    n_predict: int,
    sampling: Sampling,
    on_text: OnText = lambda text, drafted: None,
) -> Generation:
    """Generate text and hand out every piece as soon as its characters are complete.

    Args:
        llm: An open pair.
        prompt: Tokens to continue.
        n_predict: Tokens to generate; -1 until the text ends or the context is full.
        sampling: Sampler settings.
        on_text: Called with a piece of text and whether the token that completed it was an
            accepted draft.

    Raises:
        InputError: The prompt leaves no room in the context.
    """
    import llama_cpp

    n_ctx = usable_context(llm)
    room = n_ctx - len(prompt)
    if room < 1:
        raise InputError(
            f"the prompt has {len(prompt)} tokens, expected fewer than the context's {n_ctx}",
            hint="use a larger -c/--ctx-size or a shorter prompt",
        )
    wanted = room if n_predict < 0 else min(n_predict, room)
    if sampling.seed is not None:
        llm.set_seed(sampling.seed)
    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    words = TokenText(llm)
    tokens: list[int] = []
    drafted: list[bool] = []
    text = ""
    stop = STOP_CONTEXT if wanted == room else STOP_LENGTH
    started = time.perf_counter()
    generator = llm.generate(prompt, **sampling.keywords())
    try:
        for token in generator:
            tokens.append(token)
            drafted.append(llm.last_token_drafted)
            if piece := words.push(token):
                text += piece
                on_text(piece, drafted[-1])
            if llama_cpp.llama_vocab_is_eog(vocab, token):
                stop = STOP_END
                break
            if len(tokens) >= wanted:
                break
    finally:
        generator.close()
    seconds = time.perf_counter() - started
    if rest := words.finish():
        text += rest
        on_text(rest, False)
    stats = llm.last_stats
    assert stats is not None  # a generation has just ended
    return Generation(tuple(tokens), tuple(drafted), text, stop, stats, seconds)


def compare(
    llm: DFlashLlama,
    prompt: Sequence[int],
    drafted: Generation,
    *,
    n_predict: int,
    sampling: Sampling,
) -> Comparison:
    """Decode the same prompt plainly by the same build, with the draft unloaded.

    Args:
        llm: An open pair; left with `speculate` as it was.
        prompt: Tokens to continue.
        drafted: The speculative text of the same prompt, settings and seed.
        n_predict: As for `drafted`.
        sampling: As for `drafted`, with a seed.
    """
    before = llm.speculate
    llm.speculate = False
    try:
        llm.reset()
        plain = generate(llm, prompt, n_predict=n_predict, sampling=sampling)
    finally:
        llm.speculate = before
    fast, slow = drafted.stats.tokens_per_second, plain.stats.tokens_per_second
    return Comparison(
        plain=plain,
        first_difference=first_difference(plain.tokens, drafted.tokens),
        speed_ratio=fast / slow if fast and slow else None,
    )


def per_position(stats: DraftStats) -> list[float | None]:
    """Return the accepted share of the tokens drafted at each position of the block, 0 to 1."""
    pairs = zip(stats.per_position_accepted, stats.per_position_drafted, strict=True)
    return [a / d if d else None for a, d in pairs]


def without_controls(text: str) -> str:
    """Replace control characters, but tab and line feed, by U+FFFD."""
    return text.translate(_CONTROLS)


def summary(result: Generation, compared: Comparison | None = None) -> list[str]:
    """Return the lines that follow a text: acceptance, speed and the comparison."""
    stats = result.stats
    lines = [
        f"{len(result.tokens)} tokens, ended by {result.stop}; prompt of {stats.prompt_tokens} "
        f"tokens in {stats.prompt_ms:.0f} ms"
    ]
    if stats.reason is not None:
        lines.append(f"note: {stats.reason}")
    rate, length = stats.acceptance_rate, stats.mean_accepted_length
    if rate is not None and length is not None:
        lines.append(
            f"drafted {stats.drafted}, accepted {stats.accepted} ({100 * rate:.1f} %) in "
            f"{stats.rounds} rounds; mean accepted length {length:.2f}"
        )
        shares = ["-" if p is None else f"{100 * p:.0f}" for p in per_position(stats)]
        lines.append(f"accepted per position, %: {' '.join(shares)}")
    lines.append(f"speed: {_speed(stats)}")
    if compared is not None:
        plain = compared.plain
        ratio = compared.speed_ratio
        lines.append(f"plain: {_speed(plain.stats)}" + (f", ratio {ratio:.2f}" if ratio else ""))
        lines.append(_same(compared.first_difference, stats.rule))
    return lines


def _same(index: int | None, rule: str) -> str:
    if index is None:
        return "the same tokens as plain decoding"
    differs = f"other tokens than plain decoding from token {index} on"
    if rule == RULE_REJECT:
        return (
            f"{differs}: a sampled text of the same distribution, as expected; "
            "--spec-draft-verify match keeps the tokens of a seed"
        )
    return f"{differs}; `dflash-cpp parity` tells whether rounding explains it"


def _speed(stats: DraftStats) -> str:
    speed = stats.tokens_per_second
    return "too short to measure" if speed is None else f"{speed:.1f} tokens/s"
