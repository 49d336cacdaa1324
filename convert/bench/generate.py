"""A checkpoint of any size with the shapes of Qwen3.8-27B-DFlash2, and a target to convert it for.

    python convert/bench/generate.py FOLDER [--scale N]

Everything follows from the seed and is written in pieces; nothing is downloaded. The target is
generated twice: as a GGUF (a header and a sparse embedding) and as a Hugging Face directory
(config and tokenizer, which is all that a converter of drafts reads).
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYERS, TARGET_LAYERS, TARGET_IDS = 5, 64, (1, 16, 31, 46, 61)
HEAD_DIM, GROUP, TAPS, RANK, TOP_K, BLOCK = 128, 16, 2, 256, 16, 8
# Random values that all tensors are cut from: enough that no cache holds them.
_POOL = 1 << 25


@dataclass(frozen=True)
class Shape:
    """Sizes of the draft; `scale` 1 is the published one, 2 halves every width and so on."""

    scale: int = 1

    @property
    def hidden(self) -> int:
        """Width of draft and target."""
        return 5120 // self.scale

    @property
    def ffn(self) -> int:
        """Width of the MLP."""
        return 17408 // self.scale

    @property
    def heads(self) -> int:
        """Attention heads; there are a quarter as many for keys and values."""
        return 32 // self.scale

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return 248320 // self.scale

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape (outermost dimension first) of every tensor."""
        hidden, ffn, vocab = self.hidden, self.ffn, self.vocab
        q_width, kv_width = self.heads * HEAD_DIM, self.heads // 4 * HEAD_DIM
        yield "fc.weight", (hidden, len(TARGET_IDS) * hidden)
        yield "hidden_norm.weight", (hidden,)
        yield "norm.weight", (hidden,)
        for layer in range(LAYERS):
            p = f"layers.{layer}."
            yield p + "input_layernorm.weight", (hidden,)
            yield p + "post_attention_layernorm.weight", (hidden,)
            yield p + "self_attn.q_proj.weight", (q_width, hidden)
            yield p + "self_attn.k_proj.weight", (kv_width, hidden)
            yield p + "self_attn.v_proj.weight", (kv_width, hidden)
            yield p + "self_attn.o_proj.weight", (hidden, q_width)
            yield p + "self_attn.q_norm.weight", (HEAD_DIM,)
            yield p + "self_attn.k_norm.weight", (HEAD_DIM,)
            yield p + "mlp.gate_proj.weight", (ffn, hidden)
            yield p + "mlp.up_proj.weight", (ffn, hidden)
            yield p + "mlp.down_proj.weight", (hidden, ffn)
            for conv in ("attention_conv", "mlp_conv"):
                yield f"{p}{conv}.base_kernel", (2, TAPS, hidden)
                rows = 2 * TAPS * (hidden // GROUP)
                yield f"{p}{conv}.kernel_projection.weight", (rows, hidden)
        for book in ("predecessor", "successor"):
            yield f"candidate_selector.{book}_codebook", (vocab, RANK)
        yield "candidate_selector.hidden_projection.weight", (RANK, hidden)


def make_checkpoint(directory: Path, shape: Shape) -> Path:
    """Write config.json and model.safetensors (bfloat16); returns the directory."""
    directory.mkdir(parents=True)
    config = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads // 4,
        "head_dim": HEAD_DIM,
        "intermediate_size": shape.ffn,
        "hidden_act": "silu",
        "vocab_size": shape.vocab,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
        "num_target_layers": TARGET_LAYERS,
        "layer_types": ["sliding_attention"] * LAYERS,
        "use_sliding_window": True,
        "sliding_window": 2048,
        "is_causal": False,
        "dflash_config": {
            "target_layer_ids": list(TARGET_IDS),
            "mask_token_id": shape.vocab - 250,
            "block_size": BLOCK,
            "conv_kernel_size": TAPS,
            "conv_group_size": GROUP,
            "selector_rank": RANK,
            "selector_top_k": TOP_K,
        },
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_safetensors(directory / "model.safetensors", dict(shape.tensors()))
    return directory


def _write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    # Truncated to bfloat16: the spread is that of a trained matrix of this width.
    pool = (rng.standard_normal(_POOL, np.float32) * np.float32(0.02)).view(np.uint32) >> 16
    pool = pool.astype(np.uint16)
    ones = np.full(max(s[-1] for s in shapes.values()), 0x3F80, np.uint16)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            left = prod(shape)
            if len(shape) == 1:
                file.write(ones[:left].data)
                continue
            while left:
                start = int(rng.integers(len(pool)))
                part = pool[start : start + left]
                file.write(part.data)
                left -= len(part)


def make_gguf_target(path: Path, shape: Shape) -> Path:
    """Write a GGUF with a tokenizer and an embedding that takes no space on the disk."""
    tokens, merges = _vocabulary(shape.vocab)
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_name("bench-target")
    writer.add_block_count(TARGET_LAYERS)
    writer.add_embedding_length(shape.hidden)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(merges)
    size = 2 * shape.vocab * shape.hidden
    embedding = (shape.vocab, shape.hidden)
    writer.add_tensor_info("token_embd.weight", embedding, np.dtype(np.float16), size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + size + 64)
    return path


def make_hf_target(directory: Path, shape: Shape) -> Path:
    """Write the config and the tokenizer of the same target as a Hugging Face directory."""
    tokens, merges = _vocabulary(shape.vocab)
    directory.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "num_hidden_layers": TARGET_LAYERS,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads // 4,
        "head_dim": HEAD_DIM,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 262144}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def _vocabulary(size: int) -> tuple[list[str], list[str]]:
    """A byte-level BPE of `size` tokens: all bytes, then words of two, three and four letters."""
    # GPT-2 spells a byte by its own character if that is printable, else by one above U+00FF.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    letters = string.ascii_lowercase
    pairs = [a + b for a in letters for b in letters]
    merges = [f"{p[0]} {p[1]}" for p in pairs]
    merges += [f"{p} {c}" for p in pairs for c in letters]
    four = (f"{a} {b}" for a in pairs for b in pairs)
    merges += itertools.islice(four, max(0, size - len(tokens) - len(merges)))
    merges = merges[: size - len(tokens)]
    return tokens + [m.replace(" ", "") for m in merges], merges


def main() -> None:
    """Write FOLDER/draft, FOLDER/target (Hugging Face) and FOLDER/target.gguf."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", type=int, choices=(1, 2, 4), default=1, help="divide all widths")
    options = parser.parse_args()
    shape = Shape(options.scale)
    make_checkpoint(options.folder / "draft", shape)
    make_hf_target(options.folder / "target", shape)
    make_gguf_target(options.folder / "target.gguf", shape)


if __name__ == "__main__":
    main()
