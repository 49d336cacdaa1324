"""Drafts written here run in the unpatched build, and drafts written by its converter run here.

The same job goes through both builds; text, proposals and lattices must agree round by round.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import our_pair
import pytest

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("our_library")]

# same kernels, but possibly sums in another order: a hundred times the F32 rounding
CLOSE = 1e-4

PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "random llama": ("pair", {"arch": "llama"}),
    "random qwen3, causal, taps 3": ("pair", {"arch": "qwen3", "is_causal": True, "taps": 3}),
    "random qwen35": ("pair", {"arch": "qwen35"}),
    "random gemma4": ("pair", {"arch": "gemma4"}),
    "random, soft cap and scales": (
        "pair",
        {"arch": "llama", "softcap": 9.0, "output_multiplier": 1.5, "embedding_scale": 2.0},
    ),
    "random, own embedding and head": (
        "pair",
        {"arch": "llama", "own_embedding": True, "own_head": True},
    ),
    "bigram": ("bigram", {"arch": "llama"}),
    "bigram with mistakes": ("bigram", {"arch": "qwen3", "wrong": 0.2}),
    "context-dependent": ("bigram", {"arch": "llama", "drift": 0.28, "busy": True}),
    "context-dependent hybrid": ("bigram", {"arch": "qwen35", "drift": 0.15, "busy": True}),
    "context-dependent, soft-capped": ("bigram", {"arch": "gemma4", "drift": 0.28, "busy": True}),
}


def random_ids(n: int, seed: int = 0) -> list[int]:
    """Ids of ordinary tokens."""
    return np.random.default_rng([n, seed]).integers(0, 500, n).tolist()


def run_with_the_bases_products(job: dict[str, Any], folder: Path) -> dict[str, np.ndarray]:
    """The job with our build, but its kernels for few columns switched off."""
    (folder / "job.json").write_text(json.dumps(job))
    subprocess.run(
        [sys.executable, our_pair.__file__, folder / "job.json", folder / "result.npz"],
        env={**os.environ, "GGML_DFLASH_SMALL_BATCH": "0"},
        check=True,
        timeout=600,
    )
    with np.load(folder / "result.npz") as result:
        return dict(result)


def by_id(ids: np.ndarray, lattice: np.ndarray) -> np.ndarray:
    """Lattices [rounds, n, k, k] with candidates and predecessors in the order of their ids."""
    order = np.argsort(ids, axis=-1)
    before = np.concatenate([order[:, :1], order[:, :-1]], axis=1)
    rows = np.take_along_axis(lattice, before[..., None], axis=-2)
    return np.take_along_axis(rows, order[..., None, :], axis=-1)


def assert_same_rounds(ours: dict[str, np.ndarray], stock: dict[str, np.ndarray]) -> None:
    """Text, anchors, proposals, acceptance, candidates and scores."""
    for key in ("tokens", "anchor", "pos", "draft", "accepted"):
        np.testing.assert_array_equal(ours[key], stock[key], err_msg=key)
    for key in ("ids",):
        np.testing.assert_array_equal(np.sort(ours[key]), np.sort(stock[key]), err_msg=key)
    mine, theirs = (by_id(r["ids"], r["lattice"]) for r in (ours, stock))
    assert np.abs(mine - theirs).max() <= CLOSE * np.abs(theirs).max()


@pytest.mark.parametrize("name", PAIRS)
def test_our_drafts_run_in_stock(
    name: str, make_pair: Callable, make_bigram: Callable, run_stock: Callable
) -> None:
    kind, options = PAIRS[name]
    options = dict(options)
    pair = (make_pair if kind == "pair" else make_bigram)(options.pop("arch"), **options)
    # F32 without flash attention: a difference of the builds must not drown in F16 rounding
    job = {
        "target": str(pair.target),
        "draft": str(pair.draft),
        "prompt": random_ids(90),
        "n_predict": 100 if kind == "bigram" else 20,
        "kv": "f32",
    }
    stock = run_stock(job)
    assert_same_rounds(our_pair.run(job), stock)
    if kind == "bigram":
        assert stock["accepted"].sum() > 0, "the pair must accept something to show anything"


@pytest.mark.parametrize("outtype", ["f16", "bf16", "q8_0"])
def test_our_smaller_types_run_in_stock(
    outtype: str, make_pair: Callable, run_stock: Callable, tmp_path: Path
) -> None:
    """With the same products: ours round a little differently from the base's."""
    pair = make_pair("qwen3", outtype=outtype)
    job = {
        "target": str(pair.target),
        "draft": str(pair.draft),
        "prompt": random_ids(60),
        "n_predict": 12,
        "kv": "f32",
    }
    assert_same_rounds(run_with_the_bases_products(job, tmp_path), run_stock(job))


