"""GGUF files by hub id: `org/name[@revision][:file]`, fetched into the cache.

Cache, token, endpoint and sentences about what went wrong are those of the converter. The file may
be left out where the model has only one that fits, or be given by its type (`:Q8_0`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_convert import hub
from dflash_convert.errors import InputError, shorten

from .opening import need_file

FORM = "org/name[@revision][:file]"

DRAFT_PREFIX = "dflash-"
# how llama.cpp names the files that go beside a main model
_SIDECARS = (DRAFT_PREFIX, "mmproj-", "mtp-", "dspark-", "eagle3-")
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf")


def find_file(reference: str, what: str) -> Path:
    """Return the GGUF file that a path or a hub id stands for, fetched if it is not there.

    Args:
        reference: A path, or `org/name[@revision][:file]`.
        what: `target` or `draft`: which file a model without `:file` is asked for.

    Raises:
        InputError: No such file, model, revision or access, or several files to choose from.
        FailureError: The hub does not answer, and the cache lacks the file.
    """
    path = Path(reference)
    model, _, wanted = reference.partition(":")
    parsed = hub.parse_id(model)
    if path.exists() or parsed is None or (not wanted and model.endswith(".gguf")):
        return need_file(path, what)
    return fetch_file(*parsed, wanted or None, what)


def fetch_file(
    model: str,
    revision: str | None,
    wanted: str | None,
    what: str,
    *,
    also: Sequence[str] = (),
    progress: bool = True,
    **where: Any,
) -> Path:
    """Return a GGUF file of a model of the hub; all parts of one that is split are fetched.

    Args:
        model: `org/name`.
        revision: Branch, tag or commit; None for `main`.
        wanted: As `choose`.
        what: `target` or `draft`.
        also: Names or patterns of further files to fetch.
        progress: Show the hub's bars.
        where: `cache_dir` and `local_dir` of `hf_hub_download`.

    Raises:
        InputError, FailureError: As `find_file`.
    """
    # one table of the hub's errors for both programs
    with hub.explained(model, revision):
        from huggingface_hub import hf_hub_download

        names = _names(model, revision, where.get("cache_dir"))
        wanted_names = _parts(choose(names, model, wanted, what))
        for pattern in also:
            more = [n for n in names if fnmatch(n, pattern)]
            if not more:
                raise InputError(f"the hub's `{model}` has no file `{pattern}`")
            wanted_names += more
        with hub.bars(progress):
            files = [hf_hub_download(model, n, revision=revision, **where) for n in wanted_names]
    return Path(files[0])


def _names(model: str, revision: str | None, cache_dir: Any) -> tuple[str, ...]:
    """Return the names of a model's files; of those in the cache when the hub cannot be asked."""
    from httpx import TransportError
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        found = HfApi().model_info(model, revision=revision).siblings or ()
        return tuple(s.rfilename for s in found)
    except (OfflineModeIsEnabled, TransportError):
        folder = Path(
            snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True)
        )
        files = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        return tuple(sorted(files))


def choose(names: tuple[str, ...], model: str, wanted: str | None, what: str) -> str:
    """Return the file of a model that is meant; the first part of one that is split.

    Args:
        names: All files of the model.
        model: Its id, for messages.
        wanted: Name, pattern (`*Q8_0.gguf`) or type of the file; None for the only one that fits.
        what: `target` or `draft`.

    Raises:
        InputError: There is none, or more than one.
    """
    ggufs = [n for n in names if n.endswith(".gguf") and _is_first(n)]
    if not ggufs:
        raise InputError(f"the hub's `{model}` has no GGUF files, expected the {what}")
    if wanted in ggufs:
        return str(wanted)
    drafts = [n for n in ggufs if PurePosixPath(n).name.startswith(DRAFT_PREFIX)]
    mains = [n for n in ggufs if not PurePosixPath(n).name.startswith(_SIDECARS)]
    # a model that holds nothing but the draft may call it anything
    found = mains if what == "target" else drafts or mains
    if wanted is not None and any(c in wanted for c in "*?["):
        found = [n for n in ggufs if fnmatch(n, wanted)]
    elif wanted is not None:
        ending = f"-{wanted}.gguf".lower()
        found = [n for n in found if _SPLIT.sub(".gguf", n).lower().endswith(ending)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(shorten(found or ggufs, 8))
    if not found:
        name = f"no file `{wanted}`" if wanted else f"no file that could be the {what}"
        raise InputError(f"the hub's `{model}` has {name}, but {listed}", hint=_hint(model))
    raise InputError(
        f"the hub's `{model}` has {len(found)} files that could be the {what}: {listed}",
        hint=_hint(model),
    )


def _hint(model: str) -> str:
    return f"name one: {model}:FILE"


def _is_first(name: str) -> bool:
    split = _SPLIT.search(name)
    return split is None or int(split[1]) == 1


def _parts(name: str) -> list[str]:
    split = _SPLIT.search(name)
    if split is None:
        return [name]
    count = int(split[2])
    return [_SPLIT.sub(f"-{i:05}-of-{count:05}.gguf", name) for i in range(1, count + 1)]
