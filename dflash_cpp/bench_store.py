"""The file that a benchmark adds each finished measurement to, so that it can go on later."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_convert.errors import InputError

FILE_NAME = "results.jsonl"

Key = tuple[Any, ...]

# kind of measurement -> what tells it from others of its kind
KEYS = {
    "answer": ("lane", "temp", "prompt", "repetition"),
    "prompt": ("lane", "n_tokens", "repetition"),
    "concurrent": ("lane", "requests", "repetition"),
}
# kind -> numbers that must be there
_NUMBERS = {
    "answer": ("temp", "repetition", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms"),
    "prompt": ("n_tokens", "repetition", "prompt_n", "prompt_ms"),
    "concurrent": ("requests", "repetition", "predicted_n", "wall_s"),
}
_SHOWN = 60


@dataclass
class Store:
    """The results of one benchmark.

    Attributes:
        path: The file; its first line holds the settings, each other one a measurement or what is
            known of the machine.
        measurements: In the order in which they were made.
        sessions: The machine at the start of each run that added measurements.
    """

    path: Path
    measurements: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def done(self) -> set[Key]:
        """Keys of the measurements that are there."""
        return {key_of(m) for m in self.measurements}

    def add(self, kind: str, record: Mapping[str, Any]) -> None:
        """Append a line: a measurement, or with kind `session` or `session_end` the machine."""
        line = {"kind": kind, **record}
        self._sort_in(line)
        # one write of a whole line: an interrupted run leaves lines, not pieces of them
        with self.path.open("ab", buffering=0) as stream:
            stream.write(_line(line))
            os.fsync(stream.fileno())

    def _sort_in(self, line: dict[str, Any]) -> None:
        if line["kind"] in KEYS:
            self.measurements.append(line)
            return
        known = {k: v for k, v in line.items() if k != "kind"}
        if line["kind"] == "session":
            self.sessions.append(known)
        elif self.sessions:
            self.sessions[-1].update(known)


def key_of(record: Mapping[str, Any]) -> Key:
    """Return what tells a measurement from all others."""
    return (record["kind"], *(record[name] for name in KEYS[record["kind"]]))


def open_store(folder: Path, settings: Mapping[str, Any], *, resume: bool, force: bool) -> Store:
    """Start a file of results, or go on with the one that is there.

    Args:
        folder: Made if it is missing.
        settings: Plain data that decides about the results.
        resume: Go on with results of the same settings.
        force: Where the results that are there cannot be gone on with, start anew.

    Raises:
        InputError: There are results and neither `resume` nor `force`, or `resume` and other
            settings, or the file is damaged.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"`{folder}` is a file, expected a folder for results")
    path = folder / FILE_NAME
    if path.exists():
        if resume:
            try:
                return _read(path, json.loads(json.dumps(settings)))
            except InputError:
                if not force:
                    raise
        elif not force:
            raise InputError(
                f"`{folder}` holds the results of an earlier run, expected a folder without any",
                hint="go on with --resume, start anew with --force, or name another --out",
            )
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{FILE_NAME}.{os.getpid()}.part")
    try:
        part.write_bytes(_line({"kind": "settings", "settings": settings}))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return Store(path)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode("utf-8") + b"\n"


def _read(path: Path, settings: dict[str, Any]) -> Store:
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        # power was cut while a line was written: its measurement is made again
        os.truncate(path, whole)
    lines = data[:whole].splitlines()
    store = Store(path)
    for number, text in enumerate(lines, 1):
        record = _parse(path, number, text)
        if number == 1:
            _compare(path.parent, record["settings"], settings)
        else:
            store._sort_in(record)
    if not lines:
        raise _damaged(path, 1)
    return store


def _parse(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except ValueError as exc:
        raise _damaged(path, number) from exc
    kind = record.get("kind") if isinstance(record, dict) else None
    if number == 1:
        good = kind == "settings" and isinstance(record.get("settings"), dict)
    elif kind in KEYS:
        good = all(
            isinstance(record.get(n), (int, float)) and not isinstance(record.get(n), bool)
            for n in _NUMBERS[kind]
        ) and all(isinstance(record.get(n), (str, int, float)) for n in KEYS[kind])
    else:
        good = kind in ("session", "session_end")
    if not good:
        raise _damaged(path, number)
    return dict(record)


def _damaged(path: Path, number: int) -> InputError:
    return InputError(
        f"`{path}` line {number} is no result of a benchmark",
        hint="name another --out, or start anew with --force",
    )


def _compare(folder: Path, there: dict[str, Any], now: dict[str, Any]) -> None:
    names = [n for n in {**now, **there} if there.get(n) != now.get(n)]
    if not names:
        return

    def shown(name: str) -> str:
        pair = [json.dumps(s.get(name)) for s in (there, now)]
        return f"{name} {pair[0]} there, {pair[1]} now" if len("".join(pair)) < _SHOWN else name

    raise InputError(
        f"`{folder}` was measured with other settings ({'; '.join(map(shown, names))}), expected "
        "the same ones",
        hint="repeat the command that made it, name another --out, or start anew with --force",
    )
