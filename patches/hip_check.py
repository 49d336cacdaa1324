#!/usr/bin/env python3
"""Compiles our GPU kernels for AMD (HIP), both the device's and the host's side, and prints what
they take: registers, shared memory, spills. No device is needed; `make hip-check` calls it.

    hip_check.py [--arch gfx1030]... [--clang clang++-15]

Exit code: 0 all is well, 1 a compile error or a spill in a kernel of ours, 2 no clang or no HIP
headers (on Debian: apt install hipcc libamdhip64-dev), or bad usage. Standard library only. Older
HIP headers lack a few things that llama.cpp needs; declarations for them lie in hip_stubs.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from cuda_check import FOLDER, Kernel, kernel_name, make_tree, table

from patchlib import PatchsetError, exit_code

FILES = ("dflash.cu", "top-k.cu")
ARCHITECTURES = ("gfx906", "gfx90a", "gfx1030")  # CDNA and RDNA, 64 and 32 lanes
STUBS = Path(__file__).resolve().parent / "hip_stubs"
ROOTS = ("/opt/rocm", "/usr")
BITCODE = ("amdgcn/bitcode", "lib/x86_64-linux-gnu/amdgcn/bitcode")
DEFINES = (
    "-DGGML_USE_HIP",
    "-DGGML_HIP_NO_VMM",
    "-D__HIP_PLATFORM_AMD__",
    "-D__HIP_PLATFORM_HCC__",  # the same before HIP 6
)


def main(arguments: list[str]) -> int:
    """Returns 0 done, 1 failed, 2 bad usage or tools missing, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="hip_check.py", description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--arch", action="append", help=f"default: {', '.join(ARCHITECTURES)}")
    parser.add_argument("--clang", help="a clang++ with the AMDGPU target")
    options = parser.parse_args(arguments)
    return exit_code(lambda: check(options), "")


def check(options: argparse.Namespace) -> int:
    """Compile and print. Returns the exit code."""
    compiler = [find_clang(options.clang), "-x", "hip", "-std=c++17", "-O3", *rocm()]
    stubs = needed_stubs(compiler)
    ggml = make_tree() / "ggml"
    compiler += [*DEFINES, *(f"-I{folder}" for folder in stubs)]
    compiler += [f"-I{ggml / folder}" for folder in ("include", "src", "src/ggml-cuda")]
    compiler += ["-Wno-unused-result", "-Wno-nan-infinity-disabled", "-Wno-unknown-warning-option"]
    kernels: list[Kernel] = []
    for file in FILES:
        source = ggml / "src" / "ggml-cuda" / file
        compile_one([*compiler, "--offload-host-only", "-fsyntax-only", str(source)], file)
        for arch in options.arch or ARCHITECTURES:
            print(f"{file}: {arch}", file=sys.stderr, flush=True)
            out = FOLDER / f"{file}.{arch}.s"
            device = ["--offload-device-only", f"--offload-arch={arch}", "-S", "-o", str(out)]
            compile_one([*compiler, *device, str(source)], file)
            kernels += parse(file, arch, out.read_text())
    ours = [kernel for kernel in kernels if "dflash" in kernel.name]
    print(table(ours))
    spilled = sorted({kernel.name for kernel in ours if kernel.spills})
    if spilled:
        print(f"error: registers are spilled in {', '.join(spilled)}", file=sys.stderr)
    return 1 if spilled or not ours else 0


def find_clang(named: str | None) -> str:
    """The given one, ROCm's own, or the newest of the system."""
    system = [f"clang++-{version}" for version in range(22, 14, -1)]
    names = [named] if named else ["/opt/rocm/llvm/bin/clang++", *system, "clang++"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise PatchsetError(
            f"`{names[0]}` not found; install HIP with its clang, on Debian:"
            " apt install hipcc libamdhip64-dev",
            code=2,
        )
    return found


def rocm() -> list[str]:
    """Options that say where HIP is."""
    for root in map(Path, ROOTS):
        bitcode = next((root / b for b in BITCODE if (root / b / "ocml.bc").is_file()), None)
        if bitcode and (root / "include" / "hip" / "hip_runtime.h").is_file():
            return [f"--rocm-path={root}", f"--rocm-device-lib-path={bitcode}"]
    raise PatchsetError(
        f"no HIP headers and device libraries in {' or '.join(ROOTS)}; on Debian:"
        " apt install hipcc libamdhip64-dev",
        code=2,
    )


def needed_stubs(compiler: list[str]) -> list[Path]:
    """Folders of hip_stubs that stand in for headers this HIP does not have."""
    folders = []
    for name, header in (("blas", "hipblas/hipblas.h"), ("bf16", "hip/hip_bf16.h")):
        code = f"#include <hip/hip_runtime.h>\n#include <{header}>\n"
        command = [*compiler, *DEFINES, "--offload-host-only", "-fsyntax-only", "-"]
        if subprocess.run(command, input=code, text=True, capture_output=True).returncode:
            print(f"note: no {header} here, declarations of our own stand in", file=sys.stderr)
            folders.append(STUBS / name)
    return folders


def compile_one(command: list[str], file: str) -> None:
    """Raises PatchsetError with the compiler's text above it."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-8000:], file=sys.stderr)
        raise PatchsetError(f"{file} does not compile; the reason stands above")


def parse(file: str, arch: str, text: str) -> list[Kernel]:
    """Kernels in the metadata at the end of the assembler's text."""
    kernels = []
    for part in re.split(r"^  - \.", text, flags=re.MULTILINE)[1:]:
        value = dict(re.findall(r"^ *\.?(\w+): +(\S+)$", part, flags=re.MULTILINE))
        if "vgpr_count" not in value:
            continue
        spills = int(value["vgpr_spill_count"]) + int(value["sgpr_spill_count"])
        kernels.append(
            Kernel(
                file,
                kernel_name(value["symbol"].removesuffix(".kd")),
                arch,
                registers=int(value["vgpr_count"]),
                shared=int(value["group_segment_fixed_size"]),
                stack=int(value["private_segment_fixed_size"]),
                spills=4 * spills,
            )
        )
    return kernels


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
