"""`--draft-vocab`: a head with the listed tokens' rows, bit for bit the target's, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from converted import gguf_tensors
from fake_hub import fake_hub
from hf_target import make_hf_target
from tiny import make_target
from tiny_checkpoint import from_bf16_bits, to_bf16_bits, write_safetensors

import dflash_convert
from dflash_convert import conversion
from dflash_convert.conversion import ConvertResult
from dflash_convert.draft_vocab import read_ids
from dflash_convert.errors import InputError

Make = Callable[..., Path]
Edited = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

# Not in order, and neither the first nor the last token alone at an end.
IDS = [250, 0, 7, 299, 31, 30, 29, 128, 64, 200]
# A target's width whose rows are whole blocks of every type here, and a draft for it.
WIDE = {"hidden": 256, "heads": 2, "kv_heads": 1, "head_dim": 16, "group": 8}


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    """A list of tokens in its text form, with everything that it may have besides."""
    path = tmp_path / "ids.txt"
    lines = [f"{i}  # comment" if i == 7 else str(i) for i in IDS]
    path.write_text("# ten tokens\n\n" + "\n".join(lines) + "\n")
    return path


def convert(checkpoint: Path, target: Path | str, ids: Path, **options: Any) -> ConvertResult:
    out = checkpoint.parent / f"{checkpoint.name}.gguf"
    return dflash_convert.convert(checkpoint, target, out, draft_vocab=ids, **options)


def raw(path: Path, name: str) -> tuple[str, np.ndarray]:
    """Type and rows as bytes of a tensor, by gguf's own reader."""
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == name)
    return tensor.tensor_type.name, tensor.data.reshape(len(tensor.data), -1).view(np.uint8)


