"""cuda_check.py: what it reads from the compiler, its answers, and a real run (slow)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cuda_check
import pytest

from patchlib import PatchsetError

PROGRAM = Path(cuda_check.__file__)

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z11dflash_convI6__halfEv16dflash_conv_args' for 'sm_90'
ptxas info    : Function properties for _Z11dflash_convI6__halfEv16dflash_conv_args
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
ptxas info    : Compile time = 12.3 ms
ptxas info    : Compiling entry function '_Z12dflash_top_kIfEvPKT_PyPiiiii' for 'sm_120a'
ptxas info    : Function properties for _Z12dflash_top_kIfEvPKT_PyPiiiii
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 17488 bytes smem
ptxas info    : Compiling entry function '_Z12k_copy_rowsPKfPf' for 'sm_90'
ptxas info    : Function properties for _Z12k_copy_rowsPKfPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""


def test_what_the_compiler_says() -> None:
    conv, top_k, other = cuda_check.parse("dflash.cu", PTXAS)
    assert conv == cuda_check.Kernel("dflash.cu", "dflash_conv<half>", "90", 32, 0, 0, 0)
    assert top_k == cuda_check.Kernel(
        "dflash.cu", "dflash_top_k<float>", "120a", 255, 17488, 16, 20
    )
    assert cuda_check.OURS not in other.name


def test_the_table_has_a_line_for_each() -> None:
    lines = cuda_check.table(cuda_check.parse("dflash.cu", PTXAS)).splitlines()
    assert lines[0].split() == ["kernel", "arch", "registers", "shared", "stack", "spills"]
    assert ["dflash_top_k<float>", "120a", "255", "17488", "16", "20"] in [x.split() for x in lines]


def test_names_without_a_type() -> None:
    assert cuda_check.kernel_name("_Z14dflash_lattice19dflash_lattice_args") == "dflash_lattice"
    assert cuda_check.kernel_name("_Z11dflash_convIfEv16dflash_conv_args") == "dflash_conv<float>"


def answer(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAM, *arguments],
        capture_output=True, text=True, env={**os.environ, **environment}, timeout=1500,
    )  # fmt: skip


def test_without_nvcc_one_sentence() -> None:
    done = answer(CUDACXX="no-such-nvcc")
    assert done.returncode == 2
    assert done.stderr == (
        "error: `no-such-nvcc` not found; install the CUDA toolkit (12.8 or newer) or name its nvcc"
        " in CUDACXX\n"
    )


def compiler_that_says(folder: Path, text: str, code: int) -> Path:
    """A stand-in for nvcc that knows sm_90 and prints `text` when it compiles."""
    (folder / "text").write_text(text)
    path = folder / "nvcc"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in\n*list-gpu-code*) echo sm_90;;\n*-E*) exit 0;;\n'
        f"*) cat '{folder}/text' >&2; exit {code};;\nesac\n"
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "code", "last"),
    [
        (PTXAS, 0, "error: registers are spilled in dflash_top_k<float>"),
        ("x.cu(3): error: no\n", 2, "error: dflash.cu does not compile; the reason stands above"),
    ],
)
def test_what_is_wrong_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    text: str, code: int, last: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDACXX", str(compiler_that_says(tmp_path, text, code)))
    monkeypatch.setattr(cuda_check, "make_tree", lambda: tmp_path)
    assert cuda_check.main(["--file", "dflash.cu", "--arch", "90"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == last


def test_an_unknown_architecture() -> None:
    with pytest.raises(PatchsetError, match="`--arch 61` is not one of"):
        cuda_check.architectures("true", ["61"])


@pytest.mark.slow
def test_the_kernels_compile_without_spills() -> None:
    try:
        nvcc = cuda_check.find_nvcc()
    except PatchsetError as error:
        pytest.skip(str(error))
    headers = cuda_check.FOLDER / "include" / "cublas_v2.h"
    if not (cuda_check.toolkit_has_cublas(nvcc) or headers.is_file()):
        pytest.skip("no headers of cuBLAS; `make cuda-check` once fetches them")
    done = answer("--file", "dflash.cu", "--arch", "90", "--json")
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert {kernel["name"] for kernel in kernels} == {
        "dflash_conv<float>",
        "dflash_conv<half>",
        "dflash_conv<bfloat16>",
        "dflash_lattice",
        "dflash_top_k<float>",
        "dflash_top_k<key>",
    }
    assert all(kernel["spills"] == 0 and kernel["registers"] > 0 for kernel in kernels)
