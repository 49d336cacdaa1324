"""Work in threads: in order, bounded, and over when something fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dflash_convert.pool import usable_cores, workers


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_order_and_few_are_ahead(threads: int) -> None:
    begun, taken = 0, 0

    def items() -> Iterator[int]:
        nonlocal begun
        for i in range(50):
            begun += 1
            assert begun - taken <= threads + 3
            yield i

    with workers(threads) as pool:
        for expected, found in enumerate(pool.ordered(lambda i: i * i, items())):
            assert found == expected**2
            taken += 1
    assert taken == 50


def test_an_error_ends_the_work_that_waits() -> None:
    done: list[int] = []
    gate = threading.Event()

    def work(i: int) -> int:
        if i == 0:
            raise OSError(28, "No space left")
        gate.wait(timeout=60)
        done.append(i)
        return i

    def attempt() -> None:
        with workers(1) as pool:
            try:
                list(pool.ordered(work, range(1000)))
            finally:
                gate.set()

    with pytest.raises(OSError, match="No space left"):
        attempt()
    assert len(done) <= 2


def test_usable_cores() -> None:
    assert usable_cores() >= 1
