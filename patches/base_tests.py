#!/usr/bin/env python3
"""Builds llama.cpp's own native tests from the patched tree and runs them; `make base-tests`.

    base_tests.py [--model FILE] [--only NAME]... [--ops OP,...] [--json FILE]

What fails is built and run from the unpatched base too: only what passes there counts as a failure
of ours. Exit code: 0 nothing of ours fails, 1 something does, 2 bad usage, 130 interrupted.
The builds lie in build/base-tests and build/base-tests-stock. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import native

from patchlib import PatchsetError, exit_code

FOLDER = native.ROOT / "build" / "base-tests"
STOCK = native.ROOT / "build" / "base-tests-stock"

OPS = "test-backend-ops"
LIMIT = 1200  # seconds for a program
LIMITS = {OPS: 6 * 3600, "test-llama-archs": 3600}

# Tests of the base that are not run, and why.
LEFT_OUT = {
    "test-tokenizers-ggml-vocabs": "clones a repository from the network",
    "test-download-model": "downloads a model; --model stands in",
    "test-quantize-perf": "measures time, checks nothing",
}
# Programs that the base builds without saying how to run them: name -> arguments. The last compares
# the CPU backend, whose kernels are ours in part, with the base's reference implementation; without
# -b it would leave the CPU out.
UNLISTED = {"test-llama-archs": [], OPS: ["test", "-b", "CPU"]}

# Tests whose last part needs what may be absent: the last line before it, and why.
LAST_PART = {"test-arg-parser": ("test-arg-parser: test good URL", "reads a page of the network")}

# Tests whose program has another name.
SHARED = {
    "test-generate-models": "test-llama-archs",
    "test-jinja-py": "test-jinja",
    "test-tokenizer-1-llama-spm": "test-tokenizer-1-spm",
}

# Programs that a test starts besides its own.
STARTED = {"test-rpc-multi-server": ["ggml-rpc-server"]}

NEEDS_MODEL = ("test-thread-safety", "test-state-restore-fragmented")
NAMED_MODEL = ("test-model-load-cancel", "test-autorelease", "test-backend-sampler")
MODEL_VARIABLE = "LLAMACPP_TEST_MODELFILE"
DOWNLOADED = re.compile(r"tinyllamas/\S+\.gguf$")  # the argument that --model replaces

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CASE = re.compile(r"^  (?P<case>(?P<op>\w+)\(.*\)): .*?(?P<end>OK|FAIL|not supported)\b[^:]*$")


@dataclass
class BaseTest:
    """One test of the base."""

    name: str
    target: str
    command: list[str]
    folder: str  # where it is run


@dataclass
class Result:
    """What became of a test."""

    name: str
    outcome: str  # passed, failed, not run
    detail: str = ""
    seconds: float = 0.0
    failed: list[str] = field(default_factory=list)  # cases, where the program names them
    tail: list[str] = field(default_factory=list)  # of the output


def main(arguments: list[str]) -> int:
    """Returns 0 done, 1 failed, 2 bad usage, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="base_tests.py", description=__doc__.split("\n\n", 1)[0], allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, help="GGUF for the tests that need one")
    parser.add_argument("--only", action="append", help="tests to run; default: all")
    parser.add_argument("--ops", help=f"ops for {OPS}; default: all")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    options = parser.parse_args(arguments)
    return exit_code(lambda: run(options), "")


def run(options: argparse.Namespace) -> int:
    """Build, run, compare, print. Returns the exit code."""
    model = options.model
    if model is not None and not model.is_file():
        raise PatchsetError(f"`--model {model}` is no file; name a GGUF", code=2)
    cmake = native.find_cmake()
    configure(cmake, FOLDER, "release")
    listed = list_tests(cmake, FOLDER)
    unknown = sorted(set(options.only or ()) - {test.name for test in listed})
    if unknown:
        raise PatchsetError(
            f"found no test `{unknown[0]}`, expected one of {', '.join(t.name for t in listed)}",
            code=2,
        )
    wanted = [test for test in listed if not options.only or test.name in options.only]
    results = run_tests(cmake, FOLDER, wanted, model, options.ops)
    compare(cmake, results, wanted, model)
    print(table(results))
    if options.json is not None:
        write(options.json, [asdict(result) for result in results])
    ours = [result.name for result in results if result.outcome == "failed"]
    if ours:
        print(f"error: passes unpatched, but not patched: {', '.join(ours)}", file=sys.stderr)
    return 1 if ours else 0


def configure(cmake: str, folder: Path, kind: str) -> None:
    """A build of its own: the tests come into no other folder."""
    native.configure(cmake, folder, [*native.configure_options(kind), "-DLLAMA_BUILD_TESTS=ON"])


