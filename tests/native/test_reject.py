"""The rejection rule against the target's exact distribution, at one position.

Statistical power: 200,000 trials and a G-test at alpha = 1e-4 per case. A bias that moves one
percent of the mass from one likely token to another gives a G above 100, where 1e-4 needs about
45 (16 degrees of freedom); the two planted faults below move several percent.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2

TRIALS = 200_000
ALPHA = 1e-4

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def program(build: Callable[..., Path], lib_dir: Path) -> Path:
    libraries = ("llama", "ggml", "ggml-base")
    return build("reject", sources=("dflash-reject.cpp",), libraries=libraries, lib_dir=lib_dir)


def run(program: Path, rule: str, greedy: bool, chain: tuple[float, ...], seed: int = 5) -> dict:
    temp, top_k, top_p, min_p = chain
    args = [seed, 24, 8, TRIALS, rule, int(greedy), temp, int(top_k), top_p, min_p]
    done = subprocess.run(
        [program, *map(str, args)], check=True, capture_output=True, text=True, timeout=300
    )
    return json.loads(done.stdout)


def p_value(result: dict) -> float:
    """G-test of the counts against p; tokens that cannot occur must not have occurred."""
    p, count = np.array(result["p"]), np.array(result["count"])
    assert count[p == 0].sum() == 0, "a token outside the target's support was emitted"
    p, count = p[p > 0] / p.sum(), count[p > 0]
    expected = p * count.sum()
    rare = expected < 5
    if rare.any():  # merge them, so that the approximation holds
        expected = np.append(expected[~rare], expected[rare].sum())
        count = np.append(count[~rare], count[rare].sum())
    seen = count > 0
    g = 2 * (count[seen] * np.log(count[seen] / expected[seen])).sum()
    return float(chi2.sf(g, max(1, len(expected) - 1)))


CHAINS = {
    "T 1": (1.0, 0, 1.0, 0.0),
    "T 0.5": (0.5, 0, 1.0, 0.0),
    "T 2": (2.0, 0, 1.0, 0.0),
    "top-k 2": (1.0, 2, 1.0, 0.0),
    "top-p 0.5": (1.0, 0, 0.5, 0.0),
    "min-p 0.3": (1.0, 0, 1.0, 0.3),
    "usual": (0.8, 40, 0.95, 0.05),
}


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_the_text_has_the_targets_distribution(
    program: Path, chain: tuple[float, ...], greedy: bool
) -> None:
    result = run(program, "right", greedy, chain)
    assert p_value(result) > ALPHA
    # acceptance is the sum of min(p, q), within five standard errors
    rate = result["accepted"] / TRIALS
    error = np.sqrt(max(rate * (1 - rate), 1e-9) / TRIALS)
    assert abs(rate - result["overlap"]) < 5 * error + 1e-6


@pytest.mark.parametrize("fault", ["wrong-q", "from-p"])
def test_a_planted_fault_is_seen(program: Path, fault: str) -> None:
    assert p_value(run(program, fault, False, CHAINS["T 1"])) < ALPHA
