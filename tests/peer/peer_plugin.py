"""A pytest plugin for the process that runs llama-cpp-python's own tests.

It puts a subclass of `DFlashLlama` where the tests look for `llama_cpp.Llama`, answers their
downloads with files of this machine, and holds every listed exception to its reason. The job is a
JSON file named by PEER_JOB:

    replace     put DFlashLlama in place of Llama
    models      "repository/file" -> {"target": path, "draft": path}
    exceptions  test -> text that its failure must contain
    report      where to write the result: outcomes by test, tokens drafted and accepted
"""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import dflash_cpp.llama  # before llama_cpp, which must find our libraries
from dflash_cpp._memory import llama_cpp

JOB = json.loads(Path(os.environ["PEER_JOB"]).read_text(encoding="utf-8"))
MODELS: dict[str, dict[str, str]] = JOB["models"]
DRAFTS = {files["target"]: files["draft"] for files in MODELS.values()}
EXCEPTIONS: dict[str, str] = JOB["exceptions"]

outcomes: dict[str, str] = {}
counts = {"opened": 0, "calls": 0, "drafted": 0, "accepted": 0}


class DraftingLlama(dflash_cpp.llama.DFlashLlama):
    """`DFlashLlama` with the arguments of `Llama`: the draft belongs to the target's file."""

    def __init__(self, model_path: str, **kwargs: Any):
        # a file of no model here (a bare vocabulary) gets any draft: it cannot be used anyway
        draft = DRAFTS.get(model_path) or next(iter(DRAFTS.values()))
        counts["opened"] += 1
        options = {"verify": "match", "adaptive": False}
        super().__init__(model_path, draft_path=draft, **options, **pooled(kwargs))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            yield from super().generate(*args, **kwargs)
        finally:
            if (stats := self.last_stats) is not None:
                counts["calls"] += 1
                counts["drafted"] += stats.drafted
                counts["accepted"] += stats.accepted


class PlainLlama(llama_cpp.Llama):
    """`Llama` with the models of this machine."""

    def __init__(self, model_path: str, **kwargs: Any):
        super().__init__(model_path, **pooled(kwargs))


def pooled(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Ask for one embedding per text, which only files of embedding models do by themselves."""
    return (
        {"pooling_type": llama_cpp.LLAMA_POOLING_TYPE_MEAN, **kwargs}
        if kwargs.get("embedding")
        else kwargs
    )


def local_file(repo_id: str, filename: str, **_: Any) -> str:
    """Stand in for `huggingface_hub.hf_hub_download`."""
    name = f"{repo_id}/{filename}"
    if name not in MODELS:
        raise LookupError(f"no model of this machine stands for `{name}`")
    return MODELS[name]["target"]


def usable_cores() -> int:
    """Stand in for `multiprocessing.cpu_count`: threads beyond the process's cores only wait."""
    return len(os.sched_getaffinity(0))


def pytest_configure() -> None:
    """Replace what the tests import, before they do."""
    huggingface_hub.hf_hub_download = local_file
    multiprocessing.cpu_count = usable_cores  # type: ignore[method-assign]
    replacement = DraftingLlama if JOB["replace"] else PlainLlama
    llama_cpp.Llama = llama_cpp.llama.Llama = replacement


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse exceptions for tests that do not exist."""
    unknown = sorted(set(EXCEPTIONS) - {item.nodeid for item in items})
    if unknown:
        raise pytest.UsageError(f"listed as exceptions, but there are no such tests: {unknown}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Turn the failure that a listed test must have into `excepted`, and its success into one."""
    report = (yield).get_result()
    wanted = EXCEPTIONS.get(item.nodeid)
    if report.outcome == "failed" and wanted is not None and wanted in str(report.longrepr):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: listed as an exception ({wanted})")
        outcomes[item.nodeid] = "excepted"
        return
    if report.outcome == "failed" and wanted is not None:
        said = f"listed as an exception, but the failure does not contain {wanted!r}"
        report.longrepr = f"{report.longrepr}\n{said}"
    elif report.when == "call" and report.outcome == "passed" and wanted is not None:
        report.outcome = "failed"
        report.longrepr = f"passes, but is listed as an exception ({wanted!r})"
    if report.outcome != "passed" or report.when == "call":
        outcomes.setdefault(item.nodeid, report.outcome)


def pytest_sessionfinish() -> None:
    """Write the report."""
    document = {"outcomes": outcomes, "counts": counts}
    Path(JOB["report"]).write_text(json.dumps(document), encoding="utf-8")
