"""Every message in docs/troubleshooting.md is one that the sources can print."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENTRY = re.compile(r"^### `(.+)`$", re.MULTILINE)
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# what a format leaves open, in C++ and in Python
OPEN = {"c": re.compile(r"%[-.0-9]*(?:ll|z)?[a-z]"), "py": re.compile(r"\{[^{}\n]*\}")}


@functools.cache
def sources() -> str:
    """All code of ours, the pieces of one literal joined, open places as `…`."""
    files = {
        "c": [*(ROOT / "patches" / "overlay").rglob("*.[ch]*")],
        "py": [*(ROOT / "dflash_cpp").glob("*.py"), *(ROOT / "convert").rglob("*.py")],
    }
    texts = []
    for language, paths in files.items():
        text = "\n".join(p.read_text(encoding="utf-8") for p in paths if p.is_file())
        text = re.sub(r'"\s*\n\s*f?"', "", text).replace("`", "")
        texts.append(OPEN[language].sub("…", text))
    return "\n".join(texts)


@pytest.mark.parametrize("message", ENTRY.findall(PAGE))
def test_the_message_exists(message: str) -> None:
    wanted = re.sub(r"…(?:: …)*", "…", message.replace("`", "")).strip("…: ")
    parts = [part.strip(" :") for part in wanted.split("…") if len(part.strip(" :,()")) > 3]
    text = sources()
    assert parts
    # the parts stand in one message, in this order
    pattern = r"[^\n]{0,40}?".join(re.escape(p) for p in parts)
    assert re.search(pattern, text), f"no source prints {parts}"


def test_there_are_entries() -> None:
    assert len(ENTRY.findall(PAGE)) > 15
