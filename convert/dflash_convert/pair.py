"""Does a draft fit a target? Every reason why not, before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import InputError
from .gguf_file import STRING, GgufFile, read_gguf
from .schema import (
    ARCH,
    FORK_ARCHITECTURE,
    FORK_TENSORS,
    KEYS,
    MASK_TOKEN_KEY,
    layer_name,
    rules_for,
)
from .target import TOKENS_KEY, Target, read_target
from .tensor_types import TENSOR_TYPES

_F32 = TENSOR_TYPES["f32"].type_id
_LOADER_NEEDS = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "target_layers",
)
_LOADER_NEEDS_V2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")

# Beyond this share of differing tokens two vocabularies count as different, not as edited.
_EDITED_SHARE = 0.01


@dataclass(frozen=True)
class DraftFacts:
    """What of a draft has to fit its target.

    Attributes:
        hidden, vocab: Width and number of tokens; None when the file does not tell.
        inputs: Layers whose *input* the draft reads, so layer id + 1 of the checkpoint.
        mask_token_id: None when missing.
        own_embedding, own_head: The draft brings its own.
    """

    hidden: int | None
    vocab: int | None
    inputs: tuple[int, ...]
    mask_token_id: int | None
    own_embedding: bool
    own_head: bool


def mismatches(draft: DraftFacts, target: Target) -> list[str]:
    """Return a sentence for each thing that keeps the two from working together."""
    reasons = []
    if draft.vocab not in (None, target.vocab):
        reasons.append(f"the draft has {draft.vocab} tokens, the target {target.vocab}")
    if draft.hidden not in (None, target.hidden):
        reasons.append(f"the draft's hidden size is {draft.hidden}, the target's {target.hidden}")
    if draft.mask_token_id is None:
        reasons.append("the draft names no mask token")
    elif not 0 <= draft.mask_token_id < target.vocab:
        reasons.append(
            f"the mask token is {draft.mask_token_id}, but the target has {target.vocab} tokens"
        )
    beyond = [i - 1 for i in draft.inputs if not 0 <= i <= target.layers]
    if beyond:
        reasons.append(
            f"the draft reads the output of layer {_join(beyond)}, the target has layers 0 to "
            f"{target.layers - 1}"
        )
    if target.layers in draft.inputs and not target.gives_last_output:
        reasons.append(
            f"the draft reads the output of the last layer ({target.layers - 1}), which llama.cpp "
            f"does not hand over for architecture `{target.architecture}`"
        )
    if not target.gives_layer_inputs:
        reasons.append(
            f"llama.cpp does not hand hidden states of architecture `{target.architecture}` to a "
            "draft"
        )
    if not (draft.own_embedding or target.has_embedding or target.is_split):
        reasons.append("neither the draft nor the target has a token embedding")
    return reasons


def check_pair(target: Path | str, draft: Path | str) -> list[str]:
    """Check whether a draft fits a target, reading only the headers of the two files.

    Args:
        target: GGUF of the target.
        draft: GGUF of the draft.

    Returns:
        A sentence for each reason why they do not fit; empty when they do.

    Raises:
        InputError: A file is missing, damaged, or the target is no language model.
    """
    return pair_report(target, draft)[0]


def pair_report(target: Path | str, draft: Path | str) -> tuple[list[str], list[str]]:
    """Like `check_pair`, with the warnings beside the reasons: worth knowing, not fatal."""
    target_file = read_target(target)
    file = read_gguf(draft)
    reasons = draft_problems(file)
    if file.architecture != ARCH or any(_is_fork_name(t) for t in file.tensors):
        return reasons, []  # nothing can be said about a file of another kind
    facts = _facts(file)
    if facts.mask_token_id is None and MASK_TOKEN_KEY in file.fields:
        facts = replace(facts, mask_token_id=0)  # of the wrong type, which is among the reasons
    reasons += mismatches(facts, target_file)
    warnings: list[str] = []
    if facts.vocab == target_file.vocab:
        different = _token_differences(file, target_file)
        (reasons if len(different) > _EDITED_SHARE * facts.vocab else warnings).extend(
            _describe(different)
        )
    if target_file.mrope and not file.get(f"{ARCH}.rope.dimension_sections"):
        warnings.append(
            "the target uses M-RoPE but the draft has no rope sections (an early conversion): it "
            "will fail on images; `dflash-convert upgrade` with `--target` adds them"
        )
    return reasons, warnings


def _facts(file: GgufFile) -> DraftFacts:
    """What a draft's file says, as far as it does."""
    tokens, inputs = file.fields.get(TOKENS_KEY), file.get(f"{ARCH}.target_layers")
    usable = _has_type(inputs, "i32[]")
    return DraftFacts(
        hidden=file.integer(f"{ARCH}.embedding_length"),
        vocab=tokens.count if tokens is not None and tokens.item_type == STRING else None,
        inputs=tuple(inputs) if usable else (),
        mask_token_id=file.integer(MASK_TOKEN_KEY),
        own_embedding="token_embd.weight" in file.tensors,
        own_head="output.weight" in file.tensors or "token_embd.weight" in file.tensors,
    )


