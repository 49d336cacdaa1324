"""The target's GGUF: the facts a draft has to fit, and the tokenizer it borrows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InputError
from .gguf_file import ARRAY, STRING, Field, GgufFile, read_gguf
from .schema import (
    DRAFT_GGUF_ARCHITECTURES,
    LAST_LAYER_TAPPED_ARCHITECTURES,
    MASK_TOKEN_KEY,
    NOT_A_MODEL_ARCHITECTURES,
    TAPPED_ARCHITECTURES,
)

TOKENS_KEY = "tokenizer.ggml.tokens"


@dataclass(frozen=True)
class Target:
    """A target model.

    Attributes:
        file: Header of its GGUF.
        architecture: GGUF architecture, such as `qwen35`.
        vocab: Number of tokens.
        hidden: Width of a hidden state.
        layers: Layers without those for multi-token prediction.
        mrope: Whether positions have several dimensions (M-RoPE).
    """

    file: GgufFile
    architecture: str
    vocab: int
    hidden: int
    layers: int
    mrope: bool

    @property
    def path(self) -> Path:
        """The GGUF file."""
        return self.file.path

    @property
    def tokenizer(self) -> dict[str, Field]:
        """The keys a draft takes over, exactly as stored; the mask token is the draft's own."""
        return {
            key: field
            for key, field in self.file.fields.items()
            if key.startswith("tokenizer.") and key != MASK_TOKEN_KEY
        }

    @property
    def parameters(self) -> int:
        """Number of weights in this file."""
        return sum(t.elements for t in self.file.tensors.values())

    @property
    def has_embedding(self) -> bool:
        """Whether the token embedding is in this file (it may be in another part of a split)."""
        return "token_embd.weight" in self.file.tensors

    @property
    def is_split(self) -> bool:
        """Whether the model is spread over several files."""
        return (self.file.integer("split.count") or 1) > 1

    @property
    def gives_layer_inputs(self) -> bool:
        """Whether the base can hand this architecture's hidden states to a draft."""
        return self.architecture in TAPPED_ARCHITECTURES

    @property
    def gives_last_output(self) -> bool:
        """Whether the base can hand over the output of the last layer, too."""
        return self.architecture in LAST_LAYER_TAPPED_ARCHITECTURES


def read_target(path: Path | str) -> Target:
    """Read a target's GGUF.

    Raises:
        InputError: Not a GGUF of a language model with a tokenizer.
    """
    path = Path(path)
    if path.is_dir():
        found = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"there is `{path / found[0]}`" if found else "convert the target to GGUF first"
        raise InputError(f"`{path}` is a directory, expected the target's GGUF file", hint=hint)
    file = read_gguf(path)
    arch = file.architecture
    if not arch:
        raise InputError(f"`{path}` names no architecture, expected the GGUF of a target")
    kind = file.get("general.type", "model")
    if arch in DRAFT_GGUF_ARCHITECTURES:
        raise InputError(
            f"`{path}` is a draft (architecture `{arch}`), expected the GGUF of its target"
        )
    if arch in NOT_A_MODEL_ARCHITECTURES or kind != "model":
        what = f"architecture `{arch}`, type `{kind}`"
        raise InputError(f"`{path}` is not a language model ({what}), expected a target")
    part = file.integer("split.no") or 0
    if part > 0:
        raise InputError(f"`{path}` is part {part + 1} of a split model, expected the first part")
    tokens = file.fields.get(TOKENS_KEY)
    if tokens is None or tokens.type != ARRAY or tokens.item_type != STRING or not tokens.count:
        raise InputError(f"`{path}` has no tokenizer, expected the GGUF of a language model")
    hidden = _number(file, f"{arch}.embedding_length")
    layers = _number(file, f"{arch}.block_count")
    prediction_layers = file.integer(f"{arch}.nextn_predict_layers") or 0
    target = Target(
        file=file,
        architecture=arch,
        vocab=tokens.count,
        hidden=hidden,
        layers=layers - prediction_layers,
        mrope=_uses_mrope(file.get(f"{arch}.rope.dimension_sections")),
    )
    if not file.tensors and not target.is_split:
        raise InputError(f"`{path}` has a tokenizer but no weights, expected a whole model")
    return target


def _number(file: GgufFile, key: str) -> int:
    value = file.integer(key)
    if value is None or value < 1:
        raise InputError(f"`{file.path}` has no usable `{key}`, expected the GGUF of a target")
    return value


def _uses_mrope(sections: Any) -> bool:
    return isinstance(sections, list) and any(isinstance(s, int) and s > 0 for s in sections)
