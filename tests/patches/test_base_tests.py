"""`base_tests.py` with programs that only print: what is counted, and what counts as ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import base_tests
import pytest
from base_tests import OPS, BaseTest, main, target_of

GOOD = "print('  ADD(type=f32,ne=[1,2]): \\033[1;32mOK\\033[0m')\n"
BAD = "print('  MUL_MAT(type=q8_0,m=1): [MUL_MAT] NMSE = 0.1 > 0.0 \\033[1;31mFAIL\\033[0m')\n"
OTHER = BAD.replace("MUL_MAT(", "TOP_K(")
UNSUPPORTED = "print('  ABS(type=bf16): not supported [CPU, CPU] ')\n"
FAILED = "raise SystemExit(1)\n"


class Programs:
    """What the patched and the stock build are made of: test -> Python text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.report = folder / "report.json"
        self.texts: dict[Path, dict[str, str]] = {base_tests.FOLDER: {}, base_tests.STOCK: {}}
        self.built: list[list[str]] = []
        self.configured: list[str] = []

    def run(self, arguments: list[str]) -> int:
        return main(["--json", str(self.report), *arguments])

    def results(self) -> dict[str, dict]:
        return {row["name"]: row for row in json.loads(self.report.read_text())}

    def listed(self, _cmake: str, folder: Path) -> list[BaseTest]:
        tests = []
        for name, text in self.texts[folder].items():
            file = self.folder / f"{folder.name}-{name}.py"
            file.write_text(text)
            tests.append(BaseTest(name, name, [sys.executable, str(file)], str(self.folder)))
        return tests


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Programs:
    made = Programs(tmp_path)
    monkeypatch.setattr(base_tests.native, "find_cmake", lambda: "cmake")
    monkeypatch.setattr(base_tests, "configure", lambda _c, _f, kind: made.configured.append(kind))
    monkeypatch.setattr(base_tests, "list_tests", made.listed)
    monkeypatch.setattr(
        base_tests.native, "compile_targets", lambda _c, _f, targets: made.built.append(targets)
    )
    return made


def test_cases_are_counted(programs: Programs) -> None:
    programs.texts[base_tests.FOLDER] = {OPS: GOOD * 3 + UNSUPPORTED, "test-sampling": "pass"}
    assert programs.run([]) == 0
    rows = programs.results()
    assert rows[OPS]["detail"] == "3 OK, 1 not supported"
    assert {row["outcome"] for row in rows.values()} == {"passed"}
    assert programs.configured == ["release"]  # nothing to compare


@pytest.mark.parametrize(
    ("ours", "stock", "code", "outcome"),
    [
        (BAD + FAILED, GOOD, 1, "failed"),
        (BAD + FAILED, BAD + FAILED, 0, "fails unpatched too"),
        (BAD + OTHER + FAILED, BAD + FAILED, 1, "failed"),
        (BAD + FAILED, BAD + OTHER + FAILED, 0, "fails unpatched too"),
        (UNSUPPORTED, GOOD, 1, "failed"),  # a run that compares nothing is no success
    ],
)
def test_only_what_passes_unpatched_is_ours(
    programs: Programs,
    ours: str,
    stock: str,
    code: int,
    outcome: str,
) -> None:
    programs.texts = {base_tests.FOLDER: {OPS: ours}, base_tests.STOCK: {OPS: stock}}
    assert programs.run([]) == code
    assert programs.results()[OPS]["outcome"] == outcome
    assert programs.configured == ["release", "stock"]


def test_a_crash_and_a_hang_are_failures(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_tests, "LIMIT", 1)
    crash = "import os\nos.abort()\n"
    hang = "import time\ntime.sleep(60)\n"
    programs.texts[base_tests.FOLDER] = {"test-rope": crash, "test-opt": hang}
    programs.texts[base_tests.STOCK] = {"test-rope": "pass", "test-opt": "pass"}
    assert programs.run([]) == 1
    rows = programs.results()
    assert "exit code -6" in rows["test-rope"]["detail"]
    assert "stopped after 1 s" in rows["test-opt"]["detail"]


@pytest.mark.parametrize(("end", "code"), [("", 0), ("print('another part')\n", 1)])
def test_a_part_that_needs_the_network(programs: Programs, end: str, code: int) -> None:
    ((name, (marker, why)),) = base_tests.LAST_PART.items()
    text = f"print({marker!r}, end='\\n\\n', flush=True)\n{end}"
    programs.texts[base_tests.FOLDER] = {name: text + FAILED}
    programs.texts[base_tests.STOCK] = {name: "pass"}
    assert programs.run([]) == code
    assert (why in programs.results()[name]["detail"]) == (code == 0)


def test_what_is_not_run_says_why(programs: Programs) -> None:
    names = [*base_tests.LEFT_OUT, *base_tests.NEEDS_MODEL, "test-log"]
    programs.texts[base_tests.FOLDER] = dict.fromkeys(names, "pass")
    assert programs.run([]) == 0
    rows = programs.results()
    assert {n for n, row in rows.items() if row["outcome"] == "passed"} == {"test-log"}
    assert all(row["detail"] for row in rows.values() if row["outcome"] == "not run")
    assert programs.built == [["test-log"]]


def test_the_model_takes_the_place_of_the_download(programs: Programs, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    name = "test-thread-safety"
    test = BaseTest(name, name, ["x", "-m", "/build/tinyllamas/stories15M-q4_0.gguf"], ".")
    assert base_tests.complete(test, model, None).command == ["x", "-m", str(model)]
    programs.texts[base_tests.FOLDER] = {
        name: f"import os\nassert os.environ[{base_tests.MODEL_VARIABLE!r}] == {str(model)!r}\n"
    }
    assert programs.run(["--model", str(model)]) == 0
    assert programs.results()[name]["outcome"] == "passed"


@pytest.mark.parametrize(
    ("test", "target"),
    [
        ("test-tokenizer-0-bert-bge", "test-tokenizer-0"),
        ("test-tokenizer-0-llama-spm", "test-tokenizer-0"),
        ("test-tokenizer-1-llama-spm", "test-tokenizer-1-spm"),
        ("test-generate-models", "test-llama-archs"),
        ("test-sampling", "test-sampling"),
    ],
)
def test_programs_of_tests(test: str, target: str) -> None:
    assert target_of(test) == target


@pytest.mark.parametrize("arguments", [["--only", "test-none"], ["--model", "no/such.gguf"]])
def test_bad_usage(
    programs: Programs, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")
