"""The text of `DFlashLlama` is that of `llama_cpp.Llama`, token by token, whatever is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twins import PROMPT, TEXT, Twins, answer, first_difference, take

pytestmark = pytest.mark.native


def test_greedy(twins: Twins) -> None:
    tokens = twins.same(lambda llm: take(llm, PROMPT, 200, temp=0.0))
    stats = twins.ours.last_stats
    assert stats.mode == "draft-dflash"
    assert stats.reason is None
    assert stats.rule == "greedy"
    assert stats.emitted == len(tokens) == 200
    assert stats.prompt_tokens == len(PROMPT)
    # the draft knows the target's rule but not its drift: less means that it is fed wrongly
    assert stats.acceptance_rate > 0.15
    assert stats.mean_accepted_length == 1 + stats.accepted / stats.rounds > 2
    assert sum(stats.per_position_accepted) == stats.accepted
    assert sum(stats.per_position_drafted) == stats.drafted
    assert all(np.diff(stats.per_position_drafted) <= 0)
    # every round but the first token of the text emits what it accepted and one more
    assert 0 <= stats.rounds + stats.plain_rounds + stats.accepted - (stats.emitted - 1) < 8


def test_text_depends_on_context(twins: Twins) -> None:
    """Otherwise a memory out of step would not show in any comparison here."""
    text = take(twins.plain, PROMPT, 120, temp=0.0)
    assert take(twins.plain, PROMPT[:20] + text[60:80], 40, temp=0.0) != text[80:]


SAMPLERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temp": 2.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "cold": {"temp": 0.1},
    "dist": {"temp": -1.0},
    "typical": {"typical_p": 0.5, "temp": 1.5},
    "mirostat 1": {"mirostat_mode": 1, "mirostat_tau": 4.0, "temp": 1.5},
    "mirostat 2": {"mirostat_mode": 2, "mirostat_tau": 3.0, "temp": 1.5},
    "penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.7},
    "greedy penalties": {"temp": 0.0, "repeat_penalty": 1.2, "frequency_penalty": 0.2},
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("seed", [1, 123456])
def test_sampling(twins: Twins, sampler: str, seed: int) -> None:
    def ask(llm: Any) -> list[int]:
        llm.set_seed(seed)
        return take(llm, PROMPT, 80, **SAMPLERS[sampler])

    twins.same(ask)
    stats = twins.ours.last_stats
    assert stats.mode == "draft-dflash"
    assert stats.rule == ("greedy" if "greedy" in sampler else "match")
    assert stats.rounds > 0


def test_seeds_differ(twins: Twins) -> None:
    """Otherwise the comparison of samplers would say nothing."""
    texts = set()
    for seed in range(4):
        twins.ours.set_seed(seed)
        texts.add(tuple(take(twins.ours, PROMPT, 60, temp=2.5, top_k=0, min_p=0.0)))
    assert len(texts) == 4


def test_grammar(twins: Twins) -> None:
    from dflash_cpp._memory import llama_cpp

    grammar = llama_cpp.LlamaGrammar.from_string(
        'root ::= item ("," item)*\nitem ::= [a-z]+ "=" [0-9]+', verbose=False
    )
    for temperature in (0.0, 1.0):
        said = twins.same(
            lambda llm, t=temperature: answer(
                llm.create_completion(TEXT, grammar=grammar, temperature=t, max_tokens=60, seed=3)
            )
        )
        assert said[0]["choices"][0]["text"]
    assert twins.ours.last_stats.mode == "draft-dflash"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 8, 9, 16, 33])
@pytest.mark.parametrize("stream", [False, True])
def test_completion(twins: Twins, max_tokens: int, stream: bool) -> None:
    said = twins.same(
        lambda llm: answer(
            llm.create_completion(
                TEXT, max_tokens=max_tokens, temperature=0.7, seed=5, stream=stream
            )
        )
    )
    assert said[-1]["choices"][0]["finish_reason"] == "length"
    # the session was told the limit: nothing is drafted beyond it
    assert twins.ours._session.n_past == twins.ours.n_tokens


def test_completion_options(twins: Twins) -> None:
    for options in (
        {"echo": True},
        {"suffix": " and that is all"},
        {"max_tokens": None, "stop": ["zzzz"]},
        {"max_tokens": -1},
        {"top_k": 3, "repeat_penalty": 1.1, "presence_penalty": 0.5},
    ):
        twins.forget()
        twins.same(
            lambda llm, o=options: answer(
                llm.create_completion(TEXT, **({"max_tokens": 20, "seed": 1} | o))
            )
        )
    twins.same(lambda llm: answer(llm.create_completion(PROMPT, max_tokens=12, seed=1)))


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(twins: Twins, stream: bool) -> None:
    """A stop string at every place of a block ends the text where plain decoding ends it."""
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0}
    whole = twins.plain.create_completion(TEXT, **options)["choices"][0]["text"]
    assert len(whole) > 40
    for start in range(4, 24, 3):
        twins.forget()
        stop = whole[start : start + 4]
        said = twins.same(
            lambda llm, s=stop: answer(
                llm.create_completion(TEXT, stop=[s, "never"], stream=stream, **options)
            )
        )
        text = "".join(part["choices"][0]["text"] for part in said)
        assert stop not in text
        assert said[-1]["choices"][0]["finish_reason"] == "stop"


def test_chat(twins: Twins) -> None:
    messages = [
        {"role": "system", "content": "short answers"},
        {"role": "user", "content": "count"},
    ]
    json = {"type": "json_object"}
    for options in ({}, {"stream": True}, {"response_format": json}, {"temperature": 0.0}):
        twins.forget()
        twins.same(
            lambda llm, o=options: answer(
                llm.create_chat_completion(messages, max_tokens=24, seed=2, **o)
            )
        )
        assert twins.ours.last_stats.mode == "draft-dflash"


def test_stopping_criteria_see_the_same(twins: Twins) -> None:
    def ask(llm: Any, at: int) -> tuple[list[int], list[list[int]]]:
        calls: list[list[int]] = []

        def stop(ids: Any, scores: Any) -> bool:
            assert scores.shape == (llm.n_vocab(),)
            calls.append(ids.tolist())
            return len(calls) == at

        return take(llm, PROMPT, 50, temp=0.0, stopping_criteria=stop), calls

    for at in (1, 2, 5, 6, 7, 8, 9, 30):
        twins.forget()
        tokens, calls = twins.same(lambda llm, at=at: ask(llm, at))
        assert len(tokens) == at - 1
        assert len(calls) == at


@pytest.mark.parametrize(("n_draft", "p_min"), [(1, 0.0), (2, 0.0), (5, 0.9), (7, 0.3)])
def test_draft_lengths(tmp_path: Path, opened_twins: Twins, n_draft: int, p_min: float) -> None:
    files = (opened_twins.plain.model_path, opened_twins.ours._draft_path)
    other = Twins((Path(files[0]), Path(files[1])), n_draft=n_draft, p_min=p_min)
    try:
        other.same(lambda llm: take(llm, PROMPT, 60, temp=0.0))
        stats = other.ours.last_stats
        assert other.ours.n_draft == n_draft
        assert len(stats.per_position_drafted) == n_draft
        assert stats.drafted <= n_draft * stats.rounds
    finally:
        other.close()


@pytest.mark.parametrize("batch", [(64, 16), (16, 16), (8, 4), (4, 2)])
def test_small_batches(opened_twins: Twins, batch: tuple[int, int]) -> None:
    """Blocks wider than a micro-batch, prompts wider than a batch."""
    files = (Path(opened_twins.plain.model_path), Path(opened_twins.ours._draft_path))
    other = Twins(files, n_batch=batch[0], n_ubatch=batch[1])
    try:
        other.same(lambda llm: take(llm, PROMPT, 40, temp=0.0))
        assert other.ours.last_stats.accepted > 0
    finally:
        other.close()


def test_last_token_drafted(twins: Twins) -> None:
    flags = []
    for _ in zip(twins.ours.generate(PROMPT, temp=0.0), range(150), strict=False):
        flags.append(twins.ours.last_token_drafted)
    stats = twins.ours.last_stats
    assert flags[0] is False
    assert stats.accepted - 7 <= sum(flags) <= stats.accepted
    runs = "".join("d" if f else "t" for f in flags).split("t")
    assert max(map(len, runs)) <= 7


def test_trace(opened_twins: Twins) -> None:
    files = (Path(opened_twins.plain.model_path), Path(opened_twins.ours._draft_path))
    other = Twins(files, draft_trace=True)
    try:
        generator = other.ours.generate(PROMPT, temp=0.0)
        text = [next(generator) for _ in range(2)]
        trace = other.ours.draft_trace()
        generator.close()
        assert trace.anchor == text[0]
        assert trace.pos == len(PROMPT)
        assert trace.candidates.shape == trace.scores.shape == (7, 16)
        assert trace.logits.shape == (7, other.ours.n_vocab())
        assert trace.lattice.shape == (7, 16, 16)
        assert np.isfinite(trace.hidden).all()
        best = trace.candidates[np.arange(7), trace.scores.argmax(axis=1)]
        assert tuple(best[: len(trace.draft)]) == trace.draft
        # candidates are the best of the logits
        top = np.sort(trace.logits, axis=1)[:, -16]
        assert (np.take_along_axis(trace.logits, trace.candidates, 1).min(axis=1) == top).all()
    finally:
        other.close()


@pytest.mark.parametrize("fault", ["wrong token", "token lost", "token twice"])
def test_comparison_notices_a_fault(
    twins: Twins, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accepted token that the target did not choose must show."""
    from dflash_cpp.session import Session, StepResult

    step, rounds = Session.step, iter(range(1000))

    def broken(self: Session, *args: Any) -> StepResult:
        result = step(self, *args)
        if next(rounds) != 3:
            return result
        tokens = result.tokens
        tokens = {
            "wrong token": ((tokens[0] + 1) % 500, *tokens[1:]),
            "token lost": tokens[1:] or (0,),
            "token twice": (tokens[0], *tokens),
        }[fault]
        return StepResult(tokens, result.n_accepted)

    expected = take(twins.plain, PROMPT, 60, temp=0.0)
    monkeypatch.setattr(Session, "step", broken)
    assert first_difference(take(twins.ours, PROMPT, 60, temp=0.0), expected) is not None
