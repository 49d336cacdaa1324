"""Checkpoints and targets by hub id: `org/name` or `org/name@revision`, fetched into the cache.

Cache, token and endpoint are those of huggingface_hub (HF_HOME, HF_TOKEN, HF_ENDPOINT); its bars
show the progress. Only what a conversion reads is fetched: of a target that is no weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .checkpoint import MASK_FILES
from .errors import FailureError, InputError, shorten

_ID = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?", re.ASCII)
_INDEX = ".safetensors.index.json"
_DRAFT = ("config.json", "README.md", "generation_config.json")
_TARGET = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
)
_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class HubModel:
    """A model of the hub, as far as it was fetched.

    Attributes:
        id: `org/name`.
        commit: Hash of the commit that the revision stands for.
        path: Directory with the fetched files.
        files: Names of all files of the commit, fetched or not.
    """

    id: str
    commit: str
    path: Path
    files: tuple[str, ...]

    @property
    def name(self) -> str:
        """The id without the organisation."""
        return self.id.partition("/")[2]


def parse_id(reference: Path | str) -> tuple[str, str | None] | None:
    """Split a hub id into `org/name` and revision.

    Returns:
        None for what is, or was meant to be, a path: anything that exists, or lies in a directory
        that exists.
    """
    text = str(reference)
    match = _ID.fullmatch(text)
    if match is None or Path(text).exists() or Path(match[1]).is_dir():
        return None
    return f"{match[1]}/{match[2]}", match[3]


def fetch_draft(
    reference: Path | str, check: Callable[[Path], object], *, progress: bool = True
) -> HubModel | None:
    """Fetch a draft's config, model card and safetensors files; None if `reference` is a path.

    Args:
        check: Told the directory once the small files are there; an error spares the large ones.

    Raises:
        InputError: No such model or revision, no access, no safetensors.
        FailureError: The hub does not answer and the cache lacks files.
    """

    def wanted(names: tuple[str, ...], get: Callable[[str], Path]) -> None:
        folder = get("config.json").parent
        for name in (*_DRAFT, *MASK_FILES):
            if name in names:
                get(name)
        check(folder)
        with bars(progress):
            _draft_weights(names, get)

    return _fetch(reference, wanted)


def fetch_target(reference: Path | str) -> HubModel | None:
    """Fetch a target's config and tokenizer; None if `reference` is a path.

    Raises:
        InputError, FailureError: As `fetch_draft`.
    """
    return _fetch(reference, _target_files)


def fetch_shards(model: HubModel, tensors: tuple[str, ...], *, progress: bool = True) -> None:
    """Fetch the safetensors files of a model that hold the given tensors, by its index.

    Raises:
        InputError, FailureError: As `fetch_draft`.
    """

    def wanted(names: tuple[str, ...], get: Callable[[str], Path]) -> None:
        indexes = [n for n in names if n.endswith(_INDEX)]
        table = _weight_map(get(indexes[0])) if indexes else {}
        shards = {table[t] for t in tensors if t in table} or _weights(names)
        with bars(progress):
            for name in sorted(shards):
                get(name)

    _fetch(f"{model.id}@{model.commit}", wanted)


def _fetch(
    reference: Path | str,
    choose: Callable[[tuple[str, ...], Callable[[str], Path]], None],
) -> HubModel | None:
    parsed = parse_id(reference)
    if parsed is None:
        return None
    model, revision = parsed
    # A bar for each of a dozen small files says nothing.
    with explained(model, revision), bars(False):
        names = _list(model, revision)
        if "config.json" not in names:
            _explain_missing(model, names)
        from huggingface_hub import hf_hub_download

        # By the revision as given, so that the cache remembers its commit; the rest by that commit.
        folder = Path(hf_hub_download(model, "config.json", revision=revision)).parent
        commit = folder.name

        def get(name: str) -> Path:
            return Path(hf_hub_download(model, name, revision=commit))

        choose(names, get)
    return HubModel(model, commit, folder, names)


def _list(model: str, revision: str | None) -> tuple[str, ...]:
    """Return the names of the model's files; of those in the cache when the hub cannot be asked."""
    from httpx import TransportError
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        info = HfApi().model_info(model, revision=revision)
    except (OfflineModeIsEnabled, TransportError):
        config = try_to_load_from_cache(model, "config.json", revision=revision)
        if not isinstance(config, str):
            raise
        folder = Path(config).parent
        names = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        return tuple(sorted(names))
    return tuple(s.rfilename for s in info.siblings or ())


