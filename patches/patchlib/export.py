"""From an edited tree back to the patch set."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from . import PatchsetError, udiff
from .base import write_atomically
from .series import NAME, Patch, PatchSet, new_header
from .tree import LOOSE, Base, Manifest, current_hashes, sha256

TABLE_BEGIN, TABLE_END = "<!-- hooks: written by `make patches` -->", "<!-- end of hooks -->"


@dataclass
class Exported:
    """What export changed, as lines to print."""

    lines: list[str] = field(default_factory=list)


def export(
    patchset: PatchSet, base: Base, tree: Path, new_patches: list[str] | None = None
) -> Exported:
    """Rewrites hook patches and overlay from an edited tree; writes only what differs.

    Args:
        new_patches: for upstream files that no patch has yet: `NAME=PATH,PATH`, or `NAME` for all
            the others; NAME is a patch that exists or shall.

    Raises:
        PatchsetError: an upstream file was deleted, a changed one belongs to no patch, or patches/
            changed since the tree was made.
    """
    if not tree.is_dir():
        raise PatchsetError(f"no patched tree at `{tree}`; build first", code=2)
    manifest = Manifest.read(tree)
    if manifest is None:
        raise PatchsetError(f"`{tree}` was not made by this tool; make one with apply", code=2)
    if manifest.base != base.identity:
        raise PatchsetError(
            f"`{tree}` was made from another base ({manifest.base[:20]}, now {base.identity[:20]});"
            " build again, or set LLAMA_CPP_SOURCE as it was"
        )
    if not manifest.key:
        raise PatchsetError(
            f"the last apply to `{tree}` was interrupted; run it again, then export"
        )
    current = current_hashes(tree, manifest)
    upstream = {path: entry.base for path, entry in manifest.files.items() if entry.base}
    deleted = sorted(set(upstream) - set(current))
    if deleted:
        raise PatchsetError(
            f"`{deleted[0]}` of llama.cpp is missing in `{tree}`; hooks cannot delete files,"
            " restore it with apply"
        )
    changed = {path for path, original in upstream.items() if current[path] != original}
    result = Exported()
    patches = _regenerated(patchset, base, tree, manifest, current, changed, new_patches, result)
    overlay = _overlay_changes(patchset, tree, manifest, current, upstream)
    _write_patches(patchset, patches, result)
    for path, action in overlay.items():
        target = patchset.root / "overlay" / path
        if action == "removed":
            target.unlink()
        else:
            executable = os.access(tree / path, os.X_OK)
            write_atomically(target, (tree / path).read_bytes(), 0o755 if executable else 0o644)
        result.lines.append(f"{action}: overlay/{path}")
    table = write_table(PatchSet.load(patchset.root))
    return Exported(result.lines + ([table] if table else []))


def _regenerated(
    patchset: PatchSet,
    base: Base,
    tree: Path,
    manifest: Manifest,
    current: dict[str, str],
    changed: set[str],
    new_patches: list[str] | None,
    result: Exported,
) -> list[Patch]:
    """The new series in order; a patch whose files are all as in the base is left out."""
    patches = [Patch(p.name, p.data, p.header, dict(p.files)) for p in patchset.patches]
    homeless = sorted(path for path in changed if patchset.owner(path) is None)
    if homeless:
        patches = _with_new(patches, homeless, new_patches or [])
    owners = {path: patch for patch in patches for path in patch.files}
    pristine = {path: data for path, data, _ in base.files(set(owners)) if path in owners}
    for path, owner in sorted(owners.items()):
        if path not in pristine:
            raise PatchsetError(f"{owner.name}: the base has no file `{path}`")
        if manifest.key != LOOSE and not _up_to_date(
            patchset, manifest, path, pristine[path], current[path]
        ):
            raise PatchsetError(
                f"`{path}` ({owner.name}) has changed in patches/ since the tree was made; build or"
                " apply first, then export"
            )
        old = udiff.split_lines(pristine[path])
        new = udiff.split_lines((tree / path).read_bytes())
        owner.files[path] = udiff.make_hunks(old, new)
        if not owner.files[path]:
            del owner.files[path]
    for patch in patches:
        parts = [udiff.render(path, hunks) for path, hunks in sorted(patch.files.items())]
        patch.data = patch.header + b"".join(parts)
    result.lines += [f"removed: {p.name} (nothing left in it)" for p in patches if not p.files]
    return [patch for patch in patches if patch.files]


def _up_to_date(
    patchset: PatchSet, manifest: Manifest, path: str, pristine: bytes, current: str
) -> bool:
    """Whether the tree started from the patch as it is now (or already holds its result)."""
    if patchset.owner(path) is None:
        return True
    wanted = sha256(patchset.patched(path, pristine))
    entry = manifest.files.get(path)
    return current == wanted or (entry is not None and entry.applied == wanted)


def _with_new(patches: list[Patch], homeless: list[str], choices: list[str]) -> list[Patch]:
    """Gives each homeless file to the patch the caller named for it."""
    left = set(homeless)
    for choice in choices:
        name, _, paths = choice.partition("=")
        if not NAME.fullmatch(name):
            raise PatchsetError(f"`{name}` is not of the form NNNN-what.patch", code=2)
        chosen = set(paths.split(",")) if paths else set(left)
        if chosen - left:
            raise PatchsetError(
                f"`{min(chosen - left)}` is not a changed file of llama.cpp without a patch;"
                f" those are: {', '.join(sorted(left)) or 'none'}",
                code=2,
            )
        left -= chosen
        target = next((patch for patch in patches if patch.name == name), None)
        if target is None and chosen:
            target = Patch(name, b"", new_header())
            patches = sorted([*patches, target], key=lambda patch: patch.name)
        if target is not None:
            target.files.update({path: [] for path in chosen})
    if left:
        shown = ", ".join(f"`{path}`" for path in sorted(left)[:5])
        raise PatchsetError(
            f"{shown} changed, but no patch has {'it' if len(left) == 1 else 'them'}; name one that"
            " exists or shall: `make patches PATCH=NNNN-what.patch`, or for some files only"
            " PATCH=NNNN-what.patch=FILE,FILE",
            code=2,
        )
    return patches


def _overlay_changes(
    patchset: PatchSet,
    tree: Path,
    manifest: Manifest,
    current: dict[str, str],
    upstream: dict[str, str],
) -> dict[str, str]:
    """Three-way comparison: {path: "changed" | "added" | "removed"} to carry into the overlay."""
    actions: dict[str, str] = {}
    for path in sorted((set(current) | set(patchset.overlay)) - set(upstream)):
        source, entry = patchset.overlay.get(path), manifest.files.get(path)
        mine = sha256(source.read_bytes()) if source else ""
        made, now = entry.applied if entry else "", current.get(path, "")
        if now in (mine, made):
            continue  # same, or only patches/ changed, which the next build takes over
        if mine != made:
            raise PatchsetError(
                f"`{path}` was edited in the tree and in patches/overlay since the last build;"
                " make them equal (or remove one), then export"
            )
        actions[path] = "removed" if not now else "changed" if source else "added"
    return actions


def _write_patches(patchset: PatchSet, patches: list[Patch], result: Exported) -> None:
    root = patchset.root
    before = {patch.name: patch.data for patch in patchset.patches}
    for patch in patches:
        if before.get(patch.name) != patch.data:
            write_atomically(root / patch.name, patch.data)
            action = "changed" if patch.name in before else "added"
            result.lines.append(f"{action}: {patch.name}")
    names = [patch.name for patch in patches]
    if names != [patch.name for patch in patchset.patches]:
        path = root / "series"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        comments = [line for line in lines if line.startswith("#")]
        write_atomically(path, "".join(f"{line}\n" for line in comments + names).encode())
    for name in set(before) - set(names):
        (root / name).unlink()


def hook_table(patchset: PatchSet) -> str:
    """The README's table, made from the patches and their headers."""
    rows = ["| upstream file | patch | lines + / - | calls | relies on |", "|---|---|---|---|---|"]
    for patch in patchset.patches:
        fields = patch.fields()
        for path in patch.files:
            added, removed = patch.counts(path)
            cells = [f"`{path}`", patch.name.removesuffix(".patch"), f"{added} / {removed}"]
            cells += [fields.get("Hooks", ""), fields.get("Relies-on", "")]
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def write_table(patchset: PatchSet, check_only: bool = False) -> str:
    """Brings README.md's table up to date; returns a line when it was not, else an empty text."""
    path = patchset.root / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    pattern = re.compile(re.escape(TABLE_BEGIN) + r"\n.*?" + re.escape(TABLE_END), re.DOTALL)
    if not pattern.search(text):
        return ""
    block = f"{TABLE_BEGIN}\n\n{hook_table(patchset)}\n\n{TABLE_END}"
    new = pattern.sub(lambda _: block, text)
    if new == text:
        return ""
    if not check_only:
        write_atomically(path, new.encode())
    return "changed: README.md (table of hooks)"
