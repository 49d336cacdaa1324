"""Which type each matrix gets: llama-quantize's mixes, this project's floors, the user's rules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import InputError
from .tensor_types import TENSOR_TYPES, FileType, TensorType, tensor_type

# Tensors that every token of a draft depends on, and small beside the layers: never below this
# type unless the user says so.
FLOOR_TENSORS = ("fc.weight", "selector_predecessor.weight", "selector_successor.weight")
_FLOOR = TENSOR_TYPES["q8_0"]

# The codebooks are read row by row (ggml_get_rows). ggml's CPU backend can do that for every type,
# its CUDA backend for all but these,
_NOT_GATHERED = ("tq1_0", "tq2_0", "nvfp4")
# and for these in rows of whole super-blocks only.
_GATHERED_BY_SUPER_BLOCK = ("iq4_nl", "mxfp4")
_SUPER_BLOCK = 256
GATHERED_TENSORS = ("selector_predecessor.weight", "selector_successor.weight")

# What llama-quantize takes when a type's blocks do not divide the rows; F16 when these do not
# either, and for the types of small blocks that are not listed.
_FALLBACKS = {
    "iq3_s": "iq4_nl",
    "iq4_xs": "iq4_nl",
    "q2_0": "q4_0",
    "q2_k": "q4_0",
    "q3_k": "q4_0",
    "tq1_0": "q4_0",
    "tq2_0": "q4_0",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
}
_SMALL_BLOCK = 32


@dataclass(frozen=True)
class Draft:
    """What of a draft llama-quantize's mixes depend on.

    Attributes:
        layers: Number of layers.
        gqa: Query heads per key-value head.
        own_head: Whether there is an `output.weight`; without one the embedding serves as head.
    """

    layers: int
    gqa: int
    own_head: bool


@dataclass(frozen=True)
class TypeRule:
    """A `--tensor-type REGEX=TYPE` of the user."""

    pattern: re.Pattern[str]
    type: TensorType

    def matches(self, name: str) -> bool:
        """Tell whether the pattern occurs in a tensor's name."""
        return self.pattern.search(name) is not None


def parse_rules(texts: Sequence[str]) -> tuple[TypeRule, ...]:
    """Read rules such as `ffn_down=q6_k` or `^blk\\.0\\.=q8_0`.

    Raises:
        InputError: No `=`, a pattern that is no regular expression, or an unknown type.
    """
    rules = []
    for text in texts:
        pattern, equals, name = text.rpartition("=")
        if not equals or not pattern:
            raise InputError(f"`--tensor-type {text}` is not of the form REGEX=TYPE")
        try:
            compiled = re.compile(pattern)
        except re.error as exc:
            raise InputError(
                f"`{pattern}` in `--tensor-type` is not a regular expression ({exc})"
            ) from None
        rules.append(TypeRule(compiled, tensor_type(name)))
    return tuple(rules)


def check_rules(rules: Sequence[TypeRule], matrices: Sequence[str], others: Sequence[str]) -> None:
    """Check that every rule applies to something.

    Args:
        matrices: Names of the tensors whose type can be chosen.
        others: Names of those that llama.cpp wants as they are.

    Raises:
        InputError: Listing the rules that match no matrix.
    """
    problems = []
    for rule in rules:
        if any(map(rule.matches, matrices)):
            continue
        fixed = [name for name in others if rule.matches(name)]
        problems.append(
            f"`{rule.pattern.pattern}` matches no tensor"
            if not fixed
            else f"`{rule.pattern.pattern}` matches only tensors whose type is fixed (`{fixed[0]}`)"
        )
    if problems:
        raise InputError(
            "a `--tensor-type` is without effect",
            problems=problems,
            hint="`--dry-run` without it lists the names",
        )


def choose(
    name: str, row: int, file_type: FileType, draft: Draft, rules: Sequence[TypeRule] = ()
) -> tuple[TensorType, TensorType]:
    """Choose the type of a matrix.

    Args:
        name: Name in the GGUF.
        row: Elements per row.
        rules: Of these the last that matches decides.

    Returns:
        The type that is wanted, and the type to write: another one when the blocks of the wanted
        type do not divide the rows.

    Raises:
        InputError: llama.cpp cannot read the tensor in the type that a rule names, or nothing is
            defined to fall back on.
    """
    asked = next((rule.type for rule in reversed(rules) if rule.matches(name)), None)
    wanted = asked or _default(name, row, file_type, draft)
    written = _fitting(name, row, wanted)
    if name in GATHERED_TENSORS:
        _require_gathered(name, row, written)
    return wanted, written


