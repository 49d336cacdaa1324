"""Builds ggml for another instruction set and runs the kernels' tests against it.

    variants.py avx2          8 lanes, on any x86 with AVX2
    variants.py neon          4 lanes, compiled for ARM and run by an emulator
    variants.py neon-dotprod  the same without i8mm: llama.cpp interleaves rows in another way

Further arguments go to pytest. The libraries lie in build/variants; a second run builds only what
has changed. Without the tools that a variant needs it says which and returns 77.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "variants"
TREE = FOLDER / "llama.cpp"
TESTS = ("mul_mat", "flash_attn", "draft_ops")
SKIPPED = 77  # no exit code of pytest

COMMON = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=OFF",
    "-DGGML_OPENMP=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_COMMON=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
]


class Variant(NamedTuple):
    options: list[str]
    compilers: tuple[str, str] | None = None  # for C and C++; none: this machine's
    emulator: tuple[str, ...] = ()
    tests: tuple[str, ...] = TESTS


def arm(architecture: str) -> Variant:
    prefix = "aarch64-linux-gnu"
    return Variant(
        [
            "-DCMAKE_SYSTEM_NAME=Linux",
            "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
            f"-DCMAKE_C_COMPILER={prefix}-gcc",
            f"-DCMAKE_CXX_COMPILER={prefix}-g++",
            f"-DGGML_CPU_ARM_ARCH={architecture}",
        ],
        (f"{prefix}-gcc", f"{prefix}-g++"),
        ("qemu-aarch64", "-L", f"/usr/{prefix}", "-cpu", "max"),
    )


VARIANTS = {
    "avx2": Variant([f"-DGGML_{name}=ON" for name in ("AVX", "AVX2", "FMA", "F16C", "BMI2")]),
    "neon": arm("armv8.6-a+i8mm+bf16+dotprod+fp16"),
    "neon-dotprod": arm("armv8.2-a+dotprod+fp16")._replace(tests=("mul_mat",)),
}


def missing(name: str) -> str | None:
    """Why the variant cannot be built or run here."""
    variant = VARIANTS[name]
    if variant.compilers is None:
        flags = Path("/proc/cpuinfo")
        if platform.machine() not in ("x86_64", "AMD64"):
            return f"{name} needs an x86 machine"
        if flags.is_file() and not {"avx2", "fma", "f16c"} <= set(flags.read_text().split()):
            return f"{name} needs a CPU with AVX2, FMA and F16C"
    wanted = ["cmake", *(variant.compilers or ()), *variant.emulator[:1]]
    lacking = [tool for tool in wanted if shutil.which(tool) is None]
    if lacking:
        hint = "on Debian: apt install cmake g++-aarch64-linux-gnu qemu-user"
        return f"{name} needs {', '.join(lacking)} ({hint})"
    return None


def build(name: str) -> Path:
    """The folder of the variant's libraries; raises CalledProcessError."""
    out = FOLDER / name
    python = [sys.executable]
    run([*python, ROOT / "patches" / "patchset.py", "apply", TREE])
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    if not (out / "CMakeCache.txt").is_file():
        run(["cmake", "-S", TREE, "-B", out, *generator, *COMMON, *VARIANTS[name].options])
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or subprocess.check_output(
        [*python, ROOT / "patches" / "patchlib" / "jobs.py"], text=True
    )
    run(["cmake", "--build", out, "--target", "ggml", "--parallel", jobs.strip()])
    return out / "bin"


def run(command: list[str | Path]) -> None:
    """Shows the output only where it fails: compilers warn about llama.cpp's own files."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout[-8000:], file=sys.stderr)
    done.check_returncode()


def environment(name: str, libraries: Path) -> dict[str, str]:
    """What tests/native/conftest.py reads."""
    variant = VARIANTS[name]
    compiler = variant.compilers[1] if variant.compilers else shutil.which("c++") or "g++"
    return {
        **os.environ,
        "DFLASH_NATIVE_LIB_DIR": str(libraries),
        "DFLASH_NATIVE_CXX": shlex.join([compiler, f"-I{TREE / 'ggml' / 'include'}"]),
        "DFLASH_NATIVE_RUN": shlex.join(variant.emulator),
    }


def check(name: str, arguments: list[str]) -> int:
    """Builds the variant and runs its tests: pytest's exit code, or SKIPPED."""
    reason = missing(name)
    if reason:
        print(f"not checked: {reason}", file=sys.stderr)
        return SKIPPED
    try:
        libraries = build(name)
    except subprocess.CalledProcessError as error:
        print(f"error: `{shlex.join(map(str, error.cmd))}` failed", file=sys.stderr)
        return 1
    tests = [f"tests/native/test_{test}.py" for test in VARIANTS[name].tests]
    command = [sys.executable, "-m", "pytest", *tests, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(name, libraries)).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in VARIANTS:
        print(f"error: expected one of {', '.join(VARIANTS)}", file=sys.stderr)
        sys.exit(2)
    sys.exit(check(sys.argv[1], sys.argv[2:]))
