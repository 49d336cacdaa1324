"""A `Llama` and a `DFlashLlama` on the same tiny target, and the comparison of what they say.

The constructed pair of `bigram.py` is used with some wrong successors, so that blocks are accepted
in part, and with some drift, so that the text depends on everything before it. Keys and values are
F32: with F16 the width of a batch would show in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dflash_cpp import _libs

T = TypeVar("T")

# strength of the drift: most drafts are accepted, yet the text depends on the whole context
DRIFT = {"llama": 0.25, "qwen3": 0.25, "qwen35": 0.15, "gemma4": 0.25}
ARCHS = tuple(DRIFT)

PROMPT = list(range(20, 80))
TEXT = "the quick brown fox jumps over the lazy dog"

# one thread: the machine may be busy, and tiny matrices gain nothing from two
SETTINGS: dict[str, Any] = {
    "n_ctx": 512,
    "n_batch": 64,
    "n_threads": 1,
    "n_threads_batch": 1,
    "type_k": 0,
    "type_v": 0,
    "seed": 7,
    "verbose": False,
}


def need_library() -> None:
    """Skip when nothing is built."""
    if _libs.find_library("dflash") is None:
        pytest.skip(f"no libdflash in {_libs.library_dir()}; run `make build`")


def make_files(folder: Path, arch: str, **options: Any) -> tuple[Path, Path]:
    """Write the constructed pair; returns target and draft."""
    from bigram import make_bigram

    pair = make_bigram(folder, arch, **({"wrong": 0.1, "drift": DRIFT[arch]} | options))
    return pair.target, pair.draft


def first_difference(a: Iterable[Any], b: Iterable[Any]) -> int | None:
    """Index of the first element in which two sequences differ, None if they are equal."""
    a, b = list(a), list(b)
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return same if same is not None or len(a) == len(b) else min(len(a), len(b))


class Twins:
    """The two of them, opened with the same arguments."""

    def __init__(self, files: tuple[Path, Path], **settings: Any):
        need_library()
        from dflash_cpp import DFlashLlama
        from dflash_cpp._memory import llama_cpp

        names = ("n_draft", "p_min", "verify", "draft_trace")
        own = {k: settings.pop(k) for k in names if k in settings}
        self.settings = SETTINGS | settings
        self.plain = llama_cpp.Llama(str(files[0]), **self.settings)
        # the same seed must give the same text: the rule that lets the target sample
        own = {"verify": "match", **own}
        self.ours = DFlashLlama(files[0], draft_path=files[1], **own, **self.settings)

    def close(self) -> None:
        self.ours.close()
        self.plain.close()

    def forget(self) -> None:
        """Start both from nothing."""
        for llm in (self.plain, self.ours):
            llm.reset()
            llm.set_cache(None)
            llm.set_seed(self.settings["seed"])

    def same(self, ask: Callable[[Any], T]) -> T:
        """Ask both the same, compare answers and counters, return the answer."""
        expected, found = ask(self.plain), ask(self.ours)
        assert found == expected, (first_difference(found, expected), found, expected)
        assert self.ours.n_tokens == self.plain.n_tokens
        assert (self.ours._input_ids == self.plain._input_ids).all()
        return found


def take(llm: Any, prompt: list[int], n: int, **options: Any) -> list[int]:
    """The first `n` tokens of a generation that is then abandoned."""
    out: list[int] = []
    generator = llm.generate(prompt, **options)
    try:
        while len(out) < n:
            token = next(generator, None)
            if token is None:
                break
            out.append(token)
    finally:
        generator.close()
    return out


def answer(response: Any) -> list[Any]:
    """What a completion says, streamed or not, without its id and time."""
    parts = [response] if isinstance(response, dict) else list(response)
    return [
        {k: v for k, v in part.items() if k not in ("id", "created", "model")} for part in parts
    ]
