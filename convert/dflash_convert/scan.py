"""Read every weight once before anything is written: digest, NaN and infinity, range."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from .checkpoint import FLOATS, SourceTensor
from .console import Ticker
from .errors import InputError
from .plan import Plan, PlannedTensor
from .pool import PIECE, workers
from .quantize import extent, largest


@dataclass(frozen=True)
class _Scanned:
    tensor: PlannedTensor
    digest: bytes
    bad: int
    largest: float


def scan(plan: Plan, ticker: Ticker, threads: int | None = None) -> str:
    """Check every weight of the checkpoint.

    Args:
        ticker: Told the bytes that were read.
        threads: Number of threads; None for one per core.

    Returns:
        SHA-256 (hexadecimal) over the names, types, shapes and bytes of all tensors, whatever
        files they are spread over.

    Raises:
        InputError: Naming the tensors with NaN or infinite values, or with values that the output
            type cannot hold.
    """
    tensors = [t for t in plan.tensors if t.source is not None]
    with workers(threads) as pool:
        results = list(pool.ordered(lambda t: _scan_tensor(t, ticker), tensors))
    whole = hashlib.sha256()
    for result in sorted(results, key=lambda r: _source(r.tensor).name):
        source = _source(result.tensor)
        whole.update(f"{source.name} {source.dtype} {source.shape}\n".encode())
        whole.update(result.digest)
    problems = [
        f"`{_source(r.tensor).raw_name}`: {r.bad} of {r.tensor.elements}" for r in results if r.bad
    ]
    if problems:
        raise InputError("the checkpoint has NaN or infinite weights", problems=problems)
    problems = [
        f"`{_source(r.tensor).raw_name}` reaches {r.largest:g}, {r.tensor.out.name} at most "
        f"{largest(r.tensor.out):g}"
        for r in results
        if r.largest > largest(r.tensor.out)
    ]
    if problems:
        raise InputError(
            "weights out of range for their type",
            problems=problems,
            hint="write them as bf16 or f32 (`--outtype`, or `--tensor-type` for single ones)",
        )
    return whole.hexdigest()


def _source(tensor: PlannedTensor) -> SourceTensor:
    assert tensor.source is not None
    return tensor.source


def _scan_tensor(tensor: PlannedTensor, ticker: Ticker) -> _Scanned:
    source = _source(tensor)
    digest, bad, reached = hashlib.sha256(), 0, 0.0
    for start, count in source.pieces(PIECE):
        stored = source.read(start, count)
        digest.update(memoryview(stored).cast("B"))  # type: ignore[arg-type]
        if source.dtype in FLOATS:
            more, top = extent(stored, source.dtype)
            bad, reached = bad + more, max(reached, top)
        ticker.advance(stored.nbytes)
    return _Scanned(tensor, digest.digest(), bad, reached)
