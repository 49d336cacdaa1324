"""`dflash-cpp check`: right, wrong and dead drafts, by files and hub ids."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
from bigram import Bigram, make_bigram
from fake_hub import FakeHub, fake_hub

from dflash_convert.errors import InputError
from dflash_cpp import check
from dflash_cpp.hub import choose
from dflash_cpp.rounds import Round
from dflash_cpp.session import RoundTrace

V = 512


def draft_round(
    draft: int, said: int, *, finite: bool = True, invalid: bool = False, length: int = 1
) -> Round:
    """A round of `length` equal proposals of which the target accepts the first or none."""
    accepted = int(draft == said)
    empty = np.zeros((0, 0), np.float32)
    logits = np.full((length, 4), 0.0 if finite else np.nan, np.float32)
    trace = RoundTrace(
        0, 0, () if invalid else (draft,) * length, accepted,
        np.zeros((0, 0), np.int32), empty, empty, empty, logits,
    )  # fmt: skip
    return Round(trace, (said, 1)[: 1 + accepted], invalid, False)


def rounds_with(hits: int, misses: int) -> list[Round]:
    return [draft_round(i, i) for i in range(hits)] + [
        draft_round(i, i + 1) for i in range(100, 100 + misses)
    ]


@pytest.mark.parametrize(
    ("rounds", "verdict", "said"),
    [
        (rounds_with(50, 50), check.FIT, None),
        (rounds_with(21, 79), check.FIT, None),
        (rounds_with(19, 81), check.WRONG, "19 of 100 first proposals are accepted (19 %)"),
        (rounds_with(3, 97), check.WRONG, "another revision"),
        (rounds_with(1, 99), check.DEAD, "1 of 100 first proposals"),
        (rounds_with(0, 10), check.DEAD, "0 of 10 first proposals"),
        ([*rounds_with(60, 0), *[draft_round(1, 1, finite=False)] * 7], check.DEAD, "no numbers"),
        ([*rounds_with(60, 0), draft_round(1, 1, finite=False)], check.FIT, None),
        ([draft_round(1, 2, invalid=True)] * 9, check.DEAD, "in 9 of 9 rounds"),
        # the same proposal everywhere, which is sometimes right
        (
            [*[draft_round(7, 7)] * 30, *[draft_round(7, i) for i in range(20, 90)]],
            check.DEAD,
            "same token (7)",
        ),
        # a text that really repeats
        ([draft_round(7, 7)] * 100, check.FIT, None),
    ],
)
def test_verdicts(rounds: list[Round], verdict: str, said: str | None) -> None:
    found, reason = check.judge(rounds, V)
    assert found == verdict
    assert (said or "") in (reason or "")
    assert (reason is None) == (verdict == check.FIT)


def test_chance() -> None:
    assert check.at_least(0, 10, 0.5) == 1.0
    assert check.at_least(10, 10, 0.5) == pytest.approx(0.5**10)
    assert check.at_least(1, 250, 1 / V) == pytest.approx(1 - (1 - 1 / V) ** 250)


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.native
def test_right_draft(command: Callable[..., Any], pair: Bigram) -> None:
    done = command("check", pair.target, pair.draft, "-t", 1, "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    assert document["verdict"] == "fit"
    assert document["reasons"] == []
    assert [p["class"] for p in document["prompts"]] == ["code", "dialogue", "list", "prose"]
    assert all(64 <= p["emitted_n"] + 1 <= 64 + pair.block for p in document["prompts"])
    measured = document["measured"]
    # a fifth of the successors are wrong, and lengths are fixed
    assert 0.6 < measured["first_acceptance"] < 0.9
    assert measured["draft_n"] == 7 * measured["draft_rounds"]
    assert measured["draft_n_accepted"] == sum(measured["draft_n_accepted_per_pos"])
    assert document["thresholds"]["first_acceptance"] == check.MIN_FIRST
    shown = command("check", pair.target, pair.draft, "-t", 1)
    assert shown.code == 0
    assert "the draft fits the target\n" in shown.out
    assert command("check", pair.target, pair.draft, "-t", 1, "-q").out == "fit\n"


@pytest.mark.native
def test_draft_of_another_target(command: Callable[..., Any], pair: Bigram, tmp_path: Path) -> None:
    other = make_bigram(tmp_path, seed=1)
    done = command("check", pair.target, other.draft, "-t", 1)
    assert done.code == 1
    assert "wrong target or wrong revision: " in done.out


@pytest.mark.native
def test_random_draft(command: Callable[..., Any], random_pair: tiny.Pair) -> None:
    done = command("check", random_pair.target, random_pair.draft, "-t", 1)
    assert done.code == 1
    assert "dead draft: " in done.out
    assert "blind guessing" in done.out


@pytest.mark.native
def test_draft_with_nan(command: Callable[..., Any], pair: Bigram, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(pair.draft.read_bytes())
    reader = gguf.GGUFReader(damaged, "r+")
    (norm,) = (t for t in reader.tensors if t.name == "output_norm.weight")
    norm.data[:] = np.nan
    reader.data.flush()
    done = command("check", pair.target, damaged, "-t", 1, "-q")
    assert (done.code, done.out) == (1, "dead\n")


@pytest.mark.native
def test_files_that_do_not_fit(command: Callable[..., Any], pair: Bigram, tmp_path: Path) -> None:
    other = tiny.make_pair(tmp_path, "llama", target={"n_vocab": 600, "n_embd": 320})
    done = command("check", pair.target, other.draft, "--json")
    document = json.loads(done.out)
    assert (done.code, document["verdict"]) == (1, "misfit")
    assert len(document["reasons"]) >= 2
    assert document["measured"] is None
    shown = command("check", pair.target, other.draft)
    assert shown.code == 1
    assert "draft and target do not fit:" in shown.out
    assert "  - hidden size: " in shown.out


@pytest.mark.native
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no.gguf", "{draft}"], "the target `no.gguf` does not exist"),
        (["{target}", "no/such.gguf"], "the draft `no/such.gguf` does not exist"),
        (["{target}", "."], "the draft `.` is not a file"),
        (["{target}"], "missing argument"),
        (["{target}", "{draft}", "-c", 64], "exceed the context of"),
        (["{target}", "{rubbish}"], "rubbish.gguf"),
    ],
)
def test_bad_input(
    command: Callable[..., Any], pair: Bigram, tmp_path: Path, arguments: list[Any], said: str
) -> None:
    rubbish = tmp_path / "rubbish.gguf"
    rubbish.write_bytes(b"not a model" * 100)
    names = {"target": pair.target, "draft": pair.draft, "rubbish": rubbish}
    done = command("check", *(str(a).format(**names) for a in arguments))
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert said in done.err.lower()


# --- hub ids --------------------------------------------------------------------------------------

NAMES = (
    "README.md",
    "Qwen-Q4_0.gguf",
    "sub/Qwen-Q8_0-00001-of-00002.gguf",
    "sub/Qwen-Q8_0-00002-of-00002.gguf",
    "mmproj-Qwen-F16.gguf",
    "dflash-Qwen-Q8_0.gguf",
)


@pytest.mark.parametrize(
    ("wanted", "what", "name"),
    [
        (None, "draft", "dflash-Qwen-Q8_0.gguf"),
        ("Q4_0", "target", "Qwen-Q4_0.gguf"),
        ("q8_0", "target", "sub/Qwen-Q8_0-00001-of-00002.gguf"),
        ("Q8_0", "draft", "dflash-Qwen-Q8_0.gguf"),
        ("Qwen-Q4_0.gguf", "draft", "Qwen-Q4_0.gguf"),
    ],
)
def test_which_file_of_a_model(wanted: str | None, what: str, name: str) -> None:
    assert choose(NAMES, "org/Qwen", wanted, what) == name


@pytest.mark.parametrize(
    ("names", "wanted", "said"),
    [
        (NAMES, None, "has 2 files that could be the target: Qwen-Q4_0.gguf, sub/Qwen-Q8_0-0"),
        (NAMES, "F32", "has no file `F32`, but Qwen-Q4_0.gguf"),
        (("README.md",), None, "has no GGUF files, expected the target"),
        (("dflash-a.gguf",), None, "has no file that could be the target, but dflash-a.gguf"),
    ],
)
def test_no_file_or_several(names: tuple[str, ...], wanted: str | None, said: str) -> None:
    with pytest.raises(InputError) as caught:
        choose(names, "org/Qwen", wanted, "target")
    assert said in str(caught.value)


@pytest.fixture
def hub(pair: Bigram, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub with a target, a draft and a model that needs a token."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder in (target, draft):
        folder.mkdir()
    (target / "Tiny-F32.gguf").symlink_to(pair.target)
    (draft / "dflash-Tiny-F32.gguf").symlink_to(pair.draft)
    (draft / "dflash-Tiny-Q8_0.gguf").write_bytes(b"never read")
    models = {"org/Tiny": target, "org/Draft": draft, "org/Gated": draft}
    with fake_hub(models) as server:
        server.gated.add("org/Gated")
        yield server


@pytest.fixture
def ask(hub: FakeHub, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command with that hub and an empty cache."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dflash_cpp", *arguments],
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "HF_ENDPOINT": hub.endpoint,
                "HF_HOME": str(tmp_path / "cache"),
                "HF_TOKEN": "",
                "HF_HUB_DISABLE_XET": "1",
                "HF_HUB_DISABLE_TELEMETRY": "1",
            },
            timeout=120,
        )

    return run


@pytest.mark.native
def test_hub_ids(ask: Callable[..., Any], hub: FakeHub) -> None:
    done = ask("check", "org/Tiny@v1", "org/Draft:F32", "-t", "1", "-q")
    assert (done.returncode, done.stdout) == (0, "fit\n"), done.stderr
    assert hub.fetched() == ["Tiny-F32.gguf", "dflash-Tiny-F32.gguf"]


@pytest.mark.native
@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ("org/Draft", "has 2 files that could be the draft"),
        ("org/None", "no such model on the hub"),
        ("org/Gated:F32", "is gated"),
        ("org/Draft@v9:F32", "has no revision `v9`"),
    ],
)
def test_bad_hub_ids(ask: Callable[..., Any], draft: str, said: str) -> None:
    done = ask("check", "org/Tiny", draft)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(("error: ", "hint: "))
    assert said in done.stderr
    assert "Traceback" not in done.stderr
