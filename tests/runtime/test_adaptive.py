"""Adaptive draft lengths: the text never depends on them, and hopeless drafts are left out.

What the rule chooses is tested in simulated time (tests/native/test_pace.py); here it runs on real
models, where only things that hold at any speed are asserted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("our_library")]


def random_ids(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([n, seed]).integers(0, 500, n).tolist()


def generate(job: dict[str, Any], n: int) -> tuple[list[int], Any]:
    from our_pair import OurPair

    with OurPair(job, trace=False) as ours:
        text, _ = ours.generate(random_ids(40), n)
        return text, ours.stats()


@pytest.mark.parametrize(
    ("arch", "drift", "snapshots"),
    [("llama", 0.28, 0), ("qwen3", 0.28, 0), ("qwen35", 0.15, 0), ("qwen35", 0.15, 7)],
)
def test_the_text_is_that_of_fixed_lengths(
    arch: str, drift: float, snapshots: int, make_bigram: Callable
) -> None:
    pair = make_bigram(arch, wrong=0.2, drift=drift, busy=True)
    job = {"target": pair.target, "draft": pair.draft, "kv": "f32", "n_rs_seq": snapshots}
    fixed, _ = generate(job, 500)
    text, stats = generate(job | {"adaptive": True}, 500)
    assert text == fixed
    assert stats.n_rounds + stats.n_plain >= 60
    assert stats.pace_plain_ms > 0
    assert stats.pace_draft_ms > 0


def test_a_hopeless_draft_is_left_out(make_pair: Callable) -> None:
    pair = make_pair("llama")  # random weights
    job = {"target": pair.target, "draft": pair.draft, "adaptive": True}
    text, stats = generate(job, 900)
    assert stats.n_accepted < 0.05 * stats.n_drafted
    assert stats.n_skipped > 700
    assert stats.n_drafted < 400
    assert stats.n_plain >= stats.n_skipped
    assert text == generate(job | {"adaptive": False}, 900)[0]


def test_a_sampled_text_with_a_seed_repeats(make_bigram: Callable) -> None:
    from dflash_cpp import DFlashLlama

    pair = make_bigram("llama", wrong=0.2, drift=0.28)
    options = {"max_tokens": 60, "temperature": 3.0, "top_k": 5}
    with DFlashLlama(
        pair.target, draft_path=pair.draft, adaptive=True, n_ctx=512, n_threads=1, verbose=False
    ) as llm:
        texts = [llm(random_ids(40), seed=5, **options)["choices"][0]["text"] for _ in range(4)]
        stats = llm.last_stats
        assert len(set(texts)) == 1
        assert stats is not None
        assert stats.rule == "reject"
        assert stats.skipped_rounds == 0
        assert stats.per_position_drafted[6] >= stats.rounds - 10  # full blocks
        # without a seed lengths are free
        for _ in range(12):
            llm(random_ids(40), **options)
            drafted = llm.last_stats.per_position_drafted
            if drafted[6] < 0.5 * drafted[0] or llm.last_stats.skipped_rounds:
                return
    pytest.fail("lengths never adapted")


def test_the_environment_sets_the_default(
    make_bigram: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_cpp.errors import DFlashArgumentError
    from dflash_cpp.session import ADAPTIVE_VARIABLE, choose_adaptive

    assert choose_adaptive(None) is False  # conftest.py
    assert choose_adaptive(True) is True
    monkeypatch.delenv(ADAPTIVE_VARIABLE)
    assert choose_adaptive(None) is True
    monkeypatch.setenv(ADAPTIVE_VARIABLE, "perhaps")
    with pytest.raises(DFlashArgumentError, match="`perhaps`, expected `on` or `off`"):
        choose_adaptive(None)
