"""The tie rule alone, on made-up logits."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_cpp.parity import MISMATCH, TIE, first_difference, judge

PLAIN, SPECULATIVE, OTHER = 3, 5, 7


def near_tie() -> tuple[np.ndarray, np.ndarray]:
    """Two scorings of one prefix that differ by rounding and choose different tokens."""
    rng = np.random.default_rng(0)
    a = rng.normal(0.0, 1.0, 64).astype(np.float32)
    a[[PLAIN, SPECULATIVE, OTHER]] = 9.0, 8.999, 8.0
    b = a + rng.uniform(-0.004, 0.004, 64).astype(np.float32)
    b[[PLAIN, SPECULATIVE]] = 8.998, 9.001
    return a, b


def test_near_tie_is_a_tie() -> None:
    a, b = near_tie()
    verdict = judge(a, b, PLAIN, SPECULATIVE, cap=0.01)
    assert verdict.verdict == TIE
    assert verdict.margin == pytest.approx(0.001, abs=1e-5)
    assert verdict.margin_blocks == pytest.approx(0.003, abs=1e-5)
    assert verdict.delta == pytest.approx(float(np.abs(a - b).max()))
    assert verdict.bound == 2 * verdict.delta
    # what the bound means: nothing larger can be undone by such rounding
    assert verdict.margin <= verdict.bound


def test_another_token_than_the_target_chooses_in_blocks_is_a_mismatch() -> None:
    a, b = near_tie()
    # its margin is within the bound of this rounding, yet the target never chooses it
    b[OTHER] = b[SPECULATIVE] - 1e-4
    a[OTHER] = a[PLAIN] - 1e-4
    verdict = judge(a, b, PLAIN, OTHER, cap=10.0)
    assert verdict.verdict == MISMATCH
    assert "in the same blocks" in verdict.reason


def test_another_token_than_plain_decoding_chooses_is_a_mismatch() -> None:
    a, b = near_tie()
    verdict = judge(a, b, OTHER, SPECULATIVE, cap=10.0)
    assert verdict.verdict == MISMATCH
    assert "one row at a time" in verdict.reason


def test_more_than_rounding_is_a_mismatch() -> None:
    # a kernel that is wrong for blocks explains the difference, and must not excuse itself
    a, b = near_tie()
    b[SPECULATIVE] += 2.0
    verdict = judge(a, b, PLAIN, SPECULATIVE, cap=0.01)
    assert verdict.verdict == MISMATCH
    assert "more than" in verdict.reason


def test_equal_scorings_never_tie() -> None:
    a, _ = near_tie()
    assert judge(a, a, PLAIN, SPECULATIVE, cap=10.0).verdict == MISMATCH


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_a_mismatch(bad: float) -> None:
    a, b = near_tie()
    b[OTHER] = bad
    verdict = judge(a, b, PLAIN, SPECULATIVE, cap=10.0)
    assert verdict.verdict == MISMATCH
    assert "not finite" in verdict.reason


def test_tokens_ruled_out_in_both_scorings_do_not_count() -> None:
    a, b = near_tie()
    a[OTHER] = b[OTHER] = -np.inf
    assert judge(a, b, PLAIN, SPECULATIVE, cap=0.01).verdict == TIE
    b[OTHER] = 0.0
    assert judge(a, b, PLAIN, SPECULATIVE, cap=0.01).verdict == MISMATCH


@pytest.mark.parametrize(
    ("a", "b", "index"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [], 0),
        ([], [], None),
    ],
)
def test_first_difference(a: list[int], b: list[int], index: int | None) -> None:
    assert first_difference(a, b) == index
