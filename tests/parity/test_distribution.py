"""The distribution test alone: its tail against scipy, and what it can and cannot see."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2, kstest

from dflash_cpp.distribution import N_TOKENS, chi_square, chi_square_tail, compare_texts


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 101])
@pytest.mark.parametrize("x", [0.0, 0.01, 1.0, 5.5, 40.0, 300.0, 3000.0])
def test_tail(x: float, freedom: int) -> None:
    expected = float(chi2.sf(x, freedom))
    assert chi_square_tail(x, freedom) == pytest.approx(expected, rel=1e-9, abs=1e-290)


def draw(rng: np.random.Generator, p: list[float], n: int) -> list[int]:
    return list(rng.choice(len(p), n, p=p))


def test_p_values_are_uniform_without_a_fault() -> None:
    """1,000 honest comparisons: p-values like a uniform variable (they are a little coarse)."""
    rng = np.random.default_rng(1)
    p = [0.4, 0.3, 0.15, 0.1, 0.05]
    found = [chi_square(draw(rng, p, 400), draw(rng, p, 400))[2] for _ in range(1000)]
    assert kstest(found, "uniform").pvalue > 1e-3


def test_a_moved_tenth_is_seen() -> None:
    rng = np.random.default_rng(2)
    a = draw(rng, [0.5, 0.3, 0.2], 1000)
    b = draw(rng, [0.4, 0.3, 0.3], 1000)
    cells, statistic, p = chi_square(a, b)
    assert cells == 3
    assert statistic is not None
    assert p is not None
    assert p < 1e-4


def test_rare_values_are_put_together() -> None:
    a, b = [0] * 90 + list(range(10, 20)), [0] * 90 + list(range(30, 40))
    cells, statistic, _ = chi_square(a, b)
    assert (cells, statistic) == (2, 0.0)
    assert chi_square([0] * 50, [0] * 50) == (1, None, None)
    assert chi_square([], []) == (0, None, None)
    with pytest.raises(ValueError, match="different sizes"):
        chi_square([1], [])


def test_every_position_and_pair_is_tested() -> None:
    texts = [(1, 2, i % 2, i % 4) for i in range(200)]
    wrong = [(1, 2, 1, i % 4) for i in range(200)]
    found = {t.what: t for t in compare_texts(texts, wrong, "a", 1.0)}
    assert len(found) == 2 * N_TOKENS - 1
    assert found["token 1"].p is None
    low = [what for what, t in found.items() if t.p is not None and t.p < 1e-6]
    assert low == ["token 3", "tokens 2-3", "tokens 3-4"]
