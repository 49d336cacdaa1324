"""The patched tree in the build folder: made once, then brought up to date file by file.

A manifest beside the sources records, for each file, the sha256 in the base, the sha256 that was
written, and size and time of the written file. That is how an edit by hand is told from a file of
ours, how unchanged files keep their times (the build tool then compiles only what changed), and
how a run that was interrupted is finished by the next one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import PatchsetError, udiff
from .base import SKIPPED_FOLDERS, SdistBase, SourceBase, locked, write_atomically
from .series import FORMAT, PatchSet, is_ignored

MANIFEST = ".dflash-manifest.json"
LOOSE = "loose"  # key of a tree made with hunks shifted or left out
Base = SdistBase | SourceBase


@dataclass
class Entry:
    """One file of the tree; `base` is empty for an overlay file."""

    base: str
    applied: str
    size: int = -1
    mtime_ns: int = -1


@dataclass
class Manifest:
    """What the last apply did. `pending`: sha256 a started, perhaps unfinished, apply writes."""

    key: str = ""
    base: str = ""
    patches: str = ""
    source: str = ""
    files: dict[str, Entry] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, tree: Path) -> Manifest | None:
        """The tree's manifest; None when there is none or it is of another format."""
        try:
            data = json.loads((tree / MANIFEST).read_text(encoding="utf-8"))
            if data.pop("format") != FORMAT:
                return None
            files = {path: Entry(*values) for path, values in data.pop("files").items()}
            return cls(files=files, **data)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def write(self, tree: Path) -> None:
        data = {"format": FORMAT, **vars(self)}
        data["files"] = {path: list(vars(entry).values()) for path, entry in self.files.items()}
        text = json.dumps(data, separators=(",", ":"), sort_keys=True)
        write_atomically(tree / MANIFEST, text.encode())

    def ours(self, path: str, digest: str) -> bool:
        """Whether this content of a file was written by apply, not by hand."""
        entry = self.files.get(path)
        return digest == self.pending.get(path) or (entry is not None and digest == entry.applied)


@dataclass
class Applied:
    """Outcome of apply: counts, files with edits that were kept, hunks a loose run left out."""

    key: str
    written: int = 0
    removed: int = 0
    kept: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tree_files(tree: Path, known: Container[str] = ()) -> Iterator[str]:
    """Relative paths of the sources in a tree, without caches, build folders and leftovers."""
    for folder, subfolders, names in os.walk(tree):
        if "CMakeCache.txt" in names and Path(folder) != tree:
            subfolders.clear()
            continue
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        for name in sorted(set(names) - {MANIFEST, ".git"}):
            path = (Path(folder) / name).relative_to(tree).as_posix()
            if path in known or not is_ignored(path):
                yield path


def current_hashes(tree: Path, manifest: Manifest) -> dict[str, str]:
    """sha256 of each file in the tree; read only where size or time differ from the manifest."""
    found = {}
    for path in tree_files(tree, manifest.files):
        entry = manifest.files.get(path)
        status = (tree / path).stat()
        if entry and (entry.size, entry.mtime_ns) == (status.st_size, status.st_mtime_ns):
            found[path] = entry.applied
        else:
            found[path] = sha256((tree / path).read_bytes())
    return found


def apply(
    patchset: PatchSet, base: Base, tree: Path, force: bool = False, loose: bool = False
) -> Applied:
    """Makes `tree` equal to base + overlay + patches. Returns Applied.

    Args:
        force: overwrite files that were edited by hand.
        loose: for a move to another base: take hunks whose lines have shifted, leave out those
            that no longer match, and report them.

    Raises:
        PatchsetError: a patch does not apply, or an edited file would have to be overwritten.
    """
    tree = tree.absolute()
    partial = tree.parent / f".{tree.name}.partial"
    with locked(tree.parent / f".{tree.name}.lock"):
        shutil.rmtree(partial, ignore_errors=True)
        manifest = Manifest.read(tree)
        if manifest is None:
            if tree.exists() and (not tree.is_dir() or any(tree.iterdir())):
                raise PatchsetError(
                    f"`{tree}` exists and was not made by this tool (no {MANIFEST} of format"
                    f" {FORMAT}); remove it or name another folder",
                    code=2,
                )
            try:
                return _create(patchset, base, tree, partial, loose)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return _Update(patchset, base, tree, manifest, force, loose).run()


