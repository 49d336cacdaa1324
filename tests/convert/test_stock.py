"""Against the base: its tables, its own converter (equal keys and bytes), and its loader."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_target import make_hf_target
from tiny_checkpoint import draft_config, make_draft_checkpoint

import dflash_convert
from dflash_convert.gguf_file import GgufFile, read_gguf
from dflash_convert.schema import (
    ARCHITECTURES,
    BASE_CONVERTER_ARCHITECTURES,
    KEYS,
    LAST_LAYER_TAPPED_ARCHITECTURES,
    MASK_TOKEN_KEY,
    TAPPED_ARCHITECTURES,
    TENSORS,
    layer_name,
)
from dflash_convert.tensor_types import BUILT_IN, OUT_TYPES, TENSOR_TYPES

pytestmark = pytest.mark.native

Make = Callable[..., Path]

# What differs from the base's converter on purpose, and why.
DIFFERENT = {
    # Ours names the draft after its target and records where it came from.
    "general.size_label",
    "general.basename",
    "general.finetune",
}
ONLY_OURS = {
    "dflash_convert.version",
    "dflash_convert.source_sha256",
    "general.base_model.count",
    "general.base_model.0.name",
}


@pytest.fixture(scope="session")
def base(base_gguf_py: Path) -> Path:
    """The base's source tree."""
    return base_gguf_py.parent


# --- tables -------------------------------------------------------------------------------------


def test_names_and_keys_are_the_bases(base_gguf_py: Path) -> None:
    code = (
        "import json, gguf\n"
        "from gguf.constants import MODEL_ARCH, MODEL_TENSORS, TENSOR_NAMES, Keys\n"
        "tensors = [TENSOR_NAMES[t] for t in MODEL_TENSORS[MODEL_ARCH.DFLASH]]\n"
        "keys = [v for g in (Keys.LLM, Keys.Attention, Keys.Rope) for v in vars(g).values()]\n"
        "keys = [v.replace('{arch}', 'dflash') for v in keys if isinstance(v, str)]\n"
        "print(json.dumps([tensors, keys, Keys.Tokenizer.MASK_ID,\n"
        "    {t.name: t.value for t in gguf.LlamaFileType},\n"
        "    {t.name: [t.value, *gguf.GGML_QUANT_SIZES[t]] for t in gguf.GGMLQuantizationType}]))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(base_gguf_py)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    tensors, keys, mask, file_types, types = json.loads(out.stdout)
    names = {layer_name(r.target, 0).removesuffix(".weight") for r in TENSORS}
    assert names <= {t.format(bid=0) for t in tensors}
    assert {rule.key for rule in KEYS} <= set(keys)
    assert mask == MASK_TOKEN_KEY
    for written in TENSOR_TYPES.values():
        name = written.name.upper()
        assert types[name] == [written.type_id, written.block, written.block_bytes]
    for name, file_type in OUT_TYPES.items():
        wanted = "ALL_F32" if name == "f32" else f"MOSTLY_{name.upper()}"
        assert file_types[wanted] == file_type.number


def test_architecture_tables_are_the_bases(base: Path) -> None:
    registry = (base / "conversion" / "__init__.py").read_text()
    for name in (*ARCHITECTURES, *BASE_CONVERTER_ARCHITECTURES):
        assert f'"{name}"' in registry, name
    drafts = re.findall(r'"(\w*(?:DSpark|Eagle3|EAGLE3)\w*)"', registry)
    assert set(drafts) <= BASE_CONVERTER_ARCHITECTURES


def test_tapped_architectures_are_the_bases(base: Path) -> None:
    """A model file that sets `t_layer_inp` hands its layer inputs over."""
    source = base / "src"
    gguf_names = dict(
        re.findall(r"\{ LLM_ARCH_(\w+),\s+\"([^\"]+)\"", (source / "llama-arch.cpp").read_text())
    )
    tapped, last = set(), set()
    for file in (source / "models").glob("*.cpp"):
        text = file.read_text()
        if "res->t_layer_inp[il]" in text:
            tapped.add(file.stem.replace("-", "_"))
        if "res->t_layer_inp[n_layer]" in text:
            last.add(file.stem.replace("-", "_"))

    # Architectures that use another one's graph are listed beside it.
    graph_of = {
        "lfm2moe": "lfm2",
        "nemotron_h_moe": "nemotron_h",
        "hunyuan-dense": "hunyuan_vl",
        "gpt-oss": "openai_moe",
    }

    def stem(arch: str) -> str:
        return graph_of.get(arch, arch).replace("-", "_")

    assert set(gguf_names.values()) >= TAPPED_ARCHITECTURES
    assert {stem(a) for a in TAPPED_ARCHITECTURES} == tapped
    assert {stem(a) for a in LAST_LAYER_TAPPED_ARCHITECTURES} == last


# --- the base's converter -----------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A checkpoint and how the two conversions of it may differ beyond the usual."""

    checkpoint: dict[str, Any]
    outtype: str = "bf16"
    mrope: bool = False
    only_ours: dict[str, Any] = dataclass_field(default_factory=dict)


def _rope(**parameters: Any) -> dict[str, Any]:
    rope = {"rope_theta": 1e6, "rope_type": "default", **parameters}
    return {"config_overrides": {"rope_parameters": rope}}


def _own(**keys: Any) -> dict[str, Any]:
    return {"dflash_config": draft_config()["dflash_config"] | keys}


_MIXED = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]

