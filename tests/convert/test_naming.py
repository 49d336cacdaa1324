"""The name of the file and its `general.*` keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from converted import convert

import dflash_convert
from dflash_convert.errors import InputError
from dflash_convert.gguf_file import read_gguf

Make = Callable[..., Path]


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
