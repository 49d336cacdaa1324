"""The lock around native calls: one thread at a time, and only in the process that opened them."""

from __future__ import annotations

import os
import threading

from .errors import DFlashStateError


class OwnerLock:
    """A re-entrant lock that a forked child cannot take.

    The child has none of the parent's other threads: neither the one that may hold the lock, nor
    those that compute. Waiting for either would never end, so entering raises there.

    Args:
        what: What the lock guards, for the error's sentence.
    """

    def __init__(self, what: str):
        self._what = what
        self._lock = threading.RLock()
        self._pid = os.getpid()

    @property
    def mine(self) -> bool:
        """Whether this process made the lock."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise DFlashStateError in another process than the one that made the lock."""
        if not self.mine:
            raise DFlashStateError(
                f"this {self._what} was opened by another process, expected one of this process",
                hint="open it after the fork, or start processes with `spawn`",
            )

    def __enter__(self) -> None:
        self.check()
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
