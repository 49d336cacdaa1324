"""Read every weight once before anything is written: digest, NaN and infinity, range."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from .checkpoint import FLOATS, SourceTensor
from .console import Ticker
from .errors import InputError
from .plan import Plan, PlannedTensor
from .quantize import LARGEST, not_finite, to_f32

# Elements per piece: small enough for a few in flight, large enough to keep numpy busy.
PIECE = 1 << 21

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Yield a small thread pool (numpy and hashlib release the GIL); errors drop waiting work."""
    pool = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def ordered(
    pool: ThreadPoolExecutor, work: Callable[[T], R], items: Iterable[T], ahead: int = 4
) -> Iterator[R]:
    """Yield `work(item)` in order with at most `ahead` results waiting, which bounds the memory."""
    waiting: list[Future[R]] = []
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) >= ahead:
            yield waiting.pop(0).result()
    for future in waiting:
        yield future.result()


@dataclass(frozen=True)
class _Scanned:
    tensor: PlannedTensor
    digest: bytes
    bad: int
    largest: float


def scan(plan: Plan, ticker: Ticker) -> str:
    """Check every weight of the checkpoint.

    Args:
        ticker: Told the bytes that were read.

    Returns:
        SHA-256 (hexadecimal) over the names, types, shapes and bytes of all tensors, whatever
        files they are spread over.

    Raises:
        InputError: Naming the tensors with NaN or infinite values, or with values that the output
            type cannot hold.
    """
    tensors = [t for t in plan.tensors if t.source is not None]
    with workers() as pool:
        results = list(ordered(pool, lambda t: _scan_tensor(t, ticker), tensors, ahead=8))
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
        f"{LARGEST[r.tensor.out.name]:g}"
        for r in results
        if r.largest > LARGEST.get(r.tensor.out.name, float("inf"))
    ]
    if problems:
        raise InputError(
            f"weights out of range for {plan.out.name}",
            problems=problems,
            hint="use `--outtype bf16` or `--outtype f32`",
        )
    return whole.hexdigest()


def _source(tensor: PlannedTensor) -> SourceTensor:
    assert tensor.source is not None
    return tensor.source


def _scan_tensor(tensor: PlannedTensor, ticker: Ticker) -> _Scanned:
    import numpy as np

    source = _source(tensor)
    digest, bad, largest = hashlib.sha256(), 0, 0.0
    # A narrower type than the stored one may not hold all values; otherwise spare the work.
    ranged = tensor.out.name in LARGEST and source.dtype in ("F32", "BF16")
    for start, count in source.pieces(PIECE):
        stored = source.read(start, count)
        digest.update(memoryview(stored).cast("B"))  # type: ignore[arg-type]
        if source.dtype in FLOATS:
            bad += not_finite(stored, source.dtype)
            if ranged and not bad:
                largest = max(largest, float(np.abs(to_f32(stored, source.dtype)).max()))
        ticker.advance(stored.nbytes)
    return _Scanned(tensor, digest.digest(), bad, largest)
