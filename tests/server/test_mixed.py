"""Requests of every kind at once, in many configurations: the plain server's greedy answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import mixed_requests as mixed
import pytest
from bigram import Bigram, make_bigram

pytestmark = pytest.mark.native

N_CTX = 256  # of a slot

CONFIGS: dict[str, list[Any]] = {
    "defaults": [],
    "one slot": ["-np", 1, "-c", N_CTX],
    "sixteen slots": ["-np", 16, "-c", 16 * N_CTX],
    "separate memories": ["--no-kv-unified"],
    "one memory": ["--kv-unified", "-c", 16 * N_CTX],  # or it would be full at times
    "micro-batch below a block": ["-ub", 4],
    "batch below the prompts": ["-b", 16, "-ub", 16],
    "no flash attention": ["-fa", "off"],
    "F32 memory": ["-ctk", "f32", "-ctv", "f32", "-fa", "off"],
    "Q8_0 memory": ["-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on"],
    "Q4_0 draft memory": ["-ctkd", "q4_0", "-ctvd", "q4_0", "-fa", "on"],
    "more tokens than a block": ["--spec-draft-n-max", 30],
    "three tokens": ["--spec-draft-n-max", 3],
    "always the whole block": ["--spec-draft-adaptive", "off"],
    "drafts must match": ["--spec-draft-verify", "match", "--spec-draft-adaptive", "off"],
    "other threads for the draft": ["-td", 2],
    "context shift": ["--context-shift"],
    "no prompt cache": ["--cache-ram", 0],
}


QUICK = ("defaults", "sixteen slots", "batch below the prompts", "Q8_0 memory", "three tokens")


def cases(names: Any) -> list[Any]:
    """Configurations as parameters; those that are not in `QUICK` are slow tests."""
    return [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in names]


@pytest.fixture(scope="module")
def ending(bin_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Pairs whose texts end, the end being a token that is drafted like any other."""
    made: dict[str, Bigram] = {}

    def make(arch: str) -> Bigram:
        if arch not in made:
            folder = tmp_path_factory.mktemp(f"ending-{arch}")
            drift = 0.15 if arch == "qwen35" else 0.5
            options = {"wrong": 0.2, "drift": drift, "ends": True, "target_head_dim": 64}
            made[arch] = make_bigram(folder, arch, **options)
        return made[arch]

    return make


def check(pair: Bigram, start: Any, tmp_path: Path, options: list[Any], seed: int) -> None:
    size = options if "-np" in options else ["-np", 4, "-c", 4 * N_CTX, *options]
    size = [*size, "--slot-save-path", tmp_path]
    requests = mixed.make_requests(seed, 60, N_CTX, save=True)
    plain_url = start(pair.target, None, *drop_draft(size)).url
    plain = mixed.play(plain_url, requests, 8)
    server = start(pair.target, pair.draft, *size)
    drafted = mixed.play(server.url, requests, 8)
    assert mixed.faults(requests, plain, drafted, plain_url) == []
    assert server.metrics()["spec_decode_num_accepted_tokens_total"] > 50
    for _ in range(100):  # requests whose client has gone end with their next token
        if server.metrics()["requests_processing"] == 0:
            break
        time.sleep(0.1)
    else:
        raise AssertionError("a slot is stuck")


def drop_draft(options: list[Any]) -> list[Any]:
    """Options without those of the draft, each of which has one value."""
    names = ("-ctkd", "-ctvd", "-td")
    kept, skip = [], False
    for option in options:
        if skip:
            skip = False
        elif str(option).startswith("--spec") or option in names:
            skip = True
        else:
            kept.append(option)
    return kept


@pytest.mark.parametrize("name", cases(CONFIGS))
def test_answers_are_the_plain_servers(name: str, ending: Any, start: Any, tmp_path: Path) -> None:
    check(ending("llama"), start, tmp_path, CONFIGS[name], list(CONFIGS).index(name))


HYBRID = [
    "defaults", "separate memories", "one memory", "context shift", "micro-batch below a block",
    "batch below the prompts",
]  # fmt: skip


@pytest.mark.parametrize("name", cases(HYBRID))
def test_hybrid_targets(name: str, ending: Any, start: Any, tmp_path: Path) -> None:
    check(ending("qwen35"), start, tmp_path, CONFIGS[name], 100 + list(CONFIGS).index(name))


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_texts_that_end_inside_a_block(arch: str, ending: Any, start: Any) -> None:
    """The end of the text as an accepted draft token, at every place in the block."""
    pair = ending(arch)
    servers = [start(pair.target, None)]
    servers.append(start(pair.target, pair.draft, "--spec-draft-adaptive", "off"))
    inside = 0
    for token in pair.cycle.tolist():
        body = {"prompt": [token], "n_predict": 100, "temperature": 0.0, "return_tokens": True}
        plain, drafted = (server.post("/completion", body) for server in servers)
        keys = ("content", "tokens", "stop_type", "tokens_predicted")
        assert {k: drafted[k] for k in keys} == {k: plain[k] for k in keys}
        timings = drafted["timings"]
        inside += drafted["stop_type"] == "eos" and timings.get("draft_n_accepted", 0) > 0
    assert inside > 10
