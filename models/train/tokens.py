"""The target's tokenizer, rebuilt from its GGUF, and its chat form."""

from __future__ import annotations

from pathlib import Path

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CONTROL = 3  # token type of special tokens in a GGUF


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Byte-level BPE with single digits: what llama.cpp calls pre-tokenizer `smollm`."""
    reader = gguf.GGUFReader(str(path))
    fields = {
        k: reader.fields[f"tokenizer.ggml.{k}"].contents()
        for k in ("model", "pre", "tokens", "token_type", "merges")
    }
    if (fields["model"], fields["pre"]) != ("gpt2", "smollm"):
        raise SystemExit(
            f"{path}: tokenizer {fields['model']}/{fields['pre']}, expected gpt2/smollm; "
            "another target needs its own load_tokenizer"
        )
    vocab = {t: i for i, t in enumerate(fields["tokens"])}
    merges = [tuple(m.split(" ")) for m in fields["merges"]]
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, kind in zip(fields["tokens"], fields["token_type"], strict=True)
            if kind == CONTROL
        ]
    )
    return tok


def chat_ids(tok: Tokenizer, prompt: str) -> list[int]:
    """Token ids of a one-turn chat up to the point where the assistant answers."""
    text = (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    return tok.encode(text).ids