def _create(patchset: PatchSet, base: Base, tree: Path, partial: Path, loose: bool) -> Applied:
    made = _new_manifest(patchset, base, loose)
    result = Applied(made.key)
    for path, original, data, executable in _contents(patchset, base, None, result, loose):
        _write(partial / path, data, executable)
        made.files[path] = Entry(original, sha256(data))
    _stat_all(partial, made)
    made.write(partial)
    if tree.is_dir():
        tree.rmdir()
    os.replace(partial, tree)
    result.written = len(made.files)
    return result


def _new_manifest(patchset: PatchSet, base: Base, loose: bool) -> Manifest:
    made = Manifest(base=base.identity)
    made.source = str(base.root) if isinstance(base, SourceBase) else ""
    made.key = LOOSE if loose else patchset.key(base.identity)
    made.patches = "" if loose else patchset.patches_digest()
    return made


def _contents(
    patchset: PatchSet, base: Base, wanted: set[str] | None, result: Applied, loose: bool
) -> Iterator[tuple[str, str, bytes, bool]]:
    """Yields (path, sha256 in the base or "", content, executable) of the tree to be made."""
    unseen = {p for p in patchset.patched_paths() if wanted is None or p in wanted}
    base_wanted = None if wanted is None else wanted - set(patchset.overlay)
    for path, data, executable in base.files(base_wanted) if base_wanted != set() else ():
        if path in patchset.overlay:
            raise PatchsetError(
                f"`patches/overlay/{path}` would replace a file of llama.cpp; rename it, or change"
                " that file with a hook patch"
            )
        unseen.discard(path)
        new = _patched_loosely(patchset, path, data, result) if loose else None
        yield path, sha256(data), patchset.patched(path, data) if new is None else new, executable
    if unseen and loose:
        result.skipped += [f"{patchset.owner_name(p)}, `{p}`: no such file" for p in sorted(unseen)]
    elif unseen:
        path = min(unseen)
        raise PatchsetError(
            f"{patchset.owner_name(path)} no longer applies: the base has no file `{path}`"
        )
    for path, source in patchset.overlay.items():
        if wanted is None or path in wanted:
            yield path, "", source.read_bytes(), os.access(source, os.X_OK)


def _patched_loosely(patchset: PatchSet, path: str, data: bytes, result: Applied) -> bytes:
    patch = patchset.owner(path)
    lines = udiff.split_lines(data)
    for number, hunk in enumerate(patch.files[path] if patch else (), 1):
        old = hunk.old
        places = [i for i in range(len(lines) + 1) if lines[i : i + len(old)] == old]
        near = hunk.new_start - 1
        if old and places:
            at = min(places, key=lambda i: abs(i - near))
            lines[at : at + len(old)] = hunk.new
        else:
            result.skipped.append(f"{patchset.owner_name(path)}, `{path}`: hunk {number}")
    return b"".join(lines)


