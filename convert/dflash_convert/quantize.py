"""Turn stored weights into the types of a GGUF, piece by piece, and back for verification.

f32, f16, bf16 and q8_0 need numpy and gguf only; every other type is made by ggml's library.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from . import ggml
from .errors import InputError
from .tensor_types import BUILT_IN, TensorType

if TYPE_CHECKING:
    import numpy as np

# Largest magnitude of each stored type, and of each written type where it is not that of f16, in
# which blocks keep their scale or minimum. nvfp4 has e4m3 scales, which ggml rounds well up to 256;
# a value is at most 6 of its scale.
_STORED_LARGEST = {"F32": 3.4028235e38, "BF16": 3.3895314e38, "F16": 65504.0}
_F16_LARGEST = 65504.0
_LARGEST = {
    "f32": 3.4028235e38,
    "bf16": 3.3895314e38,
    "q8_0": _F16_LARGEST * 127,
    "mxfp4": 6.0 * 2.0**125,
    "nvfp4": 256.0 * 6,
}


def largest(out: TensorType) -> float:
    """Return the largest magnitude that may be written as `out`."""
    return _LARGEST.get(out.name, _F16_LARGEST)


def may_exceed(dtype: str, out: TensorType) -> bool:
    """Tell whether a value stored as `dtype` can be larger than `out` holds."""
    return out.name != "i64" and _STORED_LARGEST[dtype] > largest(out)


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


def not_finite(stored: np.ndarray, dtype: str) -> int:
    """Count NaN and infinite values among stored ones (float types only)."""
    import numpy as np

    masks = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
    bits, exponent = masks[dtype]
    exponents = stored.view(bits) & exponent
    return int(np.count_nonzero(exponents == exponent))


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
