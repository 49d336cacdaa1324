"""BIGRAM: a constructed pair whose text is known in advance, so that drafting becomes a number.

The target's next token is a fixed function of the last one: every token belongs to one of
`N_CLASSES` classes, and the next token is the one that stands for the following class. The draft
encodes the same function, but needs everything to be wired as in training, or it loses acceptance:

* attention to the anchor's embedding decides which candidates get a high logit (the next `top_k`
  classes, all tied);
* the selector's codebooks decide among them, so the walk must start at the anchor and follow its
  own choices;
* the selector's gate is positive only if the features are the right target layers in the right
  order, because every target layer adds a constant of its own to the residual stream.

All of it sits on separate coordinates of the hidden state, so sums are exact and the acceptance is
exactly 100 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from tiny_checkpoint import draft_config, draft_tensors, make_draft_checkpoint

N_CLASSES = 64
HEAD_DIM = 64  # of the draft: one value per class

# coordinates of the hidden state
CLASS, WINDOW = 0, N_CLASSES  # which class a token has; which classes come next
DRIFT = 2 * N_CLASSES  # what the target's mixers add for each class
TOKEN, MASK, CONTEXT, GATE, FLAG = (3 * N_CLASSES + i for i in range(5))  # FLAG + i: layer i
SPARE = 224  # nothing above depends on these: room for random values

# drift is kept this small in the hidden state, so that norms and with them the flags hardly change
_FAINT = 1e-3


@dataclass(frozen=True)
class Bigram:
    """A constructed pair and what it must do."""

    target: Path
    draft: Path
    checkpoint: Path
    classes: np.ndarray  # [n_vocab] class of each token
    cycle: np.ndarray  # [N_CLASSES] the token that stands for each class
    wrong: np.ndarray  # [N_CLASSES] bool: the draft proposes a wrong successor of this class
    block: int
    top_k: int

    def next_token(self, token: int) -> int:
        """The target's next token (without drift)."""
        return int(self.cycle[(self.classes[token] + 1) % N_CLASSES])

    def text(self, token: int, n: int) -> list[int]:
        """The n tokens that follow `token` (without drift)."""
        out = []
        for _ in range(n):
            token = self.next_token(token)
            out.append(token)
        return out

    def accepted(self, anchor: int, n_draft: int) -> int:
        """Draft tokens that a round after `anchor` gets accepted (without drift)."""
        first = int(self.classes[anchor])
        steps = self.wrong[(first + np.arange(n_draft)) % N_CLASSES]
        return int(np.argmax(steps)) if steps.any() else n_draft


