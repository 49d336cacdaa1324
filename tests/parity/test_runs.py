"""Several conditions: draft lengths, caches, temperatures, slots; reports; planted faults."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from bigram import Bigram, make_bigram

from dflash_convert.errors import FailureError, run_cli

pytestmark = pytest.mark.native

PROMPTS = ("the cat sat on the mat", "one two three four", "a short tale of the sea")


def make_plan(pair: Any, conditions: Any = None, **options: Any) -> Any:
    from dflash_cpp.opening import PairOptions
    from dflash_cpp.parity_runs import Condition, Plan
    from dflash_cpp.promptset import Prompt

    prompts = [Prompt(str(i), "test", text) for i, text in enumerate(PROMPTS)]
    pair_options = PairOptions(pair.target, pair.draft, n_ctx=512, threads=1, adaptive=False)
    return Plan(pair_options, prompts, 24, conditions or [Condition()], **options)


def compare(pair: Any, conditions: Any = None, **options: Any) -> Any:
    from dflash_cpp.parity_runs import run_plan

    return run_plan(make_plan(pair, conditions, **options))


# --- honest pairs ---------------------------------------------------------------------------------


def test_conditions_and_slots(bin_dir: Path, noisy_bigram: Callable[[str], Bigram]) -> None:
    from dflash_cpp.parity_runs import make_conditions

    conditions = make_conditions("1,7", "on,off", "f16,f32")
    assert len(conditions) == 8
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1

    from dflash_cpp.parity_runs import run_plan

    plan = make_plan(noisy_bigram("llama"), conditions[:2], slots=[3])
    result = run_plan(plan, step)
    assert steps == plan.n_steps
    assert [r.slots for r in result.runs] == [None, 3, None, 3]
    assert [r.report.n_draft for r in result.runs] == [1, 1, 7, 7]
    assert result.verdict == "identical"
    assert result.good
    assert result.compared == 4 * 3 * 24
    assert all(sum(p.stats["draft_n_accepted"] for p in r.report.prompts) for r in result.runs)


@pytest.mark.parametrize("arch", ["llama", "qwen35", "gemma4"])
def test_honest_sampling_passes(random_pair: Callable[[str], tiny.Pair], arch: str) -> None:
    """42 tests, all together at alpha = 0.001."""
    result = compare(random_pair(arch), temps=[0.7, 1.5], greedy=False, samples=150)
    assert len(result.tests) == 2 * 3 * 7
    assert result.verdict == "identical"
    p_values = [t.p for _, t in result.tests if t.p is not None]
    assert len(p_values) > 20
    assert result.limit == pytest.approx(1e-3 / len(p_values))
    # samples of their own for every test: else the values would follow each other
    assert min(p_values) < 0.2
    assert max(p_values) > 0.8


def test_plain_texts_are_decoded_once_for_all_lengths(
    noisy_bigram: Callable[[str], Bigram], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_cpp import parity
    from dflash_cpp.parity_runs import Condition

    calls: list[bool] = []
    honest = parity.greedy

    def greedy(llm: Any, *args: Any) -> Any:
        calls.append(llm.speculate)
        return honest(llm, *args)

    monkeypatch.setattr(parity, "greedy", greedy)
    compare(noisy_bigram("llama"), [Condition(1), Condition(3)])
    assert (calls.count(False), calls.count(True)) == (3, 6)


@pytest.mark.parametrize("arch", ["llama", "qwen35", "gemma4"])
def test_quantised_memory(our_library: None, tmp_path: Path, arch: str) -> None:
    """Types of keys and values that need heads of whole blocks, from the command line."""
    pair = make_bigram(tmp_path, arch, wrong=0.3, drift=0.28, target_head_dim=64)
    types = "q8_0,q4_0,q8_0/q4_0,f16/q8_0"
    assert run(*arguments(pair, "--kv-type", types, "-q", "--out", tmp_path / "out")) == 0
    document = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert document["verdict"] == "identical"
    found = ["/".join(r["condition"]["kv_types"]) for r in document["runs"]]
    assert found == ["Q8_0/Q8_0", "Q4_0/Q4_0", "Q8_0/Q4_0", "F16/Q8_0"]
    for single in document["runs"]:
        assert single["condition"]["flash_attn"] is True
        accepted, drafted = (
            sum(p["stats"][key] for p in single["prompts"])
            for key in ("draft_n_accepted", "draft_n")
        )
        assert 0 < accepted < drafted


def test_a_draft_that_does_not_know_the_cap(our_library: None, tmp_path: Path) -> None:
    """The draft's logits are capped as its own file says, the text is the target's anyway."""
    options: dict[str, Any] = {"wrong": 0.3, "drift": 0.28}
    knows = make_bigram(tmp_path / "a", "gemma4", **options)
    other = make_bigram(tmp_path / "b", "gemma4", **options, softcap=None)
    assert knows.target.read_bytes() == other.target.read_bytes()
    assert knows.draft.read_bytes() != other.draft.read_bytes()
    for pair in (knows, other):
        result = compare(pair)
        assert result.verdict == "identical"
        assert sum(p.stats["draft_n_accepted"] for p in result.runs[0].report.prompts) > 0


# --- planted faults -------------------------------------------------------------------------------


def test_a_hotter_draft_side_fails(
    random_pair: Callable[[str], tiny.Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Speculative texts come from another temperature."""
    from dflash_cpp.llama import DFlashLlama

    honest = DFlashLlama.generate

    def generate(self: DFlashLlama, tokens: Any, **kwargs: Any) -> Any:
        if self.speculate:
            kwargs["temp"] *= 1.4
        return honest(self, tokens, **kwargs)

    monkeypatch.setattr(DFlashLlama, "generate", generate)
    result = compare(random_pair("llama"), temps=[1.0], greedy=False, samples=400)
    assert result.verdict == "failed"
    assert not result.good


