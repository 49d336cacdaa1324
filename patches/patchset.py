#!/usr/bin/env python3
"""The patch set's tool: fetch the base, make the patched tree, write patches from an edited one.

Standard library only (Python >= 3.10): make and CMake call it before anything is installed.
`python patches/patchset.py COMMAND --help` explains each command; README.md here explains the set.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from patchlib import exit_code
from patchlib.base import SdistBase, SourceBase, fetch, read_base_toml
from patchlib.check import check
from patchlib.export import export
from patchlib.series import PatchSet
from patchlib.tree import Applied, Base, Manifest, apply

HERE = Path(__file__).resolve().parent


def main(arguments: list[str] | None = None) -> int:
    """Runs one command. Returns 0 done, 1 failed, 2 bad usage or input, 130 interrupted."""
    options = _parser().parse_args(arguments)
    return exit_code(lambda: options.run(options), "; the next run continues from a clean state")


def _stop(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)  # unwinds, so that temporary folders are removed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="patchset.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--patches", type=Path, default=HERE, help="patch set (default: this one)")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: object, text: str, tree: str = "", source: bool = True):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run, source=None)
        if tree:
            command.add_argument("tree", type=Path, metavar="TREE", help=tree)
        if source:
            command.add_argument(
                "--source", type=Path, help="a llama.cpp checkout instead of the pinned base"
                " (default: $LLAMA_CPP_SOURCE)"
            )  # fmt: skip
        return command

    command = add("fetch", _fetch, "download the base into the cache and check it", source=False)
    command.add_argument("--archive", type=Path, help="take this file instead of downloading")
    for name, run, text in (
        ("unpack", _unpack, "make or refresh an unpatched tree"),
        ("apply", _apply, "make or refresh a patched tree: base + overlay + patches"),
    ):
        command = add(name, run, text, tree="folder of the tree")
        command.add_argument("--force", action="store_true", help="drop edits made in the tree")
    command.add_argument(
        "--loose", action="store_true", help="for a move to another base: accept shifted lines,"
        " leave out and list hunks that no longer match"
    )  # fmt: skip
    command = add("export", _export, "rewrite patches and overlay from an edited tree", "the tree")
    command.add_argument(
        "--patch",
        action="append",
        metavar="NAME[=FILE,FILE]",
        help="patch for the named (else all) upstream files that no patch has yet; repeatable",
    )
    command = add("check", _check, "prove that the set applies cleanly to the pristine base")
    command.add_argument("--tree", type=Path, help="also prove that the set reproduces this tree")
    add("stamp", _stamp, "print the key of the patched tree")
    return parser


def _base(options: argparse.Namespace, recorded: str = "") -> Base:
    source = options.source or os.environ.get("LLAMA_CPP_SOURCE") or recorded
    if source:
        return SourceBase(Path(source))
    return SdistBase(read_base_toml(options.patches / "base.toml"))


def _fetch(options: argparse.Namespace) -> int:
    print(fetch(read_base_toml(options.patches / "base.toml"), options.archive))
    return 0


def _unpack(options: argparse.Namespace) -> int:
    bare = PatchSet(options.patches, read_base_toml(options.patches / "base.toml"), [], {})
    return _report(options, apply(bare, _base(options), options.tree, options.force))


def _apply(options: argparse.Namespace) -> int:
    patchset = PatchSet.load(options.patches)
    result = apply(patchset, _base(options), options.tree, options.force, options.loose)
    return _report(options, result)


def _report(options: argparse.Namespace, result: Applied) -> int:
    if result.written or result.removed:
        print(f"{options.tree}: {result.written} files written, {result.removed} removed")
    if result.kept:
        print(
            f"note: {options.tree} keeps your edits of {', '.join(result.kept[:5])}"
            f"{' ...' if len(result.kept) > 5 else ''}; `make patches` writes them to patches/",
            file=sys.stderr,
        )
    for line in result.skipped:
        print(f"left out: {line}", file=sys.stderr)
    return 1 if result.skipped else 0


def _export(options: argparse.Namespace) -> int:
    manifest = Manifest.read(options.tree)
    base = _base(options, manifest.source if manifest else "")
    result = export(PatchSet.load(options.patches), base, options.tree, options.patch)
    print("\n".join(result.lines) or "patches/ is up to date")
    if isinstance(base, SourceBase):
        print("note: patches were written against LLAMA_CPP_SOURCE, not the base of base.toml",
              file=sys.stderr)  # fmt: skip
    return 0


def _check(options: argparse.Namespace) -> int:
    patchset = PatchSet.load(options.patches)
    manifest = Manifest.read(options.tree) if options.tree else None
    base = _base(options, manifest.source if manifest else "")
    problems = check(patchset, base, options.tree)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems:
        files = len(patchset.patched_paths())
        print(f"{len(patchset.patches)} patches of {files} upstream files and"
              f" {len(patchset.overlay)} overlay files are in order")  # fmt: skip
    return 1 if problems else 0


def _stamp(options: argparse.Namespace) -> int:
    print(PatchSet.load(options.patches).key(_base(options).identity))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
