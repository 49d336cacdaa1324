"""Read the header of a GGUF file: keys with their exact bytes, and where the tensors are.

The gguf package has a reader too, but it makes several numpy objects for each element of an array:
15 s and 0.8 GB for a vocabulary of 248,320 tokens, and it never ends on an array length that a
damaged file made up. Here arrays stay bytes until somebody asks for their value, so a tokenizer is
copied exactly, whatever is in it. A test compares both readers.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from .errors import InputError
from .tensor_types import type_layout

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = range(10)
UINT64, INT64, FLOAT64 = range(10, 13)

_SCALARS = {
    UINT8: "<B",
    INT8: "<b",
    UINT16: "<H",
    INT16: "<h",
    UINT32: "<I",
    INT32: "<i",
    FLOAT32: "<f",
    BOOL: "<?",
    UINT64: "<Q",
    INT64: "<q",
    FLOAT64: "<d",
}
TYPE_NAMES = {
    UINT8: "u8",
    INT8: "i8",
    UINT16: "u16",
    INT16: "i16",
    UINT32: "u32",
    INT32: "i32",
    FLOAT32: "f32",
    BOOL: "bool",
    STRING: "str",
    ARRAY: "array",
    UINT64: "u64",
    INT64: "i64",
    FLOAT64: "f64",
}

# As in ggml: more dimensions or longer names make its loader refuse the file.
_MAX_DIMS = 4


@dataclass(frozen=True)
class Field:
    """One key of the header.

    Attributes:
        type: GGUF value type.
        payload: The value's bytes as stored (for arrays with item type and count in front).
    """

    type: int
    payload: bytes

    @property
    def item_type(self) -> int | None:
        """Type of an array's items, None for other values."""
        return struct.unpack_from("<I", self.payload)[0] if self.type == ARRAY else None

    @property
    def count(self) -> int:
        """Number of items of an array, 1 for other values."""
        return struct.unpack_from("<Q", self.payload, 4)[0] if self.type == ARRAY else 1

    @property
    def type_name(self) -> str:
        """Name of the type, such as `u32` or `str[300]`."""
        if self.type != ARRAY:
            return TYPE_NAMES[self.type]
        return f"{TYPE_NAMES[self.item_type or 0]}[{self.count}]"

    @cached_property
    def raw(self) -> Any:
        """The value with strings as bytes, since token texts need not be valid UTF-8."""
        if self.type == STRING:
            return self.payload[8:]
        if self.type != ARRAY:
            return struct.unpack(_SCALARS[self.type], self.payload)[0]
        if self.item_type == STRING:
            items, pos = [], 12
            for _ in range(self.count):
                (length,) = struct.unpack_from("<Q", self.payload, pos)
                items.append(self.payload[pos + 8 : pos + 8 + length])
                pos += 8 + length
            return items
        code = _SCALARS[self.item_type or 0][1]
        return list(struct.unpack_from(f"<{self.count}{code}", self.payload, 12))

    @cached_property
    def value(self) -> Any:
        """The value with strings as text (undecodable bytes replaced)."""
        if self.type == STRING:
            return self.raw.decode("utf-8", "replace")
        if self.type == ARRAY and self.item_type == STRING:
            return [item.decode("utf-8", "replace") for item in self.raw]
        return self.raw


def make_field(kind: str, value: Any) -> Field:
    """Return the field that holds `value`.

    Args:
        kind: Type as in `Field.type_name`, without the count: `u32`, `str`, `f32[]`, `str[]`, ...
        value: Of that type; strings as str or bytes.

    Raises:
        ValueError: A text has no UTF-8 form.
        struct.error: A number is out of the type's range.
    """
    types = {name: number for number, name in TYPE_NAMES.items()}
    item = types[kind.removesuffix("[]")]

    def text(entry: str | bytes) -> bytes:
        raw = entry.encode() if isinstance(entry, str) else entry
        return struct.pack("<Q", len(raw)) + raw

    if not kind.endswith("[]"):
        return Field(item, text(value) if item == STRING else struct.pack(_SCALARS[item], value))
    if item == STRING:
        items = b"".join(map(text, value))
    else:
        items = struct.pack(f"<{len(value)}{_SCALARS[item][1]}", *value)
    return Field(ARRAY, struct.pack("<IQ", item, len(value)) + items)


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is.

    Attributes:
        shape: Outermost dimension first, as in the checkpoint (the file stores it reversed).
        type_id: ggml type.
        offset: First byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def type_name(self) -> str:
        """ggml's name of the type, such as `Q8_0`."""
        known = type_layout(self.type_id)
        return known[0] if known else f"type {self.type_id}"

    @property
    def nbytes(self) -> int | None:
        """Number of bytes, None when the type is not known here or does not divide the rows."""
        known = type_layout(self.type_id)
        if known is None:
            return None
        _, block, size = known
        row = self.shape[-1] if self.shape else 1
        return None if row % block else self.elements // block * size


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file."""

    path: Path
    size: int
    version: int
    alignment: int
    fields: dict[str, Field]
    tensors: dict[str, TensorInfo]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, or `default` when the file lacks it."""
        field = self.fields.get(key)
        return default if field is None else field.value

    def integer(self, key: str) -> int | None:
        """Return the value of `key` if it is an integer, else None."""
        value = self.get(key)
        return value if type(value) is int else None

    @property
    def architecture(self) -> str:
        """`general.architecture`, empty when missing."""
        return str(self.get("general.architecture", ""))

    def truncated_tensors(self) -> list[str]:
        """Return the names of tensors whose bytes reach beyond the end of the file."""
        return [
            t.name
            for t in self.tensors.values()
            if t.offset + (t.nbytes if t.nbytes is not None else 0) > self.size
        ]


