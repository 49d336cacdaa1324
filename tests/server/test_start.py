"""Starting llama-server: bad pairs are refused quickly and clearly, and nothing is left running."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny

from dflash_convert.errors import FailureError
from dflash_cpp.server import LlamaServer, free_port

pytestmark = pytest.mark.native

# of processor time; the clock on the wall depends on what else the machine does
CPU_SECONDS = 2.0


def refused(bin_dir: Path, *arguments: object) -> str:
    """Start a server that must not start; return what it says."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [bin_dir / "llama-server", *map(str, arguments), "-t", "1", "--port", str(free_port())],
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode > 0, "killed by a signal or started"
    assert spent < CPU_SECONDS
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def other_width(bin_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tiny.Pair:
    folder = tmp_path_factory.mktemp("wide")
    return tiny.make_pair(folder, "llama", target={"n_embd": 320})


@pytest.fixture(scope="module")
def other_vocabulary(bin_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tiny.Pair:
    folder = tmp_path_factory.mktemp("vocab")
    return tiny.make_pair(folder, "llama", target={"n_vocab": 600})


def test_no_such_draft(bin_dir: Path, random_pair: tiny.Pair, tmp_path: Path) -> None:
    missing = tmp_path / "no-such-draft.gguf"
    said = refused(bin_dir, "-m", random_pair.target, "-md", missing, "--spec-type", "draft-dflash")
    assert str(missing) in said
    assert "No such file" in said


def test_a_target_as_draft(bin_dir: Path, random_pair: tiny.Pair) -> None:
    target = random_pair.target
    said = refused(bin_dir, "-m", target, "-md", target, "--spec-type", "draft-dflash")
    assert "not a DFlash draft" in said


def test_another_hidden_size(bin_dir: Path, random_pair: tiny.Pair, other_width: tiny.Pair) -> None:
    said = refused(bin_dir, "-m", random_pair.target, "-md", other_width.draft)
    assert "320" in said
    assert "288" in said


def test_another_vocabulary(
    bin_dir: Path, random_pair: tiny.Pair, other_vocabulary: tiny.Pair
) -> None:
    said = refused(bin_dir, "-m", random_pair.target, "-md", other_vocabulary.draft)
    assert "600" in said
    assert "512" in said


def test_a_damaged_draft(bin_dir: Path, random_pair: tiny.Pair, tmp_path: Path) -> None:
    data = random_pair.draft.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data[: len(data) // 2])
    said = refused(bin_dir, "-m", random_pair.target, "-md", damaged, "--spec-type", "draft-dflash")
    assert "damaged.gguf" in said


# --- LlamaServer ----------------------------------------------------------------------------------


def test_more_slots_than_a_context_holds(bin_dir: Path, random_pair: tiny.Pair) -> None:
    pair = ("-m", random_pair.target, "-md", random_pair.draft, "--spec-type", "draft-dflash")
    said = refused(bin_dir, *pair, "-c", 256, "-np", 200)
    assert "200 slots share a context of 256 tokens: no draft fits" in said


def test_drafts_shrink_to_the_context_and_batches_grow(
    bin_dir: Path, random_pair: tiny.Pair, tmp_path: Path
) -> None:
    pair = ("-m", random_pair.target, "-md", random_pair.draft, "--spec-type", "draft-dflash")
    size = ("-c", 256, "-np", 64, "--kv-unified", "-b", 100, "-ub", 3, "-t", 1)
    log = tmp_path / "server.log"
    with LlamaServer([str(word) for word in (*pair, *size)], log=log) as server:
        body = {"prompt": [5, 6, 7], "n_predict": 20, "temperature": 0.0, "ignore_eos": True}
        assert server.post("/completion", body)["tokens_predicted"] == 20
    said = log.read_text()
    assert "drafting 3 tokens instead of 7" in said
    assert "batch size 256 instead of 100" in said
    assert "micro-batch size 5 instead of 3" in said


def test_failure_to_start_shows_the_servers_own_words(
    bin_dir: Path, random_pair: tiny.Pair
) -> None:
    target = str(random_pair.target)
    with pytest.raises(FailureError, match="llama-server ended with code") as caught:
        LlamaServer(["-m", target, "-md", target, "--spec-type", "draft-dflash"])
    assert any("not a DFlash draft" in problem for problem in caught.value.problems)


def test_a_server_that_is_not_ready_in_time_is_stopped(
    tmp_path: Path,
) -> None:
    # a program that never listens stands for a model that takes for ever to load
    program = tmp_path / "sleeper"
    program.write_text('#!/bin/sh\necho $$ > "$0.pid"\nexec sleep 600\n')
    program.chmod(0o755)
    with pytest.raises(FailureError, match="was not ready after"):
        LlamaServer([], program=program, ready_seconds=1.0)
    pid = int((tmp_path / "sleeper.pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_closing_stops_the_process_and_removes_the_log(
    bin_dir: Path, random_pair: tiny.Pair
) -> None:
    with LlamaServer(["-m", str(random_pair.target), "-t", "1"]) as server:
        assert server.running
        assert server.log.exists()
    assert not server.running
    assert not server.log.exists()
    server.close()  # a second time does nothing


def test_free_port_is_free() -> None:
    port = free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


# --- dflash-cpp serve -----------------------------------------------------------------------------


def wait_for(path: Path, text: str, process: subprocess.Popen[Any]) -> str:
    import time

    until = time.monotonic() + 60
    while time.monotonic() < until:
        said = path.read_text(errors="replace")
        if text in said:
            return said
        assert process.poll() is None, said
        time.sleep(0.05)
    pytest.fail(f"no {text!r} in {path.read_text(errors='replace')}")


def test_serve_becomes_the_server(bin_dir: Path, random_pair: tiny.Pair, tmp_path: Path) -> None:
    port = free_port()
    log = tmp_path / "serve.log"
    arguments = ["-m", random_pair.target, "-md", random_pair.draft, "-np", 1, "-t", 1, "-c", 512,
                 "--port", port]  # fmt: skip
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_cpp", "serve", *map(str, arguments)],
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        said = wait_for(log, "listening on", process)
        assert "drafting up to 7 tokens per round" in said
        assert "n_max 7" in said
        assert Path(f"/proc/{process.pid}/comm").read_text().strip() == "llama-server"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_serve_refuses_a_bad_pair(
    bin_dir: Path, random_pair: tiny.Pair, other_width: tiny.Pair
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dflash_cpp", "serve", "-m", random_pair.target, "-md",
         other_width.draft],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "320" in done.stderr
    assert "Traceback" not in done.stderr
