"""Pairs with random weights in the shapes of real ones, for measurements of time and memory.

The target has few and narrow layers: only its embedding, which is also its head, has the real size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_convert.checkpoint import Checkpoint, SourceTensor
from dflash_convert.config import DraftConfig, read_config
from dflash_convert.console import Console
from dflash_convert.gguf_file import Field, make_field
from dflash_convert.plan import PlannedKey, PlannedTensor, build_plan
from dflash_convert.schema import layer_name, rules_for
from dflash_convert.target import read_target
from dflash_convert.tensor_types import TENSOR_TYPES, FileType, out_type
from dflash_convert.write import check_output, new_file, write_tensors

if TYPE_CHECKING:
    import numpy as np

_VERSION = 1  # of what is written; part of the names of the files
_TARGET_ARCH = "llama"
_POOL = 33_554_393  # random values that all tensors are cut from; a prime, so that no rows repeat
_MASK_FROM_END = 250
_BYTES = 256

# Spread of a matrix's values times the root of its row; all others have 1.
_GAINS = {
    "token_embd.weight": 3.0,
    "candidate_selector.predecessor_codebook": 4.0,
    "candidate_selector.successor_codebook": 4.0,
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a draft and of the little target it reads."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    window: int
    rank: int
    inputs: int  # target layers whose outputs are fused
    rope_theta: float
    block: int = 8
    taps: int = 2
    group: int = 16
    top_k: int = 16
    target_heads: int = 4
    target_ffn: int = 1024
    draft_vocab: int = 0  # tokens of the draft's own head; 0: the target's head

    @property
    def target_layers(self) -> int:
        """Layers of the target: the output of the last one is not read."""
        return self.inputs + 1

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the draft."""
        return {
            "architectures": ["DFlash2DraftModel"],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "num_target_layers": self.target_layers,
            "layer_types": ["sliding_attention"] * self.layers,
            "use_sliding_window": True,
            "sliding_window": self.window,
            "is_causal": False,
            **({"draft_vocab_size": self.draft_vocab} if self.draft_vocab else {}),
            "dflash_config": {
                "target_layer_ids": list(range(self.inputs)),
                "mask_token_id": self.vocab - _MASK_FROM_END,
                "block_size": self.block,
                "conv_kernel_size": self.taps,
                "conv_group_size": self.group,
                "selector_rank": self.rank,
                "selector_top_k": self.top_k,
            },
        }


SHAPES = {
    # Qwen3.8-27B-DFlash2
    "real": Shape(5120, 5, 32, 8, 128, 17408, 248320, 2048, 256, 5, 1e7),
    # the demo's draft for SmolLM2-135M
    "demo-like": Shape(576, 3, 9, 3, 64, 1536, 49152, 512, 32, 4, 1e5),
}


