"""Parity on tiny pairs: honest runs are identical, and every planted fault is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from bigram import Bigram

from dflash_convert.errors import FailureError, InputError, run_cli

pytestmark = pytest.mark.native

PROMPTS = ("the cat sat on the mat", "one two three four", "a short tale of the sea")
N_PREDICT = 40


def open_pair(pair: Any, **options: Any) -> Any:
    from dflash_cpp.opening import PairOptions
    from dflash_cpp.opening import open_pair as opener

    return opener(PairOptions(pair.target, pair.draft, n_ctx=512, threads=1, **options))


def check(llm: Any, n_predict: int = N_PREDICT, **options: Any) -> Any:
    from dflash_cpp.caps import delta_cap
    from dflash_cpp.parity import check_parity
    from dflash_cpp.promptset import Prompt

    prompts = [Prompt(str(i), "test", text) for i, text in enumerate(PROMPTS)]
    options = {"cap": delta_cap(llm), "n_predict": n_predict} | options
    return check_parity(llm, prompts, **options)


@pytest.mark.parametrize("arch", tiny.ARCHS)
@pytest.mark.parametrize("n_draft", [None, 1])
def test_honest_pairs_are_identical(
    noisy_bigram: Callable[[str], Bigram], arch: str, n_draft: int | None
) -> None:
    with open_pair(noisy_bigram(arch), n_draft=n_draft) as llm:
        report = check(llm)
    assert report.verdict == "identical"
    assert report.counts == {"identical": len(PROMPTS), "tie": 0, "mismatch": 0}
    # the run has accepted and rejected drafts, so both ways through a round were compared
    drafted = sum(p.stats["draft_n"] for p in report.prompts)
    accepted = sum(p.stats["draft_n_accepted"] for p in report.prompts)
    assert 0 < accepted < drafted


def test_exact_targets_excuse_no_rounding(noisy_bigram: Callable[[str], Bigram]) -> None:
    from dflash_cpp.caps import delta_cap
    from dflash_cpp.info import small_batch_kernels
    from dflash_cpp.parity import summary

    if not small_batch_kernels():
        pytest.skip("no kernels for few columns on this CPU")
    pair = noisy_bigram("llama")
    with open_pair(pair) as llm:
        assert delta_cap(llm).value == 0
        assert delta_cap(llm, 0.5).value == 0.5
        assert "exact here" in summary(check(llm, 4))[-1]
    with open_pair(pair, flash_attn=False) as llm:
        assert delta_cap(llm).value > 0


@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_a_draft_that_is_never_right_changes_nothing(
    random_pair: Callable[[str], tiny.Pair], arch: str
) -> None:
    with open_pair(random_pair(arch)) as llm:
        assert check(llm).verdict == "identical"


# --- planted faults -------------------------------------------------------------------------------


def accept_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token after the accepted ones is some other token than the target's."""
    from dflash_cpp.session import Session, StepResult

    honest = Session.step

    def step(self: Session, sampler: Any, id_last: int, n_draft_max: int = -1) -> StepResult:
        result = honest(self, sampler, id_last, n_draft_max)
        tokens = list(result.tokens)
        tokens[-1] = (tokens[-1] + 1) % 256
        return StepResult(tuple(tokens), len(tokens))

    monkeypatch.setattr(Session, "step", step)


def keep_a_rejected_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rolling back stops one row short: the memory holds another token at the last position."""
    from dflash_cpp.session import Session, StepResult

    honest = Session.step

    def step(self: Session, sampler: Any, id_last: int, n_draft_max: int = -1) -> StepResult:
        result = honest(self, sampler, id_last, n_draft_max)
        n_past = self.n_past
        self.rollback(n_past - 1)
        self.prompt([(result.tokens[0] + 1) % 256])
        return result

    monkeypatch.setattr(Session, "step", step)


def lose_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round does not hand out its last accepted token."""
    from dflash_cpp.session import Session, StepResult

    honest = Session.step

    def step(self: Session, sampler: Any, id_last: int, n_draft_max: int = -1) -> StepResult:
        result = honest(self, sampler, id_last, n_draft_max)
        if result.n_accepted < 2:
            return result
        self.rollback(self.n_past - 1)
        return StepResult(result.tokens[1:], result.n_accepted - 1)

    monkeypatch.setattr(Session, "step", step)


