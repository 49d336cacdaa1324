"""What differs between two GGUF files, as data; the command line prints it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import Console, Ticker
from .errors import InputError
from .gguf_file import Field, GgufFile, TensorInfo, read_gguf
from .inspection import describe_field

if TYPE_CHECKING:
    import numpy as np

_PIECE = 1 << 20  # elements compared at a time
_PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4"}
_PLAIN |= {"I64": "<i8"}


def diff_files(
    first: Path | str, second: Path | str, console: Console | None = None
) -> dict[str, Any]:
    """Compare two GGUF files: every key, and every tensor by type, shape and values.

    The order of keys and tensors, and the padding between tensors, make no difference.

    Args:
        console: For progress; None is silent.

    Returns:
        `same`; `a` and `b`, the paths; `keys` and `tensors`, each with `only_a`, `only_b`
        (described as by `inspect_file`), `different` and the number `same`. A different key has
        its name and both descriptions, an array also `first_difference` and `differences`. A
        different tensor has its name, both descriptions (type, shape, bytes), and, where the
        shapes agree, `changed` (number of values), `max_error` (largest absolute difference) and
        `max_value` (largest magnitude in `a`); these are None for a type that cannot be decoded.

    Raises:
        InputError: Not a readable GGUF, or one that is cut off.
    """
    console = console or Console(quiet=True)
    a, b = (_open(path) for path in (first, second))
    keys = _split(a.fields, b.fields)
    keys["only_a"] = [{"name": n, **describe_field(a.fields[n])} for n in keys["only_a"]]
    keys["only_b"] = [{"name": n, **describe_field(b.fields[n])} for n in keys["only_b"]]
    common = keys.pop("both")
    different = [n for n in common if not _equal_fields(a.fields[n], b.fields[n])]
    keys["different"] = [_describe_keys(n, a.fields[n], b.fields[n]) for n in different]
    keys["same"] = len(common) - len(different)

    tensors = _split(a.tensors, b.tensors)
    tensors["only_a"] = [_describe_tensor(a.tensors[n]) for n in tensors["only_a"]]
    tensors["only_b"] = [_describe_tensor(b.tensors[n]) for n in tensors["only_b"]]
    common = tensors.pop("both")
    total = sum(a.tensors[n].nbytes or 0 for n in common)
    with console.progress("comparing", total) as ticker:
        found = [_compare(a, b, name, ticker) for name in common]
    tensors["different"] = [entry for entry in found if entry is not None]
    tensors["same"] = len(common) - len(tensors["different"])
    same = not any(g[k] for g in (keys, tensors) for k in ("only_a", "only_b", "different"))
    return {"same": same, "a": str(a.path), "b": str(b.path), "keys": keys, "tensors": tensors}


def _open(path: Path | str) -> GgufFile:
    file = read_gguf(path)
    truncated = file.truncated_tensors()
    if truncated:
        raise InputError(
            f"`{path}` is cut off: {len(truncated)} tensors reach beyond its end",
            hint="download it again",
        )
    return file


def _split(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return {
        "only_a": [n for n in a if n not in b],
        "only_b": [n for n in b if n not in a],
        "both": [n for n in a if n in b],
    }


def _equal_fields(a: Field, b: Field) -> bool:
    return a.type == b.type and a.payload == b.payload


def _describe_keys(name: str, a: Field, b: Field) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "a": describe_field(a), "b": describe_field(b)}
    if a.item_type is not None and a.item_type == b.item_type:
        pairs = list(zip(a.raw, b.raw, strict=False))
        unlike = [i for i, (x, y) in enumerate(pairs) if x != y]
        entry["first_difference"] = unlike[0] if unlike else len(pairs)
        entry["differences"] = len(unlike) + abs(a.count - b.count)
    return entry


def _describe_tensor(tensor: TensorInfo) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "type": tensor.type_name,
        "bytes": tensor.nbytes,
    }


def _compare(a: GgufFile, b: GgufFile, name: str, ticker: Ticker) -> dict[str, Any] | None:
    """Compare a tensor of both files; None when there is no difference."""
    import numpy as np

    one, two = a.tensors[name], b.tensors[name]
    described = (_describe_tensor(t) for t in (one, two))
    entry: dict[str, Any] = {"name": name, **dict(zip("ab", described, strict=True))}
    if one.shape != two.shape:
        ticker.advance(one.nbytes or 0)
        return entry
    same_type = one.type_id == two.type_id
    if same_type and one.nbytes is None:
        raise InputError(f"`{name}` has {one.type_name}, whose size is not known")
    changed, error, largest, differs = 0, 0.0, 0.0, not same_type
    try:
        for rows in _pieces(one):
            left, right = (_read(f, t, rows) for f, t in ((a, one), (b, two)))
            ticker.advance(left.nbytes)
            if same_type and np.array_equal(left, right):
                continue
            differs = True
            x, y = _decode(left, one), _decode(right, two)
            # As they are stored: NaN is like NaN, and equal infinities are no NaN apart.
            alike = (x == y) | (np.isnan(x) & np.isnan(y))
            with np.errstate(invalid="ignore"):
                gap = np.where(alike, 0.0, np.abs(x - y))
            changed += int(np.count_nonzero(~alike))
            error = float(np.maximum(error, np.max(gap, initial=0.0)))
            largest = float(np.maximum(largest, np.max(np.abs(x), initial=0.0)))
    except NotImplementedError:  # a type that gguf does not decode
        return {**entry, "changed": None, "max_error": None, "max_value": None}
    if not differs:
        return None
    return {**entry, "changed": changed, "max_error": error, "max_value": largest}


def _pieces(tensor: TensorInfo) -> Iterator[tuple[int, int]]:
    """Cut a tensor into (first row, number of rows)."""
    row = tensor.shape[-1] if tensor.shape else 1
    rows = tensor.elements // row if row else 0
    step = max(1, _PIECE // max(1, row))
    for first in range(0, rows, step):
        yield first, min(step, rows - first)


def _read(file: GgufFile, tensor: TensorInfo, rows: tuple[int, int]) -> np.ndarray:
    """Read rows as bytes: uint8 of rows x bytes per row."""
    import numpy as np

    if tensor.nbytes is None:
        raise NotImplementedError
    row = tensor.shape[-1] if tensor.shape else 1
    size = tensor.nbytes * row // tensor.elements
    first, count = rows
    raw = np.fromfile(file.path, np.uint8, count * size, offset=tensor.offset + first * size)
    return raw.reshape(count, -1)


def _decode(raw: np.ndarray, tensor: TensorInfo) -> np.ndarray:
    """Decode rows to float64, flat."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    plain = _PLAIN.get(tensor.type_name)
    if plain is not None:
        return np.ascontiguousarray(raw).view(plain).ravel().astype(np.float64)
    return dequantize(raw, GGMLQuantizationType(tensor.type_id)).ravel().astype(np.float64)


def decode_rows(file: GgufFile, tensor: TensorInfo) -> np.ndarray:
    """Read a whole tensor as float64, flat.

    Raises:
        InputError: Its type cannot be decoded.
    """
    rows = tensor.elements // (tensor.shape[-1] if tensor.shape else 1)
    try:
        return _decode(_read(file, tensor, (0, rows)), tensor)
    except NotImplementedError:
        raise InputError(
            f"`{tensor.name}` has type {tensor.type_name}, which cannot be decoded"
        ) from None
