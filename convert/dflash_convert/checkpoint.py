"""A checkpoint directory: its config, its safetensors files, and where every tensor's bytes are.

The header of each file is validated by the safetensors library; the bytes are read in pieces with
plain reads, so that a conversion's memory does not grow with the checkpoint, and a file that is
cut off meanwhile gives an error instead of a bus error.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import FailureError, InputError, shorten
from .keys import load_json

if TYPE_CHECKING:
    import numpy as np

# safetensors type -> numpy type of the stored bits (bfloat16 is unknown to numpy).
STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}
FLOATS = ("F32", "F16", "BF16")

# A mask embedding in a file of its own (see `mask_embedding`), best readable first.
MASK_FILES = ("mask_embedding.safetensors", "mask_embedding.pt")

_PREFIX = "model."
_CONFIG = "config.json"
_INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the checkpoint.

    Attributes:
        name: Name without a leading `model.`.
        raw_name: Name as stored.
        dtype: safetensors type, such as `BF16`.
        offset: First byte in the file.
    """

    name: str
    raw_name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def row(self) -> int:
        """Elements of the innermost dimension."""
        return self.shape[-1] if self.shape else 1

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return self.elements * int(STORED[self.dtype][2])

    def read(self, start: int, count: int) -> np.ndarray:
        """Read `count` elements from element `start` on, as stored (bfloat16 as uint16).

        Raises:
            FailureError: The file is shorter than its header says.
        """
        import numpy as np

        stored = np.dtype(STORED[self.dtype])
        data = np.fromfile(self.file, stored, count, offset=self.offset + start * stored.itemsize)
        if data.size != count:
            raise FailureError(f"`{self.file}` ended inside tensor `{self.raw_name}`")
        return data

    def pieces(self, elements: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
        """Cut the tensor into (start, count) pieces of whole rows, about `elements` each.

        Args:
            multiple: Rows per piece are a multiple of this, where the tensor has so many.
        """
        rows = self.elements // self.row if self.row else 0
        step = max(1, elements // (max(1, self.row) * multiple)) * multiple
        for first in range(0, rows, step):
            yield first * self.row, min(step, rows - first) * self.row


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory, opened.

    Attributes:
        config: The object in config.json.
        files: The safetensors files, in order of their names.
        tensors: By name without `model.`.
    """

    path: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    tensors: dict[str, SourceTensor] = field(repr=False)


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a checkpoint directory and read the headers of its files.

    Raises:
        InputError: No directory, no config, no safetensors, a damaged file or index, duplicated
            tensors, or a format that is handled elsewhere.
    """
    path = Path(path)
    _check_directory(path)
    config = load_json(path / _CONFIG)
    files, index = _weight_files(path)
    tensors: dict[str, SourceTensor] = {}
    problems = []
    for tensor in _read_files(files, index):
        other = tensors.get(tensor.name)
        if other is not None:
            problems.append(
                f"`{tensor.name}` is in `{other.file.name}` (as `{other.raw_name}`) and in "
                f"`{tensor.file.name}` (as `{tensor.raw_name}`)"
            )
        tensors[tensor.name] = tensor
    if problems:
        raise InputError(f"`{path}` holds tensors twice", problems=problems)
    if index is not None:
        absent = sorted(set(index) - {t.raw_name for t in tensors.values()})
        if absent:
            raise InputError(
                "the index names tensors that its files lack",
                problems=[f"`{name}`, expected in `{index[name]}`" for name in absent],
                hint="download the checkpoint again",
            )
    return Checkpoint(path, config, tuple(files), tensors)


def open_weights(path: Path, *, partial: bool = False) -> list[SourceTensor]:
    """Read the headers of a directory's safetensors files, whatever model they belong to.

    Args:
        partial: Files that the index names may be absent.

    Raises:
        InputError: No safetensors, or a damaged file or index.
    """
    return list(_read_files(*_weight_files(path, partial)))


def indexed_names(path: Path) -> set[str]:
    """Return the tensors that the index of a directory names; none without an index."""
    return set(_weight_files(path, partial=True)[1] or ())


def _read_files(files: list[Path], index: dict[str, str] | None) -> Iterator[SourceTensor]:
    for file in files:
        for tensor in read_header(file):
            # The index may assign the name to another file.
            if index is None or index.get(tensor.raw_name, file.name) == file.name:
                yield tensor


def _check_directory(path: Path) -> None:
    if path.is_dir():
        return
    if not path.exists():
        raise InputError(f"no checkpoint directory `{path}`")
    what = "a GGUF file" if path.suffix == ".gguf" else "a file"
    raise InputError(
        f"`{path}` is {what}, expected a checkpoint directory with {_CONFIG} and safetensors",
        hint=f"to look into it: `dflash-convert inspect {path}`"
        if path.suffix == ".gguf"
        else None,
    )


def _weight_files(path: Path, partial: bool = False) -> tuple[list[Path], dict[str, str] | None]:
    """Return the safetensors files and, when there is an index, its map from tensor to file."""
    indexes = sorted(p for p in path.glob(f"*{_INDEX_SUFFIX}") if p.is_file())
    if len(indexes) > 1:
        raise InputError(
            f"`{path}` has {len(indexes)} indexes, expected at most one",
            problems=[f"`{p.name}`" for p in indexes],
        )
    if indexes:
        return _indexed_files(path, indexes[0], partial)
    files = sorted(
        p
        for p in path.glob("*.safetensors")
        if not p.name.startswith(".") and p.name not in MASK_FILES
    )
    if files:
        _check_numbering(files)
        return files, None
    others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern))
    raise InputError(
        f"`{path}` has no safetensors files"
        + (f", only {', '.join(shorten(others, 3))}" if others else ""),
        hint="convert the weights to safetensors first" if others else None,
    )


