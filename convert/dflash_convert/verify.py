"""Re-open a written file and compare every key and every tensor with where it came from."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .console import Ticker
from .errors import FailureError
from .gguf_file import GgufFile, TensorInfo, read_gguf
from .plan import Plan, PlannedKey, PlannedTensor
from .pool import Workers, workers
from .quantize import decode, is_copy, to_f32
from .rounding import moved_too_far
from .write import pieces, read_piece

_DAMAGED = "check the disk and the memory of this machine, then run again"
_INEXACT = "ggml cannot quantise these weights well; choose another type with `--tensor-type`"


def verify(
    plan: Plan,
    path: Path,
    ticker: Ticker,
    checksums: Mapping[str, Sequence[int]],
    threads: int | None = None,
) -> None:
    """Compare the file at `path` with its plan and its sources.

    Keys must be equal. The bytes of a tensor must be those that were written; decoded, they must
    be the source's values, bit for bit in its own type, else within the rounding of the type
    (`rounding.moved_too_far`).

    Args:
        ticker: Told the bytes that were compared.
        checksums: From `write_gguf`.
        threads: Number of threads; None for one per core.

    Raises:
        FailureError: Listing everything that differs.
    """
    file = read_gguf(path)
    problems = _key_problems(plan, file)
    names = {t.name for t in plan.tensors}
    problems += [f"missing tensor `{n}`" for n in sorted(names - file.tensors.keys())]
    problems += [f"unplanned tensor `{n}`" for n in sorted(file.tensors.keys() - names)]
    hint = _DAMAGED
    with workers(threads) as pool:
        for tensor in plan.tensors:
            info = file.tensors.get(tensor.name)
            if info is None:
                continue
            if info.shape != tensor.shape or info.type_id != tensor.out.type_id:
                problems.append(f"`{tensor.name}` has shape {info.shape}, type {info.type_name}")
            elif tensor.values is not None:
                problems += _computed_problems(tensor, info, path)
            else:
                found = _compare(tensor, info, path, checksums[tensor.name], pool, ticker)
                problems += found.problems(tensor)
                if found.inexact and not found.damaged:
                    hint = _INEXACT
    if problems:
        raise FailureError(
            "the written file differs from its source and was removed", problems=problems, hint=hint
        )


def _key_problems(plan: Plan, file: GgufFile) -> list[str]:
    problems = [
        f"key `{key.name}` is {_short(file.get(key.name))}, expected {_short(_wanted(key))}"
        for key in plan.keys
        if not _equal(key, file)
    ]
    planned = {key.name for key in plan.keys} | {"general.architecture"}
    problems += [f"unplanned key `{k}`" for k in file.fields if k not in planned]
    return problems


def _wanted(key: PlannedKey) -> Any:
    return key.value if key.field is None else key.field.value


def _equal(key: PlannedKey, file: GgufFile) -> bool:
    import numpy as np

    found = file.fields.get(key.name)
    if found is None:
        return False
    if key.field is not None:
        return found.type == key.field.type and found.payload == key.field.payload
    kind = key.type.replace("[]", f"[{len(key.value)}]") if key.type.endswith("[]") else key.type
    value = list(key.value) if key.type.endswith("[]") else key.value
    if key.type == "f32":
        value = float(np.float32(key.value))
    return found.type_name == kind and found.value == value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _computed_problems(tensor: PlannedTensor, info: TensorInfo, path: Path) -> list[str]:
    import numpy as np

    assert tensor.values is not None
    raw = np.fromfile(path, np.uint8, tensor.nbytes, offset=info.offset)
    equal = raw.tobytes() == tensor.values.tobytes()
    return [] if equal else [f"`{tensor.name}` differs from its computed values"]


@dataclass(frozen=True)
class _Comparison:
    """What is wrong with a tensor.

    Attributes:
        damaged: Pieces whose bytes are not those that were written.
        inexact: Values (or groups with a scale) further from the source than the type explains.
        worst: The largest error among these.
    """

    damaged: int = 0
    inexact: int = 0
    worst: float = 0.0

    def __add__(self, other: _Comparison) -> _Comparison:
        return _Comparison(
            self.damaged + other.damaged,
            self.inexact + other.inexact,
            max(self.worst, other.worst),
        )

    def problems(self, tensor: PlannedTensor) -> list[str]:
        """Return a sentence for each kind of difference."""
        out = []
        if self.damaged:
            out.append(f"`{tensor.name}` is not as it was written (pieces: {self.damaged})")
        if self.inexact:
            what = "groups of values" if tensor.out.quantized else "values"
            out.append(
                f"`{tensor.name}`: {self.inexact} {what} are off by more than {tensor.out.name} "
                f"explains, by up to {self.worst:g}"
            )
        return out


def _compare(
    tensor: PlannedTensor,
    info: TensorInfo,
    path: Path,
    checksums: Sequence[int],
    pool: Workers,
    ticker: Ticker,
) -> _Comparison:
    total = _Comparison()
    numbered = list(zip(pieces(tensor), checksums, strict=True))
    compared = pool.ordered(lambda p: _compare_piece(tensor, info, path, *p[0], p[1]), numbered)
    for found, ((_, count), _) in zip(compared, numbered, strict=True):
        total += found
        ticker.advance(tensor.out.nbytes(count))
    return total


def _compare_piece(
    tensor: PlannedTensor, info: TensorInfo, path: Path, start: int, count: int, checksum: int
) -> _Comparison:
    import numpy as np

    assert tensor.source is not None
    stored = read_piece(tensor, start, count)
    nbytes = tensor.out.nbytes(count)
    raw = np.fromfile(path, np.uint8, nbytes, offset=info.offset + tensor.out.nbytes(start))
    if raw.size != nbytes:
        return _Comparison(damaged=1)
    if is_copy(tensor.source.dtype, tensor.out):
        return _Comparison(damaged=int(not np.array_equal(raw, stored.view(np.uint8))))
    values = to_f32(stored, tensor.source.dtype)
    decoded = decode(raw, tensor.out)
    wrong = moved_too_far(values, decoded, tensor.out)
    damaged = int(zlib.crc32(raw.data) != checksum)
    if not wrong.any():
        return _Comparison(damaged)
    errors = np.abs(decoded - values).reshape(wrong.size, -1).max(axis=1)
    worst = float(np.nanmax(errors, initial=0.0, where=wrong))
    return _Comparison(damaged, int(np.count_nonzero(wrong)), worst)
