"""llama-server over HTTP, with an OpenAI client: the draft changes the speed and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import tiny
from bigram import Bigram

from dflash_convert.errors import FailureError
from dflash_cpp.measure import Lane, ask, run_lanes, same_tokens
from dflash_cpp.server import LlamaServer

pytestmark = pytest.mark.native

MESSAGES = (
    [{"role": "user", "content": "tell me about the sea"}],
    [{"role": "user", "content": "how are you today? ünïcödé ☃"}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ],
)
TOKENS = 60


def client(server: LlamaServer) -> openai.OpenAI:
    # a proxy from the environment has no business between us and this machine
    http = httpx.Client(trust_env=False, timeout=120.0)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http)


def chat(api: openai.OpenAI, messages: Any, **options: Any) -> Any:
    options = {"temperature": 0.0, "max_tokens": TOKENS} | options
    return api.chat.completions.create(model="any", messages=messages, **options)


def texts(server: LlamaServer) -> list[tuple[str, str, int]]:
    """Answers to `MESSAGES` with why and where they ended."""
    with client(server) as api:
        answers = [chat(api, m) for m in MESSAGES]
    return [
        (a.choices[0].message.content, a.choices[0].finish_reason, a.usage.completion_tokens)
        for a in answers
    ]


@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_same_text_with_and_without_the_draft(
    bigram: Callable[..., Bigram], start: Any, arch: str
) -> None:
    pair = bigram(arch)
    plain = start(pair.target, None)
    drafted = start(pair.target, pair.draft, "--spec-draft-n-max", pair.block - 1)
    expected = texts(plain)
    assert texts(drafted) == expected
    assert all(text for text, _, _ in expected)
    # and it was the draft that answered
    metrics = drafted.metrics()
    assert metrics["spec_decode_num_accepted_tokens_total"] > 0
    accepted, proposed = (
        metrics[f"spec_decode_num_{n}_tokens_total"] for n in ("accepted", "draft")
    )
    assert accepted < proposed
    assert plain.metrics().get("spec_decode_num_draft_tokens_total", 0) == 0


def test_a_draft_that_is_never_right_changes_nothing(random_pair: tiny.Pair, start: Any) -> None:
    plain = start(random_pair.target, None)
    drafted = start(random_pair.target, random_pair.draft, "--spec-draft-n-max", 7)
    assert texts(drafted) == texts(plain)


@pytest.mark.parametrize("n_max", [1, 3, 7])
def test_lengths_of_the_draft(bigram: Callable[..., Bigram], start: Any, n_max: int) -> None:
    pair = bigram("llama", wrong=0.1, drift=0.0)
    server = start(pair.target, pair.draft, "--spec-draft-n-max", n_max)
    assert texts(server) == texts(start(pair.target, None))
    metrics = server.metrics()
    drafts = metrics["spec_decode_num_drafts_total"]
    assert 0 < metrics["spec_decode_num_draft_tokens_total"] <= n_max * drafts
    per_position = [
        metrics[f'spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}']
        for i in range(n_max)
    ]
    assert f'spec_decode_num_accepted_tokens_per_pos_total{{position="{n_max}"}}' not in metrics
    assert per_position == sorted(per_position, reverse=True)
    assert per_position[-1] > 0


def test_streaming(bigram: Callable[..., Bigram], start: Any) -> None:
    pair = bigram("llama")
    server = start(pair.target, pair.draft, "--spec-draft-n-max", pair.block - 1)
    expected = texts(server)
    for messages, (text, reason, _) in zip(MESSAGES, expected, strict=True):
        with client(server) as api:
            chunks = list(chat(api, messages, stream=True))
        pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == reason
        assert sum(bool(p) for p in pieces) > 1


def test_requests_one_after_another(bigram: Callable[..., Bigram], start: Any) -> None:
    # the slot keeps what it can of the last prompt: longer, shorter, the same, unrelated
    pair = bigram("llama")
    contents = [
        "a long tale of the sea and the ships on it",
        "a long tale",
        "a long tale",
        "something else",
        "a long tale of the sea",
    ]

    def answers(server: LlamaServer) -> list[str]:
        with client(server) as api:
            asked = [chat(api, [{"role": "user", "content": c}]) for c in contents]
        return [a.choices[0].message.content for a in asked]

    server = start(pair.target, pair.draft, "--spec-draft-n-max", pair.block - 1)
    assert answers(server) == answers(start(pair.target, None))


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_drafts_after_a_cached_prompt_are_as_good(
    arch: str, bigram: Callable[..., Bigram], start: Any
) -> None:
    """The draft's share of the prompt cache: without features this draft proposes nothing right."""
    pair = bigram(arch, drift=0.28 if arch == "llama" else 0.15)
    # micro-batches that the small-batch kernels take: the same bits whether cached or not
    server = start(pair.target, pair.draft, "--spec-draft-n-max", 7, "-ub", 32, "-b", 64)
    prompts = [[40 + (i * k) % 300 for i in range(150)] for k in (1, 7, 11)]
    body = {"n_predict": 40, "temperature": 0.0, "return_tokens": True, "ignore_eos": True}
    first, again = (
        [server.post("/completion", {"prompt": p} | body) for p in prompts] for _ in range(2)
    )
    assert [a["tokens"] for a in again] == [a["tokens"] for a in first]
    assert any(a["timings"]["prompt_n"] < 20 for a in again)  # else nothing was cached
    for a, b in zip(first, again, strict=True):
        assert b["timings"]["draft_n_accepted"] >= a["timings"]["draft_n_accepted"] > 10


