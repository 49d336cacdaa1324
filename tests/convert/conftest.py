"""Tiny targets and checkpoints for the converter's tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny import make_target
from tiny_checkpoint import make_draft_checkpoint

# One layer of everything: for tests that convert very often.
SMALL = {
    "hidden": 32,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "ffn": 48,
    "group": 8,
    "rank": 8,
    "top_k": 4,
    "target_layer_ids": (1, 3),
    "sliding_window": 16,
}


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that fits the defaults of `make_draft_checkpoint`: 8 layers, width 288."""
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    return make_target(path, "qwen3", n_layer=8, n_embd=288, n_vocab=300)


@pytest.fixture(scope="session")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that fits `SMALL`."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    return make_target(path, "qwen3", n_layer=8, n_embd=32, n_ff=64, n_vocab=300)


@pytest.fixture(scope="session")
def mrope_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like `target`, but hybrid and with M-RoPE."""
    path = tmp_path_factory.mktemp("mrope") / "mrope.gguf"
    return make_target(path, "qwen35", n_layer=8, n_embd=288, n_vocab=300)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a checkpoint: `make("name", **changes)`."""

    def run(name: str = "draft", **changes: Any) -> Path:
        return make_draft_checkpoint(tmp_path / name, **changes)

    return run


@pytest.fixture
def small(make: Callable[..., Path]) -> Callable[..., Path]:
    """Like `make`, for the sizes in `SMALL`."""
    return lambda name="draft", **changes: make(name, **{**SMALL, **changes})


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies a GGUF with changes.

    `edited(source, "name", keys={...}, drop=(...), tensors={...})`: a key of None is removed, the
    tensors in `drop` are left out, those in `tensors` replaced or added as they are.
    """

    def run(
        source: Path,
        name: str,
        *,
        keys: dict[str, Any] | None = None,
        drop: tuple[str, ...] = (),
        tensors: dict[str, np.ndarray] | None = None,
    ) -> Path:
        reader = gguf.GGUFReader(source)
        fields = {n: f for n, f in reader.fields.items() if not n.startswith("GGUF.")}
        values = {n: f.contents() for n, f in fields.items()} | (keys or {})
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", values["general.architecture"])
        for key, value in values.items():
            if value is None or key == "general.architecture":
                continue
            kinds = fields[key].types if key in fields else [gguf.GGUFValueType.get_type(value)]
            if keys is not None and key in keys:
                kinds = [gguf.GGUFValueType.get_type(value)]
            item = kinds[1] if len(kinds) > 1 else None
            writer.add_key_value(key, value, kinds[0], item)
        for tensor in reader.tensors:
            if tensor.name not in drop and tensor.name not in (tensors or {}):
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        for new, data in (tensors or {}).items():
            # Bytes are blocks of the one quantised type the tests use.
            quantised = gguf.GGMLQuantizationType.Q8_0 if data.dtype == np.uint8 else None
            writer.add_tensor(new, data, raw_dtype=quantised)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / f"{name}.gguf"

    return run


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that runs `dflash-convert` in a scratch directory as a process."""

    def call(*args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dflash_convert", *map(str, args)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "100", **(env or {})},
            timeout=300,
            check=False,
        )

    return call
