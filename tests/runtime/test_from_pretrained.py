"""`DFlashLlama.from_pretrained`: both files from a hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bigram import Bigram, make_bigram
from fake_hub import FakeHub, fake_hub
from twins import SETTINGS, need_library

pytestmark = pytest.mark.native

# huggingface_hub reads its variables when it is imported, so every call has a process of its own
PROGRAM = """
import json, sys
from dflash_cpp import DFlashLlama
args, kwargs = json.loads(sys.argv[1])
try:
    with DFlashLlama.from_pretrained(*args, **kwargs) as llm:
        tokens = [token for token, _ in zip(llm.generate([5, 6, 7], temp=0.0), range(20))]
        said = {"tokens": tokens, "accepted": llm.last_stats.accepted, "target": llm.model_path}
        print(json.dumps(said | {"draft": llm._draft_path}))
except Exception as exc:
    print(json.dumps({"error": str(exc), "classes": [c.__name__ for c in type(exc).__mro__]}))
"""

Open = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Bigram:
    need_library()
    return make_bigram(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def hub(pair: Bigram, tmp_path: Path) -> Iterator[FakeHub]:
    """One model with everything, one with a draft alone, one that needs a token."""
    both, draft = tmp_path / "both", tmp_path / "draft"
    for folder in (both / "more", draft):
        folder.mkdir(parents=True)
    (both / "Tiny-F32.gguf").symlink_to(pair.target)
    (both / "Tiny-Q8_0.gguf").write_bytes(b"never read")
    (both / "more" / "notes.txt").write_text("notes")
    (both / "dflash-Tiny-F32.gguf").symlink_to(pair.draft)
    (draft / "any-name.gguf").symlink_to(pair.draft)
    with fake_hub({"org/Both": both, "org/Draft": draft, "org/Gated": draft}) as server:
        server.gated.add("org/Gated")
        yield server


@pytest.fixture
def open_one(hub: FakeHub, tmp_path: Path) -> Open:
    """Call `from_pretrained`; returns what was generated, or the error."""

    def call(*args: Any, env: dict[str, str] | None = None, **kwargs: Any) -> dict[str, Any]:
        quiet = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "cache"), "HF_TOKEN": ""}
        quiet |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps([args, SETTINGS | kwargs])],
            env={**os.environ, **quiet, **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    return call


def test_both_from_one_model(open_one: Open, hub: FakeHub, pair: Bigram) -> None:
    done = open_one("org/Both@v1", "*F32.gguf", draft_filename="dflash-Tiny-F32.gguf")
    assert "error" in done  # the pattern fits the draft as well
    done = open_one("org/Both@v1", "Tiny-F*.gguf", additional_files=["more/*.txt"])
    assert done["tokens"][1:] == pair.text(done["tokens"][0], 19)
    assert done["accepted"] > 10
    assert Path(done["target"]).name == "Tiny-F32.gguf"
    fetched = ["Tiny-F32.gguf", "dflash-Tiny-F32.gguf", "more/notes.txt"]
    assert sorted(set(hub.fetched())) == fetched
    # from the cache, without a hub
    again = open_one("org/Both@v1", "F32", env={"HF_HUB_OFFLINE": "1"})
    assert again == done


def test_draft_of_another_model(open_one: Open, pair: Bigram, tmp_path: Path) -> None:
    done = open_one("org/Both", "F32", draft_repo_id="org/Draft", local_dir=str(tmp_path / "here"))
    assert Path(done["draft"]) == tmp_path / "here" / "any-name.gguf"
    assert Path(done["target"]) == tmp_path / "here" / "Tiny-F32.gguf"
    assert done["accepted"] > 10
    mixed = open_one("org/Both", "Tiny-F32.gguf", draft_path=str(pair.draft))
    assert mixed["tokens"] == done["tokens"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"filename": None}, "has 2 files that could be the target"),
        ({"filename": "F16"}, "has no file `F16`, but"),
        ({"repo_id": "org/None"}, "no such model on the hub"),
        ({"draft_repo_id": "org/Gated"}, "is gated"),
        ({"draft_filename": "Q4_0"}, "has no file `Q4_0`, but"),
        ({"repo_id": "org/Both@v9"}, "has no revision `v9`"),
        ({"additional_files": ["*.bin"]}, "has no file `*.bin`"),
        ({"draft_filename": "Tiny-F32.gguf"}, "is a `llama` model, not a DFlash draft"),
    ],
)
def test_errors_are_value_errors(open_one: Open, change: dict[str, Any], said: str) -> None:
    done = open_one(**({"repo_id": "org/Both", "filename": "F32"} | change))
    assert said in done["error"]
    assert {"InputError", "ValueError"} <= set(done["classes"])


def test_other_errors(open_one: Open) -> None:
    both = open_one("org/Both", "F32", draft_path="x.gguf", draft_filename="y.gguf")
    assert both["classes"][0] == "TypeError"
    away = open_one("org/Both", "F32", env={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert away["classes"][0] == "FailureError"
    assert "does not answer" in away["error"]
