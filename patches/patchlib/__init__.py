"""Parts of patchset.py: strict unified diffs, the base, the patch series and the patched tree.

Standard library only, because this runs before anything is installed.
"""

from __future__ import annotations


class PatchsetError(Exception):
    """A problem the user can act on; its text is one sentence: found, expected, what to do."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
