"""`dflash-cpp draft-vocab`: what is counted, what is listed, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from tiny_checkpoint import make_draft_checkpoint

from dflash_cpp.draft_vocab import Counted

Command = Callable[..., Any]

pytestmark = pytest.mark.native

TEXT = "the rain on the roof and the rain on the lawn\n" * 20 + "zebra xylophone quiz\n"


@pytest.fixture(scope="module")
def target(our_library: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_target(tmp_path_factory.mktemp("target") / "target.gguf", "qwen3")


@pytest.fixture(scope="module")
def llm(target: Path) -> Iterator[Any]:
    from dflash_cpp.opening import open_vocab

    with open_vocab(target) as opened:
        yield opened


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def tokens(llm: Any, text: str) -> list[int]:
    return llm.tokenize(text.encode(), add_bos=False, special=True)


def listed(path: Path) -> tuple[str, list[int]]:
    comment, *ids = path.read_text().splitlines()
    return comment, [int(i) for i in ids]


def counted(done: Any, llm: Any, *texts: str | list[int]) -> None:
    """Check a --json document against texts that are tokenised here."""
    assert done.code == 0, done.err
    ids = [i for t in texts for i in (tokens(llm, t) if isinstance(t, str) else t)]
    data = json.loads(done.out)
    assert (data["counted"], data["distinct"]) == (len(ids), len(set(ids)))


def test_the_most_frequent_tokens(command: Command, target: Path, llm: Any, here: Path) -> None:
    ends = tiny.TargetSpec("qwen3").make_vocab().eog_ids
    done = command("draft-vocab", "-m", target, "-n", 12, "-o", "ids", "text.txt")
    assert done.code == 0, done.err
    counts = Counter(tokens(llm, TEXT))
    best = sorted(counts, key=lambda i: (-counts[i], i))[: 12 - len(ends)]
    comment, ids = listed(here / "ids")
    assert ids == sorted([*best, *ends])
    assert not set(ends) & set(counts)  # they are there although no text has them
    share = 100 * sum(counts[i] for i in best) / counts.total()
    assert comment == (
        f"# 12 of the 512 tokens of target.gguf: they cover {share:.2f} % of {counts.total()} "
        "counted"
    )
    rows = [line.split() for line in done.out.splitlines()]
    for n in (6, 12, 24):
        kept = sorted(counts, key=lambda i: (-counts[i], i))[: n - len(ends)]
        part = 100 * sum(counts[i] for i in kept) / counts.total()
        assert [str(n), f"{part:.2f}", "%"] in rows
    assert f"counted {counts.total():,} tokens" in done.out


def test_json_and_quiet(command: Command, target: Path, here: Path) -> None:
    args = ("draft-vocab", "-m", target, "-n", 8, "-o", "ids", "text.txt")
    data = json.loads(command(*args, "--json").out)
    assert (data["schema"], data["tokens"], data["asked"], data["vocab"]) == (1, 8, 8, 512)
    assert [c["tokens"] for c in data["coverage"]] == [4, 8, 16]
    shares = [c["covered"] for c in data["coverage"]]
    assert shares == sorted(shares)
    assert shares[1] == data["covered"]
    assert data["end_tokens"] == list(tiny.TargetSpec("qwen3").make_vocab().eog_ids)
    assert data["sources"] == [{"path": "text.txt", "counted": data["counted"]}]
    assert command(*args, "--force", "-q").out == "ids\n"


def test_lines_of_jsonl(command: Command, target: Path, llm: Any, here: Path) -> None:
    records: list[dict[str, Any]] = [
        {"text": "one two", "prompt": "never counted", "id": "x"},
        {"content": "three", "response": "four", "answer": "five"},
        {"answer": [5, 6, 5]},
        {"messages": [{"role": "user", "content": "six"}, {"content": [{"text": "seven"}]}, 3]},
        {"text": None, "messages": "no list", "answer": [], "content": 4},
        {},
    ]
    lines = [json.dumps(r) for r in records]
    (here / "a.jsonl").write_text("\ufeff" + "\n\n".join(lines) + "\n")
    done = command("draft-vocab", "-m", target, "-n", 9, "-o", "ids", "a.jsonl", "--json")
    texts = ("one two", "three", "four", "five", [5, 6, 5], "six", "seven")
    counted(done, llm, *texts)
    assert {5, 6} <= set(listed(here / "ids")[1])
    both = ("-o", "both", "a.jsonl", "text.txt", "--json")
    counted(command("draft-vocab", "-m", target, "-n", 9, *both), llm, *texts, TEXT)


def test_control_tokens_of_a_log_count_as_such(
    command: Command, target: Path, llm: Any, here: Path
) -> None:
    (here / "log").write_text("hello<|im_end|>")
    done = command("draft-vocab", "-m", target, "-n", 9, "-o", "ids", "log", "--json")
    assert json.loads(done.out)["counted"] == len(tokens(llm, "hello")) + 1


def test_long_texts_come_in_pieces(
    command: Command, target: Path, llm: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut at the ends of lines, so never inside a word or a character."""
    monkeypatch.setattr("dflash_cpp.draft_vocab._CHUNK", 7)
    text = "naïve ☃ words\nand 日本語 lines\r\n" * 3 + "no end of line é"
    (here / "long").write_text("\ufeff" + text, newline="")
    done = command("draft-vocab", "-m", target, "-n", 9, "-o", "ids", "long", "--json")
    counted(done, llm, *text.splitlines(keepends=True))


