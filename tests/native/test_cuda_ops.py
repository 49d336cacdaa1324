"""The draft's own nodes and the few-of-many top-k through ggml's backends.

On a CUDA device (marked gpu): the convolution has the reference's bits, the lattice is within its
bound, the top-k finds the same ids. Without one, dflash.cu itself, which chooses and fills in the
launches, in the emulation of test_cuda_kernels.py. On the CPU the same program with the library's
functions for these nodes, or plain ones in the program where it has none.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DEVICE = "CUDA0"
OVERLAY = Path(__file__).resolve().parents[2] / "patches" / "overlay"


@pytest.fixture(scope="module")
def program(build: Callable[..., Path], lib_dir: Path) -> Path:
    libraries = ("ggml", "ggml-cpu", "ggml-base")
    return build("cuda_ops", libraries=libraries, lib_dir=lib_dir, flags=("-ffp-contract=off",))


@pytest.fixture(scope="module")
def emulated(build: Callable[..., Path], lib_dir: Path) -> Path:
    here = Path(__file__).parent
    return build(
        "cuda_ops",
        libraries=("ggml", "ggml-cpu", "ggml-base"),
        lib_dir=lib_dir,
        flags=("-DDFLASH_EMULATED", "-ffp-contract=off", "-Wno-unknown-pragmas"),
        includes=(OVERLAY / "ggml" / "src" / "ggml-cuda", here / "emulated", here),
    )


@pytest.fixture
def _device(program: Path, lib_dir: Path) -> None:
    if not (lib_dir / "libggml-cuda.so").exists():
        pytest.skip("the libraries are built without CUDA; run `make build.cuda`")
    done = subprocess.run([program, DEVICE, "conv", "1", "0"], capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())


def run(program: Path, *args: object) -> dict[str, Any]:
    done = subprocess.run(
        [program, *map(str, args)], capture_output=True, text=True, timeout=500, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.native
@pytest.mark.parametrize("op", ["conv", "lattice"])
def test_cpu_agrees(program: Path, op: str) -> None:
    found = run(program, "CPU", op, 1, 10)
    assert (found["cases"], found["wrong"]) == (10, 0)


@pytest.mark.native
@pytest.mark.parametrize(("op", "cases"), [("conv", 40), ("lattice", 20), ("top_k", 12)])
def test_the_launches_agree(emulated: Path, op: str, cases: int) -> None:
    found = run(emulated, "EMULATED", op, 1, cases)
    assert (found["cases"], found["wrong"]) == (cases, 0)


@pytest.mark.native
def test_what_no_kernel_takes_is_refused(emulated: Path) -> None:
    found = run(emulated, "EMULATED", "refused", 1, 20)
    assert found["cases"] == 20 * 27
    assert found["wrong"] == 0


@pytest.mark.native
def test_a_device_that_is_not_there(program: Path) -> None:
    done = subprocess.run([program, "NONE9", "conv", "1", "1"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "error: no device `NONE9`\n")


@pytest.mark.gpu
@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize(("op", "cases"), [("conv", 100), ("lattice", 60), ("top_k", 40)])
def test_device_agrees(program: Path, op: str, cases: int) -> None:
    found = run(program, DEVICE, op, 1, cases)
    assert (found["cases"], found["wrong"]) == (cases, 0)


@pytest.mark.gpu
@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("n_blocks", [1, 4])
def test_time(program: Path, n_blocks: int, record_property: Callable[[str, object], None]) -> None:
    """Figures for docs/cuda.md; that they are numbers is all that is asserted."""
    found = run(program, DEVICE, "time", n_blocks)
    print(found)
    for name, value in found.items():
        record_property(name, value)
    assert all(value > 0 for value in found.values())
