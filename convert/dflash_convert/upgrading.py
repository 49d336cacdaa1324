"""Drafts that forks wrote before the names settled, as files that llama.cpp loads today.

The forks' architecture is `dflash-draft` and their own keys are nested (`dflash-draft.dflash.
block_size`); the layers are those whose *output* is read, where today's key counts inputs; the
tensors of the selector and the convolutions have other names. Weights are copied as they are.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .comparison import decode_rows
from .console import Console, Ticker
from .errors import FailureError, InputError
from .gguf_file import ARRAY, MAGIC, Field, GgufFile, TensorInfo, make_field, read_gguf
from .naming import PREFIX
from .pair import draft_problems, pair_report
from .schema import (
    ARCH,
    FORK_ARCHITECTURE,
    FORK_LAYER_TENSORS,
    FORK_TENSORS,
    KEYS,
    MASK_TOKEN_KEY,
    layer_name,
    rules_for,
)
from .target import TOKENS_KEY, Target, read_target
from .write import new_file

_ARCHITECTURE_KEY = "general.architecture"
_VERSION = 3
_PIECE = 1 << 23  # bytes copied at a time


@dataclass(frozen=True)
class UpgradeResult:
    """What an upgrade did.

    Attributes:
        path: The new file; None when there was nothing to upgrade.
        changes: A sentence for each change.
        warnings: Sentences worth showing.
    """

    path: Path | None
    changes: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Copied:
    """A tensor of the new file: one of the old, perhaps widened to F32."""

    old: TensorInfo
    shape: tuple[int, ...]
    type_id: int
    nbytes: int


def upgrade(
    path: Path | str,
    outfile: Path | str | None = None,
    target: Path | str | None = None,
    force: bool = False,
    *,
    console: Console | None = None,
) -> UpgradeResult:
    """Write a draft of a fork under the names that llama.cpp reads.

    Args:
        path: The old GGUF.
        outfile: File or directory; None names it after the old one in the current directory.
        target: GGUF or Hugging Face directory of the target: gives the tokenizer where the draft
            has none and the rope sections for M-RoPE, and is what the draft is checked against.
        force: Replace an existing file.
        console: For progress; None is silent.

    Raises:
        InputError: Not a draft, parts contradict each other, or the result would not load or fit.
        FailureError: Writing or verifying failed. In both cases nothing is left behind.
    """
    console = console or Console(quiet=True)
    old = read_gguf(path)
    _require_draft(old)
    model = None if target is None else read_target(target)
    fields, changes, warnings = _fields(old, model)
    tensors, renamed = _tensors(old, int(_value(fields, "block_count") or 0))
    changes += renamed
    if not changes:
        return UpgradeResult(None, (), tuple(warnings))
    out = _output_path(old.path, outfile)
    if out.exists() and out.samefile(old.path):
        raise InputError(f"`{out}` is the file to upgrade, expected another name")
    total = sum(t.nbytes for t in tensors.values())
    with new_file(out, force=force, nbytes=total) as part:
        with console.progress("writing", total) as ticker:
            digests = _write(part, old, fields, tensors, ticker)
        with console.progress("verifying", total) as ticker:
            _verify(part, fields, tensors, digests, ticker)
        reasons = draft_problems(read_gguf(part))
        if not reasons and target is not None:
            reasons, more = pair_report(target, part)
            warnings += more
        if reasons:
            shown = [r.replace(str(part), str(old.path)) for r in reasons]
            raise InputError(
                f"`{old.path}` cannot be upgraded to a file that loads",
                problems=shown,
                hint="convert the checkpoint again",
            )
    return UpgradeResult(out.absolute(), tuple(changes), tuple(warnings))


def _require_draft(old: GgufFile) -> None:
    arch = old.architecture
    if arch not in (ARCH, FORK_ARCHITECTURE):
        raise InputError(
            f"`{old.path}` has architecture `{arch or '?'}`, expected a draft "
            f"(`{FORK_ARCHITECTURE}` or `{ARCH}`)"
        )
    if any("markov" in name or name.startswith("dspark") for name in old.tensors):
        raise InputError(f"`{old.path}` is a DSpark draft, expected DFlash or DFlash 2")
    if old.truncated_tensors():
        raise InputError(f"`{old.path}` is cut off", hint="download it again")


def _output_path(old: Path, outfile: Path | str | None) -> Path:
    name = old.stem if old.stem.startswith(PREFIX) else PREFIX + old.stem
    name = f"{name}-upgraded.gguf"
    if outfile is None:
        return Path(name)
    out = Path(outfile)
    return out / name if out.is_dir() else out


# --- keys ---------------------------------------------------------------------------------------


def _fields(old: GgufFile, target: Target | None) -> tuple[dict[str, Field], list[str], list[str]]:
    """Return the new keys, what changed, and what is worth showing."""
    changes: list[str] = []
    warnings: list[str] = []
    fields = {_ARCHITECTURE_KEY: make_field("str", ARCH)}
    if old.architecture != ARCH:
        changes.append(f"architecture `{old.architecture}` is now `{ARCH}`")
    own: dict[str, Field] = {}
    for name, field in old.fields.items():
        rest = name.removeprefix(f"{old.architecture}.")
        if name == _ARCHITECTURE_KEY:
            continue
        if rest == name:
            fields[name] = field
            continue
        rest = rest.removeprefix(f"{ARCH}.")
        if rest in own and own[rest].raw != field.raw:
            raise InputError(
                f"`{old.path}` has two values for `{rest}`: {own[rest].value} and {field.value}"
            )
        own[rest] = field
        if name != f"{ARCH}.{rest}" and rest not in _OWN_RULES:
            changes.append(f"key `{name}` is now `{ARCH}.{rest}`")
    for rest, rule in _OWN_RULES.items():
        if rest in own:
            changes += rule(old, own, fields, own.pop(rest))
    for rest, field in own.items():
        new = fields[f"{ARCH}.{rest}"] = _retyped(old, rest, field)
        if new.type_name != field.type_name:
            changes.append(f"key `{ARCH}.{rest}` is {new.type_name}, not {field.type_name}")
    if target is not None:
        changes += _take_from(target, fields, warnings)
    if TOKENS_KEY not in fields:
        raise InputError(
            f"`{old.path}` has no tokenizer",
            hint=f"`dflash-convert upgrade {old.path} --target TARGET.gguf` takes the target's",
        )
    head = _value(fields, "attention.key_length")
    if head is not None and _value(fields, "rope.dimension_count") == head:
        del fields[f"{ARCH}.rope.dimension_count"]
        changes.append(f"key `{ARCH}.rope.dimension_count` was the default and is gone")
    if f"{ARCH}.attention.causal" not in fields:
        warnings.append(
            "the file does not say whether the block is causal, so llama.cpp runs it as not causal"
        )
    return fields, changes, warnings


def _value(fields: dict[str, Field], rest: str) -> Any:
    field = fields.get(f"{ARCH}.{rest}")
    return None if field is None else field.value


def _retyped(old: GgufFile, rest: str, field: Field) -> Field:
    """Return the field in the type that the loader expects, where it is one of its keys."""
    kinds = {rule.name: rule.type for rule in KEYS}
    kind = kinds.get(rest)
    if kind is None or field.type_name == re.sub(r"\[\]$", f"[{field.count}]", kind):
        return field
    if kind.endswith("[]") != (field.type == ARRAY):
        raise InputError(f"`{rest}` in `{old.path}` is {field.type_name}, expected {kind}")
    try:
        return make_field(kind, field.raw)
    except (struct.error, TypeError, AttributeError, ValueError):
        raise InputError(
            f"`{rest}` in `{old.path}` is {field.type_name} {field.value!r}, expected {kind}"
        ) from None


def _move_mask(
    old: GgufFile, own: dict[str, Field], fields: dict[str, Field], field: Field
) -> list[str]:
    token = _integer(old, "mask_token_id", field)
    other = fields.get(MASK_TOKEN_KEY)
    if other is not None and other.value != token:
        raise InputError(
            f"`{old.path}` names two mask tokens: {token} and {other.value} ({MASK_TOKEN_KEY})"
        )
    fields[MASK_TOKEN_KEY] = make_field("u32", token)
    return [f"the mask token {token} is now `{MASK_TOKEN_KEY}`"]


def _move_layers(
    old: GgufFile, own: dict[str, Field], fields: dict[str, Field], field: Field
) -> list[str]:
    ids = field.value if isinstance(field.value, list) else [None]
    if not ids or not all(type(i) is int and 0 <= i < 2**31 - 1 for i in ids):
        raise InputError(f"`target_layer_ids` in `{old.path}` is {ids}, expected layer numbers")
    inputs = [int(i) + 1 for i in ids if i is not None]
    other = own.get("target_layers")
    if other is not None and other.value != inputs:
        raise InputError(
            f"`{old.path}` has target_layer_ids {ids} and target_layers {other.value}, expected "
            f"the latter to be {inputs}"
        )
    own["target_layers"] = make_field("i32[]", inputs)
    return [f"the layers {ids} whose outputs are read are now `{ARCH}.target_layers` {inputs}"]


def _check_counts(
    old: GgufFile, own: dict[str, Field], fields: dict[str, Field], field: Field
) -> list[str]:
    layers, hidden = own.get("target_layers"), own.get("embedding_length")
    if layers is not None and hidden is not None and field.value != layers.count * hidden.value:
        raise InputError(
            f"`{old.path}` has {field.value} target features, expected {layers.count} layers of "
            f"{hidden.value}"
        )
    return [f"`n_target_features` {field.value} follows from other keys and is gone"]


def _check_vocab(
    old: GgufFile, own: dict[str, Field], fields: dict[str, Field], field: Field
) -> list[str]:
    tokens = fields.get(TOKENS_KEY)
    if tokens is not None and tokens.count != field.value:
        raise InputError(
            f"`{old.path}` has {tokens.count} tokens, expected its `vocab_size` {field.value}"
        )
    return [f"`vocab_size` {field.value} follows from the tokenizer and is gone"]


_Rule = Callable[[GgufFile, dict[str, Field], dict[str, Field], Field], list[str]]

# Keys that do not simply move, in the order in which they are looked at.
_OWN_RULES: dict[str, _Rule] = {
    "mask_token_id": _move_mask,
    "target_layer_ids": _move_layers,
    "n_target_features": _check_counts,
    "vocab_size": _check_vocab,
}


def _integer(old: GgufFile, rest: str, field: Field) -> int:
    if type(field.value) is not int or not 0 <= field.value < 2**32:
        raise InputError(f"`{rest}` in `{old.path}` is {field.value!r}, expected a token id")
    return field.value


def _take_from(target: Target, fields: dict[str, Field], warnings: list[str]) -> list[str]:
    changes = []
    if TOKENS_KEY not in fields:
        fields |= target.tokenizer
        changes.append(f"the tokenizer is that of `{target.path}`")
    head = _value(fields, "attention.key_length")
    if head is None:
        heads, width = (_value(fields, k) for k in ("attention.head_count", "embedding_length"))
        head = width // heads if heads and width else None
    if target.mrope and head and not _value(fields, "rope.dimension_sections"):
        sections = [head // 2, 0, 0, 0]
        fields[f"{ARCH}.rope.dimension_sections"] = make_field("i32[]", sections)
        changes.append(f"the target uses M-RoPE: `{ARCH}.rope.dimension_sections` is {sections}")
        partial = _value(fields, "rope.dimension_count")
        if partial is not None and partial != head:
            del fields[f"{ARCH}.rope.dimension_count"]
            changes.append(
                f"`{ARCH}.rope.dimension_count` {partial} was the target's and is gone: the draft "
                "rotates whole heads"
            )
    return changes


# --- tensors --------------------------------------------------------------------------------------


def _tensors(old: GgufFile, layers: int) -> tuple[dict[str, _Copied], list[str]]:
    from gguf import GGMLQuantizationType

    wide = {
        layer_name(rule.target, layer)
        for rule, layer in rules_for(2, min(layers, 512))
        if rule.kind in ("vector", "kernel")
    }
    tensors: dict[str, _Copied] = {}
    changes = []
    for name, info in old.tensors.items():
        new = _new_name(name, old)
        if new in tensors:
            raise InputError(f"`{old.path}` has `{new}` under two names")
        if info.nbytes is None:
            raise InputError(f"`{name}` in `{old.path}` has the unknown type {info.type_name}")
        kind, nbytes = info.type_id, info.nbytes
        if new in wide and kind != GGMLQuantizationType.F32:
            kind, nbytes = int(GGMLQuantizationType.F32), 4 * info.elements
            changes.append(f"tensor `{new}` is F32, as the loader wants it, not {info.type_name}")
        if new != name:
            changes.append(f"tensor `{name}` is now `{new}`")
        tensors[new] = _Copied(info, info.shape, kind, nbytes)
    return tensors, changes


def _new_name(name: str, old: GgufFile) -> str:
    if name in FORK_TENSORS:
        return FORK_TENSORS[name]
    match = re.fullmatch(r"(blk\.\d+\.)(.+)", name)
    if match is None or match[2] not in FORK_LAYER_TENSORS:
        return name
    new = match[1] + FORK_LAYER_TENSORS[match[2]]
    # Today's loader has a use of its own for a norm of this name beside `ffn_norm`.
    return name if new == f"{match[1]}ffn_norm.weight" and new in old.tensors else new


def _contents(old: GgufFile, tensor: _Copied) -> Iterator[bytes]:
    """Yield the bytes of a tensor of the new file, piece by piece."""
    info = tensor.old
    if tensor.type_id != info.type_id:
        yield decode_rows(old, info).astype("<f4").tobytes()
        return
    with open(old.path, "rb") as stream:
        stream.seek(info.offset)
        left = tensor.nbytes
        while left:
            piece = stream.read(min(_PIECE, left))
            if not piece:
                raise FailureError(f"`{old.path}` ended inside tensor `{info.name}`")
            left -= len(piece)
            yield piece


# --- the file -------------------------------------------------------------------------------------


def _write(
    path: Path,
    old: GgufFile,
    fields: dict[str, Field],
    tensors: dict[str, _Copied],
    ticker: Ticker,
) -> dict[str, bytes]:
    """Write a GGUF; returns the digest of every tensor."""

    def text(value: str) -> bytes:
        raw = value.encode()
        return struct.pack("<Q", len(raw)) + raw

    align = old.alignment
    header = [MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(fields))]
    for name, field in fields.items():
        header += [text(name), struct.pack("<I", field.type), field.payload]
    offset = 0
    for name, tensor in tensors.items():
        dims = tensor.shape[::-1]
        header += [text(name), struct.pack(f"<I{len(dims)}Q", len(dims), *dims)]
        header.append(struct.pack("<IQ", tensor.type_id, offset))
        offset += -(-tensor.nbytes // align) * align
    digests = {}
    with open(path, "wb") as stream:
        stream.write(b"".join(header))
        stream.write(b"\0" * (-stream.tell() % align))
        for name, tensor in tensors.items():
            digest = hashlib.sha256()
            for piece in _contents(old, tensor):
                stream.write(piece)
                digest.update(piece)
                ticker.advance(len(piece))
            stream.write(b"\0" * (-stream.tell() % align))
            digests[name] = digest.digest()
        stream.flush()
        os.fsync(stream.fileno())
    return digests


def _verify(
    path: Path,
    fields: dict[str, Field],
    tensors: dict[str, _Copied],
    digests: dict[str, bytes],
    ticker: Ticker,
) -> None:
    """Re-open the file and compare every key and every tensor with what was to be written."""
    new = read_gguf(path)
    good = new.fields == fields and new.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items() if good else ():
        info = new.tensors[name]
        good &= (info.shape, info.type_id) == (tensor.shape, tensor.type_id)
        digest = hashlib.sha256()
        for piece in _contents(new, _Copied(info, info.shape, info.type_id, tensor.nbytes)):
            digest.update(piece)
            ticker.advance(len(piece))
        good &= digest.digest() == digests[name]
    if not good:
        raise FailureError(
            "the written file differs from what was to be written and was removed",
            hint="check the disk and the memory of this machine, then run again",
        )
