"""config.json of a draft as a checked, frozen `DraftConfig`.

Missing keys take the defaults of the reference implementation (package `dflash`, on top of
transformers' Qwen3Config); sizes, the mask token and the base of the rotary embedding have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .attention import read_causal, read_window
from .errors import InputError
from .keys import KeyReader
from .rope import Rope, read_rope
from .schema import ARCHITECTURES, BASE_CONVERTER_ARCHITECTURES

_MAX_SIZE = 2**31 - 1
_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS of the base

# Keys without influence on the weights' meaning.
_WITHOUT_EFFECT = frozenset(
    {"architectures", "model_type", "transformers_version", "auto_map", "_name_or_path", "dtype"}
    | {"torch_dtype", "initializer_range", "use_cache", "attention_dropout", "pad_token_id"}
    | {"bos_token_id", "eos_token_id", "id2label", "label2id", "return_dict", "problem_type"}
    | {"output_attentions", "output_hidden_states", "is_encoder_decoder", "runtime_block_size"}
    | {"chunk_size_feed_forward", "pretraining_tp", "tie_word_embeddings", "is_decoder"}
)

_ACTIVATIONS = {"silu": None, "swish": None, "gelu_pytorch_tanh": "gelu_pytorch_tanh"}


@dataclass(frozen=True)
class DraftConfig:
    """What a checkpoint's config says, in the words of the reference.

    Attributes:
        version: Generation of DFlash, 1 or 2.
        hidden, layers, heads, kv_heads, head_dim, ffn, vocab: Sizes.
        draft_vocab: Rows of the draft's own head; `vocab` unless the vocabulary is reduced.
        taps, group, rank, top_k: Convolution and selector; None for version 1.
        target_layer_ids: Target layers whose outputs are fused.
        num_target_layers: Depth of the target the draft was trained for; None when not stated.
        window: Sliding window; None when no layer has one.
        sliding: For each layer, whether it has the window.
        causal: Whether a position of the block sees only itself and earlier ones.
        activation: Value for the GGUF, None for the usual SiLU.
        interleaved: Heads are stored with interleaved rotary pairs.
        tied: The draft's own embedding is also its head.
        warnings: Sentences worth showing.
        ignored: Keys of the config that were not used.
    """

    version: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    draft_vocab: int
    max_positions: int
    rms_norm_eps: float
    activation: str | None
    tied: bool
    interleaved: bool
    block_size: int
    taps: int | None
    group: int | None
    rank: int | None
    top_k: int | None
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    mask_token_id: int
    window: int | None
    sliding: tuple[bool, ...]
    causal: bool
    value_scale: float | None
    embedding_scale: float | None
    output_multiplier: float | None
    softcap: float | None
    rope: Rope
    warnings: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def fused(self) -> int:
        """Width of the concatenated target features."""
        return len(self.target_layer_ids) * self.hidden

    @property
    def q_width(self) -> int:
        """Width of the queries."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def sides(self) -> int:
        """Convolutions per sublayer: one before it, one after it."""
        return 2

    @property
    def conv_rows(self) -> int:
        """Rows of a kernel projection: sides x taps x groups."""
        return self.sides * (self.taps or 0) * (self.hidden // (self.group or self.hidden))


def default_target_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """Spread the ids as the reference does: evenly from layer 1 to layer n - 3."""
    if draft_layers == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + i * span / (draft_layers - 1)) for i in range(draft_layers))


