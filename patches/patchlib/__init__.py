"""Parts of patchset.py: strict unified diffs, the base, the patch series and the patched tree.

Standard library only, because this runs before anything is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable


class PatchsetError(Exception):
    """A problem the user can act on; its text is one sentence: found, expected, what to do."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def exit_code(work: Callable[[], int], after_interrupt: str) -> int:
    """Runs a program's work: its own code, or that of what went wrong, said in one sentence.

    `after_interrupt` goes on with "interrupted", for instance with what the next run does.
    """
    try:
        return work()
    except PatchsetError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print(f"error: interrupted{after_interrupt}", file=sys.stderr)
        return 130
    except OSError as error:
        where = f": `{error.filename}`" if error.filename else ""
        print(f"error: {error.strerror or error}{where}", file=sys.stderr)
        return 1
