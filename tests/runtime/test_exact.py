"""A token's logits have the same bits however many tokens are decoded beside it.

What the CPU kernels for few columns promise, and what makes greedy speculative text equal to plain
text bit for bit: with flash attention, weights of a type with a kernel, and no more threads than
heads. Everything else about the text follows, since the sampler sees the same numbers.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twins import ARCHS

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k")
WIDTHS = (2, 3, 5, 8, 16, 33)

# K-quants have blocks of 256: with other widths llama-quantize would choose other types
WHOLE_BLOCKS = {"n_embd": 512, "n_head": 8, "n_ff": 512, "ssm_state": 64}


@pytest.fixture(scope="module")
def exact(our_library: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where the switch changes nothing, that is, without a kernel for this CPU."""
    from dflash_cpp import info

    if not info.small_batch_kernels():
        pytest.skip("no kernels for few columns on this CPU, or GGML_DFLASH_SMALL_BATCH=0")


@pytest.fixture
def open_target(exact: None, bin_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens a random target with one sequence and all logits."""
    import tiny

    from dflash_cpp._memory import llama_cpp

    opened: list[Any] = []

    def make(arch: str, dtype: str, n_ctx: int = 256, **settings: Any) -> Any:
        shape = WHOLE_BLOCKS if dtype.endswith("_k") else {}
        file = tiny.make_target(tmp_path / "f32.gguf", arch, head_dim=64, **shape)
        if dtype != "f32":
            command = [bin_dir / "llama-quantize", "--pure", file, tmp_path / "t.gguf", dtype, "1"]
            subprocess.run(command, check=True, capture_output=True)
            file = tmp_path / "t.gguf"
        settings = {"n_threads": 2, "n_threads_batch": 2, "flash_attn": True} | settings
        llm = llama_cpp.Llama(
            str(file), n_ctx=n_ctx, n_batch=64, logits_all=True, verbose=False, **settings
        )
        opened.append(llm)
        return llm

    yield make
    for llm in opened:
        llm.close()


def logits(llm: Any, tokens: list[int], widths: Iterator[int]) -> np.ndarray:
    """Logits [tokens, vocabulary] of the text decoded in pieces of the given widths."""
    llm.reset()
    llm._ctx.kv_cache_clear()
    at = 0
    while at < len(tokens):
        width = next(widths)
        llm.eval(tokens[at : at + width])
        at += width
    return llm.scores[: len(tokens)].copy()


def constant(width: int) -> Iterator[int]:
    while True:
        yield width


def mixed(seed: int) -> Iterator[int]:
    random = np.random.default_rng(seed)
    while True:
        yield int(random.integers(1, 10))


def differing(a: np.ndarray, b: np.ndarray) -> list[int]:
    """Positions whose logits are not the same bits."""
    return np.flatnonzero((a.view(np.uint32) != b.view(np.uint32)).any(1)).tolist()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("arch", ARCHS)
def test_width_changes_no_bit(open_target: Callable[..., Any], arch: str, dtype: str) -> None:
    llm = open_target(arch, dtype)
    tokens = np.random.default_rng(3).integers(20, 80, 120).tolist()
    alone = logits(llm, tokens, constant(1))
    assert np.isfinite(alone).all()
    for width in WIDTHS:
        assert differing(logits(llm, tokens, constant(width)), alone) == []
    assert differing(logits(llm, tokens, mixed(1)), alone) == []


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_long_contexts(open_target: Callable[..., Any], dtype: str) -> None:
    """From 512 cells on the base shares the keys of a single query out among the threads."""
    llm = open_target("llama", dtype, n_ctx=1024)
    tokens = np.random.default_rng(4).integers(20, 80, 700).tolist()
    assert differing(logits(llm, tokens, mixed(2)), logits(llm, tokens, constant(1))) == []


@pytest.mark.parametrize("kv", [("q8_0", 8), ("f32", 0)], ids=lambda kv: kv[0])
def test_other_kv_types(open_target: Callable[..., Any], kv: tuple[str, int]) -> None:
    llm = open_target("qwen3", "q8_0", type_k=kv[1], type_v=kv[1])
    tokens = np.random.default_rng(5).integers(20, 80, 90).tolist()
    assert differing(logits(llm, tokens, constant(8)), logits(llm, tokens, constant(1))) == []


def test_without_flash_attention_nothing_is_promised(open_target: Callable[..., Any]) -> None:
    """The measurement can fail: the base's own attention products do depend on the width."""
    llm = open_target("llama", "f16", flash_attn=False, n_ctx=512)
    tokens = np.random.default_rng(6).integers(20, 80, 300).tolist()
    assert differing(logits(llm, tokens, constant(8)), logits(llm, tokens, constant(1)))
