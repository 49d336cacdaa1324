"""The tables of a conversion: checkpoint tensors, GGUF names and keys, who handles what.

Names and keys are those of the base's own converter and loader, held here as literals because the
gguf package on PyPI does not know the architecture; a test compares them with the base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import DraftConfig

ARCH = "dflash"

# Checkpoint architecture -> generation of DFlash.
ARCHITECTURES = {"DFlashDraftModel": 1, "DFlash2DraftModel": 2}

# Draft architectures that the base's own converter handles: DSpark, EAGLE-3, assistants.
BASE_CONVERTER_ARCHITECTURES = frozenset(
    {
        "Qwen3DSparkModel",
        "DSparkDraftModel",
        "DSparkSpeculator",
        "Lfm2DSparkDraftModel",
        "LingDSparkModel",
        "DeepseekV4DSparkModel",
        "Gemma4DSparkModel",
        "Eagle3DraftModel",
        "Eagle3Speculator",
        "Eagle3LlamaForCausalLM",
        "LlamaForCausalLMEagle3",
        "MuseGlimmerAssistantModel",
        "Gemma4AssistantForCausalLM",
        "Gemma4UnifiedAssistantForCausalLM",
    }
)

# GGUF architectures of drafts and side files: none of them can be a target.
DRAFT_GGUF_ARCHITECTURES = frozenset({"dflash", "dflash-draft", "eagle3", "gemma4-assistant"})
NOT_A_MODEL_ARCHITECTURES = frozenset({"clip", "wavtokenizer-dec"})

# Targets whose layer inputs the base can hand to a draft, and those of them that can also hand
# over the output of their last layer.
TAPPED_ARCHITECTURES = frozenset(
    {
        "bailingmoe3",
        "deepseek4",
        "gemma4",
        "hunyuan-dense",
        "hunyuan_vl",
        "lfm2",
        "lfm2moe",
        "llama",
        "mimo2",
        "minimax-01",
        "minimax-m2",
        "muse-glimmer",
        "nanbeige",
        "nemotron_h",
        "nemotron_h_moe",
        "gpt-oss",
        "qwen3",
        "qwen35",
        "qwen35moe",
        "qwen3moe",
        "qwen3next",
        "qwen4exp",
    }
)
LAST_LAYER_TAPPED_ARCHITECTURES = frozenset({"deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"})

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class TensorRule:
    """A tensor of a checkpoint and what becomes of it.

    Attributes:
        source: Name in the checkpoint without `model.`; `{n}` stands for the layer.
        target: Name in the GGUF.
        shape: Attributes of `DraftConfig`, outermost dimension first.
        kind: `matrix` takes the output type, `vector` and `kernel` stay F32, `ids` becomes I64.
        since: Generation of DFlash that brought it.
        optional: May be missing.
        aliases: Other spellings of `source` found in the wild.
        per_head: Rows come in heads, whose halves an interleaved rope orders differently.
    """

    source: str
    target: str
    shape: tuple[str, ...]
    kind: str = "matrix"
    since: int = 1
    optional: bool = False
    aliases: tuple[str, ...] = ()
    per_head: bool = False


def _layer(source: str, target: str, *shape: str, **more: Any) -> TensorRule:
    aliases = tuple("layers.{n}." + a for a in more.pop("aliases", ()))
    return TensorRule("layers.{n}." + source, "blk.{n}." + target, shape, aliases=aliases, **more)


TENSORS: tuple[TensorRule, ...] = (
    TensorRule("fc.weight", "fc.weight", ("hidden", "fused")),
    TensorRule("hidden_norm.weight", "enc.output_norm.weight", ("hidden",), "vector"),
    TensorRule("norm.weight", "output_norm.weight", ("hidden",), "vector"),
    TensorRule(
        "candidate_selector.predecessor_codebook",
        "selector_predecessor.weight",
        ("vocab", "rank"),
        since=2,
        aliases=("candidate_selector.predecessor_codebook.weight",),
    ),
    TensorRule(
        "candidate_selector.successor_codebook",
        "selector_successor.weight",
        ("vocab", "rank"),
        since=2,
        aliases=("candidate_selector.successor_codebook.weight",),
    ),
    TensorRule(
        "candidate_selector.hidden_projection.weight",
        "selector_hidden.weight",
        ("rank", "hidden"),
        since=2,
    ),
    TensorRule("embed_tokens.weight", "token_embd.weight", ("vocab", "hidden"), optional=True),
    TensorRule("lm_head.weight", "output.weight", ("draft_vocab", "hidden"), optional=True),
    TensorRule("d2t", "d2t", ("draft_vocab",), "ids", optional=True),
    _layer("input_layernorm.weight", "attn_norm.weight", "hidden", kind="vector"),
    _layer("post_attention_layernorm.weight", "ffn_norm.weight", "hidden", kind="vector"),
    _layer("self_attn.q_proj.weight", "attn_q.weight", "q_width", "hidden", per_head=True),
    _layer("self_attn.k_proj.weight", "attn_k.weight", "kv_width", "hidden", per_head=True),
    _layer("self_attn.v_proj.weight", "attn_v.weight", "kv_width", "hidden"),
    _layer("self_attn.o_proj.weight", "attn_output.weight", "hidden", "q_width"),
    _layer(
        "self_attn.q_norm.weight", "attn_q_norm.weight", "head_dim", kind="vector", per_head=True
    ),
    _layer(
        "self_attn.k_norm.weight", "attn_k_norm.weight", "head_dim", kind="vector", per_head=True
    ),
    _layer(
        "self_attn.sinks",
        "attn_sinks.weight",
        "heads",
        kind="vector",
        optional=True,
        aliases=(
            "self_attn.sinks.weight",
            "self_attn.attention_sink_bias",
            "self_attn.attention_sink_bias.weight",
        ),
    ),
    _layer("mlp.gate_proj.weight", "ffn_gate.weight", "ffn", "hidden"),
    _layer("mlp.up_proj.weight", "ffn_up.weight", "ffn", "hidden"),
    _layer("mlp.down_proj.weight", "ffn_down.weight", "hidden", "ffn"),
    _layer(
        "attention_conv.base_kernel",
        "attn_conv_base",
        "sides",
        "taps",
        "hidden",
        kind="kernel",
        since=2,
    ),
    _layer(
        "attention_conv.kernel_projection.weight",
        "attn_conv_proj.weight",
        "conv_rows",
        "hidden",
        since=2,
    ),
    _layer(
        "mlp_conv.base_kernel", "ffn_conv_base", "sides", "taps", "hidden", kind="kernel", since=2
    ),
    _layer(
        "mlp_conv.kernel_projection.weight", "ffn_conv_proj.weight", "conv_rows", "hidden", since=2
    ),
)

# Names of tensors in the files of forks, from before they settled -> names of today.
FORK_ARCHITECTURE = "dflash-draft"
FORK_TENSORS = {
    "dflash_fc.weight": "fc.weight",
    "dflash.fc.weight": "fc.weight",
    "dflash_hidden_norm.weight": "enc.output_norm.weight",
    "dflash.hidden_norm.weight": "enc.output_norm.weight",
    "selector.hidden_proj.weight": "selector_hidden.weight",
    "selector.pred_codebook": "selector_predecessor.weight",
    "selector.pred_codebook.weight": "selector_predecessor.weight",
    "selector.succ_codebook": "selector_successor.weight",
    "selector.succ_codebook.weight": "selector_successor.weight",
}
FORK_LAYER_TENSORS = {
    "post_attention_norm.weight": "ffn_norm.weight",
    "attn_conv.base": "attn_conv_base",
    "attn_conv.proj.weight": "attn_conv_proj.weight",
    "ffn_conv.base": "ffn_conv_base",
    "ffn_conv.proj.weight": "ffn_conv_proj.weight",
}

# Present in some exports and of no use at run time.
SKIPPED_SUFFIXES = ("rotary_emb.inv_freq",)
SKIPPED_NAMES = frozenset({"t2d"})


@dataclass(frozen=True)
class KeyRule:
    """A key of the GGUF: name after `dflash.`, type, and where its value comes from.

    `value` returns None when the key is not to be written.
    """

    name: str
    type: str
    value: Callable[[DraftConfig], Any]

    @property
    def key(self) -> str:
        """The full name of the key."""
        return f"{ARCH}.{self.name}"


KEYS: tuple[KeyRule, ...] = (
    KeyRule("block_count", "u32", lambda c: c.layers),
    KeyRule("context_length", "u32", lambda c: c.max_positions),
    KeyRule("embedding_length", "u32", lambda c: c.hidden),
    KeyRule("feed_forward_length", "u32", lambda c: c.ffn),
    KeyRule("attention.head_count", "u32", lambda c: c.heads),
    KeyRule("attention.head_count_kv", "u32", lambda c: c.kv_heads),
    KeyRule("attention.key_length", "u32", lambda c: c.head_dim),
    KeyRule("attention.value_length", "u32", lambda c: c.head_dim),
    KeyRule("attention.layer_norm_rms_epsilon", "f32", lambda c: c.rms_norm_eps),
    KeyRule("attention.causal", "bool", lambda c: c.causal),
    KeyRule("attention.sliding_window", "u32", lambda c: c.window),
    KeyRule(
        "attention.sliding_window_pattern", "bool[]", lambda c: c.sliding if c.window else None
    ),
    KeyRule("attention.value_scale", "f32", lambda c: c.value_scale),
    KeyRule("rope.freq_base", "f32", lambda c: c.rope.theta),
    KeyRule("rope.dimension_count", "u32", lambda c: c.rope.dimensions),
    KeyRule("rope.dimension_sections", "i32[]", lambda c: c.rope.sections),
    KeyRule("rope.scaling.type", "str", lambda c: c.rope.scaling),
    KeyRule("rope.scaling.factor", "f32", lambda c: c.rope.factor),
    KeyRule("rope.scaling.original_context_length", "u32", lambda c: c.rope.original_positions),
    KeyRule("rope.scaling.attn_factor", "f32", lambda c: c.rope.attention_scale),
    KeyRule("rope.scaling.yarn_attn_factor", "f32", lambda c: c.rope.attention_factor),
    KeyRule("rope.scaling.yarn_beta_fast", "f32", lambda c: c.rope.beta_fast),
    KeyRule("rope.scaling.yarn_beta_slow", "f32", lambda c: c.rope.beta_slow),
    KeyRule("hidden_activation", "str", lambda c: c.activation),
    KeyRule("block_size", "u32", lambda c: c.block_size),
    KeyRule("conv_kernel_size", "u32", lambda c: c.taps),
    KeyRule("conv_group_size", "u32", lambda c: c.group),
    KeyRule("selector_rank", "u32", lambda c: c.rank),
    KeyRule("selector_top_k", "u32", lambda c: c.top_k),
    KeyRule("target_layers", "i32[]", lambda c: [i + 1 for i in c.target_layer_ids]),
    KeyRule("embedding_scale", "f32", lambda c: c.embedding_scale),
    KeyRule("logit_scale", "f32", lambda c: c.output_multiplier),
    KeyRule("final_logit_softcapping", "f32", lambda c: c.softcap),
)

MASK_TOKEN_KEY = "tokenizer.ggml.mask_token_id"


def layer_name(template: str, layer: int) -> str:
    """Fill the layer into a name of the table."""
    return template.replace("{n}", str(layer))


def rules_for(version: int, layers: int) -> list[tuple[TensorRule, int]]:
    """Return every rule that applies to a checkpoint, with the layer it applies to (0 for none)."""
    rules = [rule for rule in TENSORS if rule.since <= version]
    out = [(rule, 0) for rule in rules if "{n}" not in rule.source]
    for layer in range(layers):
        out += [(rule, layer) for rule in rules if "{n}" in rule.source]
    return out
