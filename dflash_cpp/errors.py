"""What can go wrong at run time; every class also is the built-in exception that fits it."""

from __future__ import annotations

from dflash_convert.errors import DFlashError, FailureError, InputError

__all__ = [
    "STATUS_ERRORS",
    "DFlashArgumentError",
    "DFlashDecodeError",
    "DFlashError",
    "DFlashFileError",
    "DFlashInternalError",
    "DFlashLibraryError",
    "DFlashMemoryError",
    "DFlashPairError",
    "DFlashStateError",
    "DFlashTargetError",
    "status_error",
]


class DFlashLibraryError(FailureError, ImportError):
    """The native libraries are missing, of another version, or not the ones already loaded."""


class DFlashArgumentError(InputError, ValueError):
    """An argument is out of range, or a call comes at the wrong time."""


class DFlashFileError(InputError, ValueError):
    """A file is missing, unreadable, damaged or not a GGUF."""


class DFlashPairError(InputError, ValueError):
    """Draft and target do not fit.

    Args:
        reasons: Every reason, one sentence each.
    """

    def __init__(self, reasons: list[str]):
        self.reasons = list(reasons)
        if len(self.reasons) == 1:
            super().__init__(self.reasons[0])
        else:
            super().__init__("draft and target do not fit", problems=self.reasons)

    def __reduce__(self) -> tuple[type[DFlashPairError], tuple[list[str]]]:
        return type(self), (self.reasons,)


class DFlashTargetError(InputError, ValueError):
    """The target context cannot be used for speculation (settings, pooling, encoder, ...)."""


class DFlashMemoryError(FailureError, RuntimeError):
    """No memory, the target's context is full, or it cannot go back that far."""


class DFlashDecodeError(FailureError, RuntimeError):
    """A forward pass failed or was aborted."""


class DFlashInternalError(FailureError, RuntimeError):
    """A defect of the library: please report it with the message."""


class DFlashStateError(FailureError, RuntimeError):
    """The object was closed, or another call has overtaken this generator."""


# enum dflash_status, without DFLASH_OK
STATUS_ERRORS: dict[int, type[DFlashError]] = {
    1: DFlashArgumentError,
    2: DFlashFileError,
    3: DFlashPairError,
    4: DFlashTargetError,
    5: DFlashMemoryError,
    6: DFlashDecodeError,
    7: DFlashInternalError,
}


def status_error(status: int, message: str) -> DFlashError:
    """Make the exception for a status code of the C API.

    Args:
        status: Any `dflash_status` but DFLASH_OK.
        message: `dflash_last_error()`; for DFLASH_E_PAIR one reason per line.
    """
    kind = STATUS_ERRORS.get(status, DFlashInternalError)
    if kind is DFlashPairError:
        reasons = [line.strip() for line in message.splitlines() if line.strip()]
        return DFlashPairError(reasons or ["draft and target do not fit"])
    return kind(message or f"libdflash failed with status {status} and no message")
