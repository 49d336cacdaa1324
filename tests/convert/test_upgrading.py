"""`dflash-convert upgrade`: a fork's file becomes what a fresh conversion writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import dflash_convert
from dflash_convert.errors import InputError
from dflash_convert.gguf_file import read_gguf
from dflash_convert.schema import ARCH, MASK_TOKEN_KEY

Make = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

OLD = "dflash-draft"
NESTED = ("block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
OLD_NAMES = {
    "fc.weight": "dflash_fc.weight",
    "enc.output_norm.weight": "dflash_hidden_norm.weight",
    "selector_hidden.weight": "selector.hidden_proj.weight",
    "selector_predecessor.weight": "selector.pred_codebook",
    "selector_successor.weight": "selector.succ_codebook",
    "ffn_norm.weight": "post_attention_norm.weight",
    "attn_conv_base": "attn_conv.base",
    "attn_conv_proj.weight": "attn_conv.proj.weight",
    "ffn_conv_base": "ffn_conv.base",
    "ffn_conv_proj.weight": "ffn_conv.proj.weight",
}
DIALECT = {"fc.weight": "dflash.fc.weight", "enc.output_norm.weight": "dflash.hidden_norm.weight"}


def old_name(name: str, names: dict[str, str]) -> str:
    layer = re.fullmatch(r"(blk\.\d+\.)(.+)", name)
    return layer[1] + names.get(layer[2], layer[2]) if layer else names.get(name, name)


def fork(
    fresh: Path,
    out: Path,
    *,
    architecture: str = OLD,
    names: dict[str, str] = OLD_NAMES,
    keys: dict[str, Any] | None = None,
    halves: tuple[str, ...] = (),
) -> Path:
    """Write a conversion in the form that the forks had.

    Args:
        architecture: Prefix of its keys.
        names: Today's names of tensors -> theirs.
        keys: Values to set after everything else; None removes a key.
        halves: Old names of tensors to store as F16.
    """
    reader = gguf.GGUFReader(fresh)
    values: dict[str, tuple[Any, Any, Any]] = {}
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        rest = name.removeprefix(f"{ARCH}.")
        value, kind = field.contents(), field.types[0]
        item = field.types[1] if len(field.types) > 1 else None
        if name == MASK_TOKEN_KEY:
            name = f"{architecture}.dflash.mask_token_id"
        elif rest == "target_layers":
            name = f"{architecture}.dflash.target_layer_ids"
            value = [i - 1 for i in value]
        elif rest != name:
            name = f"{architecture}.{'dflash.' if rest in NESTED else ''}{rest}"
        values[name] = (value, kind, item)
    ids = values[f"{architecture}.dflash.target_layer_ids"][0]
    features = len(ids) * values[f"{architecture}.embedding_length"][0]
    u32 = gguf.GGUFValueType.UINT32
    values[f"{architecture}.dflash.n_target_features"] = (features, u32, None)
    head = values[f"{architecture}.attention.key_length"][0]
    values[f"{architecture}.rope.dimension_count"] = (head, u32, None)
    for name, value in (keys or {}).items():
        values.pop(name, None)
        if value is not None:
            kind = gguf.GGUFValueType.get_type(value)
            item = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            values[name] = (value, kind, item)
    writer = gguf.GGUFWriter(out, architecture)
    for name, (value, kind, item) in values.items():
        writer.add_key_value(name, value, kind, item)
    for tensor in reader.tensors:
        name = old_name(tensor.name, names)
        if name in halves:
            writer.add_tensor(name, tensor.data.astype(np.float16))
        else:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.fixture
def fresh(small: Make, small_target: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that converts a small checkpoint."""

    def run(outtype: str = "bf16", **changes: Any) -> Path:
        name = "-".join([outtype, *map(str, changes.values())])
        out = tmp_path / f"fresh-{name}.gguf"
        return dflash_convert.convert(small(name, **changes), small_target, out, outtype).path

    return run


