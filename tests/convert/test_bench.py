"""The program that measures the converter runs, and its checkpoint is a real one in shape."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_convert.checkpoint import open_checkpoint

BENCH = Path(__file__).resolve().parents[2] / "convert" / "bench"


@pytest.mark.slow
def test_generated_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "generate.py"), str(tmp_path), "--scale", "4"]
    subprocess.run(command, check=True)
    checkpoint = open_checkpoint(tmp_path / "draft")
    assert len(checkpoint.tensors) == 81
    assert checkpoint.tensors["fc.weight"].shape == (1280, 5 * 1280)
    assert checkpoint.tensors["candidate_selector.successor_codebook"].shape == (62080, 256)


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.usefixtures("lib_dir", "stock_bin_dir")
def test_speed(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the base's converter needs torch and transformers")
    options = ["--scale", "4", "--types", "q8_0,q4_k_m", "--repeat", "1", "--json"]
    done = subprocess.run(
        [sys.executable, str(BENCH / "speed.py"), *options, "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    assert [r["type"] for r in report["results"]] == ["q8_0", "q4_k_m"]
    for row in report["results"]:
        assert row["ours_seconds"] > 0
        assert 20 < row["ours_mib"] < 1024
        assert row["base_mib"] > row["ours_mib"]
    # Whether the limits are met is the machine's to say; the exit code says the same.
    missed = [r["type"] for r in report["results"] if r["ratio"] > 0.7]
    assert done.returncode == (1 if missed else 0), done.stderr
    assert list(tmp_path.iterdir()) == []