def _write(path: Path, data: bytes, executable: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if executable:
        path.chmod(0o755)


def _stat_all(tree: Path, manifest: Manifest, edited: Container[str] = ()) -> None:
    """Records size and time of each file; an edited one stays unknown, so it is read next time."""
    for path, entry in manifest.files.items():
        if path not in edited:
            status = (tree / path).stat()
            entry.size, entry.mtime_ns = status.st_size, status.st_mtime_ns


@dataclass
class _Update:
    """Brings an existing tree up to date in place."""

    patchset: PatchSet
    base: Base
    tree: Path
    manifest: Manifest
    force: bool
    loose: bool

    def run(self) -> Applied:
        done = _new_manifest(self.patchset, self.base, self.loose)
        result = Applied(done.key)
        current = current_hashes(self.tree, self.manifest)
        wanted, contents = self._wanted(result)
        stale = [path for path, entry in wanted.items() if current.get(path) != entry.applied]
        gone = [path for path in self.manifest.files if path not in wanted and path in current]
        stale = self._settle(stale, gone, wanted, current, result)
        missing = set(stale) - set(contents)
        if missing:
            # Only for files that apply has to restore; everything else is known by its hash.
            for path, _, data, executable in _contents(
                self.patchset, self.base, missing, result, self.loose
            ):
                contents[path] = (data, executable)
        if stale or gone or self.manifest.key != result.key:
            done.files = wanted
            self._write_all(stale, gone, done, contents, result)
        return result

    def _wanted(self, result: Applied) -> tuple[dict[str, Entry], dict[str, tuple[bytes, bool]]]:
        """Entries of the tree to be, and the contents that were read on the way."""
        files = self.manifest.files
        same_base = self.manifest.base == self.base.identity
        if same_base and self.manifest.patches == self.patchset.patches_digest():
            affected = set(self.patchset.overlay)
        elif same_base:
            affected = set(self.patchset.overlay) | self.patchset.patched_paths()
            affected |= {p for p, entry in files.items() if entry.base not in ("", entry.applied)}
        else:
            affected = None
        kept = {p for p, entry in files.items() if entry.base} - (affected or set())
        wanted = {p: Entry(files[p].base, files[p].applied) for p in kept} if same_base else {}
        contents = {}
        for path, original, data, executable in _contents(
            self.patchset, self.base, affected, result, self.loose
        ):
            wanted[path] = Entry(original, sha256(data))
            contents[path] = (data, executable)
        shadow = [path for path in self.patchset.overlay if files.get(path, Entry("", "")).base]
        if shadow and same_base:
            raise PatchsetError(
                f"`patches/overlay/{shadow[0]}` would replace a file of llama.cpp; rename it, or"
                " change that file with a hook patch"
            )
        return wanted, contents

    def _settle(
        self,
        stale: list[str],
        gone: list[str],
        wanted: dict[str, Entry],
        current: dict[str, str],
        result: Applied,
    ) -> list[str]:
        """Which stale files to write: all that apply wrote, none that somebody edited."""
        if self.force:
            return stale
        write, conflicts, pending = [], [], self.manifest.pending
        for path in stale:
            entry = self.manifest.files.get(path)
            if path not in current or self.manifest.ours(path, current[path]):
                write.append(path)
            elif entry and entry.applied == wanted[path].applied and path not in pending:
                result.kept.append(path)  # our side has not changed, so the edit stands
            else:
                conflicts.append(path)
        conflicts += [path for path in gone if not self.manifest.ours(path, current[path])]
        if conflicts:
            shown = ", ".join(f"`{path}`" for path in conflicts[:5])
            more = f" and {len(conflicts) - 5} more" if len(conflicts) > 5 else ""
            raise PatchsetError(
                f"{shown}{more} in `{self.tree}` was edited there and has also changed in patches/;"
                " run `make patches` first to keep the edits of the tree, or apply with --force to"
                " drop them"
            )
        return write

    def _write_all(
        self,
        stale: list[str],
        gone: list[str],
        done: Manifest,
        contents: dict[str, tuple[bytes, bool]],
        result: Applied,
    ) -> None:
        self.manifest.pending = {path: done.files[path].applied for path in stale}
        self.manifest.key = ""
        self.manifest.write(self.tree)
        for path in gone:
            (self.tree / path).unlink()
            result.removed += 1
            for parent in (self.tree / path).parents:
                if parent == self.tree or any(parent.iterdir()):
                    break
                parent.rmdir()
        for path in stale:
            data, executable = contents[path]
            write_atomically(self.tree / path, data, 0o755 if executable else 0o644)
            result.written += 1
        _stat_all(self.tree, done, set(result.kept))
        done.write(self.tree)
