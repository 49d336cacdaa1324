"""Rotary embedding of the draft: what config.json says, as the loader wants it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .keys import REQUIRED, KeyReader

if TYPE_CHECKING:
    import numpy as np

_MAX_SIZE = 2**31 - 1
_LEAKED = frozenset({"mrope_section", "mrope_interleaved"})
_KNOWN = frozenset(
    {"rope_theta", "rope_type", "type", "partial_rotary_factor", "factor", "attention_factor"}
    | {"original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    | {"low_freq_factor", "high_freq_factor", "truncate"}
)


@dataclass(frozen=True)
class Llama3:
    """Parameters of Llama 3's frequency scaling."""

    factor: float
    low: float
    high: float
    original_positions: int


@dataclass(frozen=True)
class Rope:
    """Rotary embedding; None means that the key is not written.

    Attributes:
        theta: Base of the frequencies.
        dimensions: Rotated dimensions of a head, when not all of them.
        sections: `[head_dim / 2, 0, 0, 0]` for a target with M-RoPE: the draft rotates by the
            token's index only.
        scaling: `linear` or `yarn`.
        attention_scale: What llama.cpp's attention factor for yarn is to be multiplied by.
    """

    theta: float
    dimensions: int | None = None
    sections: tuple[int, ...] | None = None
    scaling: str | None = None
    factor: float | None = None
    original_positions: int | None = None
    attention_factor: float | None = None
    attention_scale: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    llama3: Llama3 | None = None


