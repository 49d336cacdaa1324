"""Small DFlash and DFlash 2 checkpoints with random weights, in the layout of the published ones.

`make_draft_checkpoint` writes a Hugging Face directory (config.json, safetensors); the tests of
the converter change one thing at a time in it, the tests of the runtime compare it with the
reference implementation. Everything follows from the seed; nothing is downloaded.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_DTYPES = {"f32": ("F32", "float32"), "f16": ("F16", "float16"), "bf16": ("BF16", "bfloat16")}


def to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """Round float32 `values` to bfloat16, to nearest even; returns the bits as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    """Widen bfloat16 bits (uint16) to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def default_target_layer_ids(n_target_layers: int, n_layers: int) -> list[int]:
    """Spread ids evenly from layer 1 to layer n - 3; the middle for a single one."""
    if n_layers == 1:
        return [n_target_layers // 2]
    span = n_target_layers - 4
    return [round(1 + i * span / (n_layers - 1)) for i in range(n_layers)]


def draft_config(
    *,
    version: int = 2,
    hidden: int = 288,
    layers: int = 5,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    ffn: int = 416,
    vocab: int = 300,
    block: int = 8,
    taps: int = 2,
    group: int = 16,
    rank: int = 32,
    top_k: int = 16,
    n_target_layers: int = 8,
    target_layer_ids: Sequence[int] | None = (1, 2, 3, 4, 5),
    sliding_window: int | None = 64,
    layer_types: Sequence[str] | None = None,
    is_causal: bool | None = False,
    softcap: float | None = None,
    output_multiplier: float | None = None,
    embedding_scale: float | None = None,
    rope_theta: float = 1e7,
    rms_norm_eps: float = 1e-6,
    max_positions: int = 4096,
    mask_token_id: int | None = 298,
    dtype: str = "bf16",
    nested: bool = True,
) -> dict[str, Any]:
    """Return a config.json as a dict.

    Args:
        version: 1 (DFlashDraftModel) or 2 (DFlash2DraftModel); 1 leaves out the additions of 2.
        hidden, layers, heads, kv_heads, head_dim, ffn, vocab: Sizes of the draft.
        block, taps, group, rank, top_k: `block_size`, `conv_kernel_size`, `conv_group_size`,
            `selector_rank`, `selector_top_k`. The base's loader wants hidden >= k * (k + 1).
        n_target_layers: Depth of the target.
        target_layer_ids: Target layers whose outputs are fused; None leaves the key out.
        sliding_window: Window of the sliding layers; None for none.
        layer_types: Per layer; None gives `sliding_attention` for all layers if there is a
            window and `full_attention` otherwise.
        is_causal: Causality inside the block; None leaves the key out.
        softcap, output_multiplier, embedding_scale: Optional keys; None leaves them out.
        mask_token_id: None leaves it out.
        dtype: `f32`, `f16` or `bf16`: type of the weights, named in the config.
        nested: Put the draft's own keys in `dflash_config` (True) or at top level.
    """
    if layer_types is None:
        layer_types = ["full_attention" if sliding_window is None else "sliding_attention"] * layers
    own: dict[str, Any] = {"block_size": block}
    if version == 2:
        own |= {
            "conv_kernel_size": taps,
            "conv_group_size": group,
            "selector_rank": rank,
            "selector_top_k": top_k,
        }
    optional = {
        "mask_token_id": mask_token_id,
        "target_layer_ids": None if target_layer_ids is None else list(target_layer_ids),
        "final_logit_softcapping": softcap,
        "output_multiplier": output_multiplier,
        "input_embedding_scale": embedding_scale,
    }
    own |= {k: v for k, v in optional.items() if v is not None}
    config: dict[str, Any] = {
        "architectures": ["DFlash2DraftModel" if version == 2 else "DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": _DTYPES[dtype][1],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "hidden_act": "silu",
        "vocab_size": vocab,
        "rms_norm_eps": rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": max_positions,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "num_target_layers": n_target_layers,
        "layer_types": list(layer_types),
        "use_sliding_window": sliding_window is not None,
        "sliding_window": sliding_window,
        "max_window_layers": layers,
    }
    if is_causal is not None:
        config["is_causal"] = is_causal
    return config | ({"dflash_config": own} if nested else own)


def draft_tensors(
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    target_hidden: int | None = None,
    codebook_suffix: bool = False,
    name_prefix: str = "",
    own_embedding: bool = False,
    own_head: bool = False,
) -> dict[str, np.ndarray]:
    """Return every tensor of the checkpoint as float32, named as in the published files.

    The scales are those of a trained network (matrices about 1 / sqrt(fan in), norms about 1,
    the current tap of a convolution about 1), so that activations neither vanish nor explode.

    Args:
        config: From `draft_config`.
        seed: Seed of the weights.
        target_hidden: Width of the target's features; None for the draft's own width.
        codebook_suffix: Name the codebooks with `.weight` at the end.
        name_prefix: `model.` or nothing.
        own_embedding, own_head: Add `embed_tokens.weight` / `lm_head.weight`.
    """
    own = {**config, **config.get("dflash_config", {})}
    rng = np.random.default_rng(seed)
    hidden, head_dim, ffn, vocab = (
        own[k] for k in ("hidden_size", "head_dim", "intermediate_size", "vocab_size")
    )
    q_width = own["num_attention_heads"] * head_dim
    kv_width = own["num_key_value_heads"] * head_dim
    ids = own.get("target_layer_ids") or default_target_layer_ids(
        own["num_target_layers"], own["num_hidden_layers"]
    )
    fused = len(ids) * (target_hidden or hidden)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return rng.normal(0, scale / np.sqrt(columns), (rows, columns)).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1 + 0.1 * rng.normal(size=size)).astype(np.float32)

    out = {
        "fc.weight": matrix(hidden, fused),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    for i in range(own["num_hidden_layers"]):
        p = f"layers.{i}."
        out[p + "input_layernorm.weight"] = norm(hidden)
        out[p + "post_attention_layernorm.weight"] = norm(hidden)
        out[p + "self_attn.q_proj.weight"] = matrix(q_width, hidden)
        out[p + "self_attn.k_proj.weight"] = matrix(kv_width, hidden)
        out[p + "self_attn.v_proj.weight"] = matrix(kv_width, hidden)
        out[p + "self_attn.o_proj.weight"] = matrix(hidden, q_width)
        out[p + "self_attn.q_norm.weight"] = norm(head_dim)
        out[p + "self_attn.k_norm.weight"] = norm(head_dim)
        out[p + "mlp.gate_proj.weight"] = matrix(ffn, hidden)
        out[p + "mlp.up_proj.weight"] = matrix(ffn, hidden)
        out[p + "mlp.down_proj.weight"] = matrix(hidden, ffn)
        if "conv_kernel_size" in own:
            taps, groups = own["conv_kernel_size"], hidden // own["conv_group_size"]
            for conv in ("attention_conv", "mlp_conv"):
                kernel = 0.3 * rng.normal(size=(2, taps, hidden))
                kernel[:, 0] += 1
                out[f"{p}{conv}.base_kernel"] = kernel.astype(np.float32)
                out[f"{p}{conv}.kernel_projection.weight"] = matrix(2 * taps * groups, hidden, 0.2)
    if "selector_rank" in own:
        rank = own["selector_rank"]
        suffix = ".weight" if codebook_suffix else ""
        for book in ("predecessor", "successor"):
            values = rng.normal(size=(vocab, rank)).astype(np.float32)
            out[f"candidate_selector.{book}_codebook{suffix}"] = values
        out["candidate_selector.hidden_projection.weight"] = matrix(rank, hidden, 0.5)
    if own_embedding:
        out["embed_tokens.weight"] = rng.normal(size=(vocab, hidden)).astype(np.float32)
    if own_head:
        out["lm_head.weight"] = matrix(vocab, hidden)
    return {name_prefix + name: values for name, values in out.items()}


def write_safetensors(
    path: Path, tensors: Mapping[str, np.ndarray], dtype: str | Mapping[str, str] = "bf16"
) -> None:
    """Write a safetensors file by hand: its libraries cannot store bfloat16 without torch.

    Args:
        path: File to write.
        tensors: Values; integer arrays are stored as they are, floats as `dtype`.
        dtype: `f32`, `f16` or `bf16`, for all tensors or by name.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks, offset = [], 0
    for name, values in tensors.items():
        kind = dtype if isinstance(dtype, str) else dtype[name]
        if values.dtype.kind == "i":
            label, raw = "I64", values.astype("<i8").tobytes()
        elif kind == "bf16":
            label, raw = "BF16", to_bf16_bits(values).tobytes()
        else:
            label, raw = _DTYPES[kind][0], values.astype(_DTYPES[kind][1]).tobytes()
        header[name] = {
            "dtype": label,
            "shape": list(values.shape),
            "data_offsets": [offset, offset + len(raw)],
        }
        offset += len(raw)
        chunks.append(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))


