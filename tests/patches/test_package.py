"""What the build puts into the package: each library once, found from anywhere, no machine path."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import patchset
import pytest

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads ELF files"),
]

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {"libdflash.so", "libggml-base.so", "libggml-cpu.so", "libggml.so", "libllama.so",
             "libllama-common.so", "libmtmd.so"}  # fmt: skip
PROGRAMS = {"dflash-draft-round", "llama-bench", "llama-cli", "llama-quantize", "llama-server"}

LOAD_ALL = """
import ctypes, os, sys
from pathlib import Path
import llama_cpp
lib = Path(os.environ["LLAMA_CPP_LIB_PATH"])
for path in sorted(lib.glob("*.so")):
    ctypes.CDLL(str(path))
mapped = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if ".so" in line}
ours = {path for path in mapped if Path(path).name.startswith(("libggml", "libllama", "libdflash"))}
print("\\n".join(sorted(ours)))
"""


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("LD_LIBRARY_PATH", "PYTHONPATH")}


def dynamic_section(path: Path) -> dict[str, list[str]]:
    if not shutil.which("readelf"):
        pytest.skip("readelf is not installed")
    text = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True).stdout
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        kind = line.partition("(")[2].partition(")")[0]
        if "[" in line:
            found.setdefault(kind, []).append(line.partition("[")[2].partition("]")[0])
    return found


def test_each_library_is_there_once(lib_dir):
    names = {path.name for path in lib_dir.glob("*.so*")}
    assert names >= LIBRARIES
    assert not [name for name in names if not name.endswith(".so")]  # no versioned copies
    assert not [path for path in lib_dir.iterdir() if path.is_symlink()]


def test_libraries_and_programs_find_each_other(lib_dir, bin_dir):
    names = {path.name for path in lib_dir.glob("*.so")}
    for path in [*lib_dir.glob("*.so"), *(bin_dir / name for name in PROGRAMS)]:
        section = dynamic_section(path)
        # Without a SONAME of its own, a library is recorded by the path it was linked at.
        assert section.get("SONAME", [path.name]) == [path.name], path
        assert (path.parent == bin_dir) or "SONAME" in section, path
        run_path = (section.get("RUNPATH") or section["RPATH"])[0].split(":")
        assert run_path[0] == "$ORIGIN", path
        if path.parent == bin_dir:
            assert "$ORIGIN/../lib" in run_path, path
        assert not [name for name in section["NEEDED"] if "/" in name], path
        ours = [
            name
            for name in section["NEEDED"]
            if name.startswith(("libggml", "libllama", "libdflash", "libmtmd"))
        ]
        assert set(ours) <= names, path


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_program_starts_anywhere(lib_dir, bin_dir, program, tmp_path):
    flag = "--version" if program in ("llama-server", "llama-cli") else "--help"
    done = subprocess.run(
        [bin_dir / program, flag],
        cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert "error while loading shared libraries" not in output
    if flag == "--version":
        assert done.returncode == 0
        commit = json.loads((lib_dir / "build-info.json").read_text())["base_commit"]
        assert commit == "local source" or commit[:9] in output
    else:
        assert "usage" in output.lower()


def test_no_machine_path_in_binaries(lib_dir, bin_dir):
    for path in [*lib_dir.glob("*.so"), *(bin_dir / name for name in PROGRAMS)]:
        assert str(ROOT).encode() not in path.read_bytes(), path.name


def test_llama_cpp_loads_each_library_once_and_ours(lib_dir, tmp_path):
    environment = {**clean_environment(), "LLAMA_CPP_LIB_PATH": str(lib_dir)}
    done = subprocess.run(
        [sys.executable, "-c", LOAD_ALL],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert {Path(path).parent.resolve() for path in loaded} == {lib_dir.resolve()}
    assert len({Path(path).name for path in loaded}) == len(loaded)


def test_header_compiles_as_c(lib_dir, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or pytest.skip("no C compiler")
    source = tmp_path / "use.c"
    source.write_text('#include "dflash.h"\nint main(void) { return 0; }\n')
    command = [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
               f"-I{lib_dir.parent / 'include'}", str(source)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_build_info_and_licences(lib_dir, capsys):
    info = json.loads((lib_dir / "build-info.json").read_text())
    assert "cpu" in info["backends"]
    if info["base_commit"] != "local source":
        assert patchset.main(["stamp"]) == 0
        assert info["patch_key"] == capsys.readouterr().out.strip(), "stale: run `make build`"
    assert "MIT" in (lib_dir / "licenses/LICENSE").read_text()


@pytest.mark.slow
def test_wheel_is_complete_and_works_by_itself(lib_dir, tmp_path):
    """`pip install .` in small: the wheel is built without isolation, unpacked, and run."""
    environment = {**clean_environment(), "CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}
    # pip would take the compiler's name from Python; with make's name ccache has it all already.
    environment |= {name: program for name, program in (("CC", "cc"), ("CXX", "c++"))
                    if name not in environment and shutil.which(program)}  # fmt: skip
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
               "--wheel-dir", str(tmp_path), str(ROOT)]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        modes = {i.filename: i.external_attr >> 16 for i in archive.infolist()}
        archive.extractall(tmp_path / "site")
    assert wheel.name.startswith("dflash_toolkit-")
    assert "-py3-none-" in wheel.name
    libraries = [name for name in names if ".so" in name]
    assert sorted(libraries) == sorted(f"dflash_cpp/lib/{p.name}" for p in lib_dir.glob("*.so"))
    for name in PROGRAMS:
        assert modes[f"dflash_cpp/bin/{name}"] & 0o111
    for name in ("dflash_cpp/__init__.py", "dflash_convert/__init__.py",
                 "dflash_cpp/include/dflash.h"):  # fmt: skip
        assert name in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "dflash_cpp", "dflash_convert"
    }  # fmt: skip
    for name in PROGRAMS:
        path = tmp_path / "site/dflash_cpp/bin" / name
        path.chmod(0o755)
        done = subprocess.run([path, "--help"], env=clean_environment(), capture_output=True)
        assert b"error while loading shared libraries" not in done.stderr