def read_rope(
    keys: KeyReader, *, head_dim: int, max_positions: int, mrope: bool, warnings: list[str]
) -> Rope | None:
    """Read the rotary embedding; problems and warnings are added to the given lists.

    Args:
        mrope: The target uses M-RoPE; a partial rotary factor in the draft's config is then the
            target's, left behind: the draft rotates whole heads.

    Returns:
        None when a problem was found.
    """
    before = len(keys.problems)
    where, table = _table(keys)
    theta = _theta(keys, where, table)
    kind = keys.inside(where, table, "rope_type", str, None) or keys.inside(
        where, table, "type", str, "default"
    )
    unknown = sorted(k for k in table if k not in _KNOWN | _LEAKED and table[k] is not None)
    if unknown:
        keys.problems.append(f"`{where}` has unknown keys: {', '.join(unknown)}")
    dimensions = _dimensions(keys, where, table, head_dim, mrope, warnings)
    scaling = _scaling(keys, where, table, kind, max_positions, mrope)
    if len(keys.problems) > before:
        return None
    sections = (head_dim // 2, 0, 0, 0) if mrope else None
    return Rope(theta=theta, dimensions=dimensions, sections=sections, **scaling)


def _table(keys: KeyReader) -> tuple[str, dict[str, Any]]:
    new = keys.top("rope_parameters", dict, None)
    old = keys.top("rope_scaling", dict, None)
    if new and old and new != old:
        keys.problems.append("`rope_parameters` and `rope_scaling` differ, expected one of them")
    where, table = ("rope_scaling", old) if old else ("rope_parameters", new or {})
    by_layer_type = [v for k, v in table.items() if k.endswith("_attention")]
    if by_layer_type:
        if any(v != by_layer_type[0] for v in by_layer_type) or not isinstance(
            by_layer_type[0], dict
        ):
            keys.problems.append(
                f"`{where}` differs by layer type, but a draft has one rotary embedding"
            )
            return where, {}
        return f"{where}.{next(iter(table))}", by_layer_type[0]
    return where, table


def _theta(keys: KeyReader, where: str, table: dict[str, Any]) -> float:
    nested = keys.inside(where, table, "rope_theta", float, None, above=0)
    top = keys.top("rope_theta", float, None, above=0)
    if nested is not None and top is not None and nested != top:
        keys.problems.append(
            f"`{where}.rope_theta` is {nested:g} and `rope_theta` is {top:g}, expected one value"
        )
    theta = top if nested is None else nested
    if theta is None:
        # A guessed base costs acceptance only far into a text, where nobody looks.
        keys.problems.append(f"no `rope_theta`, neither in `{where}` nor at top level")
    return theta or 0.0


def _dimensions(
    keys: KeyReader,
    where: str,
    table: dict[str, Any],
    head_dim: int,
    mrope: bool,
    warnings: list[str],
) -> int | None:
    nested = keys.inside(where, table, "partial_rotary_factor", float, None, above=0, high=1)
    top = keys.top("partial_rotary_factor", float, None, above=0, high=1)
    if nested is not None and top is not None and nested != top:
        keys.problems.append(
            f"`{where}.partial_rotary_factor` is {nested:g} and `partial_rotary_factor` is "
            f"{top:g}, expected one value"
        )
    factor = top if nested is None else nested
    if factor is None or factor == 1:
        return None
    if mrope:
        warnings.append(
            f"partial_rotary_factor {factor:g} ignored: it belongs to the M-RoPE target, the draft "
            "rotates whole heads"
        )
        return None
    dimensions = int(head_dim * factor)
    if dimensions < 2 or dimensions % 2:
        keys.problems.append(
            f"partial_rotary_factor {factor:g} of head_dim {head_dim} gives {dimensions} rotated "
            "dimensions, expected an even number"
        )
        return None
    warnings.append(
        f"partial_rotary_factor {factor:g}: {dimensions} of {head_dim} dimensions are rotated, as "
        "the base's converter writes it (the PyTorch reference rotates whole heads)"
    )
    return dimensions


def _scaling(
    keys: KeyReader, where: str, table: dict[str, Any], kind: str, max_positions: int, mrope: bool
) -> dict[str, Any]:
    if kind == "default":
        return {}
    if kind not in ("linear", "yarn", "llama3"):
        keys.problems.append(
            f"`{where}.rope_type` is `{kind}`, expected default, linear, yarn or llama3"
        )
        return {}

    def number(key: str, default: Any, **limits: Any) -> Any:
        return keys.inside(where, table, key, float, default, **limits)

    factor = number("factor", REQUIRED, low=1)
    if kind == "linear":
        return {"scaling": "linear", "factor": factor}
    original = keys.inside(
        where, table, "original_max_position_embeddings", int, None, low=1, high=_MAX_SIZE
    ) or keys.top("original_max_position_embeddings", int, max_positions, low=1, high=_MAX_SIZE)
    if kind == "llama3":
        low, high = (
            number("low_freq_factor", REQUIRED, above=0),
            number("high_freq_factor", REQUIRED, above=0),
        )
        if mrope:
            keys.problems.append(
                f"`{where}.rope_type` llama3 cannot be combined with a target that uses M-RoPE"
            )
        if None in (factor, low, high):
            return {}
        if low >= high:
            keys.problems.append(
                f"`{where}.low_freq_factor` is {low:g}, expected less than {high:g} "
                "(high_freq_factor)"
            )
        return {"llama3": Llama3(factor, low, high, original)}
    return _yarn(keys, where, table, factor, original, number)


def _yarn(
    keys: KeyReader, where: str, table: dict[str, Any], factor: float, original: int, number: Any
) -> dict[str, Any]:
    attention = number("attention_factor", None, above=0)
    mscale, mscale_all = (number(k, None, low=0) for k in ("mscale", "mscale_all_dim"))
    if keys.inside(where, table, "truncate", bool, True) is False:
        keys.problems.append(f"`{where}.truncate` is false, but llama.cpp always truncates")
    if factor is None:
        return {}
    # llama.cpp computes this by itself and ignores yarn_attn_factor; a scale on top makes another
    # factor of it.
    default = 1 + 0.1 * math.log(factor)
    wanted = attention
    if wanted is None and mscale and mscale_all:
        wanted = (1 + 0.1 * mscale * math.log(factor)) / (1 + 0.1 * mscale_all * math.log(factor))
    usual = wanted is None or math.isclose(wanted, default, rel_tol=1e-5)
    return {
        "attention_scale": None if usual or wanted is None else wanted / default,
        "scaling": "yarn",
        "factor": factor,
        "original_positions": original,
        "attention_factor": attention,
        "beta_fast": number("beta_fast", None, above=0),
        "beta_slow": number("beta_slow", None, above=0),
    }


def llama3_factors(llama3: Llama3, theta: float, dimensions: int) -> np.ndarray:
    """Return what the loader divides each frequency by: float32 of `dimensions` / 2.

    Source: the definition of the `llama3` rope type in transformers.
    """
    import numpy as np

    frequency = 1.0 / theta ** (np.arange(0, dimensions, 2, dtype=np.float32) / dimensions)
    wavelength = 2 * np.pi / frequency
    ratio = llama3.original_positions / wavelength
    smooth = (ratio - llama3.low) / (llama3.high - llama3.low)
    between = 1 / ((1 - smooth) / llama3.factor + smooth)
    factors = np.where(ratio < llama3.low, llama3.factor, between)
    return np.where(ratio > llama3.high, 1.0, factors).astype(np.float32)
