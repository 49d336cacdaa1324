"""A target's Hugging Face directory: every tokenizer key is what the base's converter writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_tokenizers import (
    GPT4O,
    LLAMA3,
    QWEN2,
    QWEN35,
    SHAPES,
    Shape,
    template,
    write_shape,
    write_tiktoken,
    write_tokenizer,
)

from dflash_convert.errors import InputError
from dflash_convert.families import FAMILIES
from dflash_convert.gguf_file import Field, read_gguf
from dflash_convert.schema import TAPPED_ARCHITECTURES
from dflash_convert.target import read_target

Keys = dict[str, tuple[str, bytes]]


def stock_keys(base: Path, jobs: list[tuple[Path, Path, str | None]]) -> list[Keys]:
    """The tokenizer keys that the base's converter writes, one process for all jobs."""
    listed = jobs[0][1].with_name("jobs.json")
    listed.write_text(json.dumps([[str(d), str(o), p] for d, o, p in jobs]))
    script = Path(__file__).with_name("stock_vocab.py")
    done = subprocess.run(
        [sys.executable, str(script), str(base), str(listed)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [keys_of(read_gguf(out).fields) for _, out, _ in jobs]


def keys_of(fields: dict[str, Field]) -> Keys:
    return {
        name: (field.type_name, field.payload)
        for name, field in fields.items()
        if name.startswith("tokenizer.")
    }


@pytest.fixture(scope="session")
def base(base_gguf_py: Path) -> Path:
    """The base's source tree."""
    return base_gguf_py.parent


@pytest.fixture(scope="session")
def written(
    base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Keys]]:
    """Directory and stock keys of every shape."""
    root = tmp_path_factory.mktemp("tokenizers")
    jobs: list[tuple[Path, Path, str | None]] = []
    for name, shape in SHAPES.items():
        write_shape(root / name, shape)
        jobs.append((root / name, root / f"{name}.gguf", shape.pre))
    write_tiktoken(root / "kimi")
    jobs.append((root / "kimi", root / "kimi.gguf", "kimi-k2"))
    found = dict(zip([d.name for d, _, _ in jobs], stock_keys(base, jobs), strict=True))
    return lambda name: (root / name, found[name])


def differences(ours: Keys, stock: Keys) -> dict[str, Any]:
    """What differs, readable."""
    out: dict[str, Any] = {}
    for key in ours.keys() | stock.keys():
        if ours.get(key) != stock.get(key):
            out[key] = [
                k[0] + str(k[1][:80]) if k else None for k in (ours.get(key), stock.get(key))
            ]
    return out


@pytest.mark.native
@pytest.mark.parametrize("name", [*SHAPES, "kimi"])
def test_keys_are_those_of_the_base(written: Callable[[str], tuple[Path, Keys]], name: str) -> None:
    directory, stock = written(name)
    target = read_target(directory)
    assert differences(keys_of(target.file.fields), stock) == {}
    assert len(stock) >= 4
    assert (target.hidden, target.layers) == (288, 8)
    assert target.mrope == name.startswith("qwen35")


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocabulary", "shape", "control"),
    [
        ("qwen2", SHAPES["qwen3"], 3),
        ("llama-bpe", SHAPES["llama3"], 256),
    ],
)
def test_real_vocabularies_are_recognised_by_both(
    base: Path, tmp_path: Path, vocabulary: str, shape: Shape, control: int
) -> None:
    """With the real tokens the base finds the pre-tokenizer itself: our rules are the real ones."""
    file = read_gguf(base / "models" / f"ggml-vocab-{vocabulary}.gguf")
    tokens, types = (file.get(f"tokenizer.ggml.{n}") for n in ("tokens", "token_type"))
    plain = {t: i for i, t in enumerate(tokens) if types[i] == 1}
    special = [t for i, t in enumerate(tokens) if types[i] == 3]
    assert len(special) == control
    shape = Shape(**{**vars(shape), "special": special, "plain": (), "config": {}})
    names = {"bos_token": special[0], "eos_token": special[1], "unk_token": None}
    settings = {**names, "chat_template": "x"}
    shape = Shape(**{**vars(shape), "settings": settings})
    if vocabulary == "llama-bpe":
        shape = Shape(**{**vars(shape), "processor": template(special[0], 128000)})
    write_tokenizer(tmp_path / "target", shape, plain, file.get("tokenizer.ggml.merges"))
    (stock,) = stock_keys(base, [(tmp_path / "target", tmp_path / "stock.gguf", None)])
    ours = keys_of(read_target(tmp_path / "target").file.fields)
    assert differences(ours, stock) == {}
    assert file.get("tokenizer.ggml.pre").encode() in stock["tokenizer.ggml.pre"][1]