class _DamagedError(Exception):
    """The file does not follow the format."""


class _Cursor:
    def __init__(self, data: mmap.mmap):
        self.data = data
        self.pos = 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.pos:
            raise _DamagedError(
                f"it ends at byte {len(self.data)}, while a value at byte {self.pos} needs "
                f"{count} more"
            )
        self.pos += count
        return self.data[self.pos - count : self.pos]

    def number(self, code: str) -> int:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        raw = self.take(self.number("<Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise _DamagedError(f"a name before byte {self.pos} is not UTF-8") from None

    def field(self) -> Field:
        kind = self.number("<I")
        start = self.pos
        if kind == STRING:
            self.take(self.number("<Q"))
        elif kind == ARRAY:
            self._skip_array()
        elif kind in _SCALARS:
            self.take(struct.calcsize(_SCALARS[kind]))
        else:
            raise _DamagedError(f"value type {kind} at byte {start} does not exist")
        return Field(kind, self.data[start : self.pos])

    def _skip_array(self) -> None:
        kind, count = self.number("<I"), self.number("<Q")
        if kind in _SCALARS:
            self.take(count * struct.calcsize(_SCALARS[kind]))
            return
        if kind != STRING:
            raise _DamagedError(
                f"array of value type {kind} before byte {self.pos} is not supported"
            )
        data, pos, end = self.data, self.pos, len(self.data)
        if count > (end - pos) // 8:
            raise _DamagedError(f"an array at byte {pos} claims {count} strings, more than fit")
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if pos + 8 > end:
                raise _DamagedError(f"it ends inside an array of strings at byte {pos}")
            pos += 8 + unpack(data, pos)[0]
        if pos > end:
            raise _DamagedError(f"it ends inside an array of strings at byte {end}")
        self.pos = pos


def read_gguf(path: Path | str) -> GgufFile:
    """Read the header of a GGUF file.

    Raises:
        InputError: The file is missing, empty, damaged, of another format or byte order.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"`{path}` is a directory, expected a GGUF file")
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except FileNotFoundError:
        raise InputError(f"no GGUF file `{path}`") from None
    except ValueError:  # mmap of an empty file
        raise InputError(f"`{path}` is empty, expected a GGUF file") from None
    except _DamagedError as exc:
        raise InputError(
            f"`{path}` is a damaged or truncated GGUF file: {exc}", hint="download it again"
        ) from None


def _parse(path: Path, data: mmap.mmap) -> GgufFile:
    if data[:4] != MAGIC:
        raise InputError(f"`{path}` is not a GGUF file: it starts with {data[:4]!r}, not {MAGIC!r}")
    cursor = _Cursor(data)
    cursor.take(4)
    version = cursor.number("<I")
    if version and version & 0xFFFF == 0:
        raise InputError(f"`{path}` is a big-endian GGUF file, expected little-endian")
    if version not in (2, 3):
        raise InputError(f"`{path}` has GGUF version {version}, expected 2 or 3")
    n_tensors, n_fields = cursor.number("<Q"), cursor.number("<Q")
    # Each key takes at least 13 bytes and each tensor 24; a made-up count ends here, not in a loop.
    if n_fields * 13 + n_tensors * 24 > len(data):
        raise _DamagedError(f"it claims {n_fields} keys and {n_tensors} tensors, more than fit")
    fields: dict[str, Field] = {}
    for _ in range(n_fields):
        key = cursor.text()
        if key in fields:
            raise _DamagedError(f"key `{key}` appears twice")
        fields[key] = cursor.field()
    alignment = _alignment(fields)
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(n_tensors):
        name = cursor.text()
        if name in found:
            raise _DamagedError(f"tensor `{name}` appears twice")
        n_dims = cursor.number("<I")
        if n_dims > _MAX_DIMS:
            raise _DamagedError(
                f"tensor `{name}` has {n_dims} dimensions, at most {_MAX_DIMS} exist"
            )
        shape = tuple(cursor.number("<Q") for _ in range(n_dims))[::-1]
        found[name] = (shape, cursor.number("<I"), cursor.number("<Q"))
    start = -(-cursor.pos // alignment) * alignment
    tensors = {
        name: TensorInfo(name, shape, type_id, start + offset)
        for name, (shape, type_id, offset) in found.items()
    }
    return GgufFile(path, len(data), version, alignment, fields, tensors)


def _alignment(fields: dict[str, Field]) -> int:
    field = fields.get("general.alignment")
    if field is None:
        return DEFAULT_ALIGNMENT
    value = field.raw
    if field.type != UINT32 or value == 0 or value & (value - 1):
        raise _DamagedError("general.alignment is not a power of two")
    return value
