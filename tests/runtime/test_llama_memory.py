"""Prefix reuse, abandoned generators, saved states, full contexts: memory and counters in step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twins import PROMPT, TEXT, Twins, answer, first_difference, take

pytestmark = pytest.mark.native


def test_abandoned_generators(twins: Twins) -> None:
    """Left after any number of tokens, the next call finds what plain decoding would find."""
    whole = take(twins.plain, PROMPT, 40, temp=0.0)
    for n in range(1, 20):
        twins.forget()
        assert twins.same(lambda llm, n=n: take(llm, PROMPT, n, temp=0.0)) == whole[:n]
        # the same prompt, the text so far and more, a prompt that leaves the text earlier
        twins.same(lambda llm: take(llm, PROMPT, 12, temp=0.0))
        twins.same(lambda llm, n=n: take(llm, PROMPT + whole[:n] + [300, 301], 12, temp=0.0))
        twins.same(lambda llm: take(llm, [*PROMPT[:-3], 17, 18], 12, temp=0.0))


def test_conversation(twins: Twins) -> None:
    """Prompts that extend, shorten, repeat and replace one another."""
    rng = np.random.default_rng(5)
    prompt = list(PROMPT)
    for turn in range(12):
        text = twins.same(lambda llm, p=prompt, n=3 + turn: take(llm, p, n, temp=0.0))
        match turn % 4:
            case 0:
                prompt = [*prompt, *text[:-1], *rng.integers(20, 300, 5).tolist()]
            case 1:
                prompt = [*prompt, *text[: len(text) // 2]]
            case 2:
                prompt = prompt[: rng.integers(10, len(prompt))]
            case _:
                prompt = [*prompt[:30], *rng.integers(20, 300, 30).tolist()]
    stats = twins.ours.last_stats
    assert stats.mode == "draft-dflash"


def test_prefix_is_reused(twins: Twins) -> None:
    """A longer prompt costs only its new tokens, as in `Llama`."""
    text = take(twins.ours, PROMPT, 30, temp=0.0)
    longer = [*PROMPT, *text[:-1], 41, 42, 43]
    take(twins.ours, longer, 5, temp=0.0)
    stats = twins.ours.last_stats
    recurrent = twins.ours._is_hybrid or twins.ours._is_recurrent
    assert stats.prompt_tokens <= (len(longer) if recurrent else 4)
    assert stats.reason is None


def test_recurrent_state_is_never_stale(twins: Twins) -> None:
    """After single tokens there is no snapshot to go back to: the state must be built anew."""
    for back in range(1, 9):
        twins.forget()

        def ask(llm: Any, back: int = back) -> list[int]:
            llm.eval(PROMPT)
            for token in range(100, 110):
                llm.eval([token])
            llm.n_tokens -= back
            return take(llm, [*PROMPT, *range(100, 110 - back), 200, 201], 40, temp=0.0)

        found = ask(twins.ours)
        twins.plain.reset()
        fresh = take(twins.plain, [*PROMPT, *range(100, 110 - back), 200, 201], 40, temp=0.0)
        assert found == fresh, f"{back} tokens back: {first_difference(found, fresh)}"


@pytest.mark.parametrize("n_decoded", [2, 3, 5, 8, 12])
def test_session_rollback_is_exact_or_refused(twins: Twins, n_decoded: int) -> None:
    """Whatever a rollback allows, the next logits are those of the shortened text."""
    from dflash_cpp import DFlashMemoryError

    llm, refused = twins.ours, 0
    text = [*PROMPT, *range(100, 100 + n_decoded)]
    for back in range(1, n_decoded + 3):
        llm.reset()
        llm.eval(PROMPT)
        llm.eval(text[len(PROMPT) :])
        keep = len(text) - back
        try:
            llm._session.rollback(keep)
        except DFlashMemoryError:
            refused += 1
            continue
        llm.n_tokens = keep
        llm.eval([33])
        found = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), (llm.n_vocab(),)).copy()
        twins.plain.reset()
        twins.plain.eval([*text[:keep], 33])
        expected = np.ctypeslib.as_array(twins.plain._ctx.get_logits_ith(-1), (llm.n_vocab(),))
        # sums in another order, nothing more
        assert np.abs(found - expected).max() < 1e-3, f"{back} of {n_decoded} tokens back"
    assert refused == 0 or llm._is_hybrid


@pytest.mark.parametrize("n_ctx", [256, 100])  # llama.cpp rounds up to 256
def test_context_full(opened_twins: Twins, n_ctx: int) -> None:
    """Both give the same tokens and then fail at the same place."""
    files = (Path(opened_twins.plain.model_path), Path(opened_twins.ours._draft_path))
    other = Twins(files, n_ctx=n_ctx)
    try:

        def ask(llm: Any) -> tuple[list[int], str]:
            out: list[int] = []
            try:
                for token in llm.generate(PROMPT, temp=0.0):
                    out.append(token)
            except RuntimeError as exc:
                return out, "full" if "full" in str(exc) or "returned 1" in str(exc) else str(exc)
            return out, "ended"

        tokens, end = other.same(ask)
        assert (len(tokens), end) == (256 - len(PROMPT) + 1, "full")
        # and both go on afterwards
        other.same(lambda llm: take(llm, PROMPT, 10, temp=0.0))
        for options in ({"max_tokens": None}, {"max_tokens": 1000}, {"max_tokens": -1}):
            other.same(lambda llm, o=options: answer(llm.create_completion(PROMPT, seed=1, **o)))
        if n_ctx == 256:  # with fewer, `Llama` itself has no room to note long prompts
            long = list(range(20, 20 + 255))
            other.same(lambda llm: answer(llm.create_completion(long, max_tokens=5, seed=1)))
        with pytest.raises(ValueError, match="exceed context window"):
            other.ours.create_completion(list(range(20, 20 + 256)))
    finally:
        other.close()


def test_saved_state(twins: Twins) -> None:
    def ask(llm: Any) -> list[list[int]]:
        out = [take(llm, PROMPT, 13, temp=0.0)]
        state = llm.save_state()
        out.append(take(llm, [5, 6, 7, *PROMPT], 20, temp=0.0))
        llm.load_state(state)
        out.append(take(llm, [*PROMPT, *out[0][:-1], 99], 30, temp=0.0))
        llm.load_state(state)
        out.append(take(llm, PROMPT, 30, temp=0.0))
        return out

    twins.same(ask)
    # either the prompt was decoded again or the statistics admit what the draft lacks
    stats = twins.ours.last_stats
    assert stats.mode == "draft-dflash"
    assert (stats.reason is None) == (stats.prompt_tokens == len(PROMPT))


def test_state_saved_within_a_block(twins: Twins) -> None:
    """Saving in the middle of a generation changes neither the rest of it nor what is saved."""
    whole = take(twins.plain, PROMPT, 40, temp=0.0)
    for n in range(1, 12):
        twins.forget()
        generator = twins.ours.generate(PROMPT, temp=0.0)
        text = [next(generator) for _ in range(n)]
        state = twins.ours.save_state()
        text += [next(generator) for _ in range(40 - n)]
        generator.close()
        assert text == whole, f"saved after {n}: differs at {first_difference(text, whole)}"
        twins.ours.reset()
        twins.ours.load_state(state)
        assert state.n_tokens == len(PROMPT) + n - 1
        prompt = PROMPT + whole[:n]
        assert take(twins.ours, prompt, 40 - n, temp=0.0) == whole[n:], f"restored after {n}"


def test_cache(twins: Twins) -> None:
    from dflash_cpp._memory import llama_cpp

    for llm in (twins.plain, twins.ours):
        llm.set_cache(llama_cpp.LlamaRAMCache())
    questions = [TEXT + " one", "something else", TEXT + " one and two", "something", TEXT]
    for stream in (False, True):
        for question in questions:
            twins.same(
                lambda llm, q=question, s=stream: answer(
                    llm.create_completion(q, max_tokens=11, temperature=0.0, stream=s)
                )
            )


def test_sent_tokens_do_not_change_the_text(twins: Twins) -> None:
    whole = take(twins.plain, PROMPT, 30, temp=0.0)
    generator = twins.ours.generate(PROMPT, temp=0.0)
    text = [next(generator)]
    while len(text) < 30:
        text.append(generator.send([4, 5, 6] if len(text) % 3 else []))
    generator.close()
    assert text == whole


def test_eval_and_sample_by_hand(twins: Twins) -> None:
    def ask(llm: Any) -> list[int]:
        out = []
        llm.reset()
        llm.eval(PROMPT)
        for _ in range(10):
            token = llm.sample(temp=0.0)
            out.append(token)
            llm.eval([token])
        # a generation may follow, and hand work may follow it
        out += take(llm, [*PROMPT, *out], 9, temp=0.0)
        llm.eval([77])
        out.append(llm.sample(temp=0.0))
        return out

    twins.plain._sampler = twins.ours._sampler = None
    twins.same(ask)


def test_sampler_of_unseen_tokens_is_dropped(twins: Twins) -> None:
    """A chain that accepted tokens nobody saw must not go on sampling by hand."""
    llm = twins.ours
    for n in range(2, 12):
        llm.reset()
        take(llm, PROMPT, n, temp=0.0)
        ahead = llm._session.n_past > llm.n_tokens
        assert (llm._sampler is None) == ahead


def fail_after(llm: Any, n: int) -> None:
    for count, _ in enumerate(llm.generate(PROMPT, temp=0.0), 1):
        if count == n:
            raise KeyError


def test_error_in_the_loop(twins: Twins) -> None:
    whole = take(twins.plain, PROMPT, 40, temp=0.0)
    for n in (1, 3, 5, 6):
        twins.forget()
        with pytest.raises(KeyError):
            fail_after(twins.ours, n)
        assert take(twins.ours, PROMPT, 40, temp=0.0) == whole

        generator = twins.ours.generate(PROMPT, temp=0.0)
        for _ in range(n):
            next(generator)
        with pytest.raises(KeyboardInterrupt):
            generator.throw(KeyboardInterrupt())
        assert take(twins.ours, PROMPT, 40, temp=0.0) == whole


def test_overtaken_generator_says_so(twins: Twins) -> None:
    from dflash_cpp import DFlashStateError

    whole = take(twins.plain, PROMPT, 30, temp=0.0)
    for n in (1, 3, 4):
        for options in ({}, {"logits_processor": [lambda ids, scores: scores]}):
            twins.forget()
            first = twins.ours.generate(PROMPT, temp=0.0, **options)
            for _ in range(n):
                next(first)
            second = twins.ours.generate(PROMPT, temp=0.0)
            text = [next(second) for _ in range(10)]
            with pytest.raises(DFlashStateError, match="another call has changed the context"):
                next(first)
            first.close()
            assert text + [next(second) for _ in range(20)] == whole
            second.close()


def test_switching(twins: Twins) -> None:
    """Speculation off and on again, between and within texts."""
    llm = twins.ours
    try:
        for prompt in (PROMPT, PROMPT[:40], [*PROMPT, 9, 8]):
            for on in (False, True, False, True):
                llm.speculate = on
                assert llm.speculate is on
                assert (llm.n_draft is None) == (not on)
                twins.same(lambda m, p=prompt: take(m, p, 15, temp=0.0))
                stats = llm.last_stats
                assert stats.mode == ("draft-dflash" if on else "plain")
                assert on or stats.reason == "speculate is False"
    finally:
        llm.speculate = True


def test_switching_off_within_a_block(twins: Twins) -> None:
    whole = take(twins.plain, PROMPT, 40, temp=0.0)
    llm = twins.ours
    try:
        for n in range(2, 9):
            llm.reset()
            take(llm, PROMPT, n, temp=0.0)
            llm.speculate = False
            assert take(llm, PROMPT + whole[:n], 10, temp=0.0) == whole[n : n + 10]
            llm.speculate = True
            assert take(llm, PROMPT, 40, temp=0.0) == whole
    finally:
        llm.speculate = True
