"""Does a draft fit a target: each reason, and each warning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import make_target

import dflash_convert
from dflash_convert.errors import InputError
from dflash_convert.gguf_file import read_gguf
from dflash_convert.pair import pair_report

Make = Callable[..., Path]


@pytest.fixture
def draft(small: Make, small_target: Path, tmp_path: Path) -> Path:
    return dflash_convert.convert(small("ckpt"), small_target, tmp_path / "draft.gguf").path


def test_a_pair_that_fits(draft: Path, small_target: Path) -> None:
    assert dflash_convert.check_pair(small_target, draft) == []
    assert pair_report(small_target, draft) == ([], [])


def test_version_1_fits(small: Make, small_target: Path, tmp_path: Path) -> None:
    checkpoint = small("v1", version=1)
    path = dflash_convert.convert(checkpoint, small_target, tmp_path / "v1.gguf").path
    assert dflash_convert.check_pair(small_target, path) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"n_vocab": 301}, "the draft has 300 tokens, the target 301"),
        ({"n_embd": 64}, "the draft's hidden size is 32, the target's 64"),
        ({"n_layer": 2}, "reads the output of layer 3, the target has layers 0 to 1"),
        ({"n_layer": 4}, "reads the output of the last layer (3)"),
    ],
)
def test_targets_of_another_shape(
    draft: Path, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    shape = {"n_layer": 8, "n_embd": 32, "n_ff": 64, "n_vocab": 300} | changes
    other = make_target(tmp_path / "other.gguf", "qwen3", **shape)
    reasons = dflash_convert.check_pair(other, draft)
    assert any(expected in r for r in reasons), reasons


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dflash.target_layers": None}, "has no key `dflash.target_layers`"),
        ({"dflash.target_layers": "all"}, "`dflash.target_layers` has an unusable value"),
        ({"dflash.block_count": None}, "has no key `dflash.block_count`"),
        ({"dflash.block_count": 2**31 - 1}, "llama.cpp reads at most 512"),
        ({"dflash.block_count": 2}, "has no tensor `blk.1.attn_norm.weight`"),
        ({"dflash.selector_rank": None}, "has no key `dflash.selector_rank`"),
        ({"dflash.selector_rank": 9}, "`selector_hidden.weight` is 8 x 32, expected 9 x 32"),
        ({"dflash.selector_top_k": 6}, "needs at least k * (k + 1) = 42"),
        ({"dflash.conv_group_size": 7}, "is not a multiple of conv_group_size 7"),
        ({"tokenizer.ggml.tokens": None}, "has no tokenizer"),
        ({"dflash.selector_rank": "8"}, "`dflash.selector_rank` has an unusable value"),
        ({"tokenizer.ggml.mask_token_id": None}, "names no mask token"),
        ({"tokenizer.ggml.mask_token_id": 300}, "the mask token is 300, but the target has 300"),
        ({"tokenizer.ggml.mask_token_id": "x"}, "unusable value"),
        ({"general.architecture": "dflash-draft"}, "made by a fork before the names settled"),
        ({"general.architecture": "qwen3"}, "has architecture `qwen3`, expected a draft"),
    ],
)
def test_drafts_with_a_wrong_key(
    draft: Path, small_target: Path, edited: Make, keys: dict[str, Any], expected: str
) -> None:
    reasons = dflash_convert.check_pair(small_target, edited(draft, "changed", keys=keys))
    assert any(expected in r for r in reasons), reasons


def test_drafts_with_wrong_tensors(draft: Path, small_target: Path, edited: Make) -> None:
    changed = edited(
        draft,
        "changed",
        drop=("output_norm.weight",),
        tensors={
            "fc.weight": np.zeros((32, 32), np.float32),
            "blk.0.attn_conv_base": np.zeros((2, 2, 32), np.float16),
        },
    )
    reasons = dflash_convert.check_pair(small_target, changed)
    assert "the draft has no tensor `output_norm.weight`" in reasons
    assert "the draft's `fc.weight` is 32 x 32, expected 32 x 64" in reasons
    assert "the draft's `blk.0.attn_conv_base` is F16, expected F32" in reasons


def test_a_draft_that_is_cut_off(draft: Path, small_target: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.gguf"
    raw = draft.read_bytes()
    last = max(read_gguf(draft).tensors.values(), key=lambda t: t.offset)
    part.write_bytes(raw[: last.offset + 4])
    reasons = dflash_convert.check_pair(small_target, part)
    assert reasons == [f"the draft's `{last.name}` is cut off: download it again"]
    part.write_bytes(raw[:500])
    with pytest.raises(InputError, match="damaged or truncated"):
        dflash_convert.check_pair(small_target, part)


def test_other_tokens(draft: Path, small_target: Path, edited: Make) -> None:
    tokens = read_gguf(small_target).get("tokenizer.ggml.tokens")
    one = [*tokens[:42], "<renamed>", *tokens[43:]]
    other = edited(small_target, "one", keys={"tokenizer.ggml.tokens": one})
    reasons, warnings = pair_report(other, draft)
    assert reasons == []
    assert "1 tokens differ; the first is 42" in warnings[0]
    other = edited(small_target, "all", keys={"tokenizer.ggml.tokens": tokens[::-1]})
    assert "tokens differ; the first is 0" in dflash_convert.check_pair(other, draft)[0]


def test_a_target_that_hands_nothing_over(draft: Path, small_target: Path, edited: Make) -> None:
    keys = {"general.architecture": "gemma"} | {
        f"gemma.{k}": v for k, v in (("embedding_length", 32), ("block_count", 8))
    }
    other = edited(small_target, "gemma", keys=keys)
    assert dflash_convert.check_pair(other, draft) == [
        "llama.cpp does not hand hidden states of architecture `gemma` to a draft"
    ]


def test_missing_embedding(draft: Path, small_target: Path, edited: Make) -> None:
    other = edited(small_target, "bare", drop=("token_embd.weight",))
    assert dflash_convert.check_pair(other, draft) == [
        "neither the draft nor the target has a token embedding"
    ]


def test_draft_without_sections_for_an_mrope_target(
    make: Make, target: Path, mrope_target: Path, tmp_path: Path
) -> None:
    checkpoint = make()
    old = dflash_convert.convert(checkpoint, target, tmp_path / "old.gguf").path
    new = dflash_convert.convert(checkpoint, mrope_target, tmp_path / "new.gguf").path
    reasons, warnings = pair_report(mrope_target, old)
    assert "no rope sections" in " ".join(warnings)
    assert pair_report(mrope_target, new) == (reasons, []) == ([], [])


def test_target_that_is_a_draft(draft: Path) -> None:
    with pytest.raises(InputError, match="is a draft"):
        dflash_convert.check_pair(draft, draft)


def test_every_reason_is_listed(draft: Path, target: Path, edited: Make) -> None:
    """A fault in the draft does not hide that it would not fit either."""
    keys = {"dflash.block_count": None, "tokenizer.ggml.mask_token_id": 4000}
    changed = edited(draft, "changed", keys=keys)
    reasons = " ".join(dflash_convert.check_pair(target, changed))
    for expected in (
        "has no key `dflash.block_count`",
        "the mask token is 4000, but the target has 300 tokens",
        "the draft's hidden size is 32, the target's 288",
    ):
        assert expected in reasons


def test_tensors_that_nothing_reads(draft: Path, small_target: Path, edited: Make) -> None:
    more = {f"blk.0.{n}": np.zeros(3, np.float32) for n in ("gate.weight", "attn_q.scale")}
    changed = edited(draft, "changed", tensors=more)
    assert dflash_convert.check_pair(small_target, changed) == [
        "the draft has a tensor `blk.0.gate.weight` that llama.cpp does not read"
    ]


def test_a_selector_without_its_tensors(draft: Path, small_target: Path, edited: Make) -> None:
    """The keys tell the generation, too."""
    drop = tuple(t for t in read_gguf(draft).tensors if t.startswith("selector_"))
    reasons = dflash_convert.check_pair(small_target, edited(draft, "changed", drop=drop))
    assert sorted(reasons) == sorted(f"the draft has no tensor `{name}`" for name in drop)
    assert len(drop) == 3


def test_dspark_is_named(draft: Path, small_target: Path, edited: Make) -> None:
    changed = edited(draft, "dspark", tensors={"markov_w1.weight": np.zeros((3, 3), np.float32)})
    (reason,) = dflash_convert.check_pair(small_target, changed)
    assert "is a DSpark draft, expected DFlash or DFlash 2" in reason
