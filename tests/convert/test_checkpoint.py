"""Opening a checkpoint: files, index, headers, and everything that can be wrong with them."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoint import draft_tensors, from_bf16_bits, to_bf16_bits, write_safetensors

from dflash_convert.checkpoint import Checkpoint, open_checkpoint
from dflash_convert.errors import FailureError, InputError

Make = Callable[..., Path]


def rewrite_header(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Replace the header of a safetensors file; the data stay."""
    raw = file.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    text = change(header)
    text = text if isinstance(text, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_checkpoint(path)
    return str(caught.value)


def test_bytes_are_those_of_the_tensor(small: Make) -> None:
    path = small(dtype="bf16")
    checkpoint = open_checkpoint(path)
    config = json.loads((path / "config.json").read_text())
    for name, values in draft_tensors(config).items():
        tensor = checkpoint.tensors[name]
        assert (tensor.shape, tensor.dtype) == (values.shape, "BF16")
        stored = tensor.read(0, tensor.elements)
        assert np.array_equal(from_bf16_bits(stored), from_bf16_bits(to_bf16_bits(values)).ravel())
        pieces = [tensor.read(start, count) for start, count in tensor.pieces(100)]
        assert np.array_equal(np.concatenate(pieces), stored)


def test_pieces_are_whole_rows_and_multiples(small: Make) -> None:
    tensor = open_checkpoint(small()).tensors["layers.0.self_attn.q_proj.weight"]
    assert tensor.shape == (32, 32)
    assert list(tensor.pieces(100)) == [(i * 96, 96) for i in range(10)] + [(960, 64)]
    assert list(tensor.pieces(100, multiple=16)) == [(0, 512), (512, 512)]
    assert list(tensor.pieces(10**9)) == [(0, 1024)]


@pytest.mark.parametrize(
    "variant",
    [
        {"shards": 3},
        {"shards": 3, "shard_prefix": "dflash_draft_model"},
        {"name_prefix": "model."},
        {"shards": 2, "name_prefix": "model.", "codebook_suffix": True},
    ],
)
def test_layouts_hold_the_same_tensors(small: Make, variant: dict[str, Any]) -> None:
    plain, other = (open_checkpoint(small(n, **v)) for n, v in (("a", {}), ("b", variant)))
    rename = {n: n.removesuffix("codebook.weight") + "codebook" for n in other.tensors}
    names = {rename[n] if n.endswith("codebook.weight") else n: n for n in other.tensors}
    assert set(names) == set(plain.tensors)
    for name, tensor in plain.tensors.items():
        twin = other.tensors[names[name]]
        assert np.array_equal(tensor.read(0, tensor.elements), twin.read(0, twin.elements))


def test_shards_without_an_index_are_found(small: Make) -> None:
    path = small(shards=3)
    (path / "model.safetensors.index.json").unlink()
    assert len(open_checkpoint(path).files) == 3
    (path / "model-00002-of-00003.safetensors").unlink()
    assert "1 of 3 parts are absent" in refused(path)
    assert "`model-00002-of-00003.safetensors`" in refused(path)


def test_index_that_names_absent_files_or_tensors(small: Make) -> None:
    path = small(shards=3)
    index = path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["layers.9.phantom"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(document))
    assert "`layers.9.phantom`, expected in `model-00001-of-00003.safetensors`" in refused(path)
    (path / "model-00003-of-00003.safetensors").unlink()
    assert "names 1 of 3 files that are absent" in refused(path)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, "has no `weight_map`"),
        ({"weight_map": []}, "has no `weight_map`"),
        ({"weight_map": {"a": 3}}, "has no `weight_map`"),
        ({"weight_map": {"a": "../outside.safetensors"}}, "outside its directory"),
        ({"weight_map": {"a": "/etc/passwd"}}, "outside its directory"),
        ({"weight_map": {"a": ""}}, "outside its directory"),
    ],
)
def test_unusable_index(small: Make, document: Any, expected: str) -> None:
    path = small()
    (path / "model.safetensors.index.json").write_text(json.dumps(document))
    assert expected in refused(path)


def test_two_indexes(small: Make) -> None:
    path = small(shards=2)
    shutil.copy(path / "model.safetensors.index.json", path / "other.safetensors.index.json")
    assert "has 2 indexes" in refused(path)


def test_a_tensor_in_two_files(small: Make) -> None:
    path = small()
    write_safetensors(path / "zz.safetensors", {"model.norm.weight": np.ones(32, np.float32)})
    message = refused(path)
    assert "holds tensors twice" in message
    assert "`norm.weight` is in `model.safetensors`" in message


def test_a_tensor_twice_in_one_header(small: Make) -> None:
    path = small()

    def double(header: dict[str, Any]) -> bytes:
        text = json.dumps(header)
        entry = json.dumps(header["norm.weight"])
        return (text[:-1] + f', "norm.weight": {entry}}}').encode()

    rewrite_header(path / "model.safetensors", double)
    assert "twice" in refused(path) or "damaged" in refused(path)


def test_truncated_and_foreign_files(small: Make) -> None:
    path = small()
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 4, 8, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert "damaged or truncated safetensors file" in refused(path)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    assert "damaged or truncated safetensors file" in refused(path)


def test_file_cut_off_after_it_was_opened(small: Make) -> None:
    path = small()
    last = max(open_checkpoint(path).tensors.values(), key=lambda t: t.offset)
    os.truncate(last.file, last.offset + 3)
    with pytest.raises(FailureError, match="ended inside tensor"):
        last.read(0, last.elements)


def test_directories_that_are_none(tmp_path: Path) -> None:
    assert "no checkpoint directory" in refused(tmp_path / "nothing")
    gguf = tmp_path / "x.gguf"
    gguf.touch()
    assert "is a GGUF file, expected a checkpoint directory" in refused(gguf)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no `config.json`" in refused(empty)
    (empty / "config.json").write_text("{}")
    assert "has no safetensors files" in refused(empty)
    (empty / "pytorch_model.bin").touch()
    assert "only pytorch_model.bin" in refused(empty)


def outcome(path: Path) -> Checkpoint | InputError:
    """Return what opening gives or the one kind of error it may raise."""
    try:
        return open_checkpoint(path)
    except InputError as exc:
        return exc


_JUNK = st.none() | st.integers(-(2**65), 2**65) | st.text(max_size=5) | st.lists(st.integers())


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_mutated_headers_are_read_or_refused(
    tmp_path: Path, small: Make, data: st.DataObject
) -> None:
    path = tmp_path / "draft"
    if not path.exists():
        small()
        shutil.copy(path / "model.safetensors", tmp_path / "whole")
    file = path / "model.safetensors"
    shutil.copy(tmp_path / "whole", file)
    if data.draw(st.booleans()):
        raw = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, 2000))] = data.draw(st.integers(0, 255))
        file.write_bytes(raw)
    else:

        def change(header: dict[str, Any]) -> None:
            name = data.draw(st.sampled_from(sorted(header)))
            if data.draw(st.booleans()):
                header[data.draw(st.text(max_size=6))] = header.pop(name)
            elif isinstance(header[name], dict):
                key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))
                header[name][key] = data.draw(_JUNK)

        rewrite_header(file, change)
    result = outcome(path)
    if isinstance(result, Checkpoint):
        size = file.stat().st_size
        for tensor in result.tensors.values():
            assert 8 < tensor.offset <= size
