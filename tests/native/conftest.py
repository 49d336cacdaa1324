"""Programs in C++ that the tests here drive, each compiled once for a module."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "patches" / "overlay" / "dflash"

Build = Callable[..., Path]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compile `name`.cpp with files of dflash/src (`sources`) and against `libraries`."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")

    def make(
        name: str,
        *,
        sources: tuple[str, ...] = (),
        libraries: tuple[str, ...] = (),
        lib_dir: Path | None = None,
    ) -> Path:
        out = tmp_path_factory.mktemp("native") / name
        command: list[str | Path] = [compiler, "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror"]
        command += [f"-I{SOURCES / 'src'}", f"-I{SOURCES / 'include'}"]
        command += [f"-I{ROOT / 'patches' / 'overlay' / 'ggml' / 'include'}"]
        command += [f"-I{ROOT / 'dflash_cpp' / 'include'}", Path(__file__).with_name(f"{name}.cpp")]
        command += [SOURCES / "src" / source for source in sources]
        if lib_dir is not None:
            command += [f"-L{lib_dir}", *(f"-l{library}" for library in libraries)]
            command += [f"-Wl,-rpath,{lib_dir}", f"-Wl,-rpath-link,{lib_dir}"]
        subprocess.run([*command, "-o", out], check=True)
        return out

    return make
