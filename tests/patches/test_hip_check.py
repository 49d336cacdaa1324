"""hip_check.py: what it reads from the compiler, its answers, and a real run where HIP is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hip_check
import pytest

from patchlib import PatchsetError

METADATA = """\
	.text
amdhsa.kernels:
  - .args:
      - .offset:         0
        .size:           120
    .group_segment_fixed_size: 768
    .name:           _Z14dflash_lattice19dflash_lattice_args
    .private_segment_fixed_size: 16
    .sgpr_count:     40
    .sgpr_spill_count: 1
    .symbol:         _Z14dflash_lattice19dflash_lattice_args.kd
    .vgpr_count:     51
    .vgpr_spill_count: 2
    .wavefront_size: 32
  - .args:           []
    .group_segment_fixed_size: 0
    .name:           _Z11dflash_convI14__hip_bfloat16Ev16dflash_conv_args
    .private_segment_fixed_size: 0
    .sgpr_count:     20
    .sgpr_spill_count: 0
    .symbol:         _Z11dflash_convI14__hip_bfloat16Ev16dflash_conv_args.kd
    .vgpr_count:     20
    .vgpr_spill_count: 0
amdhsa.target:   amdgcn-amd-amdhsa--gfx1030
amdhsa.version:
  - 1
  - 1
"""


def test_what_the_compiler_says() -> None:
    lattice, conv = hip_check.parse("dflash.cu", "gfx1030", METADATA)
    assert lattice == hip_check.Kernel("dflash.cu", "dflash_lattice", "gfx1030", 51, 768, 16, 12)
    assert conv == hip_check.Kernel("dflash.cu", "dflash_conv<bfloat16>", "gfx1030", 20, 0, 0, 0)


def test_no_compiler_is_a_sentence() -> None:
    command = [sys.executable, Path(hip_check.__file__), "--clang", "no-such-clang"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: `no-such-clang` not found; install HIP")


@pytest.mark.slow
def test_all_kernels_compile() -> None:
    try:
        hip_check.find_clang(None)
        hip_check.rocm()
    except PatchsetError as error:
        pytest.skip(str(error))
    command = [sys.executable, Path(hip_check.__file__)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = {line.split()[0] for line in done.stdout.splitlines()[1:]}
    types = [f"dflash_conv<{name}>" for name in ("float", "half", "bfloat16")]
    assert {*types, "dflash_lattice", "dflash_top_k<float>", "dflash_top_k<key>"} == kernels
