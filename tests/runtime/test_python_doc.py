"""The code in docs/python.md runs, and its tables are complete."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from bigram import make_bigram

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    return (root / "docs" / "python.md").read_text(encoding="utf-8")


def test_the_code_runs(
    text: str,
    our_library: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair = make_bigram(tmp_path)
    (tmp_path / "TARGET.gguf").symlink_to(pair.target)
    (tmp_path / "DRAFT.gguf").symlink_to(pair.draft)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"(?:^    .*\n|^\n)+", text, re.MULTILINE)
    code = [re.sub(r"^    ", "", b, flags=re.MULTILINE) for b in blocks]
    mine = [c for c in code if c.strip() and not c.strip().startswith("dflash-cpp")]
    run = [c for c in mine if "from_pretrained" not in c and "langchain" not in c]
    assert len(run) == len(mine) - 2 == 3
    names: dict[str, object] = {}
    for block in run:
        exec(block, names)
    names["llm"].close()  # type: ignore[attr-defined]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("4 ")
    assert int(lines[-1].split()[1]) > 10
    assert any(line.startswith("draft-dflash greedy") for line in lines)


def test_tables_are_complete(text: str, our_library: None) -> None:
    from dflash_cpp import DFlashLlama, errors
    from dflash_cpp.check import DEAD, FIT, MIN_FIRST, MISFIT, WRONG

    own = inspect.signature(DFlashLlama.__init__).parameters
    names = [n for n, p in own.items() if p.kind is p.KEYWORD_ONLY]
    assert [n for n in names if f"| `{n}` |" not in text] == []
    classes = [n for n in errors.__all__ if n.startswith("DFlash") and n != "DFlashError"]
    for name in classes:
        (builtin,) = (
            c.__name__
            for c in getattr(errors, name).__mro__[1:]
            if c.__module__ == "builtins" and c.__name__.endswith("Error")
        )
        assert f"| `{name}` | `{builtin}` |" in text
    for verdict in (FIT, MISFIT, WRONG, DEAD):
        assert f"| `{verdict}` |" in text
    assert f"{100 * MIN_FIRST:.0f} % or more" in text
