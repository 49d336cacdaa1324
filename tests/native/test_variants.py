"""The kernels for other instruction sets than this machine's best; see variants.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

VARIANTS = Path(__file__).with_name("variants.py")

pytestmark = [pytest.mark.native, pytest.mark.slow]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["avx2", "neon", "neon-dotprod"])
def test_variant(name: str) -> None:
    done = subprocess.run([sys.executable, VARIANTS, name], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
