"""`dflash-cpp bench`: arithmetic on made numbers, the file of results, and the whole of it."""

from __future__ import annotations

import builtins
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
from bigram import Bigram

from dflash_convert.console import Console
from dflash_convert.errors import InputError
from dflash_cpp import bench, bench_options, bench_plots, bench_stats
from dflash_cpp.bench_lanes import BenchLane, Servers, make_lanes
from dflash_cpp.bench_store import FILE_NAME, key_of, open_store
from dflash_cpp.promptset import Prompt, builtin_prompts

PNG = b"\x89PNG\r\n\x1a\n"
LANES = make_lanes(Path("d.gguf"), [1, 3], 7, bench_options.GROUPS)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """How busy the machine is takes a second to find out."""
    for module in ("machine", "bench"):
        monkeypatch.setattr(f"dflash_cpp.{module}.busy_share", lambda *_: 0.25)


def answer(lane: str, repetition: int, ms: float, **more: Any) -> dict[str, Any]:
    """10 tokens in `ms`."""
    record = {"kind": "answer", "lane": lane, "temp": 0.0, "prompt": "a", "class": "code"}
    record |= {"repetition": repetition, "prompt_n": 5, "prompt_ms": 1.0, "predicted_n": 10}
    return record | {"predicted_ms": ms, "tokens": "t"} | more


# --- arithmetic -----------------------------------------------------------------------------------


def test_ratios_are_taken_repetition_by_repetition() -> None:
    records = []
    for repetition, (plain, ours) in enumerate([(100.0, 50.0), (200.0, 50.0), (100.0, 80.0)]):
        records += [answer("plain", repetition, plain), answer("adaptive", repetition, ours)]
    rows = bench_stats.speed_rows(records, LANES, [0.0], ["code"])
    plain, ours = rows
    assert plain["tokens_per_second"]["values"] == [100.0, 50.0, 100.0]
    assert plain["ratio"]["values"] == [1.0, 1.0, 1.0]
    assert ours["tokens_per_second"]["median"] == 200.0
    assert ours["ratio"] == {"median": 2.0, "min": 1.25, "max": 4.0, "values": [2.0, 4.0, 1.25]}
    assert ours["ratio_by_class"] == {"code": ours["ratio"]}
    assert ours["ratio_to_stock"] is None
    said = bench_stats.verdict(rows, LANES, 0.0)
    assert said == (
        "temperature 0: drafting pays; the fastest is `ours, adaptive`, 2.00 times plain "
        "(1.25 to 4.00)"
    )


def test_classes_apart_and_longer_answers_weigh_more() -> None:
    records = []
    for lane, code, prose in (("plain", 100.0, 300.0), ("fixed-1", 50.0, 600.0)):
        records.append(answer(lane, 0, code))
        records.append(answer(lane, 0, prose, prompt="b", **{"class": "prose"}))
    ours = bench_stats.speed_rows(records, LANES, [0.0], ["code", "prose"])[1]
    by_class = {name: r["median"] for name, r in ours["ratio_by_class"].items()}
    assert by_class == {"code": 2.0, "prose": 0.5}
    assert ours["ratio"]["median"] == pytest.approx(400 / 650)


def test_only_prompts_that_both_answered_are_compared() -> None:
    records = [answer("plain", 0, 100.0), answer("plain", 0, 900.0, prompt="b"),
               answer("plain", 1, 100.0), answer("stock-1", 0, 50.0)]  # fmt: skip
    stock = bench_stats.speed_rows(records, LANES, [0.0], ["code"])[1]
    assert stock["lane"] == "stock-1"
    assert stock["ratio"]["values"] == [2.0]


