"""llama-cpp-python's own tests, from its source distribution, with `DFlashLlama` as `Llama`.

The tests are run where they are unpacked, in a process of their own, by `peer_plugin`. Models that
they would download are the demo's target, a tiny hybrid one for Falcon-H1 and a tiny Mamba. The
same is run with `Llama` itself, so that a failure tells whose it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from base_sources import unpack
from tiny_mamba import make_mamba
from twins import make_files

from dflash_cpp import demo_pair

pytestmark = [pytest.mark.peer, pytest.mark.native]

QWEN = "lmstudio-community/Qwen3.5-0.8B-GGUF/Qwen3.5-0.8B-Q8_0.gguf"
TRANSFORMER = "ggml-org/models/tinyllamas/stories15M-q4_0.gguf"
EMBEDDING = "CompendiumLabs/bge-small-en-v1.5-gguf/bge-small-en-v1.5-q4_k_m.gguf"
RECURRENT = "QuantFactory/mamba-130m-hf-GGUF/mamba-130m-hf.Q2_K.gguf"
HYBRID = "tiiuae/Falcon-H1-Tiny-90M-Instruct-GGUF/Falcon-H1-Tiny-90M-Instruct-Q2_K.gguf"

VOCABULARY = "vendor/llama.cpp/models/ggml-vocab-llama-spm.gguf"

# What the tests expect of Qwen3.5, and what SmolLM2 with plain `Llama` says to the same; and how
# often it is expected.
ANSWERS = {
    "[9419, 11, 1814, 0]": ("[19556, 28, 905, 17]", 1),
    '" jumps over the lazy dog."': ('" is a classic example of a"', 2),
}


@dataclass(frozen=True)
class Excepted:
    """Why a test is not expected to pass, and what its failure contains."""

    reason: str
    failure: str


NO_DRAFT = Excepted(
    "is about a Mamba, whose layers llama.cpp does not show to a draft",
    "targets of architecture `mamba` do not export the hidden states",
)
MAMBA = "llama_cpp_recurrent_model_path-True-False"
# Every test that fails with `DFlashLlama`; with `Llama` none does.
EXCEPTIONS = {
    "tests/test_llama.py::test_recurrent_model_prompt_cache_reset": NO_DRAFT,
    **{
        f"tests/test_llama.py::test_{name}_matches_fresh[{MAMBA}]": NO_DRAFT
        for name in (
            "exact_cached_prompt_reuse",
            "loaded_exact_cached_prompt_reuse",
            "ram_cache_exact_prompt_hit",
            "shorter_prompt_prefix_reuse",
        )
    },
}


@pytest.fixture(scope="module")
def unpacked(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests and the vocabulary that they read, of the version that is built."""
    folder = tmp_path_factory.mktemp("llama-cpp-python")
    unpack(root, folder, (VOCABULARY, "tests/"))
    program = folder / "tests" / "test_llama.py"
    text = program.read_text(encoding="utf-8")
    for expected, (ours, times) in ANSWERS.items():
        assert text.count(expected) == times, expected
        text = text.replace(expected, ours)
    program.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def models(
    our_library: None, bin_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    """What stands for which download."""
    folder = demo_pair.work_dir()
    target, _ = demo_pair.requantise(demo_pair.find_target(), "Q8_0", folder)
    draft, _ = demo_pair.convert_draft(demo_pair.find_checkpoint(), target, "q8_0", folder)
    smollm = {"target": str(target), "draft": str(draft)}
    files = make_files(tmp_path_factory.mktemp("hybrid"), "qwen35")
    hybrid = {"target": str(files[0]), "draft": str(files[1])}
    mamba = make_mamba(tmp_path_factory.mktemp("mamba") / "mamba.gguf")
    return {
        QWEN: smollm,
        TRANSFORMER: smollm,
        EMBEDDING: smollm,
        HYBRID: hybrid,
        RECURRENT: {"target": str(mamba), "draft": str(files[1])},
    }


@dataclass(frozen=True)
class Done:
    """A finished run."""

    code: int
    output: str
    outcomes: dict[str, str]
    counts: dict[str, int]

    def said(self) -> str:
        """One line of counts."""
        numbers = Counter(self.outcomes.values())
        tests = ", ".join(f"{n} {name}" for name, n in sorted(numbers.items()))
        return f"{tests}; {self.counts}"


def run_tests(folder: Path, tmp_path: Path, **job: Any) -> Done:
    """Run what is in `folder`/tests with the plugin."""
    report, file = tmp_path / "report.json", tmp_path / "job.json"
    file.write_text(json.dumps({**job, "report": str(report)}), encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "peer_plugin", "-p", "no:cacheprovider",
            "-c", os.devnull, "--rootdir", str(folder), "-q", "-rs", "--show-capture=no", "tests",
        ],
        cwd=folder,
        env={
            **os.environ,
            "PEER_JOB": str(file),
            "PYTHONPATH": str(Path(__file__).parent),
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        errors="replace",
        timeout=540,
    )  # fmt: skip
    written = json.loads(report.read_text()) if report.exists() else {"outcomes": {}, "counts": {}}
    return Done(done.returncode, done.stdout + done.stderr, **written)


@pytest.mark.parametrize("name", ["Llama", "DFlashLlama"])
def test_their_tests(
    unpacked: Path,
    models: dict[str, dict[str, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    drafts = name == "DFlashLlama"
    exceptions = {test: excepted.failure for test, excepted in EXCEPTIONS.items() if drafts}
    done = run_tests(unpacked, tmp_path, replace=drafts, models=models, exceptions=exceptions)
    with capsys.disabled():
        print(f"\nllama-cpp-python's tests with {name}: {done.said()}")
    assert done.code == 0, done.output[-8000:]
    counted = Counter(done.outcomes.values())
    expected = {"passed": len(done.outcomes) - len(exceptions), "excepted": len(exceptions)}
    assert counted == Counter(expected)
    assert len(done.outcomes) >= 20
    if drafts:
        assert done.counts["opened"] > 20
        assert 0 < done.counts["accepted"] <= done.counts["drafted"]
    else:
        assert done.counts["opened"] == 0


OTHER_TESTS = """
def test_good():
    pass

def test_bad():
    assert "left" == "right"
"""


@pytest.mark.parametrize(
    ("exceptions", "code", "said"),
    [
        ({"tests/test_other.py::test_bad": "left"}, 0, "1 passed, 1 skipped"),
        ({}, 1, "1 failed, 1 passed"),
        ({"tests/test_other.py::test_bad": "middle"}, 1, "does not contain 'middle'"),
        (
            {"tests/test_other.py::test_bad": "left", "tests/test_other.py::test_good": "x"},
            1,
            "passes, but is listed as an exception",
        ),
        ({"tests/test_other.py::test_gone": "x"}, 4, "there are no such tests"),
    ],
)
def test_exceptions_are_held_to_their_reasons(
    our_library: None, tmp_path: Path, exceptions: dict[str, str], code: int, said: str
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_other.py").write_text(OTHER_TESTS)
    models = {"a/b/c.gguf": {"target": "no.gguf", "draft": "no.gguf"}}
    done = run_tests(tmp_path, tmp_path, replace=True, models=models, exceptions=exceptions)
    assert done.code == code, done.output
    assert said in done.output