def draft_problems(file: GgufFile) -> list[str]:
    """Return what the loader would refuse or abort on in the draft alone; empty for nothing."""
    arch = file.architecture
    if arch not in (ARCH, FORK_ARCHITECTURE):
        return [f"`{file.path}` has architecture `{arch or '?'}`, expected a draft (`{ARCH}`)"]
    if arch == FORK_ARCHITECTURE or any(_is_fork_name(t) for t in file.tensors):
        return [
            f"`{file.path}` was made by a fork before the names settled (architecture `{arch}`): "
            f"run `dflash-convert upgrade {file.path}`, or convert the checkpoint again"
        ]
    if "markov_w1.weight" in file.tensors:
        return [f"`{file.path}` is a DSpark draft, expected DFlash or DFlash 2"]
    reasons = []
    newer = "selector_hidden.weight" in file.tensors or f"{ARCH}.selector_rank" in file.fields
    version = 2 if newer else 1
    needed = _LOADER_NEEDS + (_LOADER_NEEDS_V2 if version == 2 else ())
    types = {rule.key: rule.type for rule in KEYS}
    for name in needed:
        value = file.get(f"{ARCH}.{name}")
        if value is None:
            reasons.append(f"the draft has no key `{ARCH}.{name}`")
        elif not _has_type(value, types[f"{ARCH}.{name}"]):
            reasons.append(f"the draft's key `{ARCH}.{name}` has an unusable value")
    tokens = file.fields.get(TOKENS_KEY)
    if tokens is None or tokens.item_type != STRING or not tokens.count:
        reasons.append("the draft has no tokenizer (an early conversion): convert it again")
    mask = file.get(MASK_TOKEN_KEY)
    if mask is not None and type(mask) is not int:
        reasons.append(f"the draft's key `{MASK_TOKEN_KEY}` has an unusable value")
    if reasons:
        return reasons
    return _tensor_problems(file, version, tokens.count if tokens else 0)


def _is_fork_name(name: str) -> bool:
    return name in FORK_TENSORS or bool(re.fullmatch(r"blk\.\d+\.(attn|ffn)_conv\..+", name))


def _has_type(value: Any, kind: str) -> bool:
    if kind == "i32[]":
        return isinstance(value, list) and bool(value) and all(type(v) is int for v in value)
    if kind == "u32":
        return type(value) is int and value > 0
    return isinstance(value, float)


