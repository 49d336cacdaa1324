"""The target: the facts a draft has to fit, and the tokenizer it borrows.

It is given as its GGUF, or as its Hugging Face directory; of the latter the header is made here
that its GGUF would have.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InputError
from .families import FAMILIES
from .gguf_file import ARRAY, DEFAULT_ALIGNMENT, STRING, Field, GgufFile, make_field, read_gguf
from .keys import KeyReader, load_json
from .schema import (
    ARCHITECTURES,
    DRAFT_GGUF_ARCHITECTURES,
    LAST_LAYER_TAPPED_ARCHITECTURES,
    MASK_TOKEN_KEY,
    NOT_A_MODEL_ARCHITECTURES,
    TAPPED_ARCHITECTURES,
)
from .tokenizer import read_tokenizer

TOKENS_KEY = "tokenizer.ggml.tokens"

_MAX_SIZE = 2**31 - 1
_MAX_VOCAB = 2**21  # a made-up size must not become that many unused tokens


@dataclass(frozen=True)
class Target:
    """A target model.

    Attributes:
        file: Header of its GGUF; without tensors for a directory.
        architecture: GGUF architecture, such as `qwen35`.
        vocab: Number of tokens.
        hidden: Width of a hidden state.
        layers: Layers without those for multi-token prediction.
        mrope: Whether positions have several dimensions (M-RoPE).
        is_directory: Given as a Hugging Face directory.
    """

    file: GgufFile
    architecture: str
    vocab: int
    hidden: int
    layers: int
    mrope: bool
    is_directory: bool = False

    @property
    def path(self) -> Path:
        """The GGUF file or the directory."""
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
        """Number of weights in this file, 0 for a directory."""
        return sum(t.elements for t in self.file.tensors.values())

    @property
    def has_embedding(self) -> bool:
        """Whether the token embedding is in this file (it may be in another part of a split)."""
        return self.is_directory or "token_embd.weight" in self.file.tensors

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


def read_target(path: Path | str, *, name: str | None = None) -> Target:
    """Read a target's GGUF, or the config and the tokenizer in its Hugging Face directory.

    Args:
        name: Hub id of the directory; None to use its own name.

    Raises:
        InputError: Not a language model with a tokenizer, or a directory whose family or tokenizer
            is not known.
    """
    path = Path(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return _read_directory(path, name)
        found = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"there is `{path / found[0]}`" if found else "convert the target to GGUF first"
        raise InputError(
            f"`{path}` has no config.json, expected the target's directory or its GGUF file",
            hint=hint,
        )
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


def _read_directory(path: Path, name: str | None) -> Target:
    config = load_json(path / "config.json")
    inner = config.get("text_config")
    inner = inner if isinstance(inner, dict) else {}
    found = _architecture(path, config, inner)
    family = FAMILIES.get(found)
    if family is None:
        raise InputError(
            f"`{path}` is a {found}, whose tokenizer is not known here",
            hint="convert the target to GGUF and give that: `--target TARGET.gguf`",
        )
    keys = KeyReader({**config, **inner})
    hidden = keys.top("hidden_size", int, low=1, high=_MAX_SIZE)
    layers = keys.top("num_hidden_layers", int, low=1, high=_MAX_SIZE)
    vocab = keys.top("vocab_size", int, low=1, high=_MAX_VOCAB)
    rope = keys.top("rope_parameters", dict, None) or keys.top("rope_scaling", dict, None) or {}
    if keys.problems:
        raise InputError(
            f"`{path / 'config.json'}` does not describe a target", problems=keys.problems
        )
    org, _, short = name.rpartition("/") if name else ("", "", path.resolve().name)
    arch = family.architecture
    fields = {
        "general.architecture": make_field("str", arch),
        "general.type": make_field("str", "model"),
        "general.name": make_field("str", short),
        **({"general.organization": make_field("str", org)} if org else {}),
        f"{arch}.embedding_length": make_field("u32", hidden),
        f"{arch}.block_count": make_field("u32", layers),
        **read_tokenizer(path, config, vocab, family),
    }
    file = GgufFile(path, 0, 3, DEFAULT_ALIGNMENT, fields, {})
    return Target(
        file=file,
        architecture=arch,
        vocab=fields[TOKENS_KEY].count,
        hidden=hidden,
        layers=layers,
        mrope=family.mrope or "mrope_section" in rope,
        is_directory=True,
    )


def _architecture(path: Path, config: dict[str, Any], inner: dict[str, Any]) -> str:
    for names in (inner.get("architectures"), config.get("architectures")):
        if isinstance(names, list) and names and isinstance(names[0], str):
            if names[0] in ARCHITECTURES:
                raise InputError(f"`{path}` is a draft ({names[0]}), expected its target")
            return names[0]
    raise InputError(f"`{path / 'config.json'}` names no architecture, expected that of a target")
