"""Converter from DFlash and DFlash 2 checkpoints to GGUF drafts that llama.cpp loads.

result = dflash_convert.convert("Qwen3.8-27B-DFlash2", "Qwen3.8-27B-Q4_K_M.gguf")
reasons = dflash_convert.check_pair("target.gguf", "draft.gguf")
data = dflash_convert.inspect("draft.gguf")
data = dflash_convert.diff("a.gguf", "b.gguf")
result = dflash_convert.upgrade("draft-of-a-fork.gguf", target="target.gguf")
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DFlashError, FailureError, InputError

if TYPE_CHECKING:
    from .conversion import ConvertResult
    from .upgrading import UpgradeResult

__all__ = [
    "DFlashError",
    "FailureError",
    "InputError",
    "__version__",
    "check_pair",
    "convert",
    "diff",
    "inspect",
    "upgrade",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("dflash-toolkit")
        except PackageNotFoundError:  # used from a source tree that is not installed
            return "0+unknown"
    if name == "ConvertResult":
        from .conversion import ConvertResult

        return ConvertResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Thin doors, so that importing the package loads neither numpy nor gguf.


def convert(
    checkpoint: Path | str,
    target: Path | str | None,
    outfile: Path | str | None = None,
    outtype: str = "auto",
    force: bool = False,
    **options: Any,
) -> ConvertResult:
    """Convert a checkpoint to GGUF; see `dflash_convert.conversion.convert`."""
    from .conversion import convert as run

    return run(checkpoint, target, outfile, outtype, force, **options)


def check_pair(target: Path | str, draft: Path | str) -> list[str]:
    """Return every reason why a draft does not fit a target; empty when it does."""
    from .pair import check_pair as run

    return run(target, draft)


def inspect(path: Path | str) -> dict[str, Any]:
    """Return the header of a GGUF as data; see `dflash_convert.inspection.inspect_file`."""
    from .inspection import inspect_file

    return inspect_file(path)


def diff(first: Path | str, second: Path | str) -> dict[str, Any]:
    """Compare two GGUF files; see `dflash_convert.comparison.diff_files`."""
    from .comparison import diff_files

    return diff_files(first, second)


def upgrade(
    path: Path | str,
    outfile: Path | str | None = None,
    target: Path | str | None = None,
    force: bool = False,
) -> UpgradeResult:
    """Rewrite a draft of a fork; see `dflash_convert.upgrading.upgrade`."""
    from .upgrading import upgrade as run

    return run(path, outfile, target, force)
