"""What is refused before anything is written, with every problem named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from converted import convert
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoint import draft_config, draft_tensors

import dflash_convert
from dflash_convert import conversion
from dflash_convert.errors import InputError

Make = Callable[..., Path]


def refused(checkpoint: Path, target: Path | None, **options: Any) -> str:
    """Convert, expect an InputError, and check that nothing was left behind."""
    before = sorted(p.name for p in checkpoint.parent.iterdir())
    out = checkpoint.parent / "out.gguf"
    with pytest.raises(InputError) as caught:
        dflash_convert.convert(checkpoint, target, out, **options)
    assert sorted(p.name for p in checkpoint.parent.iterdir()) == before
    return str(caught.value)


def test_all_tensor_problems_are_listed_at_once(small: Make, small_target: Path) -> None:
    from tiny_checkpoint import write_safetensors

    checkpoint = small()
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = draft_tensors(config)
    del tensors["norm.weight"]
    tensors["fc.weight"] = tensors["fc.weight"].T.copy()
    tensors["layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    tensors["layers.1.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)
    tensors["candidate_selector.predecessor_codebook.weight"] = np.zeros((300, 8), np.float32)
    tensors["layers.0.input_layernorm.weight"] = np.zeros(32, np.int64)
    write_safetensors(checkpoint / "model.safetensors", tensors)
    message = refused(checkpoint, small_target)
    for expected in (
        "missing `norm.weight` (32)",
        "`fc.weight` is 64 x 32, expected 32 x 64 (hidden x fused)",
        "unknown `layers.0.self_attn.q_proj.bias` (32)",
        "unknown `layers.1.mlp.up_proj.weight` (48 x 32)",
        "both `candidate_selector.predecessor_codebook`",
        "`layers.0.input_layernorm.weight` has type I64, expected F32 or F16 or BF16",
    ):
        assert expected in message


def test_generations_that_do_not_match(small: Make, small_target: Path) -> None:
    two = small("two", config_overrides={"architectures": ["DFlashDraftModel"]})
    assert "conv_kernel_size, conv_group_size" in refused(two, small_target)
    config = json.loads((two / "config.json").read_text())
    config["dflash_config"] = {
        k: v for k, v in config["dflash_config"].items() if not k.startswith(("conv", "selector"))
    }
    (two / "config.json").write_text(json.dumps(config))
    assert "DFlash 2, but the config says DFlashDraftModel" in refused(two, small_target)
    one = small("one", version=1, config_overrides={"architectures": ["DFlash2DraftModel"]})
    assert "`conv_kernel_size` is missing" in refused(one, small_target)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_weights_that_are_not_finite(
    small: Make, small_target: Path, bad: float, dtype: str
) -> None:
    norm, codebook = np.ones(32, np.float32), np.ones((300, 8), np.float32)
    norm[5] = codebook[299, 7] = codebook[0, 0] = bad
    checkpoint = small(
        dtype="f32",
        tensors={"norm.weight": norm, "candidate_selector.successor_codebook": codebook},
    )
    from tiny_checkpoint import write_safetensors

    config = json.loads((checkpoint / "config.json").read_text())
    tensors = draft_tensors(config) | {
        "norm.weight": norm,
        "candidate_selector.successor_codebook": codebook,
    }
    if dtype != "bf16" or not np.isnan(bad):  # the helper's rounding keeps infinities only
        write_safetensors(checkpoint / "model.safetensors", tensors, dtype)
    message = refused(checkpoint, small_target, dry_run=True)
    assert "NaN or infinite" in message
    assert "`norm.weight`: 1 of 32" in message
    assert "`candidate_selector.successor_codebook`: 2 of 2400" in message


def test_f16_refuses_weights_out_of_range(small: Make, small_target: Path) -> None:
    codebook = np.zeros((300, 8), np.float32)
    codebook[3, 3] = 1e6
    checkpoint = small(tensors={"candidate_selector.successor_codebook": codebook})
    message = refused(checkpoint, small_target, outtype="f16")
    assert "`candidate_selector.successor_codebook` reaches" in message
    assert "f16 at most 65504" in message
    convert(checkpoint, small_target, outtype="bf16")


@pytest.mark.native
@pytest.mark.parametrize(
    ("kind", "beyond", "limit"),
    [("q8_0", 1e7, "8.31901e+06"), ("q4_1", 7e4, "65504"), ("nvfp4", 2e3, "1536")],
)
def test_block_types_refuse_weights_out_of_range(
    make: Make, target: Path, kind: str, beyond: float, limit: str
) -> None:
    weights = np.zeros((288, 256), np.float32)
    weights[3, 3] = beyond
    checkpoint = make(layers=1, ffn=256, tensors={"layers.0.mlp.down_proj.weight": weights})
    message = refused(checkpoint, target, outtype="bf16", tensor_types=[f"ffn_down={kind}"])
    assert f"{kind} at most {limit}" in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vocab": 299}, "the draft has 299 tokens, the target 300"),
        ({"hidden": 40}, "the draft's hidden size is 40, the target's 32"),
        ({"n_target_layers": 9}, "was trained for a target of 9 layers, this one has 8"),
        ({"target_layer_ids": (1, 8)}, "reads the output of layer 8, the target has layers 0 to 7"),
        ({"target_layer_ids": (1, 7)}, "reads the output of the last layer (7)"),
    ],
)
def test_pairs_that_do_not_fit(
    small: Make, small_target: Path, changes: dict[str, Any], expected: str
) -> None:
    assert expected in refused(small(**changes), small_target)


def test_targets_that_are_none(
    small: Make, small_target: Path, tmp_path: Path, edited: Make
) -> None:
    checkpoint = small()
    draft = convert(small("other"), small_target)
    assert "no target given" in refused(checkpoint, None)
    assert "is a draft (architecture `dflash`)" in refused(checkpoint, draft)
    assert "is a draft (DFlash2DraftModel)" in refused(checkpoint, checkpoint)
    assert "no GGUF file" in refused(checkpoint, tmp_path / "missing.gguf")
    for name, keys, expected in (
        ("adapter", {"general.type": "adapter"}, "is not a language model"),
        ("part", {"split.no": 1, "split.count": 2}, "is part 2 of a split model"),
        ("silent", {"tokenizer.ggml.tokens": None}, "has no tokenizer"),
        ("flat", {"qwen3.block_count": None}, "no usable `qwen3.block_count`"),
    ):
        path = edited(small_target, name, keys=keys)
        assert expected in refused(checkpoint, path)


def test_unknown_type(small: Make, small_target: Path) -> None:
    assert "no type `q3_x`, expected auto, f32" in refused(small(), small_target, outtype="q3_x")


_ODD = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=4)
_KEYS = sorted(draft_config()) + sorted(draft_config()["dflash_config"])


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_mutated_configs_convert_or_are_refused(
    small: Make, small_target: Path, tmp_path: Path, data: st.DataObject
) -> None:
    file = tmp_path / "draft" / "config.json"
    if not file.exists():
        small()
        (tmp_path / "whole.json").write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "whole.json").read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        key = data.draw(st.sampled_from(_KEYS))
        place = config["dflash_config"] if key in config.get("dflash_config", {}) else config
        value = data.draw(_ODD | st.integers(1, 64) | st.lists(st.integers(0, 9), max_size=3))
        if key != "dflash_config":
            place[key] = value
    file.write_text(json.dumps(config))
    result = dry_run(file.parent, small_target)
    if isinstance(result, InputError):
        assert result.message
    else:
        assert result.plan.nbytes > 0


def dry_run(checkpoint: Path, target: Path) -> conversion.ConvertResult | InputError:
    """Return what a dry run gives or the one kind of error a config may cause."""
    try:
        return dflash_convert.convert(checkpoint, target, dry_run=True)
    except InputError as exc:
        return exc
