"""A mask embedding in its own file becomes a row of an embedding that the draft brings along."""

from __future__ import annotations

import builtins
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from converted import gguf_tensors
from hf_target import make_hf_target
from tiny_checkpoint import from_bf16_bits, to_bf16_bits, write_safetensors

import dflash_convert
from dflash_convert.conversion import ConvertResult
from dflash_convert.errors import InputError
from dflash_convert.gguf_file import read_gguf

Make = Callable[..., Path]
Edited = Callable[..., Path]

MASK = 298


def bf16(values: np.ndarray) -> np.ndarray:
    return from_bf16_bits(to_bf16_bits(np.asarray(values, np.float32)))


@pytest.fixture
def vector() -> np.ndarray:
    """A vector of the small draft's width that bfloat16 holds exactly."""
    return bf16(np.random.default_rng(5).normal(size=32))


def write_pt(directory: Path, value: Any) -> None:
    torch = pytest.importorskip("torch")
    torch.save(value, directory / "mask_embedding.pt")


def convert(checkpoint: Path, target: Path, **options: Any) -> ConvertResult:
    out = checkpoint.parent / f"{checkpoint.name}.gguf"
    return dflash_convert.convert(checkpoint, target, out, **options)


def check(result: ConvertResult, target: Path, vector: np.ndarray) -> None:
    """The table is the target's but for the mask token's row, the head is the target's."""
    tensors, theirs = gguf_tensors(result.path), gguf_tensors(target)
    table = bf16(theirs["token_embd.weight"][1])
    table[MASK] = vector
    assert np.array_equal(tensors["token_embd.weight"][1], table)
    head = theirs.get("output.weight", theirs["token_embd.weight"])[1]
    assert np.array_equal(tensors["output.weight"][1], bf16(head))
    assert dflash_convert.check_pair(target, result.path) == []
    (warning,) = (w for w in result.warnings if "mask_embedding" in w)
    assert "its own embedding and head (the target's embedding and head)" in warning


@pytest.mark.parametrize("form", ["dict", "flat", "row", "named"])
def test_pt(small: Make, small_target: Path, vector: np.ndarray, form: str) -> None:
    torch = pytest.importorskip("torch")
    path = small()
    stored = torch.from_numpy(vector).to(torch.bfloat16)
    forms: dict[str, Any] = {
        "dict": {"mask_token_id": MASK, "embedding": stored},
        "flat": stored,
        "row": stored[None],
        "named": {"mask_embedding": stored, "mask_token_id": torch.tensor(MASK)},
    }
    write_pt(path, forms[form])
    check(convert(path, small_target, outtype="bf16"), small_target, vector)


@pytest.mark.parametrize("name", ["mask_embedding", "embedding", "weight"])
def test_safetensors(small: Make, small_target: Path, vector: np.ndarray, name: str) -> None:
    path = small(shards=2)
    write_safetensors(path / "mask_embedding.safetensors", {name: vector})
    index = path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"][name] = "mask_embedding.safetensors"
    index.write_text(json.dumps(document))
    check(convert(path, small_target, outtype="bf16"), small_target, vector)


def test_a_quantised_target_lends_what_it_computes_with(
    small: Make, small_target: Path, edited: Edited, vector: np.ndarray
) -> None:
    path = small()
    write_safetensors(path / "mask_embedding.safetensors", {"mask_embedding": vector})
    values = gguf_tensors(small_target)["token_embd.weight"][1]
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    target = edited(
        small_target, "quantised", tensors={"token_embd.weight": raw}, drop=("output.weight",)
    )
    assert gguf_tensors(target)["token_embd.weight"][0] == "Q8_0"
    check(convert(path, target), target, vector)  # auto: the type of the draft, not of the table


def test_what_the_draft_has_stays_its_own(
    small: Make, small_target: Path, vector: np.ndarray
) -> None:
    path = small(own_embedding=True, own_head=True)
    before = gguf_tensors(convert(path, small_target).path)
    write_safetensors(path / "mask_embedding.safetensors", {"mask_embedding": vector})
    result = convert(path, small_target, force=True)
    after = gguf_tensors(result.path)
    table = before["token_embd.weight"][1].copy()
    table[MASK] = vector
    assert np.array_equal(after["token_embd.weight"][1], table)
    assert np.array_equal(after["output.weight"][1], before["output.weight"][1])
    assert not any("target's" in w for w in result.warnings)


