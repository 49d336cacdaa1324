"""The CUDA kernels' own code, compiled for the CPU and run thread by thread (cuda_emulation.h).

Against plain references on random shapes, strides, types and values: the convolution bit for bit,
the top-k id for id, the lattice within (rank + 4) roundings of its terms' sizes. Each in several
orders of the threads, with every array as large as it is said to be and AddressSanitizer watching.
That no barrier and no index could be wrong unseen is tested too: each barrier is left out in turn.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "patches" / "overlay" / "ggml" / "src" / "ggml-cuda" / "dflash-kernels.cuh"
BARRIERS = [
    number
    for number, line in enumerate(KERNELS.read_text().splitlines(), start=1)
    if "__syncthreads();" in line
]
SANITIZER = "-fsanitize=address"
ASCENDING, DESCENDING, RANDOM = 0, 1, 7

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def sanitizer(tmp_path_factory: pytest.TempPathFactory) -> bool:
    """Whether the compiler has AddressSanitizer."""
    source = tmp_path_factory.mktemp("sanitizer") / "empty.cpp"
    source.write_text("int main() {}\n")
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return False
    command = [compiler, SANITIZER, source, "-o", source.with_suffix("")]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def program(build: Callable[..., Path], lib_dir: Path, sanitizer: bool) -> Path:
    flags = ("-O1", "-g", "-Wno-unknown-pragmas", "-ffp-contract=off")
    return build(
        "cuda_kernels",
        libraries=("ggml-base",),
        lib_dir=lib_dir,
        flags=(*flags, SANITIZER) if sanitizer else flags,
        includes=(KERNELS.parent,),
    )


def start(program: Path, *args: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [program, *map(str, args)], capture_output=True, text=True, timeout=300, env=environment
    )


def run(program: Path, *args: object) -> dict[str, Any]:
    done = start(program, *args)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("order", [ASCENDING, DESCENDING, RANDOM])
@pytest.mark.parametrize(
    ("kernel", "cases"), [("conv", 60), ("lattice", 40), ("top_k", 30), ("merge", 6)]
)
def test_agrees_with_the_reference(program: Path, kernel: str, cases: int, order: int) -> None:
    assert run(program, kernel, 1000 * order, cases, order)["wrong"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["conv", "lattice", "top_k", "merge"])
def test_agrees_in_many_cases(program: Path, kernel: str) -> None:
    for order in range(5):
        assert run(program, kernel, 10**6 + 1000 * order, 200, order)["wrong"] == 0


def test_rows_are_divided_without_gaps(program: Path) -> None:
    assert run(program, "divide", 1, 20000, ASCENDING)["wrong"] == 0


def test_there_are_barriers() -> None:
    assert len(BARRIERS) == len(re.findall(r"__syncthreads\(\)", KERNELS.read_text())) > 0


@pytest.mark.parametrize("line", BARRIERS)
def test_a_missing_barrier_is_seen(program: Path, line: int) -> None:
    for kernel in ("lattice", "top_k"):
        for order in (ASCENDING, DESCENDING, RANDOM):
            done = start(program, kernel, 1, 12, order, line)
            if done.returncode != 0 or json.loads(done.stdout)["wrong"] > 0:
                return
    pytest.fail(f"nothing is wrong without the barrier in line {line} of {KERNELS.name}")


def test_an_index_outside_is_seen(program: Path, sanitizer: bool) -> None:
    if not sanitizer:
        pytest.skip("this compiler has no AddressSanitizer")
    done = start(program, "index", 1, 1, ASCENDING)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


def test_absent_lanes_are_seen(program: Path) -> None:
    done = start(program, "lanes", 1, 1, ASCENDING)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == ("error: threads of a block wait at different barriers")
