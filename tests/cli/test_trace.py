"""`dflash-cpp trace`: the numbers of `draft_trace`, as tables, JSON and a page that is safe."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bigram import Bigram

from dflash_cpp import trace as tracer
from dflash_cpp.trace import Candidate, Position, Trace, TracedRound
from dflash_cpp.trace_page import page

VOID = {"meta", "br", "hr"}


class Page(HTMLParser):
    """Reads a page; fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.names: set[str] = set()
        self.data: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.data.append(data)


def arguments(pair: Any, *more: object) -> list[object]:
    return ["trace", "-m", pair.target, "-md", pair.draft, "-c", 256, "-t", 1, "-n", 24, *more]


def told(pair: Bigram, prompt: str) -> list[Any]:
    """What `draft_trace` returns for every round of the same text."""
    from dflash_cpp import DFlashLlama
    from dflash_cpp.text import encode_prompt

    found = []
    with DFlashLlama(
        pair.target, draft_path=pair.draft, adaptive=False, draft_trace=True,
        n_ctx=256, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False,
    ) as llm:  # fmt: skip
        tokens = encode_prompt(llm, prompt)
        for _ in zip(llm.generate(tokens, temp=0.0), range(60), strict=False):
            if llm.last_stats.rounds:
                trace = llm.draft_trace()
                if not found or found[-1].pos != trace.pos:
                    found.append(trace)
    return found


@pytest.mark.native
def test_json_has_the_values_of_draft_trace(command: Callable[..., Any], pair: Bigram) -> None:
    done = command(*arguments(pair, "-p", "the sea", "--json"))
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    rounds, expected = document["rounds"], told(pair, "the sea")
    assert 3 <= len(rounds) <= len(expected)
    text = [rounds[0]["anchor"]]
    for shown, trace in zip(rounds, expected, strict=False):
        assert (shown["pos"], shown["anchor"]) == (trace.pos, trace.anchor)
        assert (shown["draft_n"], shown["draft_n_accepted"]) == (7, trace.n_accepted)
        assert tuple(p["chosen"] for p in shown["positions"]) == trace.draft
        candidates = np.array([p["candidates"] for p in shown["positions"]])
        assert (candidates == trace.candidates).all()
        scores = np.array([p["scores"] for p in shown["positions"]], np.float32)
        assert (scores == trace.scores).all()
        logits = np.array([p["logits"] for p in shown["positions"]], np.float32)
        assert (logits == np.take_along_axis(trace.logits, trace.candidates, 1)).all()
        n = trace.n_accepted
        outcomes = ["accepted"] * n + ["rejected"] + ["not reached"] * 6
        assert [p["outcome"] for p in shown["positions"]] == outcomes[:7]
        targets = [*trace.draft[:n], shown["target"], *[None] * 7][:7]
        assert [p["target"] for p in shown["positions"]] == targets
        text += [*trace.draft[:n], shown["target"]]
    assert document["tokens"] == text
    # the greedy text of this pair is a known function of its first token
    assert text[1:] == pair.text(text[0], len(text) - 1)
    assert sum(document["accepted"]) == sum(r["draft_n_accepted"] for r in rounds)
    assert {str(t) for t in text} <= set(document["pieces"])


@pytest.mark.native
def test_tables_and_page(command: Callable[..., Any], pair: Bigram, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    done = command(*arguments(pair, "-p", "<b>the & sea", "--html", file))
    assert done.code == 0
    assert done.err == f"wrote {file}\n"
    assert "round 1, after " in done.out
    assert "drafted 7, accepted " in done.out
    lines = done.out.splitlines()
    for word in ("accepted", "rejected", "not reached", "chosen, target"):
        assert any(word in line for line in lines), word
    # all candidates of 7 positions in each round
    rounds = sum(line.startswith("round ") for line in lines)
    assert len(lines) == rounds * (3 + 7 * 16) + 2
    shorter = command(*arguments(pair, "-p", "<b>the & sea", "--top", 1))
    assert len(shorter.out) < len(done.out) / 3
    text = file.read_text(encoding="utf-8")
    assert "http" not in text
    read = Page(text)
    assert "script" not in read.tags | read.names
    assert not read.names & {"src", "href", "onload", "onclick"}
    assert "<b>the & sea" in read.data
    assert sum(d.startswith("round ") for d in read.data) == rounds
    assert command(*arguments(pair, "-p", "x", "--html", file, "-q")).out == f"{file}\n"


def made_up(pieces: dict[int, bytes], selector: bool = True) -> Trace:
    """One round over tokens with the given bytes."""
    ids = sorted(pieces)
    candidates = tuple(Candidate(t, -0.5 if selector else None, 1.0 + t) for t in ids[:-1])
    positions = (
        Position(1, candidates, ids[0], tracer.ACCEPTED, ids[0]),
        Position(2, candidates, ids[1], tracer.REJECTED, ids[-1]),
        Position(3, candidates, None, tracer.UNDRAFTED, None),
    )
    one = TracedRound(1, 5, ids[2], positions, 2, 1, ids[-1], False)
    return Trace((one,), (ids[2], ids[0], ids[-1]), (False, True, False), pieces)


ODD = {
    1: b"<script>alert('x')</script>",
    2: b"\xe2\x82",
    3: b'\xac"&</td><img src=x onerror=y>',
    4: b"\x1b[31m\n\t\x00",
    5: "\u202eright to left\u2028".encode(),
    6: "</style>ünï 😀".encode(),
}


@pytest.mark.parametrize("selector", [True, False])
def test_odd_tokens_are_only_text(selector: bool) -> None:
    trace = made_up(ODD, selector)
    text = page(trace, {"prompt": "<script>1</script>", "model": "a\"b'c"})
    read = Page(text)
    assert not read.tags & {"script", "img"}
    assert "onerror" not in read.names
    assert text.count("<script") == text.count("<img") == 0
    assert text.count("</style>") == 1
    data = "".join(read.data)
    for shown in (
        "<script>alert('x')</script>", "\\xe2\\x82", "\\xac\"&</td><img src=x onerror=y>",
        "\\x1b[31m\\n\\t\\x00", "\\u202eright to left\\u2028", "</style>ünï 😀", "a\"b'c",
    ):  # fmt: skip
        assert shown in data
    text.encode("utf-8")
    document = json.loads(json.dumps(trace.to_json()))
    assert document["pieces"]["2"] == "\\xe2\\x82"
    rows = tracer.rows(trace, trace.rounds[0])
    assert all(len(row) == len(tracer.COLUMNS) for row in rows)
    assert rows[-6][-1] == "target, no candidate"
    assert all("\n" not in cell and "\x1b" not in cell for row in rows for cell in row)
    assert [row[5] != "" for row in rows[:5]] == [selector] * 5


def test_only_asked_positions_count_in_the_summary() -> None:
    trace = made_up(ODD)
    assert tracer.summary(trace)[1].endswith("a candidate in 0 of 1 cases")
    assert tracer.summary(replace(trace, rounds=())) == ["the text ends before a round could begin"]


@pytest.mark.native
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["-m", "no.gguf"], "the target `no.gguf` does not exist"),
        (["-n", 250], "exceed the context of 256"),
        (["-n", 1], "greater than or equal to 2"),
        (["--html", "."], "is a folder"),
        (["--html", "no/such/page.html"], "does not exist"),
    ],
)
def test_bad_input(
    command: Callable[..., Any], pair: Bigram, change: list[object], said: str
) -> None:
    done = command(*arguments(pair, "-p", "the sea", *change))
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert said in done.err.lower()
    assert done.out == ""
