"""Programs in C++ that the tests here drive, each compiled once for a module."""

from __future__ import annotations

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
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compile `name`.cpp with files of dflash/src (`sources`) and against `libraries`.

    `flags` follow the usual ones, `includes` come before the usual folders.
    """
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")

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
        command: list[str | Path] = [compiler, "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror"]
        command += [*flags, *(f"-I{folder}" for folder in (*includes, *INCLUDES))]
        command += [Path(__file__).with_name(f"{name}.cpp")]
        command += [SOURCES / "src" / source for source in sources]
        if lib_dir is not None:
            command += [f"-L{lib_dir}", *(f"-l{library}" for library in libraries)]
            command += [f"-Wl,-rpath,{lib_dir}", f"-Wl,-rpath-link,{lib_dir}"]
        subprocess.run([*command, "-o", out], check=True)
        return out

    return make