def test_two_slots_at_once(bigram: Callable[..., Bigram], start: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    pair = bigram("llama")
    server = start(pair.target, pair.draft, "--spec-draft-n-max", pair.block - 1, "-np", 2)
    expected = texts(start(pair.target, None))
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(texts, server) for _ in range(2)]
        assert [b.result() for b in both] == [expected, expected]


def sampled(server: LlamaServer) -> list[list[int]]:
    """Tokens of the same sampled request, three times."""
    request = {"prompt": list(range(5, 15)), "n_predict": TOKENS, "temperature": 1.0, "seed": 7}
    request |= {"return_tokens": True}
    return [server.post("/completion", request)["tokens"] for _ in range(3)]


@pytest.mark.parametrize("slots", [1, 3])
def test_adaptive_lengths_leave_a_hopeless_draft_out(
    random_pair: tiny.Pair, start: Any, slots: int
) -> None:
    """Same texts, hardly any drafts, one line in the log and a counter."""
    prompts = [[40 + i, 41, 42, 60] for i in range(slots)]
    body = {"n_predict": 300, "temperature": 0.0, "return_tokens": True, "ignore_eos": True}
    size = ("-np", slots, "-c", 1024 * slots, "-ctk", "f32", "-ctv", "f32", "-fa", "off")

    def texts(server: LlamaServer) -> list[dict[str, Any]]:
        def ask_one(prompt: list[int]) -> dict[str, Any]:
            request = {"prompt": prompt} | body
            answer = httpx.post(
                f"{server.url}/completion", json=request, trust_env=False, timeout=120.0
            )
            return answer.json()

        with ThreadPoolExecutor(slots) as pool:
            return list(pool.map(ask_one, prompts))

    expected = texts(start(random_pair.target, None, *size))
    server = start(random_pair.target, random_pair.draft, *size, "--spec-draft-adaptive", "on")
    for _ in range(2):
        found = texts(server)
        assert [a["tokens"] for a in found] == [a["tokens"] for a in expected]
    timings = [a["timings"] for a in found]
    assert sum(t["draft_n_skipped"] for t in timings) > 200 * slots
    assert sum(t.get("draft_n", 0) for t in timings) < 300 * slots
    assert server.log.read_text().count("drafting does not pay here") == 1
    metrics = httpx.get(f"{server.url}/metrics", trust_env=False).text
    assert "llamacpp:spec_decode_skipped_total" in metrics


def test_a_seed_repeats_a_sampled_text(bigram: Callable[..., Bigram], start: Any) -> None:
    pair = bigram("llama")
    runs = sampled(start(pair.target, pair.draft, "--spec-draft-n-max", pair.block - 1))
    assert runs[0] == runs[1] == runs[2]


