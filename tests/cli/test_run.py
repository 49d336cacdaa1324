"""`dflash-cpp run`: what it prints where, and how it ends."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from bigram import Bigram

pytestmark = pytest.mark.native

GREEN, OFF = "\x1b[32m", "\x1b[0m"


def arguments(pair: Any, *more: object) -> list[object]:
    return ["run", "-m", pair.target, "-md", pair.draft, "-c", 256, "-t", 1, "-n", 40, *more]


def test_text_on_stdout_the_rest_on_stderr(command: Callable[..., Any], pair: Bigram) -> None:
    done = command(*arguments(pair, "-p", "the sea"))
    assert done.code == 0
    lines = done.err.splitlines()
    assert lines[0].startswith("40 tokens, ended by length; prompt of ")
    assert "mean accepted length" in lines[1]
    assert lines[2].startswith("accepted per position, %: ")
    assert lines[3].startswith("speed: ")
    assert "\x1b" not in done.out + done.err
    quiet = command(*arguments(pair, "-p", "the sea", "-q"))
    assert (quiet.out, quiet.err) == (done.out, "")


def test_json(command: Callable[..., Any], pair: Bigram) -> None:
    done = command(*arguments(pair, "-p", "the sea", "--json", "--compare"))
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    assert document["schema"] == 1
    assert len(document["tokens"]) == len(document["drafted"]) == 40
    # greedy text of this pair is a known function of its first token
    tokens = document["tokens"]
    assert tokens[1:] == pair.text(tokens[0], 39)
    stats = document["stats"]
    assert sum(document["drafted"]) <= stats["draft_n_accepted"] < stats["draft_n"]
    assert stats["mode"] == "draft-dflash"
    assert document["settings"]["temp"] == 0.0
    comparison = document["comparison"]
    assert comparison["same_tokens"] is True
    assert comparison["plain"]["tokens"] == tokens
    assert comparison["plain"]["stats"]["mode"] == "plain"
    assert comparison["speed_ratio"] > 0


def test_compare_says_so_when_the_texts_differ(
    command: Callable[..., Any], pair: Bigram, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_cpp.llama import DFlashLlama

    assert (
        "the same tokens as plain decoding"
        in command(*arguments(pair, "-p", "the sea", "--compare")).err
    )
    honest = DFlashLlama.generate

    def generate(self: DFlashLlama, *args: Any, **kwargs: Any) -> Any:
        for n, token in enumerate(honest(self, *args, **kwargs)):
            yield (token + 1) % 200 if self.speculate and n == 7 else token

    monkeypatch.setattr(DFlashLlama, "generate", generate)
    done = command(*arguments(pair, "-p", "the sea", "--compare"))
    assert "other tokens than plain decoding from token 7 on" in done.err


def test_a_seed_repeats(command: Callable[..., Any], random_pair: tiny.Pair) -> None:
    def text(*more: object) -> str:
        return str(command(*arguments(random_pair, "-p", "x", "-q", "--temp", 1.5, *more)).out)

    assert text("--seed", 7) == text("--seed", 7)
    assert len({text() for _ in range(3)}) > 1


def test_sampled_text_keeps_its_seed_when_drafts_must_match(
    command: Callable[..., Any], random_pair: tiny.Pair
) -> None:
    sampled = ("-p", "x", "--temp", 1.5, "--seed", 3, "--spec-draft-verify", "match")
    document = json.loads(command(*arguments(random_pair, *sampled, "--compare", "--json")).out)
    assert document["comparison"]["same_tokens"] is True
    assert len(set(document["tokens"])) > 5


def test_prompt_from_standard_input(
    command: Callable[..., Any], pair: Bigram, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    expected = command(*arguments(pair, "-p", "the sea", "-q")).out
    give(b"the sea\n")
    assert command(*arguments(pair, "-q")).out == expected
    give(b"\xff")
    done = command(*arguments(pair, "-q"))
    assert done.code == 2
    assert done.err == "error: standard input is not UTF-8 text (byte 0)\n"


def test_context_end(command: Callable[..., Any], pair: Bigram) -> None:
    done = command(*arguments(pair, "-p", "the sea", "--no-chat", "-n", -1))
    assert done.code == 0
    assert "ended by context" in done.err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["-m", "no.gguf"], "the target `no.gguf` does not exist"),
        (["-md", "no.gguf"], "the draft `no.gguf` does not exist"),
        (["-m", "."], "the target `.` is not a file"),
        (["--n-draft", 99], "n_draft is 99, expected"),
        (["--n-draft", 0], "greater than or equal to 1"),
        (["--temp", -1], "greater than or equal to 0"),
        (["-fa", "maybe"], "'maybe' is not one of 'on', 'off'"),
        (["-p", "x" * 3000], "expected fewer than the context's 256"),
        # llama.cpp makes 256 of it
        (["-p", "x" * 3000, "-c", 64], "expected fewer than the context's 64"),
        (["--nonsense"], "no such option"),
    ],
)
def test_bad_input(
    command: Callable[..., Any], pair: Bigram, change: list[object], said: str
) -> None:
    done = command(*arguments(pair, "-p", "the sea", *change))
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert said.lower() in done.err.lower()
    assert done.out in ("", "\n")


def test_files_that_are_no_models(
    command: Callable[..., Any], pair: Bigram, tmp_path: Path
) -> None:
    rubbish = tmp_path / "rubbish.gguf"
    rubbish.write_bytes(b"not a model" * 100)
    for change in (["-m", rubbish], ["-md", rubbish], ["-md", pair.target]):
        done = command(*arguments(pair, "-p", "the sea", *change))
        assert done.code == 2
        assert done.err.startswith("error: ")


def on_a_terminal(pair: Bigram, **environment: str) -> str:
    """Run the command with a pseudo-terminal as standard output."""
    master, slave = pty.openpty()
    names = ("NO_COLOR", "TERM")
    env = {k: v for k, v in os.environ.items() if k not in names} | environment
    command = [sys.executable, "-m", "dflash_cpp", *map(str, arguments(pair, "-p", "the sea"))]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=slave, stderr=subprocess.PIPE, env=env
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 4096)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        shown += piece
    assert process.wait(60) == 0, process.stderr.read() if process.stderr else ""
    os.close(master)
    if process.stderr:
        process.stderr.close()
    return shown.decode()


def test_colour_only_where_it_is_wanted(command: Callable[..., Any], pair: Bigram) -> None:
    plain = command(*arguments(pair, "-p", "the sea", "-q")).out
    coloured = on_a_terminal(pair, TERM="xterm")
    assert GREEN in coloured
    assert coloured.replace(GREEN, "").replace(OFF, "").replace("\r\n", "\n") == plain
    for environment in ({"TERM": "dumb"}, {"TERM": "xterm", "NO_COLOR": "1"}):
        assert on_a_terminal(pair, **environment).replace("\r\n", "\n") == plain