@pytest.mark.native
@pytest.mark.slow
def test_the_real_vocabulary_of_gemma_4(base: Path, tmp_path: Path) -> None:
    """Tokens, scores, types and merges come out as in the file that llama.cpp brings along."""
    file = read_gguf(base / "models" / "ggml-vocab-gemma-4.gguf")
    tokens, types = (file.get(f"tokenizer.ggml.{n}") for n in ("tokens", "token_type"))
    plain = {t: i for i, t in enumerate(tokens)}
    special = [t for i, t in enumerate(tokens) if types[i] == 3]
    shown = [t for i, t in enumerate(tokens) if types[i] == 4]
    named = {f"{n}_token": f"<{n}>" for n in ("bos", "eos", "pad", "unk", "mask")}
    settings = {**named, "extra_special_tokens": special}
    shape = Shape(
        **{**vars(SHAPES["gemma4"]), "special": special, "plain": shown, "settings": settings}
    )
    write_tokenizer(tmp_path / "target", shape, plain, file.get("tokenizer.ggml.merges"))
    ours = keys_of(read_target(tmp_path / "target").file.fields)
    for name in ("tokens", "scores", "token_type", "merges", "bos_token_id", "add_bos_token"):
        field = file.fields[f"tokenizer.ggml.{name}"]
        assert ours[f"tokenizer.ggml.{name}"] == (field.type_name, field.payload), name


# --- tables ---------------------------------------------------------------------------------------


@pytest.mark.native
def test_families_are_those_of_the_base(base: Path, base_gguf_py: Path) -> None:
    registry = (base / "conversion" / "__init__.py").read_text()
    assert all(f'"{name}"' in registry for name in FAMILIES)
    constants = (base_gguf_py / "gguf" / "constants.py").read_text()
    names = {f.architecture for f in FAMILIES.values()}
    assert all(re.search(rf'MODEL_ARCH\.\w+:\s+"{re.escape(n)}"', constants) for n in names)
    vocab = (base / "src" / "llama-vocab.cpp").read_text()
    for rule in (QWEN2, QWEN35, LLAMA3, GPT4O):
        assert (
            f'// "{rule}"'.replace("\\", "\\\\") in vocab
            or f'//"{rule}"'.replace("\\", "\\\\") in vocab
        )
    for family in FAMILIES.values():
        assert set(family.pre) <= {QWEN2, QWEN35, LLAMA3, GPT4O}
        assert all(f'tokenizer_pre == "{name}"' in vocab for name in family.pre.values())


def test_the_families_that_can_hand_over_hidden_states_are_known() -> None:
    assert {f.architecture for f in FAMILIES.values()} & TAPPED_ARCHITECTURES == {
        "qwen3",
        "qwen3moe",
        "qwen3next",
        "qwen35",
        "qwen35moe",
        "llama",
        "gemma4",
        "gpt-oss",
        "minimax-m2",
    }


# --- what is refused ------------------------------------------------------------------------------