FAULTS = {f.__name__: f for f in (accept_a_wrong_token, keep_a_rejected_row, lose_a_token)}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_mismatches(
    noisy_bigram: Callable[[str], Bigram], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    FAULTS[fault](monkeypatch)
    with open_pair(noisy_bigram("llama")) as llm:
        report = check(llm)
    assert report.verdict == "mismatch"
    bad = next(p for p in report.prompts if p.verdict == "mismatch")
    assert bad.difference is not None
    assert bad.difference.plain != bad.difference.speculative
    assert bad.difference.judgement.reason


def test_a_loose_cap_excuses_no_wrong_token(
    noisy_bigram: Callable[[str], Bigram], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_cpp.caps import Cap

    accept_a_wrong_token(monkeypatch)
    with open_pair(noisy_bigram("llama")) as llm:
        report = check(llm, cap=Cap(1e9, "CPU", "F32", False))
    assert report.verdict == "mismatch"


def test_a_text_that_ends_early_is_a_mismatch(
    noisy_bigram: Callable[[str], Bigram], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_cpp.llama import DFlashLlama

    honest = DFlashLlama.generate

    def generate(self: DFlashLlama, *args: Any, **kwargs: Any) -> Any:
        for n, token in enumerate(honest(self, *args, **kwargs)):
            if self.speculate and n == 10:
                return
            yield token

    monkeypatch.setattr(DFlashLlama, "generate", generate)
    with open_pair(noisy_bigram("llama")) as llm:
        report = check(llm)
    assert report.verdict == "mismatch"
    difference = report.prompts[0].difference
    assert difference is not None
    assert (difference.index, difference.speculative) == (10, None)


def test_nothing_drafted_is_no_success(noisy_bigram: Callable[[str], Bigram]) -> None:
    with open_pair(noisy_bigram("llama")) as llm:
        llm._off = "planted reason"
        with pytest.raises(FailureError, match="planted reason"):
            check(llm)


def test_a_prompt_that_fills_the_context(noisy_bigram: Callable[[str], Bigram]) -> None:
    from dflash_cpp.parity import greedy

    with (
        open_pair(noisy_bigram("llama")) as llm,
        pytest.raises(InputError, match="expected fewer than the context's 512"),
    ):
        greedy(llm, [5] * 512, 8)


# --- re-scoring -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_rescoring_repeats_what_both_decoders_did(
    noisy_bigram: Callable[[str], Bigram], arch: str
) -> None:
    from dflash_cpp.parity import greedy
    from dflash_cpp.rescore import rescorer

    with open_pair(noisy_bigram(arch)) as llm:
        prompt = llm.tokenize(b"the old man and the sea")
        runs = {}
        for speculate in (False, True):
            llm.speculate = speculate
            runs[speculate] = greedy(llm, prompt, N_PREDICT)
        assert {r.rows for r in runs[False][1]} == {1}
        assert {r.rows for r in runs[True][1]} == {8}
        for text, rounds in runs.values():
            with rescorer(llm) as scorer:
                rows = list(scorer.walk(prompt, text[:-1], rounds))
            assert [i for i, _ in rows] == list(range(len(text)))
            assert [int(np.argmax(logits)) for _, logits in rows] == text


def test_rescoring_leaves_the_model_alone(noisy_bigram: Callable[[str], Bigram]) -> None:
    from dflash_cpp.parity import greedy
    from dflash_cpp.rescore import Round, rescorer

    with open_pair(noisy_bigram("llama")) as llm:
        prompt = llm.tokenize(b"the old man and the sea")
        generator = llm.generate(prompt, temp=0.0)
        text = [next(generator) for _ in range(5)]
        with rescorer(llm) as scorer:
            scorer.score(prompt, text, [Round(i, 1) for i in range(5)])
        text += [next(generator) for _ in range(15)]
        generator.close()
        assert text == greedy(llm, prompt, 20)[0]


# --- command --------------------------------------------------------------------------------------


def run(*arguments: object) -> int:
    from dflash_cpp.cli import app

    with pytest.raises(SystemExit) as end:
        run_cli(app, [str(a) for a in arguments], prog_name="dflash-cpp")
    return int(end.value.code or 0)


def parity_arguments(pair: Bigram, prompts: Path) -> list[object]:
    return ["parity", "-m", pair.target, "-md", pair.draft, "--prompts", prompts, "-n", 24,
            "-c", 512, "-t", 1, "--no-progress"]  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": p, "class": "test"}) + "\n" for p in PROMPTS))
    return file


def test_command_json(
    noisy_bigram: Callable[[str], Bigram], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*parity_arguments(noisy_bigram("llama"), prompts), "--json") == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert document["schema"] == 1
    assert document["verdict"] == "identical"
    assert document["counts"] == {"identical": 3, "tie": 0, "mismatch": 0}
    assert [p["class"] for p in document["prompts"]] == ["test"] * 3
    assert all(p["first_difference"] is None for p in document["prompts"])
    assert document["settings"]["n_ctx"] == 512


def test_command_fails_on_a_mismatch(
    noisy_bigram: Callable[[str], Bigram],
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept_a_wrong_token(monkeypatch)
    arguments = parity_arguments(noisy_bigram("llama"), prompts)
    assert run(*arguments) == 1
    out = capsys.readouterr().out
    assert "3 prompts: 0 identical, 0 tie, 3 mismatch" in out
    assert "in the same blocks" in out
    assert run(*arguments, "--json") == 1
    first = json.loads(capsys.readouterr().out)["prompts"][0]["first_difference"]
    assert {"index", "plain", "speculative", "margin", "delta", "bound", "reason"} <= set(first)
    assert first["plain"] != first["speculative"]
    assert first["margin"] > 0
    assert run(*arguments, "-q") == 1
    assert capsys.readouterr().out == "mismatch\n"
