"""Attention of few queries: right, and the same bits for every number of queries.

The bound: keys and values are given in the type that is stored, so what remains is F32 rounding. A
score of size s has an error of about d * 2^-24 * s, which its weight exp(s) takes over: with scores
up to 20 about 1e-5, of which 2e-5 leaves room. The base's F16 sums miss it by far.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SWITCH = "GGML_DFLASH_SMALL_BATCH"
BOUND = 2e-5

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def program(build: Callable[..., Path], ggml_dir: Path) -> Path:
    return build("flash_attn", libraries=("ggml", "ggml-cpu", "ggml-base"), lib_dir=ggml_dir)


def run(program: Path, *args: object, switch: str | None = None) -> list[dict[str, Any]]:
    """One entry per number of positions 1..n."""
    environment = {key: value for key, value in os.environ.items() if key != SWITCH}
    if switch is not None:
        environment[SWITCH] = switch
    done = subprocess.run(
        [program, *map(str, args)],
        capture_output=True, text=True, timeout=300, check=True, env=environment,
    )  # fmt: skip
    result: list[dict[str, Any]] = json.loads(done.stdout)["positions"]
    return result


@pytest.fixture(scope="module")
def ours(program: Path) -> None:
    """Skips where this CPU has no kernel: then the switch changes nothing."""
    case = ("f16", 64, 2, 1, 100, 2, 1, 1, "none")
    if run(program, *case) == run(program, *case, switch="0"):
        # another build is given in order to test its kernels
        (pytest.fail if "DFLASH_NATIVE_LIB_DIR" in os.environ else pytest.skip)(
            "no kernel for this CPU (AVX-512 VNNI, AVX2 with FMA and F16C, NEON with dotprod)"
        )


SHAPES = [
    # d, heads, kv heads, keys, positions, threads
    (64, 9, 3, 256, 9, 2),
    (64, 4, 4, 70, 8, 1),
    (128, 8, 2, 512, 8, 3),
    (32, 2, 1, 33, 5, 2),
    (80, 5, 5, 130, 4, 1),
    (96, 6, 2, 200, 6, 2),
    (192, 4, 1, 129, 5, 2),
    (256, 4, 2, 640, 7, 2),
    (128, 3, 1, 64, 64, 2),
    (64, 1, 1, 3, 3, 4),
]


@pytest.mark.parametrize("mask", ["none", "causal", "window", "holes", "poison"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("kind", ["f16", "f32"])
@pytest.mark.usefixtures("ours")
def test_right_and_the_same_bits(
    program: Path, kind: str, shape: tuple[int, ...], mask: str
) -> None:
    *sizes, threads = shape
    found = run(program, kind, *sizes, threads, 7, mask)
    assert max(row["error"] for row in found) < BOUND
    assert [row["differ"] for row in found] == [0] * shape[4]


@pytest.mark.usefixtures("ours")
def test_the_test_sees_the_difference(program: Path) -> None:
    """The base's attention over F16 is less precise than the bound."""
    found = run(program, "f16", 128, 8, 2, 512, 8, 2, 7, "causal", switch="0")
    assert max(row["error"] for row in found) > BOUND


@pytest.mark.usefixtures("ours")
def test_threads_do_not_matter(program: Path) -> None:
    results = [run(program, "f16", 64, 9, 3, 300, 6, t, 3, "causal") for t in (1, 2, 5)]
    assert results[0] == results[1] == results[2]
