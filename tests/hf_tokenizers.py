"""Targets of every known family as Hugging Face directories without weights.

The files have the form of the published ones (splitting rules, post-processors, roles, flags of
added tokens); the vocabularies are tiny, or those that come with llama.cpp's sources.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_vocab import LETTERS, make_vocab

_S = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN2 = _S + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = (
    _S + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _S + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _S + "?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}


def template(first: str, number: int = 0) -> dict[str, Any]:
    """A post-processor that puts `first`, token `number`, in front of a text, as Llama 3's."""
    special = {"SpecialToken": {"id": first, "type_id": 0}}
    a, b = ({"Sequence": {"id": i, "type_id": 0}} for i in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [special, a],
        "pair": [special, a, special, b],
        "special_tokens": {first: {"id": first, "ids": [number], "tokens": [first]}},
    }


def ended(last: str) -> dict[str, Any]:
    """A post-processor that puts `last` behind a text."""
    special = {"SpecialToken": {"id": last, "type_id": 0}}
    a, b = ({"Sequence": {"id": i, "type_id": 0}} for i in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [a, special],
        "pair": [a, special, b, special],
        "special_tokens": {last: {"id": last, "ids": [0], "tokens": [last]}},
    }


@dataclass(frozen=True)
class Shape:
    """One kind of tokenizer directory.

    Attributes:
        architecture: Of config.json.
        pre: Value that `tokenizer.ggml.pre` must get, None when the key does not exist.
        rule: Splitting rule.
        special, plain: Added tokens, with and without the flag `special`.
        settings: Of tokenizer_config.json; None writes no file.
        model: Further entries of the BPE model.
        processor: Post-processor.
        normalizer: For byte-level ones.
        config: Further keys of config.json.
        files: Further files.
        pad: Rows of the embedding beyond the last token.
        nested: Put the sizes into `text_config`.
    """

    architecture: str
    pre: str | None
    rule: str = QWEN2
    special: Sequence[str] = ()
    plain: Sequence[str] = ()
    settings: Mapping[str, Any] | None = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] | None = None
    normalizer: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    pad: int = 5
    nested: bool = False


_QWEN = {
    "special": ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"),
    "plain": ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<think>"),
    "settings": {
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|vision_start|>"],
        "chat_template": "{{ messages }}",
        "clean_up_tokenization_spaces": False,
    },
    "processor": _BYTE_LEVEL | {"use_regex": False},
    "normalizer": {"type": "NFC"},
    "config": {"bos_token_id": 256, "eos_token_id": 258},
}
_LLAMA = {
    "special": ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|reserved_special_0|>"),
    "settings": {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "chat_template": "{{ bos_token }}",
        "clean_up_tokenization_spaces": True,
    },
    "model": {"ignore_merges": True, "byte_fallback": False},
    "processor": {
        "type": "Sequence",
        "processors": [_BYTE_LEVEL | {"use_regex": True}, template("<|begin_of_text|>")],
    },
    "config": {"bos_token_id": 256, "eos_token_id": [257, 258]},
}
_GLM = {
    "special": ("<|endoftext|>", "[MASK]", "[gMASK]", "<sop>", "<|user|>", "<|observation|>"),
    "plain": ("<think>", "</think>"),
    "settings": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "config": {"eos_token_id": [256, 260], "pad_token_id": 256},
    "files": {"chat_template.jinja": "[gMASK]<sop>{{ messages }}"},
}

SHAPES = {
    "qwen3": Shape("Qwen3ForCausalLM", "qwen2", **_QWEN),
    "qwen3-moe": Shape("Qwen3MoeForCausalLM", "qwen2", **_QWEN),
    "qwen3-bare": Shape(
        "Qwen3ForCausalLM", "qwen2", special=("<|endoftext|>",), settings=None, pad=0
    ),
    "qwen3-templates": Shape(
        "Qwen3ForCausalLM",
        "qwen2",
        special=("<|endoftext|>",),
        settings={
            "chat_template": [
                {"name": "default", "template": "a"},
                {"name": "tool use", "template": "b"},
            ]
        },
    ),
    "qwen3-template-files": Shape(
        "Qwen3ForCausalLM",
        "qwen2",
        special=("<|endoftext|>",),
        settings={
            "eos_token": {"__type": "AddedToken", "content": "<|endoftext|>"},
            "add_eos_token": True,
        },
        files={"chat_template.jinja": "x", "additional_chat_templates/rag.jinja": "y"},
    ),
    "qwen3-late-roles": Shape(  # roles that only the settings name, one of them a new token
        "Qwen3ForCausalLM",
        "qwen2",
        special=("<|endoftext|>",),
        plain=("<audio>", "<image>"),
        settings={
            "eos_token": "<|endoftext|>",
            "mask_token": "<new mask>",
            "image_token": "<image>",
            "cls_token": "<|endoftext|>",
        },
    ),
    "qwen3-odd-tokens": Shape(
        "Qwen3ForCausalLM",
        "qwen2",
        special=("<|endoftext|>", "<\uff5cend\uff5c>"),
        plain=("a\u2581b", "<pad>", "caf\u00e9", "<unused7>", "\u0120x"),
        settings={"eos_token": "<|endoftext|>"},
    ),
    "qwen3-end": Shape(
        "Qwen3ForCausalLM",
        "qwen2",
        special=("<|endoftext|>", "<|im_end|>"),
        settings={"eos_token": "<|im_end|>"},
        processor=ended("<|endoftext|>"),
    ),
    "qwen35": Shape("Qwen3_5ForConditionalGeneration", "qwen35", QWEN35, nested=True, **_QWEN),
    "qwen35-moe": Shape("Qwen3_5MoeForConditionalGeneration", "qwen35", QWEN35, **_QWEN),
    "llama3": Shape("LlamaForCausalLM", "llama-bpe", LLAMA3, **_LLAMA),
    "gpt-oss": Shape(
        "GptOssForCausalLM",
        "gpt-4o",
        GPT4O,
        special=("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>", "<|call|>"),
        settings={
            "bos_token": "<|startoftext|>",
            "eos_token": "<|return|>",
            "pad_token": "<|endoftext|>",
        },
        config={"eos_token_id": 258, "pad_token_id": 257},
        files={"chat_template.jinja": "harmony"},
    ),
    "glm4": Shape("Glm4ForCausalLM", "glm4", LLAMA3, **_GLM),
    "glm4-moe": Shape("Glm4MoeForCausalLM", "glm4", LLAMA3, **_GLM),
    "minimax-m2": Shape(
        "MiniMaxM2ForCausalLM",
        "minimax-m2",
        GPT4O,
        special=("]!p~[", "]~b]", "[e~["),
        plain=("<think>", "</think>"),
        settings={"bos_token": "]~!b[", "eos_token": "[e~[", "unk_token": "]!p~["},
    ),
    "gemma4": Shape(
        "Gemma4ForConditionalGeneration",
        None,
        special=("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|image|>"),
        plain=("<|channel>", "<channel|>", "<other>"),
        settings={
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "mask_token": "<mask>",
            "image_token": "<|image|>",
            "sot_token": "<|turn>",
            "extra_special_tokens": ["<turn|>"],
        },
        processor=template("<bos>"),
        config={"eos_token_id": [1, 106], "pad_token_id": 0},
        files={"chat_template.jinja": "gemma"},
        pad=0,
        nested=True,
    ),
}