def test_a_wrong_rule_fails(
    noisy_bigram: Callable[[str], Bigram], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token in five is replaced after verification: only positions 2 and later show it."""
    from dflash_cpp.session import Session, StepResult

    honest, calls = Session.step, 0

    def step(self: Session, sampler: Any, id_last: int, n_draft_max: int = -1) -> StepResult:
        nonlocal calls
        result = honest(self, sampler, id_last, n_draft_max)
        calls += 1
        if calls % 5:
            return result
        return StepResult((*result.tokens[:-1], 5), result.n_accepted)

    monkeypatch.setattr(Session, "step", step)
    result = compare(noisy_bigram("llama"), temps=[1.0], greedy=False, samples=300)
    assert result.verdict == "failed"
    failed = {t.what for _, t in result.tests if result.failed(t)}
    assert failed
    assert "token 1" not in failed


def test_a_server_with_other_texts_is_a_mismatch(
    bin_dir: Path, noisy_bigram: Callable[[str], Bigram], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_cpp import parity_slots

    honest = parity_slots.server_texts

    def server_texts(*args: Any, **kwargs: Any) -> Any:
        texts, counters = honest(*args, **kwargs)
        if kwargs.get("n_draft") is not None:
            texts[1] = (*texts[1][:9], texts[1][9] + 1, *texts[1][10:])
        return texts, counters

    monkeypatch.setattr(parity_slots, "server_texts", server_texts)
    result = compare(noisy_bigram("llama"), slots=[2], max_delta=0.01)
    assert result.verdict == "mismatch"
    run = result.runs[1].report
    assert run.counts == {"identical": 2, "tie": 0, "mismatch": 1}
    assert run.prompts[1].difference.index == 9
    # an honest comparison in the same process stays what it is
    assert result.runs[0].report.verdict == "identical"


def test_a_server_that_drafts_nothing() -> None:
    from dflash_cpp import parity_slots

    llm: Any = SimpleNamespace(n_draft=7)
    options: Any = {"cap": None, "n_predict": 2}
    with pytest.raises(FailureError, match="drafted no token"):
        parity_slots.compare_slots(llm, [], [], [], [], {}, **options)


def test_the_rule_for_slots(noisy_bigram: Callable[[str], Bigram]) -> None:
    """Only the runner-up within twice the cap is a tie."""
    from dflash_cpp.caps import Cap
    from dflash_cpp.opening import open_pair
    from dflash_cpp.parity_slots import _judge
    from dflash_cpp.rescore import Round, rescorer

    plan = make_plan(noisy_bigram("llama"))
    with open_pair(plan.options) as llm:
        prompt = llm.tokenize(b"the cat sat")
        with rescorer(llm) as scorer:
            logits = scorer.score(prompt, [7, 8], [Round(0, 1), Round(1, 1)])
        best, second, third = (int(i) for i in logits.argsort()[::-1][:3])
        margin = float(logits[best] - logits[second])

        def verdict(plain: int, found: int, cap: float) -> str:
            texts = (7, 8, plain), (7, 8, found)
            return _judge(llm, prompt, *texts, 2, Cap(cap, "CPU", "F32", True)).verdict

        assert verdict(best, second, 0.51 * margin) == "tie"
        assert verdict(best, second, 0.49 * margin) == "mismatch"
        assert verdict(best, second, 0.0) == "mismatch"
        assert verdict(second, third, 1e9) == "mismatch"  # plain is not the target's choice
        ended = _judge(llm, prompt, (7, 8), (7, 8, best), 2, Cap(1e9, "CPU", "F32", True))
        assert "ends here" in ended.reason


# --- options --------------------------------------------------------------------------------------


def test_combinations() -> None:
    from dflash_cpp.parity_runs import Condition, make_conditions

    assert make_conditions(None, "on", None) == [Condition()]
    found = make_conditions("2", "on,off", "f16/q8_0,q8_0/f16")
    kv = {(c.flash_attn, c.kv_types) for c in found}
    assert kv == {(True, ("F16", "Q8_0")), (True, ("Q8_0", "F16")), (False, ("Q8_0", "F16"))}
    assert replace(found[0]).words() == "2 drafted, flash attention on, KV F16/Q8_0"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--n-draft", "0"], "--n-draft has 0, expected 1 to 63"),
        (["--n-draft", "x"], "--n-draft is `x`, expected numbers"),
        (["-fa", "auto"], "--flash-attn has `auto`, expected some of on, off"),
        (["--kv-type", "q9"], "--kv-type has `q9`"),
        (["--kv-type", "f16/f16/f16"], "--kv-type has `f16/f16/f16`"),
        (["-fa", "off", "--kv-type", "q8_0"], "a quantised V cache needs --flash-attn on"),
        (["--temp", "-1"], "--temp has -1, expected 0 to 10"),
        (["--slots", "0"], "--slots has 0, expected 1 to 64"),
        (["--classes", "poems"], "unknown prompt class `poems`"),
        (["--classes", "code", "--prompts", "x"], "leave --prompts out"),
        (["--out", "FILE"], "cannot be a folder"),
    ],
)
def test_bad_options(
    tmp_path: Path, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "FILE").write_text("x")
    options = [str(tmp_path / o) if o == "FILE" else o for o in options]
    assert run("parity", "-m", "a.gguf", "-md", "b.gguf", *options) == 2
    assert says in capsys.readouterr().err


def run(*arguments: object) -> int:
    from dflash_cpp.cli import app

    with pytest.raises(SystemExit) as end:
        run_cli(app, [str(a) for a in arguments], prog_name="dflash-cpp")
    return int(end.value.code or 0)


# --- report ---------------------------------------------------------------------------------------


def arguments(pair: Any, *more: object) -> list[object]:
    return ["parity", "-m", pair.target, "-md", pair.draft, "--limit", 2, "-n", 12, "-c", 1024,
            "-t", 1, "--no-progress", *more]  # fmt: skip


def test_files(
    noisy_bigram: Callable[[str], Bigram], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, out = noisy_bigram("llama"), tmp_path / "made" / "report"
    more = ("--classes", "code,prose", "--n-draft", "1,7", "--temp", "0,1", "--samples", 30)
    assert run(*arguments(pair, *more, "--out", out)) == 0
    shown = capsys.readouterr().out
    assert "Greedy texts" in shown
    names = {"parity.md", "parity.html", "parity.json", "lengths.png", "p-values.png"}
    assert {p.name for p in out.iterdir()} == names
    document = json.loads((out / "parity.json").read_text())
    assert document["schema"] == 1
    assert document["verdict"] == "identical"
    assert document["tokens_compared"] == 2 * 2 * 12
    assert len(document["runs"]) == 2
    assert len(document["distribution_tests"]) == 2 * 2 * 7
    assert len(document["files"]["target"]["sha256"]) == 64
    text = (out / "parity.md").read_text()
    assert document["summary"] in text
    assert str(tmp_path) not in text  # a report tells nobody where files lie
    page = (out / "parity.html").read_text()
    assert page.count('src="data:image/png;base64,') == 2
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []


def test_plain_usage_keeps_its_form(
    noisy_bigram: Callable[[str], Bigram], capsys: pytest.CaptureFixture[str]
) -> None:
    pair = noisy_bigram("llama")
    assert run(*arguments(pair)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["prompt", "class"]
    assert "2 prompts: 2 identical, 0 tie, 0 mismatch" in lines
    line = lines[-1]
    assert line.startswith("dflash-toolkit ")
    for part in ("llama.cpp ", "target ", "F32, draft ", "drafts full fa on KV F16 temp 0",
                 "24 tokens compared, 0 mismatches, 0 ties"):  # fmt: skip
        assert part in line
    assert run(*arguments(pair), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert {"verdict", "counts", "n_draft", "delta_cap", "prompts", "settings"} <= set(document)
    assert document["summary"] == line


def test_a_failed_test_ends_with_1(
    noisy_bigram: Callable[[str], Bigram],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dflash_cpp import distribution

    monkeypatch.setattr(distribution, "chi_square", lambda a, b: (2, 99.0, 1e-9))
    assert run(*arguments(noisy_bigram("llama"), "--temp", "1", "--samples", 20)) == 1
    assert "14 distribution tests, 14 failed" in capsys.readouterr().out


def test_no_matplotlib(
    noisy_bigram: Callable[[str], Bigram], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_cpp import figures

    monkeypatch.setattr(figures, "have_matplotlib", lambda: False)
    assert run(*arguments(noisy_bigram("llama"), "--out", tmp_path / "a")) == 0
    assert "matplotlib is not installed" in (tmp_path / "a" / "parity.md").read_text()
