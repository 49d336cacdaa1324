"""Running servers for the tests: each is stopped, its log shown when a test fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from bigram import Bigram, make_bigram

from dflash_cpp.server import LlamaServer

Start = Callable[..., LlamaServer]


@pytest.fixture(scope="session")
def bigram(bin_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bigram]:
    """Make a pair whose draft is right about most tokens; the text depends on the context."""
    made: dict[tuple[str, float, float], Bigram] = {}

    def make(arch: str, *, wrong: float = 0.2, drift: float = 0.5) -> Bigram:
        key = (arch, wrong, drift)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"bigram-{arch}")
            made[key] = make_bigram(folder, arch, wrong=wrong, drift=drift)
        return made[key]

    return make


@pytest.fixture(scope="session")
def random_pair(bin_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tiny.Pair:
    """A pair with random weights."""
    return tiny.make_pair(tmp_path_factory.mktemp("random"), "llama")


@pytest.fixture
def start(bin_dir: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Start servers that end with the test: `start(target, draft or None, *options)`."""
    running: list[LlamaServer] = []

    def begin(target: Path, draft: Path | None, *options: Any) -> LlamaServer:
        arguments = ["-m", str(target), "-c", "1024", "-np", "1", "-t", "1", "--metrics"]
        if draft is not None:
            arguments += ["-md", str(draft), "--spec-type", "draft-dflash"]
        arguments += [str(o) for o in options]
        log = tmp_path / f"server-{len(running)}.log"
        server = LlamaServer(arguments, log=log)
        running.append(server)
        return server

    yield begin
    for server in running:
        server.close()
        request.node.add_report_section(
            "teardown", "llama-server", server.log.read_text(errors="replace")
        )
    assert not any(server.running for server in running)