def read_config(
    raw: Mapping[str, Any],
    *,
    target_layers: int,
    mrope: bool = False,
    causal: bool | None = None,
    ignore_keys: frozenset[str] = frozenset(),
    name: str = "config.json",
) -> DraftConfig:
    """Check a config and turn it into a `DraftConfig`.

    Args:
        raw: The JSON object.
        target_layers: Depth of the target, for a config without `target_layer_ids`.
        mrope: The target uses M-RoPE.
        causal: Causality to write whatever the config says; None follows the config.
        ignore_keys: Unknown keys of `dflash_config` to accept.
        name: File name for messages.

    Raises:
        InputError: Listing every problem at once.
    """
    version = _version(raw, name)
    keys = KeyReader(raw)
    warnings: list[str] = []

    def size(
        key: str, read: Any = keys.top, low: int = 1, high: int = _MAX_SIZE, **more: Any
    ) -> int:
        return read(key, int, low=low, high=high, **more) or low

    hidden = size("hidden_size")
    layers = size("num_hidden_layers", high=_MAX_LAYERS)
    heads = size("num_attention_heads")
    kv_heads = size("num_key_value_heads", default=heads)
    head_dim = size("head_dim", default=128, low=2)
    vocab = size("vocab_size")
    max_positions = size("max_position_embeddings", default=32768)
    if not keys.problems and heads % kv_heads:
        keys.problems.append(
            f"num_attention_heads {heads} is not a multiple of {kv_heads} kv heads"
        )
    if not keys.problems and head_dim % 2:
        keys.problems.append(f"head_dim is {head_dim}, expected an even number")
    block_size = size("block_size", keys.own, low=2, high=64, default=16)
    window, sliding, layer_types = read_window(keys, layers, warnings)
    rope = read_rope(
        keys, head_dim=head_dim, max_positions=max_positions, mrope=mrope, warnings=warnings
    )
    depth = keys.top("num_target_layers", int, None, low=1, high=_MAX_SIZE)
    fields = {
        "version": version,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": size("intermediate_size"),
        "vocab": vocab,
        "draft_vocab": size("draft_vocab_size", default=vocab, high=vocab),
        "max_positions": max_positions,
        "rms_norm_eps": keys.top("rms_norm_eps", float, 1e-6, above=0),
        "activation": _activation(keys),
        "tied": keys.top("tie_word_embeddings", bool, False),
        "interleaved": not keys.top("rope_is_neox_style", bool, True),
        "block_size": block_size,
        **_additions(keys, version, hidden, vocab, block_size),
        "target_layer_ids": _target_layer_ids(keys, layers, depth or target_layers, warnings),
        "num_target_layers": depth,
        "mask_token_id": _mask_token_id(keys, vocab),
        "window": window,
        "sliding": sliding,
        "causal": read_causal(keys, layer_types, causal, warnings),
        "value_scale": keys.own("attention_value_scale", float, None),
        "embedding_scale": keys.own("input_embedding_scale", float, None, above=0),
        "output_multiplier": keys.own("output_multiplier", float, None, above=0),
        "softcap": keys.own("final_logit_softcapping", float, None) or None,
        "rope": rope,
    }
    if fields["softcap"] is not None and fields["softcap"] < 0:
        fields["softcap"] = None  # the reference applies it only when positive
    _refuse(keys)
    top, nested = keys.unknown(_WITHOUT_EFFECT)
    refused = [k for k in nested if k.removeprefix("dflash_config.") not in ignore_keys]
    keys.problems += [f"`{k}` is not known; it may change what the weights mean" for k in refused]
    if keys.problems:
        hint = None
        if refused:
            flags = " ".join(f"--ignore-key {k.removeprefix('dflash_config.')}" for k in refused)
            hint = f"if the unknown keys do not matter, add `{flags}`"
        raise InputError(f"`{name}` cannot be converted", hint=hint, problems=keys.problems)
    ignored = (*top, *(k for k in nested if k not in refused))
    return DraftConfig(**fields, warnings=tuple(warnings), ignored=ignored)


def _version(raw: Mapping[str, Any], name: str) -> int:
    names = raw.get("architectures")
    known = " or ".join(ARCHITECTURES)
    if "speculators_model_type" in raw:
        raise InputError(
            f"`{name}` is an export of the speculators library, expected {known}",
            hint="export the draft in its original format, or use llama.cpp's "
            "convert_hf_to_gguf.py if it knows the type",
        )
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise InputError(f"`{name}` names no architecture, expected `architectures` with {known}")
    for candidate in names:
        if candidate in ARCHITECTURES:
            return ARCHITECTURES[candidate]
    found = names[0]
    if found in BASE_CONVERTER_ARCHITECTURES:
        hint = "llama.cpp's convert_hf_to_gguf.py handles this one"
    elif found.endswith(("ForCausalLM", "ForConditionalGeneration")):
        hint = (
            "this looks like a target, not a draft; llama.cpp's convert_hf_to_gguf.py converts "
            "targets"
        )
    else:
        hint = None
    raise InputError(f"`{name}` has architecture `{found}`, expected {known}", hint=hint)


