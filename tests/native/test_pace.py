"""How many tokens to draft: never slower than plain, close to the best fixed length, and unbiased.

`pace.cpp` drives the rule in simulated time, so nothing here depends on the machine. Loss against
plain decoding comes from tries and from learning costs; the bound is 3 percent (2 in most cases).

Bias: 200,000 blocks of a toy target and draft, G-tests of the first token (3 degrees of freedom)
and of pairs (15) at 1e-6. The planted faults move several percent of the mass and give G above
1000.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

# every third held-out answer: models/train/evaluate.py --limit greedy --every 3 --bf16 --trace
BLOCKS = Path(__file__).parent / "blocks.txt"

TARGET = np.array(
    [[0.55, 0.25, 0.15, 0.05], [0.10, 0.60, 0.20, 0.10], [0.25] * 4, [0.70, 0.10, 0.10, 0.10]]
)

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def program(build: Callable[..., Path]) -> Path:
    return build("pace", sources=("dflash-pace.cpp",))


def run(program: Path, *args: object) -> dict[str, Any]:
    done = subprocess.run(
        [program, *map(str, args)], capture_output=True, text=True, check=True, timeout=120
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


# sequences, longest draft, ms of a draft, ms of a pass, ms per further row, chance, its spread
CASES = {
    "good": (1, 7, 6, 12, 0.8, 0.8, 0.2),
    "middling": (1, 7, 6, 12, 0.8, 0.5, 0.3),
    "flat": (1, 7, 6, 12, 0.8, 0.6, 0.0),
    "break-even": (1, 7, 6, 12, 0.8, 0.45, 0.1),
    "cheap draft": (1, 7, 2, 12, 0.8, 0.5, 0.3),
    "cheap rows, long block": (1, 15, 1, 30, 0.1, 0.8, 0.2),
    "dear rows": (1, 7, 3, 12, 6.0, 0.8, 0.2),
    "two": (2, 7, 4, 12, 0.5, 0.7, 0.3),
    "eight": (8, 7, 6, 12, 0.8, 0.7, 0.3),
    "sixteen": (16, 7, 6, 12, 0.8, 0.5, 0.3),
    "thirty-two": (32, 7, 6, 12, 1.2, 0.7, 0.3),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_never_slower_and_close_to_the_best_fixed_length(program: Path, case: str) -> None:
    result = run(program, "speed", *CASES[case])
    assert result["adaptive"] > 0.98 * result["plain"]
    assert result["adaptive"] > 0.96 * result["best"]


@pytest.mark.parametrize("case", ["good", "middling", "break-even", "dear rows"])
@pytest.mark.parametrize("n", [4, 16])
def test_slots_that_come_and_go(program: Path, case: str, n: int) -> None:
    result = run(program, "crowd", n, *CASES[case][1:])
    assert result["adaptive"] > 0.98 * result["plain"]
    if case == "good" and n == 4:
        assert result["adaptive"] > 1.2 * result["plain"]


@pytest.mark.parametrize("case", [(4, 9, 0.7, 0.75), (6, 12, 0.8, 0.75), (4.6, 8.8, 0.6, 0.65)])
def test_easy_and_hard_texts_in_turns(program: Path, case: tuple[float, ...]) -> None:
    """Short texts of two kinds: each must soon be judged by itself, not by the mean of both."""
    *costs, chance = case
    result = run(program, "classes", 1, 7, *costs, chance, 0.25)
    assert result["adaptive"] > 1.05 * result["plain"]
    assert result["adaptive"] > 0.965 * result["best"]


@pytest.mark.parametrize("texts", [1, 6, 39])
@pytest.mark.parametrize("draft", [2.5, 3.7])
def test_real_blocks_of_every_class(program: Path, draft: float, texts: int) -> None:
    """Blocks of the demo draft, replayed, on servers that answer so many texts of up to 96 tokens.

    The costs are those of the demo pair, with a reduced vocabulary and without. `best` is the
    length that is best for the class, known in advance; a single short text leaves little to learn
    from, and of a dear draft one class does not pay at all.
    """
    result = run(program, "replay", 1, 7, draft, 8, 0.58, texts, BLOCKS)
    speed = {k: v[-1] for k, v in result.items()}
    best = {k: max(v[:-1]) for k, v in result.items()}
    assert len(result) == 9
    assert speed["all"] > best["all"]
    floor = 0.98 if draft < 3 and texts > 1 else 0.94
    lost = {k: speed[k] / best[k] for k in result if speed[k] < floor * best[k]}
    assert not lost


@pytest.mark.parametrize("n", [1, 4, 32])
def test_a_dead_draft_costs_next_to_nothing_and_is_reported(program: Path, n: int) -> None:
    result = run(program, "speed", n, 7, 6, 12, 0.8, 0.0, 0.0)
    assert result["adaptive"] > 0.98 * result["plain"]
    assert result["gave_up"]


def test_a_report_tells_a_dead_draft_from_a_weak_one(program: Path) -> None:
    """After so few drafts that a mean starting at zero would still be near it."""
    dead = run(program, "speed", 1, 7, 6, 12, 0.8, 0.0, 0.0, 400)
    weak = run(program, "speed", 1, 7, 6, 12, 0.8, 0.25, 0.1, 400)
    assert dead["gave_up"]
    assert weak["gave_up"]
    assert dead["accepted"] < 0.1 < weak["accepted"]


def test_a_draft_that_pays_is_never_given_up(program: Path) -> None:
    assert not run(program, "speed", *CASES["good"])["gave_up"]


def test_recovers_when_the_text_becomes_easy(program: Path) -> None:
    result = run(program, "switch", 1, 7, 6, 12, 0.8, 0.8, 0.2)
    assert result["before"] > 0.97
    assert result["adaptive"] > 0.93 * result["best"]


def g_statistic(counts: list[int], expected: np.ndarray) -> float:
    seen = np.array(counts, float)
    wanted = expected.ravel() * seen.sum()
    used = seen > 0
    return float(2 * (seen[used] * np.log(seen[used] / wanted[used])).sum())


def bias(program: Path, fault: str) -> tuple[dict[str, Any], float, float]:
    result = run(program, "bias", fault, 7, 200_000)
    first = g_statistic(result["first"], TARGET[0])
    return result, first, g_statistic(result["pairs"], TARGET[0][:, None] * TARGET)


def test_lengths_leave_the_distribution_alone(program: Path) -> None:
    result, first, pairs = bias(program, "none")
    assert result["drafted"] > 100_000
    assert result["cut"] > 20_000  # else nothing was tested
    assert first < chi2.isf(1e-6, 3)
    assert pairs < chi2.isf(1e-6, 15)


@pytest.mark.parametrize("fault", ["drawn", "later"])
def test_a_length_that_looks_at_the_dropped_token_is_found(program: Path, fault: str) -> None:
    _, first, pairs = bias(program, fault)
    assert max(first, pairs) > 300
