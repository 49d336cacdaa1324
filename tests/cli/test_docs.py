"""What README.md and docs/ tell people to type, and where they send them, exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)[^)]*\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
MAKE = re.compile(r"`make ([a-z0-9.-]+)|^    make ([a-z0-9.-]+)", re.MULTILINE)


def pages(root: Path) -> list[Path]:
    folders = [root / "docs", *(root / "models").iterdir()]
    below = sorted(page for folder in folders for page in folder.glob("*.md"))
    return [root / "README.md", root / "CHANGELOG.md", *below]


def typed(root: Path, program: str) -> list[list[str]]:
    """Command lines of a program in indented blocks, as lists of words."""
    found = []
    for page in pages(root):
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"    {program} "):
                found.append(shlex.split(line.split(" > ")[0].replace("[", " ").replace("]", " ")))
    return found


@pytest.mark.parametrize("module", ["dflash_cpp", "dflash_convert"])
def test_commands_have_the_options_that_are_shown(root: Path, module: str) -> None:
    program = {"dflash_cpp": "dflash-cpp", "dflash_convert": "dflash-convert"}[module]
    commands = typed(root, program)
    assert commands
    for _, *words in commands:
        # dflash-convert has a default: without a command it converts.
        named = module == "dflash_cpp" or words[0] in ("check", "diff", "upgrade", "inspect")
        name = words[0] if named else "convert"
        done = subprocess.run(
            [sys.executable, "-m", module, name, "--help"],
            capture_output=True, text=True, env={"COLUMNS": "200", "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stderr)
        if name == "serve":
            continue
        shown = set(re.findall(r"(?<![\w-])--?[\w-]+", done.stdout))
        assert {w for w in words if w.startswith("-")} <= shown, words


def test_links_lead_somewhere(root: Path) -> None:
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        targets = [a or b for a, b in LINK.findall(text)]
        local = [t for t in targets if not t.startswith(("http:", "https:"))]
        assert [t for t in local if not (page.parent / t).exists()] == [], page
    assert LINK.findall("see [a](b.md) or\n[c]: d.md") == [("b.md", ""), ("", "d.md")]


def test_nothing_is_left_to_be_filled_in(root: Path) -> None:
    blank = re.compile(r"@@\w+@@|\b(?:TODO|FIXME|XXX)\b")
    for page in pages(root):
        assert blank.findall(page.read_text(encoding="utf-8")) == [], page
    assert blank.findall("1.80\n@@ROW@@\nTODO: the rest") == ["@@ROW@@", "TODO"]


def test_make_targets_exist(root: Path) -> None:
    known = set(re.findall(r"^([a-z0-9.-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    for page in pages(root):
        shown = {a or b for a, b in MAKE.findall(page.read_text(encoding="utf-8"))}
        assert shown <= known, page


def test_the_readme_has_two_commands_for_a_new_machine(root: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    section = text.split("## Two commands")[1].split("\n## ")[0]
    shown = [line.split()[:2] for line in section.splitlines() if line.startswith("    ")]
    assert shown == [["make", "demo"], ["make", "test"]]


def test_json_keys_that_are_documented(root: Path, command: Callable[..., Any], pair: Any) -> None:
    import json

    prompt = ["-p", "x", "-n", 8, "-c", 256, "-t", 1, "--json", "--compare"]
    done = command("run", "-m", pair.target, "-md", pair.draft, *prompt)
    keys = set(json.loads(done.out)) - {"schema"}
    text = (root / "docs" / "run.md").read_text(encoding="utf-8").split("## JSON")[1]
    assert {k for k in keys if f"`{k}`" not in text.split("##")[0]} == set()