@pytest.mark.parametrize("architecture", [OLD, ARCH])
@pytest.mark.parametrize("names", [OLD_NAMES, DIALECT, {}], ids=["names", "dialect", "today"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("outtype", ["bf16", "q8_0"])
def test_equal_to_a_fresh_conversion(
    fresh: Callable[..., Path],
    small_target: Path,
    tmp_path: Path,
    architecture: str,
    names: dict[str, str],
    version: int,
    outtype: str,
) -> None:
    new = fresh(outtype, version=version)
    old = fork(new, tmp_path / "old.gguf", architecture=architecture, names=names)
    result = dflash_convert.upgrade(old, tmp_path / "new.gguf")
    assert result.path == tmp_path / "new.gguf"
    difference = dflash_convert.diff(new, result.path)
    assert difference["same"], difference
    assert dflash_convert.check_pair(small_target, result.path) == []
    assert any("target_layers` [2, 4]" in c for c in result.changes)
    again = dflash_convert.upgrade(result.path, tmp_path / "again.gguf")
    assert (again.path, again.changes) == (None, ())
    assert not (tmp_path / "again.gguf").exists()


def test_missing_parts_come_from_the_target(
    fresh: Callable[..., Path], small_target: Path, tmp_path: Path
) -> None:
    new = fresh()
    tokenizer = [k for k in read_gguf(new).fields if k.startswith("tokenizer.")]
    old = fork(new, tmp_path / "old.gguf", keys=dict.fromkeys(tokenizer))
    with pytest.raises(InputError, match="has no tokenizer") as caught:
        dflash_convert.upgrade(old, tmp_path / "new.gguf")
    assert "--target TARGET.gguf" in str(caught.value.hint)
    result = dflash_convert.upgrade(old, tmp_path / "new.gguf", small_target)
    assert result.path is not None
    assert dflash_convert.diff(new, result.path)["same"]
    # It is not wanted where the draft has one, but the pair is checked all the same.
    whole = fork(new, tmp_path / "whole.gguf", keys={f"{OLD}.vocab_size": 300})
    other = dflash_convert.upgrade(whole, tmp_path / "other.gguf", small_target)
    assert other.path is not None
    assert dflash_convert.diff(new, other.path)["same"]


def test_rope_sections_for_an_mrope_target(
    make: Make, target: Path, mrope_target: Path, tmp_path: Path
) -> None:
    checkpoint = make()
    early = dflash_convert.convert(checkpoint, target, tmp_path / "early.gguf").path
    new = dflash_convert.convert(checkpoint, mrope_target, tmp_path / "new.gguf").path
    result = dflash_convert.upgrade(early, tmp_path / "up.gguf", mrope_target)
    assert result.changes == (
        "the target uses M-RoPE: `dflash.rope.dimension_sections` is [32, 0, 0, 0]",
    )
    keys = dflash_convert.diff(new, tmp_path / "up.gguf")["keys"]
    # Its own tokenizer and base model stay.
    assert {k["name"] for k in keys["different"]} <= {
        "general.base_model.0.name",
        "tokenizer.ggml.pre",
    }
    leaked = fork(early, tmp_path / "leaked.gguf", keys={f"{OLD}.rope.dimension_count": 16})
    again = dflash_convert.upgrade(leaked, tmp_path / "again.gguf", mrope_target)
    assert any("16 was the target's and is gone" in c for c in again.changes)
    assert dflash_convert.diff(tmp_path / "up.gguf", tmp_path / "again.gguf")["same"]


def test_numbers_get_the_types_that_the_loader_reads(
    fresh: Callable[..., Path], tmp_path: Path
) -> None:
    new = fresh()
    keys = {"dflash.block_count": 1, "dflash.attention.sliding_window": 16}  # written as i32
    old = fork(new, tmp_path / "old.gguf", architecture=ARCH, names={}, keys=keys)
    result = dflash_convert.upgrade(old, tmp_path / "new.gguf")
    assert "key `dflash.block_count` is u32, not i32" in result.changes
    assert dflash_convert.diff(new, tmp_path / "new.gguf")["same"]


def test_kernels_and_norms_become_f32(fresh: Callable[..., Path], tmp_path: Path) -> None:
    new = fresh()
    halves = ("blk.0.attn_conv.base", "output_norm.weight")
    old = fork(new, tmp_path / "old.gguf", halves=halves)
    result = dflash_convert.upgrade(old, tmp_path / "new.gguf")
    assert sum("is F32, as the loader wants it, not F16" in c for c in result.changes) == 2
    difference = dflash_convert.diff(new, tmp_path / "new.gguf")
    assert difference["keys"]["different"] == []
    for entry in difference["tensors"]["different"]:
        assert entry["a"]["type"] == entry["b"]["type"] == "F32"
        assert entry["max_error"] < 1e-3


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({f"{OLD}.dflash.mask_token_id": 7, MASK_TOKEN_KEY: 8}, "two mask tokens: 7 and 8"),
        ({f"{OLD}.dflash.mask_token_id": "x"}, "expected a token id"),
        ({f"{OLD}.dflash.mask_token_id": 300}, "the mask token is 300"),
        ({f"{OLD}.dflash.target_layer_ids": 3}, "expected layer numbers"),
        ({f"{OLD}.dflash.target_layer_ids": [-2]}, "expected layer numbers"),
        ({f"{OLD}.target_layers": [1, 3]}, "expected the latter to be [2, 4]"),
        ({f"{OLD}.dflash.n_target_features": 65}, "has 65 target features, expected 2 layers"),
        ({f"{OLD}.vocab_size": 301}, "has 300 tokens, expected its `vocab_size` 301"),
        ({f"{OLD}.block_size": 4}, "two values for `block_size`"),
        ({f"{OLD}.block_count": "one"}, "`block_count` in"),
        ({f"{OLD}.block_count": [1]}, "is i32[1], expected u32"),
        ({f"{OLD}.embedding_length": None}, "has no key `dflash.embedding_length`"),
        ({f"{OLD}.attention.head_count": -1}, "`attention.head_count` in"),
    ],
)
def test_contradictions_are_refused(
    fresh: Callable[..., Path],
    small_target: Path,
    tmp_path: Path,
    keys: dict[str, Any],
    expected: str,
) -> None:
    old = fork(fresh(), tmp_path / "old.gguf", keys=keys)
    with pytest.raises(InputError) as caught:
        dflash_convert.upgrade(old, tmp_path / "new.gguf", small_target)
    assert expected in str(caught.value)
    assert sorted(p.name for p in tmp_path.glob("*.gguf")) == ["fresh-bf16.gguf", "old.gguf"]
    assert not list(tmp_path.glob(".*"))