def _indexed_files(path: Path, index: Path, partial: bool) -> tuple[list[Path], dict[str, str]]:
    weight_map = load_json(index).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(v, str) for v in weight_map.values())
    ):
        raise InputError(f"`{index}` has no `weight_map` from tensor names to file names")
    weight_map = {t: n for t, n in weight_map.items() if n not in MASK_FILES}
    names = sorted(set(weight_map.values()))
    outside = [n for n in names if Path(n).name != n or n in ("", ".", "..")]
    if outside:
        raise InputError(
            f"`{index}` names files outside its directory", problems=[f"`{n}`" for n in outside]
        )
    absent = [n for n in names if not (path / n).is_file()]
    if absent and not partial:
        raise InputError(
            f"`{index.name}` names {len(absent)} of {len(names)} files that are absent",
            problems=[f"`{n}`" for n in absent],
            hint="download the checkpoint again",
        )
    return [path / n for n in names if n not in absent], weight_map


def _check_numbering(files: list[Path]) -> None:
    """Without an index, `...-00002-of-00003.safetensors` still tells that a part is missing."""
    numbered = re.compile(r"(.*)-([0-9]{1,6})-of-([0-9]{1,6})")
    parts: dict[tuple[str, str], set[str]] = {}
    for file in files:
        match = numbered.fullmatch(file.stem)
        if match:
            parts.setdefault((match[1], match[3]), set()).add(match[2])
    for (base, total), numbers in parts.items():
        width = len(max(numbers))
        wanted = [str(i).zfill(width) for i in range(1, int(total) + 1)]
        absent = [f"`{base}-{i}-of-{total}.safetensors`" for i in wanted if i not in numbers]
        if absent:
            raise InputError(
                f"{len(absent)} of {int(total)} parts are absent",
                problems=absent,
                hint="download the checkpoint again",
            )


def read_header(file: Path) -> list[SourceTensor]:
    """Read a safetensors header, checked by the library, with byte positions from the header.

    Raises:
        InputError: The file is missing, damaged, truncated, or names tensors twice.
    """
    from safetensors import SafetensorError, safe_open

    try:
        # Opened here first: the library takes every failure for a missing file.
        with open(file, "rb") as stream, safe_open(str(file), framework="np") as checked:
            names = set(checked.keys())
            (length,) = struct.unpack("<Q", stream.read(8))
            text = stream.read(length)
    except FileNotFoundError:
        raise InputError(f"no file `{file}`") from None
    except (SafetensorError, ValueError) as exc:
        raise InputError(
            f"`{file}` is a damaged or truncated safetensors file ({exc})",
            hint="download it again",
        ) from None
    doubled: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, value in pairs:
            if key in table:
                doubled.append(key)
            table[key] = value
        return table

    header = json.loads(text, object_pairs_hook=unique)
    if doubled:
        raise InputError(
            f"`{file}` names tensors twice", problems=[f"`{n}`" for n in sorted(set(doubled))]
        )
    return [
        SourceTensor(
            name=name.removeprefix(_PREFIX),
            raw_name=name,
            file=file,
            dtype=info["dtype"],
            shape=tuple(info["shape"]),
            offset=8 + length + info["data_offsets"][0],
        )
        for name, info in header.items()
        if name in names
    ]
