"""A whole conversion: every tensor and key, spellings, names; failures leave nothing behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoint import draft_config, draft_tensors, from_bf16_bits, to_bf16_bits

import dflash_convert
from dflash_convert import conversion, quantize, verify, write
from dflash_convert.errors import FailureError, InputError
from dflash_convert.gguf_file import read_gguf
from dflash_convert.schema import OUT_TYPES, TENSORS, layer_name

Make = Callable[..., Path]

GGUF_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a checkpoint tensor, from this file's own table."""
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        return f"blk.{layer}.{GGUF_NAMES[rest]}"
    return GGUF_NAMES[name]


def source_tensors(checkpoint: Path, **options: Any) -> dict[str, np.ndarray]:
    """The values of a checkpoint as stored (rounded to bfloat16)."""
    config = json.loads((checkpoint / "config.json").read_text())
    return {n: from_bf16_bits(to_bf16_bits(v)) for n, v in draft_tensors(config, **options).items()}


def gguf_tensors(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Type and float32 values of every tensor, by gguf's own reader."""
    return {
        t.name: (t.tensor_type.name, gguf.quants.dequantize(t.data, t.tensor_type))
        for t in gguf.GGUFReader(path).tensors
    }


def convert(checkpoint: Path, target: Path, **options: Any) -> Path:
    out = checkpoint.parent / f"{checkpoint.name}.gguf"
    return dflash_convert.convert(checkpoint, target, out, **options).path


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("outtype", sorted(OUT_TYPES))
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
    assert any("`blk.0.ffn_down.weight` becomes f16" in w for w in result.warnings)
    with pytest.raises(InputError, match="--strict"):
        dflash_convert.convert(checkpoint, small_target, out, "q8_0", True, strict=True)


# --- names and metadata -------------------------------------------------------------------------


def test_default_name_and_directory_and_template(
    small: Make, small_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = small("Tiny-250K-DFlash2")
    first = dflash_convert.convert(checkpoint, small_target, outtype="q8_0").path
    assert first == tmp_path / "dflash-Tiny-250K-DFlash2-Q8_0.gguf"
    folder = tmp_path / "folder"
    folder.mkdir()
    second = dflash_convert.convert(checkpoint, small_target, folder, "f16").path
    assert second == folder / "dflash-Tiny-250K-DFlash2-F16.gguf"
    third = dflash_convert.convert(checkpoint, small_target, "x-{ftype}.gguf", "f16").path
    assert third.name == "x-f16.gguf"
    with pytest.raises(InputError, match="braces that mean nothing"):
        dflash_convert.convert(checkpoint, small_target, "x-{type}.gguf")


def test_model_card_and_target_fill_the_metadata(small: Make, small_target: Path) -> None:
    checkpoint = small("a")
    card = "---\nlicense: apache-2.0\nbase_model: org/Base-1B\ntags: [dflash, x]\n---\n# Hi\n"
    (checkpoint / "README.md").write_text(card)
    file = read_gguf(convert(checkpoint, small_target))
    assert file.get("general.license") == "apache-2.0"
    assert file.get("general.base_model.0.repo_url") == "https://huggingface.co/org/Base-1B"
    assert file.get("general.tags") == ["dflash", "x"]
    bare = read_gguf(convert(small("b"), small_target))
    assert bare.get("general.base_model.0.name") == "tiny qwen3"


@pytest.mark.parametrize("card", ["---\n: [\n---\n", "---\nlicense: {a: 1}\ntags: [[1]]\n---\n"])
def test_a_broken_model_card_is_a_warning(small: Make, small_target: Path, card: str) -> None:
    checkpoint = small()
    (checkpoint / "README.md").write_text(card)
    result = dflash_convert.convert(checkpoint, small_target, checkpoint.parent / "x.gguf")
    assert any("model card" in w for w in result.warnings)


# --- refusals -----------------------------------------------------------------------------------


def refused(checkpoint: Path, target: Path | None, **options: Any) -> str:
    """Convert, expect an InputError, and check that nothing was left behind."""
    before = sorted(p.name for p in checkpoint.parent.iterdir())
    out = checkpoint.parent / "out.gguf"
    with pytest.raises(InputError) as caught:
        dflash_convert.convert(checkpoint, target, out, **options)
    assert sorted(p.name for p in checkpoint.parent.iterdir()) == before
    return str(caught.value)


def test_all_tensor_problems_are_listed_at_once(small: Make, small_target: Path) -> None:
    from tiny_checkpoint import write_safetensors

    checkpoint = small()
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = draft_tensors(config)
    del tensors["norm.weight"]
    tensors["fc.weight"] = tensors["fc.weight"].T.copy()
    tensors["layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    tensors["layers.1.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)
    tensors["candidate_selector.predecessor_codebook.weight"] = np.zeros((300, 8), np.float32)
    tensors["layers.0.input_layernorm.weight"] = np.zeros(32, np.int64)
    write_safetensors(checkpoint / "model.safetensors", tensors)
    message = refused(checkpoint, small_target)
    for expected in (
        "missing `norm.weight` (32)",
        "`fc.weight` is 64 x 32, expected 32 x 64 (hidden x fused)",
        "unknown `layers.0.self_attn.q_proj.bias` (32)",
        "unknown `layers.1.mlp.up_proj.weight` (48 x 32)",
        "both `candidate_selector.predecessor_codebook`",
        "`layers.0.input_layernorm.weight` has type I64, expected F32 or F16 or BF16",
    ):
        assert expected in message


def test_generations_that_do_not_match(small: Make, small_target: Path) -> None:
    two = small("two", config_overrides={"architectures": ["DFlashDraftModel"]})
    assert "conv_kernel_size, conv_group_size" in refused(two, small_target)
    config = json.loads((two / "config.json").read_text())
    config["dflash_config"] = {
        k: v for k, v in config["dflash_config"].items() if not k.startswith(("conv", "selector"))
    }
    (two / "config.json").write_text(json.dumps(config))
    assert "DFlash 2, but the config says DFlashDraftModel" in refused(two, small_target)
    one = small("one", version=1, config_overrides={"architectures": ["DFlash2DraftModel"]})
    assert "`conv_kernel_size` is missing" in refused(one, small_target)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_weights_that_are_not_finite(
    small: Make, small_target: Path, bad: float, dtype: str
) -> None:
    norm, codebook = np.ones(32, np.float32), np.ones((300, 8), np.float32)
    norm[5] = codebook[299, 7] = codebook[0, 0] = bad
    checkpoint = small(
        dtype="f32",
        tensors={"norm.weight": norm, "candidate_selector.successor_codebook": codebook},
    )
    from tiny_checkpoint import write_safetensors

    config = json.loads((checkpoint / "config.json").read_text())
    tensors = draft_tensors(config) | {
        "norm.weight": norm,
        "candidate_selector.successor_codebook": codebook,
    }
    if dtype != "bf16" or not np.isnan(bad):  # the helper's rounding keeps infinities only
        write_safetensors(checkpoint / "model.safetensors", tensors, dtype)
    message = refused(checkpoint, small_target, dry_run=True)
    assert "NaN or infinite" in message
    assert "`norm.weight`: 1 of 32" in message
    assert "`candidate_selector.successor_codebook`: 2 of 2400" in message


def test_f16_refuses_weights_out_of_range(small: Make, small_target: Path) -> None:
    codebook = np.zeros((300, 8), np.float32)
    codebook[3, 3] = 1e6
    checkpoint = small(tensors={"candidate_selector.successor_codebook": codebook})
    message = refused(checkpoint, small_target, outtype="f16")
    assert "`candidate_selector.successor_codebook` reaches" in message
    assert "f16 at most 65504" in message
    convert(checkpoint, small_target, outtype="bf16")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vocab": 299}, "the draft has 299 tokens, the target 300"),
        ({"hidden": 40}, "the draft's hidden size is 40, the target's 32"),
        ({"n_target_layers": 9}, "was trained for a target of 9 layers, this one has 8"),
        ({"target_layer_ids": (1, 8)}, "reads the output of layer 8, the target has layers 0 to 7"),
        ({"target_layer_ids": (1, 7)}, "reads the output of the last layer (7)"),
    ],
)
def test_pairs_that_do_not_fit(
    small: Make, small_target: Path, changes: dict[str, Any], expected: str
) -> None:
    assert expected in refused(small(**changes), small_target)


