"""Generated pairs, the reference implementation and the stock build for the runtime's tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twins import ARCHS, Twins, make_files


@pytest.fixture(scope="session")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`tiny.make_pair` without the directory; equal arguments give the same files."""
    import tiny

    return _cached(tiny.make_pair, tmp_path_factory, "pair")


@pytest.fixture(scope="session")
def make_bigram(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`bigram.make_bigram` without the directory; equal arguments give the same files."""
    import bigram

    return _cached(bigram.make_bigram, tmp_path_factory, "bigram")


def _cached(
    make: Callable[..., Any], factory: pytest.TempPathFactory, name: str
) -> Callable[..., Any]:
    made: dict[str, Any] = {}

    def get(*args: Any, **kwargs: Any) -> Any:
        key = repr((args, sorted(kwargs.items())))
        if key not in made:
            made[key] = make(factory.mktemp(name), *args, **kwargs)
        return made[key]

    return get


@pytest.fixture(scope="session")
def oracle() -> Any:
    """The module around the reference implementation."""
    module = pytest.importorskip(
        "oracle", reason="the reference (dflash, torch, transformers) is not installed"
    )
    # for models this small more threads only wait for each other
    module.torch.set_num_threads(1)
    return module


@pytest.fixture(scope="session")
def reference(oracle: Any) -> Callable[..., tuple[Any, Any]]:
    """Reference target and draft for the files of a pair."""

    def load(target: Path, checkpoint: Path) -> tuple[Any, Any]:
        file = oracle.GGUFFile(target)
        embedding = file.values("token_embd.weight")
        head = file.values("output.weight") if "output.weight" in file.tensors else embedding
        return oracle.load_target(target), oracle.ReferenceDraft(checkpoint, embedding, head)

    return load


@pytest.fixture(scope="session")
def run_stock(
    stock_bin_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict[str, Any]], dict[str, np.ndarray]]:
    """Run a job of `stock_pair` with the unpatched libraries, in a process of its own."""
    program = Path(__file__).resolve().parent.parent / "stock_pair.py"

    def run(job: dict[str, Any]) -> dict[str, np.ndarray]:
        folder = tmp_path_factory.mktemp("stock")
        (folder / "job.json").write_text(json.dumps(job, default=str))
        done = subprocess.run(
            [sys.executable, program, folder / "job.json", folder / "result.npz"],
            env={**os.environ, "LLAMA_CPP_LIB_PATH": str(stock_bin_dir)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"the stock run failed:\n{done.stderr[-4000:]}"
        with np.load(folder / "result.npz") as result:
            return dict(result)

    return run


@pytest.fixture(scope="module", params=ARCHS)
def opened_twins(
    request: pytest.FixtureRequest, our_library: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Twins]:
    """A plain `Llama` and a `DFlashLlama` for each architecture, open for one module."""
    twins = Twins(make_files(tmp_path_factory.mktemp("pair"), request.param))
    yield twins
    twins.close()


@pytest.fixture
def twins(opened_twins: Twins) -> Twins:
    """The same, with nothing in their memories."""
    opened_twins.forget()
    return opened_twins
