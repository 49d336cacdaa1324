"""Fixtures of the patch set's tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mini_patchset import HOOK, Mini


@pytest.fixture
def mini(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mini:
    """Base of six files, one overlay file, one patch; nothing made yet."""
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LLAMA_CPP_SOURCE", raising=False)
    made = Mini(tmp_path / "project", tmp_path / "cache")
    made.overlay("ours/ours.cpp", "void ours() {}\n")
    made.patch("0010-hook.patch", HOOK)
    return made


@pytest.fixture(scope="session")
def gnu_patch() -> str:
    found = shutil.which("patch")
    if not found:
        pytest.skip("GNU patch is not installed")
    return found
