"""A whole conversion: every tensor and key, and every spelling of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from converted import GGUF_NAMES, convert, gguf_name, gguf_tensors, source_tensors

import dflash_convert
from dflash_convert import conversion
from dflash_convert.errors import InputError
from dflash_convert.gguf_file import read_gguf
from dflash_convert.schema import TENSORS, layer_name
from dflash_convert.tensor_types import BUILT_IN

Make = Callable[..., Path]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("outtype", sorted(BUILT_IN))
def test_every_tensor_and_type(make: Make, target: Path, version: int, outtype: str) -> None:
    checkpoint = make(version=version)
    written = gguf_tensors(convert(checkpoint, target, outtype=outtype))
    sources = source_tensors(checkpoint)
    assert set(written) == {gguf_name(n) for n in sources}
    assert len(written) == (81 if version == 2 else 58)
    for name, values in sources.items():
        kind, found = written[gguf_name(name)]
        narrow = values.ndim == 2 and not name.endswith("norm.weight")
        assert kind == (outtype.upper() if narrow else "F32"), name
        assert found.shape == values.shape
        if kind in ("F32", "BF16"):
            assert np.array_equal(found, values), name
        elif kind == "F16":
            assert np.array_equal(found, values.astype(np.float16).astype(np.float32)), name
        else:
            q8_0 = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            twin = gguf.quants.dequantize(q8_0, gguf.GGMLQuantizationType.Q8_0)
            assert np.array_equal(found, twin), name


def test_every_key(make: Make, target: Path) -> None:
    path = convert(
        make(softcap=30.0, output_multiplier=0.5, embedding_scale=2.0), target, outtype="bf16"
    )
    file = read_gguf(path)
    expected = {
        "general.architecture": ("str", "dflash"),
        "general.type": ("str", "model"),
        "general.file_type": ("u32", 32),
        "general.quantization_version": ("u32", 2),
        "dflash.block_count": ("u32", 5),
        "dflash.context_length": ("u32", 4096),
        "dflash.embedding_length": ("u32", 288),
        "dflash.feed_forward_length": ("u32", 416),
        "dflash.attention.head_count": ("u32", 4),
        "dflash.attention.head_count_kv": ("u32", 2),
        "dflash.attention.key_length": ("u32", 64),
        "dflash.attention.value_length": ("u32", 64),
        "dflash.attention.layer_norm_rms_epsilon": ("f32", float(np.float32(1e-6))),
        "dflash.attention.causal": ("bool", False),
        "dflash.attention.sliding_window": ("u32", 64),
        "dflash.attention.sliding_window_pattern": ("bool[5]", [True] * 5),
        "dflash.rope.freq_base": ("f32", 1e7),
        "dflash.block_size": ("u32", 8),
        "dflash.conv_kernel_size": ("u32", 2),
        "dflash.conv_group_size": ("u32", 16),
        "dflash.selector_rank": ("u32", 32),
        "dflash.selector_top_k": ("u32", 16),
        "dflash.target_layers": ("i32[5]", [2, 3, 4, 5, 6]),
        "dflash.embedding_scale": ("f32", 2.0),
        "dflash.logit_scale": ("f32", 0.5),
        "dflash.final_logit_softcapping": ("f32", 30.0),
        "tokenizer.ggml.mask_token_id": ("u32", 298),
    }
    for key, (kind, value) in expected.items():
        assert (file.fields[key].type_name, file.get(key)) == (kind, value), key
    draft_keys = {k for k in file.fields if k.startswith("dflash.")}
    assert draft_keys == {k for k in expected if k.startswith("dflash.")}


@pytest.mark.parametrize("vocab", ["bpe", "spm"])
def test_tokenizer_is_copied_exactly(make: Make, tmp_path: Path, vocab: str) -> None:
    from tiny import make_target

    size = 400
    model = make_target(tmp_path / "t.gguf", "llama", n_layer=8, n_vocab=size, vocab=vocab)
    file = read_gguf(convert(make(vocab=size, mask_token_id=7), model))
    theirs = read_gguf(model)
    keys = {k for k in theirs.fields if k.startswith("tokenizer.")}
    assert "tokenizer.chat_template" in keys
    assert {k for k in file.fields if k.startswith("tokenizer.")} == keys | {
        "tokenizer.ggml.mask_token_id"
    }
    for key in keys - {"tokenizer.ggml.mask_token_id"}:
        assert file.fields[key] == theirs.fields[key], key
    assert file.get("tokenizer.ggml.mask_token_id") == 7  # the draft's, whatever the target says


def test_mask_token_of_the_draft_wins(make: Make, target: Path, edited: Make) -> None:
    other = edited(target, "m", keys={"tokenizer.ggml.mask_token_id": 5})
    assert read_gguf(other).get("tokenizer.ggml.mask_token_id") == 5
    assert read_gguf(convert(make(), other)).get("tokenizer.ggml.mask_token_id") == 298


def test_spellings_give_the_same_file(small: Make, small_target: Path) -> None:
    plain = convert(small("plain"), small_target)
    variants = [
        small("prefix", name_prefix="model."),
        small("suffix", codebook_suffix=True),
        small("shards", shards=3, shard_prefix="odd_name"),
        small("top", nested=False),
    ]
    wanted = read_gguf(plain)
    data = plain.read_bytes()
    for checkpoint in variants:
        path = convert(checkpoint, small_target)
        file, raw = read_gguf(path), path.read_bytes()
        assert file.get("dflash_convert.source_sha256") == (
            wanted.get("dflash_convert.source_sha256")
            if "suffix" not in path.name
            else file.get("dflash_convert.source_sha256")
        )
        assert list(file.tensors) == list(wanted.tensors)
        for name, info in file.tensors.items():
            twin = wanted.tensors[name]
            assert raw[info.offset :][: info.nbytes] == data[twin.offset :][: twin.nbytes]
        keys = {k: f for k, f in file.fields.items() if k.startswith(("dflash.", "tokenizer."))}
        assert all(wanted.fields[k] == f for k, f in keys.items())


def test_same_input_same_bytes(small: Make, small_target: Path, tmp_path: Path) -> None:
    checkpoint = small()
    first, second = (
        dflash_convert.convert(checkpoint, small_target, tmp_path / n).path.read_bytes()
        for n in ("one.gguf", "two.gguf")
    )
    assert first == second


def test_pieces_do_not_show(
    make: Make, target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoint = make(config_overrides={"rope_is_neox_style": False})
    options: dict[str, Any] = {"outtype": "q8_0"}
    whole = dflash_convert.convert(checkpoint, target, tmp_path / "w.gguf", **options)
    for module in (conversion.scan.__module__, "dflash_convert.write"):
        monkeypatch.setattr(f"{module}.PIECE", 1000)
    pieces = dflash_convert.convert(checkpoint, target, tmp_path / "p.gguf", **options)
    assert whole.path.read_bytes() == pieces.path.read_bytes()


def test_interleaved_heads_become_halves(make: Make, target: Path) -> None:
    checkpoint = make(config_overrides={"rope_is_neox_style": False})
    written = gguf_tensors(convert(checkpoint, target, outtype="f32"))
    for name, values in source_tensors(checkpoint).items():
        found = written[gguf_name(name)][1]
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = values.reshape(-1, 64, 288)
            values = np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).reshape(-1, 288)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            values = np.concatenate([values[0::2], values[1::2]])
        assert np.array_equal(found, values), name


@pytest.mark.parametrize(("embedding", "head"), [(True, True), (False, True), (False, False)])
def test_own_embedding_and_head(make: Make, target: Path, embedding: bool, head: bool) -> None:
    checkpoint = make(own_embedding=embedding, own_head=head)
    result = dflash_convert.convert(checkpoint, target, checkpoint.parent / "x.gguf")
    shared = ["token embedding"] * (not embedding) + ["output head"] * (not head)
    assert list(result.shared) == shared
    names = gguf_tensors(result.path)
    assert ("token_embd.weight" in names, "output.weight" in names) == (embedding, head)


def test_own_embedding_alone_needs_a_tied_head(make: Make, target: Path) -> None:
    with pytest.raises(InputError, match="would use the embedding as the head"):
        convert(make("a", own_embedding=True), target)
    tied = make("b", own_embedding=True, config_overrides={"tie_word_embeddings": True})
    assert dflash_convert.convert(tied, target, tied.parent / "b.gguf").shared == ()


def test_reduced_vocabulary(small: Make, small_target: Path) -> None:
    ids = np.sort(np.random.default_rng(0).choice(300, 50, replace=False)).astype(np.int64)
    head = np.random.default_rng(1).normal(size=(50, 32)).astype(np.float32)
    tensors = {"d2t": ids - np.arange(50), "t2d": np.zeros(300, np.int64), "lm_head.weight": head}
    options = {"config_overrides": {"draft_vocab_size": 50}, "version": 1}
    checkpoint = small(tensors=tensors, **options)
    result = dflash_convert.convert(checkpoint, small_target, checkpoint.parent / "x.gguf")
    reader = {t.name: t for t in gguf.GGUFReader(result.path).tensors}
    assert np.array_equal(reader["d2t"].data, ids)
    assert reader["d2t"].tensor_type.name == "I64"
    assert result.plan.skipped == ("t2d",)
    tensors["d2t"] = np.zeros(50, np.int64) + 260
    with pytest.raises(InputError, match="maps 10 tokens outside the vocabulary of 300"):
        convert(small("bad", tensors=tensors, **options), small_target)


def test_llama3_rope_becomes_factors(small: Make, small_target: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    path = convert(small(config_overrides={"rope_parameters": rope}), small_target)
    kind, factors = gguf_tensors(path)["rope_freqs.weight"]
    assert (kind, factors.shape) == ("F32", (8,))
    assert (factors[0], factors[-1]) == (1.0, 8.0)


def test_mrope_target_gives_sections(make: Make, target: Path, mrope_target: Path) -> None:
    checkpoint = make()
    plain = read_gguf(convert(checkpoint, target))
    mrope = read_gguf(convert(checkpoint, mrope_target, force=True))
    key = "dflash.rope.dimension_sections"
    assert key not in plain.fields
    assert (mrope.fields[key].type_name, mrope.get(key)) == ("i32[4]", [32, 0, 0, 0])


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", "bf16"), ("f16", "f16"), ("f32", "f32")])
def test_auto_keeps_the_type(small: Make, small_target: Path, dtype: str, expected: str) -> None:
    checkpoint = small(dtype=dtype)
    result = dflash_convert.convert(checkpoint, small_target, checkpoint.parent / "x.gguf")
    assert result.outtype == expected


def test_rows_that_do_not_divide_fall_back_and_say_so(small: Make, small_target: Path) -> None:
    checkpoint = small(ffn=40)
    out = checkpoint.parent / "x.gguf"
    result = dflash_convert.convert(checkpoint, small_target, out, "q8_0")
    found = {name: kind for name, (kind, _) in gguf_tensors(out).items()}
    assert found["blk.0.ffn_down.weight"] == "F16"
    assert found["blk.0.ffn_up.weight"] == "Q8_0"
    sentence = "f16 instead of q8_0, whose blocks of 32 do not divide rows of 40: `blk.0.ffn_down"
    assert any(w.startswith(sentence) for w in result.warnings)
    with pytest.raises(InputError, match="--strict"):
        dflash_convert.convert(checkpoint, small_target, out, "q8_0", True, strict=True)


def test_the_table_names_every_tensor_of_the_facts() -> None:
    ours = {layer_name(r.source, 0): layer_name(r.target, 0) for r in TENSORS if not r.optional}
    facts = {n: n for n in GGUF_NAMES}
    expected = {}
    for name in facts:
        full = name if name in ours else f"layers.0.{name}"
        expected[full] = gguf_name(full)
    assert ours == expected
