"""A mask embedding in a file of its own: `mask_embedding.safetensors` or `mask_embedding.pt`.

Some drafts are trained with an embedding of the mask token that the target's table does not have.
llama.cpp has no place for one vector, so the draft gets an embedding of its own, which is the
target's but for that row, and a head of its own, because the loader would take the embedding for
it otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import (
    FLOATS,
    MASK_FILES,
    STORED,
    Checkpoint,
    SourceTensor,
    read_header,
)
from .config import DraftConfig
from .errors import InputError
from .quantize import to_f32
from .target import Target
from .target_tensors import EMBEDDING, HEAD, Fetch, in_directory, in_gguf

if TYPE_CHECKING:
    import numpy as np

_ENTRIES = ("mask_embedding", "embedding")


@dataclass(frozen=True)
class _Patched(SourceTensor):
    """A table with one row replaced."""

    table: SourceTensor | None = None
    number: int = 0
    values: np.ndarray | None = dataclass_field(default=None, compare=False)

    def read(self, start: int, count: int) -> np.ndarray:
        assert self.table is not None
        assert self.values is not None
        data = self.table.read(start, count)
        first = self.number * self.row
        low, high = max(first, start), min(first + self.row, start + count)
        if low < high:
            data[low - start : high - start] = self.values[low - first : high - first]
        return data


@dataclass(frozen=True)
class _Dequantised(SourceTensor):
    """Rows of a GGUF in a quantised type, read as float of the type `dtype`."""

    type_id: int = 0

    def read(self, start: int, count: int) -> np.ndarray:
        import numpy as np
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType(self.type_id)
        block, size = GGML_QUANT_SIZES[kind]
        # Callers read whole rows; a single row is read for a part of one.
        first, last = start // self.row, -(-(start + count) // self.row)
        nbytes = self.row // block * size
        raw = np.fromfile(
            self.file, np.uint8, (last - first) * nbytes, offset=self.offset + first * nbytes
        )
        values = dequantize(raw.reshape(last - first, nbytes), kind).ravel()
        return _stored(values[start - first * self.row :][:count], self.dtype)


def with_mask_embedding(
    checkpoint: Checkpoint,
    config: DraftConfig,
    target: Target,
    fetch: Fetch | None = None,
) -> tuple[Checkpoint, str | None]:
    """Give a draft the table and the head that its mask embedding needs.

    Args:
        fetch: Brings the files with the named tensors of a target on the hub.

    Returns:
        The checkpoint with two more tensors and a sentence worth showing, or the one that was given
        and None when it has no mask embedding.

    Raises:
        InputError: The file is damaged, belongs to another token or width, or the target has no
            table to put it into.
    """
    path = next((p for n in MASK_FILES if (p := checkpoint.path / n).is_file()), None)
    if path is None:
        return checkpoint, None
    values = _read(path, config)
    tensors = dict(checkpoint.tensors)
    own_head, own = HEAD in tensors, tensors.get(EMBEDDING)
    dtype = tensors["fc.weight"].dtype if "fc.weight" in tensors else "BF16"
    table = own or _borrow(target, EMBEDDING, dtype, fetch)
    if table.shape != (config.vocab, config.hidden) or table.dtype not in FLOATS:
        raise InputError(
            f"`{table.raw_name}` in `{table.file}` is {table.dtype} of shape {table.shape}, "
            f"expected {(config.vocab, config.hidden)} to put `{path.name}` into"
        )
    tensors[EMBEDDING] = _Patched(
        EMBEDDING,
        table.raw_name,
        table.file,
        table.dtype,
        table.shape,
        table.offset,
        table=table,
        number=config.mask_token_id,
        values=_stored(values, table.dtype),
    )
    if not own_head:
        tied = own if config.tied else None
        head = tied or _borrow(target, HEAD, dtype, fetch)
        tensors[HEAD] = replace(head, name=HEAD)
    borrowed = " and ".join(
        what for what, has in (("embedding", own is not None), ("head", own_head)) if not has
    )
    note = (
        f"`{path.name}`: the file carries its own embedding and head"
        + (f" (the target's {borrowed})" if borrowed else "")
        + ", for llama.cpp has no other place for the vector"
    )
    return replace(checkpoint, tensors=tensors), note


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round float32 to a safetensors type, in stored form (bfloat16 as uint16)."""
    import numpy as np

    values = np.ascontiguousarray(values, np.float32)
    if dtype == "BF16":
        bits = values.view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    return values.astype(STORED[dtype])