def test_targets_that_are_none(
    small: Make, small_target: Path, tmp_path: Path, edited: Make
) -> None:
    checkpoint = small()
    draft = convert(small("other"), small_target)
    assert "no target given" in refused(checkpoint, None)
    assert "is a draft (architecture `dflash`)" in refused(checkpoint, draft)
    assert "is a directory" in refused(checkpoint, checkpoint)
    assert "no GGUF file" in refused(checkpoint, tmp_path / "missing.gguf")
    for name, keys, expected in (
        ("adapter", {"general.type": "adapter"}, "is not a language model"),
        ("part", {"split.no": 1, "split.count": 2}, "is part 2 of a split model"),
        ("silent", {"tokenizer.ggml.tokens": None}, "has no tokenizer"),
        ("flat", {"qwen3.block_count": None}, "no usable `qwen3.block_count`"),
    ):
        path = edited(small_target, name, keys=keys)
        assert expected in refused(checkpoint, path)


def test_unknown_type(small: Make, small_target: Path) -> None:
    assert "no type `q3_x`, expected auto, f32" in refused(small(), small_target, outtype="q3_x")


# --- nothing left behind ------------------------------------------------------------------------


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


# --- the verification itself must be able to fail -----------------------------------------------


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

    def spoiling(plan: Any, path: Path, ticker: Any) -> None:
        original(plan, path, ticker)
        _spoil(path, name)

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


_ODD = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=4)
_KEYS = sorted(draft_config()) + sorted(draft_config()["dflash_config"])


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_mutated_configs_convert_or_are_refused(
    small: Make, small_target: Path, tmp_path: Path, data: st.DataObject
) -> None:
    file = tmp_path / "draft" / "config.json"
    if not file.exists():
        small()
        (tmp_path / "whole.json").write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "whole.json").read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        key = data.draw(st.sampled_from(_KEYS))
        place = config["dflash_config"] if key in config.get("dflash_config", {}) else config
        value = data.draw(_ODD | st.integers(1, 64) | st.lists(st.integers(0, 9), max_size=3))
        if key != "dflash_config":
            place[key] = value
    file.write_text(json.dumps(config))
    result = dry_run(file.parent, small_target)
    if isinstance(result, InputError):
        assert result.message
    else:
        assert result.plan.nbytes > 0


def dry_run(checkpoint: Path, target: Path) -> conversion.ConvertResult | InputError:
    """Return what a dry run gives or the one kind of error a config may cause."""
    try:
        return dflash_convert.convert(checkpoint, target, dry_run=True)
    except InputError as exc:
        return exc


def test_the_table_names_every_tensor_of_the_facts() -> None:
    ours = {layer_name(r.source, 0): layer_name(r.target, 0) for r in TENSORS if not r.optional}
    facts = {n: n for n in GGUF_NAMES}
    expected = {}
    for name in facts:
        full = name if name in ours else f"layers.0.{name}"
        expected[full] = gguf_name(full)
    assert ours == expected
