"""Builds everything with sanitizers and runs the tests of our code in that build.

    sanitize.py address   AddressSanitizer and UndefinedBehaviorSanitizer
    sanitize.py thread    ThreadSanitizer, for the CPU kernels

Further arguments go to pytest in place of the usual choice of tests. The build lies in
build/sanitize; a second run builds only what has changed. The first report ends a process, so the
test that met it fails.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "sanitize"
SKIPPED = 77  # no exit code of pytest

NATIVE = "tests/native"
KERNELS = [f"tests/native/test_{name}.py" for name in ("mul_mat", "flash_attn", "draft_ops")]
PYTHON = [
    f"tests/runtime/test_{name}.py"
    for name in (
        "adaptive",
        "bigram",
        "capi",
        "draft_graph",
        "exact",
        "fuzz_draft",
        "hybrid_rollback",
        "libs",
        "llama",
        "llama_concurrency",
        "rejection",
    )
]
SERVER = [f"tests/server/test_{name}.py" for name in ("chat", "http", "mixed", "start", "verify")]


class Kind(NamedTuple):
    names: tuple[str, ...]  # as in llama.cpp's options
    flags: tuple[str, ...]
    runtimes: tuple[str, ...]  # to be loaded before Python, where it loads libraries built so
    environment: dict[str, str]
    tests: list[str]
    target: str = "dflash_toolkit"


KINDS = {
    "address": Kind(
        ("ADDRESS", "UNDEFINED"),
        ("-fsanitize=address,undefined",),
        ("libasan.so", "libubsan.so"),
        {
            # Python and torch free little at their end
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        },
        [NATIVE, *PYTHON, *SERVER],
    ),
    "thread": Kind(
        ("THREAD",),
        ("-fsanitize=thread",),
        (),
        {"TSAN_OPTIONS": "halt_on_error=1"},
        KERNELS,
        "ggml",
    ),
}

OPTIONS = [
    "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
    "-DCMAKE_C_FLAGS_RELWITHDEBINFO=-O1 -g1 -DNDEBUG",
    "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1 -DNDEBUG",
    # the threads of OpenMP's runtime, which is not built so, would be reported
    "-DGGML_OPENMP=OFF",
]


def build(name: str) -> Path:
    """The folder of programs and libraries; raises CalledProcessError."""
    out = FOLDER / name
    switches = [
        f"-D{part}_SANITIZE_{kind}=ON" for kind in KINDS[name].names for part in ("GGML", "LLAMA")
    ]
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    if not (out / "CMakeCache.txt").is_file():
        command = ["cmake", "-S", ROOT, "-B", out, *generator, *OPTIONS, *switches]
        subprocess.run([*command, f"-DPython3_EXECUTABLE={sys.executable}"], check=True)
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or subprocess.check_output(
        [sys.executable, ROOT / "patches" / "patchlib" / "jobs.py"], text=True
    )
    target = ["--target", KINDS[name].target, "--parallel", jobs.strip()]
    subprocess.run(["cmake", "--build", out, *target], check=True)
    return out / "bin"


def runtime(name: str) -> str | None:
    """Path of the compiler's runtime library `name`."""
    found = subprocess.check_output(["c++", f"-print-file-name={name}"], text=True).strip()
    return found if Path(found).is_absolute() else None


def check(name: str, arguments: list[str]) -> int:
    """Builds and runs the tests: pytest's exit code, or SKIPPED."""
    kind = KINDS[name]
    if shutil.which("c++") is None or shutil.which("cmake") is None:
        print("not checked: needs a C++ compiler and cmake", file=sys.stderr)
        return SKIPPED
    runtimes = [runtime(library) for library in kind.runtimes]
    if None in runtimes:
        print(f"not checked: the compiler has no {' or '.join(kind.runtimes)}", file=sys.stderr)
        return SKIPPED
    try:
        folder = build(name)
    except subprocess.CalledProcessError as error:
        print(f"error: `{shlex.join(map(str, error.cmd))}` failed", file=sys.stderr)
        return 1
    environment = {
        **os.environ,
        **kind.environment,
        "DFLASH_NATIVE_LIB_DIR": str(folder),
        "DFLASH_NATIVE_CXX": shlex.join(["c++", "-g1", *kind.flags]),
    }
    if runtimes:
        environment["LD_PRELOAD"] = " ".join(map(str, runtimes))
        environment |= {"DFLASH_LIB_PATH": str(folder), "DFLASH_BIN_PATH": str(folder)}
    command = [sys.executable, "-m", "pytest", *(arguments or kind.tests)]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in KINDS:
        print(f"error: expected one of {', '.join(KINDS)}", file=sys.stderr)
        sys.exit(2)
    sys.exit(check(sys.argv[1], sys.argv[2:]))