def _additions(
    keys: KeyReader, version: int, hidden: int, vocab: int, block_size: int
) -> dict[str, int | None]:
    names = {
        "taps": "conv_kernel_size",
        "group": "conv_group_size",
        "rank": "selector_rank",
        "top_k": "selector_top_k",
    }
    if version == 1:
        newer = [k for k in names.values() if keys.own(k, int, None) is not None]
        if newer:
            keys.problems.append(
                f"`architectures` says DFlashDraftModel, but {', '.join(newer)} belong to "
                "DFlash2DraftModel"
            )
        return dict.fromkeys(names)
    values = {field: keys.own(key, int, low=1, high=_MAX_SIZE) for field, key in names.items()}
    if keys.problems:  # sizes may be placeholders then: no conclusions from them
        return values
    taps, group, top_k = values["taps"], values["group"], values["top_k"]
    if taps > block_size:
        keys.problems.append(
            f"conv_kernel_size is {taps}, expected at most block_size {block_size}"
        )
    if hidden % group:
        keys.problems.append(f"hidden_size {hidden} is not a multiple of conv_group_size {group}")
    if top_k > vocab:
        keys.problems.append(f"selector_top_k is {top_k}, expected at most vocab_size {vocab}")
    lattice = top_k * (top_k + 1)
    if hidden < lattice:
        # The base's loader packs the candidates of a row into a row as wide as the hidden size.
        keys.problems.append(
            f"hidden_size is {hidden}, but llama.cpp needs at least k * (k + 1) = {lattice} for "
            f"selector_top_k {top_k}"
        )
    rows = keys.own("selector_vocab_size", int, vocab, low=1)
    if rows not in (None, vocab):
        keys.problems.append(
            f"selector_vocab_size is {rows}, but the loader needs vocab_size {vocab}"
        )
    return values


def _activation(keys: KeyReader) -> str | None:
    name = keys.top("hidden_act", str, "silu")
    if name not in _ACTIVATIONS:
        keys.problems.append(f"`hidden_act` is `{name}`, expected {' or '.join(_ACTIVATIONS)}")
        return None
    return _ACTIVATIONS[name]


def _target_layer_ids(
    keys: KeyReader, layers: int, depth: int, warnings: list[str]
) -> tuple[int, ...]:
    ids = keys.own("target_layer_ids", list, None)
    if ids is None:
        spread = default_target_layer_ids(depth, layers)
        warnings.append(f"no target_layer_ids: using the reference's default {list(spread)}")
        return spread
    checked = keys.list_of(
        "target_layer_ids",
        ids,
        lambda i: type(i) is int and 0 <= i < _MAX_SIZE,
        "layer numbers from 0 upwards",
    )
    return checked or (0,)


def _mask_token_id(keys: KeyReader, vocab: int) -> int:
    token = keys.own("mask_token_id", int)
    if token is not None and not 0 <= token < vocab:
        keys.problems.append(f"mask_token_id is {token}, expected 0 to {vocab - 1} (vocab_size)")
    return token or 0


def _refuse(keys: KeyReader) -> None:
    """List what the loader has no place for."""
    if keys.top("attention_bias", bool, False):
        keys.problems.append("`attention_bias` is true, but the loader reads no biases")
    if keys.top("mlp_bias", bool, False):
        keys.problems.append("`mlp_bias` is true, but the loader reads no biases")
    if keys.top("quantization_config", dict, None):
        keys.problems.append(
            "`quantization_config`: the checkpoint is quantised, expected the original weights"
        )