def test_acceptance_of_adaptive_lengths_is_of_what_was_drafted_there() -> None:
    counters = [
        {"draft_n_rounds": 4, "draft_n_skipped": 2, "draft_n": 8, "draft_n_accepted": 4,
         "draft_n_per_pos": [4, 3, 1], "draft_n_accepted_per_pos": [3, 1, 0]},
        {"draft_n_rounds": 2, "draft_n_skipped": 0, "draft_n": 2, "draft_n_accepted": 1,
         "draft_n_per_pos": [2], "draft_n_accepted_per_pos": [1]},
    ]  # fmt: skip

    def added(lane: str) -> dict[str, Any]:
        return bench_stats.acceptance([answer(lane, i, 1.0, **c) for i, c in enumerate(counters)])

    found = added("adaptive")
    assert found["mean_accepted_length"] == 1 + 5 / 6
    assert found["skipped_share"] == 2 / 8
    assert found["acceptance_per_position"] == [4 / 6, 1 / 3, 0.0]
    # stock does not tell how much was drafted at a position
    del counters[0]["draft_n_per_pos"], counters[1]["draft_n_per_pos"]
    found = added("stock-3")
    assert found["acceptance_per_position"] == [4 / 6, 1 / 6, 0.0]
    assert bench_stats.acceptance([answer("plain", 0, 1.0)]) == {}
    never = {"draft_n_rounds": 0, "draft_n_skipped": 9, "draft_n": 0, "draft_n_accepted": 0}
    found = bench_stats.acceptance([answer("adaptive", 0, 1.0, **never)])
    assert found["mean_accepted_length"] is None
    assert found["skipped_share"] == 1.0


def test_texts_are_compared_with_the_same_build() -> None:
    drafted = {"draft_n_rounds": 1, "draft_n": 1, "draft_n_accepted": 1}
    records = [answer("plain", 0, 1.0), answer("stock-plain", 0, 1.0, tokens="u"),
               answer("stock-1", 0, 1.0, tokens="u", **drafted),
               answer("fixed-1", 0, 1.0, tokens="u", **drafted)]  # fmt: skip
    rows = bench_stats.speed_rows(records, LANES, [0.0], ["code"])
    same = {r["lane"]: r["same_text"] for r in rows}
    assert same == {"plain": None, "stock-plain": None, "stock-1": {"same": 1, "of": 1},
                    "fixed-1": {"same": 0, "of": 1}}  # fmt: skip


def test_throughput_is_all_tokens_by_the_wall_clock() -> None:
    records = [
        {"kind": "concurrent", "lane": lane, "requests": 4, "repetition": i, "predicted_n": n,
         "wall_s": wall, "answers": []}
        for lane, walls in (("plain", (2.0, 4.0)), ("adaptive", (1.0, 4.0)))
        for i, (n, wall) in enumerate(zip((80, 80), walls, strict=True))
    ]  # fmt: skip
    plain, ours = bench_stats.concurrent_rows(records, LANES, [4, 8])
    assert plain["tokens_per_second"]["values"] == [40.0, 20.0]
    assert ours["ratio"]["values"] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("ms", "said"), [((90.0, 110.0), "no clear difference"), ((110.0, 120.0), "costs more than")]
)
def test_the_verdict_follows_the_spread(ms: tuple[float, float], said: str) -> None:
    records = [answer("plain", i, 100.0) for i in range(2)]
    records += [answer("fixed-3", i, x) for i, x in enumerate(ms)]
    rows = bench_stats.speed_rows(records, LANES, [0.0], ["code"])
    assert said in str(bench_stats.verdict(rows, LANES, 0.0))
    assert bench_stats.verdict(rows, LANES, 1.0) is None


# --- order ----------------------------------------------------------------------------------------


def options(**change: Any) -> bench_options.BenchOptions:
    prompts = [Prompt("a", "code", "x"), Prompt("b", "prose", "y")]
    given: dict[str, Any] = {
        "target": Path("t.gguf"), "draft": Path("d.gguf"), "stock": None, "no_stock": "",
        "prompts": prompts, "concurrent_prompts": prompts, "n_draft": [1, 3], "n_max": 7,
        "temps": [0.0, 1.0], "concurrency": [1, 2], "prompt_tokens": [64], "repeat": 2,
    }  # fmt: skip
    return bench_options.BenchOptions(**(given | change))


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_every_measurement_is_planned_once(one_at_a_time: bool) -> None:
    steps = list(bench.plan(options(one_at_a_time=one_at_a_time), LANES))
    # per lane and repetition: 2 temperatures x 2 prompts, 1 long prompt, 2 levels
    assert len(steps) == len({s.key for s in steps}) == len(LANES) * 2 * (4 + 1 + 2)
    assert [s.slots for s in steps] == sorted(s.slots for s in steps)
    changes = sum(a.lane != b.lane for a, b in pairwise(steps))
    assert (changes < 8 * len(LANES)) == one_at_a_time
    first = [s.lane.name for s in steps if s.kind == "concurrent" and s.repetition == 0]
    assert sorted(first[: len(LANES)]) == sorted(lane.name for lane in LANES)