# --- the file -------------------------------------------------------------------------------------


def _read(path: Path, config: DraftConfig) -> np.ndarray:
    """Return the vector as float32 of the hidden size."""
    import numpy as np

    found, token = _read_pt(path) if path.suffix == ".pt" else _read_safetensors(path)
    if token is not None and token != config.mask_token_id:
        raise InputError(
            f"`{path}` is for token {token}, but the config's mask_token_id is "
            f"{config.mask_token_id}"
        )
    if found.shape not in ((config.hidden,), (1, config.hidden)):
        shape = " x ".join(map(str, found.shape)) or "scalar"
        raise InputError(f"`{path}` has a vector of {shape}, expected {config.hidden}")
    if not np.isfinite(found).all():
        raise InputError(f"`{path}` has NaN or infinite values")
    return found.reshape(-1)


def _read_safetensors(path: Path) -> tuple[np.ndarray, Any]:
    tensors = {t.raw_name: t for t in read_header(path)}
    name = next((n for n in _ENTRIES if n in tensors), None)
    if name is None and len(tensors) == 1:
        (name,) = tensors
    if name is None or tensors[name].dtype not in FLOATS:
        raise InputError(f"`{path}` has no float tensor `mask_embedding`")
    vector = tensors[name]
    token = tensors.get("mask_token_id")
    number = None
    if token is not None and token.elements == 1 and token.dtype in ("I64", "I32"):
        number = int(token.read(0, 1)[0])
    if vector.elements > 1 << 24:
        raise InputError(f"`{path}` holds {vector.elements} values, expected one vector")
    values = to_f32(vector.read(0, vector.elements), vector.dtype)
    return values.reshape(vector.shape), number


def _read_pt(path: Path) -> tuple[np.ndarray, Any]:
    try:
        import torch
    except ImportError:
        raise InputError(
            f"`{path}` needs PyTorch to be read, which is not installed",
            hint="install it, or save the vector as tensor `mask_embedding` in "
            "mask_embedding.safetensors",
        ) from None
    try:
        # Nothing but tensors and plain values: a pickle must not run code.
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as exc:  # the unpickler's many ways to find a damaged file
        raise InputError(
            f"`{path}` is damaged or no file of tensors ({type(exc).__name__})"
        ) from None
    token = None
    if isinstance(found, dict):
        token = found.get("mask_token_id")
        found = next((found[n] for n in _ENTRIES if n in found), None)
    if not isinstance(found, torch.Tensor) or not found.is_floating_point():
        raise InputError(f"`{path}` has no float tensor `embedding`")
    token = token.item() if isinstance(token, torch.Tensor) and token.numel() == 1 else token
    return found.detach().to(torch.float32).numpy(), token


# --- the target's tensors -------------------------------------------------------------------------


def _borrow(target: Target, name: str, dtype: str, fetch: Fetch | None) -> SourceTensor:
    """Return the target's embedding or head (which is the embedding when they are tied)."""
    wanted = (name,) if name == EMBEDDING else (HEAD, EMBEDDING)
    found = (
        in_directory(target, wanted, fetch)
        if target.is_directory
        else _from_gguf(target, wanted, dtype)
    )
    if found is None:
        what = "token embedding" if name == EMBEDDING else "output head"
        raise InputError(
            f"`{target.path}` has no {what}, which the draft's mask embedding needs",
            hint="give the whole target: a GGUF in one file, or a directory with its weights",
        )
    return found


def _from_gguf(target: Target, wanted: tuple[str, ...], dtype: str) -> SourceTensor | None:
    info = in_gguf(target, wanted)
    if info is None:
        return None
    plain = {"F32": "F32", "F16": "F16", "BF16": "BF16"}.get(info.type_name)
    place = (wanted[0], info.name, target.path)
    if plain is not None:
        return SourceTensor(*place, plain, info.shape, info.offset)
    if info.nbytes is None:
        raise InputError(f"`{info.name}` in `{target.path}` has the unknown type {info.type_name}")
    return _Dequantised(*place, dtype, info.shape, info.offset, type_id=info.type_id)
