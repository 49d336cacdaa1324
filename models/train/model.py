"""The draft in lean torch: same parameters and numbers as the reference, many anchors at once.

Parameter names are those of the published checkpoint, so `state_dict()` is what gets exported.
Symbols: S sequences, T context positions, M anchors per sequence, B block size, H hidden size.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from target import Target, rms_norm, rope_tables, rotate
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class DraftConfig:
    """Sizes of a draft; `to_hf` gives the config.json of the checkpoint."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    rope_theta: float
    context: int
    n_target_layers: int
    eos: int
    target_layer_ids: tuple[int, ...] = (6, 14, 22, 28)
    mask_token_id: int = 16
    block: int = 8
    window: int = 512
    taps: int = 2
    group: int = 16
    rank: int = 32
    top_k: int = 16
    use_conv: bool = True
    use_selector: bool = True

    @classmethod
    def for_target(cls, target: Target, layers: int = 3, **kwargs) -> DraftConfig:
        """A draft that shares the target's width, heads, rope and vocabulary."""
        c = target.config
        return cls(
            c.hidden,
            c.ffn,
            layers,
            c.heads,
            c.kv_heads,
            c.head_dim,
            c.vocab,
            c.eps,
            c.rope_theta,
            c.context,
            c.n_layers,
            c.eos,
            **kwargs,
        )

    def to_hf(self) -> dict:
        """The published form: Qwen3 fields and `dflash_config`."""
        return {
            "architectures": ["DFlash2DraftModel" if self.use_selector else "DFlashDraftModel"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "block_size": self.block,
            "dflash_config": {
                "block_size": self.block,
                "conv_group_size": self.group,
                "conv_kernel_size": self.taps,
                "mask_token_id": self.mask_token_id,
                "selector_rank": self.rank,
                "selector_top_k": self.top_k,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "dtype": "bfloat16",
            "eos_token_id": self.eos,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "is_causal": False,
            "layer_types": ["sliding_attention"] * self.layers,
            "max_position_embeddings": self.context,
            "model_type": "qwen3",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "num_target_layers": self.n_target_layers,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "sliding_window": self.window,
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "vocab_size": self.vocab,
        }

    def save(self, path: Path) -> None:
        """As JSON, for checkpoints of the training."""
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> DraftConfig:
        """What `save` wrote."""
        raw = json.loads(path.read_text())
        return replace(cls(**raw), target_layer_ids=tuple(raw["target_layer_ids"]))


class Norm(nn.Module):
    """RMS norm with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


def _linear(rows: int, cols: int) -> nn.Linear:
    return nn.Linear(rows, cols, bias=False)


class Conv(nn.Module):
    """Grouped dynamic causal convolution: one projection serves both sides of a sublayer."""

    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.taps, self.group = c.taps, c.group
        self.base_kernel = nn.Parameter(torch.zeros(2, c.taps, c.hidden))
        self.kernel_projection = _linear(c.hidden, 2 * c.taps * c.hidden // c.group)
        with torch.no_grad():  # starts as the identity
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.mul_(0.1)

    def kernels(self, x: Tensor) -> Tensor:
        """[..., B, H] -> dynamic part [..., B, 2, K, G]."""
        shape = (*x.shape[:-1], 2, self.taps, x.shape[-1] // self.group)
        return self.kernel_projection(x).view(shape)

    def apply_side(self, x: Tensor, dynamic: Tensor, side: int) -> Tensor:
        """out[t] = sum over taps j of (base + dynamic)[j] * x[t - j], zero before the block."""
        out = None
        for tap in range(self.taps):
            past = x if tap == 0 else F.pad(x[..., :-tap, :], (0, 0, tap, 0))
            base = self.base_kernel[side, tap].view(-1, self.group).to(x.dtype)
            kernel = base + dynamic[..., side, tap, :, None].to(x.dtype)
            term = kernel.flatten(-2) * past
            out = term if out is None else out + term
        return out


class Attention(nn.Module):
    """Queries from the block; keys and values from the context and from the block itself."""

    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = _linear(c.hidden, c.heads * c.head_dim)
        self.k_proj = _linear(c.hidden, c.kv_heads * c.head_dim)
        self.v_proj = _linear(c.hidden, c.kv_heads * c.head_dim)
        self.o_proj = _linear(c.heads * c.head_dim, c.hidden)
        self.q_norm = Norm(c.head_dim, c.eps)
        self.k_norm = Norm(c.head_dim, c.eps)

    def _keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*x.shape[:-1], self.c.kv_heads, self.c.head_dim)
        k = self.k_norm(self.k_proj(x).view(shape))
        return rotate(k, cos, sin), self.v_proj(x).view(shape)

    def forward(
        self, x: Tensor, context: Tensor, block_rope: tuple, context_rope: tuple, bias: Tensor
    ) -> Tensor:
        """x [S, M, B, H], context [S, T, H], bias [S, 1, M, 1, T] -> [S, M, B, H]."""
        c = self.c
        s, m, b, _ = x.shape
        g, groups = c.kv_heads, c.heads // c.kv_heads
        q = self.q_norm(self.q_proj(x).view(s, m, b, c.heads, c.head_dim))
        q = rotate(q, *block_rope) * c.head_dim**-0.5
        k, v = self._keys(x, *block_rope)
        ck, cv = self._keys(context, *context_rope)
        dtype = v.dtype
        q, k, ck = q.to(dtype), k.to(dtype), ck.to(dtype)
        # heads as [kv head, group]: [S, g, M, group * B, D]
        q = q.view(s, m, b, g, groups, c.head_dim).permute(0, 3, 1, 4, 2, 5)
        q = q.reshape(s, g, m * groups * b, c.head_dim)
        far = (q @ ck.permute(0, 2, 3, 1)).view(s, g, m, groups * b, -1).float() + bias
        near = q.view(s, g, m, groups * b, c.head_dim) @ k.permute(0, 3, 1, 4, 2)
        p = torch.cat([far, near.float()], -1).softmax(-1).to(dtype)
        t = context.shape[1]
        out = p[..., :t].reshape(s, g, m * groups * b, t) @ cv.permute(0, 2, 1, 3)
        out = out.view(s, g, m, groups * b, c.head_dim) + p[..., t:] @ v.permute(0, 3, 1, 2, 4)
        out = out.view(s, g, m, groups, b, c.head_dim).permute(0, 2, 4, 1, 3, 5)
        return self.o_proj(out.reshape(s, m, b, -1))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(c.hidden, c.ffn)
        self.up_proj = _linear(c.hidden, c.ffn)
        self.down_proj = _linear(c.ffn, c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each with a convolution before and after it."""

    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        self.input_layernorm = Norm(c.hidden, c.eps)
        self.post_attention_layernorm = Norm(c.hidden, c.eps)
        self.attention_conv = Conv(c) if c.use_conv else None
        self.mlp_conv = Conv(c) if c.use_conv else None

    def forward(self, x: Tensor, *attention) -> Tensor:
        h = self.input_layernorm(x)
        x = x + _around(self.attention_conv, h, lambda y: self.self_attn(y, *attention))
        return x + _around(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def _around(conv: Conv | None, h: Tensor, sublayer) -> Tensor:
    if conv is None:
        return sublayer(h)
    dynamic = conv.kernels(h)
    return conv.apply_side(sublayer(conv.apply_side(h, dynamic, 0)), dynamic, 1)


class Selector(nn.Module):
    """Scores candidates by their predecessor; the codebooks are plain parameters [V, R]."""

    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(c.vocab, c.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(c.vocab, c.rank))
        self.hidden_projection = _linear(c.hidden, c.rank)

    def bonus(self, hidden: Tensor, predecessor: Tensor, candidates: Tensor) -> Tensor:
        """hidden [..., H], predecessor [...], candidates [..., k] -> what joins the logits."""
        left = F.embedding(predecessor, self.predecessor_codebook) * self.hidden_projection(hidden)
        return (F.embedding(candidates, self.successor_codebook) * left[..., None, :]).sum(-1)


class Draft(nn.Module):
    """A DFlash 2 draft whose blocks all have their own anchor."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        c = self.config = config
        self.fc = _linear(len(c.target_layer_ids) * c.hidden, c.hidden)
        self.hidden_norm = Norm(c.hidden, c.eps)
        self.norm = Norm(c.hidden, c.eps)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.candidate_selector = Selector(c) if c.use_selector else None

    def forward(self, features: Tensor, anchors: Tensor, embeddings: Tensor) -> Tensor:
        """Final normalised hidden states of every block row.

        features [S, T, n, H] of all positions, anchors [S, M] int64 positions, embeddings
        [S, M, B, H] of the anchor token and the masks. Only positions before its anchor (and
        within the window) reach a block. Returns [S, M, B, H].
        """
        c = self.config
        t = features.shape[1]
        context = self.hidden_norm(self.fc(features.flatten(2)))
        where = torch.arange(t)
        rows = anchors[..., None] + torch.arange(embeddings.shape[2])
        dim, theta = c.head_dim, c.rope_theta
        block_rope = tuple(y[..., None, :].to(context.dtype) for y in rope_tables(rows, dim, theta))
        context_rope = tuple(
            y[None, :, None].to(context.dtype) for y in rope_tables(where, dim, theta)
        )
        seen = where < anchors[..., None, None]
        seen = seen & (rows[..., None] - where < c.window)  # [S, M, B, T]
        bias = torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)
        groups = c.heads // c.kv_heads
        bias = bias.repeat(1, 1, groups, 1)[:, None]  # rows are ordered [group, B]
        x = embeddings
        for layer in self.layers:
            x = layer(x, context, block_rope, context_rope, bias)
        return self.norm(x)


def propose(draft: Draft, hidden: Tensor, logits: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy walk: hidden [N, B-1, H], logits [N, B-1, V], anchor [N] -> path [N, B-1] and the
    candidates [N, B-1, k]."""
    unary, candidates = logits.float().topk(draft.config.top_k, -1)
    path, previous = [], anchor
    for i in range(hidden.shape[1]):
        score = unary[:, i]
        if draft.candidate_selector is not None:
            score = (
                score
                + draft.candidate_selector.bonus(hidden[:, i], previous, candidates[:, i]).float()
            )
        previous = candidates[:, i].gather(1, score.argmax(-1, keepdim=True))[:, 0]
        path.append(previous)
    return torch.stack(path, 1), candidates


@torch.no_grad()
def init_from_target(draft: Draft, target: Target, sources: tuple[int, ...], rms: Tensor) -> None:
    """Layers from the target's, `fc` an average of scaled features, codebooks from the embedding.

    rms [n] is the root mean square of each feature, so that none drowns the others. The last
    feature counts half. Query and key norms get the size that the target's heads have on average.
    """
    c = draft.config
    names = {
        "self_attn.q_proj": "q",
        "self_attn.k_proj": "k",
        "self_attn.v_proj": "v",
        "self_attn.o_proj": "o",
        "mlp.gate_proj": "gate",
        "mlp.up_proj": "up",
        "mlp.down_proj": "down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer, source in zip(draft.layers, sources, strict=True):
        weights = target.layers[source]
        for name, short in names.items():
            layer.get_submodule(name).weight.copy_(weights[short].float())
        probe = weights["attn_norm"].float()
        for norm, proj in ((layer.self_attn.q_norm, "q"), (layer.self_attn.k_norm, "k")):
            size = (weights[proj].float() * probe).pow(2).sum(1).mean().sqrt()
            norm.weight.fill_(float(size.clamp(0.8, 2.5)))
    draft.norm.weight.copy_(target.norm.float())
    scale = torch.stack([target.layers[i]["attn_norm"].float() for i in sources]).mean(0)
    draft.hidden_norm.weight.copy_(scale)
    n = len(c.target_layer_ids)
    share = torch.full((n,), 0.5 / max(n - 1, 1))
    share[-1] = 0.5
    noise = 0.1 * draft.fc.weight / draft.fc.weight.std() * c.hidden**-0.5
    blocks = [
        torch.eye(c.hidden) * share[i] + noise[:, i * c.hidden : (i + 1) * c.hidden] / n
        for i in range(n)
    ]
    draft.fc.weight.copy_(torch.cat([b / rms[i] for i, b in enumerate(blocks)], 1))
    if draft.candidate_selector is not None:
        table = target.embedding.float()
        table = table - table.mean(0)
        _, _, v = torch.svd_lowrank(table[::4], q=c.rank, niter=4)
        code = table @ v
        code = code / code.std(0)
        draft.candidate_selector.predecessor_codebook.copy_(code * 0.5)
        draft.candidate_selector.successor_codebook.copy_(code * 0.5)