def test_lanes_rotate() -> None:
    steps = [s for s in bench.plan(options(), LANES) if s.kind == "answer"]
    starts = [steps[i].lane.name for i in range(0, len(steps), len(LANES))]
    assert starts[:4] == [lane.name for lane in LANES][:4]
    assert len(set(starts)) > 4


def test_lanes() -> None:
    names = ["plain", "stock-plain", "stock-1", "stock-3", "adaptive", "fixed-1", "fixed-3"]
    assert [lane.name for lane in LANES] == names
    assert [x.name for x in make_lanes(Path("d"), [2], 7, ["fixed"])] == ["plain", "fixed-2"]
    assert {lane.plain for lane in LANES if lane.stock} == {"stock-plain"}


# --- what the user gives --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--temp", "0,warm"], "--temp is `0,warm`, expected numbers with commas"),
        (["--temp", "-1"], "--temp has -1, expected 0 to 100"),
        (["--temp", ","], "--temp is `,`"),
        (
            ["--n-draft", "1,8"],
            "--n-draft has 8, expected 1 to 7 (the draft's block size less one)",
        ),
        (["--n-draft", "1.5"], "--n-draft is `1.5`"),
        (["--concurrency", "31"], "31 simultaneous requests need as many prompts"),
        (["--lanes", "stock,mine"], "--lanes has `mine`, expected some of stock, adaptive, fixed"),
        (["--prompts", "nowhere.txt"], "cannot read prompts from `nowhere.txt`"),
        (["--stock", "nowhere"], "`nowhere` does not exist, expected the path of an unpatched"),
        (["--stock", "."], "`.` is not a program"),
        (["-c", "64"], "the context is 64 tokens, expected at least"),
        (["--server-arg", "'"], "--server-arg is `'`, whose quotes are not closed"),
        (["-m", "nowhere.gguf"], "the target `nowhere.gguf` does not exist"),
        (["-m", __file__], "GGUF"),
        (["-md", "nowhere.gguf"], "the draft `nowhere.gguf` does not exist"),
        (["--out", __file__], "is a file, expected a folder for results"),
        (["-r", "0"], "greater than or equal to 1"),
    ],
)
@pytest.mark.native
def test_bad_usage(
    command: Callable[..., Any], pair: Bigram, bin_dir: Path, tmp_path: Path,
    change: list[str], said: str,
) -> None:  # fmt: skip
    given = ["-m", pair.target, "-md", pair.draft, "--out", tmp_path / "out", *change]
    done = command("bench", *given)
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert said in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.native
def test_half_a_pair(command: Callable[..., Any], pair: Bigram, bin_dir: Path) -> None:
    done = command("bench", "-m", pair.target)
    assert done.code == 2
    assert "-md DRAFT.gguf is missing" in done.err


