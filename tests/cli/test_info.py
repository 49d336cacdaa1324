"""`dflash-cpp info`, with and without libraries; the frame of the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomllib


@pytest.mark.native
def test_info(command: Callable[..., Any], our_library: None, root: Path) -> None:
    base = tomllib.loads((root / "patches" / "base.toml").read_text())
    done = command("info", "--json")
    assert (done.code, done.err) == (0, "")
    facts = json.loads(done.out)
    assert facts["error"] is None
    assert "CPU" in facts["backends"]
    assert any(d["kind"] == "CPU" and d["memory_total"] > 0 for d in facts["devices"])
    assert facts["build"]["base_commit"] in str(base)
    assert Path(facts["libraries"]["dflash"]).exists()
    shown = command("info").out
    assert facts["build"]["base_commit"] in shown
    assert facts["libraries"]["llama"] in shown


def test_info_without_libraries(root: Path, tmp_path: Path) -> None:
    # in a process of its own, for this one may have loaded the libraries already
    done = subprocess.run(
        [sys.executable, "-m", "dflash_cpp", "info"],
        capture_output=True, text=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", "DFLASH_LIB_PATH": str(tmp_path / "none")},
    )  # fmt: skip
    assert done.returncode == 1
    assert "llama.cpp base    unknown" in done.stdout
    assert done.stderr.startswith("error: no native libraries: ")
    assert "hint: build them with `make build`" in done.stderr


def test_version_and_help(command: Callable[..., Any]) -> None:
    from dflash_cpp import __version__

    assert command("--version").out == f"dflash-cpp {__version__}\n"
    shown = command("--help").out
    for name in ("run", "parity", "serve", "info", "demo"):
        assert name in shown
        assert command(name, "--help").code == 0
    assert command("nonsense").code == 2


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from dflash_cpp.cli import app\n"
        "heavy = {'numpy', 'gguf', 'llama_cpp', 'jinja2', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.native
def test_choices_are_those_of_the_code(our_library: None) -> None:
    from dflash_cpp.cli import Verify
    from dflash_cpp.session import VERIFY

    assert [v.value for v in Verify] == list(VERIFY)