def test_a_seed_gives_the_text_of_plain_decoding_when_drafts_must_match(
    bigram: Callable[..., Bigram], start: Any
) -> None:
    pair = bigram("llama")
    options = ("--spec-draft-n-max", pair.block - 1, "--spec-draft-verify", "match")
    assert sampled(start(pair.target, pair.draft, *options)) == sampled(start(pair.target, None))


# --- what the demo measures -----------------------------------------------------------------------


def test_lanes_count_what_they_measure(bigram: Callable[..., Bigram], start: Any) -> None:
    pair = bigram("llama")
    plain = Lane("plain", start(pair.target, None))
    ours = Lane("ours", start(pair.target, pair.draft, "--spec-draft-n-max", pair.block - 1))
    prompts = [[5, 6, 7, 8], [30, 31, 32]]
    turns: list[None] = []
    run_lanes([plain, ours], prompts, n_predict=40, repeat=2, on_answer=lambda: turns.append(None))
    assert len(turns) == 2 * 2 * 2
    assert same_tokens(ours, plain) == (2, 2)
    assert [[a.predicted_n for a in run] for run in ours.answers] == [[40, 40], [40, 40]]
    assert plain.mean_accepted_length is None
    # the counters start after the warm-up: tokens are accepted ones plus one of each round,
    # and the first token of each answer comes from its prompt
    assert ours.accepted + ours.drafts == pytest.approx(4 * 39, abs=4)
    assert sum(ours.accepted_per_position) == ours.accepted
    assert ours.mean_accepted_length == 1 + ours.accepted / ours.drafts
    assert ours.tokens_per_second is not None
    assert len(ours.to_json()["predicted_ms"]) == 2


def test_a_refused_request_is_a_sentence(random_pair: tiny.Pair, start: Any) -> None:
    server = start(random_pair.target, None)
    with pytest.raises(FailureError, match="llama-server answers 4"):
        server.post("/completion", {"prompt": {"no": "prompt"}, "n_predict": 1})


def test_a_server_that_dies_is_a_sentence(random_pair: tiny.Pair, start: Any) -> None:
    server = start(random_pair.target, None)
    server._process.kill()
    server._process.wait()
    with pytest.raises(FailureError, match="llama-server was killed by signal 9"):
        ask(server, [1, 2, 3], 4)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_the_context_shifts(bigram: Callable[..., Bigram], start: Any, arch: str) -> None:
    """All layers of this draft are windowed, so its cache of full attention has none to shift."""
    pair = bigram(arch, drift=0.28)
    options = ("-c", 128, "--context-shift")
    body = {
        "prompt": [40, 41, 42, 60] * 8,
        "n_predict": 300,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_tokens": True,
    }
    answers = []
    for draft in (None, pair.draft):
        server = start(pair.target, draft, *options)
        answers.append(server.post("/completion", body))
    plain, drafting = answers
    assert drafting["truncated"]
    assert len(plain["tokens"]) == 300
    assert drafting["tokens"] == plain["tokens"]
    assert 0 < drafting["timings"]["draft_n_accepted"] < drafting["timings"]["draft_n"]


@pytest.mark.parametrize("longest", range(50, 58))
def test_a_full_context_ends_the_text_where_it_does_plainly(
    bigram: Callable[..., Bigram], start: Any, longest: int
) -> None:
    """Not up to a round early: the context counts a round's tokens before they are said."""
    pair = bigram("llama", drift=0.28)
    body = {"prompt": [40, 41, 42, 60] * 4, "n_predict": 300, "temperature": 0.0}
    body |= {"ignore_eos": True, "return_tokens": True}
    answers = []
    for draft in (None, pair.draft):
        # with memory that the slots share each is as long as is said, to a token
        options = ("-c", 256, "-kvu", "--kv-unified-per-slot", longest)
        answers.append(start(pair.target, draft, *options).post("/completion", body))
    plain, drafting = answers
    assert plain["truncated"]
    assert drafting["truncated"]
    assert drafting["tokens"] == plain["tokens"]
    assert drafting["timings"]["draft_n_accepted"] > 0
