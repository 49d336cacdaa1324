"""Damaged drafts: a sentence or a working session, never a crash, an abort or a hang.

Ten thousand cases run with `-m slow`; the default is a sample of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("our_library")]

CHILD = Path(__file__).resolve().parents[1] / "fuzz_draft.py"


def run_cases(
    target: Path, draft: Path, folder: Path, first: int, last: int
) -> tuple[Counter[str], list[str]]:
    """Outcomes by name, and a line for each case that ended the process."""
    outcomes: Counter[str] = Counter()
    crashes: list[str] = []
    while first < last:
        done = subprocess.run(
            [sys.executable, CHILD, target, draft, folder, "1", str(first), str(last)],
            capture_output=True,
            text=True,
            timeout=60 + 2 * (last - first),
            env=os.environ | {"OMP_NUM_THREADS": "1", "GGML_NO_BACKTRACE": "1"},
            check=False,
        )
        lines = done.stdout.splitlines()
        outcomes.update(line.split()[1] for line in lines if line.startswith("end "))
        if done.returncode == 0:
            break
        _, case, what = [line for line in lines if line.startswith("case ")][-1].split(" ", 2)
        said = [line for line in done.stderr.splitlines() if line.strip()]
        crashes.append(f"case {case} ({what}): code {done.returncode}, {said[-1:]}")
        if len(crashes) >= 40:
            break
        first = int(case) + 1
    return outcomes, crashes


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_a_sample_of_damaged_drafts(arch: str, make_pair: Callable, tmp_path: Path) -> None:
    pair = make_pair(arch)
    outcomes, crashes = run_cases(pair.target, pair.draft, tmp_path, 0, 150)
    assert not crashes, "\n".join(crashes)
    assert sum(outcomes.values()) == 150
    assert min(outcomes["refused"], outcomes["ran"]) > 10  # both ends of the scale were reached


@pytest.mark.slow
def test_ten_thousand_damaged_drafts(make_pair: Callable, tmp_path: Path) -> None:
    pair = make_pair("llama")
    outcomes, crashes = run_cases(pair.target, pair.draft, tmp_path, 0, 10_000)
    assert not crashes, "\n".join(crashes)
    assert sum(outcomes.values()) == 10_000
