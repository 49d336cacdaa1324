"""The reference (PyPI `dflash`, transformers, torch on CPU in F32) behind a few plain functions.

Nothing here uses the code under test or llama.cpp: targets are rebuilt from the values in a GGUF
file as transformers models, drafts are loaded from their checkpoint by the reference itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dflash import model as reference
from dflash.model import (
    DFlash2DraftModel,
    DFlashDraftModel,
    dflash_generate,
    extract_context_feature,
)
from gguf_files import GGUFFile
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

logging.disable_progress_bar()

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}


def load_target(path: Path | str) -> nn.Module:
    """The model in a GGUF file (llama, qwen3 or qwen35) as a transformers model in F32.

    Raises:
        ValueError: for another architecture, or a tensor without a place in the model.
    """
    file = GGUFFile(path)
    if file.arch not in ("llama", "qwen3", "qwen35"):
        raise ValueError(f"architecture {file.arch!r}, expected llama, qwen3 or qwen35")
    shape = _target_config(file)
    config_type, model_type = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen35": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    }[file.arch]
    model = model_type(config_type(**shape)).float().eval()
    weights = dict(_target_weights(file, shape))
    if shape["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()}, strict=True)
    return model.requires_grad_(False)


def _target_config(file: GGUFFile) -> dict[str, Any]:
    n_layer, n_head = file.field("{arch}.block_count"), file.field("{arch}.attention.head_count")
    n_embd = file.field("{arch}.embedding_length")
    head_dim = file.field("{arch}.attention.key_length", n_embd // n_head)
    shape: dict[str, Any] = {
        "vocab_size": len(file.tensors["token_embd.weight"].data),
        "hidden_size": n_embd,
        "intermediate_size": file.field("{arch}.feed_forward_length"),
        "num_hidden_layers": n_layer,
        "num_attention_heads": n_head,
        "num_key_value_heads": file.field("{arch}.attention.head_count_kv", n_head),
        "head_dim": head_dim,
        "rms_norm_eps": file.field("{arch}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": file.field("{arch}.context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": file.field("{arch}.rope.freq_base", 10000.0),
        },
    }
    if file.arch == "qwen35":
        n_rot = file.field("qwen35.rope.dimension_count")
        shape["rope_parameters"] |= {
            "partial_rotary_factor": n_rot / head_dim,
            "mrope_section": file.field("qwen35.rope.dimension_sections")[:3],
            "mrope_interleaved": True,
        }
        shape |= {
            "linear_conv_kernel_dim": file.field("qwen35.ssm.conv_kernel"),
            "linear_key_head_dim": file.field("qwen35.ssm.state_size"),
            "linear_value_head_dim": file.field("qwen35.ssm.state_size"),
            "linear_num_key_heads": file.field("qwen35.ssm.group_count"),
            "linear_num_value_heads": file.field("qwen35.ssm.time_step_rank"),
            "layer_types": [
                "linear_attention" if f"blk.{i}.ssm_a" in file.tensors else "full_attention"
                for i in range(n_layer)
            ],
        }
    return shape


def _target_weights(file: GGUFFile, shape: dict[str, Any]) -> Any:
    for name in file.tensors:
        values = file.values(name)
        if name == "token_embd.weight":
            yield "model.embed_tokens.weight", values
        elif name == "output.weight":
            yield "lm_head.weight", values
        elif name == "output_norm.weight":
            yield "model.norm.weight", _norm(file, "output_norm", values)
        elif name.startswith("blk."):
            _, layer, kind, *suffix = name.split(".")
            prefix = f"model.layers.{layer}."
            if kind == "ssm_a":
                values = np.log(-_ungroup(file, values))
                yield prefix + "linear_attn.A_log", values
            elif kind == "ssm_dt":
                yield prefix + "linear_attn.dt_bias", _ungroup(file, values)
            elif kind in _LAYER_NAMES and suffix == ["weight"]:
                yield f"{prefix}{_LAYER_NAMES[kind]}.weight", _layer(file, kind, values, shape)
            else:
                raise ValueError(f"tensor {name} has no place in a {file.arch} model")
        elif name != "rope_freqs.weight":
            raise ValueError(f"tensor {name} has no place in a {file.arch} model")


def _layer(file: GGUFFile, kind: str, values: np.ndarray, shape: dict[str, Any]) -> np.ndarray:
    """Undo what GGUF converters do to the weights of a layer."""
    if file.arch == "llama" and kind in ("attn_q", "attn_k"):
        # GGUF keeps rotated pairs side by side, transformers half a head apart
        half = shape["head_dim"] // 2
        return values.reshape(-1, half, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    if kind in ("attn_qkv", "ssm_conv1d"):
        n_key = 2 * shape["linear_num_key_heads"] * shape["linear_key_head_dim"]
        values = np.concatenate([values[:n_key], _ungroup(file, values[n_key:])])
        return values[:, None, :] if kind == "ssm_conv1d" else values
    if kind in ("attn_gate", "ssm_alpha", "ssm_beta"):
        return _ungroup(file, values)
    if kind == "ssm_out":
        return np.ascontiguousarray(_ungroup(file, values.T).T)
    return _norm(file, kind, values)


def _norm(file: GGUFFile, kind: str, values: np.ndarray) -> np.ndarray:
    """qwen35 checkpoints hold norm weights around 0 (but the gated norm), GGUF around 1."""
    is_shifted = file.arch == "qwen35" and kind.endswith("norm") and kind != "ssm_norm"
    return values - 1.0 if is_shifted else values


def _ungroup(file: GGUFFile, values: np.ndarray) -> np.ndarray:
    """Value heads from GGUF's order (key head varies fastest) to the checkpoint's (slowest)."""
    n_key, n_value = file.field("{arch}.ssm.group_count"), file.field("{arch}.ssm.time_step_rank")
    heads = values.reshape(n_value // n_key, n_key, -1)
    return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(values.shape)


@dataclass(frozen=True)
class Block:
    """What the reference computes for one block; n = drafted positions, k = top-k."""

    hidden: np.ndarray  # [n, n_embd] F32, after the final norm
    logits: np.ndarray  # [n, n_vocab] F32, after multiplier and soft cap
    candidates: np.ndarray  # [n, k] ids, best logit first, equal logits by lower id
    lattice: np.ndarray  # [n, k, k] F32, [position][predecessor][candidate]
    scores: np.ndarray  # [n, k] F32, the lattice's rows along `path`
    path: np.ndarray  # [n] ids of the greedy walk


class ReferenceDraft:
    """A draft checkpoint, with the embedding and head that it borrows."""

    def __init__(self, checkpoint: Path | str, embedding: np.ndarray, head: np.ndarray) -> None:
        """
        Args:
            checkpoint: directory with config.json and safetensors.
            embedding, head: the target's, F32 [n_vocab, n_embd].
        """
        self.config: dict[str, Any] = json.loads((Path(checkpoint) / "config.json").read_text())
        selects = "DFlash2DraftModel" in self.config["architectures"]
        kind = DFlash2DraftModel if selects else DFlashDraftModel
        self.model = kind.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.model.requires_grad_(False)
        self.embedding = torch.from_numpy(embedding)
        self.head = nn.Linear(head.shape[1], head.shape[0], bias=False)
        self.head.weight = nn.Parameter(torch.from_numpy(head), requires_grad=False)

    @property
    def target_layer_ids(self) -> list[int]:
        """Target layers whose outputs are the features, in order."""
        return list(self.model.target_layer_ids)

    @property
    def block_size(self) -> int:
        """Tokens of a block, the anchor included."""
        return self.model.block_size

    @property
    def top_k(self) -> int:
        """Candidates per position; 0 for a draft without selector."""
        return getattr(getattr(self.model, "candidate_selector", None), "top_k", 0)

    def _value(self, name: str, default: Any) -> Any:
        return self.config.get("dflash_config", {}).get(name, self.config.get(name, default))

    @torch.inference_mode()
    def block(self, features: np.ndarray, anchor: int, n_draft: int | None = None) -> Block:
        """Draft one block after a context.

        Args:
            features: F32 [n_context, n_taps * n_embd], row i for position i.
            anchor: id of the token at position n_context.
            n_draft: drafted positions, at most block size - 1 (the default).
        """
        n_draft = self.block_size - 1 if n_draft is None else n_draft
        ids = torch.tensor([[anchor, *[self.model.mask_token_id] * n_draft]])
        scale = float(self._value("input_embedding_scale", 1.0))
        n_context = len(features)
        hidden = self.model(
            target_hidden=torch.from_numpy(np.ascontiguousarray(features))[None],
            noise_embedding=nn.functional.embedding(ids, self.embedding) * scale,
            position_ids=torch.arange(n_context + 1 + n_draft)[None],
        )[:, 1:]
        logits = self.model.compute_logits(hidden, self.head)
        if self.top_k == 0:  # the reference drafts the likeliest token of each position
            none, path = np.zeros((n_draft, 0)), logits[0].argmax(-1).numpy()
            return Block(hidden[0].numpy(), logits[0].numpy(), none, none, none, path)
        anchor_ids = torch.tensor([anchor])
        path, candidate_sets, _ = self.model.propose(hidden, anchor_ids, self.head, 0.0)
        order = torch.sort(logits[0], dim=-1, descending=True, stable=True).indices
        candidates = order[:, : self.top_k].numpy()
        for ours, theirs in zip(candidates, candidate_sets[0].tolist(), strict=True):
            assert set(ours.tolist()) == set(theirs), "candidates differ from the reference's own"
        lattice = self.lattice(hidden[0].numpy(), logits[0].numpy(), anchor, candidates)
        scores = along_path(lattice, candidates, path[0].tolist())
        arrays = (t.numpy() for t in (hidden[0], logits[0]))
        return Block(*arrays, candidates, lattice, scores, path[0].numpy())

    @torch.inference_mode()
    def lattice(
        self, hidden: np.ndarray, logits: np.ndarray, anchor: int, candidates: np.ndarray
    ) -> np.ndarray:
        """Scores of all pairs of neighbouring candidates; the reference computes a path only.

        Args:
            hidden, logits: of the block, F32 [n, n_embd] and [n, n_vocab].
            anchor: the token before the first row.
            candidates: ids [n, k].

        Returns:
            F32 [n, k, k]; [i, p, c] is candidate c of row i after candidate p of row i - 1. In row
            0 all p are the anchor.
        """
        selector = self.model.candidate_selector
        chosen = torch.from_numpy(np.ascontiguousarray(candidates, np.int64))
        predecessors = torch.cat([torch.full_like(chosen[:1], anchor), chosen[:-1]])
        unary = torch.from_numpy(logits).gather(1, chosen)
        gate = selector.hidden_projection(torch.from_numpy(hidden))[:, None]
        left = selector.predecessor_codebook(predecessors) * gate
        return (left @ selector.successor_codebook(chosen).mT + unary[:, None]).numpy()

    @torch.inference_mode()
    def generate(
        self, target: nn.Module, prompt: list[int], n_predict: int, stop: list[int] | None = None
    ) -> tuple[list[int], list[int]]:
        """The reference's own greedy speculative loop.

        Returns:
            The generated ids, and the number of tokens that each round produced.
        """
        # its statistics need CUDA for the clock only; the lengths are recorded regardless
        clock, reference._cuda_time = reference._cuda_time, lambda: 0.0
        try:
            result = dflash_generate(
                self.model,
                target,
                torch.tensor([prompt]),
                max_new_tokens=n_predict,
                stop_token_ids=stop,
                return_stats=True,
            )
        finally:
            reference._cuda_time = clock
        return result.output_ids[0, len(prompt) :].tolist(), list(result.acceptance_lengths)


def speculate(
    target: nn.Module, draft: ReferenceDraft, prompt: list[int], n_predict: int
) -> tuple[list[int], list[int]]:
    """The reference's greedy loop without any cache, for hybrid targets.

    Rolling back transformers' cache restores the convolution states of gated-delta-net layers but
    not their recurrent states (5.15.0), so the reference's own loop leaves the target's text there.

    Returns:
        As `ReferenceDraft.generate`; every block is whole.
    """
    text = [*prompt, int(target_logits(target, prompt)[-1].argmax())]
    lengths = []
    while len(text) - len(prompt) < n_predict:
        features = target_features(target, text[:-1], draft.target_layer_ids)
        path = draft.block(features, text[-1]).path.tolist()
        choice = target_logits(target, text + path)[len(text) - 1 :].argmax(axis=1).tolist()
        n = 0
        while n < len(path) and path[n] == choice[n]:
            n += 1
        text += choice[: n + 1]
        lengths.append(n + 1)
    return text[len(prompt) :][:n_predict], lengths


def along_path(lattice: np.ndarray, candidates: np.ndarray, path: list[int]) -> np.ndarray:
    """Rows of a lattice [n, k, k] that a walk over `path` reads, [len(path), k]."""
    row, out = 0, []
    for i, token in enumerate(path):
        out.append(lattice[i, row])
        row = candidates[i].tolist().index(token)
    return np.stack(out)


@torch.inference_mode()
def target_features(target: nn.Module, tokens: list[int], layer_ids: list[int]) -> np.ndarray:
    """Outputs of some target layers side by side, F32 [n_tokens, n_layers * n_embd]."""
    out = target(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return extract_context_feature(out.hidden_states, layer_ids)[0].numpy()


@torch.inference_mode()
def target_logits(target: nn.Module, tokens: list[int]) -> np.ndarray:
    """Logits after every token, F32 [n_tokens, n_vocab]."""
    return target(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def greedy_text(target: nn.Module, prompt: list[int], n_predict: int) -> list[int]:
    """Plain greedy decoding with the torch target."""
    tokens = list(prompt)
    for _ in range(n_predict):
        tokens.append(int(target_logits(target, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
