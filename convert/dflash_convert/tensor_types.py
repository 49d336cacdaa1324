"""The types that a tensor, and a whole file, can be written as.

Numbers and block sizes are ggml's, names of file types llama-quantize's; a test compares both
tables with the base.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InputError


@dataclass(frozen=True)
class TensorType:
    """A type of a tensor.

    Attributes:
        name: ggml's name in lower case, such as `q4_k`.
        type_id: ggml's number.
        block: Elements per block of a row.
        block_bytes: Bytes per block.
    """

    name: str
    type_id: int
    block: int = 1
    block_bytes: int = 4

    @property
    def quantized(self) -> bool:
        """Whether several elements share a scale."""
        return self.block > 1

    def nbytes(self, elements: int) -> int:
        """Return the bytes of `elements` elements (whole blocks)."""
        return elements // self.block * self.block_bytes

    def divides(self, row: int) -> bool:
        """Tell whether a row of `row` elements consists of whole blocks."""
        return row % self.block == 0


TENSOR_TYPES = {
    t.name: t
    for t in (
        TensorType("f32", 0, 1, 4),
        TensorType("f16", 1, 1, 2),
        TensorType("bf16", 30, 1, 2),
        TensorType("q8_0", 8, 32, 34),
        TensorType("q5_1", 7, 32, 24),
        TensorType("q5_0", 6, 32, 22),
        TensorType("q4_1", 3, 32, 20),
        TensorType("q4_0", 2, 32, 18),
        TensorType("q2_0", 42, 64, 18),
        TensorType("q1_0", 41, 128, 18),
        TensorType("q6_k", 14, 256, 210),
        TensorType("q5_k", 13, 256, 176),
        TensorType("q4_k", 12, 256, 144),
        TensorType("q3_k", 11, 256, 110),
        TensorType("q2_k", 10, 256, 84),
        TensorType("iq4_nl", 20, 32, 18),
        TensorType("iq4_xs", 23, 256, 136),
        TensorType("iq3_s", 21, 256, 110),
        TensorType("tq2_0", 35, 256, 66),
        TensorType("tq1_0", 34, 256, 54),
        TensorType("mxfp4", 39, 32, 17),
        TensorType("nvfp4", 40, 64, 36),
    )
}
IDS_TYPE = TensorType("i64", 27, 1, 8)

_BY_ID = {t.type_id: t for t in (*TENSOR_TYPES.values(), IDS_TYPE)}

# Not quantised without an importance matrix, by ggml or by llama-quantize.
IMATRIX_TENSOR_TYPES = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs")

# Made by this package alone; the others need ggml's library.
BUILT_IN = ("f32", "f16", "bf16", "q8_0")


@dataclass(frozen=True)
class FileType:
    """A type of a whole file: one type for most tensors, and a mix of others (see `mix`).

    Attributes:
        name: llama-quantize's name in lower case, such as `q4_k_m`.
        number: Value of `general.file_type`.
        base: Type of the tensors for which the mix names no other.
    """

    name: str
    number: int
    base: TensorType


def _file_types(*entries: tuple[str, int, str]) -> dict[str, FileType]:
    return {name: FileType(name, number, TENSOR_TYPES[base]) for name, number, base in entries}


OUT_TYPES = _file_types(
    ("f32", 0, "f32"),
    ("f16", 1, "f16"),
    ("bf16", 32, "bf16"),
    ("q8_0", 7, "q8_0"),
    ("q6_k", 18, "q6_k"),
    ("q5_k_m", 17, "q5_k"),
    ("q5_k_s", 16, "q5_k"),
    ("q5_1", 9, "q5_1"),
    ("q5_0", 8, "q5_0"),
    ("q4_k_m", 15, "q4_k"),
    ("q4_k_s", 14, "q4_k"),
    ("q4_1", 3, "q4_1"),
    ("q4_0", 2, "q4_0"),
    ("iq4_nl", 25, "iq4_nl"),
    ("iq4_xs", 30, "iq4_xs"),
    ("q3_k_l", 13, "q3_k"),
    ("q3_k_m", 12, "q3_k"),
    ("q3_k_s", 11, "q3_k"),
    ("iq3_m", 27, "iq3_s"),
    ("iq3_s", 26, "iq3_s"),
    ("q2_k", 10, "q2_k"),
    ("q2_0", 41, "q2_0"),
    ("tq2_0", 37, "tq2_0"),
    ("tq1_0", 36, "tq1_0"),
    ("q1_0", 40, "q1_0"),
)

AUTO = "auto"

ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}

# llama-quantize's further names -> why they are not offered, and what is instead.
_IMATRIX = "needs an importance matrix, and llama-imatrix cannot run a draft alone"
_NOT_OFFERED = {
    **dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs"), (_IMATRIX, "tq2_0, q2_k")),
    **dict.fromkeys(("iq2_s", "iq2_m", "q2_k_s"), (_IMATRIX, "q2_k")),
    **dict.fromkeys(("iq3_xxs", "iq3_xs"), (_IMATRIX, "iq3_s, q3_k_s")),
    "mxfp4_moe": (
        "is for experts, which a draft has none of: llama-quantize would write q8_0",
        "q8_0, or `--tensor-type .=mxfp4` for MXFP4 in every matrix",
    ),
}


def out_type(name: str) -> FileType:
    """Return the file type called `name` (case does not matter, `q4_k` means `q4_k_m`).

    Raises:
        InputError: There is none, or it needs what a conversion does not have.
    """
    name = name.lower()
    name = ALIASES.get(name, name)
    if name in _NOT_OFFERED:
        why, instead = _NOT_OFFERED[name]
        raise InputError(f"`{name}` {why}", hint=f"use {instead}")
    if name not in OUT_TYPES:
        raise InputError(f"no type `{name}`, expected {', '.join((AUTO, *OUT_TYPES))}")
    return OUT_TYPES[name]


def tensor_type(name: str) -> TensorType:
    """Return the tensor type called `name` (case does not matter).

    Raises:
        InputError: There is none, or it needs an importance matrix.
    """
    name = name.lower()
    if name in IMATRIX_TENSOR_TYPES:
        raise InputError(
            f"tensor type `{name}` {_IMATRIX}", hint="use iq3_s, iq4_xs, q3_k, q2_k or tq2_0"
        )
    if name not in TENSOR_TYPES:
        raise InputError(f"no tensor type `{name}`, expected {', '.join(TENSOR_TYPES)}")
    return TENSOR_TYPES[name]


def type_layout(type_id: int) -> tuple[str, int, int] | None:
    """Return ggml's name of a type (`Q8_0`), elements and bytes per block; None if unknown.

    That is any type that a file may have, not only those written here.
    """
    if type_id in _BY_ID:
        known = _BY_ID[type_id]
        return known.name.upper(), known.block, known.block_bytes
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        foreign = GGMLQuantizationType(type_id)
        return foreign.name, *GGML_QUANT_SIZES[foreign]
    except (ValueError, KeyError):
        return None
