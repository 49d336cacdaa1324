"""Every form of a draft that is accepted loads, in the built library and in the unpatched one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_tokenizers import SHAPES, write_shape
from tiny_checkpoint import make_draft_checkpoint, write_safetensors

import dflash_convert
from dflash_convert.gguf_file import read_gguf

_LOAD = """
import ctypes, sys
import llama_cpp
silent = llama_cpp.llama_log_callback(lambda *a: None)
llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()
for path in sys.argv[1:]:
    parameters = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
    print(path, llama_cpp.llama_model_n_params(model) if model else "refused")
"""


def rope(**parameters: Any) -> dict[str, Any]:
    table = {"rope_theta": 1e6, "rope_type": "default", **parameters}
    return {"config_overrides": {"rope_parameters": table}}


_IDS = np.arange(0, 200, 2)  # draft token i is target token i + offset
_REDUCED = {
    "tensors": {
        "d2t": _IDS - np.arange(len(_IDS)),
        "lm_head.weight": np.ones((len(_IDS), 288), np.float32),
    },
    "config_overrides": {"draft_vocab_size": len(_IDS)},
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_MIXED = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-level": {"nested": False},
    "v1": {"version": 1},
    "own-both": {"own_embedding": True, "own_head": True},
    "own-head": {"own_head": True},
    "tied": {"own_embedding": True, "config_overrides": {"tie_word_embeddings": True}},
    "reduced": _REDUCED,
    "reduced-v1": {"version": 1, **_REDUCED},
    "default-ids": {"target_layer_ids": None, "n_target_layers": 8},
    "yarn": rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024),
    "yarn-factor": rope(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=1024,
        attention_factor=1.0,
    ),
    "linear": rope(rope_type="linear", factor=2.0),
    "llama3": rope(**_LLAMA3, original_max_position_embeddings=1024),
    "partial": rope(partial_rotary_factor=0.5),
    "mixed": {"layer_types": _MIXED},
    "sinks": {"tensors": {f"layers.{i}.self_attn.sinks": np.ones(4, np.float32) for i in range(5)}},
}


@pytest.fixture(scope="session")
def drafts(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every form, converted, and one with a mask embedding of its own."""
    root = tmp_path_factory.mktemp("forms")
    out = {}
    for name, form in {**FORMS, "mask-embedding": {}}.items():
        checkpoint = make_draft_checkpoint(root / name, **form)
        if name == "mask-embedding":
            vector = np.ones(288, np.float32)
            write_safetensors(checkpoint / "mask_embedding.safetensors", {"embedding": vector})
        out[name] = dflash_convert.convert(checkpoint, target, root / f"{name}.gguf").path
    return out


def load(libraries: Path, paths: list[Path]) -> list[str]:
    """Number of weights that the library counts in each file, or `refused`."""
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, *map(str, paths)],
        env={**os.environ, "LLAMA_CPP_LIB_PATH": str(libraries)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.rpartition(" ")[2] for line in done.stdout.splitlines()]


@pytest.mark.native
@pytest.mark.parametrize("libraries", ["lib_dir", "stock_bin_dir"])
def test_every_form_loads(
    drafts: dict[str, Path], libraries: str, request: pytest.FixtureRequest
) -> None:
    counted = load(request.getfixturevalue(libraries), list(drafts.values()))
    files = [read_gguf(path) for path in drafts.values()]
    assert counted == [str(sum(t.elements for t in f.tensors.values())) for f in files]


def test_every_form_fits(drafts: dict[str, Path], target: Path) -> None:
    for name, path in drafts.items():
        assert dflash_convert.check_pair(target, path) == [], name


def test_what_the_forms_add(drafts: dict[str, Path]) -> None:
    def tensors(name: str) -> set[str]:
        return read_gguf(drafts[name]).tensors.keys() - read_gguf(drafts["plain"]).tensors.keys()

    assert tensors("own-both") == {"token_embd.weight", "output.weight"}
    assert tensors("own-head") == {"output.weight"}
    assert tensors("tied") == {"token_embd.weight"}
    assert tensors("reduced") == {"d2t", "output.weight"}
    assert tensors("mask-embedding") == {"token_embd.weight", "output.weight"}
    assert tensors("llama3") == {"rope_freqs.weight"}
    assert tensors("sinks") == {f"blk.{i}.attn_sinks.weight" for i in range(5)}
    reduced = read_gguf(drafts["reduced"])
    place = reduced.tensors["d2t"]
    stored = np.fromfile(reduced.path, "<i8", len(_IDS), offset=place.offset)
    assert stored.tolist() == _IDS.tolist()  # the ids themselves, not the differences
    assert read_gguf(drafts["default-ids"]).get("dflash.target_layers") == [2, 3, 4, 5, 6]


@pytest.mark.native
@pytest.mark.parametrize("shape", ["qwen3", "qwen35", "llama3", "gpt-oss", "gemma4", "minimax-m2"])
def test_a_tokenizer_from_a_directory_loads(lib_dir: Path, tmp_path: Path, shape: str) -> None:
    """The keys made of Hugging Face files are a vocabulary that llama.cpp reads."""
    vocab = write_shape(tmp_path / "target", SHAPES[shape])
    checkpoint = make_draft_checkpoint(tmp_path / "draft", vocab=vocab, mask_token_id=vocab - 1)
    result = dflash_convert.convert(checkpoint, tmp_path / "target", tmp_path / "d.gguf")
    assert load(lib_dir, [result.path]) == [str(result.plan.parameters)]
    assert dflash_convert.check_pair(tmp_path / "target", result.path) == []
    sections = read_gguf(result.path).get("dflash.rope.dimension_sections")
    assert sections == ([32, 0, 0, 0] if shape == "qwen35" else None)


@pytest.mark.parametrize("shape", ["glm4", "glm4-moe"])
def test_targets_that_hand_nothing_over_say_so(tmp_path: Path, shape: str) -> None:
    vocab = write_shape(tmp_path / "target", SHAPES[shape])
    checkpoint = make_draft_checkpoint(tmp_path / "draft", vocab=vocab, mask_token_id=1)
    with pytest.raises(dflash_convert.InputError) as caught:
        dflash_convert.convert(checkpoint, tmp_path / "target", tmp_path / "d.gguf")
    assert any("does not hand hidden states" in p for p in caught.value.problems)
