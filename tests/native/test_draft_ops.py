"""The draft's own graph nodes and top-k on the CPU, against plain loops in double or F32.

`draft_ops.cpp` runs one node through ggml's CPU backend and compares it there.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SWITCH = "GGML_DFLASH_DRAFT_OPS"

# Sums of up to 300 terms in F32: some roundings of 2^-24, relative to the sum of absolute terms.
LATTICE_ERROR = 2e-6

pytestmark = pytest.mark.native

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(build: Callable[..., Path], ggml_dir: Path) -> Run:
    program = build("draft_ops", libraries=("ggml", "ggml-cpu", "ggml-base"), lib_dir=ggml_dir)

    def call(*arguments: Any, switch: str | None = None) -> dict[str, Any]:
        environment = {key: value for key, value in os.environ.items() if key != SWITCH}
        if switch is not None:
            environment[SWITCH] = switch
        command = [program, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return call


@pytest.mark.parametrize("base", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("residual", [0, 1])
@pytest.mark.parametrize(
    ("channels", "tokens", "blocks", "taps", "group"),
    [
        (5120, 8, 1, 2, 16),  # the published draft
        (5120, 8, 4, 2, 16),
        (576, 8, 3, 2, 16),
        (288, 5, 2, 3, 8),
        (96, 4, 2, 4, 32),
        (60, 8, 2, 2, 5),  # groups that fill no vector
        (48, 3, 1, 2, 48),
        (40, 1, 3, 2, 8),  # blocks shorter than the taps
        (33, 7, 2, 9, 1),
        (24, 16, 1, 1, 24),
    ],
)
def test_conv(
    run: Run,
    channels: int,
    tokens: int,
    blocks: int,
    taps: int,
    group: int,
    residual: int,
    base: str,
) -> None:
    """The same bits as products and sums rounded one by one."""
    shape = (channels, tokens, blocks, taps, group)
    for side in (0, 1):
        for threads in (1, 3):
            arguments = (*shape, side, base, residual, 16 * side, threads, channels + side, "none")
            assert run("conv", *arguments) == {"different": 0}


@pytest.mark.parametrize("special", ["nan", "inf", "huge"])
def test_conv_of_special_values(run: Run, special: str) -> None:
    assert run("conv", 64, 8, 2, 3, 16, 1, "f32", 1, 0, 2, 5, special) == {"different": 0}


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0", "q5_0", "q6_K"])
@pytest.mark.parametrize(
    ("vocabulary", "width", "tokens", "blocks", "drafted", "k", "rank"),
    [
        (2000, 5120, 8, 1, 7, 16, 256),  # the published draft, with fewer words
        (2000, 5120, 8, 3, 7, 16, 256),
        (512, 288, 8, 2, 4, 16, 256),  # a draft shorter than the block
        (512, 512, 16, 1, 9, 4, 256),
        (300, 4200, 4, 2, 3, 64, 256),
        (300, 272, 8, 1, 1, 16, 256),  # nothing but one position, no room beside
    ],
)
def test_lattice(
    run: Run,
    vocabulary: int,
    width: int,
    tokens: int,
    blocks: int,
    drafted: int,
    k: int,
    rank: int,
    kind: str,
) -> None:
    shape = (vocabulary, width, tokens, blocks, drafted, k, rank)
    for own in (0, k, vocabulary // 3):  # logits of all tokens, or of some
        for threads in (1, 2, 5):
            result = run("lattice", *shape, kind, threads, blocks, "none", own)
            assert result["different"] == 0
            assert result["error"] < LATTICE_ERROR


@pytest.mark.parametrize("rank", [1, 8, 17, 33, 64, 100])
def test_lattice_of_other_ranks(run: Run, rank: int) -> None:
    result = run("lattice", 400, 300, 8, 2, 7, 16, rank, "f32", 2, rank, "none", 0)
    assert result["different"] == 0
    assert result["error"] < LATTICE_ERROR


@pytest.mark.parametrize("special", ["nan", "inf", "-inf"])
def test_lattice_of_special_logits(run: Run, special: str) -> None:
    result = run("lattice", 400, 300, 8, 2, 7, 16, 32, "f16", 2, 1, special, 0)
    assert result["different"] == 0
    assert result["error"] < LATTICE_ERROR


SPECIAL = ["none", "equal", "zeros", "hidden", "nan", "all nan", "inf", "ascending", "descending"]


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize(
    ("columns", "rows", "k"),
    [
        (248320, 7, 16),
        (49152, 28, 16),
        (1000, 5, 64),
        (100, 3, 1),
        (17, 2, 16),
        (16, 4, 16),
        (5000, 1, 33),
    ],
)
def test_top_k(run: Run, columns: int, rows: int, k: int, special: str) -> None:
    """By descending value, equal values by ascending id, whatever the threads."""
    for threads in (1, 2, 7):
        arguments = (columns, rows, k, threads, rows + k, special)
        assert run("top_k", *arguments) == {"different": 0}


def test_the_switch(run: Run) -> None:
    """The base's top-k gives the same set in another order."""
    assert run("top_k", 5000, 3, 16, 2, 1, "none", switch="0")["different"] > 0


def test_larger_k_is_the_bases(run: Run) -> None:
    assert run("top_k", 5000, 3, 65, 2, 1, "none")["different"] > 0