def test_more_tokens_than_were_seen(command: Command, target: Path, llm: Any, here: Path) -> None:
    done = command("draft-vocab", "-m", target, "-n", 500, "-o", "ids", "text.txt")
    assert done.code == 0
    seen = set(tokens(llm, TEXT))
    ends = tiny.TargetSpec("qwen3").make_vocab().eog_ids
    assert listed(here / "ids")[1] == sorted(seen | set(ends))
    assert f"only {len(seen)} different tokens were seen" in done.err
    assert f"{len(seen) + len(ends)} in all, not 500" in done.err
    assert "100.00 %" in done.out


def test_ties_go_to_the_lower_id() -> None:
    found = Counted(9, (8,), Counter({5: 2, 3: 2, 1: 2, 7: 5, 8: 1}))
    assert found.choose(3) == [1, 7, 8]
    assert found.choose(1) == found.choose(0) == [8]
    assert found.choose(100) == [1, 3, 5, 7, 8]
    assert found.covered([1, 7, 8]) == 8 / 12


def test_the_converter_takes_the_list(command: Command, target: Path, here: Path) -> None:
    import dflash_convert

    assert command("draft-vocab", "-m", target, "-n", 64, "-o", "ids", "text.txt").code == 0
    options = tiny.draft_options(tiny.TargetSpec("qwen3"))
    checkpoint = make_draft_checkpoint(here / "draft", **options)
    _, ids = listed(here / "ids")
    result = dflash_convert.convert(checkpoint, target, "d.gguf", draft_vocab="ids")
    assert result.draft_vocab == len(ids)
    assert result.warnings == ()  # the ends of a text are there


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.txt", b"fine\n\xff\n", "`t.txt` is not UTF-8 text (byte 5)"),
        ("t.jsonl", b'{"text": "a"}\n{"text": \n', "`t.jsonl` line 2 is not JSON"),
        ("t.jsonl", b'{"text": "\xff"}\n', "`t.jsonl` line 1 is not JSON (not UTF-8 text)"),
        ("t.jsonl", b"[1]\n", "`t.jsonl` line 1 is not an object"),
        ("t.jsonl", b'{"prompt": "a"}\n', "`t.jsonl` has no text, expected objects with"),
        ("t.jsonl", b'{"answer": [1, 512]}\n', "line 1 has `512` in `answer`"),
        ("t.jsonl", b'{"answer": [1, true]}\n', "line 1 has `true` in `answer`"),
        ("t.jsonl", b'{"answer": [null]}\n', "line 1 has `null` in `answer`"),
    ],
)
def test_texts_that_cannot_be_used(
    command: Command, target: Path, here: Path, name: str, content: bytes, said: str
) -> None:
    (here / name).write_bytes(content)
    before = sorted(here.iterdir())
    done = command("draft-vocab", "-m", target, "-n", 9, "-o", "ids", "text.txt", name)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert said in done.err
    assert sorted(here.iterdir()) == before


def test_empty_texts(command: Command, target: Path, here: Path) -> None:
    (here / "empty").touch()
    done = command("draft-vocab", "-m", target, "-n", 9, "-o", "ids", "empty", "empty")
    assert (done.code, done.out) == (2, "")
    assert "no tokens in `empty`, `empty`, expected text" in done.err
    assert not (here / "ids").exists()
    assert command("draft-vocab", "-m", target, "-n", 9, "-o", "ids", "empty", "text.txt").code == 0


def test_arguments_that_cannot_be_used(command: Command, target: Path, here: Path) -> None:
    def said(*args: object) -> str:
        done = command("draft-vocab", "-m", target, "-n", 9, *args)
        assert (done.code, done.out) == (2, "")
        return str(done.err)

    assert "no file `none`" in said("-o", "ids", "none")
    assert "is a directory, expected a file of text" in said("-o", "ids", here)
    assert "no directory `no`" in said("-o", "no/ids", "text.txt")
    assert "`text.txt` is one of the texts" in said("-o", "text.txt", "text.txt", "--force")
    assert (here / "text.txt").read_text() == TEXT
    assert "has no room for the 2 tokens that end a text" in said("-n", 1, "-o", "ids", "text.txt")
    assert "missing argument" in said("-o", "ids")
    assert "does not exist, expected a GGUF" in said("-m", "no.gguf", "-o", "ids", "text.txt")
    assert "llama.cpp cannot load `text.txt`" in said("-m", "text.txt", "-o", "ids", "text.txt")
    assert [p.name for p in here.iterdir()] == ["text.txt"]


def test_an_existing_list_stays(command: Command, target: Path, here: Path) -> None:
    (here / "ids").write_text("mine")
    args = ("draft-vocab", "-m", target, "-n", 9, "-o", "ids", "text.txt")
    done = command(*args)
    assert done.code == 2
    assert "`ids` exists" in done.err
    assert "hint: add `--force` to replace it" in done.err
    assert (here / "ids").read_text() == "mine"
    # before the work: the target has not been looked at
    assert "`ids` exists" in command(*args, "-m", "no.gguf").err
    assert command(*args, "--force").code == 0
    assert len(listed(here / "ids")[1]) == 9


def test_a_failed_write_leaves_nothing(
    command: Command, target: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "full")

    (here / "ids").write_text("mine")
    monkeypatch.setattr("dflash_cpp.draft_vocab.os.fsync", full)
    done = command("draft-vocab", "-m", target, "-n", 9, "-o", "ids", "text.txt", "--force")
    assert (done.code, done.err) == (1, "error: no space left on the device\n")
    assert (here / "ids").read_text() == "mine"
    assert sorted(p.name for p in here.iterdir()) == ["ids", "text.txt"]
