"""The draft's graph: smaller than stock's, and the same proposals however it is built."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import our_pair
import pytest
import stock_pair

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("our_library")]

# sums in another order
CLOSE = 1e-5

_IDS = np.arange(0, 500, 3)  # of a draft's own, smaller vocabulary


def smaller_vocabulary(ids: np.ndarray = _IDS) -> dict[str, Any]:
    """Arguments of `make_pair`."""
    head = np.random.default_rng(5).standard_normal((len(ids), 288)).astype(np.float32)
    tensors = {"d2t": ids - np.arange(len(ids)), "lm_head.weight": head}
    return {"tensors": tensors, "config_overrides": {"draft_vocab_size": len(ids)}}


PAIRS: dict[str, dict[str, Any]] = {
    "smaller vocabulary": smaller_vocabulary(),
    "plain": {},
    "taps 3, group 8, causal": {"taps": 3, "group": 8, "is_causal": True},
    "soft cap and scales": {"softcap": 9.0, "output_multiplier": 1.5, "embedding_scale": 2.0},
    "block 16, top-k 4": {"block": 16, "top_k": 4},
    "own embedding and head": {"own_embedding": True, "own_head": True},
}


def job_of(pair: Any, **more: Any) -> dict[str, Any]:
    prompt = np.random.default_rng(3).integers(0, 500, 40).tolist()
    files = {"target": str(pair.target), "draft": str(pair.draft)}
    return {**files, "prompt": prompt, "n_predict": 32, "kv": "f32", **more}


def run_apart(program: str, job: dict[str, Any], folder: Path, **environment: str) -> str:
    """The job in a process of its own; returns what went to stderr."""
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, program, folder / "job.json", folder / "result.npz"],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


@pytest.mark.parametrize("mode", ["composite", "0"])
@pytest.mark.parametrize("name", PAIRS)
def test_the_same_proposals_from_ordinary_operations(
    name: str, mode: str, make_pair: Callable, tmp_path: Path
) -> None:
    job = job_of(make_pair("llama", **PAIRS[name]))
    nodes = our_pair.run(job)
    run_apart(our_pair.__file__, job, tmp_path, GGML_DFLASH_DRAFT_OPS=mode)
    with np.load(tmp_path / "result.npz") as other:
        for key in ("tokens", "draft", "accepted", "ids"):
            np.testing.assert_array_equal(nodes[key], other[key], err_msg=key)
        largest = np.abs(other["lattice"]).max()
        assert np.abs(nodes["lattice"] - other["lattice"]).max() <= CLOSE * largest
        kept = np.isfinite(other["logits"])
        np.testing.assert_array_equal(np.isfinite(nodes["logits"]), kept)
        assert kept.sum(-1).min() == len(_IDS if name == "smaller vocabulary" else kept[0, 0])
        assert np.abs(nodes["logits"][kept] - other["logits"][kept]).max() <= CLOSE * largest


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_draft", [1, 3, 6, 7])
def test_positions_that_are_not_wanted_change_nothing(
    n_draft: int, causal: bool, make_bigram: Callable
) -> None:
    """Tracing scores all positions: what is accepted must be the same."""
    pair = make_bigram("llama", drift=0.28, busy=True, sliding_window=40, is_causal=causal)
    job = job_of(pair, n_draft=n_draft)
    rounds = []
    for trace in (False, True):
        with our_pair.OurPair(job, trace=trace) as ours:
            rounds.append(ours.generate(job["prompt"], 120))
    assert rounds[0] == rounds[1]
    assert len(set(rounds[0][1])) > min(n_draft, 2), "the rig should give rounds of many lengths"


class Reserved(NamedTuple):
    """What a context reserves, from its log."""

    mib: float
    nodes: int
    nodes_of_one_token: int


def reserved(log: str) -> Reserved:
    """The draft's: its graphs of a block and of one token differ, the target's do not."""
    size = r"compute buffer size = +([0-9.]+) MiB"
    found = re.findall(size + r"[^=]+graph [^=]+=\d+, tg bs=1\): nodes = (\d+) / (\d+)", log)
    mib, *nodes = found[-1]
    return Reserved(float(mib), *map(int, nodes))


def test_nodes_and_memory(make_pair: Callable, stock_bin_dir: Path, tmp_path: Path) -> None:
    """At most half of stock's nodes; a compute buffer for the drafted rows only."""
    vocabulary = {"n_vocab": 20000}
    job = job_of(make_pair("qwen3", target=vocabulary), log=True, n_predict=4, kv="f16")
    ours = reserved(run_apart(our_pair.__file__, job, tmp_path))
    library = {"LLAMA_CPP_LIB_PATH": str(stock_bin_dir)}
    stock = reserved(run_apart(stock_pair.__file__, job, tmp_path, **library))
    assert ours.nodes <= stock.nodes / 2
    assert ours.nodes_of_one_token <= stock.nodes_of_one_token / 2
    rows = 7 * vocabulary["n_vocab"] * 4 / 2**20
    assert rows <= ours.mib <= rows + 1
    assert stock.mib > 512 / 8 * rows


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda ids: np.full_like(ids, 512), "d2t names token 512"),
        (lambda ids: ids - 1, "d2t names token -1"),
        (lambda ids: np.full_like(ids, 7), "d2t names token 7 twice"),
    ],
    ids=["too large", "negative", "twice"],
)
def test_a_vocabulary_that_points_outside_is_refused(
    wrong: Callable, sentence: str, make_pair: Callable, tmp_path: Path
) -> None:
    """The base would end the process when it scatters the logits."""
    import gguf

    from dflash_cpp.errors import DFlashError

    pair = make_pair("llama", **smaller_vocabulary())
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(pair.draft.read_bytes())
    place = next(t for t in gguf.GGUFReader(damaged).tensors if t.name == "d2t").data_offset
    with damaged.open("r+b") as stream:
        stream.seek(place)
        stream.write(wrong(_IDS.astype("<i8")).tobytes())
    job = job_of(pair) | {"draft": str(damaged)}
    with pytest.raises(DFlashError, match=sentence):
        our_pair.OurPair(job)


def test_fewer_tokens_than_candidates_are_refused(make_pair: Callable) -> None:
    from dflash_cpp.errors import DFlashError

    with pytest.raises(DFlashError, match="asks for 16 candidates out of 12 tokens"):
        our_pair.OurPair(job_of(make_pair("llama", **smaller_vocabulary(_IDS[:12]))))
