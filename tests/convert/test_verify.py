"""The verification of a written file must be able to fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny import make_target

import dflash_convert
from dflash_convert import conversion, quantize, write
from dflash_convert.errors import FailureError
from dflash_convert.gguf_file import read_gguf
from dflash_convert.tensor_types import OUT_TYPES

Make = Callable[..., Path]


WIDE = {"hidden": 256, "layers": 1, "ffn": 256, "rank": 256, "heads": 4, "group": 16, "top_k": 4}


@pytest.fixture(scope="module")
def wide_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that fits `WIDE`."""
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    return make_target(path, "qwen3", n_layer=8, n_embd=256, n_ff=64, n_vocab=300)


def _spoil(path: Path, name: str, where: float) -> None:
    """Flip the lowest bit of one byte of a tensor."""
    info = read_gguf(path).tensors[name]
    with path.open("r+b") as file:
        file.seek(info.offset + int(((info.nbytes or 0) - 1) * where))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    ("outtype", "name", "where"),
    [(t, "blk.0.attn_q.weight", 0.5) for t in OUT_TYPES]
    + [("q4_k_m", n, w) for n in ("fc.weight", "output_norm.weight") for w in (0.0, 1.0)]
    + [("bf16", "fc.weight", 0.0), ("f32", "blk.0.ffn_conv_base", 1.0)],
)
def test_a_flipped_bit_is_found_and_the_file_removed(
    make: Make,
    wide_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outtype: str,
    name: str,
    where: float,
) -> None:
    original = write.write_gguf

    def spoiling(plan: Any, path: Path, *rest: Any) -> Any:
        checksums = original(plan, path, *rest)
        _spoil(path, name, where)
        return checksums

    monkeypatch.setattr(conversion, "write_gguf", spoiling)
    with pytest.raises(FailureError, match="differs from its source") as caught:
        dflash_convert.convert(make(**WIDE), wide_target, tmp_path / "out.gguf", outtype)
    assert f"`{name}` is not as it was written (pieces: 1)" in caught.value.problems
    assert "check the disk" in (caught.value.hint or "")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("outtype", [t for t in OUT_TYPES if t != "bf16"])
def test_a_wrong_encoder_is_found(
    make: Make, wide_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outtype: str
) -> None:
    """What was written faithfully may still be wrong: the last rows come first."""
    original = quantize.encode

    def wrong(stored: Any, dtype: str, out: Any, row: int) -> Any:
        if stored.size > row and out is OUT_TYPES[outtype].base:
            stored = np.ascontiguousarray(stored.reshape(-1, row)[::-1]).ravel()
        return original(stored, dtype, out, row)

    monkeypatch.setattr(write, "encode", wrong)
    with pytest.raises(FailureError, match="differs from its source") as caught:
        dflash_convert.convert(make(**WIDE), wide_target, tmp_path / "out.gguf", outtype)
    assert all("are off by more than" in p for p in caught.value.problems)
    assert "choose another type" in (caught.value.hint or "")


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
