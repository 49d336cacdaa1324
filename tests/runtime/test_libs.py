"""Which native libraries are loaded, and what is said when they are the wrong ones.

One process loads one libllama for good, so every case is a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_cpp import _libs

# prints the sentence and the hint of a DFlashLibraryError
_REPORT = """
from dflash_cpp import DFlashError
try:
    from dflash_cpp import DFlashLlama
except DFlashError as exc:
    assert isinstance(exc, ImportError) and exc.exit_code == 1
    print(type(exc).__name__, exc, exc.hint, sep="\\n")
else:
    print("loaded")
"""


def python(code: str, tmp_path: Path, **variables: str | Path) -> str:
    """Run `code` in a new process and return what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_CPP", "MTMD"))}
    environment |= {k: str(v) for k, v in variables.items()}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def libraries() -> Path:
    if _libs.find_library("dflash") is None:
        pytest.skip(f"no libdflash in {_libs.library_dir()}; run `make build`")
    return _libs.library_dir()


@pytest.fixture
def copied(libraries: Path, tmp_path: Path) -> Path:
    """Another folder with the same libraries."""
    folder = tmp_path / "copy"
    shutil.copytree(libraries, folder)  # follows links
    return folder


def compile_library(path: Path, source: str) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make a stand-in library with")
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_suffix(".c")
    file.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, file], check=True)


def test_import_loads_nothing(tmp_path: Path) -> None:
    code = """
import sys
import dflash_cpp
assert set(dflash_cpp.__all__) <= set(dir(dflash_cpp))
heavy = {"numpy", "llama_cpp", "ctypes", "gguf", "torch"} & set(sys.modules)
maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
print(sorted(heavy), "libllama" in maps, dflash_cpp.__version__)
from dflash_cpp import DFlashPairError, DraftStats
print("llama_cpp" in sys.modules)
"""
    out = python(code, tmp_path).splitlines()
    assert out[0].startswith("[] False ")
    assert out[1] == "False"


def test_unknown_attribute() -> None:
    import dflash_cpp

    with pytest.raises(AttributeError, match="no attribute 'DFlashLama'"):
        _ = dflash_cpp.DFlashLama


def test_version_is_the_distributions(root: Path) -> None:
    import dflash_cpp

    line = f'version = "{dflash_cpp.__version__}"'
    assert line in (root / "pyproject.toml").read_text(encoding="utf-8").splitlines()


def test_folder_missing(tmp_path: Path) -> None:
    out = python(_REPORT, tmp_path, DFLASH_LIB_PATH=tmp_path / "nowhere")
    assert out.startswith("DFlashLibraryError\nno native libraries: ")
    assert "nowhere` (from DFLASH_LIB_PATH) does not exist" in out
    assert "make build" in out
    assert "pip install ." in out


def test_folder_without_llama(tmp_path: Path) -> None:
    out = python(_REPORT, tmp_path, DFLASH_LIB_PATH=tmp_path)
    assert "holds no libllama" in out


def test_llama_cpp_without_dflash(tmp_path: Path) -> None:
    (tmp_path / "libllama.so").touch()
    out = python(_REPORT, tmp_path, DFLASH_LIB_PATH=tmp_path)
    assert "a llama.cpp without libdflash" in out


def test_damaged_library(copied: Path, tmp_path: Path) -> None:
    (copied / "libdflash.so").unlink()
    (copied / "libdflash.so").write_text("not a library")
    out = python(_REPORT, tmp_path, DFLASH_LIB_PATH=copied)
    assert "does not load" in out
    assert "same build" in out


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("int dflash_api_version(void) { return 99; }", "has version 99 of the C API"),
        ("int something_else(void) { return 1; }", "has no dflash_api_version"),
    ],
)
def test_other_libdflash(copied: Path, tmp_path: Path, source: str, says: str) -> None:
    (copied / "libdflash.so").unlink()
    compile_library(copied / "libdflash.so", source)
    out = python(_REPORT, tmp_path, DFLASH_LIB_PATH=copied)
    assert says in out
    assert "make build" in out


def test_loads_and_points_llama_cpp_at_the_folder(libraries: Path, tmp_path: Path) -> None:
    code = (
        _REPORT
        + """
import os, llama_cpp
print(os.path.dirname(llama_cpp.llama_cpp._lib._name))
print(os.environ["LLAMA_CPP_LIB_PATH"])
"""
    )
    out = python(code, tmp_path, DFLASH_LIB_PATH=libraries, LLAMA_CPP_LIB_PATH=tmp_path)
    assert out.splitlines() == ["loaded", str(libraries), str(libraries)]


def test_llama_cpp_first_with_the_same_libraries(libraries: Path, tmp_path: Path) -> None:
    out = python(
        "import llama_cpp\n" + _REPORT,
        tmp_path,
        DFLASH_LIB_PATH=libraries,
        LLAMA_CPP_LIB_PATH=libraries,
    )
    assert out.startswith("loaded")


def test_llama_cpp_first_with_other_libraries(
    libraries: Path, copied: Path, tmp_path: Path
) -> None:
    out = python(
        "import llama_cpp\n" + _REPORT,
        tmp_path,
        DFLASH_LIB_PATH=libraries,
        LLAMA_CPP_LIB_PATH=copied,
    )
    sentence, hint = out.splitlines()[1:3]
    assert sentence.startswith("`llama_cpp` was imported with `")
    assert str(copied) in sentence
    assert str(libraries) in sentence
    assert f"LLAMA_CPP_LIB_PATH={libraries}" in hint


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which libraries are loaded")
def test_foreign_ggml_is_refused(libraries: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "other" / "libggml-base.so"
    compile_library(foreign, "int ggml_of_somebody_else(void) { return 1; }")
    code = f"import ctypes\nctypes.CDLL({str(foreign)!r})\n" + _REPORT
    out = python(code, tmp_path, DFLASH_LIB_PATH=libraries)
    assert f"already loaded `{foreign}`" in out
    assert "process of its own" in out


def test_gguf_uint32(libraries: Path, tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "dflash")
    writer.add_uint32("dflash.block_size", 12)
    writer.add_string("dflash.name", "x")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert _libs.gguf_uint32(path, "dflash.block_size") == 12
    assert _libs.gguf_uint32(path, "dflash.name") is None
    assert _libs.gguf_uint32(path, "dflash.nothing") is None
    assert _libs.gguf_uint32(tmp_path / "none.gguf", "dflash.block_size") is None