CASES = {
    **{f"d2-{t}": Case({}, t) for t in BUILT_IN},
    "d1": Case({"version": 1}),
    "d1-q8_0": Case({"version": 1}, "q8_0"),
    "f32-source": Case({"dtype": "f32"}, "bf16"),
    "f32-source-q8_0": Case({"dtype": "f32"}, "q8_0"),
    "f16-source": Case({"dtype": "f16"}, "f16"),
    "rows-of-40": Case({"ffn": 40, "rank": 20}, "q8_0"),
    "taps-3": Case({"taps": 3, "group": 32, "top_k": 8, "block": 16}),
    "scales": Case({"softcap": 30.0, "output_multiplier": 0.7, "embedding_scale": 16.97}),
    "mixed": Case({"layer_types": _MIXED, "is_causal": True}),
    "full": Case({"sliding_window": None}),
    # Without `is_causal` the base writes nothing and runs all layers as not causal; the reference
    # makes sliding layers causal, so ours says so.
    "causality-unstated": Case({"is_causal": None}, only_ours={"dflash.attention.causal": True}),
    "full-unstated": Case(
        {"is_causal": None, "sliding_window": None}, only_ours={"dflash.attention.causal": False}
    ),
    "shards": Case({"shards": 3, "name_prefix": "model.", "codebook_suffix": True}),
    "own-head": Case({"own_embedding": True, "own_head": True}),
    "interleaved": Case({"config_overrides": {"rope_is_neox_style": False}}),
    "yarn": Case(_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)),
    "linear": Case(_rope(rope_type="linear", factor=2.0)),
    "partial": Case(_rope(partial_rotary_factor=0.5)),
    "swa": Case(
        {
            "config_overrides": _own(
                use_swa=True, swa_window_size=33, attention_value_scale=0.707, causal=False
            )
            | {"is_causal": None, "layer_types": None}
        }
    ),
    "sinks": Case(
        {"tensors": {f"layers.{i}.self_attn.sinks": np.ones(4, np.float32) for i in range(5)}}
    ),
    "mrope": Case({}, mrope=True),
    "mrope-f16": Case({}, "f16", mrope=True),
}


