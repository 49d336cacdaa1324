"""All or nothing on disk: no overwrite, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_convert
from dflash_convert import conversion, verify, write
from dflash_convert.errors import FailureError, InputError
from dflash_convert.gguf_file import read_gguf

Make = Callable[..., Path]


def test_no_overwrite_without_force(small: Make, small_target: Path, tmp_path: Path) -> None:
    checkpoint, out = small(), tmp_path / "out.gguf"
    out.write_text("precious")
    with pytest.raises(InputError, match="exists"):
        dflash_convert.convert(checkpoint, small_target, out)
    assert out.read_text() == "precious"
    dflash_convert.convert(checkpoint, small_target, out, force=True)
    assert read_gguf(out).architecture == "dflash"


def test_inputs_are_never_overwritten(small: Make, small_target: Path, tmp_path: Path) -> None:
    checkpoint = small()
    link = tmp_path / "link.gguf"
    link.symlink_to(small_target)
    for path in (small_target, link, checkpoint / "model.safetensors"):
        with pytest.raises(InputError, match="is an input of this conversion"):
            dflash_convert.convert(checkpoint, small_target, path, force=True)
    assert read_gguf(small_target).architecture == "qwen3"


def test_a_file_that_appears_meanwhile_survives(
    small: Make, small_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.gguf"
    check = verify.verify

    def slow(*args: Any) -> None:
        check(*args)
        out.write_text("somebody else's")

    monkeypatch.setattr(conversion, "verify", slow)
    with pytest.raises(InputError, match="exists"):
        dflash_convert.convert(small(), small_target, out)
    assert out.read_text() == "somebody else's"
    assert [p for p in tmp_path.iterdir() if p.name.endswith(".part")] == []


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left"), KeyboardInterrupt(), MemoryError()]
)
def test_any_end_in_the_middle_leaves_nothing(
    small: Make,
    small_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    calls = 0
    original = write.make_piece

    def failing(*args: Any) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise error
        return original(*args)

    monkeypatch.setattr(write, "make_piece", failing)
    checkpoint = small()
    with pytest.raises(type(error)):
        dflash_convert.convert(checkpoint, small_target, tmp_path / "out.gguf")
    assert calls >= 12
    assert [p.name for p in tmp_path.iterdir()] == [checkpoint.name]


def test_dry_run_checks_and_writes_nothing(small: Make, small_target: Path, tmp_path: Path) -> None:
    checkpoint = small()
    result = dflash_convert.convert(checkpoint, small_target, tmp_path / "x.gguf", dry_run=True)
    assert result.dry_run
    assert not result.path.exists()
    real = dflash_convert.convert(checkpoint, small_target, tmp_path / "x.gguf")
    assert result.plan.nbytes == real.plan.nbytes
    assert result.source_sha256 == real.source_sha256
    assert real.size == real.path.stat().st_size
    with pytest.raises(InputError, match="exists"):
        dflash_convert.convert(checkpoint, small_target, tmp_path / "x.gguf", dry_run=True)


def test_a_full_disk_is_known_before_the_work(
    small: Make, small_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = write.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: usage)
    checkpoint = small()
    monkeypatch.setattr(conversion, "scan", lambda *rest: pytest.fail("began to read"))
    for dry_run in (True, False):
        with pytest.raises(FailureError, match="1000 B free, the file needs"):
            dflash_convert.convert(checkpoint, small_target, tmp_path / "x.gguf", dry_run=dry_run)
