"""Tiny targets with random weights, written as GGUF, and drafts that fit them; no download.

Architectures: `llama`, `qwen3`, the hybrid `qwen35` (gated-delta-net layers beside attention,
    M-RoPE) and `gemma4` (soft-capped logits, scaled embedding, windowed layers beside full ones).
Weights are scaled so that greedy text depends on the context and does not settle on one token.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
import numpy as np
from tiny_checkpoint import make_draft_checkpoint
from tiny_vocab import Vocab, make_vocab

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ARCHS = ("llama", "qwen3", "qwen35", "gemma4")

_FILE_TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
DTYPES = tuple(_FILE_TYPES)

# llama.cpp's pre-tokenizer for each architecture
_PRE = {"llama": "smollm", "qwen3": "qwen2", "qwen35": "qwen35", "gemma4": "smollm"}


@dataclass(frozen=True)
class TargetSpec:
    """Shape of a tiny target."""

    arch: str = "llama"
    n_layer: int = 4
    n_embd: int = 288
    n_head: int = 6
    n_head_kv: int = 2
    head_dim: int = 48
    n_ff: int = 480
    n_vocab: int = 512
    vocab: str = "bpe"
    n_ctx_train: int = 8192
    rope_base: float = 10000.0
    rms_eps: float = 1e-6
    tied: bool = False  # head = embedding
    stops: bool = False  # may the text reach an end-of-generation token?
    # qwen35: layer i is attention when (i + 1) % interval == 0, else gated delta net; gemma4: layer
    # i sees everything then, else a window
    interval: int = 2
    ssm_conv: int = 4
    ssm_state: int = 32
    ssm_k_heads: int = 2
    ssm_v_heads: int = 4
    # gemma4: logits are softcap * tanh(logits / softcap)
    softcap: float = 15.0
    window: int = 48

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise ValueError(f"architecture {self.arch!r}, expected one of {', '.join(ARCHS)}")
        if self.n_head % self.n_head_kv or self.ssm_v_heads % self.ssm_k_heads:
            raise ValueError("query heads must be a multiple of key heads")  # llama.cpp aborts

    def is_recurrent(self, layer: int) -> bool:
        """Does this layer keep a recurrent state instead of keys and values?"""
        return self.arch == "qwen35" and (layer + 1) % self.interval != 0

    @property
    def n_rot(self) -> int:
        """Rotated values per head: qwen35 rotates a quarter."""
        return self.head_dim // 4 if self.arch == "qwen35" else self.head_dim

    @property
    def embedding_scale(self) -> float:
        """What the target multiplies its embedding with."""
        return float(np.sqrt(self.n_embd)) if self.arch == "gemma4" else 1.0

    def make_vocab(self) -> Vocab:
        return make_vocab(self.n_vocab, kind=self.vocab, pre=_PRE[self.arch])


class Pair(NamedTuple):
    """Files of a target and a draft that belong together."""

    target: Path
    draft: Path
    checkpoint: Path


def make_target(
    path: Path | str, arch: str = "llama", *, seed: int = 0, dtype: str = "f32", **shape: Any
) -> Path:
    """Write a target with random weights.

    Args:
        path: GGUF file to write.
        arch: one of `ARCHS`.
        seed: of the weights.
        dtype: type of the matrices, one of `DTYPES`; norms and other vectors stay F32.
        shape: further fields of `TargetSpec`, for instance n_layer, n_embd, n_vocab, tied, vocab.

    Returns:
        `path`.
    """
    spec = TargetSpec(arch=arch, **shape)
    return write_target(path, spec, dict(random_tensors(spec, seed)), dtype=dtype)


def make_pair(
    directory: Path | str,
    arch: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "f32",
    outtype: str = "f32",
    target: Mapping[str, Any] | None = None,
    **draft: Any,
) -> Pair:
    """Write a target, a DFlash 2 checkpoint that fits it, and the converted draft.

    Args:
        directory: where to write `target.gguf`, `checkpoint/` and `draft-{outtype}.gguf`.
        arch: architecture of the target.
        seed: of all weights.
        dtype, outtype: types of the target's and the draft's matrices.
        target: fields of `TargetSpec`.
        draft: arguments of `tiny_checkpoint.make_draft_checkpoint`, for instance layers, block,
            taps, group, top_k.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    spec = TargetSpec(arch=arch, **(target or {}))
    tensors = dict(random_tensors(spec, seed))
    file = write_target(directory / "target.gguf", spec, tensors, dtype=dtype)
    options = draft_options(spec) | {"seed": seed} | draft
    checkpoint = make_draft_checkpoint(directory / "checkpoint", dtype="f32", **options)
    return Pair(
        file,
        convert_draft(checkpoint, file, directory / f"draft-{outtype}.gguf", outtype),
        checkpoint,
    )


