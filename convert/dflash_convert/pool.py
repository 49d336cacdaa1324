"""Work on pieces of tensors in several threads, in order and in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

# Elements per piece: 1 MiB as float32, so that what is computed from it stays in the cache.
PIECE = 1 << 18

T = TypeVar("T")
R = TypeVar("R")


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """A pool of threads (numpy, hashlib and ggml release the GIL).

    Args:
        threads: Number of threads; None for one per usable core.
    """

    def __init__(self, threads: int | None = None):
        self._threads = threads or usable_cores()
        self._pool = ThreadPoolExecutor(max_workers=self._threads)

    def ordered(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield `work(item)` in order; little more than one item per thread is ever in flight."""
        waiting: list[Future[R]] = []
        for item in items:
            waiting.append(self._pool.submit(work, item))
            if len(waiting) > self._threads + 1:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()

    def close(self) -> None:
        """Drop what has not begun and wait for what has."""
        self._pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def workers(threads: int | None = None) -> Iterator[Workers]:
    """Yield `Workers`, closed at the end, whatever ends it."""
    pool = Workers(threads)
    try:
        yield pool
    finally:
        pool.close()
