"""How llama-server verifies drafts: rules, probabilities, grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from bigram import Bigram

from dflash_cpp.server import LlamaServer

pytestmark = pytest.mark.native

PROMPT = [40, 41, 42, 60]
N_MAX = ("--spec-draft-n-max", 7)


def complete(server: LlamaServer, **options: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "n_predict": 48, "temperature": 0.0, "return_tokens": True} | options
    with httpx.Client(trust_env=False, timeout=120.0) as http:
        answer = http.post(f"{server.url}/completion", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("post", [False, True], ids=["pre-sampling", "post-sampling"])
def test_probabilities_are_those_without_a_draft(
    bigram: Callable[..., Bigram], start: Any, post: bool
) -> None:
    """Rounds with none, some and all tokens accepted; the margin covers batches of other widths."""
    pair = bigram("llama")
    options = {"n_probs": 5, "post_sampling_probs": post}
    if post:  # greedy leaves one token: sample from few instead, by the rule that keeps the seed
        options |= {"temperature": 1.5, "top_k": 4, "seed": 3}
    expected = complete(start(pair.target, None), **options)
    found = complete(
        start(pair.target, pair.draft, *N_MAX, "--spec-draft-verify", "match"), **options
    )
    assert found["tokens"] == expected["tokens"]
    assert 0 < found["timings"]["draft_n_accepted"] < found["timings"]["draft_n"]

    value, top = ("prob", "top_probs") if post else ("logprob", "top_logprobs")
    pairs = list(
        zip(
            expected["completion_probabilities"],
            found["completion_probabilities"],
            strict=True,
        )
    )
    assert len(pairs) == 48
    for a, b in pairs:
        assert a["id"] == b["id"]
        assert b[value] == pytest.approx(a[value], abs=2e-2)
        assert [t[value] for t in b[top]] == pytest.approx([t[value] for t in a[top]], abs=2e-2)
    # the fault this guards against: every drafted token with probability 1
    assert len({round(b[value], 6) for _, b in pairs}) > 10


def test_the_rule_is_reported(bigram: Callable[..., Bigram], start: Any) -> None:
    pair = bigram("llama")
    auto = start(pair.target, pair.draft, *N_MAX)
    match = start(pair.target, pair.draft, *N_MAX, "--spec-draft-verify", "match")
    sampled = {"temperature": 1.5, "top_k": 4, "seed": 3}
    cases: list[tuple[LlamaServer, dict[str, Any], str]] = [
        (auto, {}, "match"),  # greedy
        (auto, sampled, "reject"),
        (auto, sampled | {"mirostat": 2}, "match"),
        (auto, sampled | {"xtc_probability": 0.5, "xtc_threshold": 0.1}, "match"),
        (auto, sampled | {"grammar": "root ::= [a-z ]*"}, "match"),
        (match, sampled, "match"),
    ]
    for server, options, rule in cases:
        timings = complete(server, **options)["timings"]
        assert timings["draft_rule"] == rule, options
        assert timings["draft_n_rounds"] > 0
        assert (timings["draft_n_rounds_reject"] > 0) == (rule == "reject")
        assert sum(timings["draft_n_accepted_per_pos"]) == timings["draft_n_accepted"]
        assert sum(timings["draft_n_per_pos"]) == timings["draft_n"]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.5, "top_k": 4, "seed": 3},
        {"temperature": 1.5, "mirostat": 2, "seed": 3},
        {"temperature": 1.5, "top_k": 8, "seed": 5, "grammar": "root ::= [a-n ]+"},
        {"temperature": 0.0, "grammar": 'root ::= ("ab" | "c")+'},
    ],
    ids=["top-k", "mirostat", "sampled grammar", "greedy grammar"],
)
def test_match_keeps_the_text_of_a_seed(
    bigram: Callable[..., Bigram], start: Any, options: dict[str, Any]
) -> None:
    pair = bigram("llama")
    plain = complete(start(pair.target, None), **options)
    drafted = complete(
        start(pair.target, pair.draft, *N_MAX, "--spec-draft-verify", "match"), **options
    )
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["timings"]["draft_n"] > 0


def test_an_unknown_rule_is_refused(bigram: Callable[..., Bigram], start: Any) -> None:
    from dflash_convert.errors import DFlashError

    pair = bigram("llama")
    with pytest.raises(DFlashError, match="spec-draft-verify"):
        start(pair.target, pair.draft, "--spec-draft-verify", "maybe")


def test_metrics_count_rounds_by_rule_and_length(bigram: Callable[..., Bigram], start: Any) -> None:
    pair = bigram("llama")
    server = start(pair.target, pair.draft, *N_MAX)
    name = "spec_decode_accepted_length"
    assert not any(key.startswith(name) for key in start(pair.target, None).metrics())

    def grown(before: dict[str, float]) -> dict[str, float]:
        return {key: value - before.get(key, 0.0) for key, value in server.metrics().items()}

    for options, rule in (
        ({}, "match"),  # greedy
        ({"temperature": 1.0, "seed": 5}, "reject"),
    ):
        before = server.metrics()
        timings = complete(server, **options)["timings"]
        after = grown(before)
        rounds, accepted = timings["draft_n_rounds"], timings["draft_n_accepted_per_pos"]
        assert after[f'spec_decode_rounds_total{{rule="{rule}"}}'] == rounds > 0
        assert sum(v for k, v in after.items() if k.startswith("spec_decode_rounds")) == rounds
        buckets = [after[f'{name}_bucket{{le="{i + 1}"}}'] for i in range(len(accepted))]
        assert buckets == [rounds - n for n in accepted]
        assert after[f'{name}_bucket{{le="+Inf"}}'] == after[f"{name}_count"] == rounds
        assert after[f"{name}_sum"] == rounds + timings["draft_n_accepted"]
