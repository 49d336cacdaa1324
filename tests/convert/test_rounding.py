"""The bound of each type: real encodings stay within it, faulty ones do not."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_convert import ggml
from dflash_convert.quantize import largest
from dflash_convert.rounding import moved_too_far
from dflash_convert.tensor_types import TENSOR_TYPES, TensorType

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("lib_dir")]

QUANTIZED = [t for t in TENSOR_TYPES.values() if t.quantized]
ROW, ROWS = 1024, 64

_each_type = pytest.mark.parametrize("out", QUANTIZED, ids=lambda t: t.name)


def _weights() -> dict[str, np.ndarray]:
    """Weights of many kinds, flat."""
    rng = np.random.default_rng(0)
    size = ROW * ROWS
    normal = rng.normal(size=size)
    kinds = {
        "normal": 0.02 * normal,
        "heavy tails": 0.02 * rng.standard_t(2, size=size),
        "outliers": 0.01 * rng.standard_cauchy(size),
        "positive": np.abs(normal),
        "negative": -np.abs(normal),
        "uniform": rng.uniform(-1, 1, size),
        "offset": 1 + 0.001 * normal,
        "constant": np.full(size, 0.3),
        "zero": np.zeros(size),
        "tiny": 1e-6 * normal,
        "below f16": 1e-9 * normal,
        "large": 5000 * normal,
        "scales by block": normal * np.exp(4 * rng.normal(size=size // 256)).repeat(256),
        "scales by 16": normal * np.exp(4 * rng.normal(size=size // 16)).repeat(16),
    }
    return {name: values.astype(np.float32) for name, values in kinds.items()}


def _written(values: np.ndarray, out: TensorType) -> np.ndarray:
    return ggml.load().dequantize(ggml.load().quantize(values, out, ROW), out)


@_each_type
def test_encodings_stay_within_the_bound(out: TensorType) -> None:
    limit = min(largest(out), 65504.0)
    for kind, weights in _weights().items():
        values = np.clip(weights, -limit, limit)
        far = moved_too_far(values, _written(values, out), out)
        assert not far.any(), kind


@_each_type
@pytest.mark.parametrize("fault", ["sign", "scale", "nan", "other block"])
def test_a_wrong_block_is_found(out: TensorType, fault: str) -> None:
    """The bound is no blank cheque: one block that is decoded wrongly is found, and only that."""
    values = _weights()["normal"]
    decoded = _written(values, out)
    start = ROW * ROWS // 2
    block = slice(start, start + out.block)
    if fault == "sign":
        decoded[block] *= -1
    elif fault == "scale":
        decoded[block] *= 4
    elif fault == "nan":
        decoded[start + 3] = np.nan
    else:
        values[block] /= 8  # a larger block stands in its place
    blocks = moved_too_far(values, decoded, out).reshape(len(decoded) // out.block, -1)
    assert np.flatnonzero(blocks.any(axis=1)).tolist() == [start // out.block]


def test_a_real_fault_is_found() -> None:
    """ggml's iq3_s encoder does not step over a block of zeros: what follows lands in its place."""
    out = TENSOR_TYPES["iq3_s"]
    values = _weights()["normal"]
    start = ROW * ROWS // 2
    values[start : start + 32] = 0
    blocks = moved_too_far(values, _written(values, out), out).reshape(-1, out.block // 32)
    assert np.flatnonzero(blocks.any(axis=1)).tolist() == [start // out.block]


@pytest.mark.parametrize("name", ["f16", "bf16", "f32"])
def test_the_bound_of_floats_is_half_a_unit(name: str) -> None:
    out = TENSOR_TYPES[name]
    values = np.array([1.0, 1e-3, 3e-6, 1e-7], np.float32)
    unit = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 0.0}[name]
    inside = (values + 0.99 * unit * np.array([1, 1, 0, 0]) * values).astype(np.float32)
    assert not moved_too_far(values, inside, out).any()
    outside = (values * (1 + 1.1 * unit + 1e-6)).astype(np.float32)
    assert moved_too_far(values, outside, out)[:2].all()