@pytest.fixture(scope="session")
def stock_draft(
    base_gguf_py: Path, make_pair: Callable, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Any, Path]]:
    """A pair, and the same checkpoint converted by llama.cpp's own converter."""
    pytest.importorskip("transformers", reason="llama.cpp's converter needs torch and transformers")
    tree = base_gguf_py.parent
    program = Path(__file__).resolve().parent.parent / "stock_convert.py"
    # architecture -> its name in config.json, its pre-tokenizer in GGUF, its rope
    facts = {
        "qwen3": ("Qwen3ForCausalLM", "qwen2", {"rope_type": "default", "rope_theta": 1e4}),
        "qwen35": (
            "Qwen3_5ForCausalLM",
            "qwen35",
            {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
        ),
    }

    def convert(arch: str) -> tuple[Any, Path]:
        import tiny

        pair = make_pair(arch)
        folder = tmp_path_factory.mktemp("stock-convert")
        spec = tiny.TargetSpec(arch=arch)
        spec.make_vocab().write_hf(folder / "target")
        name, pre, rope = facts[arch]
        config = {
            "architectures": [name],
            "model_type": arch if arch == "qwen3" else "qwen3_5_text",
            "vocab_size": spec.n_vocab,
            "hidden_size": spec.n_embd,
            "num_hidden_layers": spec.n_layer,
            "rope_parameters": rope,
        }
        (folder / "target" / "config.json").write_text(json.dumps(config))
        out = folder / "stock.gguf"
        done = subprocess.run(
            [
                *(sys.executable, program, tree, pre, pair.checkpoint, "--outtype", "f32"),
                *("--target-model-dir", folder / "target", "--outfile", out),
            ],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 0, f"llama.cpp's converter failed:\n{done.stderr[-3000:]}"
        return pair, out

    return convert


@pytest.mark.parametrize("arch", ["qwen3", "qwen35"])
def test_drafts_of_the_stock_converter_run_here(arch: str, stock_draft: Callable) -> None:
    pair, draft = stock_draft(arch)
    job = {"target": pair.target, "prompt": random_ids(70), "n_predict": 12, "kv": "f32"}
    ours = our_pair.run({**job, "draft": pair.draft})
    theirs = our_pair.run({**job, "draft": draft})
    for key, value in ours.items():
        np.testing.assert_array_equal(value, theirs[key], err_msg=key)


@pytest.mark.parametrize("arch", ["qwen3", "qwen35"])
def test_both_converters_write_the_same_model(arch: str, stock_draft: Callable) -> None:
    from gguf_files import GGUFFile

    pair, draft = stock_draft(arch)
    ours, theirs = GGUFFile(pair.draft), GGUFFile(draft)
    assert set(ours.tensors) == set(theirs.tensors)
    for name in ours.tensors:
        np.testing.assert_array_equal(ours.values(name), theirs.values(name), err_msg=name)
    for key in theirs.keys("dflash."):
        assert ours.field(key) == pytest.approx(theirs.field(key)), key


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {"wrong": 0.2}),
        ("qwen3", {"drift": 0.28, "busy": True}),
        ("qwen35", {"drift": 0.15, "busy": True}),
        ("gemma4", {"drift": 0.28, "busy": True}),
    ],
    ids=["llama", "qwen3", "qwen35", "gemma4"],
)
def test_both_servers_draft_alike(
    arch: str, options: dict[str, Any], make_bigram: Callable, bin_dir: Path, stock_bin_dir: Path
) -> None:
    """The stock server's own drafting, not our driver of it."""
    from dflash_cpp.server import LlamaServer

    pair = make_bigram(arch, **options)
    arguments = [
        *("-m", str(pair.target), "-md", str(pair.draft), "--spec-type", "draft-dflash"),
        *("--spec-draft-n-max", "7", "-c", "1024", "-np", "1", "-t", "1"),
    ]
    answers = []
    for folder in (bin_dir, stock_bin_dir):
        with LlamaServer(arguments, program=folder / "llama-server") as server:
            answers.append(
                [
                    server.post(
                        "/completion",
                        {
                            "prompt": random_ids(50, seed),
                            "n_predict": 100,
                            "temperature": 0,
                            "cache_prompt": False,
                        },
                    )
                    for seed in range(3)
                ]
            )
    ours, stock = answers
    assert [a["content"] for a in ours] == [a["content"] for a in stock]
    for key in ("draft_n", "draft_n_accepted", "predicted_n"):
        assert [a["timings"][key] for a in ours] == [a["timings"][key] for a in stock], key
    assert all(0 < a["timings"]["draft_n_accepted"] < a["timings"]["draft_n"] for a in stock)
