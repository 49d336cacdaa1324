"""What a converted draft must hold, by this project's facts and gguf's own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny_checkpoint import draft_tensors, from_bf16_bits, to_bf16_bits

import dflash_convert

GGUF_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a checkpoint tensor, from this file's own table."""
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        return f"blk.{layer}.{GGUF_NAMES[rest]}"
    return GGUF_NAMES[name]


def source_tensors(checkpoint: Path, **options: Any) -> dict[str, np.ndarray]:
    """The values of a checkpoint as stored (rounded to bfloat16)."""
    config = json.loads((checkpoint / "config.json").read_text())
    return {n: from_bf16_bits(to_bf16_bits(v)) for n, v in draft_tensors(config, **options).items()}


def gguf_tensors(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Type and float32 values (ids as they are) of every tensor, by gguf's own reader."""
    return {
        t.name: (
            t.tensor_type.name,
            t.data if t.name == "d2t" else gguf.quants.dequantize(t.data, t.tensor_type),
        )
        for t in gguf.GGUFReader(path).tensors
    }


def convert(checkpoint: Path, target: Path, **options: Any) -> Path:
    out = checkpoint.parent / f"{checkpoint.name}.gguf"
    return dflash_convert.convert(checkpoint, target, out, **options).path
