"""What is in a GGUF, as data; the command line prints it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .gguf_file import ARRAY, STRING, Field, GgufFile, read_gguf
from .schema import ARCH, DRAFT_GGUF_ARCHITECTURES
from .target import TOKENS_KEY

# Longer arrays and texts are shown by their beginning.
_ITEMS = 8
_CHARACTERS = 200


def inspect_file(path: Path | str) -> dict[str, Any]:
    """Describe a GGUF file.

    Returns:
        `path`, `size` (bytes), `architecture`, `kind` (such as `DFlash 2 draft`), `parameters`,
        `keys` (name, type, value, and `count` where an array is shortened), `tensors` (name, shape
        outermost first, type, bytes or None for an unknown type), `types` (tensors, weights and
        bytes by type), `truncated` (tensors beyond the end of the file), `vocab` (tokens, None
        without a tokenizer), `draft_vocab` (tokens that a draft can propose, None for all).

    Raises:
        InputError: Not a readable GGUF.
    """
    file = read_gguf(path)
    tensors = [
        {"name": t.name, "shape": list(t.shape), "type": t.type_name, "bytes": t.nbytes}
        for t in file.tensors.values()
    ]
    types: dict[str, dict[str, Any]] = {}
    for info in file.tensors.values():
        entry = types.setdefault(info.type_name, {"tensors": 0, "parameters": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["parameters"] += info.elements
        entry["bytes"] += info.nbytes or 0
    vocab, draft_vocab = _vocab_sizes(file)
    return {
        "path": str(file.path),
        "size": file.size,
        "gguf_version": file.version,
        "architecture": file.architecture,
        "kind": _kind(file),
        "vocab": vocab,
        "draft_vocab": draft_vocab,
        "parameters": sum(t.elements for t in file.tensors.values()),
        "keys": [{"name": name, **describe_field(field)} for name, field in file.fields.items()],
        "tensors": tensors,
        "types": [{"type": name, **entry} for name, entry in types.items()],
        "truncated": file.truncated_tensors(),
    }


def _kind(file: GgufFile) -> str:
    arch = file.architecture
    if arch == ARCH:
        if "markov_w1.weight" in file.tensors:
            return "DSpark draft"
        return "DFlash 2 draft" if "selector_hidden.weight" in file.tensors else "DFlash draft"
    if arch == "dflash-draft":
        return "DFlash draft of a fork, from before the names settled"
    if arch in DRAFT_GGUF_ARCHITECTURES:
        return "draft of another kind"
    kind = file.get("general.type", "model")
    return "model" if kind == "model" else str(kind)


def vocab_sizes(path: Path | str) -> tuple[int | None, int | None]:
    """Return the tokens of a GGUF and those that a draft can propose, None for all.

    Raises:
        InputError: Not a readable GGUF.
    """
    return _vocab_sizes(read_gguf(path))


def _vocab_sizes(file: GgufFile) -> tuple[int | None, int | None]:
    tokens, ids = file.fields.get(TOKENS_KEY), file.tensors.get("d2t")
    vocab = tokens.count if tokens is not None and tokens.type == ARRAY else None
    return vocab, None if ids is None or file.architecture != ARCH else ids.elements


def describe_field(field: Field) -> dict[str, Any]:
    """Return `type` and `value` of a key, and `count` where a long value is shortened."""
    kind = field.type_name
    if field.type == ARRAY:
        items = field.value
        out: dict[str, Any] = {"type": kind, "value": items[:_ITEMS]}
        if len(items) > _ITEMS:
            out["count"] = len(items)
        return out
    value = field.value
    if field.type == STRING and len(value) > _CHARACTERS:
        return {"type": kind, "value": value[:_CHARACTERS] + "...", "count": len(value)}
    return {"type": kind, "value": value}
