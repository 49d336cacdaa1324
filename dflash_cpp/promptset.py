"""Prompts for parity, benchmarks and the demo: the built-in classes and files of the user."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from dflash_convert.errors import InputError

UNCLASSED = "other"


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: Unique within its set, for reports.
        klass: Kind of text it asks for (code, prose, ...); `other` when unknown.
        text: What the user says.
    """

    id: str
    klass: str
    text: str


def builtin_classes() -> tuple[str, ...]:
    """Return the names of the built-in prompt classes, sorted."""
    folder = files("dflash_cpp") / "prompts"
    return tuple(sorted(f.name[:-6] for f in folder.iterdir() if f.name.endswith(".jsonl")))


def builtin_prompts(
    classes: Iterable[str] | None = None, per_class: int | None = None
) -> list[Prompt]:
    """Return the built-in prompts.

    Args:
        classes: Names from `builtin_classes`; None for all.
        per_class: At most so many of each class; None for all.
    """
    known = builtin_classes()
    wanted = known if classes is None else tuple(classes)
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise InputError(f"unknown prompt class `{unknown[0]}`, expected one of {', '.join(known)}")
    prompts: list[Prompt] = []
    for name in wanted:
        source = files("dflash_cpp") / "prompts" / f"{name}.jsonl"
        lines = source.read_text(encoding="utf-8").splitlines()
        prompts += _parse_jsonl(lines, f"prompts/{name}.jsonl")[:per_class]
    return prompts


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read prompts from a `.jsonl` file or, one a line, from any other text file.

    Args:
        path: Each line of a `.jsonl` file is an object with `prompt` and optionally `class` and
            `id`. Blank lines are skipped in both forms.

    Raises:
        InputError: The file cannot be read, a line is malformed, or there is no prompt in it.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as exc:
        raise InputError(
            f"`{path}` is not UTF-8 text (byte {exc.start}), expected prompts, one a line"
        ) from exc
    except OSError as exc:
        raise InputError(f"cannot read prompts from `{path}`: {exc.strerror}") from exc
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        prompts = _parse_jsonl(lines, str(path))
    else:
        prompts = [
            Prompt(f"line-{n}", UNCLASSED, line) for n, line in enumerate(lines, 1) if line.strip()
        ]
    if not prompts:
        raise InputError(f"`{path}` holds no prompts, expected at least one line")
    return prompts


def choose_prompts(path: Path | None, classes: str | None) -> list[Prompt]:
    """Return the prompts of a file, or the built-in ones of some classes, named with commas.

    Raises:
        InputError: Both are given, or one cannot be read or is unknown.
    """
    if path is not None and classes is not None:
        raise InputError("--classes chooses among the built-in prompts, leave --prompts out")
    if path is not None:
        return load_prompts(path)
    return builtin_prompts(classes and [c.strip() for c in classes.split(",")])


def spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """Take at most `limit` prompts, going round the classes so that each is represented."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    by_class: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_class.setdefault(prompt.klass, []).append(prompt)
    taken: set[str] = set()
    depth = 0
    while len(taken) < limit:
        for group in by_class.values():
            if depth < len(group) and len(taken) < limit:
                taken.add(group[depth].id)
        depth += 1
    return [p for p in prompts if p.id in taken]


def _parse_jsonl(lines: Iterable[str], where: str) -> list[Prompt]:
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as exc:
            raise InputError(
                f"`{where}` line {number} is not JSON ({exc.msg}), "
                'expected {"prompt": "...", "class": "..."}'
            ) from exc
        text = record.get("prompt") if isinstance(record, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise InputError(
                f"`{where}` line {number} has no text under `prompt`, "
                'expected {"prompt": "...", "class": "..."}'
            )
        name = str(record.get("id") or f"line-{number}")
        if name in seen:
            raise InputError(f"`{where}` line {number} repeats the id `{name}`")
        seen.add(name)
        prompts.append(Prompt(name, str(record.get("class") or UNCLASSED), text))
    return prompts