def draft_options(spec: TargetSpec) -> dict[str, Any]:
    """Arguments of `make_draft_checkpoint` for a small draft that fits a target of this shape."""
    return output_options(spec) | {
        "hidden": spec.n_embd,
        "vocab": spec.n_vocab,
        "layers": 2,
        "n_target_layers": spec.n_layer,
        "target_layer_ids": (0, spec.n_layer // 2),
        "mask_token_id": spec.make_vocab().mask,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 64,
    }


def output_options(spec: TargetSpec) -> dict[str, Any]:
    """What a draft's config says about the embedding and the head that it borrows."""
    if spec.arch != "gemma4":
        return {}
    return {"softcap": spec.softcap, "embedding_scale": spec.embedding_scale}


def convert_draft(
    checkpoint: Path | str, target: Path | str, out: Path | str, outtype: str = "f32"
) -> Path:
    """Convert a checkpoint with the project's converter; returns `out`."""
    from dflash_convert import convert

    convert(checkpoint, target, out, outtype, force=True)
    return Path(out)


def random_tensors(spec: TargetSpec, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Name and F32 values of every tensor; matrices are [n_out, n_in] as in PyTorch."""
    rng = np.random.default_rng([seed, ARCHS.index(spec.arch)])
    vocab = spec.make_vocab()

    def matrix(n_out: int, n_in: int, gain: float = 1.0) -> np.ndarray:
        return rng.standard_normal((n_out, n_in), np.float32) * np.float32(gain / np.sqrt(n_in))

    def norm(n: int, centre: float = 1.0) -> np.ndarray:
        return (centre * rng.uniform(0.7, 1.3, n)).astype(np.float32)

    embd = rng.standard_normal((spec.n_vocab, spec.n_embd), np.float32)
    yield "token_embd.weight", embd * np.float32((0.25 if spec.tied else 1) / spec.embedding_scale)
    yield "output_norm.weight", norm(spec.n_embd)
    if not spec.tied:
        head = matrix(spec.n_vocab, spec.n_embd, gain=3.0)
        # a zero row gives logit 0, which greedy decoding never picks among hundreds of random
        # logits
        silent = np.ones(spec.n_vocab, bool)
        silent[list(vocab.text_ids)] = False
        if spec.stops:
            silent[list(vocab.eog_ids)] = False
        head[silent] = 0.0
        yield "output.weight", head
    if spec.arch == "gemma4":  # full layers rotate the first quarter only
        factors = np.full(spec.head_dim // 2, 1e30, np.float32)
        factors[: spec.head_dim // 8] = 1.0
        yield "rope_freqs.weight", factors

    for i in range(spec.n_layer):
        blk = f"blk.{i}."
        yield blk + "attn_norm.weight", norm(spec.n_embd)
        mixer = _delta_net if spec.is_recurrent(i) else _attention
        for name, values in mixer(spec, rng, matrix, norm):
            yield blk + name, values
        name = "post_attention_norm" if spec.arch == "qwen35" else "ffn_norm"
        yield f"{blk}{name}.weight", norm(spec.n_embd)
        yield blk + "ffn_gate.weight", matrix(spec.n_ff, spec.n_embd)
        yield blk + "ffn_up.weight", matrix(spec.n_ff, spec.n_embd)
        yield blk + "ffn_down.weight", matrix(spec.n_embd, spec.n_ff, gain=2.0)
        if spec.arch == "gemma4":
            yield blk + "post_attention_norm.weight", norm(spec.n_embd)
            yield blk + "post_ffw_norm.weight", norm(spec.n_embd)
            yield blk + "layer_output_scale.weight", norm(1)


def _attention(
    spec: TargetSpec, rng: np.random.Generator, matrix: Any, norm: Any
) -> Iterator[tuple[str, np.ndarray]]:
    has_gate = spec.arch == "qwen35"  # query and output gate of each head lie side by side
    has_qk_norm = spec.arch != "llama"
    # attention must be peaked, or every context of some length looks alike
    sharp = 1.0 if has_qk_norm else 1.8
    n_q, n_kv = spec.n_head * spec.head_dim, spec.n_head_kv * spec.head_dim
    yield "attn_q.weight", matrix(n_q * (2 if has_gate else 1), spec.n_embd, sharp)
    yield "attn_k.weight", matrix(n_kv, spec.n_embd, sharp)
    yield "attn_v.weight", matrix(n_kv, spec.n_embd)
    yield "attn_output.weight", matrix(spec.n_embd, n_q, gain=2.0)
    if has_qk_norm:
        # gemma4 does not divide by the root of the head's size
        centre = 1.8 * spec.head_dim**-0.25 if spec.arch == "gemma4" else 1.8
        yield "attn_q_norm.weight", norm(spec.head_dim, centre)
        yield "attn_k_norm.weight", norm(spec.head_dim, centre)


def _delta_net(
    spec: TargetSpec, rng: np.random.Generator, matrix: Any, norm: Any
) -> Iterator[tuple[str, np.ndarray]]:
    n_v = spec.ssm_v_heads
    d_k, d_v = spec.ssm_k_heads * spec.ssm_state, n_v * spec.ssm_state
    yield "attn_qkv.weight", matrix(2 * d_k + d_v, spec.n_embd)
    yield "attn_gate.weight", matrix(d_v, spec.n_embd)
    yield "ssm_conv1d.weight", matrix(2 * d_k + d_v, spec.ssm_conv, gain=1.5)
    yield "ssm_alpha.weight", matrix(n_v, spec.n_embd)
    yield "ssm_beta.weight", matrix(n_v, spec.n_embd)
    # decay per token exp(a * softplus(alpha + dt)): half-lives from a few to a few dozen tokens
    yield "ssm_a", -np.geomspace(0.02, 0.3, n_v).astype(np.float32)
    yield "ssm_dt.bias", rng.uniform(-1.0, 1.0, n_v).astype(np.float32)
    yield "ssm_norm.weight", norm(spec.ssm_state)
    yield "ssm_out.weight", matrix(spec.n_embd, d_v, gain=2.0)


def write_target(
    path: Path | str,
    spec: TargetSpec,
    tensors: Mapping[str, np.ndarray],
    *,
    dtype: str = "f32",
) -> Path:
    """Write `tensors` (F32, see `random_tensors`) with the metadata of `spec`."""
    if dtype not in _FILE_TYPES:
        raise ValueError(f"type {dtype!r}, expected one of {', '.join(DTYPES)}")
    qtype, ftype = _FILE_TYPES[dtype]
    path = Path(path)
    part = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(part, spec.arch)
    writer.add_name(f"tiny {spec.arch}")
    writer.add_file_type(ftype)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(spec.n_vocab)
    writer.add_context_length(spec.n_ctx_train)
    writer.add_embedding_length(spec.n_embd)
    writer.add_block_count(spec.n_layer)
    writer.add_feed_forward_length(spec.n_ff)
    writer.add_head_count(spec.n_head)
    writer.add_head_count_kv(spec.n_head_kv)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_eps)
    writer.add_rope_freq_base(spec.rope_base)
    writer.add_rope_dimension_count(spec.n_rot)
    if spec.arch == "qwen35":
        # rotated pairs take turns among three position axes; a pair left over would not rotate
        pairs = spec.n_rot // 2
        writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
        writer.add_ssm_conv_kernel(spec.ssm_conv)
        writer.add_ssm_state_size(spec.ssm_state)
        writer.add_ssm_group_count(spec.ssm_k_heads)
        writer.add_ssm_time_step_rank(spec.ssm_v_heads)
        writer.add_ssm_inner_size(spec.ssm_v_heads * spec.ssm_state)
        writer.add_uint32("qwen35.full_attention_interval", spec.interval)
    if spec.arch == "gemma4":
        pattern = [(i + 1) % spec.interval != 0 for i in range(spec.n_layer)]
        writer.add_array("gemma4.attention.sliding_window_pattern", pattern)
        writer.add_uint32("gemma4.attention.sliding_window", spec.window)
        writer.add_uint32("gemma4.attention.key_length_swa", spec.head_dim)
        writer.add_uint32("gemma4.attention.value_length_swa", spec.head_dim)
        writer.add_uint32("gemma4.embedding_length_per_layer_input", 0)
        writer.add_float32("gemma4.final_logit_softcapping", spec.softcap)
    spec.make_vocab().write(writer)
    for name, values in tensors.items():
        keep = values.ndim == 1 or "conv1d" in name or qtype == gguf.GGMLQuantizationType.F32
        if keep:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        else:
            writer.add_tensor(name, gguf.quantize(values, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, path)
    return path
