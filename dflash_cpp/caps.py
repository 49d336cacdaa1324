"""How far two scorings of one prefix may lie apart and still be rounding; see docs/parity.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .llama import DFlashLlama

# Largest |A - B| of a logit that may count as rounding, by backend and type of the target, with
# the default KV cache (F16): twice the largest distance seen on the demo's target, rounded up. The
# table in docs/parity.md has the measurements. Where nothing was measured, the largest cap of the
# CPU holds and the report says so.
DELTA_CAPS: dict[str, dict[str, float]] = {
    "CPU": {"F32": 0.06, "F16": 0.16, "BF16": 0.85, "Q8_0": 3.5, "Q4_0": 3.5},
}

_DEFAULT_KV = "F16"

# Types with kernels whose results do not depend on the number of rows in the batch, and the most
# rows they take (GGML_DFLASH_MUL_MAT_MAX_COLUMNS).
EXACT_TYPES = frozenset({"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"})
EXACT_ROWS = 64


@dataclass(frozen=True)
class Cap:
    """How far apart two scorings of one prefix may be, and where the number comes from."""

    value: float
    backend: str
    type: str
    measured: bool


def delta_cap(llm: DFlashLlama, override: float | None = None) -> Cap:
    """Return the largest distance between two scorings that may count as rounding.

    Args:
        llm: An open pair.
        override: The user's own value.
    """
    from .info import compute_backend

    backend = compute_backend(llm.model_params.n_gpu_layers)
    weights = weight_type(llm.metadata)
    cache = {_ggml_type(t) for t in (llm.context_params.type_k, llm.context_params.type_v)}
    usual = cache == {_DEFAULT_KV}
    name = weights if usual else f"{weights}, KV cache {'/'.join(sorted(cache))}"
    if override is not None:
        return Cap(override, backend, name, False)
    if backend == "CPU" and is_exact(llm):
        return Cap(0.0, backend, name, True)
    known = DELTA_CAPS.get(backend, {}).get(weights) if usual else None
    if known is not None:
        return Cap(known, backend, name, True)
    return Cap(max(DELTA_CAPS["CPU"].values()), backend, name, False)


def is_exact(llm: DFlashLlama) -> bool:
    """Tell whether scoring in blocks must give the same bits as scoring token by token.

    It must on a CPU with our kernels for few rows, with flash attention, weights only of types in
    `EXACT_TYPES`, no experts, and no more threads than attention heads (docs/parity.md).
    """
    from . import _libs
    from .info import small_batch_kernels

    params = llm.context_params
    if params.flash_attn_type != 1 or not small_batch_kernels():
        return False
    if (llm.n_draft or 0) + 1 > EXACT_ROWS:
        return False
    arch = llm.metadata.get("general.architecture")
    heads = llm.metadata.get(f"{arch}.attention.head_count", "")
    if not heads.isdecimal() or max(params.n_threads, params.n_threads_batch) > int(heads):
        return False
    if llm.metadata.get(f"{arch}.expert_count", "0") != "0":
        return False  # products that choose among experts are the base's
    return {_ggml_type(t) for t in _libs.gguf_tensor_types(llm.model_path)} <= EXACT_TYPES


def weight_type(metadata: Mapping[str, str]) -> str:
    """Return the name of a GGUF's file type (`Q8_0`, `Q4_K_M`, ...); `unknown` without one."""
    from gguf import LlamaFileType

    try:
        name = LlamaFileType(int(metadata["general.file_type"])).name
    except (KeyError, ValueError):
        return "unknown"
    return name.removeprefix("ALL_").removeprefix("MOSTLY_")


def _ggml_type(number: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return "unknown"
