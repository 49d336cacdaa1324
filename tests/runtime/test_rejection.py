"""Sampled text under drafting has the target's distribution: pairs of tokens, enumerated.

The target decodes the prompt and, for every possible first token, the token after it: p of all
pairs. Then the same prompt is continued again and again with a draft, each time with another seed,
and a G-test compares the pairs. With 4,000 continuations and alpha = 1e-4 a bias of four percent of
the mass is seen; `slow` runs 40,000, which sees one percent. tests/native/test_reject.py checks the
rule alone with more power, planted faults included.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("our_library")]

ALPHA = 1e-4
PROMPT = [40, 41, 42]
ANCHOR = 60

CHAINS: dict[str, dict[str, float]] = {
    "T 1, top-k 4": {"temp": 1.0, "top_k": 4},
    "T 3, top-k 5": {"temp": 3.0, "top_k": 5},
    "T 2, top-p 0.7": {"temp": 2.0, "top_k": 6, "top_p": 0.7},
    "T 3, min-p 0.2": {"temp": 3.0, "top_k": 6, "min_p": 0.2},
}


class Rig:
    """A target with a session on it."""

    def __init__(
        self,
        pair: Any,
        verify: str,
        n_rs_seq: int = 0,
        n_ubatch: int = 512,
        adaptive: bool = False,
    ):
        import llama_cpp

        from dflash_cpp.session import Session

        self.lib = llama_cpp
        defaults = llama_cpp.llama_context_default_params

        def with_snapshots() -> Any:
            params = defaults()
            params.n_rs_seq = n_rs_seq
            return params

        llama_cpp.llama_cpp.llama_context_default_params = with_snapshots
        llama_cpp.llama_context_default_params = with_snapshots
        try:
            self.llm = llama_cpp.Llama(
                str(pair.target),
                n_ctx=256,
                n_ubatch=n_ubatch,
                n_threads=1,
                n_threads_batch=1,
                verbose=False,
            )
        finally:
            llama_cpp.llama_cpp.llama_context_default_params = defaults
            llama_cpp.llama_context_default_params = defaults
        self.session = Session(
            self.llm,
            pair.draft,
            n_threads=1,
            n_threads_batch=1,
            verify=verify,
            adaptive=adaptive,
        )
        self.n_vocab = self.llm.n_vocab()

    def close(self) -> None:
        self.session.close()
        self.llm.close()

    def chain(self, seed: int, temp: float, top_k: int, top_p: float = 1.0, min_p: float = 0.0):
        lib = self.lib
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        for sampler in (
            lib.llama_sampler_init_top_k(top_k),
            lib.llama_sampler_init_top_p(top_p, 1),
            lib.llama_sampler_init_min_p(min_p, 1),
            lib.llama_sampler_init_temp(temp),
            lib.llama_sampler_init_dist(seed),
        ):
            lib.llama_sampler_chain_add(chain, sampler)
        return chain

    def distribution(self, tokens: list[int], **options: float) -> dict[int, float]:
        """p of the next token after `tokens`, by the target and the chain alone."""
        lib = self.lib
        self.session.rollback(0)
        self.session.prompt(tokens)
        logits = lib.llama_get_logits_ith(self.llm.ctx, -1)
        data = (lib.llama_token_data * self.n_vocab)()
        for i in range(self.n_vocab):
            data[i].id, data[i].logit = i, logits[i]
        array = lib.llama_token_data_array(data=data, size=self.n_vocab, selected=-1, sorted=False)
        chain = self.chain(1, **options)
        lib.llama_sampler_apply(chain, ctypes.byref(array))
        p = {array.data[i].id: float(array.data[i].p) for i in range(array.size)}
        lib.llama_sampler_free(chain)
        return {token: value for token, value in p.items() if value > 0}

    def continuation(self, seed: int, **options: float) -> tuple[int, int]:
        """The two tokens after prompt and anchor, drafted and verified."""
        self.session.rollback(0)
        self.session.prompt(PROMPT)
        chain = self.chain(seed, **options)
        try:
            text = list(self.session.step(chain, ANCHOR).tokens)
            while len(text) < 2:
                text += self.session.step(chain, text[-1]).tokens
        finally:
            self.lib.llama_sampler_free(chain)
        return text[0], text[1]


def judge(counts: Counter[tuple[int, int]], p: dict[tuple[int, int], float]) -> float:
    """G-test of pairs; pairs that cannot occur must not have occurred."""
    strangers = {pair for pair in counts if pair not in p}
    assert not strangers, f"pairs outside the target's support: {sorted(strangers)[:5]}"
    n = sum(counts.values())
    expected = np.array([p[pair] * n for pair in p])
    observed = np.array([counts.get(pair, 0) for pair in p])
    rare = expected < 5
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        observed = np.append(observed[~rare], observed[rare].sum())
    seen = observed > 0
    g = 2 * (observed[seen] * np.log(observed[seen] / expected[seen])).sum()
    return float(chi2.sf(g, max(1, len(expected) - 1)))


def check(rig: Rig, trials: int, options: dict[str, float]) -> float:
    first = rig.distribution([*PROMPT, ANCHOR], **options)
    p = {
        (a, b): pa * pb
        for a, pa in first.items()
        for b, pb in rig.distribution([*PROMPT, ANCHOR, a], **options).items()
    }
    assert abs(sum(p.values()) - 1) < 1e-4
    counts = Counter(rig.continuation(1000 + i, **options) for i in range(trials))
    return judge(counts, p)


CASES = [
    ("llama", "reject", 0),
    ("llama", "auto", 0),
    ("llama", "match", 0),
    ("qwen35", "reject", 7),  # rolled back through snapshots
    ("qwen35", "reject", 0),  # rolled back through a checkpoint and a replay
]


@pytest.mark.parametrize(("arch", "verify", "snapshots"), CASES)
def test_pairs_of_tokens(
    make_bigram: Callable[..., Any], arch: str, verify: str, snapshots: int
) -> None:
    rig = Rig(
        make_bigram(arch, wrong=0.2, drift=0.28 if arch == "llama" else 0.15), verify, snapshots
    )
    try:
        assert check(rig, 1500, CHAINS["T 3, top-k 5"]) > ALPHA
        stats = rig.session.stats()
        assert (stats.n_rounds_reject > 0) == (verify != "match")
        assert stats.n_accepted > 0
        assert stats.n_accepted < stats.n_drafted
        assert (stats.n_replayed > 0) == (arch == "qwen35" and snapshots == 0)
        if verify == "reject":
            # acceptance is the sum of min(p, q) over the visited positions, within sampling error
            rate, expected = stats.n_accepted / stats.n_visited, stats.sum_overlap / stats.n_visited
            assert abs(rate - expected) < 5 * np.sqrt(rate * (1 - rate) / stats.n_visited)
        # no draft is accepted more often than its candidates are probable
        for accepted in (stats.sum_overlap, stats.sum_top):
            assert accepted <= stats.sum_reach <= stats.n_visited * (1 + 1e-6)
    finally:
        rig.close()


def test_adaptive_lengths_leave_the_distribution_alone(make_bigram: Callable[..., Any]) -> None:
    rig = Rig(make_bigram("llama", wrong=0.2, drift=0.28), "reject", adaptive=True)
    try:
        assert check(rig, 1500, CHAINS["T 3, top-k 5"]) > ALPHA
        stats = rig.session.stats()
        assert stats.n_rounds_reject > 0
        lengths = np.array(stats.n_drafted_per_pos[:7])
        assert lengths[-1] < lengths[0] or stats.n_skipped > 0
    finally:
        rig.close()


@pytest.mark.slow
@pytest.mark.parametrize("options", CHAINS.values(), ids=CHAINS.keys())
@pytest.mark.parametrize("verify", ["reject", "auto"])
def test_pairs_of_tokens_with_power(
    make_bigram: Callable[..., Any], verify: str, options: dict[str, float]
) -> None:
    rig = Rig(make_bigram("llama", wrong=0.2, drift=0.28), verify)
    try:
        assert check(rig, 20_000, options) > ALPHA
    finally:
        rig.close()


def test_a_seed_is_reproducible(make_bigram: Callable[..., Any]) -> None:
    rig = Rig(make_bigram("llama", wrong=0.2, drift=0.28), "reject")
    try:
        options = CHAINS["T 3, top-k 5"]
        first = [rig.continuation(seed, **options) for seed in range(20)]
        assert [rig.continuation(seed, **options) for seed in range(20)] == first
        assert len(set(first)) > 5
    finally:
        rig.close()


@pytest.mark.parametrize("last", ["greedy", "mirostat-v2", "xtc", "grammar"])
def test_chains_without_a_distribution_match(make_bigram: Callable[..., Any], last: str) -> None:
    rig = Rig(make_bigram("llama"), "reject")
    lib = rig.lib
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    vocab = lib.llama_model_get_vocab(rig.llm.model)
    parts = {
        "greedy": [lib.llama_sampler_init_greedy()],
        "mirostat-v2": [lib.llama_sampler_init_mirostat_v2(1, 5.0, 0.1)],
        "xtc": [lib.llama_sampler_init_xtc(0.5, 0.1, 1, 1), lib.llama_sampler_init_dist(1)],
        "grammar": [
            lib.llama_sampler_init_grammar(vocab, b"root ::= .*", b"root"),
            lib.llama_sampler_init_dist(1),
        ],
    }[last]
    for sampler in parts:
        lib.llama_sampler_chain_add(chain, sampler)
    try:
        rig.session.prompt(PROMPT)
        rig.session.step(chain, ANCHOR)
        stats = rig.session.stats()
        assert stats.n_rounds == 1
        assert stats.n_rounds_reject == 0
    finally:
        lib.llama_sampler_free(chain)
        rig.close()


def test_a_micro_batch_too_small_for_the_snapshots_is_refused(
    make_bigram: Callable[..., Any],
) -> None:
    """llama.cpp would abort at the first decode of several tokens."""
    from dflash_cpp.errors import DFlashTargetError

    pair = make_bigram("qwen35", wrong=0.2, drift=0.15)
    with pytest.raises(DFlashTargetError, match=r"micro-batch of 8 tokens .* at least 9"):
        Rig(pair, "match", n_rs_seq=7, n_ubatch=8)
    Rig(pair, "match", n_rs_seq=7, n_ubatch=9).close()