@pytest.mark.native
def test_without_a_pair_the_demos_is_measured(
    pair: Bigram, bin_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(bench_options.demo_pair, "find_target", lambda: tmp_path / "source.gguf")
    monkeypatch.setattr(bench_options.demo_pair, "find_checkpoint", lambda: tmp_path)

    def requantise(source: Path, kind: str, folder: Path) -> tuple[Path, bool]:
        asked.append((source.name, kind))
        return pair.target, False

    monkeypatch.setattr(bench_options.demo_pair, "requantise", requantise)
    monkeypatch.setattr(bench_options.demo_pair, "convert_draft", lambda *_: (pair.draft, False))
    found = bench_options.make_options(
        target=None, draft=None, stock=None, prompts=None, limit=None, n_draft=None, temps="0",
        concurrency=None, prompt_tokens="0", lanes="adaptive", threads=2,
        server_args=["-ngl 99", "--mlock"], console=Console(quiet=True),
    )  # fmt: skip
    assert (found.target, found.draft) == (pair.target.resolve(), pair.draft.resolve())
    assert asked == [("source.gguf", "Q8_0")]
    assert (list(found.n_draft), found.n_max) == ([1, 3, 7], 7)
    assert len({p.klass for p in found.prompts}) == len(found.prompts) == bench_options.LIMIT
    assert (list(found.concurrency), len(found.concurrent_prompts)) == ([1, 2, 4, 8], 8)
    assert found.prompt_tokens == []
    assert found.server_args == ["-ngl", "99", "--mlock"]


def test_numbers() -> None:
    assert bench_options.numbers("3, 1,3", "--x", int, 0, 9) == [3, 1]
    with pytest.raises(InputError, match="--x has 10, expected 0 to 9"):
        bench_options.numbers("10", "--x", int, 0, 9)


# --- the file of results --------------------------------------------------------------------------


def test_results_survive_a_cut_line(tmp_path: Path) -> None:
    settings = {"repeat": 3, "temperatures": [0.0]}
    store = open_store(tmp_path / "new" / "out", settings, resume=False, force=False)
    store.add("session", {"cpu": "x"})
    for i in range(3):
        store.add("answer", {k: v for k, v in answer("plain", i, 1.0).items() if k != "kind"})
    store.add("session_end", {"busy_after": 0.5})
    data = store.path.read_bytes()
    assert len(data.splitlines()) == 6

    def again(**how: bool) -> Any:
        return open_store(store.path.parent, settings, **({"resume": True, "force": False} | how))

    found = again()
    assert (found.done, found.sessions) == (store.done, [{"cpu": "x", "busy_after": 0.5}])
    assert key_of(found.measurements[1]) == ("answer", "plain", 0.0, "a", 1)
    for cut in range(len(data.splitlines()[0]) + 2, len(data), 7):
        store.path.write_bytes(data[:cut])
        found = again()
        whole = data[:cut].count(b"\n") - 2
        assert len(found.measurements) == max(0, min(3, whole))
        assert store.path.read_bytes().endswith(b"\n")
    store.path.write_bytes(data)
    with pytest.raises(InputError, match="holds the results of an earlier run"):
        again(resume=False)
    assert again(resume=False, force=True).done == set()


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    open_store(tmp_path, {"repeat": 3, "prompts": list(range(99))}, resume=False, force=False)
    with pytest.raises(InputError, match=r"other settings \(repeat 3 there, 5 now; prompts\)"):
        open_store(tmp_path, {"repeat": 5, "prompts": []}, resume=True, force=False)
    open_store(tmp_path, {"repeat": 5}, resume=True, force=True).add("session", {})
    assert len((tmp_path / FILE_NAME).read_bytes().splitlines()) == 2


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"{}", b"\xff", b'{"kind": "answer", "lane": "plain"}', b'{"kind": 3}']
)
@pytest.mark.parametrize("where", [1, 2])
def test_a_damaged_file_is_a_sentence(tmp_path: Path, line: bytes, where: int) -> None:
    path = open_store(tmp_path, {}, resume=False, force=False).path
    lines = path.read_bytes().splitlines()[: where - 1]
    path.write_bytes(b"\n".join([*lines, line, b""]))
    with pytest.raises(InputError, match=f"line {where} is no result of a benchmark"):
        open_store(tmp_path, {}, resume=True, force=False)


# --- plots ----------------------------------------------------------------------------------------


def document(**change: Any) -> dict[str, Any]:
    records = []
    for i in range(2):
        counters = {"draft_n_rounds": 2, "draft_n": 6, "draft_n_accepted": 2,
                    "draft_n_accepted_per_pos": [1, 1, 0]}  # fmt: skip
        records += [answer("plain", i, 100.0), answer("stock-3", i, 70.0 + i, **counters)]
    rows = bench_stats.speed_rows(records, LANES, [0.0], ["code"])
    lanes = [{"name": x.name, "words": x.words} for x in LANES]
    return {"lanes": lanes, "speed": rows, "concurrency": []} | change


