"""DFlash speculative decoding for llama.cpp: `DFlashLlama` in place of `llama_cpp.Llama`.

Importing this package loads no native library; the first use of `DFlashLlama` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        DFlashArgumentError,
        DFlashDecodeError,
        DFlashError,
        DFlashFileError,
        DFlashInternalError,
        DFlashLibraryError,
        DFlashMemoryError,
        DFlashPairError,
        DFlashStateError,
        DFlashTargetError,
    )
    from .llama import DFlashLlama
    from .session import RoundTrace, Session
    from .stats import DraftStats

__version__ = "0.1.0"

_HOME = {
    "DFlashLlama": "llama",
    "DraftStats": "stats",
    "RoundTrace": "session",
    "Session": "session",
    "DFlashArgumentError": "errors",
    "DFlashDecodeError": "errors",
    "DFlashError": "errors",
    "DFlashFileError": "errors",
    "DFlashInternalError": "errors",
    "DFlashLibraryError": "errors",
    "DFlashMemoryError": "errors",
    "DFlashPairError": "errors",
    "DFlashStateError": "errors",
    "DFlashTargetError": "errors",
}

__all__ = [
    "DFlashArgumentError",
    "DFlashDecodeError",
    "DFlashError",
    "DFlashFileError",
    "DFlashInternalError",
    "DFlashLibraryError",
    "DFlashLlama",
    "DFlashMemoryError",
    "DFlashPairError",
    "DFlashStateError",
    "DFlashTargetError",
    "DraftStats",
    "RoundTrace",
    "Session",
    "__version__",
]


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
