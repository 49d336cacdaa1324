"""Families of targets: which architectures have which tokenizer.

The base's own converter tells pre-tokenizers apart by what they make of one text, which works for
published vocabularies only; here the pre-tokenizer's own definition is compared, so a fine-tune
with added tokens is recognised and one with another splitting rule is not taken for its family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"

# The rule by which a tokenizer.json cuts a text into words.
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|{_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_GPT4O = (
    rf"{_WORD}[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?|{_WORD}[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)


@dataclass(frozen=True)
class Family:
    """Targets whose tokenizers are written the same way.

    Attributes:
        architecture: GGUF architecture.
        pre: Splitting rule -> value of `tokenizer.ggml.pre`.
        kind: `bpe` (byte-level), `gemma4` (BPE over SentencePiece pieces) or `tiktoken`.
        named: Special token -> its text, where the files leave it open.
        mrope: The model always has M-RoPE, also when its config does not say so.
    """

    architecture: str
    pre: Mapping[str, str] = field(default_factory=dict)
    kind: str = "bpe"
    named: Mapping[str, str] = field(default_factory=dict)
    mrope: bool = False


_QWEN = {_QWEN2: "qwen2", _QWEN35: "qwen35"}
_GLM = {_LLAMA3: "glm4"}
_GLM4_NAMED = dict.fromkeys(("eos", "unk", "bos"), "<|endoftext|>") | {"eot": "<|user|>"}
_GLM_NAMED = {
    "bos": "[gMASK]",
    "eot": "<|user|>",
    "unk": "<|endoftext|>",
    "eom": "<|observation|>",
}

# `architectures` of a target's config.json -> family.
FAMILIES = {
    "Qwen3ForCausalLM": Family("qwen3", _QWEN),
    "Qwen3MoeForCausalLM": Family("qwen3moe", _QWEN),
    "Qwen3NextForCausalLM": Family("qwen3next", _QWEN),
    "Qwen3_5ForCausalLM": Family("qwen35", _QWEN, mrope=True),
    "Qwen3_5ForConditionalGeneration": Family("qwen35", _QWEN, mrope=True),
    "Qwen3_5MoeForCausalLM": Family("qwen35moe", _QWEN, mrope=True),
    "Qwen3_5MoeForConditionalGeneration": Family("qwen35moe", _QWEN, mrope=True),
    "LlamaForCausalLM": Family("llama", {_LLAMA3: "llama-bpe"}),
    "Gemma4ForCausalLM": Family("gemma4", kind="gemma4"),
    "Gemma4ForConditionalGeneration": Family("gemma4", kind="gemma4"),
    "Gemma4UnifiedForConditionalGeneration": Family("gemma4", kind="gemma4"),
    "GptOssForCausalLM": Family("gpt-oss", {_GPT4O: "gpt-4o"}),
    "Glm4ForCausalLM": Family("glm4", _GLM, named=_GLM4_NAMED),
    "Glm4MoeForCausalLM": Family("glm4moe", _GLM, named=_GLM_NAMED),
    "Glm5NextForConditionalGeneration": Family("glm5-next", _GLM, named=_GLM_NAMED),
    "GlmMoeDsaForCausalLM": Family("glm-dsa", _GLM, named=_GLM_NAMED),
    "MiniMaxM2ForCausalLM": Family("minimax-m2", {_GPT4O: "minimax-m2"}),
    "DeepseekV3ForCausalLM": Family("deepseek2", kind="tiktoken"),
    "KimiK25ForConditionalGeneration": Family("deepseek2", kind="tiktoken"),
}