def bf16(values: np.ndarray) -> np.ndarray:
    return from_bf16_bits(to_bf16_bits(np.asarray(values, np.float32)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["f16", "q8_0", "f32", "bf16"])
def test_rows_are_the_targets_bit_for_bit(
    small: Make, tmp_path: Path, ids: Path, dtype: str, tied: bool
) -> None:
    target = make_target(
        tmp_path / "t.gguf", "qwen3", n_layer=8, n_embd=32, n_vocab=300, dtype=dtype, tied=tied
    )
    result = convert(small(), target, ids, outtype="q8_0" if dtype == "f16" else "f16")
    name = "token_embd.weight" if tied else "output.weight"
    kind, theirs = raw(target, name)
    assert kind == dtype.upper()
    assert raw(result.path, "output.weight")[0] == kind
    assert np.array_equal(raw(result.path, "output.weight")[1], theirs[sorted(IDS)])
    stored = next(t for t in gguf.GGUFReader(result.path).tensors if t.name == "d2t")
    assert stored.tensor_type.name == "I64"
    assert stored.data.tolist() == sorted(IDS)
    assert result.shared == ("token embedding",)
    assert (result.draft_vocab, result.head_rows_from) == (10, name)
    assert dflash_convert.check_pair(target, result.path) == []


def test_types_that_only_ggml_writes_are_copied_without_it(
    make: Make, tmp_path: Path, ids: Path, edited: Edited, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a type that this package writes for nobody: the bytes are all that counts."""
    monkeypatch.setenv("DFLASH_LIB_PATH", str(tmp_path / "none"))
    from dflash_convert import ggml

    ggml.load.cache_clear()
    plain = make_target(tmp_path / "t.gguf", "qwen3", n_layer=8, n_embd=256, n_vocab=300)
    draft = make(layers=1, ffn=48, rank=8, top_k=4, target_layer_ids=(1, 3), **WIDE)
    for kind in ("Q6_K", "IQ2_XXS"):
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        rows = np.random.default_rng(1).integers(0, 256, (300, 256 // block * size), np.uint8)
        target = edited(plain, kind, drop=("output.weight",))
        _add_raw(target, "output.weight", rows, kind)
        result = convert(draft, target, ids, force=True)
        assert raw(result.path, "output.weight")[0] == kind
        assert np.array_equal(raw(result.path, "output.weight")[1], rows[sorted(IDS)])
    ggml.load.cache_clear()


def _add_raw(path: Path, name: str, rows: np.ndarray, kind: str) -> None:
    """Write a GGUF anew with a tensor of any type."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "qwen3")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            item = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], item)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


def test_the_rest_of_the_file_is_the_same(small: Make, small_target: Path, ids: Path) -> None:
    """A head of another type is no reason to write the draft's own matrices in another one."""
    checkpoint = small()
    whole = gguf_tensors(dflash_convert.convert(checkpoint, small_target, ids.parent / "w").path)
    reduced = gguf_tensors(convert(checkpoint, small_target, ids).path)
    assert reduced.keys() - whole.keys() == {"d2t", "output.weight"}
    for name, (kind, values) in whole.items():
        assert kind == reduced[name][0]
        assert np.array_equal(values, reduced[name][1]), name


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_a_directory_are_converted(
    small: Make, tmp_path: Path, ids: Path, tied: bool
) -> None:
    target = make_hf_target(tmp_path / "target", hidden=32)
    head = _change(target, tied=tied)
    result = convert(small(), target, ids)  # stored as F16 there, BF16 in the draft
    kind, found = gguf_tensors(result.path)["output.weight"]
    assert kind == "BF16"
    assert np.array_equal(found, bf16(head[sorted(IDS)]))
    assert result.head_rows_from == ("model.embed_tokens.weight" if tied else "lm_head.weight")
    exact = convert(small("again"), target, ids, outtype="f16").path
    assert np.array_equal(gguf_tensors(exact)["output.weight"][1], head[sorted(IDS)])


def _change(target: Path, *, tied: bool) -> np.ndarray:
    """Rewrite a target's weights as its head and embedding alone; returns what is its head."""
    rng = np.random.default_rng(9)
    names = ["model.embed_tokens.weight", "lm_head.weight"][: 1 if tied else 2]
    tensors = {n: rng.normal(size=(300, 32)).astype(np.float16) for n in names}
    write_safetensors(target / "model.safetensors", tensors, "f16")
    config = json.loads((target / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (target / "config.json").write_text(json.dumps(config))
    return tensors[names[-1]].astype(np.float32)


def test_of_a_hub_target_the_heads_file_alone_is_fetched(
    run: Run, small: Make, tmp_path: Path, ids: Path
) -> None:
    target = make_hf_target(tmp_path / "served", hidden=32)
    head = np.random.default_rng(9).normal(size=(300, 32)).astype(np.float16)
    (target / "model.safetensors").unlink()
    write_safetensors(target / "head.safetensors", {"lm_head.weight": head}, "f16")
    write_safetensors(target / "rest.safetensors", {"model.norm.weight": np.ones(32)}, "f16")
    table = {"lm_head.weight": "head.safetensors", "model.norm.weight": "rest.safetensors"}
    index = target / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    with fake_hub({"org/target": target}) as hub:
        env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "cache"), "HF_TOKEN": ""}
        env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        args = (small("ckpt"), "--target", "org/target", "--outtype", "f16", "-o", "d.gguf")
        assert run(*args, env=env).returncode == 0
        assert not {"head.safetensors", "rest.safetensors"} & set(hub.fetched())
        done = run(*args, "--force", "--draft-vocab", ids, env=env)
        assert done.returncode == 0, done.stderr
        assert "head.safetensors" in hub.fetched()
        assert "rest.safetensors" not in hub.fetched()
    found = gguf_tensors(tmp_path / "d.gguf")["output.weight"][1]
    assert np.array_equal(found, head[sorted(IDS)].astype(np.float32))


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_of_its_own_comes_first(
    small: Make, small_target: Path, ids: Path, tied: bool
) -> None:
    if tied:
        overrides = {"tie_word_embeddings": True}
        checkpoint = small(own_embedding=True, config_overrides=overrides)
    else:
        checkpoint = small(own_head=True)
    whole = dflash_convert.convert(checkpoint, small_target, ids.parent / "whole.gguf")
    own = gguf_tensors(whole.path)["token_embd.weight" if tied else "output.weight"]
    result = convert(checkpoint, small_target, ids)
    kind, found = gguf_tensors(result.path)["output.weight"]
    assert kind == own[0] == "BF16"
    assert np.array_equal(found, own[1][sorted(IDS)])
    assert (result.draft_vocab, result.head_rows_from) == (10, None)
    assert result.shared == (() if tied else ("token embedding",))


def test_with_a_mask_embedding_the_rows_keep_their_bits(
    small: Make, tmp_path: Path, ids: Path
) -> None:
    target = make_target(
        tmp_path / "t.gguf", "qwen3", n_layer=8, n_embd=32, n_vocab=300, dtype="q8_0"
    )
    checkpoint = small()
    vector = {"mask_embedding": np.ones(32, np.float32)}
    write_safetensors(checkpoint / "mask_embedding.safetensors", vector)
    result = convert(checkpoint, target, ids)
    theirs = raw(target, "output.weight")[1]
    assert np.array_equal(raw(result.path, "output.weight")[1], theirs[sorted(IDS)])
    assert gguf_tensors(result.path)["token_embd.weight"][1].shape == (300, 32)


def test_json_lists_and_order(tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    path.write_text(f"\n {json.dumps(IDS)}\n")
    assert read_ids(path, 300) == sorted(IDS)
    assert read_ids(path, 300, len(IDS)) == sorted(IDS)
    path.write_text("\ufeff" + "3\n1")
    assert read_ids(path, 4) == [1, 3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1\n2\nthree\n4\n", "line 3 is `three`, expected one token id a line"),
        ("1\n2.0\n", "line 2 is `2.0`"),
        ("1 2\n", "line 1 is `1 2`"),
        ("9" * 5000, "line 1 is `9999"),
        ("[1, 2", "is not valid JSON"),
        ("[1, true]", "holds `true`"),
        ("[1, null]", "holds `null`"),
        ("[1, 2.5]", "holds `2.5`"),
        ('["1"]', 'holds `"1"`'),
        ("", "lists no tokens"),
        ("# nothing\n\n", "lists no tokens"),
        ("[]", "lists no tokens"),
        ("0\n1\n2\n300\n", "lists 1 ids outside the vocabulary (the first is 300), expected 0 to"),
        ("0\n1\n2\n-1\n-2\n", "lists 2 ids outside the vocabulary (the first is -1)"),
        ("5\n1\n5\n7\n5\n", "lists 1 ids more than once (the first is 5)"),
        ("5\n1\n7\n", "lists 3 tokens, expected at least 4"),
    ],
)
def test_lists_that_cannot_be_used(
    small: Make, small_target: Path, tmp_path: Path, text: str, expected: str
) -> None:
    path = tmp_path / "list"
    path.write_text(text)
    assert expected in refused(small(), small_target, path)


def refused(checkpoint: Path, target: Path | str | None, ids: Path, **options: Any) -> str:
    """Convert, expect an InputError (exit code 2), and check that nothing was left behind."""
    before = sorted(p.name for p in checkpoint.parent.iterdir())
    out = checkpoint.parent / "out.gguf"
    with pytest.raises(InputError) as caught:
        dflash_convert.convert(checkpoint, target, out, draft_vocab=ids, **options)
    assert caught.value.exit_code == 2
    assert sorted(p.name for p in checkpoint.parent.iterdir()) == before
    return f"{caught.value}; {caught.value.hint}"


def test_files_that_are_none(small: Make, small_target: Path, tmp_path: Path) -> None:
    checkpoint = small()
    assert "no file" in refused(checkpoint, small_target, tmp_path / "none")
    assert "is a directory" in refused(checkpoint, small_target, tmp_path)
    (tmp_path / "x").write_bytes(b"1\n\xff\n")
    assert "is not UTF-8 text (byte 2)" in refused(checkpoint, small_target, tmp_path / "x")


def test_without_selector_one_token_is_enough(
    small: Make, small_target: Path, tmp_path: Path
) -> None:
    path = tmp_path / "one"
    path.write_text("12\n")
    result = convert(small(version=1), small_target, path)
    assert gguf_tensors(result.path)["output.weight"][1].shape == (1, 32)
    assert "expected at least 4" in refused(small("two"), small_target, path)


def test_drafts_that_cannot_be_reduced(small: Make, small_target: Path, ids: Path) -> None:
    message = refused(small("a"), None, ids)
    assert "no target given" in message
    reduced = {
        "tensors": {
            "d2t": np.zeros(50, np.int64),
            "lm_head.weight": np.ones((50, 32), np.float32),
        },
        "config_overrides": {"draft_vocab_size": 50},
    }
    message = refused(small("b", **reduced), small_target, ids)
    assert "has a reduced vocabulary already (50 of 300 tokens)" in message
    assert "leave `--draft-vocab` out" in message
    reduced.pop("config_overrides")  # the tensor alone says so, too
    assert "(50 of 300 tokens)" in refused(small("d", **reduced), small_target, ids)
    short = {"lm_head.weight": np.ones((299, 32), np.float32)}
    message = refused(small("c", tensors=short), small_target, ids)
    assert "the head `lm_head.weight`" in message
    assert "is 299 x 32, expected 300 x 32" in message
    assert message.endswith("; None")  # no other target would help


def test_targets_without_usable_head(
    small: Make, small_target: Path, tmp_path: Path, edited: Edited, ids: Path
) -> None:
    checkpoint = small()
    one, split = np.ones(1, np.float32), {"split.no": 0, "split.count": 2}
    for name, changes, expected in (
        ("scale", {"tensors": {"output.scale": one}}, "has a scale, `output.scale`"),
        ("input", {"tensors": {"output.input_scale": one}}, "has a scale, `output.input_scale`"),
        (
            "narrow",
            {"tensors": {"output.weight": np.ones((300, 16), np.float32)}},
            "is 300 x 16, expected 300 x 32: the draft's tokens and hidden size",
        ),
        (
            "short",
            {"tensors": {"output.weight": np.ones((290, 32), np.float32)}},
            "is 290 x 32, expected 300 x 32",
        ),
        (
            "split",
            {"keys": split, "drop": ("output.weight",)},
            "is the first part of a split model and has no `output.weight`",
        ),
        ("none", {"drop": ("output.weight", "token_embd.weight")}, ""),
    ):
        target = edited(small_target, name, **changes)
        # Beside the target's tensors the pair's own check may speak first.
        assert (expected or "neither the draft nor the target has a token embedding") in refused(
            checkpoint, target, ids
        )
    own = small("own", own_embedding=True)
    message = refused(own, tmp_path / "none.gguf", ids)
    assert "has neither `output.weight` nor `token_embd.weight`" in message
    whole = edited(small_target, "whole", keys=split)  # the head is in the first part
    assert convert(checkpoint, whole, ids).draft_vocab == 10


def test_a_target_that_is_cut_off(
    small: Make, small_target: Path, tmp_path: Path, edited: Edited, ids: Path
) -> None:
    head = next(t for t in gguf.GGUFReader(small_target).tensors if t.name == "output.weight")
    target = edited(small_target, "cut", drop=("output.weight",), tensors={})
    target = edited(target, "last", tensors={"output.weight": np.array(head.data)})
    with target.open("r+b") as stream:
        stream.truncate(target.stat().st_size - 1000)
    message = refused(small(), target, ids)
    assert "the head `output.weight`" in message
    assert "is cut off" in message


def test_an_unknown_type_of_the_head(small: Make, small_target: Path, ids: Path) -> None:
    target = ids.parent / "odd.gguf"
    data = bytearray(small_target.read_bytes())
    place = data.index(b"output.weight") + len(b"output.weight") + 4 + 2 * 8
    assert data[place : place + 4] == bytes(4)
    data[place : place + 4] = (200).to_bytes(4, "little")
    target.write_bytes(data)
    assert "has type 200, which is not known here" in refused(small(), target, ids)


def test_directories_without_usable_head(small: Make, tmp_path: Path, ids: Path) -> None:
    checkpoint = small()
    target = make_hf_target(tmp_path / "target", hidden=32)
    weights, config = target / "model.safetensors", target / "config.json"
    embedding = {"model.embed_tokens.weight": np.ones((300, 32), np.float32)}
    write_safetensors(weights, embedding, "f16")
    assert "has no `lm_head.weight`, expected" in refused(checkpoint, target, ids)  # not tied
    tied = json.loads(config.read_text()) | {"tie_word_embeddings": True}
    config.write_text(json.dumps(tied))
    assert convert(checkpoint, target, ids).draft_vocab == 10
    table = dict.fromkeys(embedding, weights.name) | {"lm_head.weight": "absent.safetensors"}
    index = target / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    assert "its index names files that are absent" in refused(checkpoint, target, ids)
    index.unlink()
    write_safetensors(weights, {"model.norm.weight": np.ones(32, np.float32)}, "f16")
    assert "has no `lm_head.weight`, expected" in refused(checkpoint, target, ids)
    narrow = {"lm_head.weight": np.ones((300, 16), np.float32)}
    write_safetensors(weights, narrow, "f16")
    assert "is 300 x 16, expected 300 x 32" in refused(checkpoint, target, ids)
    weights.unlink()
    assert "has no safetensors files" in refused(checkpoint, target, ids)


def test_another_target_is_called_that(small: Make, small_target: Path, ids: Path) -> None:
    """Not a head of the wrong size, nor ids outside of its vocabulary."""
    message = refused(small(hidden=40), small_target, ids)
    assert "the draft's hidden size is 40, the target's 32" in message


def test_the_copied_head_takes_no_type(small: Make, small_target: Path, ids: Path) -> None:
    message = refused(small(), small_target, ids, tensor_types=[r"^output\.=f16"])
    assert "matches only tensors whose type is fixed (`output.weight`)" in message


def test_the_list_is_not_overwritten(small: Make, small_target: Path, ids: Path) -> None:
    before = ids.read_bytes()
    with pytest.raises(InputError, match="is an input of this conversion"):
        dflash_convert.convert(small(), small_target, ids, draft_vocab=ids, force=True)
    assert ids.read_bytes() == before


def test_a_target_that_shrinks_meanwhile(
    small: Make, small_target: Path, ids: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / "t.gguf"
    target.write_bytes(small_target.read_bytes())
    plan = conversion.build_plan

    def cut(*args: Any) -> Any:
        out = plan(*args)
        target.write_bytes(target.read_bytes()[:20_000])
        return out

    monkeypatch.setattr(conversion, "build_plan", cut)
    with pytest.raises(dflash_convert.FailureError, match=r"ended inside tensor `output\.weight`"):
        convert(small(), target, ids)


def test_verification_reads_the_rows_again(
    small: Make, small_target: Path, ids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_convert import conversion
    from dflash_convert.gguf_file import read_gguf

    write = conversion.write_gguf

    def damage(plan: Any, path: Path, *more: Any) -> Any:
        out = write(plan, path, *more)
        place = read_gguf(path).tensors["output.weight"].offset + 5
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        return out

    monkeypatch.setattr(conversion, "write_gguf", damage)
    with pytest.raises(dflash_convert.FailureError, match=r"`output.weight` is not as it was"):
        convert(small(), small_target, ids)
    assert not list(ids.parent.glob("*.gguf"))


def test_a_list_without_the_end_of_a_text_is_a_warning(
    small: Make, small_target: Path, ids: Path
) -> None:
    from dflash_convert.gguf_file import read_gguf

    file = read_gguf(small_target)
    ends = sorted(
        {file.get("tokenizer.ggml.eos_token_id"), file.get("tokenizer.ggml.eot_token_id")}
    )
    (warning,) = convert(small(), small_target, ids).warnings
    assert f"lacks token {' and '.join(map(str, ends))}, which ends a text" in warning
    ids.write_text("\n".join(map(str, {*IDS, *ends})))
    assert convert(small("again"), small_target, ids).warnings == ()


def test_names_of_variants(
    small: Make, small_target: Path, ids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ids.parent)
    checkpoint = small("Tiny-250K-DFlash2")
    names = []
    for listed in (None, ids):
        result = dflash_convert.convert(
            checkpoint, small_target, outtype="q8_0", draft_vocab=listed
        )
        names.append(result.path.name)
    assert names == [
        "dflash-Tiny-250K-DFlash2-Q8_0.gguf",
        "dflash-Tiny-250K-DFlash2-vocab10-Q8_0.gguf",
    ]
    plain = dflash_convert.convert(
        small("other"), small_target, ids.parent / "o.gguf", draft_vocab=ids
    )
    keys = {k["name"]: k["value"] for k in dflash_convert.inspect(plain.path)["keys"]}
    assert keys["general.finetune"].endswith("vocab10")


def test_what_the_command_prints(run: Run, small: Make, small_target: Path, ids: Path) -> None:
    args = (small("ckpt"), "--target", small_target, "-o", "d.gguf", "--draft-vocab", ids)
    dry = run(*args, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    lines = [line.split() for line in dry.stdout.splitlines()]
    assert ["output.weight", "output.weight", "10", "x", "32", "F32", "f32", "1,280"] in lines
    assert ["d2t", "ids.txt", "10", "I64", "i64", "80"] in lines
    assert not (ids.parent / "d.gguf").exists()
    done = run(*args)
    assert "from the target: token embedding\n" in done.stdout
    said = "drafts 10 of 300 tokens; their rows of the target's `output.weight` are in the file"
    assert said in done.stdout
    shown = run("inspect", "d.gguf").stdout
    assert "DFlash 2 draft, architecture dflash, drafts 10 of 300 tokens" in shown
    assert json.loads(run("inspect", "d.gguf", "--json").stdout)["draft_vocab"] == 10
    fits = run("check", small_target, "d.gguf").stdout
    assert fits == f"d.gguf fits {small_target}, drafts 10 of 300 tokens\n"
    data = json.loads(run(*args, "--force", "--json").stdout)
    assert (data["vocab"], data["draft_vocab"]) == (300, 10)
    assert data["head_rows_from_target"] == "output.weight"
    assert data["shared_with_target"] == ["token embedding"]
    whole = json.loads(run(*args[:-2], "--force", "--json").stdout)
    assert (whole["draft_vocab"], whole["head_rows_from_target"]) == (None, None)


def test_bad_lists_exit_with_2(run: Run, small: Make, small_target: Path, ids: Path) -> None:
    ids.write_text("1\n1\n2\n3\n4\n")
    done = run(small("ckpt"), "--target", small_target, "--draft-vocab", ids)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "lists 1 ids more than once (the first is 1)" in done.stderr


_PEAK = r"""
import re, sys
import dflash_convert
checkpoint, target, out, *ids = sys.argv[1:]
dflash_convert.convert(checkpoint, target, out, draft_vocab=ids[0] if ids else None, threads=1)
print(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])  # KiB
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status")
def test_the_targets_head_is_not_loaded(make: Make, tmp_path: Path, ids: Path) -> None:
    """A head of 40 MB: the same conversion without a list does not look at it."""
    sizes = {"version": 1, "layers": 1, "vocab": 40_000, "target_layer_ids": (1, 3)}
    checkpoint = make(**{**WIDE, **sizes})
    target = make_target(
        tmp_path / "t.gguf", "qwen3", n_layer=8, n_embd=256, n_ff=64, n_vocab=40_000, tied=True
    )
    peaks = []
    for name, more in (("whole", []), ("reduced", [ids])):
        args = [checkpoint, target, tmp_path / f"{name}.gguf", *more]
        done = subprocess.run(
            [sys.executable, "-c", _PEAK, *map(str, args)],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 10_000, peaks
