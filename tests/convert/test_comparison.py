"""`dflash-convert diff`: every difference between two files, by kind and by size."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from converted import gguf_tensors

import dflash_convert
from dflash_convert.errors import InputError

Make = Callable[..., Path]
Edited = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def draft(small: Make, small_target: Path, tmp_path: Path) -> Path:
    return dflash_convert.convert(small("ckpt"), small_target, tmp_path / "draft.gguf").path


def test_a_copy_is_the_same(draft: Path, edited: Edited) -> None:
    copy = edited(draft, "copy")
    data = dflash_convert.diff(draft, copy)
    assert data["same"]
    assert data["keys"]["different"] == data["tensors"]["different"] == []
    assert (data["keys"]["same"], data["tensors"]["same"]) == (
        len([f for f in gguf.GGUFReader(draft).fields if not f.startswith("GGUF.")]),
        len(gguf_tensors(draft)),
    )


def test_keys(draft: Path, edited: Edited) -> None:
    tokens = gguf.GGUFReader(draft).fields["tokenizer.ggml.tokens"].contents()
    keys = {
        "dflash.block_size": 7,
        "dflash.attention.causal": None,
        "general.more": "x",
        "tokenizer.ggml.tokens": [*tokens[:42], "other", *tokens[43:-1]],
    }
    data = dflash_convert.diff(draft, edited(draft, "changed", keys=keys))
    assert not data["same"]
    assert [k["name"] for k in data["keys"]["only_a"]] == ["dflash.attention.causal"]
    assert data["keys"]["only_b"] == [{"name": "general.more", "type": "str", "value": "x"}]
    found = {k["name"]: k for k in data["keys"]["different"]}
    assert found.keys() == {"dflash.block_size", "tokenizer.ggml.tokens"}
    block = found["dflash.block_size"]
    assert (block["a"]["value"], block["b"]["value"]) == (8, 7)
    texts = found["tokenizer.ggml.tokens"]
    assert (texts["first_difference"], texts["differences"]) == (42, 2)


def test_a_key_of_another_type_is_different(draft: Path, edited: Edited) -> None:
    data = dflash_convert.diff(draft, edited(draft, "changed", keys={"dflash.block_size": "8"}))
    (entry,) = data["keys"]["different"]
    assert (entry["a"]["type"], entry["b"]["type"]) == ("u32", "str")


def test_tensors(draft: Path, edited: Edited) -> None:
    norm = gguf_tensors(draft)["output_norm.weight"][1].copy()
    norm[3] += 0.25
    norm[5] -= 0.125
    changed = edited(
        draft,
        "changed",
        drop=("fc.weight",),
        tensors={"output_norm.weight": norm, "more": np.zeros((2, 3), np.float32)},
    )
    data = dflash_convert.diff(draft, changed)
    (missing,), (added,), (entry,) = (data["tensors"][k] for k in ("only_a", "only_b", "different"))
    assert (missing["name"], missing["shape"]) == ("fc.weight", [32, 64])
    assert (added["name"], added["type"], added["bytes"]) == ("more", "F32", 24)
    assert (entry["name"], entry["changed"]) == ("output_norm.weight", 2)
    assert entry["max_error"] == pytest.approx(0.25)
    assert entry["max_value"] == pytest.approx(np.abs(norm).max(), rel=0.2)


def test_types_are_compared_by_value(small: Make, small_target: Path, tmp_path: Path) -> None:
    checkpoint = small("ckpt")
    a, b, c = (
        dflash_convert.convert(checkpoint, small_target, tmp_path / f"{t}.gguf", t).path
        for t in ("f32", "bf16", "q8_0")
    )
    exact = {t["name"]: t for t in dflash_convert.diff(a, b)["tensors"]["different"]}
    fc = exact["fc.weight"]
    assert (fc["a"]["type"], fc["b"]["type"]) == ("F32", "BF16")
    assert (fc["changed"], fc["max_error"]) == (0, 0.0)  # the checkpoint is bfloat16
    rounded = {t["name"]: t for t in dflash_convert.diff(a, c)["tensors"]["different"]}
    one, two = gguf_tensors(a), gguf_tensors(c)
    for name, entry in rounded.items():
        gap = np.abs(one[name][1].astype(np.float64) - two[name][1])
        assert entry["max_error"] == pytest.approx(gap.max())
        assert entry["changed"] == np.count_nonzero(gap)
    assert rounded["fc.weight"]["max_error"] > 0


def test_other_shapes_and_nan(draft: Path, edited: Edited) -> None:
    shaped = edited(draft, "shaped", tensors={"output_norm.weight": np.zeros(31, np.float32)})
    (entry,) = dflash_convert.diff(draft, shaped)["tensors"]["different"]
    assert "changed" not in entry
    assert (entry["a"]["shape"], entry["b"]["shape"]) == ([32], [31])
    broken = np.full(32, np.nan, np.float32)
    bad = edited(draft, "bad", tensors={"output_norm.weight": broken})
    (entry,) = dflash_convert.diff(draft, bad)["tensors"]["different"]
    assert entry["changed"] == 32
    assert np.isnan(entry["max_error"])


def test_pieces_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of several pieces, different in the last of them only."""
    monkeypatch.setattr("dflash_convert.comparison._PIECE", 64)
    values = np.arange(1000, dtype=np.float32).reshape(100, 10)
    for name, last in (("a", 999), ("b", 1001.5)):
        values[-1, -1] = last
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "x")
        writer.add_tensor("t", values.copy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    (entry,) = dflash_convert.diff(tmp_path / "a.gguf", tmp_path / "b.gguf")["tensors"]["different"]
    assert (entry["changed"], entry["max_error"]) == (1, 2.5)


def test_files_that_cannot_be_compared(draft: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.gguf"
    part.write_bytes(draft.read_bytes()[:-1000])
    with pytest.raises(InputError, match=r"is cut off: .* reach beyond its end"):
        dflash_convert.diff(draft, part)
    with pytest.raises(InputError, match="no GGUF file"):
        dflash_convert.diff(tmp_path / "nothing.gguf", draft)


def test_the_command(run: Run, draft: Path, edited: Edited) -> None:
    norm = gguf_tensors(draft)["output_norm.weight"][1] + 0.5
    changed = edited(
        draft, "changed", keys={"dflash.block_size": 7}, tensors={"output_norm.weight": norm}
    )
    same = run("diff", draft, draft)
    keys = len([f for f in gguf.GGUFReader(draft).fields if not f.startswith("GGUF.")])
    assert same.returncode == 0, same.stderr
    assert same.stdout == f"{keys} keys and 21 tensors are the same\n"
    result = run("diff", draft, changed)
    assert result.returncode == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["dflash.block_size", "8", "7"] in lines
    assert any(line[:1] == ["output_norm.weight"] and "0.5" in line for line in lines)
    assert run("diff", draft, changed, "-q").stdout == "different\n"
    data = json.loads(run("diff", draft, changed, "--json").stdout)
    assert (data["schema"], data["same"]) == (1, False)
    missing = run("diff", draft, "nothing.gguf")
    assert (missing.returncode, missing.stderr) == (2, "error: no GGUF file `nothing.gguf`\n")