def _tensor_problems(file: GgufFile, version: int, vocab: int) -> list[str]:
    def key(name: str) -> Any:
        return file.get(f"{ARCH}.{name}")

    hidden, layers, heads = key("embedding_length"), key("block_count"), key("attention.head_count")
    kv_heads = key("attention.head_count_kv") or heads
    head_dim = key("attention.key_length") or hidden // heads
    group, taps = key("conv_group_size") or hidden, key("conv_kernel_size") or 0
    head = file.tensors.get("output.weight")
    sizes = {
        "hidden": hidden,
        "fused": len(key("target_layers")) * hidden,
        "vocab": vocab,
        "draft_vocab": head.shape[0] if head is not None and head.shape else vocab,
        "rank": key("selector_rank"),
        "q_width": heads * head_dim,
        "kv_width": kv_heads * head_dim if type(kv_heads) is int else None,
        "head_dim": head_dim,
        "heads": heads,
        "ffn": key("feed_forward_length"),
        "sides": 2,
        "taps": taps,
        "conv_rows": 2 * taps * (hidden // group),
    }
    reasons = []
    if version == 2:
        top_k = key("selector_top_k")
        if hidden < top_k * (top_k + 1):
            reasons.append(
                f"the draft's hidden size is {hidden}, but llama.cpp needs at least k * (k + 1) = "
                f"{top_k * (top_k + 1)} for selector_top_k {top_k}"
            )
        if hidden % group:
            reasons.append(
                f"the draft's hidden size {hidden} is not a multiple of conv_group_size {group}"
            )
    if layers > 512:
        return [*reasons, f"the draft claims {layers} layers, llama.cpp reads at most 512"]
    unread = dict.fromkeys(t for t in file.tensors if not _is_read_beside(t))
    for rule, layer in rules_for(version, layers):
        name = layer_name(rule.target, layer)
        unread.pop(name, None)
        tensor = file.tensors.get(name)
        if tensor is None:
            if not rule.optional:
                reasons.append(f"the draft has no tensor `{name}`")
            continue
        expected = tuple(sizes[s] for s in rule.shape)
        if tensor.shape != expected and None not in expected:
            reasons.append(
                f"the draft's `{name}` is {_shape(tensor.shape)}, expected {_shape(expected)}"
            )
        if rule.kind in ("vector", "kernel") and tensor.type_id != _F32:
            reasons.append(f"the draft's `{name}` is {tensor.type_name}, expected F32")
    reasons += [f"the draft has a tensor `{t}` that llama.cpp does not read" for t in unread]
    reasons += [
        f"the draft's `{t}` is cut off: download it again" for t in file.truncated_tensors()
    ]
    return reasons


def _is_read_beside(name: str) -> bool:
    """Whether the loader reads a tensor that no DFlash checkpoint has: factors, scales, norms."""
    beside = (".scale", ".post_attention_norm.weight", ".post_ffw_norm.weight")
    return name.endswith((*beside, ".layer_output_scale.weight")) or name == "rope_freqs.weight"


def _token_differences(draft: GgufFile, target: Target) -> list[tuple[int, bytes, bytes]]:
    if draft.fields[TOKENS_KEY].payload == target.file.fields[TOKENS_KEY].payload:
        return []
    ours, theirs = draft.fields[TOKENS_KEY].raw, target.file.fields[TOKENS_KEY].raw
    return [(i, a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]


def _describe(different: list[tuple[int, bytes, bytes]]) -> list[str]:
    if not different:
        return []
    index, ours, theirs = different[0]
    return [
        f"{len(different)} tokens differ; the first is {index}: {_text(ours)} in the draft, "
        f"{_text(theirs)} in the target"
    ]


def _text(token: Any) -> str:
    return repr(token.decode("utf-8", "replace")) if isinstance(token, bytes) else repr(token)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _join(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def require_fit(reasons: list[str], draft: Path | str, target: Path | str) -> None:
    """Raise when there are reasons why a draft does not fit.

    Raises:
        InputError: Listing them.
    """
    if reasons:
        raise InputError(f"the draft `{draft}` does not fit `{target}`", problems=reasons)
