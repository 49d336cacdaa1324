"""Fixtures for where things are; a test that needs something not built is skipped with the reason.

The markers (slow, native, gpu, peer) are declared in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Tests count rounds and tokens, which adaptive lengths make depend on time. Tests of adaptive
# lengths ask for them.
os.environ["LLAMA_ARG_SPEC_DRAFT_ADAPTIVE"] = "off"

# A shell that starts the tests in the background has SIGINT ignored, and so would every process
# that a test starts in order to interrupt it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests skip themselves where no NVIDIA driver is."""
    if shutil.which("nvidia-smi"):
        return
    skip = pytest.mark.skip(reason="no CUDA device (nvidia-smi not found)")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def _needed(path: Path, command: str) -> Path:
    if not path.exists():
        pytest.skip(f"{path.relative_to(ROOT)} is missing; run `{command}`")
    return path


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def lib_dir() -> Path:
    """Folder of our shared libraries."""
    _needed(ROOT / "dflash_cpp" / "lib" / "build-info.json", "make build")
    return ROOT / "dflash_cpp" / "lib"


@pytest.fixture(scope="session")
def our_library() -> None:
    """libdflash and its libllama, loaded before anything imports llama_cpp."""
    from dflash_cpp import _libs

    if _libs.find_library("dflash") is None:
        pytest.skip("libdflash is missing; run `make build`")
    _libs.load()


@pytest.fixture(scope="session")
def bin_dir() -> Path:
    """Folder of our llama-server, llama-cli, llama-quantize and llama-bench."""
    return _needed(ROOT / "dflash_cpp" / "bin" / "llama-server", "make build").parent


@pytest.fixture(scope="session")
def stock_bin_dir() -> Path:
    """Folder of the unpatched programs and libraries."""
    return _needed(ROOT / "build" / "stock" / "bin" / "llama-server", "make stock").parent


@pytest.fixture(scope="session")
def base_gguf_py() -> Path:
    """The base's own gguf-py, which knows the dflash names (the one on PyPI may not)."""
    for kind in ("release", "stock", "cuda"):
        folder = ROOT / "build" / kind / "llama.cpp" / "gguf-py"
        if folder.is_dir():
            return folder
    pytest.skip("no llama.cpp tree in build/; run `make build`")
