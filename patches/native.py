#!/usr/bin/env python3
"""Configures, builds and installs the native part; `make` calls it with the Python of .venv.

    native.py tools     make sure that a compiler, cmake and ninja are there (pip's where missing)
    native.py bindings  install the base's Python files (llama_cpp) without their own native build
    native.py release   build/release: the patched llama.cpp, installed into dflash_cpp/
    native.py cuda      build/cuda: the same with -DGGML_CUDA=ON
    native.py stock     build/stock: the unpatched base with the same flags, left in its folder

Environment: CMAKE_ARGS (options of llama.cpp and CMake), CMAKE_BUILD_PARALLEL_LEVEL, CC, CXX,
LLAMA_CPP_SOURCE. A second run does only what has changed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from patchlib import PatchsetError, exit_code
from patchlib.base import fetch, read_base_toml
from patchlib.jobs import cores, free_memory, jobs

ROOT = Path(__file__).resolve().parent.parent
MIN_CMAKE = (3, 21)
OPTIONS = {"release": [], "cuda": ["-DGGML_CUDA=ON"], "stock": ["-DDFLASH_STOCK=ON"]}
RECORD = ".dflash-configured"  # the options a folder was configured with


def main(arguments: list[str]) -> int:
    """Returns 0 done, 1 failed, 2 bad usage, 130 interrupted."""
    kinds = ["tools", "bindings", *OPTIONS]
    if len(arguments) != 1 or arguments[0] not in kinds:
        print(f"error: found `{' '.join(arguments)}`, expected one of {kinds}", file=sys.stderr)
        return 2
    return exit_code(lambda: run(arguments[0]), "; run it again to continue")


def run(kind: str) -> int:
    """One of the commands above. Returns 0."""
    check_compiler()
    cmake = find_cmake()
    if kind == "bindings":
        install_bindings()
    elif kind != "tools":
        build(kind, cmake)
    return 0


def check_compiler() -> None:
    """Raises PatchsetError when no C++ compiler is found."""
    named = os.environ.get("CXX")
    names = [shlex.split(named)[0]] if named else ["c++", "g++", "clang++"]
    if not any(shutil.which(name) for name in names):
        raise PatchsetError(
            f"no C++ compiler found (looked for {', '.join(names)}); install one, for instance"
            " `apt install g++`, or name it in CXX"
        )


def find_cmake() -> str:
    """The cmake to use, and ninja beside it: the system's, else pip's, installed into .venv."""
    cmake = _recent_cmake()
    wanted = [] if cmake else ["cmake>=3.21"]
    if not shutil.which("ninja"):
        wanted.append("ninja")
    if wanted:
        command = [sys.executable, "-m", "pip", "install", "--quiet", *wanted]
        if subprocess.run(command).returncode and not cmake:
            raise PatchsetError(
                "no cmake 3.21 or newer found, and pip could not install one; install it, for"
                " instance `apt install cmake`"
            )
    return cmake or str(Path(sys.executable).parent / "cmake")


def _recent_cmake() -> str | None:
    for name in (shutil.which("cmake"), str(Path(sys.executable).parent / "cmake")):
        if not name or not Path(name).is_file():
            continue
        shown = subprocess.run([name, "--version"], capture_output=True, text=True).stdout
        match = re.search(r"version (\d+)\.(\d+)", shown)
        if match and (int(match[1]), int(match[2])) >= MIN_CMAKE:
            return name
    return None


def install_bindings() -> None:
    """Installs llama-cpp-python's Python files; the native part beside them is our own build."""
    info = read_base_toml(ROOT / "patches" / "base.toml")
    try:
        if metadata.version(info.package) == info.version:
            return
    except metadata.PackageNotFoundError:
        pass
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation"]
    environment = {**os.environ, "CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}
    if subprocess.run([*command, str(fetch(info))], env=environment).returncode:
        raise PatchsetError(f"pip could not install {info.package} {info.version}; see above")


def configure_options(kind: str) -> list[str]:
    """Options of the user come last, so they win."""
    try:
        given = shlex.split(os.environ.get("CMAKE_ARGS", ""))
    except ValueError as error:
        raise PatchsetError(f"CMAKE_ARGS cannot be read: {error}", code=2) from error
    return [
        f"-DCMAKE_INSTALL_PREFIX={ROOT}",
        f"-DPython3_EXECUTABLE={sys.executable}",
        f"-DLLAMA_CPP_SOURCE={os.environ.get('LLAMA_CPP_SOURCE', '')}",
        *OPTIONS[kind],
        *given,
    ]


def default_options() -> list[str]:
    """Lines of CMakeLists.txt with defaults: they act only where the cache has no value yet."""
    lines = (ROOT / "CMakeLists.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.startswith("dflash_default(")]


def build(kind: str, cmake: str) -> None:
    """Configures when the options changed, builds, and installs all but the stock build."""
    folder = ROOT / "build" / kind
    options = configure_options(kind)
    configure(cmake, folder, options)
    compile_targets(cmake, folder, ["dflash_toolkit"], cuda="-DGGML_CUDA=ON" in options)
    if kind != "stock":
        _install(cmake, folder)


def configure(cmake: str, folder: Path, options: list[str]) -> None:
    """Configures unless the folder was configured with just these options."""
    record = folder / RECORD
    wanted = "\n".join([*options, *default_options()]) + "\n"
    configured = record.is_file() and record.read_text() == wanted
    if not configured or not _can_build(folder):
        # Options of an earlier run would live on in the cache.
        (folder / "CMakeCache.txt").unlink(missing_ok=True)
        record.unlink(missing_ok=True)
        generator = _generator(folder)
        _run([cmake, "-S", str(ROOT), "-B", str(folder), *generator, *options], "configuring")
        record.write_text(wanted)


def compile_targets(cmake: str, folder: Path, targets: list[str], *, cuda: bool = False) -> None:
    """Builds targets with as many jobs as the machine holds, or as the user says."""
    level = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL")
    count = level or str(jobs(cores(), free_memory(), cuda=cuda))
    command = [cmake, "--build", str(folder), "--target", *targets, "--parallel", count]
    _run(command, "building")


def _can_build(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("build.ninja", "Makefile"))


def _generator(folder: Path) -> list[str]:
    """Ninja where there is one, but never another generator than the folder already has."""
    if (folder / "Makefile").is_file():
        return ["-G", "Unix Makefiles"]
    if os.environ.get("CMAKE_GENERATOR"):
        return []
    beside = Path(sys.executable).parent / "ninja"
    return ["-G", "Ninja"] if shutil.which("ninja") or beside.is_file() else []


def _install(cmake: str, folder: Path) -> None:
    """Installs, and removes from these folders, which only hold build products, all else."""
    _run([cmake, "--install", str(folder)], "installing", quiet=True)
    installed = set((folder / "install_manifest.txt").read_text().splitlines())
    for name in ("lib", "bin", "include"):
        for path in (ROOT / "dflash_cpp" / name).rglob("*"):
            if (path.is_symlink() or path.is_file()) and str(path) not in installed:
                path.unlink()


def _run(command: list[str], what: str, quiet: bool = False) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE if quiet else None, text=True)
    if done.returncode:
        if quiet:
            print(done.stdout, file=sys.stderr)
        raise PatchsetError(f"{what} failed (exit code {done.returncode}); the reason stands above")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
