"""Which layers of a draft slide, how far, and whether the block is causal.

Exporters disagree about these keys; what is written is what the reference would do.
"""

from __future__ import annotations

from .keys import KeyReader
from .schema import LAYER_TYPES

_MAX_WINDOW = 2**31 - 1
_DEFAULT_WINDOW = 4096


def _layer_types(keys: KeyReader, layers: int, window: int | None) -> tuple[str, ...]:
    types = keys.top("layer_types", list, None)
    if types is None:
        # The rule of Qwen3Config.
        first = keys.top("max_window_layers", int, 28, low=0)
        slides = window is not None and keys.raw.get("use_sliding_window") is True
        return tuple(LAYER_TYPES[slides and i >= (first or 0)] for i in range(layers))
    keys.used.add("max_window_layers")
    checked = keys.list_of(
        "layer_types", types, lambda t: t in LAYER_TYPES, " or ".join(LAYER_TYPES)
    )
    if checked is not None and len(checked) != layers:
        keys.problems.append(f"`layer_types` has {len(checked)} entries for {layers} layers")
    return checked or (LAYER_TYPES[0],) * layers


def read_window(
    keys: KeyReader, layers: int, warnings: list[str]
) -> tuple[int | None, tuple[bool, ...], tuple[str, ...]]:
    """Decide which layers slide, and how far.

    The reference (Qwen3Config) drops `sliding_window` unless `use_sliding_window` is true;
    `use_swa` is another exporter's way to say that all layers slide.
    """
    size = keys.top("sliding_window", int, None, low=1, high=_MAX_WINDOW)
    if "sliding_window" not in keys.raw:  # null means none, a missing key Qwen3Config's default
        size = _DEFAULT_WINDOW
    use = keys.top("use_sliding_window", bool, None)
    types = _layer_types(keys, layers, size)
    if keys.own("use_swa", bool, False):
        size = keys.own("swa_window_size", int, size, low=1, high=_MAX_WINDOW)
        if size is None:
            keys.problems.append("`use_swa` is true, but there is no window size")
        if keys.raw.get("layer_types") is None:
            # Qwen3Config's rule for missing types does not apply to this exporter's windows.
            types = (LAYER_TYPES[0],) * layers
        return size, (True,) * layers, types
    keys.own("swa_window_size", int, None)
    sliding = tuple(t == "sliding_attention" for t in types)
    if not any(sliding) or not use:
        if any(sliding) and size is not None:
            state = "false" if use is False else "missing"
            warnings.append(
                f"sliding_window {size} is not written: use_sliding_window is {state}, so the "
                "reference attends without a window"
            )
        return None, (False,) * layers, types
    if size is None:
        warnings.append("sliding layers without a sliding_window attend without a window")
        return None, (False,) * layers, types
    return size, sliding, types


def read_causal(
    keys: KeyReader, types: tuple[str, ...], override: bool | None, warnings: list[str]
) -> bool:
    """Decide the one causality flag of the GGUF.

    The reference takes `is_causal`, else causal for sliding layers and the whole block for full
    ones. The loader has one flag for all layers, so a mixed draft that does not state it cannot be
    written as the reference runs it.
    """
    stated = keys.top("is_causal", bool, None)
    other = keys.own("causal", bool, None)
    if stated is None:
        stated = other
    elif other is not None and other != stated:
        warnings.append(f"is_causal {stated} wins over dflash_config.causal {other}")
    if override is not None:
        return override
    if stated is not None:
        return stated
    slides = [t == "sliding_attention" for t in types]
    if any(slides) != all(slides):
        keys.problems.append(
            f"`is_causal` is missing and layer_types are mixed: the reference makes the "
            f"{sum(slides)} sliding layers causal and the {len(slides) - sum(slides)} full layers "
            "not, but a GGUF has one flag for all; choose with `--causal` or `--no-causal` "
            "(expect a lower acceptance; without the key llama.cpp runs as with `--no-causal`)"
        )
    return all(slides)
