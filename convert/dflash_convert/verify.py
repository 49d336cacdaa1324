"""Re-open a written file and compare every key and every tensor with where it came from."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .console import Ticker
from .errors import FailureError
from .gguf_file import GgufFile, TensorInfo, read_gguf
from .plan import Plan, PlannedKey, PlannedTensor
from .quantize import allowed_error, decode, to_f32
from .scan import ordered, workers
from .write import pieces, read_piece


def verify(plan: Plan, path: Path, ticker: Ticker) -> None:
    """Compare the file at `path` with its plan and its sources.

    Keys must be equal. Tensors of the source's own type must be equal bit for bit; others may
    differ by the rounding of their type (`quantize.allowed_error`) and no more.

    Raises:
        FailureError: Listing everything that differs.
    """
    file = read_gguf(path)
    problems = _key_problems(plan, file)
    names = {t.name for t in plan.tensors}
    problems += [f"missing tensor `{n}`" for n in sorted(names - file.tensors.keys())]
    problems += [f"unplanned tensor `{n}`" for n in sorted(file.tensors.keys() - names)]
    with workers() as pool:
        for tensor in plan.tensors:
            info = file.tensors.get(tensor.name)
            if info is not None:
                problems += _tensor_problems(tensor, info, path, pool, ticker)
    if problems:
        raise FailureError(
            "the written file differs from its source and was removed",
            problems=problems,
            hint="check the disk and the memory of this machine, then run again",
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


def _tensor_problems(
    tensor: PlannedTensor, info: TensorInfo, path: Path, pool: ThreadPoolExecutor, ticker: Ticker
) -> list[str]:
    import numpy as np

    if info.shape != tensor.shape or info.type_id != tensor.out.type_id:
        return [f"`{tensor.name}` has shape {info.shape} and type {info.type_name}"]
    if tensor.values is not None:
        raw = np.fromfile(path, np.uint8, tensor.nbytes, offset=info.offset)
        equal = raw.tobytes() == tensor.values.tobytes()
        return [] if equal else [f"`{tensor.name}` differs from its computed values"]

    def check(piece: tuple[int, int]) -> tuple[int, float]:
        return _compare(tensor, info, path, *piece)

    wrong, worst = 0, 0.0
    for (count, error), piece in zip(
        ordered(pool, check, pieces(tensor)), pieces(tensor), strict=True
    ):
        wrong, worst = wrong + count, max(worst, error)
        ticker.advance(tensor.out.nbytes(piece[1]))
    if not wrong:
        return []
    return [f"`{tensor.name}`: {wrong} of {tensor.elements} values are off, by up to {worst:g}"]


def _compare(
    tensor: PlannedTensor, info: TensorInfo, path: Path, start: int, count: int
) -> tuple[int, float]:
    """Return how many values of a piece are off by more than they may, and the largest error."""
    import numpy as np

    assert tensor.source is not None
    stored = read_piece(tensor, start, count)
    nbytes = tensor.out.nbytes(count)
    raw = np.fromfile(path, np.uint8, nbytes, offset=info.offset + tensor.out.nbytes(start))
    if raw.size != nbytes:
        return count, float("inf")
    if tensor.source.dtype.lower() == tensor.out.name and raw.tobytes() == stored.tobytes():
        return 0, 0.0
    values = to_f32(stored, tensor.source.dtype)
    error = np.abs(decode(raw, tensor.out) - values)
    # Written so that NaN counts as wrong.
    wrong = ~(error <= allowed_error(values, tensor.out))
    return int(np.count_nonzero(wrong)), float(np.nanmax(error, initial=0.0, where=wrong))
