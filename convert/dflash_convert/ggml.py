"""ggml's own routines for quantised types, from the library that `make build` puts in place.

Only `libggml-base` is loaded: no backend, no llama.cpp, no `llama_cpp`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

from .errors import InputError
from .tensor_types import BUILT_IN, TensorType

if TYPE_CHECKING:
    import numpy as np

_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _TypeTraits(ctypes.Structure):
    """`struct ggml_type_traits`."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", _TO_FLOAT),
        ("from_float_ref", ctypes.c_void_p),
    )


class Ggml:
    """The library's quantisers; calls may run in several threads at once (the GIL is released)."""

    def __init__(self, library: ctypes.CDLL):
        self._quantize = library.ggml_quantize_chunk
        self._quantize.restype = ctypes.c_size_t
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._quantize.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
        self._traits = library.ggml_get_type_traits
        self._traits.restype = ctypes.POINTER(_TypeTraits)
        self._traits.argtypes = [ctypes.c_int]

    def require(self, out: TensorType) -> None:
        """Check that the library has a type with the layout expected here.

        Raises:
            InputError: It is of another version of ggml.
        """
        traits = self._traits(out.type_id).contents
        found = (traits.type_name or b"").decode(), traits.blck_size, traits.type_size
        if (found[0].lower(), *found[1:]) != (out.name, out.block, out.block_bytes):
            raise InputError(
                f"ggml's library has no {out.name} as type {out.type_id} (but {found[0] or '?'}), "
                "expected the build of this toolkit",
                hint="build it with `make build`",
            )

    def quantize(self, values: np.ndarray, out: TensorType, row: int) -> np.ndarray:
        """Quantise whole rows.

        Args:
            values: float32, flat, contiguous, finite.
            row: Elements per row, a multiple of the type's block.

        Returns:
            uint8, flat: the blocks as they stand in a GGUF.
        """
        import numpy as np

        encoded = np.empty(out.nbytes(values.size), np.uint8)
        self._quantize(
            out.type_id, values.ctypes.data, encoded.ctypes.data, 0, values.size // row, row, None
        )
        return encoded

    def dequantize(self, raw: np.ndarray, out: TensorType) -> np.ndarray:
        """Decode whole blocks (uint8, flat, contiguous) to float32, flat."""
        import numpy as np

        values = np.empty(raw.size // out.block_bytes * out.block, np.float32)
        to_float = self._traits(out.type_id).contents.to_float
        to_float(raw.ctypes.data, values.ctypes.data, values.size)
        return values


@cache
def load() -> Ggml:
    """Load the library, found where dflash_cpp finds it (DFLASH_LIB_PATH, else its `lib`).

    Raises:
        InputError: It is missing or does not load.
    """
    from dflash_cpp._libs import find_library, library_dir

    path = find_library("ggml-base")
    hint = f"build it with `make build`; without it {', '.join(BUILT_IN)} can be written"
    if path is None:
        raise InputError(f"ggml's library (ggml-base) is not in `{library_dir()}`", hint=hint)
    try:
        return Ggml(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as exc:
        raise InputError(f"`{path}` does not load ({exc})", hint=hint) from None