def _draft_weights(names: tuple[str, ...], get: Callable[[str], Path]) -> None:
    indexes = [n for n in names if n.endswith(_INDEX) and "/" not in n]
    weights: set[str] = set()
    for index in indexes:
        weights |= set(_weight_map(get(index)).values())
    # Files that an index names and the model lacks are reported when the checkpoint is opened.
    weights = weights & set(names) if indexes else _weights(names)
    if not weights:
        others = [n for n in names if n.endswith((".bin", ".pt", ".gguf"))]
        raise InputError(
            "the model has no safetensors files"
            + (f", only {', '.join(shorten(others, 3))}" if others else "")
        )
    for name in sorted(weights):
        get(name)


def _target_files(names: tuple[str, ...], get: Callable[[str], Path]) -> None:
    for name in names:
        path = PurePosixPath(name)
        if name in _TARGET or (path.parent.name == _TEMPLATES and path.suffix == ".jinja"):
            get(name)


def _weights(names: tuple[str, ...]) -> set[str]:
    return {n for n in names if n.endswith(".safetensors") and "/" not in n and n not in MASK_FILES}


def _weight_map(index: Path) -> dict[str, str]:
    """The index's map from tensors to files; a damaged index is reported on opening."""
    try:
        table = json.loads(index.read_bytes()).get("weight_map")
        return {k: v for k, v in table.items() if isinstance(v, str)}
    except (ValueError, AttributeError, RecursionError):
        return {}


def _explain_missing(model: str, names: tuple[str, ...]) -> None:
    ggufs = [n for n in names if n.endswith(".gguf")]
    if ggufs:
        raise InputError(
            f"the hub's `{model}` holds GGUF files, no checkpoint",
            hint=f"`hf download {model} {ggufs[0]}`, then give that file's path",
        )
    raise InputError(f"the hub's `{model}` has no config.json, expected a checkpoint")


@contextmanager
def bars(shown: bool) -> Iterator[None]:
    """Switch the library's bars on or off for the time being, unless the user has decided."""
    from huggingface_hub import constants, utils

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:
        yield
        return
    switches = (utils.enable_progress_bars, utils.disable_progress_bars)
    before = utils.are_progress_bars_disabled()
    switches[not shown]()
    try:
        yield
    finally:
        switches[before]()


@contextmanager
def explained(model: str, revision: str | None) -> Iterator[None]:
    """Turn the library's exceptions into one sentence each."""
    from httpx import TransportError
    from huggingface_hub import constants, errors

    token = "set HF_TOKEN or run `hf auth login`"
    try:
        yield
    except errors.GatedRepoError:
        raise InputError(
            f"the hub's `{model}` is gated, and this token has no access",
            hint=f"ask for access on the model's page, then {token}",
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(f"the hub's `{model}` has no revision `{revision}`") from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"no directory `{model}`, and no such model on the hub",
            hint=f"check the spelling; if the model is private, {token}",
        ) from None
    except errors.HFValidationError:
        raise InputError(f"`{model}` is neither a directory nor a hub id") from None
    except errors.OfflineModeIsEnabled:
        raise FailureError(
            f"`{model}` is not complete in the cache, and HF_HUB_OFFLINE forbids asking the hub",
            hint="unset HF_HUB_OFFLINE, or give a directory",
        ) from None
    except (TransportError, errors.LocalEntryNotFoundError):
        raise FailureError(
            f"the hub ({constants.ENDPOINT}) does not answer, and `{model}` is not complete in the "
            "cache",
            hint="check the connection and try again, or give a directory",
        ) from None
    except errors.HfHubHTTPError as exc:
        raise FailureError(f"the hub refused `{model}`: {_status(exc)}") from None
    except (errors.EntryNotFoundError, errors.FileMetadataError, errors.XetDownloadError) as exc:
        raise FailureError(f"fetching `{model}` failed: {_line(exc)}") from None


def _status(exc: Any) -> str:
    response = getattr(exc, "response", None)
    code = getattr(response, "status_code", None)
    reason = getattr(response, "reason_phrase", "")
    if code in (401, 403):
        return f"{code} {reason}, check HF_TOKEN"
    return f"{code} {reason}, try again later" if code else _line(exc)


def _line(exc: BaseException) -> str:
    return next((line.strip() for line in str(exc).splitlines() if line.strip()), "unknown error")
