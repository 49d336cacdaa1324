"""Prompts: the built-in ones, files in both forms, and files that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_convert.errors import InputError
from dflash_cpp.promptset import (
    Prompt,
    builtin_classes,
    builtin_prompts,
    load_prompts,
    spread,
)

CLASSES = ("code", "dialogue", "list", "prose", "repetition", "translation")


def test_builtin_prompts() -> None:
    assert builtin_classes() == CLASSES
    prompts = builtin_prompts()
    assert {p.klass for p in prompts} == set(CLASSES)
    assert len({p.id for p in prompts}) == len({p.text for p in prompts}) == len(prompts)
    assert [p.id for p in builtin_prompts(["list"], 2)] == ["list-1", "list-2"]
    with pytest.raises(InputError, match="unknown prompt class `poem`, expected one of code"):
        builtin_prompts(["poem"])


def test_builtin_prompts_are_not_in_the_training_data(root: Path) -> None:
    # a draft that has seen the answers would look better than it is
    source = root / "models" / "train" / "prompts.py"
    if not source.exists():
        pytest.skip("models/train/prompts.py is missing")
    text = source.read_text(encoding="utf-8").lower()
    assert [p.id for p in builtin_prompts() if p.text.lower() in text] == []


def test_text_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeffone ü\n\n  \nfour\n", encoding="utf-8")
    assert load_prompts(file) == [
        Prompt("line-1", "other", "one ü"),
        Prompt("line-4", "other", "four"),
    ]


def test_jsonl_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "class": "code", "id": "x"}\n\n{"prompt": "b"}\n')
    assert load_prompts(file) == [Prompt("x", "code", "a"), Prompt("line-3", "other", "b")]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.txt", b"\n \n", "holds no prompts"),
        ("p.txt", b"ok\n\xff\xfe\n", "not UTF-8 text .byte 3."),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON"),
        ("p.jsonl", b'{"text": "a"}\n', "line 1 has no text under `prompt`"),
        ("p.jsonl", b"[]\n", "line 1 has no text under `prompt`"),
        ("p.jsonl", b'{"prompt": 5}\n', "line 1 has no text under `prompt`"),
        ("p.jsonl", b'{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}\n', "line 2 repeats"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(InputError, match=said):
        load_prompts(file)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read prompts from"):
        load_prompts(tmp_path / "none.txt")


def test_spread_takes_from_every_class() -> None:
    prompts = builtin_prompts()
    assert {p.klass for p in spread(prompts, 6)} == set(CLASSES)
    assert [p.id for p in spread(prompts, 8)] == [
        "code-1", "code-2", "dialogue-1", "dialogue-2", "list-1", "prose-1", "repetition-1",
        "translation-1",
    ]  # fmt: skip
    assert spread(prompts, None) == spread(prompts, 1000) == prompts
