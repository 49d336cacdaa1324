"""The target in plain torch: weights from its GGUF, bf16 on the CPU.

Only what the recipe needs of a Llama: a forward pass that also returns the outputs of chosen
layers, and batched generation with a static cache. llama.cpp stays the judge of the finished draft.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class TargetConfig:
    """Sizes of the target, read from the GGUF's keys."""

    n_layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    rope_theta: float
    context: int
    eos: int
    name: str


def finish(work: Callable[[], None]) -> int:
    """Run a program's work; returns its exit code: 2 for bad input, 130 for Ctrl-C."""
    try:
        work()
    except TargetError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


class TargetError(Exception):
    """The GGUF cannot serve as a target; the message says what was found and expected."""


def _read(path: Path) -> tuple[TargetConfig, dict[str, Tensor]]:
    try:
        reader = gguf.GGUFReader(str(path))
    except (OSError, ValueError) as e:
        raise TargetError(f"{path}: not a readable GGUF ({e}); give the target's GGUF file") from e

    def key(name: str, default=None):
        field = reader.fields.get(name)
        if field is None:
            if default is None:
                raise TargetError(f"{path}: key {name} is missing; a llama GGUF has it")
            return default
        return field.contents()

    arch = key("general.architecture")
    if arch != "llama":
        raise TargetError(f"{path}: architecture {arch}, expected llama; other targets need a port")
    heads, hidden = key("llama.attention.head_count"), key("llama.embedding_length")
    config = TargetConfig(
        n_layers=key("llama.block_count"),
        hidden=hidden,
        ffn=key("llama.feed_forward_length"),
        heads=heads,
        kv_heads=key("llama.attention.head_count_kv", heads),
        head_dim=key("llama.attention.key_length", hidden // heads),
        vocab=key("llama.vocab_size", len(reader.fields["tokenizer.ggml.tokens"].data)),
        eps=key("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=float(key("llama.rope.freq_base", 10000.0)),
        context=key("llama.context_length"),
        eos=key("tokenizer.ggml.eos_token_id"),
        name=key("general.name", path.stem),
    )
    tensors = {}
    for t in reader.tensors:
        data = gguf.dequantize(t.data, t.tensor_type)
        tensors[t.name] = torch.from_numpy(data.copy()).float()
    return config, tensors


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's row order of q and k (interleaved rope pairs) -> halves, as HF has them."""
    rows, cols = weight.shape
    return weight.view(heads, rows // heads // 2, 2, cols).transpose(1, 2).reshape(rows, cols)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm with float32 statistics; the result has x's dtype."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def rope_tables(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [..., dim] (float32) for integer positions [...]."""
    freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle = positions[..., None].float() * freq
    return torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split convention; cos and sin broadcast against x."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Target:
    """A Llama read from GGUF. Weights of dtype `dtype`, the head tied unless the file has one."""

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.path = Path(path)
        self.config, raw = _read(self.path)
        self.dtype = dtype
        c = self.config
        self.layers = []
        for i in range(c.n_layers):
            p = f"blk.{i}."
            q = unpermute(raw[p + "attn_q.weight"], c.heads)
            k = unpermute(raw[p + "attn_k.weight"], c.kv_heads)
            layer = {
                "q": q,
                "k": k,
                "v": raw[p + "attn_v.weight"],
                "o": raw[p + "attn_output.weight"],
                "gate": raw[p + "ffn_gate.weight"],
                "up": raw[p + "ffn_up.weight"],
                "down": raw[p + "ffn_down.weight"],
                "attn_norm": raw[p + "attn_norm.weight"],
                "ffn_norm": raw[p + "ffn_norm.weight"],
            }
            self.layers.append({n: w.to(dtype) for n, w in layer.items()})
        self.embedding = raw["token_embd.weight"].to(dtype)
        self.head = raw["output.weight"].to(dtype) if "output.weight" in raw else self.embedding
        self.norm = raw["output_norm.weight"].to(dtype)
        for layer in self.layers:
            layer["qkv"] = torch.cat([layer["q"], layer["k"], layer["v"]])
            layer["gate_up"] = torch.cat([layer["gate"], layer["up"]])

    def _qkv(self, layer: dict, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        c = self.config
        h = rms_norm(x, layer["attn_norm"], c.eps)
        q, k, v = F.linear(h, layer["qkv"]).split(
            [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim], -1
        )
        b, t = x.shape[:2]
        q = rotate(q.view(b, t, c.heads, c.head_dim), cos, sin)
        k = rotate(k.view(b, t, c.kv_heads, c.head_dim), cos, sin)
        return q, k, v.view(b, t, c.kv_heads, c.head_dim)

    def _finish(self, layer: dict, x: Tensor, attn: Tensor) -> Tensor:
        x = x + F.linear(attn, layer["o"])
        gate, up = F.linear(
            rms_norm(x, layer["ffn_norm"], self.config.eps), layer["gate_up"]
        ).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer["down"])

    def compile(self) -> None:
        """torch.compile for what follows attention; takes a minute at the first call."""
        self._finish = torch.compile(self._finish, dynamic=True)

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        return cos.to(self.dtype)[:, :, None], sin.to(self.dtype)[:, :, None]

    @torch.inference_mode()
    def forward(
        self, ids: Tensor, pad: Tensor, layer_ids: tuple[int, ...] = (), cache=None
    ) -> tuple[Tensor, Tensor]:
        """Whole sequences at once.

        ids [B, T] int64, left-padded with pad [B] entries. Returns the last layer's output before
        the final norm [B, T, H] and the outputs of `layer_ids` [B, T, len, H]. With `cache`
        (pair of [L, B, KV, Tmax, D]) keys and values are stored at 0..T-1.
        """
        c = self.config
        b, t = ids.shape
        steps = torch.arange(t)
        cos, sin = self._tables((steps[None] - pad[:, None]).clamp_min(0))
        mask = (steps[None, :] <= steps[:, None])[None] & (steps[None, None] >= pad[:, None, None])
        mask |= torch.eye(t, dtype=torch.bool)[None]  # padded rows must see something
        mask = mask[:, None]
        x = F.embedding(ids, self.embedding)
        taken = []
        for i, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            if cache is not None:
                cache[0][i, :b, :, :t], cache[1][i, :b, :, :t] = k, v
            groups = c.heads // c.kv_heads
            a = F.scaled_dot_product_attention(
                q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), mask
            )
            x = self._finish(layer, x, a.transpose(1, 2).reshape(b, t, -1))
            if i in layer_ids:
                taken.append(x)
        return x, torch.stack(taken, 2) if taken else x.new_empty(b, t, 0, c.hidden)

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and head: [..., H] -> [..., V]."""
        return F.linear(rms_norm(x, self.norm, self.config.eps), self.head)

    @torch.inference_mode()
    def generate(
        self,
        prompts: list[list[int]],
        max_new: int,
        temperature: Tensor,
        generator: torch.Generator,
        stop: tuple[int, ...] = (),
    ) -> list[list[int]]:
        """Answers for a batch of prompts, the stop token included where one was reached.

        temperature [B] float32, 0 = greedy. Finished rows leave the batch when a third is done.
        """
        c = self.config
        stop = stop or (c.eos,)
        n = len(prompts)
        longest = max(map(len, prompts))
        pad = torch.tensor([longest - len(p) for p in prompts])
        ids = torch.tensor([[c.eos] * (longest - len(p)) + p for p in prompts])
        shape = (c.n_layers, n, c.kv_heads, longest + max_new, c.head_dim)
        cache = [torch.zeros(shape, dtype=self.dtype) for _ in range(2)]
        x, _ = self.forward(ids, pad, cache=cache)
        x = x[:, -1]
        out: list[list[int]] = [[] for _ in prompts]
        rows = torch.arange(n)
        done = torch.zeros(n, dtype=torch.bool)
        for step in range(max_new):
            token = _pick(self.logits(x), temperature, generator)
            for j, (row, t) in enumerate(zip(rows.tolist(), token.tolist(), strict=True)):
                if not done[j]:
                    out[row].append(t)
                    done[j] = t in stop
            if bool(done.all()) or step + 1 == max_new:
                break
            if int(done.sum()) * 3 > len(done):
                keep = (~done).nonzero()[:, 0]
                cache = [k[:, keep] for k in cache]
                rows, pad, done = rows[keep], pad[keep], done[keep]
                temperature, token = temperature[keep], token[keep]
            x = self._decode(token, longest + step, pad, cache)
        return out

    def _decode(self, token: Tensor, at: int, pad: Tensor, cache: list[Tensor]) -> Tensor:
        c = self.config
        b = token.shape[0]
        groups = c.heads // c.kv_heads
        cos, sin = self._tables((at - pad)[:, None])
        bias = torch.zeros(b, 1, 1, at + 1, dtype=self.dtype)
        bias.masked_fill_((torch.arange(at + 1)[None] < pad[:, None])[:, None, None], -math.inf)
        x = F.embedding(token, self.embedding)[:, None]
        for i, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            cache[0][i, :, :, at], cache[1][i, :, :, at] = k[:, 0], v[:, 0]
            a = F.scaled_dot_product_attention(
                q.view(b, c.kv_heads, groups, c.head_dim),
                cache[0][i, :, :, : at + 1],
                cache[1][i, :, :, : at + 1],
                bias.expand(b, 1, groups, at + 1),
            )
            x = self._finish(layer, x, a.reshape(b, 1, -1))
        return x[:, 0]


def _pick(logits: Tensor, temperature: Tensor, generator: torch.Generator) -> Tensor:
    best = logits.argmax(-1)
    hot = temperature > 0
    if not bool(hot.any()):
        return best
    # Gumbel noise: one draw from softmax(logits / T) without normalising 49k columns.
    noise = torch.empty(int(hot.sum()), logits.shape[1]).exponential_(generator=generator).log_()
    best[hot] = (logits[hot].float() / temperature[hot, None] - noise).argmax(-1)
    return best
