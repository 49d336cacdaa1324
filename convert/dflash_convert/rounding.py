"""How far a value may move when it is written as a type: what verification allows.

A type with one scale per block, found from the block's extremes, is off by half a step at most, or
by what clipping the far end costs; that holds for every value. The other types *search* for a
scale: they start from the plain one and keep another only if it lowers the sum over a sub-block of
weight times error to some power. So that sum, not the single value, cannot be worse than with the
plain scale, and it is what is compared, with the weights the search uses. Then the scales of the
sub-blocks are rounded themselves, relative to the largest in the super-block; each value is
rounded anew with the rounded scale, which only helps. By the triangle inequality (Minkowski's) the
two parts add up:

    mean(weight * error**p) ** (1/p)  <=  plain * amax(sub-block) + scales * amax(super-block)

where the mean is weighted. Scales are kept as f16: 2**-11 of the value, and where they are
subnormal 2**-25 times the largest factor a scale is multiplied with.

In the table, with A the largest magnitude of a sub-block:

    q8_0            A/127 is a step: half of it
    q4_0, q5_0      A/8 (A/16) is a step, and the end opposite to the extreme is clipped by one
    q4_1, q5_1      a step is a fifteenth (31st) of max - min, at most 2A: half of it
    q1_0            +-mean, so at most A
    q2_0, tq*       steps of A: half of one
    mxfp4           clips above 6/8 of A: a quarter; between 4 and 6 an error of 1 of at least 4
    nvfp4           scale A/6 rounded to 3 bits: half the gap of 2 steps, with 1/16 on top
    q2_k            (max - min)/3 is a step, at most 2A/3; search by weight |x|, power 1
    q4_k, q5_k      like q4_1, q5_1; the weights rms + |x| differ by at most 2 between value and
                    mean, so without weights by a factor of sqrt(2)
    q3_k, q6_k      like q4_0: steps of A/4 (A/32), clipped by one; search by weight x**2, power 2
    iq4_nl, iq4_xs  values -127 to 113: clips by 14/127; half gaps are smaller; weight x**2
    iq3_s           groups of four from a code book: no group is more than three levels away from it
                    (all 4096 were tried), so half a step and three levels of the largest scale
                    that is tried, A/13.2; weight x**2. The search picks groups by another weight,
                    so this one is no proof; the worst of 100,000 blocks of many kinds reached 0.3

`scales` follows from the bits of a sub-block's scale: half a step of the largest scale (q3_k,
q6_k, iq4_xs: a whole one at the end that is clipped) times the largest factor, and twice that,
because a searched scale may be larger than the plain one; for min-max types once more for the
minimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .tensor_types import TensorType

if TYPE_CHECKING:
    import numpy as np

_F16_UNIT = 2.0**-11
_F16_SUBNORMAL_UNIT = 2.0**-25
_E4M3_UNIT = 2.0**-9  # a whole one: below 2**-6 ggml's rounding stops at 7 units


@dataclass(frozen=True)
class Rounding:
    """The inequality above for one type.

    Attributes:
        plain: Bound of the plain quantiser, in units of the sub-block's largest magnitude.
        factor: Largest number that the scale (and minimum) of a block is multiplied with.
        sub_block: Elements per scale; 0 when that is the block.
        scales: Bound of what rounding the scales adds, in units of the block's largest magnitude.
        power: 0 when the bound holds for each value, else p of the weighted mean.
        weight: Power of |x| in the weight.
    """

    plain: float
    factor: int
    sub_block: int = 0
    scales: float = 0.0
    power: int = 0
    weight: int = 0


_MIN_MAX_SCALES = 15 * 2 * (2 / 15) / 126 + 2 / 126
_ROUNDINGS = {
    "q8_0": Rounding(0.5 / 127, 127),
    "q4_0": Rounding(1 / 8, 8),
    "q5_0": Rounding(1 / 16, 16),
    "q4_1": Rounding(1 / 15, 16),
    "q5_1": Rounding(1 / 31, 32),
    "q1_0": Rounding(1.0, 1),
    "q2_0": Rounding(0.5, 1),
    "tq1_0": Rounding(0.5, 1),
    "tq2_0": Rounding(0.5, 1),
    "mxfp4": Rounding(0.25, 0),
    "nvfp4": Rounding(17 / 96, 6, sub_block=16),
    "q2_k": Rounding(1 / 3, 60, 16, 3 * 2 * (2 / 3) / 30 + 2 / 30, power=1, weight=1),
    "q4_k": Rounding(2**0.5 / 15, 63 * 16, 32, _MIN_MAX_SCALES, power=2),
    "q5_k": Rounding(2**0.5 / 31, 63 * 32, 32, _MIN_MAX_SCALES, power=2),
    "q3_k": Rounding(1 / 4, 32 * 4, 16, 4 * 2 * (1 / 4) / 32, power=2, weight=2),
    "q6_k": Rounding(1 / 32, 128 * 32, 16, 32 * 2 * (1 / 32) / 128, power=2, weight=2),
    "iq4_nl": Rounding(14 / 127, 127, power=2, weight=2),
    "iq4_xs": Rounding(14 / 127, 32 * 127, 32, 127 * 2 * (1 / 127) / 32, power=2, weight=2),
    "iq3_s": Rounding(7 / 13.2, 31 * 15, 32, 15 * 2 / 15 * (1 / 31 + 0.033), power=2, weight=2),
}


def moved_too_far(values: np.ndarray, decoded: np.ndarray, out: TensorType) -> np.ndarray:
    """Tell where decoded values are further from their source than the type's rounding explains.

    Args:
        values: Source values, float32, flat, whole rows.
        decoded: The same values after writing, float32, flat.
        out: The type they were written as.

    Returns:
        bool, one per value for f16, bf16 and f32, else one per sub-block. NaN counts as too far.
    """
    import numpy as np

    error = decoded - values
    np.abs(error, out=error)
    magnitude = np.abs(values)
    if not out.quantized:
        return ~(error <= _float_rounding(magnitude, out))
    r = _ROUNDINGS[out.name]
    size = r.sub_block or out.block
    error, magnitude = error.reshape(-1, size), magnitude.reshape(-1, size)
    largest = _row_max(magnitude)
    in_block = _row_max(largest.reshape(-1, out.block // size))
    allowed = largest * np.float32(r.plain)
    # Half a unit of an f16 scale, doubled for the sums in float32.
    allowed += np.repeat(in_block * np.float32(r.scales + 2 * _F16_UNIT), out.block // size)
    allowed += np.float32(r.factor * (_E4M3_UNIT if out.name == "nvfp4" else _F16_SUBNORMAL_UNIT))
    return ~(_spread(error, magnitude, largest, r) <= allowed)


def _float_rounding(magnitude: np.ndarray, out: TensorType) -> np.ndarray:
    """Half a unit in the last place, at least that of the smallest numbers; zero for f32."""
    import numpy as np

    unit, least = {"f32": (0.0, 0.0), "f16": (2**-11, 2**-25), "bf16": (2**-8, 2**-134)}[out.name]
    return np.maximum(magnitude * np.float32(unit), np.float32(least))


def _spread(
    error: np.ndarray, magnitude: np.ndarray, largest: np.ndarray, r: Rounding
) -> np.ndarray:
    """The largest error of each row, or its weighted mean."""
    import numpy as np

    if not r.power:
        return _row_max(error)
    size = error.shape[1]
    if not r.weight:
        return np.sqrt(np.einsum("ij,ij->i", error, error) / np.float32(size))
    # Weights relative to the largest, so that their squares neither vanish nor overflow; a row of
    # zeros has no weights, there the mean is a plain one.
    zeros = largest == 0
    weight = magnitude / np.where(zeros, np.float32(1), largest)[:, None]
    weight[zeros] = 1
    if r.power == 1:
        return np.einsum("ij,ij->i", weight, error) / weight.sum(axis=1)
    error *= weight
    squares = np.einsum("ij,ij->i", error, error)
    return np.sqrt(squares / np.einsum("ij,ij->i", weight, weight))


def _row_max(rows: np.ndarray) -> np.ndarray:
    """The largest element of each row (NaN if there is one); rows have 2**n elements."""
    import numpy as np

    # Pairs of neighbours, again and again: several times as fast as `max` along short rows.
    out, left = rows.reshape(-1), rows.shape[1]
    while left > 1:
        out, left = np.maximum(out[0::2], out[1::2]), left // 2
    return out