def test_what_is_no_old_draft(
    fresh: Callable[..., Path], small_target: Path, target: Path, tmp_path: Path
) -> None:
    new = fresh()
    with pytest.raises(InputError, match="has architecture `qwen3`, expected a draft"):
        dflash_convert.upgrade(small_target, tmp_path / "new.gguf")
    old = fork(new, tmp_path / "old.gguf")
    with pytest.raises(InputError, match="cannot be upgraded to a file that loads") as caught:
        dflash_convert.upgrade(old, tmp_path / "new.gguf", target)
    assert any("hidden size is 32, the target's 288" in p for p in caught.value.problems)
    with pytest.raises(InputError, match="is the file to upgrade"):
        dflash_convert.upgrade(old, old, force=True)
    part = tmp_path / "part.gguf"
    part.write_bytes(old.read_bytes()[:-2000])
    with pytest.raises(InputError, match="is cut off"):
        dflash_convert.upgrade(part, tmp_path / "new.gguf")
    both = fork(new, tmp_path / "both.gguf", names={"output_norm.weight": "dflash_fc.weight"})
    with pytest.raises(InputError, match=r"has `fc\.weight` under two names"):
        dflash_convert.upgrade(both, tmp_path / "new.gguf")


def test_check_tells_how_to_upgrade(
    fresh: Callable[..., Path], small_target: Path, tmp_path: Path
) -> None:
    new = fresh()
    for architecture in (OLD, ARCH):
        old = fork(new, tmp_path / f"{architecture}.gguf", architecture=architecture)
        (reason,) = dflash_convert.check_pair(small_target, old)
        assert f"run `dflash-convert upgrade {old}`" in reason


def test_the_command(run: Run, fresh: Callable[..., Path], tmp_path: Path) -> None:
    old = fork(fresh(), tmp_path / "mine.gguf")
    result = run("upgrade", old)
    assert result.returncode == 0, result.stderr
    assert "architecture `dflash-draft` is now `dflash`" in result.stdout
    assert (tmp_path / "dflash-mine-upgraded.gguf").is_file()
    exists = run("upgrade", old)
    assert (exists.returncode, exists.stdout) == (2, "")
    assert "error: `dflash-mine-upgraded.gguf` exists" in exists.stderr
    quiet = run("upgrade", old, "-o", "new.gguf", "-q")
    assert quiet.stdout.strip() == str(tmp_path / "new.gguf")
    nothing = run("upgrade", "new.gguf", "--json")
    assert json.loads(nothing.stdout)["path"] is None


_LOAD = """
import ctypes, sys
import llama_cpp
silent = llama_cpp.llama_log_callback(lambda *a: None)
llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()
for path in sys.argv[1:]:
    model = llama_cpp.llama_model_load_from_file(
        path.encode(), llama_cpp.llama_model_default_params()
    )
    print("loaded" if model else "refused")
"""


@pytest.mark.native
def test_an_upgraded_file_loads(lib_dir: Path, make: Make, target: Path, tmp_path: Path) -> None:
    new = dflash_convert.convert(make(), target, tmp_path / "new.gguf").path
    old = fork(new, tmp_path / "old.gguf")
    up = dflash_convert.upgrade(old, tmp_path / "up.gguf").path
    env = {**os.environ, "LLAMA_CPP_LIB_PATH": str(lib_dir)}
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(old), str(up)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["refused", "loaded"], done.stderr[-2000:]
