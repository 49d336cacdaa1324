"""The name of the output file and the `general.*` keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .errors import InputError
from .hub import HubModel
from .plan import PlannedKey
from .target import Target
from .tensor_types import FileType

# llama.cpp finds a draft beside its target, and never mistakes one for a target, by this prefix.
PREFIX = "dflash-"

_TYPES = {"UINT32": "u32", "INT32": "i32", "FLOAT32": "f32", "BOOL": "bool", "STRING": "str"}
_PYTHON: dict[str, type] = {"u32": int, "i32": int, "f32": float, "bool": bool, "str": str}

SOURCE_KEY = "dflash_convert.source_sha256"
REVISION_KEY = "dflash_convert.source_revision"


class Names:
    """Names of a draft, from its directory, its model card and its target.

    The rules are those of the gguf package, which the base's converter uses too, but fed with the
    target's number of weights: a draft is named after its target, and the rules distrust a `27B`
    in the name of a model with 1.9 billion.

    Args:
        draft_vocab: Number of tokens that a list leaves to the draft; None for all.

    Attributes:
        metadata: `gguf.Metadata`.
        warnings: Sentences worth showing.
    """

    def __init__(
        self,
        checkpoint: Path,
        target: Target,
        repo: HubModel | None = None,
        draft_vocab: int | None = None,
    ):
        from gguf import Metadata, size_label

        self._repo = repo

        self.warnings: list[str] = []
        directory = checkpoint.resolve()
        try:
            self.metadata = Metadata.load(None, directory, None, target.parameters)
        except Exception as exc:  # whatever YAML or text a model card holds: it is only a card
            self.warnings.append(f"the model card or generation config is unusable ({exc})")
            self.metadata = Metadata.apply_metadata_heuristic(
                Metadata(), None, None, directory, target.parameters
            )
        if repo is not None:
            self._name_after(repo, directory, target.parameters)
        if not isinstance(self.metadata.name, str) or not self.metadata.name:
            self.metadata.name = directory.name or "draft"
        if self.metadata.size_label is None and target.parameters:
            self.metadata.size_label = size_label(target.parameters, target.parameters, 0, 0)
        if not self.metadata.base_models:
            self.metadata.base_models = [_base_model(target)]
        if draft_vocab is not None:
            # Beside the file with the whole vocabulary this is another variant of the same draft.
            finetune = (self.metadata.finetune, f"vocab{draft_vocab}")
            self.metadata.finetune = "-".join(str(part) for part in finetune if part)

    def _name_after(self, repo: HubModel, directory: Path, parameters: int) -> None:
        """Redo the guesses: the directory in the cache is called after a commit."""
        from dataclasses import fields

        from gguf import Metadata
        from huggingface_hub import constants

        try:
            card = Metadata.load_model_card(directory)
        except Exception:  # reported above
            card = {}
        guessed = Metadata.apply_metadata_heuristic(
            Metadata(), card, None, Path(repo.name), parameters
        )
        for entry in fields(Metadata):
            if not entry.name.startswith("sampling_"):
                setattr(self.metadata, entry.name, getattr(guessed, entry.name))
        if self.metadata.organization is None:
            self.metadata.organization = repo.id.partition("/")[0]
        if self.metadata.repo_url is None:
            self.metadata.repo_url = f"{constants.ENDPOINT}/{repo.id}"

    def file_name(self, out: FileType) -> str:
        """Return `dflash-<base>-<size>[-<finetune>][-<version>]-<ENCODING>.gguf`."""
        from gguf import naming_convention

        m = self.metadata

        def text(value: Any) -> str | None:
            return None if value is None else str(value)

        stem = naming_convention(
            text(m.name),
            text(m.basename),
            text(m.finetune),
            text(m.version),
            text(m.size_label),
            out.name,
        )
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.")
        if stem.lower().startswith(PREFIX):
            stem = stem[len(PREFIX) :]
        return f"{PREFIX}{stem}.gguf"

    def keys(self, digest: str) -> list[PlannedKey]:
        """Return the `general.*` keys and where the file came from.

        Args:
            digest: SHA-256 over the checkpoint's tensors.
        """
        from gguf import GGML_QUANT_VERSION, GGUFWriter

        from . import __version__

        recorder = GGUFWriter(None, "")
        self.metadata.set_gguf_meta_model(recorder)
        keys = [PlannedKey("general.type", "str", "model")]
        for name, entry in recorder.kv_data[0].items():
            key = _planned(name, entry)
            if key is not None:
                keys.append(key)
            elif name != "general.architecture":
                self.warnings.append(f"the model card's value for `{name}` is unusable")
        keys.append(PlannedKey("general.quantization_version", "u32", GGML_QUANT_VERSION))
        keys.append(PlannedKey("dflash_convert.version", "str", __version__))
        keys.append(PlannedKey(SOURCE_KEY, "str", digest))
        if self._repo is not None:
            revision = f"{self._repo.id}@{self._repo.commit}"
            keys.append(PlannedKey(REVISION_KEY, "str", revision))
        return keys


def _planned(name: str, entry: Any) -> PlannedKey | None:
    if name == "general.architecture":
        return None
    if entry.type.name == "ARRAY":
        values = list(entry.value) if isinstance(entry.value, (list, tuple)) else []
        usable = values and all(isinstance(v, str) for v in values)
        return PlannedKey(name, "str[]", values) if usable else None
    kind = _TYPES.get(entry.type.name)
    if kind is None:
        return None
    value: Any = float(entry.value) if kind == "f32" and type(entry.value) is int else entry.value
    fits = isinstance(value, _PYTHON[kind]) and (kind == "bool" or not isinstance(value, bool))
    if not fits or (kind == "u32" and not 0 <= value < 2**32):
        return None
    return PlannedKey(name, kind, value)


def _base_model(target: Target) -> dict[str, str]:
    """Describe the target as the draft's base model, from its own metadata."""
    wanted = {
        "name": "general.name",
        "organization": "general.organization",
        "version": "general.version",
        "repo_url": "general.repo_url",
    }
    found = {k: target.file.get(key) for k, key in wanted.items()}
    entry = {k: v for k, v in found.items() if isinstance(v, str) and v}
    return entry or {"name": target.path.stem}


def output_path(outfile: Path | None, names: Names, out: FileType) -> Path:
    """Decide where the file goes.

    Args:
        outfile: What the user gave: nothing, a directory, or a name that may contain `{ftype}`.

    Raises:
        InputError: The name has other braces.
    """
    from gguf import fill_templated_filename

    if outfile is None:
        return Path(names.file_name(out))
    if outfile.is_dir():
        return outfile / names.file_name(out)
    try:
        return outfile.with_name(fill_templated_filename(outfile.name, out.name))
    except (KeyError, ValueError, IndexError):
        raise InputError(
            f"`{outfile.name}` has braces that mean nothing, expected only `{{ftype}}`"
        ) from None
