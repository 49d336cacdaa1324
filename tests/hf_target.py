"""A tiny Qwen3 target as a Hugging Face directory, with a tokenizer made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from hf_tokenizers import QWEN2
from tiny_checkpoint import write_safetensors
from tiny_vocab import make_vocab

CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def make_hf_target(
    directory: Path,
    *,
    hidden: int = 288,
    layers: int = 8,
    vocab: int = 300,
    seed: int = 0,
    rope: dict[str, Any] | None = None,
) -> Path:
    """Write config.json, tokenizer files and weights of a Qwen3 model; returns the directory.

    Args:
        rope: Further entries of `rope_parameters`, such as `mrope_section`.
    """
    directory.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 320,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default", **(rope or {})},
    }
    (directory / "config.json").write_text(json.dumps(config))
    _write_tokenizer(directory, vocab)
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.normal(size=(rows, columns)) / np.sqrt(columns)).astype(np.float32)

    ones = np.ones
    tensors = {
        "model.embed_tokens.weight": matrix(vocab, hidden),
        "lm_head.weight": matrix(vocab, hidden),
        "model.norm.weight": ones(hidden, np.float32),
    }
    for i in range(layers):
        p = f"model.layers.{i}."
        tensors |= {
            p + "input_layernorm.weight": ones(hidden, np.float32),
            p + "post_attention_layernorm.weight": ones(hidden, np.float32),
            p + "self_attn.q_proj.weight": matrix(256, hidden),
            p + "self_attn.k_proj.weight": matrix(128, hidden),
            p + "self_attn.v_proj.weight": matrix(128, hidden),
            p + "self_attn.o_proj.weight": matrix(hidden, 256),
            p + "self_attn.q_norm.weight": ones(64, np.float32),
            p + "self_attn.k_norm.weight": ones(64, np.float32),
            p + "mlp.gate_proj.weight": matrix(320, hidden),
            p + "mlp.up_proj.weight": matrix(320, hidden),
            p + "mlp.down_proj.weight": matrix(hidden, 320),
        }
    write_safetensors(directory / "model.safetensors", tensors, "f16")
    return directory


def _write_tokenizer(directory: Path, size: int) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = make_vocab(size)
    merges = [tuple(pair.split(" ")) for pair in vocab.merges]
    plain = vocab.tokens[: vocab.bos]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(plain)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(QWEN2), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(vocab.tokens[vocab.bos :]))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=vocab.tokens[vocab.bos],
        eos_token=vocab.tokens[vocab.eos],
        pad_token=vocab.tokens[vocab.eos],
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(str(directory))