def make_draft_checkpoint(
    dir: Path | str,
    *,
    seed: int = 0,
    dtype: str = "bf16",
    target_hidden: int | None = None,
    codebook_suffix: bool = False,
    name_prefix: str = "",
    own_embedding: bool = False,
    own_head: bool = False,
    shards: int = 1,
    shard_prefix: str = "model",
    config_overrides: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    **config: Any,
) -> Path:
    """Write a draft checkpoint and return its directory.

    Args:
        dir: Directory to create.
        seed, target_hidden, codebook_suffix, name_prefix, own_embedding, own_head: See
            `draft_tensors`.
        dtype: `f32`, `f16` or `bf16`; the stored values are rounded to it.
        shards: Number of safetensors files; more than one come with an index.
        shard_prefix: Start of the shards' names.
        config_overrides: Top-level config keys to set, after everything else; a value of None
            removes the key.
        tensors: Values that replace or add to the random ones, by full name.
        config: See `draft_config`: hidden, layers, heads, kv_heads, head_dim, ffn, vocab, block,
            taps, group, rank, top_k, n_target_layers, target_layer_ids, sliding_window,
            layer_types, is_causal, softcap, output_multiplier, embedding_scale, rope_theta,
            rms_norm_eps, max_positions, mask_token_id, nested, version.
    """
    root = Path(dir)
    root.mkdir(parents=True, exist_ok=True)
    document = draft_config(dtype=dtype, **config)
    values = draft_tensors(
        document,
        seed=seed,
        target_hidden=target_hidden,
        codebook_suffix=codebook_suffix,
        name_prefix=name_prefix,
        own_embedding=own_embedding,
        own_head=own_head,
    )
    values |= dict(tensors or {})
    for key, value in (config_overrides or {}).items():
        if value is None:
            document.pop(key, None)
        else:
            document[key] = value
    (root / "config.json").write_text(json.dumps(document, indent=2) + "\n")
    if shards == 1:
        write_safetensors(root / f"{shard_prefix}.safetensors", values, dtype)
        return root
    names = list(values)
    weight_map = {}
    for i in range(shards):
        part = {name: values[name] for name in names[i::shards]}
        file = f"{shard_prefix}-{i + 1:05d}-of-{shards:05d}.safetensors"
        write_safetensors(root / file, part, dtype)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(v.nbytes for v in values.values())}}
    index["weight_map"] = weight_map
    (root / f"{shard_prefix}.safetensors.index.json").write_text(json.dumps(index))
    return root
