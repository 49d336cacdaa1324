"""Turn stored weights into the types of a GGUF, piece by piece, and back for verification.

f32, f16, bf16 and q8_0 need numpy and gguf only; the base's own converter uses the same routines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .schema import OutType

if TYPE_CHECKING:
    import numpy as np

# Largest magnitude a type can hold; q8_0 stores the step of a block as f16.
LARGEST = {"f16": 65504.0, "q8_0": 65504.0 * 127}

# Types whose bits may be copied as they are.
_SAME = {("F32", "f32"), ("F16", "f16"), ("BF16", "bf16")}


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


def encode(stored: np.ndarray, dtype: str, out: OutType, row: int) -> np.ndarray:
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

    if (dtype, out.name) in _SAME:
        return stored
    if out.name == "i64":
        return stored.astype("<i8")
    values = to_f32(stored, dtype)
    if out.name == "f32":
        return values.astype("<f4", copy=False)
    if out.name == "f16":
        return values.astype("<f2")
    if out.name == "bf16":
        # To nearest even; NaN cannot occur, it was refused before.
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return quantize(values.reshape(-1, row), GGMLQuantizationType(out.type_id))


def decode(raw: np.ndarray, out: OutType) -> np.ndarray:
    """Decode bytes of the GGUF (uint8, flat) to float32, or int64 for ids."""
    import numpy as np

    if out.name == "i64":
        return raw.view("<i8")
    if out.name == "q8_0":
        blocks = raw.view(np.dtype([("scale", "<f2"), ("values", "i1", 32)]))
        return (blocks["scale"].astype(np.float32)[:, None] * blocks["values"]).ravel()
    name, bits = {"f32": ("F32", "<f4"), "f16": ("F16", "<f2"), "bf16": ("BF16", "<u2")}[out.name]
    return to_f32(raw.view(bits), name)


def allowed_error(values: np.ndarray, out: OutType) -> np.ndarray:
    """Return the largest error that rounding to `out` may leave, per value.

    Args:
        values: Source values, float32, whole rows, flat.

    Returns:
        float32, same shape. Half a unit in the last place: 2**-11 (f16) or 2**-8 (bf16) of the
        value, 2**-25 at least for f16, whose small values are spaced evenly. q8_0: half a step of
        the block's largest value / 127, plus what rounding that step to f16 moves a value by.
    """
    import numpy as np

    magnitude = np.abs(values)
    if out.name == "f16":
        return np.maximum(magnitude * np.float32(2**-11), np.float32(2**-25))
    if out.name == "bf16":
        return np.maximum(magnitude * np.float32(2**-8), np.float32(2**-134))
    if out.name == "q8_0":
        largest = magnitude.reshape(-1, 32).max(axis=1)
        step = largest / 127
        # The stored step is off by 2**-11 of itself or 2**-25, times at most 127; a hair on top
        # for the float32 arithmetic of the encoder.
        bound = step * np.float32(0.5001) + np.maximum(
            largest * np.float32(2**-11), np.float32(127 * 2**-25)
        )
        return np.repeat(bound, 32)
    return np.zeros_like(magnitude)


def deinterleave(stored: np.ndarray, head_dim: int, width: int) -> np.ndarray:
    """Reorder heads from interleaved rotary pairs to halves: even rows first, then odd ones.

    Args:
        stored: Whole heads, flat: heads x head_dim x width.
        width: Elements per row of a head (1 for a norm).
    """
    pairs = stored.reshape(-1, head_dim // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(-1).copy()