def refused(checkpoint: Path, target: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        convert(checkpoint, target)
    assert not list(checkpoint.parent.glob("*.gguf"))
    return caught.value


def test_files_that_cannot_be_used(small: Make, small_target: Path, vector: np.ndarray) -> None:
    path = small()
    file = path / "mask_embedding.safetensors"
    for values, expected in (
        (vector[:31], "has a vector of 31, expected 32"),
        (np.stack([vector, vector]), "has a vector of 2 x 32, expected 32"),
        (np.where(np.arange(32) == 3, np.nan, vector), "NaN or infinite"),
        (np.arange(32), "no float tensor `mask_embedding`"),
    ):
        write_safetensors(file, {"mask_embedding": values}, "f32")
        assert expected in str(refused(path, small_target))
    write_safetensors(file, {"a": vector, "b": vector})
    assert "no float tensor `mask_embedding`" in str(refused(path, small_target))
    write_safetensors(file, {"embedding": vector, "mask_token_id": np.array([7])})
    assert f"is for token 7, but the config's mask_token_id is {MASK}" in str(
        refused(path, small_target)
    )
    file.write_bytes(b"xx")
    assert "damaged or truncated safetensors file" in str(refused(path, small_target))


def test_pt_files_that_cannot_be_used(small: Make, small_target: Path, vector: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    path = small()
    write_pt(path, {"mask_token_id": 7, "embedding": torch.from_numpy(vector)})
    assert "is for token 7" in str(refused(path, small_target))
    write_pt(path, {"something": torch.from_numpy(vector)})
    assert "no float tensor `embedding`" in str(refused(path, small_target))
    write_pt(path, torch.arange(32))
    assert "no float tensor `embedding`" in str(refused(path, small_target))
    (path / "mask_embedding.pt").write_bytes(b"PK\x03\x04 not a zip")
    assert "is damaged or no file of tensors" in str(refused(path, small_target))


class _Planted:
    """Runs code when it is unpickled by a careless reader."""

    def __reduce__(self) -> Any:
        return (open, ("planted", "w"))


def test_a_pickle_cannot_run_code(
    small: Make, small_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    path = small()
    (path / "mask_embedding.pt").write_bytes(pickle.dumps(_Planted()))
    assert "is damaged or no file of tensors" in str(refused(path, small_target))
    assert not (tmp_path / "planted").exists()


def test_pt_without_torch(small: Make, small_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small()
    (path / "mask_embedding.pt").touch()
    plain = builtins.__import__

    def without_torch(name: str, *args: Any, **more: Any) -> Any:
        if name == "torch":
            raise ImportError(name)
        return plain(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    error = refused(path, small_target)
    assert "needs PyTorch to be read, which is not installed" in str(error)
    assert "mask_embedding.safetensors" in str(error.hint)


@pytest.mark.native
def test_equal_to_the_bases_converter(base_gguf_py: Path, make: Make, tmp_path: Path) -> None:
    """From the target's directory and from its GGUF, the base and we write the same tensors."""
    torch = pytest.importorskip("torch")
    path = make(dtype="bf16")
    values = bf16(np.random.default_rng(6).normal(size=288))
    write_pt(path, {"mask_token_id": MASK, "embedding": torch.from_numpy(values)})
    target = make_hf_target(tmp_path / "target")
    stock = tmp_path / "stock.gguf"
    jobs = [
        [str(target), "--outfile", f"{target}.gguf", "--outtype", "f16"],
        [str(path), "--target-model-dir", str(target), "--outfile", str(stock), "--outtype", "f16"],
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("stock_jobs.py")
    done = subprocess.run(
        [sys.executable, str(script), str(base_gguf_py.parent), str(tmp_path / "jobs.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = gguf_tensors(stock)
    assert np.array_equal(theirs["token_embd.weight"][1][MASK], values.astype(np.float16))
    fields = []
    for given in (target, tmp_path / "target.gguf"):
        result = convert(path, given, outtype="f16", force=True)
        whole = read_gguf(result.path).fields
        fields.append({k: v for k, v in whole.items() if not k.startswith("general.")})
        ours = gguf_tensors(result.path)
        assert ours.keys() == theirs.keys()
        for name, (kind, stored) in ours.items():
            assert (kind, stored.tolist()) == (theirs[name][0], theirs[name][1].tolist()), name
    assert fields[0] == fields[1]