def make_bigram(
    directory: Path | str,
    arch: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "f32",
    outtype: str = "f32",
    wrong: float = 0.0,
    drift: float = 0.0,
    busy: bool = False,
    ends: bool = False,
    target_head_dim: int = 48,
    top_k: int = 16,
    target_layer_ids: tuple[int, ...] = (0, 2),
    **draft: Any,
) -> Bigram:
    """Write target, checkpoint and draft.

    Args:
        directory: where to write.
        arch: architecture of the target.
        seed: of everything random: which tokens stand for which class, the wrong classes, the
            drift.
        dtype, outtype: types of the target's and the draft's matrices.
        wrong: share of the classes whose successor the draft gets wrong (it proposes the one
            after).
        drift: strength of the target's attention and recurrent layers, which are off at 0. At 0.28
            (qwen35: 0.15) many next tokens depend on the context and rounds accept any number of
            tokens, so text and acceptance show whether state was kept right.
        busy: give the draft random weights that read everything and write to coordinates of their
            own: hidden states then depend on all features, while the proposals stay.
        ends: one of the classes is the end of the text, which then stands inside blocks.
        target_head_dim: of the target's attention; a multiple of 32 allows quantised memory.
        top_k: candidates per position.
        target_layer_ids: taps of the draft.
        draft: further arguments of `make_draft_checkpoint`, for instance block, layers,
            layer_types, is_causal.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    spec = tiny.TargetSpec(arch=arch, n_layer=5, head_dim=target_head_dim)
    vocab = spec.make_vocab()
    rng = np.random.default_rng([seed, 7])
    cycle = rng.permutation(np.array(vocab.text_ids))[:N_CLASSES]
    if ends:
        cycle[N_CLASSES // 2] = vocab.eos
    classes = rng.integers(0, N_CLASSES, spec.n_vocab)
    classes[cycle] = np.arange(N_CLASSES)
    bad = np.zeros(N_CLASSES, bool)
    bad[rng.permutation(N_CLASSES)[: round(wrong * N_CLASSES)]] = True

    tensors = _target(spec, seed, classes, cycle, vocab.mask, drift)
    target = tiny.write_target(directory / "target.gguf", spec, tensors, dtype=dtype)
    options: dict[str, Any] = {
        "hidden": spec.n_embd,
        "vocab": spec.n_vocab,
        "layers": 2,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": HEAD_DIM,
        "rank": top_k,
        "top_k": top_k,
        "n_target_layers": spec.n_layer,
        "target_layer_ids": target_layer_ids,
        "mask_token_id": vocab.mask,
        "sliding_window": 64,
        **tiny.output_options(spec),
    } | draft
    config = draft_config(dtype="f32", **options)
    random = draft_tensors(config, seed=seed)
    weights = _draft(config, random, classes, cycle, bad)
    if busy:
        _add_noise(weights, random)
    checkpoint = make_draft_checkpoint(
        directory / "checkpoint", dtype="f32", tensors=weights, **options
    )
    file = tiny.convert_draft(checkpoint, target, directory / f"draft-{outtype}.gguf", outtype)
    block = int(options.get("block", config["dflash_config"]["block_size"]))
    return Bigram(target, file, checkpoint, classes, cycle, bad, block, top_k)


def _target(
    spec: tiny.TargetSpec,
    seed: int,
    classes: np.ndarray,
    cycle: np.ndarray,
    mask: int,
    drift: float,
) -> dict[str, np.ndarray]:
    tensors = dict(tiny.random_tensors(spec, seed))
    embd = np.zeros((spec.n_vocab, spec.n_embd), np.float32)
    embd[np.arange(spec.n_vocab), CLASS + classes] = 1.0
    embd[:, TOKEN] = 1.0
    embd[mask] = 0.0
    embd[mask, MASK] = 1.0
    embd /= np.float32(spec.embedding_scale)
    head = np.zeros_like(embd)
    head[np.roll(cycle, -1), CLASS + np.arange(N_CLASSES)] = 4.0
    head[cycle, WINDOW + np.arange(N_CLASSES)] = 1.0
    head[cycle, DRIFT + np.arange(N_CLASSES)] = 4.0 / _FAINT
    tensors["token_embd.weight"], tensors["output.weight"] = embd, head
    for name, values in tensors.items():
        if name.endswith("norm.weight") and "_q_" not in name and "_k_" not in name:
            tensors[name] = np.ones_like(values)
        elif "attn_output" in name or "ssm_out" in name:
            moved = np.zeros_like(values)
            # where a norm follows, that one makes it faint
            faint = 1.0 if spec.arch == "gemma4" else _FAINT * drift
            moved[DRIFT : DRIFT + N_CLASSES] = faint * values[:N_CLASSES]
            tensors[name] = moved
        elif "attn_v" in name or "attn_qkv" in name:
            # only differences between classes count, or the same class would be favoured everywhere
            seen = values[:, CLASS : CLASS + N_CLASSES]
            centred = np.zeros_like(values)
            centred[:, CLASS : CLASS + N_CLASSES] = seen - seen.mean(axis=1, keepdims=True)
            tensors[name] = centred
    for i in range(spec.n_layer):
        # the normalised token coordinate is the same for every token: a constant comes out
        scale = np.sqrt(spec.n_embd / (2.0 + i))
        for part in ("gate", "up", "down"):
            tensors[f"blk.{i}.ffn_{part}.weight"] *= 0.0
        tensors[f"blk.{i}.ffn_gate.weight"][0, TOKEN] = 1.0 / scale
        tensors[f"blk.{i}.ffn_up.weight"][0, TOKEN] = 1.0 / scale
        tensors[f"blk.{i}.ffn_down.weight"][FLAG + i, 0] = 1.0 + np.exp(-1.0)  # 1 / silu(1)
        if spec.arch == "gemma4":
            # of length one per value, what attention adds is some five times that of `llama`
            tensors[f"blk.{i}.post_attention_norm.weight"][:] = 0.2 * _FAINT * drift
            # the one value that is not zero comes out as the root of the size
            tensors[f"blk.{i}.post_ffw_norm.weight"][:] = 1.0 / np.sqrt(spec.n_embd)
            tensors[f"blk.{i}.layer_output_scale.weight"][:] = 1.0
    return tensors


def _draft(
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    classes: np.ndarray,
    cycle: np.ndarray,
    bad: np.ndarray,
) -> dict[str, np.ndarray]:
    own = config["dflash_config"]
    ids, k, rank = own["target_layer_ids"], own["selector_top_k"], own["selector_rank"]
    hidden = config["hidden_size"]
    weights = {name: np.zeros_like(values) for name, values in weights.items()}
    for name, values in weights.items():
        if name.endswith("norm.weight"):
            values[:] = 2.0 if "q_norm" in name or "k_norm" in name else 1.0
        elif name.endswith("base_kernel"):
            values[:, 0] = 1.0

    # features: a constant, and a gate that is +0.5 with the right taps and negative otherwise
    fc = weights["fc.weight"]
    fc[CONTEXT, TOKEN] = 1.0
    fc[GATE, TOKEN] = 0.5 - len(ids)
    for tap, layer in enumerate(ids):
        fc[GATE, tap * hidden + FLAG + layer] = 1.0
        fc[GATE, tap * hidden + FLAG + layer + 1] = -2.0

    # head 0 looks at the anchor only, head 1 at the context only; the slowest rotation hardly
    # depends on distance
    attention = "layers.0.self_attn."
    slow = HEAD_DIM // 2 - 1
    q, key, v, o = (weights[f"{attention}{p}_proj.weight"] for p in "qkvo")
    for head in (0, 1):
        # the anchor's own row looks away, so nothing good comes from rows that are off by one
        q[head * HEAD_DIM + slow, [MASK, TOKEN]] = 1.0, -1.0
    key[slow, [TOKEN, MASK, CONTEXT]] = 1.0, -1.0, -1.0
    key[HEAD_DIM + slow, [TOKEN, MASK, CONTEXT]] = -1.0, -1.0, 1.0
    v[np.arange(N_CLASSES), CLASS + np.arange(N_CLASSES)] = 1.0
    v[HEAD_DIM, GATE] = 1.0
    # convolution: the side after attention turns the gate's sign back and gets the window's weight
    # from the input
    base, projection = (
        weights[f"layers.0.attention_conv.{p}"] for p in ("base_kernel", "kernel_projection.weight")
    )
    base[1, 0, GATE] = -1.0
    base[1, 0, WINDOW : WINDOW + N_CLASSES] = 0.0
    n_groups, first = hidden // own["conv_group_size"], WINDOW // own["conv_group_size"]
    n_window = N_CLASSES // own["conv_group_size"]
    side = projection.reshape(2, own["conv_kernel_size"], n_groups, hidden)[1, 0]
    side[first : first + n_window, MASK] = 1.0 / np.sqrt(hidden)
    for step in range(1, k + 1):
        o[WINDOW + (np.arange(N_CLASSES) + step) % N_CLASSES, np.arange(N_CLASSES)] = 1.0 / 12
    o[GATE, HEAD_DIM] = -1.0 / 12

    predecessor = weights["candidate_selector.predecessor_codebook"]
    successor = weights["candidate_selector.successor_codebook"]
    chosen = classes + 1 + bad[classes]
    predecessor[np.arange(len(classes)), chosen % N_CLASSES % rank] = 1.0
    successor[cycle, np.arange(N_CLASSES) % rank] = 1.0
    weights["candidate_selector.hidden_projection.weight"][:, GATE] = 1.0
    return weights


def _add_noise(weights: dict[str, np.ndarray], random: dict[str, np.ndarray]) -> None:
    """Random values wherever they end in the spare coordinates only."""
    for name, values in weights.items():
        if name == "fc.weight" or name.endswith(("o_proj.weight", "down_proj.weight")):
            values[SPARE:] = random[name][SPARE:]
        elif "gate_proj" in name or "up_proj" in name:
            values[:] = random[name]
        elif name.startswith("layers.1.") and "norm" not in name and "_conv" not in name:
            if not name.endswith(("o_proj.weight", "down_proj.weight")):
                values[:] = random[name]
        elif name.endswith("base_kernel"):
            values[..., SPARE:] = random[name][..., SPARE:]