@dataclass(frozen=True)
class _RandomTensor(SourceTensor):
    """A tensor of a checkpoint that is nowhere stored."""

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` values from element `start` on; the same at every call."""
        import numpy as np

        if len(self.shape) == 1:
            return np.ones(count, np.float32)
        pool = _pool()
        first = (self.offset + start) % _POOL
        end = first + count
        values = np.concatenate([pool[first:end], pool[: max(0, end - _POOL)]])
        # kernels of the convolution stand by themselves, rows of a matrix are added up
        spread = 0.5 if len(self.shape) > 2 else _GAINS.get(self.name, 1.0) / sqrt(self.row)
        return values * np.float32(spread)


@dataclass(frozen=True)
class _SpreadIds(SourceTensor):
    """Tokens evenly spread over the vocabulary, as a checkpoint's `d2t` has them."""

    step: int = 1

    def read(self, start: int, count: int) -> np.ndarray:
        """Return the tokens less their numbers."""
        import numpy as np

        return np.arange(start, start + count, dtype=np.int64) * (self.step - 1)


@lru_cache(maxsize=1)
def _pool() -> np.ndarray:
    import numpy as np

    return np.random.default_rng(0).standard_normal(_POOL, np.float32)


def _tensor(name: str, shape: tuple[int, ...]) -> _RandomTensor:
    offset = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") % _POOL
    return _RandomTensor(name, name, Path(), "F32", shape, offset)


def random_pair(
    shape: str, kind: str, folder: Path, console: Console, draft_vocab: int = 0
) -> tuple[Path, Path]:
    """Write a random pair, unless it is in the folder already.

    Args:
        shape: Of `SHAPES`.
        kind: Type of the matrices of both, such as `q8_0`.
        folder: Made if it is not there.
        console: For progress.
        draft_vocab: Tokens of the draft's own vocabulary; 0 for the target's.

    Returns:
        Target and draft.

    Raises:
        InputError: The type needs ggml's library, and it is missing.
        FailureError: Not enough space.
    """
    sizes, out = SHAPES[shape], out_type(kind)
    target_stem = f"random-{shape}-{_digest(sizes)}"
    sizes = replace(sizes, draft_vocab=draft_vocab)
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"random-{shape}-{_digest(sizes)}"
    target = folder / f"{target_stem}-{out.name.upper()}.gguf"
    draft = folder / f"dflash-{stem}-{out.name.upper()}.gguf"
    missing = [p for p in (target, draft) if not p.exists()]
    if missing:
        tensors = list(_target_tensors(sizes, out))
        nbytes = sum(t.nbytes for t in tensors)
        config = read_config(sizes.config, target_layers=sizes.target_layers)
        checkpoint = _checkpoint(sizes, config)
        both = nbytes + sum(out.base.nbytes(t.elements) for t in checkpoint.tensors.values())
        check_output(missing[0], force=True, nbytes=both if target in missing else both - nbytes)
        if target in missing:
            _write(target, _TARGET_ARCH, _target_keys(sizes, out), tensors, console)
        plan = build_plan(checkpoint, config, read_target(target), out.name)
        _write(draft, "dflash", plan.keys, plan.tensors, console)
        _pool.cache_clear()
    return target, draft


def _digest(sizes: Shape) -> str:
    return hashlib.sha256(f"{_VERSION} {sizes}".encode()).hexdigest()[:8]


def _checkpoint(sizes: Shape, config: DraftConfig) -> Checkpoint:
    tensors: dict[str, SourceTensor] = {}
    for rule, layer in rules_for(config.version, config.layers):
        if not rule.optional:
            name = layer_name(rule.source, layer)
            tensors[name] = _tensor(name, tuple(getattr(config, size) for size in rule.shape))
    if sizes.draft_vocab:
        head, n = "lm_head.weight", sizes.draft_vocab
        tensors[head] = _tensor(head, (n, sizes.hidden))
        step = sizes.vocab // n
        tensors["d2t"] = _SpreadIds("d2t", "d2t", Path(), "I64", (n,), 0, step=step)
    return Checkpoint(Path("random"), sizes.config, (), tensors)


def _write(
    path: Path,
    arch: str,
    keys: tuple[PlannedKey, ...],
    tensors: list[PlannedTensor] | tuple[PlannedTensor, ...],
    console: Console,
) -> None:
    nbytes = sum(t.nbytes for t in tensors)
    with (
        new_file(path, force=True, nbytes=nbytes) as part,
        console.progress(f"writing {path.name}", nbytes) as ticker,
    ):
        write_tensors(part, arch, keys, tensors, ticker)


# --- the target -----------------------------------------------------------------------------------


def _target_tensors(sizes: Shape, out: FileType) -> Iterator[PlannedTensor]:
    hidden, ffn = sizes.hidden, sizes.target_ffn
    width = sizes.target_heads * sizes.head_dim
    layer = {
        "attn_norm": (hidden,),
        "attn_q": (width, hidden),
        "attn_k": (width, hidden),
        "attn_v": (width, hidden),
        "attn_output": (hidden, width),
        "ffn_norm": (hidden,),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (sizes.vocab, hidden),
        "output_norm.weight": (hidden,),
    }
    for i in range(sizes.target_layers):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    for name, shape in shapes.items():
        kind = TENSOR_TYPES["f32"] if len(shape) == 1 else out.base
        yield PlannedTensor(name, shape, kind, _tensor(name, shape))


def _target_keys(sizes: Shape, out: FileType) -> tuple[PlannedKey, ...]:
    numbers = {
        "block_count": sizes.target_layers,
        "context_length": 32768,
        "embedding_length": sizes.hidden,
        "feed_forward_length": sizes.target_ffn,
        "attention.head_count": sizes.target_heads,
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
        "rope.dimension_count": sizes.head_dim,
        "vocab_size": sizes.vocab,
    }
    return (
        PlannedKey("general.name", "str", "random"),
        PlannedKey("general.file_type", "u32", out.number),
        *(PlannedKey(f"{_TARGET_ARCH}.{k}", "u32", v) for k, v in numbers.items()),
        PlannedKey(f"{_TARGET_ARCH}.attention.layer_norm_rms_epsilon", "f32", 1e-6),
        *(PlannedKey(f"tokenizer.ggml.{k}", field=v) for k, v in _tokenizer(sizes.vocab).items()),
    )


def _tokenizer(size: int) -> dict[str, Field]:
    """A byte-level vocabulary whose further tokens no text is ever made of: it loads quickly."""
    # GPT-2 spells a byte by its own character if that is printable, else by one above U+00FF.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = [chr(b) for b in printable] + [
        chr(_BYTES + i) for i in range(_BYTES - len(printable))
    ]
    tokens = [*symbols, "ab", *(f"t{i}" for i in range(size - _BYTES - 1))]
    return {
        "model": make_field("str", "gpt2"),
        "pre": make_field("str", "gpt-2"),
        "tokens": make_field("str[]", tokens),
        "token_type": make_field("i32[]", [1] * size),
        "merges": make_field("str[]", ["a b"]),
        "bos_token_id": make_field("u32", size - 1),
        "eos_token_id": make_field("u32", size - 2),
    }