def write_shape(directory: Path, shape: Shape, *, hidden: int = 288, layers: int = 8) -> int:
    """Write a directory of the given shape; returns the size of the vocabulary."""
    if shape.pre is None:
        plain, merges = _pieces()
    else:
        vocab = make_vocab(300)
        merges = list(vocab.merges)
        plain = {t: i for i, t in enumerate(vocab.tokens[: vocab.bos])}
    return write_tokenizer(directory, shape, plain, merges, hidden=hidden, layers=layers)


def write_tokenizer(
    directory: Path,
    shape: Shape,
    plain: Mapping[str, int],
    merges: Sequence[str],
    *,
    hidden: int = 288,
    layers: int = 8,
) -> int:
    """Write a directory with the given tokens and merges; the added tokens follow them."""
    directory.mkdir(parents=True, exist_ok=True)
    added = []
    for text in (*shape.special, *shape.plain):
        number = plain.get(text, len(plain) + sum(a["id"] >= len(plain) for a in added))
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        special = text in shape.special
        added.append({"id": number, "content": text, **flags, "special": special})
    gemma = shape.pre is None
    steps = [
        {
            "type": "Split",
            "pattern": {"Regex": shape.rule},
            "behavior": "Isolated",
            "invert": False,
        },
        _BYTE_LEVEL | {"use_regex": False},
    ]
    document = {
        "version": "1.0",
        "added_tokens": sorted(added, key=lambda a: a["id"]),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
        if gemma
        else shape.normalizer,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        }
        if gemma
        else {"type": "Sequence", "pretokenizers": steps},
        "post_processor": shape.processor,
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}],
        }
        if gemma
        else _BYTE_LEVEL | {"use_regex": False},
        "model": {
            "type": "BPE",
            "byte_fallback": gemma,
            "fuse_unk": gemma,
            "unk_token": "<unk>" if gemma else None,
            "vocab": dict(plain),
            "merges": [m.split(" ") for m in merges],
            **shape.model,
        },
    }
    size = max(len(plain), *(a["id"] + 1 for a in added)) + shape.pad
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": size}
    config = {"architectures": [shape.architecture], "model_type": "qwen3", **shape.config}
    config |= {"text_config": sizes} if shape.nested else sizes
    files = {
        "config.json": json.dumps(config),
        "tokenizer.json": json.dumps(document, ensure_ascii=False),
        **shape.files,
    }
    if shape.settings is not None:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **shape.settings}
        files["tokenizer_config.json"] = json.dumps(settings)
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return size


def _pieces() -> tuple[dict[str, int], list[str]]:
    """SentencePiece-like tokens with byte fall-back, special ones first, as in Gemma."""
    first = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|image|>"]
    first += ["<|channel>", "<channel|>"]
    singles = ["\u2581", "\n", *(chr(c) for c in range(0x21, 0x7F))]
    pairs = [f"\u2581 {c}" for c in LETTERS] + ["\n \n"]
    tokens = [*first, *(f"<0x{b:02X}>" for b in range(256)), *singles]
    tokens += [p.replace(" ", "") for p in pairs]
    return {t: i for i, t in enumerate(tokens)}, pairs


def write_tiktoken(directory: Path, *, hidden: int = 288, layers: int = 8) -> int:
    """Write a Kimi directory: ranks in tiktoken.model and no tokenizer.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokens = [bytes([b]) for b in range(256)]
    tokens += [b"th", b"he", b"the", b" t", b" the", b"\xf0\x9f", b"\xf0\x9f\x98\x80"]
    lines = [base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)]
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    size = len(tokens) + 256 + 3
    named = {"[BOS]": len(tokens), "[EOS]": len(tokens) + 1, "<|im_end|>": len(tokens) + 2}
    settings = {
        "added_tokens_decoder": {str(i): {"content": t, "special": True} for t, i in named.items()},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": "kimi",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": {
            "architectures": ["DeepseekV3ForCausalLM"],
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "vocab_size": size,
            "bos_token_id": named["[BOS]"],
            "eos_token_id": named["<|im_end|>"],
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    return size
