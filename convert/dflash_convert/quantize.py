"""Turn stored weights into the types of a GGUF, piece by piece, and back for verification.

f32, f16, bf16 and q8_0 need numpy and gguf only; every other type is made by ggml's library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from . import ggml
from .errors import InputError
from .tensor_types import BUILT_IN, TensorType

if TYPE_CHECKING:
    import numpy as np

# Largest magnitude of each type where it is not that of f16, in which blocks keep their scale or
# minimum. nvfp4's scales are e4m3, rounded well by ggml up to 256; a value is at most 6 of them.
_F16_LARGEST = 65504.0
_LARGEST = {
    "f32": math.inf,
    "bf16": (2 - 2.0**-7) * 2.0**127,
    "q8_0": _F16_LARGEST * 127,
    "mxfp4": 6.0 * 2.0**125,
    "nvfp4": 256.0 * 6,
}


def largest(out: TensorType) -> float:
    """Return the largest magnitude that may be written as `out`."""
    return _LARGEST.get(out.name, _F16_LARGEST)


def to_f32(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Widen stored values to float32.

    Args:
        stored: As read by `SourceTensor.read`; bfloat16 as uint16.
        dtype: safetensors type: F32, F16 or BF16.
    """
    import numpy as np

    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32, copy=False)


def extent(stored: np.ndarray, dtype: str) -> tuple[int, float]:
    """Look at the magnitudes of stored values (float types only, not empty).

    Returns:
        How many are NaN or infinite, and the largest (infinite or NaN if there are such).
    """
    import numpy as np

    bits, positive, infinity = {
        "F32": ("<u4", 0x7FFFFFFF, 0x7F800000),
        "F16": ("<u2", 0x7FFF, 0x7C00),
        "BF16": ("<u2", 0x7FFF, 0x7F80),
    }[dtype]
    # Without the sign the bits are ordered like the values, with infinity and NaN at the end.
    magnitudes = stored.view(bits) & positive
    top = magnitudes.max()
    bad = int(np.count_nonzero(magnitudes >= infinity)) if top >= infinity else 0
    return bad, float(to_f32(np.array([top], bits).view(stored.dtype), dtype)[0])


def encode(stored: np.ndarray, dtype: str, out: TensorType, row: int) -> np.ndarray:
    """Encode stored values for the GGUF.

    Args:
        stored: Whole rows, flat, as read.
        dtype: safetensors type of `stored`.
        out: Type to write.
        row: Elements per row; a multiple of the type's block.

    Returns:
        A contiguous array whose bytes go into the file.
    """
    import numpy as np

    if is_copy(dtype, out):
        return stored
    values = to_f32(stored, dtype)
    if out.name == "f32":
        return values.astype("<f4", copy=False)
    if out.name == "f16":
        return values.astype("<f2")
    if out.name == "bf16":
        # To nearest even; NaN cannot occur, it was refused before.
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    return _routines(out).quantize(np.ascontiguousarray(values), out, row)


def decode(raw: np.ndarray, out: TensorType) -> np.ndarray:
    """Decode bytes of the GGUF (uint8, flat) to float32, or int64 for ids."""
    if out.name == "i64":
        return raw.view("<i8")
    if out.quantized:
        return _routines(out).dequantize(raw, out)
    name, bits = {"f32": ("F32", "<f4"), "f16": ("F16", "<f2"), "bf16": ("BF16", "<u2")}[out.name]
    return to_f32(raw.view(bits), name)


def is_copy(dtype: str, out: TensorType) -> bool:
    """Tell whether the stored bits of `dtype` are those of `out`."""
    return dtype.lower() == out.name


def require_routines(types: Iterable[TensorType]) -> None:
    """Check that tensors can be written as `types`.

    Raises:
        InputError: One of them needs ggml's library, and it is missing or another version.
    """
    for out in types:
        if out.name not in BUILT_IN and out.quantized:
            ggml.load().require(out)


class _Numpy:
    """q8_0 where ggml's library is not built: the same bytes by the gguf package, more slowly."""

    def quantize(self, values: np.ndarray, out: TensorType, row: int) -> np.ndarray:
        from gguf import GGMLQuantizationType
        from gguf.quants import quantize

        return quantize(values.reshape(-1, row), GGMLQuantizationType(out.type_id)).ravel()

    def dequantize(self, raw: np.ndarray, out: TensorType) -> np.ndarray:
        import numpy as np

        blocks = raw.view(np.dtype([("scale", "<f2"), ("values", "i1", 32)]))
        return (blocks["scale"].astype(np.float32)[:, None] * blocks["values"]).ravel()


def _routines(out: TensorType) -> ggml.Ggml | _Numpy:
    try:
        return ggml.load()
    except InputError:
        if out.name not in BUILT_IN:
            raise
        return _Numpy()


def deinterleave(stored: np.ndarray, head_dim: int, width: int) -> np.ndarray:
    """Reorder heads from interleaved rotary pairs to halves: even rows first, then odd ones.

    Args:
        stored: Whole heads, flat: heads x head_dim x width.
        width: Elements per row of a head (1 for a norm).
    """
    pairs = stored.reshape(-1, head_dim // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(-1).copy()