def _default(name: str, row: int, file_type: FileType, draft: Draft) -> TensorType:
    base = file_type.base
    if not base.quantized:
        return base
    if name in FLOOR_TENSORS:
        return _FLOOR
    layer, part = _split(name)
    if name == "output.weight" or (name == "token_embd.weight" and not draft.own_head):
        return _head(row, base)
    other = _MIX.get(part, lambda *_: None)(file_type.name, layer, draft)
    return base if other is None else TENSOR_TYPES[other]


def _split(name: str) -> tuple[int, str]:
    """Split `blk.3.attn_v.weight` into 3 and `attn_v.weight`."""
    if not name.startswith("blk."):
        return 0, name
    _, layer, part = name.split(".", 2)
    return int(layer), part


def _head(row: int, base: TensorType) -> TensorType:
    if base.name == "q8_0" or not base.divides(row):
        return TENSOR_TYPES["q8_0"]
    return TENSOR_TYPES["q6_k"]


def _embedding(file_type: str, layer: int, draft: Draft) -> str | None:
    return "q4_k" if file_type in ("tq1_0", "tq2_0", "q2_0") else None


def _more_bits(layer: int, layers: int) -> bool:
    """The layers that the _M mixes spend more on: the first and last eighth, and every third."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _attn_v(file_type: str, layer: int, draft: Draft) -> str | None:
    grouped = draft.gqa >= 4
    match file_type:
        case "q2_k":
            return "q4_k" if grouped else "q3_k"
        case "iq3_s":
            return "q4_k" if grouped else None
        case "iq3_m":
            return "q4_k"
        case "q3_k_m":
            return "q5_k" if layer < 2 else "q4_k"
        case "q3_k_l":
            return "q5_k"
        case "iq4_nl" | "iq4_xs":
            return "q5_k" if grouped else None
        case "q4_k_m" | "q5_k_m":
            return "q6_k" if _more_bits(layer, draft.layers) else None
        case "q4_k_s":
            return "q5_k" if layer < 4 else None
    return None


def _ffn_down(file_type: str, layer: int, draft: Draft) -> str | None:
    first_eighth = layer < draft.layers // 8
    match file_type:
        case "q2_k":
            return "q3_k"
        case "q3_k_m":
            return "q5_k" if layer < draft.layers // 16 else "q4_k"
        case "q3_k_l":
            return "q5_k"
        case "iq3_m":
            return "q4_k" if first_eighth else None
        case "q4_k_m" | "q5_k_m":
            return "q6_k" if _more_bits(layer, draft.layers) else None
        case "q4_k_s" | "iq4_nl" | "iq4_xs":
            return "q5_k" if first_eighth else None
    return None


def _attn_output(file_type: str, layer: int, draft: Draft) -> str | None:
    return {"q2_k": "q3_k", "q3_k_m": "q4_k", "q3_k_l": "q5_k", "iq3_m": "q4_k"}.get(file_type)


_MIX = {
    "token_embd.weight": _embedding,
    "attn_v.weight": _attn_v,
    "ffn_down.weight": _ffn_down,
    "attn_output.weight": _attn_output,
}


def _fitting(name: str, row: int, wanted: TensorType) -> TensorType:
    if wanted.divides(row):
        return wanted
    if wanted.block > _SMALL_BLOCK and wanted.name not in _FALLBACKS:
        raise InputError(
            f"`{name}` has rows of {row}, which {wanted.name}'s blocks of {wanted.block} do not "
            "divide, and llama-quantize knows no other type for that",
            hint=f"choose one: `--tensor-type {re.escape(name)}=q8_0`",
        )
    other = TENSOR_TYPES[_FALLBACKS.get(wanted.name, "f16")]
    return other if other.divides(row) else TENSOR_TYPES["f16"]


def _require_gathered(name: str, row: int, written: TensorType) -> None:
    by_super_block = written.name in _GATHERED_BY_SUPER_BLOCK and row % _SUPER_BLOCK
    if written.name in _NOT_GATHERED or by_super_block:
        reason = f" in rows of {row}" if by_super_block else ""
        raise InputError(
            f"`{name}` is read row by row, which llama.cpp's CUDA backend cannot do for "
            f"{written.name}{reason}",
            hint="choose a k-quant, q4_0 to q8_0, f16 or bf16 for it",
        )