@pytest.fixture(scope="session")
def converted(
    base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[GgufFile, GgufFile]]:
    """Convert every case with the base's converter (one process) and, on demand, with ours."""
    root = tmp_path_factory.mktemp("stock")
    section = {"mrope_section": [11, 11, 10]}
    targets = [make_hf_target(root / "plain"), make_hf_target(root / "mrope", rope=section)]
    jobs = [[str(t), "--outfile", f"{t}.gguf", "--outtype", "f16"] for t in targets]
    for name, case in CASES.items():
        checkpoint = make_draft_checkpoint(root / "drafts" / name, **case.checkpoint)
        model = targets[case.mrope]
        jobs.append([str(checkpoint), "--target-model-dir", str(model)])
        jobs[-1] += ["--outfile", str(root / f"{name}.stock.gguf"), "--outtype", case.outtype]
    (root / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("stock_jobs.py")
    done = subprocess.run(
        [sys.executable, str(script), str(base), str(root / "jobs.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]

    def run(name: str) -> tuple[GgufFile, GgufFile]:
        case = CASES[name]
        ours = dflash_convert.convert(
            root / "drafts" / name,
            root / ("mrope.gguf" if case.mrope else "plain.gguf"),
            root / f"{name}.ours.gguf",
            case.outtype,
            True,
        )
        return read_gguf(root / f"{name}.stock.gguf"), read_gguf(ours.path)

    return run


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_bases_converter(
    converted: Callable[[str], tuple[GgufFile, GgufFile]], name: str
) -> None:
    stock, ours = converted(name)
    only_ours = ONLY_OURS | CASES[name].only_ours.keys()
    assert set(ours.fields) - set(stock.fields) - DIFFERENT == only_ours
    assert set(stock.fields) - set(ours.fields) - DIFFERENT == set()
    for key in sorted(set(stock.fields) & set(ours.fields) - DIFFERENT):
        mine, theirs = ours.fields[key], stock.fields[key]
        assert (mine.type_name, mine.payload) == (theirs.type_name, theirs.payload), key
    for key, value in CASES[name].only_ours.items():
        assert ours.get(key) is value
    assert set(ours.tensors) == set(stock.tensors)
    raw, theirs_raw = ours.path.read_bytes(), stock.path.read_bytes()
    for tensor, mine in ours.tensors.items():
        twin = stock.tensors[tensor]
        assert (mine.shape, mine.type_name) == (twin.shape, twin.type_name), tensor
        ours_bytes = raw[mine.offset :][: mine.nbytes]
        assert ours_bytes == theirs_raw[twin.offset :][: twin.nbytes], tensor


# --- the base's loader --------------------------------------------------------------------------

_LOAD = """
import ctypes, sys
import llama_cpp
lines = []
@llama_cpp.llama_log_callback
def log(level, text, data):
    lines.append(text.decode(errors="replace"))
llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()
for path in sys.argv[1:]:
    parameters = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
    count = llama_cpp.llama_model_n_params(model) if model else 0
    print(path, "loaded" if model else "refused", count)
    if not model:
        print("".join(lines[-8:]))
"""


def test_stock_loads_what_we_write(stock_bin_dir: Path, target: Path, tmp_path: Path) -> None:
    paths = []
    cases: dict[str, dict[str, Any]] = {
        "d2": {},
        "d1": {"version": 1},
        "own": {"own_embedding": True, "own_head": True},
        "full": {"sliding_window": None},
        "mixed": {"layer_types": _MIXED},
    }
    for name, changes in cases.items():
        checkpoint = make_draft_checkpoint(tmp_path / name, **changes)
        for outtype in BUILT_IN if name == "d2" else ("bf16",):
            out = tmp_path / f"{name}-{outtype}.gguf"
            result = dflash_convert.convert(checkpoint, target, out, outtype)
            paths.append((str(out), result.plan.parameters))
    env = {**os.environ, "LLAMA_CPP_LIB_PATH": str(stock_bin_dir)}
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, *(p for p, _ in paths)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [f"{path} loaded {count}" for path, count in paths]


@pytest.mark.parametrize("fault", ["hidden", "missing"])
def test_the_loader_check_can_fail(
    stock_bin_dir: Path, target: Path, tmp_path: Path, edited: Make, fault: str
) -> None:
    """A file that ought to be refused is refused, so `loaded` above means something."""
    checkpoint = make_draft_checkpoint(tmp_path / "d2")
    good = dflash_convert.convert(checkpoint, target, tmp_path / "good.gguf").path
    if fault == "hidden":
        bad = edited(good, "bad", keys={"dflash.selector_top_k": 40})
    else:
        bad = edited(good, "bad", drop=("selector_successor.weight",))
    env = {**os.environ, "LLAMA_CPP_LIB_PATH": str(stock_bin_dir)}
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(bad)], env=env, capture_output=True, text=True, check=True
    )
    assert "refused 0" in done.stdout
    assert dflash_convert.check_pair(target, bad)
