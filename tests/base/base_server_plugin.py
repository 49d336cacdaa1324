"""A pytest plugin for the process that runs llama.cpp's own server tests.

It answers their downloads with files of this machine, adds a draft to the servers they start, and
writes down what became of each test. The job is a JSON file named by BASE_SERVER_JOB:

    drafts       none; added: servers that generate text and get no draft from the test get ours;
                 replaced: servers that get one from the test get ours in its place
    draft_files  the target's repository -> our draft
    downloads    address -> path, for files that tests fetch themselves
    left_out     file, test or case -> why it is not run
    report       where to write the result: outcomes and reasons by test, counts
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

JOB = json.loads(Path(os.environ["BASE_SERVER_JOB"]).read_text(encoding="utf-8"))
LEFT_OUT: dict[str, str] = JOB["left_out"]

outcomes: dict[str, str] = {}
reasons: dict[str, str] = {}
counts = {"slow": 0, "servers": 0, "with_draft": 0, "drafted": 0, "accepted": 0}


def fetch(url: str, out: str) -> None:
    """Stand in for `wget.download`."""
    if url not in JOB["downloads"]:
        raise LookupError(f"no file of this machine stands for `{url}`")
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(JOB["downloads"][url], out)


def give_draft(server: Any) -> bool:
    """Set our draft where the job wants it and the server's model has one."""
    draft = JOB["draft_files"].get(server.model_hf_repo)
    if draft is None or server.server_embeddings or server.server_reranking:
        return False
    theirs = server.model_draft is not None or server.spec_type is not None
    if JOB["drafts"] != ("replaced" if theirs else "added"):
        return False
    server.model_draft, server.spec_type = draft, "draft-dflash"
    return True


def count(answer: Any) -> None:
    """Add up what an answer says about drafting."""
    timings = answer.get("timings") if isinstance(answer, dict) else None
    if isinstance(timings, dict):
        counts["drafted"] += timings.get("draft_n", 0)
        counts["accepted"] += timings.get("draft_n_accepted", 0)


def replace() -> None:
    """Change what the tests' conftest imports, which pytest reads before it configures plugins."""
    module: Any = types.ModuleType("wget")
    module.download = fetch
    sys.modules["wget"] = module
    sys.path.insert(0, os.getcwd())
    import utils  # the tests' own

    start, request = utils.ServerProcess.start, utils.ServerProcess.make_request
    stream = utils.ServerProcess.make_stream_request

    def start_with_draft(self: Any, *args: Any, **kwargs: Any) -> None:
        before = self.model_draft, self.spec_type
        counts["servers"] += 1
        counts["with_draft"] += give_draft(self)
        try:
            start(self, *args, **kwargs)
        finally:  # a test may look at them, or start again without
            self.model_draft, self.spec_type = before

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = request(self, *args, **kwargs)
        count(result.body)
        return result

    def counted_stream(self: Any, *args: Any, **kwargs: Any) -> Any:
        last = None
        for last in stream(self, *args, **kwargs):
            yield last
        count(last)

    utils.ServerProcess.start = start_with_draft
    utils.ServerProcess.make_request = counted
    utils.ServerProcess.make_stream_request = counted_stream
    utils.ServerPreset.load_all = staticmethod(lambda: None)  # it downloads


replace()


def names(item: pytest.Item) -> list[str]:
    """The case, its test and its file, as the job may name them."""
    test = item.nodeid.split("[")[0]
    return [item.nodeid, test, test.split("::")[0]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what is listed, and refuse names of tests that do not exist."""
    known = {name for item in items for name in names(item)}
    files = {name.split("::")[0] for name in known}
    unknown = sorted(n for n in LEFT_OUT if n.split("::")[0] in files and n not in known)
    if unknown:
        raise pytest.UsageError(f"listed as left out, but there are no such tests: {unknown}")
    for item in items:
        why = next((LEFT_OUT[name] for name in names(item) if name in LEFT_OUT), None)
        if why:
            item.add_marker(pytest.mark.skip(reason=why))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count those that the base marks as slow: they need models of several GB."""
    counts["slow"] += len(items)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Keep the outcome, and the reason of a failure or skip in one line."""
    report = (yield).get_result()
    if report.outcome == "passed" and report.when != "call":
        return
    if outcomes.get(item.nodeid) == "failed":
        return
    outcomes[item.nodeid] = report.outcome
    if report.outcome == "skipped":
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[item.nodeid] = text.removeprefix("Skipped: ")
    elif report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        reasons[item.nodeid] = (crash.message if crash else str(report.longrepr)).split("\n")[0]


def pytest_sessionfinish() -> None:
    """Write the report."""
    document = {"outcomes": outcomes, "reasons": reasons, "counts": counts}
    Path(JOB["report"]).write_text(json.dumps(document), encoding="utf-8")