def refused(directory: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        read_target(directory)
    return caught.value


def change(directory: Path, name: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edit a JSON file of a directory."""
    document = json.loads((directory / name).read_text())
    edit(document)
    (directory / name).write_text(json.dumps(document))


def _at(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return an edit that sets one value of a nested document."""

    def edit(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = value

    return edit


_SPLIT = ("pre_tokenizer", "pretokenizers", 0)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (_at("model", "type", value="Unigram"), "its model is Unigram, expected BPE"),
        (_at("model", value=3), "its model is None, expected BPE"),
        (_at("model", "vocab", value=[]), "`model.vocab` is no table"),
        (_at("model", "vocab", "a", value="b"), "`model.vocab` is no table"),
        (_at("model", "vocab", "a", value=10**6), "its ids reach 1000000"),
        (_at("model", "vocab", "a", value=-1), "its ids reach"),
        (_at("model", "merges", value=[["a", "b", "c"]]), "no list of merges"),
        (_at("model", "merges", value=[]), "no list of merges"),
        (_at("model", "byte_fallback", value=True), "SentencePiece model"),
        (_at(*_SPLIT, "pattern", value={"Regex": LLAMA3}), "not that of `qwen2` or `qwen35`"),
        (_at(*_SPLIT, "behavior", value="Removed"), "not that of `qwen2`"),
        (_at(*_SPLIT, "invert", value=True), "not that of `qwen2`"),
        (_at("pre_tokenizer", value={"type": "ByteLevel"}), "not that of `qwen2`"),
        (_at("pre_tokenizer", value=None), "not that of `qwen2`"),
        (_at("pre_tokenizer", value="x"), "not that of `qwen2`"),
        (_at("normalizer", value={"type": "Lowercase"}), "its normalizer is Lowercase"),
        (_at("added_tokens", value=3), "its added tokens are no list"),
        (_at("added_tokens", 0, value="x"), "no `content` or no id"),
        (_at("added_tokens", 0, "id", value=1.5), "no `content` or no id"),
        (_at("model", "vocab", "\ud800", value=304), "not valid Unicode"),
        (_at("model", "vocab", "one more", value=7), "tokens share 303 ids"),
    ],
)
def test_unknown_tokenizers_name_the_way_out(
    tmp_path: Path, edit: Callable[[dict[str, Any]], Any], expected: str
) -> None:
    directory = tmp_path / "target"
    write_shape(directory, SHAPES["qwen3"])
    change(directory, "tokenizer.json", edit)
    error = refused(directory)
    assert expected in str(error)
    assert "--target TARGET.gguf" in str(error.hint)


def test_directories_that_are_no_targets(tmp_path: Path) -> None:
    directory = tmp_path / "target"
    write_shape(directory, SHAPES["qwen3"])
    (directory / "tokenizer.json").unlink()
    assert "there is no tokenizer.json" in str(refused(directory))
    (directory / "tokenizer.json").write_text("{")
    assert "is not valid JSON" in str(refused(directory))
    change(directory, "config.json", lambda c: c.update(architectures=["GPTBigCodeForCausalLM"]))
    error = refused(directory)
    assert "is a GPTBigCodeForCausalLM, whose tokenizer is not known here" in str(error)
    assert "--target TARGET.gguf" in str(error.hint)
    change(directory, "config.json", lambda c: c.update(architectures=["DFlashDraftModel"]))
    assert "is a draft (DFlashDraftModel), expected its target" in str(refused(directory))
    change(directory, "config.json", lambda c: c.pop("architectures"))
    assert "names no architecture" in str(refused(directory))


def test_sizes_are_checked_all_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "target"
    write_shape(directory, SHAPES["qwen3"])
    change(
        directory,
        "config.json",
        lambda c: c.update(hidden_size="x", num_hidden_layers=0, vocab_size=2**40),
    )
    assert len(refused(directory).problems) == 3


def test_llama_2_is_not_taken_for_llama_3(tmp_path: Path) -> None:
    directory = tmp_path / "target"
    write_shape(directory, SHAPES["llama3"])
    change(directory, "tokenizer.json", _at("model", "ignore_merges", value=False))
    assert "does not ignore merges" in str(refused(directory))
    (directory / "tokenizer.model").touch()
    assert "SentencePiece model" in str(refused(directory))


def test_kimi_ranks_must_be_whole(tmp_path: Path) -> None:
    directory = tmp_path / "target"
    write_tiktoken(directory)
    ranks = directory / "tiktoken.model"
    whole = ranks.read_bytes()
    ranks.write_bytes(whole + b"!!! 3\n")
    assert "tiktoken.model is damaged" in str(refused(directory))
    ranks.write_bytes(whole + b"YWJj 900\n")
    assert "gaps in its ranks" in str(refused(directory))
    ranks.unlink()
    assert "there is no tiktoken.model" in str(refused(directory))
