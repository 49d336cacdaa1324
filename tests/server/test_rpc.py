"""Target and draft spread over two rpc servers: the same tokens; one that dies is no hang."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
from bigram import Bigram
from tiny_checkpoint import make_draft_checkpoint

from dflash_convert.errors import DFlashError
from dflash_cpp.server import LlamaServer, free_port

pytestmark = pytest.mark.native

N_MAX = ("--spec-draft-n-max", 7)
BODY = {"prompt": [40, 41, 42, 60], "n_predict": 64, "temperature": 0.0, "return_tokens": True}


@pytest.fixture
def rpc(bin_dir: Path, tmp_path: Path) -> Iterator[list[tuple[str, subprocess.Popen[bytes]]]]:
    """Two rpc servers on this machine: (address, process)."""
    program = bin_dir / "ggml-rpc-server"
    if not program.is_file():
        pytest.skip("this build has no ggml-rpc-server (-DGGML_RPC=ON)")
    servers: list[tuple[str, subprocess.Popen[bytes]]] = []
    try:
        for i in range(2):
            port = free_port()
            with (tmp_path / f"rpc-{i}.log").open("wb") as log:
                command = [program, "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
                process = subprocess.Popen(command, stdout=log, stderr=log)
            servers.append((f"127.0.0.1:{port}", process))
        for address, process in servers:
            wait_for(address, process)
        yield servers
    finally:
        for _, process in servers:
            process.kill()
            process.wait()


def wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    host, port = address.split(":")
    for _ in range(200):
        assert process.poll() is None, "ggml-rpc-server ended"
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError(f"nobody listens at {address}")


def complete(server: LlamaServer) -> dict[str, Any]:
    with httpx.Client(trust_env=False, timeout=120.0) as http:
        answer = http.post(f"{server.url}/completion", json=BODY)
    assert answer.status_code == 200, answer.text
    return answer.json()


# layers of the target, layers of the draft on rpc devices
PLACES = {
    "target": ("-ngl", 99, "--device", "RPC0,RPC1", "-ngld", 0),
    "draft": ("-ngl", 0, "-ngld", 99, "-devd", "RPC1"),
    "both": ("-ngl", 99, "--device", "RPC0,RPC1", "-ngld", 99, "-devd", "RPC0"),
    "apart": ("-ngl", 99, "--device", "RPC0", "-ngld", 99, "-devd", "RPC1"),
    "draft at home": ("-ngl", 99, "--device", "RPC0,RPC1", "-devd", "none"),
    "a part of both": ("-ngl", 3, "--device", "RPC0,RPC1", "-ngld", 1, "-devd", "RPC1"),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_the_same_tokens(
    bigram: Callable[..., Bigram], rpc: Any, start: Any, arch: str, place: tuple[Any, ...]
) -> None:
    pair = bigram(arch, drift=0.28 if arch == "llama" else 0.15)
    expected = complete(start(pair.target, None))
    near = complete(start(pair.target, pair.draft, *N_MAX))
    addresses = ",".join(address for address, _ in rpc)
    server = start(pair.target, pair.draft, *N_MAX, "--rpc", addresses, *place, "-lv", 4)
    found = complete(server)
    assert "RPC" in server.log.read_text()
    assert found["tokens"] == expected["tokens"]
    # the composite graph on a remote device proposes what the native one does
    assert found["timings"]["draft_n_accepted"] == near["timings"]["draft_n_accepted"] > 10


def test_the_memory_plan_counts_the_draft(
    bigram: Callable[..., Bigram], rpc: Any, start: Any
) -> None:
    pair = bigram("llama")
    addresses = ",".join(address for address, _ in rpc)
    options = ("--rpc", addresses, "-ngl", 99, "-lv", 5)

    def planned(draft: Path | None, *more: Any) -> int:
        server = start(pair.target, draft, *options, *more)
        server.close()  # an rpc server serves one client at a time
        log = server.log.read_text()
        assert "fitting without it" not in log
        found = re.search(r"projected to use (\d+) MiB of device memory", log)
        assert found
        return int(found[1])

    size = pair.draft.stat().st_size >> 20
    assert planned(pair.draft, "-ngld", 99) >= planned(None) + size > 3


@pytest.mark.parametrize("place", [PLACES["target"], PLACES["draft"]], ids=["target", "draft"])
def test_a_server_that_dies(
    bigram: Callable[..., Bigram], rpc: Any, start: Any, place: tuple[Any, ...]
) -> None:
    """llama.cpp ends the process then; what must not happen is a request that waits for ever."""
    pair = bigram("llama")
    addresses = ",".join(address for address, _ in rpc)
    server = start(pair.target, pair.draft, *N_MAX, "--rpc", addresses, *place)
    complete(server)
    for _, process in rpc:
        process.kill()
        process.wait()
    with (
        httpx.Client(trust_env=False, timeout=60.0) as http,
        pytest.raises((httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError)),
    ):
        http.post(f"{server.url}/completion", json=BODY)
    assert "RPC server" in server.log.read_text()


def test_nobody_there(bigram: Callable[..., Bigram], start: Any) -> None:
    pair = bigram("llama")
    with pytest.raises(DFlashError, match="Failed to connect"):
        start(pair.target, pair.draft, "--rpc", f"127.0.0.1:{free_port()}", "-ngl", 99)


def test_a_head_in_pieces_serves_drafts_without_selector(
    bin_dir: Path, tmp_path: Path, rpc: Any, start: Any
) -> None:
    """Those of the first generation, which llama.cpp's own graph can compute so."""
    spec = tiny.TargetSpec(arch="llama", n_layer=5)
    target = tiny.write_target(tmp_path / "t.gguf", spec, dict(tiny.random_tensors(spec, 0)))
    options = tiny.draft_options(spec)
    checkpoint = make_draft_checkpoint(tmp_path / "checkpoint", version=1, **options)
    draft = tiny.convert_draft(checkpoint, target, tmp_path / "d.gguf")
    places = ("-ngl", 99, "--device", "RPC0,RPC1", "-sm", "tensor", "-ngld", 99)
    expected = complete(start(target, None))
    found = complete(start(target, draft, "--rpc", ",".join(a for a, _ in rpc), *places))
    assert found["timings"]["draft_n"] > 0
    assert len(found["tokens"]) == len(expected["tokens"])  # sums over two devices round apart


def test_a_head_in_pieces_is_a_sentence(
    bigram: Callable[..., Bigram], rpc: Any, start: Any
) -> None:
    pair = bigram("llama")
    addresses = ",".join(address for address, _ in rpc)
    options = ("--rpc", addresses, "-ngl", 99, "--device", "RPC0,RPC1", "-sm", "tensor")
    with pytest.raises(DFlashError, match=r"cannot share an output head.*--split-mode layer"):
        start(pair.target, pair.draft, *options, "-ngld", 99)
