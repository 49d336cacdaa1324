"""Drafts of every type that the converter offers open in both builds and draft."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_convert
from dflash_convert.tensor_types import OUT_TYPES, TENSOR_TYPES

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("our_library")]

# Rows of 256 and 512, so that no tensor falls back to another type.
SHAPE: dict[str, Any] = {
    "target": {"n_embd": 512, "n_ff": 256},
    "ffn": 512,
    "heads": 4,
    "kv_heads": 1,
    "head_dim": 64,
    "rank": 256,
}
# How closely the final hidden states must follow those of the F32 draft (cosine), by the start of
# a type's name; twice the distance that was measured. Random weights are the worst case.
CLOSE = {
    "f32": 0.999999,
    "f16": 0.99999,
    "bf16": 0.9999,
    "q8_0": 0.9995,
    "q6_k": 0.998,
    "q5": 0.993,
    "q4": 0.965,
    "iq4": 0.975,
    "nvfp4": 0.965,
    "mxfp4": 0.95,
    "q3_k": 0.9,
    "iq3": 0.9,
    "q2_k": 0.8,
    # one or two bits without a search: only somewhere in the same direction
    "q2_0": 0.2,
    "tq": 0.2,
    "q1_0": 0.2,
}

_LOAD = """
import sys
import llama_cpp
llama_cpp.llama_backend_init()
for path in sys.argv[1:]:
    model = llama_cpp.llama_model_load_from_file(
        path.encode(), llama_cpp.llama_model_default_params()
    )
    print(path, llama_cpp.llama_model_n_params(model) if model else "refused")
"""


@pytest.fixture(scope="module")
def drafts(make_pair: Callable, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict]:
    """A pair, and its draft in every type (also each tensor type that no file type stands for)."""
    pair = make_pair("qwen3", **SHAPE)
    root = tmp_path_factory.mktemp("outtypes")
    files = {"f32": pair.draft}
    for outtype in OUT_TYPES:
        files[outtype] = root / f"{outtype}.gguf"
        dflash_convert.convert(pair.checkpoint, pair.target, files[outtype], outtype)
    standing = {t.base.name for t in OUT_TYPES.values()}
    for kind in sorted(set(TENSOR_TYPES) - standing):
        files[kind] = root / f"{kind}.gguf"
        rules = [f"^blk.*(attn|ffn)_[a-z]+.weight={kind}"]
        dflash_convert.convert(pair.checkpoint, pair.target, files[kind], tensor_types=rules)
    return pair, files


@pytest.mark.parametrize("build", ["ours", "stock"])
def test_every_type_loads(build: str, drafts: tuple[Any, dict], request: Any) -> None:
    folder = request.getfixturevalue("lib_dir" if build == "ours" else "stock_bin_dir")
    _, files = drafts
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, *map(str, files.values())],
        env={**os.environ, "LLAMA_CPP_LIB_PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert set(counts) == set(map(str, files.values()))
    assert len(set(counts.values())) == 1
    assert "refused" not in counts.values()


def _draft(target: Path, draft: Path) -> tuple[list[int], np.ndarray, list[list[int]]]:
    """Greedy text, the hidden states of the first block, and what each round proposed."""
    from our_pair import OurPair

    prompt = np.random.default_rng(5).integers(0, 500, 40).tolist()
    job = {"target": str(target), "draft": str(draft), "n_predict": 8, "kv": "f32"}
    with OurPair(job) as pair:
        tokens, proposals, first = [pair.prompt(prompt)], [], None
        while len(tokens) < job["n_predict"]:
            tokens += pair.step(tokens[-1])
            trace = pair.trace()
            proposals.append(trace.draft)
            first = trace.hidden if first is None else first
    assert first is not None
    return tokens[: job["n_predict"]], first, proposals


def test_every_type_drafts(drafts: tuple[Any, dict]) -> None:
    pair, files = drafts
    text, exact, _ = _draft(pair.target, files["f32"])
    for name, file in files.items():
        found, hidden, proposals = _draft(pair.target, file)
        assert found == text, f"{name}: the target decides, whatever the draft proposes"
        assert np.isfinite(hidden).all(), name
        assert all(proposals), name
        product = np.einsum("ij,ij->i", hidden, exact)
        cosine = product / np.linalg.norm(hidden, axis=1) / np.linalg.norm(exact, axis=1)
        (close,) = (c for start, c in CLOSE.items() if name.startswith(start))
        assert cosine.min() >= close, name


@pytest.mark.parametrize("outtype", ["f16", "bf16", "q8_0", "q5_1", "q6_k", "q4_k_m"])
def test_a_constructed_pair_drafts_the_same_path(
    outtype: str, make_bigram: Callable, tmp_path: Path
) -> None:
    """The path of the pair has margins that these types keep: all that is proposed is accepted."""
    from our_pair import OurPair

    pair = make_bigram("llama")
    draft = tmp_path / "draft.gguf"
    dflash_convert.convert(pair.checkpoint, pair.target, draft, outtype)
    prompt = np.random.default_rng(6).integers(0, 500, 20).tolist()
    paths = []
    for file in (pair.draft, draft):
        job = {"target": str(pair.target), "draft": str(file), "n_predict": 40}
        with OurPair(job, trace=False) as session:
            paths.append(session.generate(prompt, 40))
    assert paths[0] == paths[1]
    assert paths[1][0] == pair.text(prompt[-1], 40)
    assert set(paths[1][1]) == {pair.block}
