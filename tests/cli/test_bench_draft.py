"""`dflash-cpp bench-draft`: both builds on a tiny pair, random pairs, and what can go wrong."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny

from dflash_convert.config import read_config
from dflash_convert.console import Console
from dflash_convert.gguf_file import read_gguf
from dflash_cpp import bench_draft, bench_options, random_pair
from dflash_cpp.bench_draft import DraftBenchOptions, compare, run_bench
from dflash_cpp.bench_draft_report import KINDS

# Answers like dflash-draft-round, and notes who was asked for a pass.
FAKE = """#!{python}
import json, sys
name, log = {name!r}, {log!r}
print(json.dumps({{"block": 8, "causal": False}}), flush=True)
for line in sys.stdin:
    word = line.split()[0]
    if word == "round":
        open(log, "a").write(name)
    kinds = dict.fromkeys({kinds!r}, 1)
    answers = {{
        "round": {{"us": {us}}}, "inject": {{"us": 1}}, "profile": {{"us": kinds, "nodes": kinds}},
        "memory": {{"compute": 1}}, "lattice": {{"tokens": [[1, 2]], "scores": [[1.0, 2.0]]}},
    }}
    print(json.dumps(answers.get(word, {{}})), flush=True)
"""


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """How busy the machine is takes a second to find out."""
    for module in ("machine", "bench_draft"):
        monkeypatch.setattr(f"dflash_cpp.{module}.busy_share", lambda *_: 0.25)


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def fake(folder: Path, name: str, us: int) -> Path:
    text = FAKE.format(
        python=sys.executable, name=name, log=str(folder / "log"), us=us, kinds=list(KINDS)
    )
    return program(folder / name, text)


def arguments(pair: tiny.Pair) -> list[Any]:
    return ["-m", pair.target, "-md", pair.draft, "-t", 1, "-c", 512, "--prompt-tokens", 48]


# --- arithmetic and order -------------------------------------------------------------------------


def test_proposals_are_compared_up_to_the_first_difference() -> None:
    ours = {"tokens": [[1, 2, 3], [4, 5, 6]], "scores": [[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]]}
    stock = {"tokens": [[1, 2, 3], [4, 9, 6]], "scores": [[1.0, 2.5, 3.0], [1.25, 7.0, 7.0]]}
    assert compare(ours, stock) == {"same": 4, "of": 6, "score_difference": 0.5}
    other = {"tokens": [[7], [7]], "scores": [[1.0], [1.0]]}
    none = compare(other, {"tokens": [[8], [8]], "scores": [[1.0], [1.0]]})
    assert none == {"same": 0, "of": 2, "score_difference": None}


def options(tmp_path: Path, **change: Any) -> DraftBenchOptions:
    file = tmp_path / "model"
    file.touch()
    given: dict[str, Any] = {
        "target": file, "draft": file, "ours": fake(tmp_path, "o", 2000),
        "stock": fake(tmp_path, "s", 5000), "no_stock": "", "blocks": [1], "n_draft": 7,
        "repeat": 4,
    }  # fmt: skip
    return DraftBenchOptions(**given | change)


def test_builds_take_turns_and_ratios_are_stocks_time_by_ours(tmp_path: Path) -> None:
    result = run_bench(options(tmp_path), Console(quiet=True))
    warm_up = 2 * bench_draft._WARM_UP
    assert (tmp_path / "log").read_text()[warm_up:] == "soossoos"
    stock, ours = result.rounds
    assert (stock["lane"], ours["lane"]) == ("stock", "ours")
    assert ours["round_ms"] == {"median": 2.0, "min": 2.0, "max": 2.0, "values": [2.0] * 4}
    assert ours["to_stock"]["values"] == [2.5] * 4
    assert stock["to_stock"] is None
    assert sum(ours["share"].values()) == pytest.approx(1.0)
    same = {"same": 2, "of": 2, "score_difference": 0.0}
    assert result.agreement == [{"blocks": 1, "as_built": same, "base_kernels": same}]


def test_shorter_drafts_are_not_compared(tmp_path: Path) -> None:
    result = run_bench(options(tmp_path, n_draft=3), Console(quiet=True))
    assert result.agreement == [{"blocks": 1, "as_built": None, "base_kernels": None}]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import sys; sys.stderr.write('no such thing\\n'); sys.exit(3)", "ended with code 3"),
        ('print(\'{"error": "no memory"}\')', "no memory"),
        ("print('{}', flush=True); input()", "ended with code 0"),
    ],
)
def test_a_stock_build_that_fails_is_left_out(tmp_path: Path, body: str, said: str) -> None:
    broken = program(tmp_path / "broken", f"#!{sys.executable}\n{body}\n")
    result = run_bench(options(tmp_path, stock=broken, blocks=[1, 2]), Console(quiet=True))
    assert said in result.missing["stock"]
    assert [(r["blocks"], r["lane"]) for r in result.rounds] == [(1, "ours"), (2, "ours")]
    assert result.agreement == []


# --- the builds -----------------------------------------------------------------------------------


@pytest.mark.native
def test_both_builds(
    command: Callable[..., Any], random_pair: tiny.Pair, bin_dir: Path, stock_bin_dir: Path
) -> None:
    done = command("bench-draft", *arguments(random_pair), "--blocks", "1,3", "-r", 2, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["not_measured"] == {}
    assert found["settings"]["n_draft"] == 7
    assert found["settings"]["draft"]["path"] == str(random_pair.draft)
    assert found["sessions"][0]["threads"] == 1
    rows = {(r["blocks"], r["lane"]): r for r in found["rounds"]}
    assert list(rows) == [(1, "stock"), (1, "ours"), (3, "stock"), (3, "ours")]
    for (blocks, lane), row in rows.items():
        assert len(row["round_ms"]["values"]) == len(row["inject_ms"]["values"]) == 2
        assert row["round_ms"]["min"] > 0
        assert set(row["profile_ms"]) == set(row["nodes"]) == set(KINDS)
        assert all(row["nodes"].values())
        assert row["graph_nodes"] == sum(row["nodes"].values())
        assert [len(p) for p in row["proposals"]] == [7] * blocks
        assert (row["to_stock"] is None) == (lane == "stock")
    # two layers: convolutions are around attention and MLP; stock has a dozen nodes for each
    assert rows[1, "stock"]["nodes"]["convolution"] > 50
    assert rows[3, "ours"]["memory"]["compute"] < rows[3, "stock"]["memory"]["compute"]
    for row in found["agreement"]:
        assert row["as_built"]["same"] == row["as_built"]["of"] == 7 * row["blocks"]
        assert row["base_kernels"]["same"] == 7 * row["blocks"]


@pytest.mark.native
def test_tables_and_the_one_number(
    command: Callable[..., Any], random_pair: tiny.Pair, bin_dir: Path, stock_bin_dir: Path
) -> None:
    given = [*arguments(random_pair), "--blocks", "2", "-r", 1]
    done = command("bench-draft", *given)
    assert done.code == 0, done.err
    for words in ("One draft round", "to stock", "compute buffer MiB", *KINDS.values()):
        assert words in done.out
    assert "2 sequences: both builds propose the same 14 of 14 tokens (scores within " in done.out
    assert float(command("bench-draft", *given, "-q").out) > 0


@pytest.mark.native
def test_no_stock_build(
    command: Callable[..., Any], random_pair: tiny.Pair, bin_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(bench_options.demo_pair, "checkout", lambda: tmp_path)
    done = command("bench-draft", *arguments(random_pair), "--blocks", "1", "-r", 1)
    assert done.code == 0
    assert "stock: not measured, because `" in done.out
    assert "`make stock` builds the unpatched dflash-draft-round" in done.out


@pytest.mark.native
def test_the_program_itself(random_pair: tiny.Pair, bin_dir: Path) -> None:
    def run(*words: Any, said: str = "") -> Any:
        path = bin_dir / "dflash-draft-round"
        command = [path, *map(str, words)]
        return subprocess.run(command, input=said, capture_output=True, text=True, timeout=60)

    assert run("--help").stdout.startswith("usage: ")
    for wrong in ([], ["-m"], ["--nothing"], ["-m", "a", "-md", "b", "-p", "0"]):
        done = run(*wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("usage: ")
    pair = ["-m", random_pair.target, "-md", random_pair.draft, "-c", 256, "-p", 16]
    for said, reason in (
        ("round 1 7", "`open` comes first"),
        ("open 2 7\nround 3 7", "blocks are 1 to 2"),
        ("open 1 7\nround 1 8", "drafted tokens are 1 to 7"),
        ("open 1 7\ninject 1 17", "the rows to inject are 1 to the length of the prompt"),
        ("memory", "`memory` comes after `open`"),
        ("dance", "unknown command `dance`"),
    ):
        done = run(*pair, said=said)
        assert done.returncode == 1
        assert reason in json.loads(done.stdout.splitlines()[-1])["error"]
    done = run("-m", random_pair.target, "-md", __file__)
    assert "the draft does not load: " in json.loads(done.stdout)["error"]


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--blocks", "0"], "--blocks has 0, expected 1 to 64"),
        (["--blocks", "x"], "--blocks is `x`, expected numbers"),
        (["--n-draft", "8"], "--n-draft is 8, expected 1 to 7"),
        (["--inject-rows", "49"], "--inject-rows is 49, expected at most --prompt-tokens, 48"),
        (["-c", "100"], "the context is 100 tokens, expected at least 112"),
        (["--shape", "real"], "--shape makes a pair, expected no -m and no -md with it"),
        (["--type", "q8_0"], "--type is for random weights, expected --shape with it"),
        (["--draft-vocab", "99"], "--draft-vocab is for random weights, expected --shape with it"),
        (["--stock", "nowhere"], "`nowhere` does not exist, expected the path of an unpatched"),
        (["-r", "0"], "greater than or equal to 1"),
    ],
)
@pytest.mark.native
def test_bad_usage(
    command: Callable[..., Any], random_pair: tiny.Pair, bin_dir: Path, change: list[str],
    said: str,
) -> None:  # fmt: skip
    done = command("bench-draft", *arguments(random_pair), *change)
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert said in done.err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--shape", "huge"], "--shape is `huge`, expected real or demo-like"),
        (["--shape", "real", "--type", "f64"], "--type is `f64`, expected q8_0 or q4_0"),
        (["--shape", "real", "--draft-vocab", "9"], "--draft-vocab is 9, expected 16 (the"),
        (["-m", "nowhere.gguf"], "-md DRAFT.gguf is missing"),
        (["-m", "nowhere.gguf", "-md", "d.gguf"], "the target `nowhere.gguf` does not exist"),
    ],
)
@pytest.mark.native
def test_bad_pair(
    command: Callable[..., Any], our_library: None, bin_dir: Path, given: list[str], said: str
) -> None:
    done = command("bench-draft", *given)
    assert done.code == 2
    assert said in done.err


@pytest.mark.native
def test_a_draft_without_selector(
    command: Callable[..., Any], our_library: None, bin_dir: Path, tmp_path: Path
) -> None:
    pair = tiny.make_pair(tmp_path, "llama", version=1)
    done = command("bench-draft", "-m", pair.target, "-md", pair.draft)
    assert done.code == 2
    assert "has no candidate selector, expected a DFlash 2 draft" in done.err


# --- random pairs ---------------------------------------------------------------------------------


@pytest.mark.native
def test_a_random_pair_is_measured_and_kept(
    command: Callable[..., Any], our_library: None, bin_dir: Path, stock_bin_dir: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    given = ["--shape", "demo-like", "--type", "q4_0", "--work-dir", tmp_path / "new"]
    measured = ["--blocks", "1", "-r", 1, "-t", 1, "-c", 256, "--prompt-tokens", 32, "--json"]
    done = command("bench-draft", *given, *measured)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [r["lane"] for r in found["rounds"]] == ["stock", "ours"]
    # with the same kernels both builds compute the same
    base = found["agreement"][0]["base_kernels"]
    assert base["same"] == base["of"] == 7
    assert base["score_difference"] < 1e-3
    files = sorted((tmp_path / "new").iterdir())
    assert len(files) == 2
    times = [f.stat().st_mtime_ns for f in files]
    assert command("bench-draft", *given, *measured).code == 0
    assert [f.stat().st_mtime_ns for f in files] == times
    draft, target = (read_gguf(f) for f in files)
    assert draft.tensors["blk.2.ffn_gate.weight"].shape == (1536, 576)
    assert draft.tensors["blk.2.ffn_gate.weight"].type_name == "Q4_0"
    assert draft.get("dflash.target_layers") == [1, 2, 3, 4]
    assert target.tensors["token_embd.weight"].shape == (49152, 576)
    assert "output.weight" not in target.tensors


@pytest.mark.native
def test_a_random_draft_with_a_smaller_vocabulary(
    command: Callable[..., Any], our_library: None, bin_dir: Path, stock_bin_dir: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    given = ["--shape", "demo-like", "--draft-vocab", 4096, "--work-dir", tmp_path, "-t", 1]
    measured = ["--blocks", "2", "-r", 1, "-c", 256, "--prompt-tokens", 32, "--json"]
    done = command("bench-draft", *given, *measured)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    base = found["agreement"][0]["base_kernels"]
    assert base["same"] == base["of"] == 14
    draft = read_gguf(next(tmp_path.glob("dflash-*.gguf")))
    assert draft.tensors["output.weight"].shape == (4096, 576)
    ids = draft.tensors["d2t"]
    assert (ids.shape, ids.type_name) == ((4096,), "I64")
    tokens = np.frombuffer(draft.path.read_bytes(), "<i8", 4096, ids.offset)
    assert tokens.tolist() == list(range(0, 4096 * 12, 12))


def test_the_real_shape() -> None:
    sizes = random_pair.SHAPES["real"]
    config = read_config(sizes.config, target_layers=sizes.target_layers)
    tensors = random_pair._checkpoint(sizes, config).tensors
    assert len(tensors) == 81
    assert sum(t.elements for t in tensors.values()) == pytest.approx(1.92e9, rel=0.01)
    assert (config.window, config.causal, sum(config.sliding)) == (2048, False, 5)


def test_random_rows_are_all_different_and_read_alike_in_pieces() -> None:
    tensor = random_pair._tensor("token_embd.weight", (5000, 64))
    whole = tensor.read(0, tensor.elements)
    parts = [tensor.read(start, count) for start, count in tensor.pieces(1 << 12)]
    assert [x for part in parts for x in part[:2]] == [
        x for start, _ in tensor.pieces(1 << 12) for x in whole[start : start + 2]
    ]
    rows = sorted(map(tuple, whole.reshape(5000, 64)))
    assert all(a != b for a, b in pairwise(rows))
    # across the end of the pool
    last = random_pair._POOL - tensor.offset - 3
    assert len(tensor.read(last, 8)) == 8


def test_no_space_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10 << 20))
    with pytest.raises(Exception, match=r"10.00 MiB free, the file needs 3\.\d\d GiB"):
        random_pair.random_pair("real", "q8_0", tmp_path, Console(quiet=True))
    assert list(tmp_path.iterdir()) == []
