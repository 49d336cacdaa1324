"""Programs in C++ that the tests here drive, each compiled once for a module.

The tests of the CPU kernels can run against another build of ggml (variants.py does that):
DFLASH_NATIVE_LIB_DIR is the folder of its libraries, DFLASH_NATIVE_CXX the compiler with its
options, DFLASH_NATIVE_RUN what starts a program of it, for instance an emulator.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "patches" / "overlay" / "dflash"
INCLUDES = (
    SOURCES / "src",
    SOURCES / "include",
    ROOT / "patches" / "overlay" / "ggml" / "include",
    ROOT / "dflash_cpp" / "include",
)

Build = Callable[..., Path]


@pytest.fixture(scope="session")
def ggml_dir(request: pytest.FixtureRequest) -> Path:
    """Folder of the ggml libraries whose kernels are tested."""
    given = os.environ.get("DFLASH_NATIVE_LIB_DIR")
    return Path(given) if given else request.getfixturevalue("lib_dir")


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compile `name`.cpp with files of dflash/src (`sources`) and against `libraries`.

    `flags` follow the usual ones, `includes` come before the usual folders.
    """
    named = os.environ.get("DFLASH_NATIVE_CXX") or shutil.which("c++") or shutil.which("g++")
    if named is None:
        pytest.skip("needs a C++ compiler")
    compiler = shlex.split(named)
    starter = os.environ.get("DFLASH_NATIVE_RUN")

    def make(
        name: str,
        *,
        sources: tuple[str, ...] = (),
        libraries: tuple[str, ...] = (),
        lib_dir: Path | None = None,
        flags: tuple[str, ...] = (),
        includes: tuple[Path, ...] = (),
    ) -> Path:
        out = tmp_path_factory.mktemp("native") / name
        command: list[str | Path] = [*compiler, "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror"]
        command += [*flags, *(f"-I{folder}" for folder in (*includes, *INCLUDES))]
        command += [Path(__file__).with_name(f"{name}.cpp")]
        command += [SOURCES / "src" / source for source in sources]
        if lib_dir is not None:
            command += [f"-L{lib_dir}", *(f"-l{library}" for library in libraries)]
            command += [f"-Wl,-rpath,{lib_dir}", f"-Wl,-rpath-link,{lib_dir}"]
        if not starter:
            subprocess.run([*command, "-o", out], check=True)
            return out
        binary = out.with_suffix(".bin")
        subprocess.run([*command, "-o", binary], check=True)
        out.write_text(f'#!/bin/sh\nexec {starter} {shlex.quote(str(binary))} "$@"\n')
        out.chmod(0o755)
        return out

    return make
