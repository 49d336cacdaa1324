"""Files of the pinned source distribution, unpacked to be run from there and not copied here."""

from __future__ import annotations

import tarfile
from pathlib import Path

from patchlib.base import fetch, read_base_toml


def unpack(root: Path, folder: Path, wanted: tuple[str, ...]) -> None:
    """Write to `folder` what lies below the names `wanted` in the distribution that is built.

    root: of the checkout. wanted: files or folders (ending in /), relative to the archive's own.
    """
    info = read_base_toml(root / "patches" / "base.toml")
    top = info.file.removesuffix(".tar.gz")
    with tarfile.open(fetch(info)) as archive:
        for member in archive:
            name = member.name.removeprefix(f"{top}/")
            if member.isfile() and name.startswith(wanted):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                stream = archive.extractfile(member)
                assert stream is not None
                target.write_bytes(stream.read())
