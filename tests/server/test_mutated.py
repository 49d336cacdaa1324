"""Mutated requests: each gets an HTTP answer, and the server answers as before afterwards."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from bigram import Bigram

pytestmark = pytest.mark.native

PROMPT = [40, 41, 42, 60]
BASES: dict[str, dict[str, Any]] = {
    "/completion": {
        "prompt": PROMPT,
        "n_predict": 12,
        "temperature": 0.8,
        "top_k": 8,
        "top_p": 0.9,
        "min_p": 0.05,
        "typical_p": 0.9,
        "repeat_penalty": 1.1,
        "repeat_last_n": 16,
        "dry_multiplier": 0.5,
        "xtc_probability": 0.1,
        "mirostat": 0,
        "seed": 1,
        "n_probs": 2,
        "n_keep": 2,
        "cache_prompt": True,
        "stop": ["xyz"],
        "logit_bias": [[5, -1.0]],
        "grammar": "root ::= [a-z ]*",
        "id_slot": -1,
        "samplers": ["top_k", "top_p", "temperature"],
        "speculative.n_max": 7,
        "speculative.n_min": 0,
        "speculative.p_min": 0.1,
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "abc"}],
        "max_tokens": 12,
        "temperature": 0.7,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": "z",
        "response_format": {"type": "json_object"},
    },
    "/v1/completions": {"prompt": "abc", "max_tokens": 8, "n": 2, "echo": False, "logprobs": 2},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 4},
    "/tokenize": {"content": "abc", "add_special": True},
    "/detokenize": {"tokens": PROMPT},
    "/apply-template": {"messages": [{"role": "user", "content": "abc"}]},
}
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 8, 9, 64, 2**31 - 1, 2**31, -(2**31), 2**63, 1e-30, 1e30,
    -0.5, 0.5, 1.5, "", "a", "\x00", "\ud83d\ude00", [], [[]], {}, [None], ["a"], [-1], [2**31],
    [1e9], [[0, False]], [["a", 3]], {"a": 1}, PROMPT, ["top_k"], ["no such sampler"],
]  # fmt: skip
# What may take long by itself is no fault: lengths are left alone and a request has little time.
LENGTHS = {"n_predict", "max_tokens", "n", "n_cmpl"}


def value(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(VALUES))


def mutate(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 2, 3])):
        key = rng.choice([k for k in body if k not in LENGTHS] or ["prompt"])
        what = rng.random()
        if what < 0.1:
            body.pop(key, None)
        elif what < 0.2:
            body[rng.choice(["prompt", "grammar", "json_schema", "lora", "t_max_predict_ms"])] = (
                value(rng)
            )
        elif what < 0.3 and isinstance(body.get(key), list) and body[key]:
            body[key][rng.randrange(len(body[key]))] = value(rng)
        else:
            body[key] = value(rng)
    if "n" in body and body.get("prompt") != BASES["/v1/completions"]["prompt"]:
        # several answers to an empty prompt: llama-server, the unpatched one too, never sends them
        body["n"] = 1
    return body


def cases(seed: int, n: int) -> Iterator[tuple[str, bytes]]:
    rng = random.Random(seed)
    for _ in range(n):
        path = rng.choice(list(BASES))
        content = json.dumps(mutate(rng, BASES[path])).encode()
        if rng.random() < 0.1:  # broken as text
            at = rng.randrange(len(content))
            content = content[:at] + rng.choice([b"", b"}", b"\xff", b'"']) + content[at + 1 :]
        yield path, content


def check(server: Any, seed: int, n: int) -> dict[int, int]:
    """Sends `n` requests of `seed`; how many answers had which status."""
    body = {"prompt": PROMPT, "n_predict": 32, "temperature": 0.0, "return_tokens": True}
    counts: dict[int, int] = {}
    with httpx.Client(trust_env=False, timeout=60.0) as http:

        def reference() -> list[int]:
            answer = http.post(f"{server.url}/completion", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["tokens"]

        expected = reference()
        for i, (path, content) in enumerate(cases(seed, n)):
            try:
                answer = http.post(f"{server.url}{path}", content=content)
            except httpx.HTTPError as error:
                raise AssertionError(f"{path} {content!r}: {error!r}") from error
            counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
            if i % 100 == 99:
                assert reference() == expected, (seed, i)
        assert reference() == expected
    assert server.running
    return counts


@pytest.mark.parametrize(
    "n", [400, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_every_request_gets_an_answer(
    bigram: Callable[..., Bigram], start: Any, arch: str, n: int
) -> None:
    pair = bigram(arch)
    server = start(pair.target, pair.draft, "--spec-draft-n-max", 7, "-np", 2, "-kvu")
    counts = check(server, seed=n, n=n)
    assert counts[200] > n // 10
    assert counts[400] > n // 10
