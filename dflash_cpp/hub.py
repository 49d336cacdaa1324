"""GGUF files by hub id: `org/name[@revision][:file]`, fetched into the cache.

Cache, token, endpoint and sentences about what went wrong are those of the converter. The file may
be left out where the model has only one that fits, or be given by its type (`:Q8_0`).
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

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


def fetch_file(model: str, revision: str | None, wanted: str | None, what: str) -> Path:
    """Return a GGUF file of a model of the hub; see `find_file`."""
    # one table of the hub's errors for both programs
    with hub._explained(model, revision):
        from huggingface_hub import hf_hub_download

        name = choose(hub._list(model, revision), model, wanted, what)
        with hub._bars(True):
            files = [hf_hub_download(model, part, revision=revision) for part in _parts(name)]
    return Path(files[0])


def choose(names: tuple[str, ...], model: str, wanted: str | None, what: str) -> str:
    """Return the file of a model that is meant; the first part of one that is split.

    Args:
        names: All files of the model.
        model: Its id, for messages.
        wanted: Name or type of the file; None for the only one that fits.
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
    if wanted is not None:
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