def test_plots_show_only_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / bench_plots.CONCURRENCY).write_bytes(b"of an earlier run")
    files, why = bench_plots.write_plots(document(), tmp_path)
    assert why is None
    assert [f.name for f in files] == ["speedup.png", "acceptance.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["acceptance.png", "speedup.png"]
    assert all(f.read_bytes().startswith(PNG) for f in files)
    files, why = bench_plots.write_plots(document(speed=[]), tmp_path)
    assert (files, why) == ([], "nothing was measured that could be drawn")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_reason_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = builtins.__import__

    def imported(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return honest(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", imported)
    assert bench_plots.write_plots(document(), tmp_path) == ([], bench_plots.INSTALL)
    assert "pip install matplotlib" in bench_plots.INSTALL


# --- the whole of it ------------------------------------------------------------------------------

SMALL = ("--limit", 2, "-n", 12, "-r", 2, "-t", 1, "--no-progress", "--n-draft", 3)


def arguments(pair: Bigram, out: Path, *change: object) -> list[object]:
    own = [pair.target, "-md", pair.draft, "--out", out]
    return ["bench", "-m", *own, *SMALL, "--lanes", "fixed", *change]


def check(found: dict[str, Any], repeat: int) -> None:
    """Numbers of the document follow from its raw measurements, computed here in another way."""
    raw = found["measurements"]
    for row in found["speed"]:
        speeds, plains = [], []
        for i in range(repeat):
            for lane, to in ((row["lane"], speeds), ("plain", plains)):
                mine = [
                    m for m in raw
                    if (m["kind"], m["lane"], m.get("temp"), m["repetition"])
                    == ("answer", lane, row["temp"], i)
                ]  # fmt: skip
                ms = sum(m["predicted_ms"] for m in mine)
                to.append(1e3 * sum(m["predicted_n"] for m in mine) / ms)
        assert row["tokens_per_second"]["median"] == pytest.approx(median(speeds))
        ratios = [a / b for a, b in zip(speeds, plains, strict=True)]
        assert row["ratio"]["values"] == pytest.approx(ratios)
        assert row["ratio"]["min"] == min(row["ratio"]["values"])
        if "draft_n_rounds" in row:
            mine = [
                m for m in raw
                if (m["kind"], m["lane"], m.get("temp")) == ("answer", row["lane"], row["temp"])
            ]  # fmt: skip
            accepted = sum(m["draft_n_accepted"] for m in mine)
            assert row["draft_n_accepted"] == accepted == sum(row["draft_n_accepted_per_pos"])
            if row["draft_n_rounds"]:
                length = 1 + accepted / sum(m["draft_n_rounds"] for m in mine)
                assert row["mean_accepted_length"] == pytest.approx(length)


@dataclass(frozen=True)
class Measured:
    """A finished benchmark."""

    folder: Path
    document: dict[str, Any]
    pair: Bigram

    def arguments(self, folder: Path, *change: object) -> list[object]:
        """Its command with another folder."""
        own = ("--temp", "0,1", "--concurrency", "2", "--prompt-tokens", "64")
        return arguments(self.pair, folder, *own, *change)

    def copy(self, folder: Path) -> Path:
        """Copy its results, to go on with them."""
        shutil.copytree(self.folder, folder)
        return folder


@pytest.fixture(scope="module")
def measured(pair: Bigram, bin_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("measured") / "out"
    given = Measured(folder, {}, pair).arguments(folder, "--json")
    done = subprocess.run(
        [sys.executable, "-m", "dflash_cpp", *map(str, given)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Measured(folder, json.loads(done.stdout), pair)


@pytest.mark.native
def test_the_numbers_follow_from_the_answers(measured: Measured) -> None:
    found = measured.document
    assert json.loads((measured.folder / "bench.json").read_text()) == found
    check(found, 2)
    assert [lane["name"] for lane in found["lanes"]] == ["plain", "fixed-3"]
    kinds = [m["kind"] for m in found["measurements"]]
    counts = {kind: kinds.count(kind) for kind in ("answer", "prompt", "concurrent")}
    assert counts == {"answer": 2 * 2 * 2 * 2, "prompt": 2 * 2, "concurrent": 2 * 2}
    fixed = next(r for r in found["speed"] if (r["lane"], r["temp"]) == ("fixed-3", 0.0))
    assert fixed["mean_accepted_length"] > 1.5
    assert len(fixed["acceptance_per_position"]) == 3
    assert fixed["same_text"] == {"same": 2, "of": 2}
    for m in found["measurements"]:
        if m["kind"] == "concurrent":
            assert len(m["answers"]) == 2
            assert m["predicted_n"] == sum(a["predicted_n"] for a in m["answers"])
            assert 1e3 * m["wall_s"] >= max(a["predicted_ms"] for a in m["answers"])
        elif m["kind"] == "prompt":
            assert m["prompt_n"] == 64
    assert found["plots"] == ["speedup.png", "acceptance.png", "concurrency.png"]
    pictures = [measured.folder / name for name in found["plots"]]
    assert all(p.read_bytes().startswith(PNG) for p in pictures)
    assert {"cpu", "cores", "busy_before", "busy_after"} <= found["sessions"][0].keys()


@pytest.mark.native
def test_only_what_is_missing_is_measured_again(
    command: Callable[..., Any], measured: Measured, tmp_path: Path
) -> None:
    out = measured.copy(tmp_path / "out")
    # cut off the end, as a lost machine would: two simultaneous requests and the last line
    whole = (out / FILE_NAME).read_bytes().splitlines(keepends=True)
    (out / FILE_NAME).write_bytes(b"".join(whole[:-3]) + whole[-3][:20])
    again = json.loads(command(*measured.arguments(out), "--resume", "--json").out)
    before = measured.document["measurements"]
    assert again["measurements"][:-2] == before[:-2]
    assert {key_of(m) for m in again["measurements"]} == {key_of(m) for m in before}
    assert again["sessions"][1]["busy_before"] == again["sessions"][1]["busy_after"] == 0.25
    check(again, 2)


@pytest.mark.native
def test_a_finished_benchmark_is_shown_again(
    command: Callable[..., Any], measured: Measured, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def none(*_: object) -> None:
        raise AssertionError("a server was started although everything is there")

    monkeypatch.setattr(Servers, "get", none)
    given = measured.arguments(measured.copy(tmp_path / "out"))
    shown = command(*given, "--resume")
    assert shown.code == 0
    assert "24 measurements are in" in shown.err
    assert "0 are left" in shown.err
    assert "Speed of llama-server, one request at a time" in shown.out
    assert "Tokens/s of all simultaneous requests" in shown.out
    assert re.search(r"^temperature 0: drafting .* times plain", shown.out, re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d\d\n", command(*given, "--resume", "-q").out)


@pytest.mark.native
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ([], "holds the results of an earlier run, expected a folder without any"),
        (["--resume", "-n", "13"], "other settings (n_predict 12 there, 13 now), expected"),
        (["--resume", "--prompts", __file__], "other settings"),
    ],
)
def test_results_of_other_settings_are_refused(
    command: Callable[..., Any], measured: Measured, change: list[str], said: str
) -> None:
    before = (measured.folder / FILE_NAME).read_bytes()
    refused = command(*measured.arguments(measured.folder), *change)
    assert (refused.code, refused.out) == (2, "")
    assert said in refused.err
    assert (measured.folder / FILE_NAME).read_bytes() == before


@pytest.mark.native
def test_stock_beside_ours(
    command: Callable[..., Any], pair: Bigram, stock_bin_dir: Path, bin_dir: Path, tmp_path: Path
) -> None:
    given = arguments(pair, tmp_path, "--lanes", "stock,fixed", "--temp", 0, "--concurrency", 0)
    done = command(*given, "--stock", stock_bin_dir / "llama-server", "-r", 1, "--json")
    found = json.loads(done.out)
    check(found, 1)
    rows = {r["lane"]: r for r in found["speed"]}
    assert list(rows) == ["plain", "stock-plain", "stock-3", "fixed-3"]
    # the same draft proposes the same tokens in both builds
    stock, ours = rows["stock-3"], rows["fixed-3"]
    assert stock["mean_accepted_length"] == pytest.approx(ours["mean_accepted_length"], rel=0.1)
    assert stock["ratio_to_stock"]["median"] > 0
    assert stock["same_text"] == {"same": 2, "of": 2}
    assert found["plots"] == ["speedup.png", "acceptance.png"]


@pytest.mark.native
def test_a_stock_server_that_fails_is_left_out(
    command: Callable[..., Any], pair: Bigram, bin_dir: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "llama-server"
    broken.write_text("#!/bin/sh\necho 'E this build is broken' >&2\nexit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    given = arguments(pair, tmp_path / "out", "--lanes", "stock", "--temp", 0, "--concurrency", 0)
    done = command(*given, "--stock", broken, "-r", 1)
    assert done.code == 0
    assert "stock, plain: not measured, because llama-server ended with code 3" in done.out
    assert "E this build is broken" in done.out
    assert json.loads((tmp_path / "out" / "bench.json").read_text())["plots"] == []


@pytest.mark.native
def test_a_server_of_ours_that_fails_is_a_sentence(
    command: Callable[..., Any], pair: Bigram, bin_dir: Path, tmp_path: Path
) -> None:
    done = command(*arguments(pair, tmp_path), "--server-arg", "--no-such-option")
    assert done.code == 1
    assert "error: plain: llama-server ended with code 1" in done.err
    assert "go on with --resume" in done.err


def servers_of(target: Path) -> list[psutil.Process]:
    """Running llama-servers with this target."""
    found = []
    for process in psutil.process_iter(["name", "cmdline"]):
        line = process.info["cmdline"] or []
        if process.info["name"] == "llama-server" and str(target) in line:
            found.append(process)
    return found


@pytest.mark.native
@pytest.mark.parametrize(
    ("number", "code", "phase"),
    [(signal.SIGINT, 130, "answer"), (signal.SIGINT, 130, "concurrent"),
     pytest.param(signal.SIGTERM, 143, "answer", marks=pytest.mark.slow),
     pytest.param(signal.SIGHUP, 143, "concurrent", marks=pytest.mark.slow)],
)  # fmt: skip
def test_an_interrupted_run_keeps_results_and_no_server(
    pair: Bigram, bin_dir: Path, tmp_path: Path, number: int, code: int, phase: str
) -> None:
    change = ("-r", 500, "-n", 40)
    if phase == "concurrent":
        change = ("-r", 1, "-n", 150)
    same = ("--temp", 0, "--lanes", "fixed", "--concurrency", 2, "--limit", 1)
    given = [str(a) for a in arguments(pair, tmp_path, *same, *change)]
    process = subprocess.Popen(
        [sys.executable, "-m", "dflash_cpp", *given],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        # two answers there: in the second case the simultaneous requests come next
        until = time.monotonic() + 60
        while time.monotonic() < until and process.poll() is None:
            text = (tmp_path / FILE_NAME).read_text() if (tmp_path / FILE_NAME).exists() else ""
            if text.count('"kind": "answer"') >= 2 and (
                phase == "answer" or any("2" in p.cmdline() for p in servers_of(pair.target))
            ):
                break
            time.sleep(0.05)
        assert servers_of(pair.target)
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == code
    assert "Traceback" not in err
    assert "measurements are kept in" in err
    assert out == ""
    assert servers_of(pair.target) == []
    lines = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert [x["kind"] for x in lines[:2]] == ["settings", "session"]
    assert len(lines) >= 4
    assert not (tmp_path / "bench.json").exists()


@pytest.mark.native
def test_one_server_at_a_time(
    command: Callable[..., Any], pair: Bigram, bin_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    honest, most = Servers.get, []

    def get(self: Servers, lane: BenchLane, slots: int) -> Any:
        server = honest(self, lane, slots)
        most.append(len(self._running))
        return server

    monkeypatch.setattr(Servers, "get", get)
    given = arguments(pair, tmp_path, "--temp", 0, "--concurrency", 0, "--lanes", "adaptive")
    done = command(*given, "--one-at-a-time", "--json")
    assert done.code == 0
    assert set(most) == {1}
    assert len(most) == 2 * 2 * 2
    plain, ours = json.loads(done.out)["speed"]
    assert ours["draft_n_rounds"] + ours["draft_n_skipped"] > 0
    assert ours["same_text"] == {"same": 2, "of": 2}
    assert plain["same_text"] is None


def test_the_built_in_set_is_enough_for_the_levels_by_default() -> None:
    assert max(bench_options.CONCURRENCY) <= len(builtin_prompts())
