"""The patch set on disk: series, hook patches with their headers, overlay files, and its key."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from . import PatchsetError, udiff
from .base import BaseInfo, read_base_toml

FORMAT = 1  # part of the key: raise it when the same inputs give another tree
HEADER_FIELDS = ("Description", "Hooks", "Drop-when", "Forwarded")
PLACEHOLDER = "to be written"
NAME = re.compile(r"\d{4}-[a-z0-9][a-z0-9-]*\.patch")
# Left behind by editors, merges, Python and desktops; never part of the patch set.
IGNORED = ("*~", "*.orig", "*.rej", "*.swp", "*.pyc", ".DS_Store", "._*", ".writing-*", "*.tmp")


def is_ignored(path: str) -> bool:
    parts = path.split("/")
    return "__pycache__" in parts[:-1] or any(fnmatch(parts[-1], pattern) for pattern in IGNORED)


@dataclass
class Patch:
    """One hook patch: its header (kept as written) and its hunks per upstream file."""

    name: str
    data: bytes
    header: bytes = b""
    files: dict[str, list[udiff.Hunk]] = field(default_factory=dict)

    @classmethod
    def parse(cls, name: str, data: bytes) -> Patch:
        header, files = udiff.parse(data, name)
        return cls(name, data, b"".join(header), files)

    def fields(self) -> dict[str, str]:
        """Header fields; a continuation line starts with a space, as in Debian's headers."""
        found: dict[str, str] = {}
        last = ""
        for line in self.header.decode(errors="replace").splitlines():
            match = re.match(r"([A-Z][A-Za-z-]*):\s*(.*)", line)
            if match:
                last = match[1]
                found[last] = match[2].strip()
            elif line.startswith((" ", "\t")) and last:
                found[last] = f"{found[last]} {line.strip()}".strip()
            else:
                last = ""
        return found

    def counts(self, path: str) -> tuple[int, int]:
        """(lines added, lines removed) in one file."""
        signs = [sign for hunk in self.files[path] for sign, _ in hunk.lines]
        return signs.count(b"+"), signs.count(b"-")


def new_header() -> bytes:
    """Header of a patch that `export --patch` starts; `check` fails until it is filled in."""
    return "".join(f"{key}: {PLACEHOLDER}\n" for key in HEADER_FIELDS).encode() + b"\n"


@dataclass
class PatchSet:
    """All inputs except the base's own files."""

    root: Path
    info: BaseInfo
    patches: list[Patch]
    overlay: dict[str, Path]

    @classmethod
    def load(cls, root: Path) -> PatchSet:
        """Reads base.toml, series, the patches it names, and the overlay's file list.

        Raises:
            PatchsetError: a listed patch is missing, malformed, listed twice, or two patches touch
                one upstream file.
        """
        info = read_base_toml(root / "base.toml")
        patches = [Patch.parse(name, _read(root / name)) for name in read_series(root)]
        owners: dict[str, str] = {}
        for patch in patches:
            for path in patch.files:
                if path in owners:
                    raise PatchsetError(
                        f"`{path}` is in `{owners[path]}` and in `{patch.name}`;"
                        " one upstream file belongs to exactly one patch"
                    )
                owners[path] = patch.name
        overlay = {}
        folder = root / "overlay"
        for source in sorted(folder.rglob("*")) if folder.is_dir() else []:
            relative = source.relative_to(folder).as_posix()
            if source.is_file() and not is_ignored(relative):
                overlay[udiff.checked_path(relative, "patches/overlay")] = source
        both = sorted(set(overlay) & set(owners))
        if both:
            raise PatchsetError(
                f"`{both[0]}` is an overlay file and in `{owners[both[0]]}`; it can only be one"
            )
        return cls(root, info, patches, overlay)

    def owner(self, path: str) -> Patch | None:
        return next((patch for patch in self.patches if path in patch.files), None)

    def owner_name(self, path: str) -> str:
        patch = self.owner(path)
        return patch.name if patch else ""

    def patched_paths(self) -> set[str]:
        return {path for patch in self.patches for path in patch.files}

    def patched(self, path: str, pristine: bytes) -> bytes:
        """Content of an upstream file after its patch; unchanged when no patch has it."""
        patch = self.owner(path)
        if patch is None:
            return pristine
        where = f"{patch.name}, `{path}`"
        lines = udiff.apply(udiff.split_lines(pristine), patch.files[path], where)
        return b"".join(lines)

    def patches_digest(self) -> str:
        """sha256 over series and patch files alone."""
        return _digest((patch.name, patch.data) for patch in self.patches)

    def key(self, identity: str) -> str:
        """sha256 over everything that decides the patched tree."""
        overlay = ((path, source.read_bytes()) for path, source in self.overlay.items())
        parts = [f"{FORMAT}", identity, self.patches_digest(), _digest(overlay)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _digest(items: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, data in items:
        digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode())
    return digest.hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise PatchsetError(
            f"patches/series names `{path.name}`, which is not in {path.parent}"
        ) from error


def read_series(root: Path) -> list[str]:
    """Patch names in order; comments and blank lines as in quilt. Missing file: no patches."""
    path = root / "series"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.split("#")[0].strip() for line in lines]
    names = [name for name in names if name]
    for name in names:
        if not NAME.fullmatch(name):
            raise PatchsetError(f"patches/series: `{name}` is not of the form NNNN-what.patch")
        if names.count(name) > 1:
            raise PatchsetError(f"patches/series names `{name}` twice")
    return names
