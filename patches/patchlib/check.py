"""Checks that the patch set is in order, and that a tree is what it makes."""

from __future__ import annotations

from pathlib import Path

from . import PatchsetError, udiff
from .export import write_table
from .series import HEADER_FIELDS, PLACEHOLDER, PatchSet
from .tree import Base, sha256, tree_files


def check(patchset: PatchSet, base: Base, tree: Path | None = None) -> list[str]:
    """All problems of the patch set, and of `tree` against it; empty when all is well."""
    problems = _check_names(patchset) + _check_headers(patchset)
    if write_table(patchset, check_only=True):
        problems.append("patches/README.md: its table of hooks is stale; run `make patches`")
    touched = patchset.patched_paths()
    wanted: dict[str, str] = {}
    for path, data, _ in base.files(None if tree or patchset.overlay else touched):
        if path in patchset.overlay:
            problems.append(f"patches/overlay/{path} would replace a file of llama.cpp")
        wanted[path] = sha256(data)
        patch = patchset.owner(path)
        if patch is None:
            continue
        try:
            new = patchset.patched(path, data)
        except PatchsetError as error:
            problems.append(str(error))
            continue
        wanted[path] = sha256(new)
        hunks = udiff.make_hunks(udiff.split_lines(data), udiff.split_lines(new))
        if udiff.render(path, hunks) not in patch.data:
            problems.append(
                f"{patch.name}: `{path}` is not as export writes it; run `make patches`"
            )
    problems += [f"{patchset.owner_name(path)}: the base has no file `{path}`"
                 for path in sorted(touched - set(wanted))]  # fmt: skip
    if tree is not None:
        wanted |= {path: sha256(source.read_bytes()) for path, source in patchset.overlay.items()}
        problems += _check_tree(tree, wanted)
    return problems


def _check_names(patchset: PatchSet) -> list[str]:
    listed = [patch.name for patch in patchset.patches]
    folder = sorted(path.name for path in patchset.root.glob("*.patch"))
    problems = [f"patches/{name} is not in patches/series" for name in folder if name not in listed]
    if listed != sorted(listed):
        problems.append("patches/series is not in the order of the numbers")
    numbers = [name[:4] for name in listed]
    return problems + [f"patches/series has number {n} twice"
                       for n in sorted({n for n in numbers if numbers.count(n) > 1})]  # fmt: skip


def _check_headers(patchset: PatchSet) -> list[str]:
    problems = []
    for patch in patchset.patches:
        fields = patch.fields()
        unset = ("", PLACEHOLDER)
        empty = [name for name in HEADER_FIELDS if fields.get(name, "") in unset]
        if empty:
            problems.append(f"{patch.name}: header lacks {', '.join(empty)}")
        parts = [udiff.render(path, hunks) for path, hunks in sorted(patch.files.items())]
        if patch.header + b"".join(parts) != patch.data:
            problems.append(f"{patch.name}: not in the form export writes; run `make patches`")
    return problems


def _check_tree(tree: Path, wanted: dict[str, str]) -> list[str]:
    if not tree.is_dir():
        return [f"no tree at `{tree}`"]
    found = {path: sha256((tree / path).read_bytes()) for path in tree_files(tree, wanted)}
    problems = [f"`{p}` is missing in the tree" for p in sorted(set(wanted) - set(found))]
    problems += [f"`{p}` is in the tree only" for p in sorted(set(found) - set(wanted))]
    return problems + [
        f"`{p}` differs between the tree and base + overlay + patches"
        for p in sorted(set(found) & set(wanted))
        if found[p] != wanted[p]
    ]
