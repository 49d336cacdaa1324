"""Exact mode at length: one greedy text, whatever is drafted and however many slots share a pass.

With the small-batch kernels (micro-batches of at most 64 rows) a token's logits are the same bits
in every pass, so there is nothing to excuse: 16 prompts of 400 tokens through every number of
drafted tokens and slots, 51,200 tokens for each architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from bigram import Bigram

from dflash_cpp.info import small_batch_kernels
from dflash_cpp.server import LlamaServer

pytestmark = pytest.mark.native

PROMPTS = [[40 + (7 * i + k * j) % 400 for j in range(20 + 3 * i)] for i, k in enumerate(range(16))]


def texts(server: LlamaServer, slots: int, n_predict: int, prompts: list[list[int]]) -> list[Any]:
    body = {"n_predict": n_predict, "temperature": 0.0, "return_tokens": True, "ignore_eos": True}

    def one(prompt: list[int]) -> list[int]:
        return server.post("/completion", {"prompt": prompt, "cache_prompt": False} | body)[
            "tokens"
        ]

    with ThreadPoolExecutor(slots) as pool:
        return list(pool.map(one, prompts))


def compare(
    start: Callable[..., LlamaServer],
    pair: Bigram,
    n_predict: int,
    prompts: list[list[int]],
    lengths: Any,
) -> int:
    """Number of tokens that were compared."""
    if not small_batch_kernels():
        pytest.skip("this CPU has no small-batch kernels")
    size = ("-ub", 32, "-b", 64)
    with start(pair.target, None, *size) as plain:
        expected = texts(plain, 1, n_predict, prompts)
    n = 0
    for slots in (1, 4):
        for length in lengths:
            options = (*size, "-np", slots, "-c", 1024 * slots)
            options += ("--spec-draft-n-max", length, "--spec-draft-adaptive", "off")
            with start(pair.target, pair.draft, *options) as server:
                found = texts(server, slots, n_predict, prompts)
            assert found == expected, f"{slots} slots, {length} drafted"
            n += sum(map(len, found))
    return n


@pytest.mark.parametrize(("arch", "drift"), [("llama", 0.28), ("qwen35", 0.15), ("gemma4", 0.28)])
def test_a_sample(
    arch: str, drift: float, bigram: Callable[..., Bigram], start: Callable[..., LlamaServer]
) -> None:
    assert compare(start, bigram(arch, drift=drift), 60, PROMPTS[:4], (7,)) == 2 * 4 * 60


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("arch", "drift"), [("llama", 0.28), ("qwen3", 0.28), ("qwen35", 0.15), ("gemma4", 0.28)]
)
def test_fifty_thousand_tokens(
    arch: str, drift: float, bigram: Callable[..., Bigram], start: Callable[..., LlamaServer]
) -> None:
    assert compare(start, bigram(arch, drift=drift), 400, PROMPTS, (1, 2, 4, 7)) == 51_200
