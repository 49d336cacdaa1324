"""The target's embedding and head, for drafts that take them, or rows of them, into their file."""

from __future__ import annotations

from collections.abc import Callable

from .checkpoint import SourceTensor, indexed_names, open_weights
from .gguf_file import TensorInfo
from .target import Target

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

# Brings the files with the named tensors of a target on the hub.
Fetch = Callable[[tuple[str, ...]], None]

_GGUF_NAMES = {EMBEDDING: "token_embd.weight", HEAD: "output.weight"}
# Names in a target's checkpoint: plain, and inside of a model with vision.
_PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")


def in_gguf(target: Target, wanted: tuple[str, ...]) -> TensorInfo | None:
    """Return the first of the wanted tensors that the target's file has."""
    tensors = target.file.tensors
    return next((i for n in wanted if (i := tensors.get(_GGUF_NAMES[n])) is not None), None)


def in_directory(
    target: Target, wanted: tuple[str, ...], fetch: Fetch | None
) -> SourceTensor | None:
    """Return the first of the wanted tensors that the target's safetensors files have."""
    names = _names(wanted)
    if fetch is not None:
        fetch(names)
    tensors = {t.raw_name: t for t in open_weights(target.path, partial=True)}
    return next((tensors[n] for n in names if n in tensors), None)


def index_names(target: Target, wanted: str) -> bool:
    """Tell whether the index of a target's directory names a tensor, whatever files are there."""
    return not indexed_names(target.path).isdisjoint(_names((wanted,)))


def _names(wanted: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(prefix + name for name in wanted for prefix in _PREFIXES)