def list_tests(cmake: str, folder: Path) -> list[BaseTest]:
    """What the base registers with CTest (commands of programs not yet built are missing)."""
    ctest = str(Path(cmake).with_name("ctest"))
    command = [ctest, "--test-dir", str(folder / "llama"), "--show-only=json-v1"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PatchsetError(f"`{ctest}` could not list the base's tests: {done.stderr.strip()}")
    programs, home = folder / "bin", folder / "llama" / "tests"
    tests = []
    for entry in json.loads(done.stdout)["tests"]:
        name, given = entry["name"], entry.get("command", [])
        properties = {item["name"]: item["value"] for item in entry["properties"]}
        where = home / properties.get("WORKING_DIRECTORY", ".")
        tests.append(BaseTest(name, target_of(name), given, str(where)))
    for name, rest in UNLISTED.items():  # last, because they take longest
        tests.append(BaseTest(name, name, [str(programs / name), *rest], str(programs)))
    return tests


def target_of(test: str) -> str:
    """The program of a test: some run one program with several files."""
    if test.startswith("test-tokenizer-0-"):
        return "test-tokenizer-0"
    return SHARED.get(test, test)


def run_tests(
    cmake: str, folder: Path, tests: list[BaseTest], model: Path | None, ops: str | None
) -> list[Result]:
    """Build what is needed, then run one test after another."""
    reasons = {test.name: why_not(test.name, model) for test in tests}
    wanted = [test for test in tests if not reasons[test.name]]
    started = [program for test in wanted for program in STARTED.get(test.name, ())]
    targets = sorted({*(test.target for test in wanted), *started})
    if targets:
        native.compile_targets(cmake, folder, targets)
    built = {test.name: test for test in list_tests(cmake, folder)}
    results = []
    for number, test in enumerate(tests, 1):
        print(f"[{number}/{len(tests)}] {test.name}", file=sys.stderr, flush=True)
        if reasons[test.name]:
            results.append(Result(test.name, "not run", reasons[test.name] or ""))
            continue
        results.append(run_one(complete(built[test.name], model, ops), model))
    return results


def why_not(name: str, model: Path | None) -> str | None:
    """Why a test is not run; None if it is."""
    if name in LEFT_OUT:
        return LEFT_OUT[name]
    if model is None and name in (*NEEDS_MODEL, *NAMED_MODEL):
        return "needs a model; name one with --model"
    return None


def complete(test: BaseTest, model: Path | None, ops: str | None) -> BaseTest:
    """The test with the model and the ops put into its command."""
    command = list(test.command)
    if test.name == OPS and ops:
        command += ["-o", ops]
    if model is not None:
        command = [str(model.resolve()) if DOWNLOADED.search(part) else part for part in command]
    return replace(test, command=command)


def run_one(test: BaseTest, model: Path | None) -> Result:
    """Run a program within its time."""
    if not test.command:
        return Result(test.name, "failed", "was not built")
    limit = LIMITS.get(test.name, LIMIT)
    environment = {**os.environ, **({MODEL_VARIABLE: str(model.resolve())} if model else {})}
    start, late = time.monotonic(), threading.Event()
    process = subprocess.Popen(
        test.command,
        cwd=test.folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )

    def stop() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(limit, stop)
    timer.start()
    result = Result(test.name, "passed")
    try:
        counts = read(process, result)
        code = process.wait()
    finally:
        timer.cancel()
        process.kill()  # nothing happens to one that has ended
        process.communicate()
    result.seconds = time.monotonic() - start
    said = [f"{count:,} {end}" for end, count in counts.items()]
    marker, why = LAST_PART.get(test.name, ("", ""))
    if marker and code and [line for line in result.tail if line][-1:] == [marker]:
        result.detail = f"but for its last part, which {why}"
        return result
    if late.is_set():
        said.append(f"stopped after {limit} s")
    elif code:
        said.append(f"exit code {code}")
    elif test.name == OPS and not counts["OK"]:
        said.append("ran no case")
    else:
        result.detail = ", ".join(said)
        return result
    result.outcome, result.detail = "failed", ", ".join(said)
    return result


def read(process: subprocess.Popen[str], result: Result) -> Counter[str]:
    """Read the output to its end: the last lines, and what it says of each case, counted."""
    counts: Counter[str] = Counter()
    assert process.stdout is not None
    for raw in process.stdout:
        line = _COLOURS.sub("", raw).rstrip()
        result.tail = [*result.tail[-39:], line]
        if result.name == OPS and (match := _CASE.match(line)):
            counts[match["end"]] += 1
            if match["end"] == "FAIL":
                result.failed.append(match["case"])
            progress(f"{match['op']} {counts['OK']:,} OK, {counts['FAIL']} FAIL")
    progress("")
    return counts


def progress(text: str) -> None:
    """One line that changes, on terminals only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def compare(cmake: str, results: list[Result], tests: list[BaseTest], model: Path | None) -> None:
    """Run what failed from the unpatched base; what fails there as well is not ours."""
    failed = [result for result in results if result.outcome == "failed"]
    if not failed:
        return
    names = {result.name for result in failed}
    if "test-recurrent-state-rollback" in names or "test-save-load-state" in names:
        names.add("test-generate-models")  # they read what it writes
    print(f"the same with the unpatched base: {', '.join(sorted(names))}", file=sys.stderr)
    configure(cmake, STOCK, "stock")
    known = {test.name: test for test in list_tests(cmake, STOCK)}
    again = [known[test.name] for test in tests if test.name in names]
    cases = next((result.failed for result in failed if result.name == OPS), [])
    ops = ",".join(sorted({case.split("(")[0] for case in cases})) or None
    stock = {result.name: result for result in run_tests(cmake, STOCK, again, model, ops)}
    for result in failed:
        theirs = stock[result.name]
        if theirs.outcome == "failed" and set(result.failed) <= set(theirs.failed):
            result.outcome = "fails unpatched too"
        else:
            result.detail += f"; unpatched: {theirs.outcome}"
            print("\n".join([f"--- {result.name}", *result.tail]), file=sys.stderr)


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON, under another name until they are complete."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    os.replace(part, file)


def table(results: list[Result]) -> str:
    """The results as lines, and their sum."""
    width = max(len(result.name) for result in results)
    lines = []
    for result in results:
        line = (
            f"{result.name:{width}}  {result.outcome:8}  {result.seconds:7.1f} s  {result.detail}"
        )
        lines.append(line.rstrip())
    counts = Counter(result.outcome for result in results)
    return "\n".join([*lines, ", ".join(f"{count} {name}" for name, count in counts.items())])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
