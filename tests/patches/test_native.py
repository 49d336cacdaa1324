"""patches/native.py, the Makefile and the job count, with a stand-in for cmake."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import native
import pytest

from patchlib import jobs
from patchlib.base import read_base_toml

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30

FAKE_CMAKE = """#!{python}
import os, sys
from pathlib import Path
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("cmake version {version}")
    sys.exit()
with open({log!r}, "a") as log:
    log.write(" ".join(arguments) + "\\n")
if "-B" in arguments:
    if os.environ.get("FAIL") == "configure":
        sys.exit(1)
    folder = Path(arguments[arguments.index("-B") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").touch()
    (folder / "CMakeCache.txt").touch()
if "--install" in arguments:
    folder, names = Path(arguments[1]), os.environ["INSTALLS"].split()
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    (folder / "install_manifest.txt").write_text("\\n".join(names))
"""


class Fake:
    """A checkout without sources and a cmake that writes down how it is called."""

    def __init__(self, folder: Path) -> None:
        self.root, self.log, self.bin = folder / "checkout", folder / "log", folder / "bin"
        self.root.mkdir()
        self.bin.mkdir()
        (self.root / "CMakeLists.txt").write_text("dflash_default(GGML_RPC OFF)\n")
        self.program("cmake", self.cmake_text())
        for name in ("c++", "ninja"):
            self.program(name, "#!/bin/sh\n")

    def cmake_text(self, version: str = "3.25.1") -> str:
        return FAKE_CMAKE.format(python=sys.executable, log=str(self.log), version=version)

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def calls(self) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Fake:
    made = Fake(tmp_path)
    monkeypatch.setattr(native, "ROOT", made.root)
    monkeypatch.setenv("PATH", str(made.bin))
    for name in ("CMAKE_ARGS", "CXX", "LLAMA_CPP_SOURCE", "CMAKE_GENERATOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "3")
    monkeypatch.setenv("INSTALLS", str(made.root / "dflash_cpp/lib/liba.so"))
    return made


def test_missing_compiler(fake, monkeypatch, capsys):
    (fake.bin / "c++").unlink()
    assert native.main(["release"]) == 1
    assert capsys.readouterr().err == (
        "error: no C++ compiler found (looked for c++, g++, clang++); install one, for instance"
        " `apt install g++`, or name it in CXX\n"
    )
    monkeypatch.setenv("CXX", "my-cxx -m64")
    assert native.main(["release"]) == 1
    assert "(looked for my-cxx)" in capsys.readouterr().err
    assert fake.calls() == []


@pytest.mark.parametrize("old", [True, False], ids=["too old", "missing"])
def test_missing_cmake_comes_from_pip(fake, old, monkeypatch, capsys):
    if old:
        fake.program("cmake", fake.cmake_text("3.18.4"))
    else:
        (fake.bin / "cmake").unlink()
    venv = fake.root / ".venv/bin"
    venv.mkdir(parents=True)
    pip = '#!/bin/sh\n[ -z "$PIP_WORKS" ] && exit 1\necho "$@" > "$PIP_WORKS"\n'
    (venv / "python").write_text(pip)
    (venv / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(venv / "python"))
    assert native.main(["tools"]) == 1
    assert "no cmake 3.21 or newer found, and pip could not install one" in capsys.readouterr().err
    monkeypatch.setenv("PIP_WORKS", str(fake.root / "pip-was-asked-for"))
    assert native.find_cmake() == str(venv / "cmake")
    assert "cmake>=3.21" in (fake.root / "pip-was-asked-for").read_text()


def test_second_run_does_not_configure(fake):
    assert native.main(["release"]) == 0
    first, build, install = fake.calls()
    folder = fake.root / "build/release"
    assert first.startswith(f"-S {fake.root} -B {folder} -G Ninja ")
    assert f"-DCMAKE_INSTALL_PREFIX={fake.root}" in first
    assert build == f"--build {folder} --target dflash_toolkit --parallel 3"
    assert install == f"--install {folder}"
    assert native.main(["release"]) == 0
    assert fake.calls() == [build, install]


def test_changed_options_configure_afresh(fake, monkeypatch):
    native.main(["release"])
    fake.calls()
    cache = fake.root / "build/release/CMakeCache.txt"
    cache.write_text("GGML_CUDA=ON")
    monkeypatch.setenv("CMAKE_ARGS", '-DGGML_VULKAN=ON "-DNAME=two words"')
    native.main(["release"])
    first = fake.calls()[0]
    assert first.endswith("-DGGML_VULKAN=ON -DNAME=two words")
    assert cache.read_text() == ""  # nothing of the earlier options is left


def test_changed_defaults_configure_afresh(fake):
    """A default acts only where the cache has no value, which the last build has left there."""
    native.main(["release"])
    assert len(fake.calls()) == 3
    (fake.root / "CMakeLists.txt").write_text("dflash_default(GGML_RPC ON)\n")
    native.main(["release"])
    assert len(fake.calls()) == 3
    native.main(["release"])
    assert len(fake.calls()) == 2


def test_failed_configuration_is_tried_again(fake, monkeypatch, capsys):
    monkeypatch.setenv("FAIL", "configure")
    assert native.main(["release"]) == 1
    assert "error: configuring failed (exit code 1); the reason stands above" in (
        capsys.readouterr().err
    )
    monkeypatch.delenv("FAIL")
    fake.calls()
    assert native.main(["release"]) == 0
    assert fake.calls()[0].startswith("-S ")


def test_stock_is_not_installed_and_cuda_has_its_folder(fake):
    assert native.main(["stock"]) == 0
    configure, build = fake.calls()
    assert "-DDFLASH_STOCK=ON" in configure
    assert "--install" not in build
    assert native.main(["cuda"]) == 0
    configure = fake.calls()[0]
    assert "-DGGML_CUDA=ON" in configure
    assert "build/cuda" in configure


def test_installation_removes_what_is_no_longer_built(fake, monkeypatch):
    lib = fake.root / "dflash_cpp/lib"
    monkeypatch.setenv("INSTALLS", f"{lib}/liba.so {lib}/libggml-cuda.so")
    native.main(["cuda"])
    (lib / "libllama.so.0").symlink_to(lib / "liba.so")  # of an older build
    (lib.parent / "llama.py").touch()
    monkeypatch.setenv("INSTALLS", f"{lib}/liba.so")
    native.main(["release"])
    assert [path.name for path in lib.iterdir()] == ["liba.so"]
    assert (lib.parent / "llama.py").exists()


def test_bad_usage(fake, monkeypatch, capsys):
    assert native.main(["everything"]) == 2
    assert "found `everything`, expected one of" in capsys.readouterr().err
    monkeypatch.setenv("CMAKE_ARGS", '-DX="unclosed')
    assert native.main(["release"]) == 2
    assert "CMAKE_ARGS cannot be read: No closing quotation" in capsys.readouterr().err


def test_jobs_fit_cores_and_memory():
    assert jobs.jobs(8, None) == 8
    assert jobs.jobs(8, 64 * GIB) == 8
    assert jobs.jobs(8, 6 * GIB) == 4
    assert jobs.jobs(8, 6 * GIB, cuda=True) == 2
    assert jobs.jobs(8, GIB // 2) == 1


def test_memory_limit_of_a_container_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "CGROUP", tmp_path)
    unlimited = jobs.free_memory()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\nfile {GIB // 2}\n")
    assert unlimited is None or jobs.free_memory() > GIB // 2
    (tmp_path / "memory.max").write_text(f"{GIB + 4096}\n")
    assert jobs.free_memory() == GIB // 2 + 4096  # cache can be given back


def test_versions_agree():
    info = read_base_toml(ROOT / "patches/base.toml")
    text = (ROOT / "pyproject.toml").read_text()
    assert f'"{info.package}=={info.version}"' in text
    makefile = (ROOT / "Makefile").read_text()
    assert info.version not in makefile  # taken from base.toml there


def test_every_target_is_in_the_help():
    text = (ROOT / "Makefile").read_text()
    phony = {name for line in re.findall(r"^\.PHONY: (.*)", text, re.M) for name in line.split()}
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    assert set(re.findall(r"^  make (\S+) ", shown, re.M)) == phony
    needed = "help venv build build.cuda stock demo test test-all test-gpu patches patches-check"
    assert set(needed.split()) | {"lint", "format", "clean"} <= phony


def test_old_python_is_named(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    done = subprocess.run(
        ["make", "-s", "venv", "PYTHON=false"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "error: Python 3.10 or newer is needed, `false` is not" in done.stderr
    assert not (tmp_path / ".venv").exists()
