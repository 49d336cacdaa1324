"""The verification of a written file must be able to fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

import dflash_convert
from dflash_convert import conversion, quantize, write
from dflash_convert.errors import FailureError
from dflash_convert.gguf_file import read_gguf
from dflash_convert.tensor_types import OUT_TYPES

Make = Callable[..., Path]


def _spoil(path: Path, name: str) -> None:
    info = read_gguf(path).tensors[name]
    with path.open("r+b") as file:
        file.seek(info.offset + (info.nbytes or 0) // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "output_norm.weight", "fc.weight"])
@pytest.mark.parametrize("outtype", sorted(OUT_TYPES))
def test_a_flipped_bit_is_found_and_the_file_removed(
    make: Make,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    outtype: str,
) -> None:
    original = write.write_gguf

    def spoiling(plan: Any, path: Path, *rest: Any) -> Any:
        checksums = original(plan, path, *rest)
        _spoil(path, name)
        return checksums

    monkeypatch.setattr(conversion, "write_gguf", spoiling)
    with pytest.raises(FailureError, match="differs from its source") as caught:
        dflash_convert.convert(make(layers=1), target, tmp_path / "out.gguf", outtype)
    assert any(name in p for p in caught.value.problems)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("outtype", ["f16", "q8_0"])
def test_a_wrong_encoder_is_found(
    make: Make, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outtype: str
) -> None:
    original = quantize.encode

    def wrong(stored: Any, dtype: str, out: Any, row: int) -> Any:
        encoded = original(stored, dtype, out, row)
        return encoded[::-1].copy() if out.name == outtype else encoded

    monkeypatch.setattr(write, "encode", wrong)
    with pytest.raises(FailureError, match="differs from its source"):
        dflash_convert.convert(make(layers=1), target, tmp_path / "out.gguf", outtype)


def test_a_wrong_key_is_found(
    small: Make, small_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = gguf.GGUFWriter.add_key_value

    def wrong(self: Any, key: str, val: Any, *rest: Any) -> None:
        original(self, key, val + 1 if key == "dflash.selector_rank" else val, *rest)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", wrong)
    with pytest.raises(FailureError, match="selector_rank") as caught:
        dflash_convert.convert(small(), small_target, tmp_path / "out.gguf")
    assert "is 9, expected 8" in caught.value.problems[0]
