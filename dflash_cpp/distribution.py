"""Does speculative sampling draw from the distribution of plain sampling? Many short texts of each.

Both sides continue the same prompt with other seeds, so that the samples are independent; a
chi-square test of homogeneity compares how often each token, or pair of tokens, came at a position.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_convert.errors import FailureError

from .run import Sampling

if TYPE_CHECKING:
    from .llama import DFlashLlama

N_TOKENS = 4  # of each text; the first one comes from the prompt's pass and is never drafted
ALPHA = 1e-3  # of all tests of a report together
MIN_CELL = 10  # occurrences in both samples together below which a value counts as `other`
_SEEDS = 1_000_000  # seeds of the two sides lie this far apart

Text = tuple[int, ...]


@dataclass(frozen=True)
class DistributionTest:
    """One comparison of two samples.

    Attributes:
        prompt: Id of the prompt.
        temp: Temperature.
        what: Which tokens: `token 2` or `tokens 2-3`, counted from 1.
        n: Texts of each side.
        cells: Values that were told apart, `other` included.
        statistic: Chi-square; None where everything is one value.
        p: Probability of so large a statistic if both distributions are the same; likewise None.
    """

    prompt: str
    temp: float
    what: str
    n: int
    cells: int
    statistic: float | None
    p: float | None


@dataclass(frozen=True)
class Samples:
    """Short texts of one prompt at one temperature, and what the draft had to do with them."""

    texts: tuple[Text, ...]
    drafted: int
    accepted: int


def sample_texts(
    llm: DFlashLlama,
    prompt: Sequence[int],
    *,
    temp: float,
    n: int,
    first_seed: int,
    on_text: Callable[[], None] = lambda: None,
) -> Samples:
    """Continue a prompt `n` times, each time with another seed; the prompt's memory is kept."""
    texts: list[Text] = []
    drafted = accepted = 0
    sampling = Sampling(temp).keywords()
    for seed in range(first_seed, first_seed + n):
        llm.set_seed(seed)
        generator = llm.generate(prompt, **sampling)
        try:
            texts.append(tuple(t for t, _ in zip(generator, range(N_TOKENS), strict=False)))
        finally:
            generator.close()
        if llm.last_stats is not None:
            drafted += llm.last_stats.drafted
            accepted += llm.last_stats.accepted
        on_text()
    return Samples(tuple(texts), drafted, accepted)


def compare_prompt(
    llm: DFlashLlama,
    name: str,
    prompt: Sequence[int],
    *,
    temp: float,
    n: int,
    seed: int,
    on_text: Callable[[], None] = lambda: None,
) -> list[DistributionTest]:
    """Sample one prompt plainly and speculatively, and test every position.

    Args:
        llm: An open pair; `speculate` is switched off and on again.
        name: Id of the prompt, for the tests.
        prompt: Tokens to continue.
        temp: Temperature, above 0; the rest of the chain is that of `dflash-cpp run`.
        n: Texts of each side.
        seed: Of the first plain text.
        on_text: Called after each of the 2 * n texts.

    Raises:
        FailureError: Nothing was drafted.
    """
    llm.speculate = False
    options: dict[str, Any] = {"temp": temp, "n": n, "on_text": on_text}
    plain = sample_texts(llm, prompt, first_seed=seed, **options)
    llm.speculate = True
    found = sample_texts(llm, prompt, first_seed=seed + _SEEDS, **options)
    if not found.drafted:
        raise FailureError(f"no token was drafted at temperature {temp:g}: nothing to compare")
    return list(compare_texts(plain.texts, found.texts, name, temp))


def compare_texts(
    plain: Sequence[Text], found: Sequence[Text], name: str, temp: float
) -> Iterator[DistributionTest]:
    """Test the token at each position, and neighbouring pairs, of two samples of texts."""
    for size, word in ((1, "token"), (2, "tokens")):
        for start in range(N_TOKENS - size + 1):
            where = f"{start + 1}" if size == 1 else f"{start + 1}-{start + size}"
            a, b = ([t[start : start + size] for t in side] for side in (plain, found))
            cells, statistic, p = chi_square(a, b)
            yield DistributionTest(name, temp, f"{word} {where}", len(a), cells, statistic, p)


def chi_square(
    a: Sequence[Hashable], b: Sequence[Hashable]
) -> tuple[int, float | None, float | None]:
    """Test whether two samples of one size come from one distribution.

    Returns:
        The number of cells, chi-square and its p-value; the latter two are None for one cell.
    """
    if len(a) != len(b):
        raise ValueError("samples of different sizes")
    left, right = Counter(a), Counter(b)
    rare_left = rare_right = 0
    pairs: list[tuple[int, int]] = []
    for value in {**left, **right}:
        x, y = left[value], right[value]
        if x + y < MIN_CELL:
            rare_left, rare_right = rare_left + x, rare_right + y
        else:
            pairs.append((x, y))
    if rare_left + rare_right >= MIN_CELL:
        pairs.append((rare_left, rare_right))
    if len(pairs) < 2:
        return len(pairs), None, None
    # equal sizes: each cell's expectation is half of what both samples have there
    statistic = sum((x - y) ** 2 / (x + y) for x, y in pairs)
    return len(pairs), statistic, chi_square_tail(statistic, len(pairs) - 1)


def chi_square_tail(x: float, freedom: int) -> float:
    """Return the probability that chi-square with `freedom` degrees exceeds `x`.

    For whole degrees the incomplete gamma function is a finite sum.
    """
    half = x / 2
    if freedom % 2:
        total, term, shift = math.erfc(math.sqrt(half)), 2 * math.sqrt(half / math.pi), 1.5
    else:
        total, term, shift = 0.0, 1.0, 1.0
    scale = math.exp(-half)
    for i in range(freedom // 2):
        total += scale * term
        term *= half / (i + shift)
    return min(1.0, total)
