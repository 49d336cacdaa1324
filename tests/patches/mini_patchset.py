"""A small stand-in for the base and the patch set: every behaviour is tested in a moment."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import patchset

TOP = "mini_base-1.0"
BASE_FILES = {
    "CMakeLists.txt": b"add_subdirectory(ggml)\nadd_subdirectory(src)\n",
    "ggml/CMakeLists.txt": b"project(ggml)\n",
    "src/a.cpp": b"int a() {\n    return 1;\n}\n\nint b() {\n    return 2;\n}\n",
    "src/b.cpp": b"".join(b"line %d\n" % i for i in range(40)),
    "src/no-newline.txt": b"first\nlast",
    "tools/run.sh": b"#!/bin/sh\n",
}
# An archive must describe itself to pip; this backend does so with the standard library alone.
PYPROJECT = b'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
BACKEND = b"""
import os
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "mini_base-1.0.dist-info"
    os.makedirs(os.path.join(folder, name))
    with open(os.path.join(folder, name, "METADATA"), "w") as f:
        f.write("Metadata-Version: 2.1\\nName: mini-base\\nVersion: 1.0\\n")
    return name
"""
HEADER = "Description: test\nHooks: ours()\nDrop-when: never\nForwarded: no\n\n"


def make_archive(path: Path, files: dict[str, bytes], extra: list[tarfile.TarInfo] = ()) -> Path:
    """A source distribution with `files` below vendor/base, and any further raw members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        members = {"pyproject.toml": PYPROJECT, "backend.py": BACKEND, "PKG-INFO": b"Name: x\n"}
        members |= {f"vendor/base/{name}": data for name, data in files.items()}
        for name, data in members.items():
            info = tarfile.TarInfo(f"{TOP}/{name}")
            info.size, info.mode = len(data), 0o755 if name.endswith(".sh") else 0o644
            archive.addfile(info, io.BytesIO(data))
        for info in extra:
            archive.addfile(info, io.BytesIO(b"x" * info.size))
    return path


class Mini:
    """A patch set, its base in the cache, and a place for trees."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache / "dflash-toolkit"
        self.patches, self.tree = folder / "patches", folder / "build" / "tree"
        self.patches.mkdir(parents=True)
        (self.patches / "overlay").mkdir()
        (self.patches / "series").write_text("# order\n")
        self.archive = self.cache / "mini_base-1.0.tar.gz"
        self.set_base(BASE_FILES)

    def set_base(self, files: dict[str, bytes], extra: list[tarfile.TarInfo] = ()) -> None:
        make_archive(self.archive, files, extra)
        self.pin(hashlib.sha256(self.archive.read_bytes()).hexdigest())

    def pin(self, digest: str) -> None:
        (self.patches / "base.toml").write_text(
            f'[base]\npackage = "mini-base"\nversion = "1.0"\nfile = "mini_base-1.0.tar.gz"\n'
            f'sha256 = "{digest}"\nsubdir = "vendor/base"\ncommit = "abc"\n'
        )

    def overlay(self, name: str, text: str) -> None:
        path = self.patches / "overlay" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def patch(self, name: str, body: str, header: str = HEADER) -> None:
        (self.patches / name).write_text(header + body)
        names = sorted(path.name for path in self.patches.glob("*.patch"))
        (self.patches / "series").write_text("".join(f"{line}\n" for line in ["# order", *names]))

    def run(self, *arguments: object) -> int:
        return patchset.main(["--patches", str(self.patches), *map(str, arguments)])

    def spawn(self, *arguments: object, code: str = "", **options: object) -> subprocess.Popen:
        """The program as a process; `code` runs in its place and gets its path as argv[1]."""
        start = ["-c", code, patchset.__file__] if code else [patchset.__file__]
        command = [sys.executable, *start, "--patches", str(self.patches)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([*command, *map(str, arguments)], **(pipes | options))

    def apply(self, *options: str) -> int:
        return self.run("apply", self.tree, *options)

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.tree / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def content(self) -> dict[str, bytes]:
        return {
            path.relative_to(self.tree).as_posix(): path.read_bytes()
            for path in self.tree.rglob("*")
            if path.is_file() and not path.name.startswith(".dflash-manifest")
        }

    def leftovers(self) -> list[str]:
        """Names beside the tree that a finished or failed run must not leave."""
        return [p.name for p in self.tree.parent.glob(".*") if not p.name.endswith(".lock")]


HOOK = (
    "--- a/src/a.cpp\n+++ b/src/a.cpp\n@@ -1,2 +1,3 @@\n int a() {\n+    ours();\n     return 1;\n"
)
