"""How far two scorings of one prefix may lie apart and still be rounding; see docs/parity.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .llama import DFlashLlama

# Largest |A - B| of a logit that may count as rounding. CPU: about four times the largest distance
# seen on the demo target (docs/parity.md has the table). A backend or type without an entry gets
# the largest cap of the CPU's table and the report says that it was not measured.
DELTA_CAPS: dict[str, dict[str, float]] = {
    "CPU": {"F32": 0.1, "F16": 0.3},
}


@dataclass(frozen=True)
class Cap:
    """How far apart two scorings of one prefix may be, and where the number comes from."""

    value: float
    backend: str
    type: str
    measured: bool


def delta_cap(llm: DFlashLlama, override: float | None = None) -> Cap:
    """Return the largest distance between two scorings that may count as rounding.

    It depends on the backend and on the coarsest type that values pass through: the weights' or
    that of the KV cache (F16 unless the caller chose another).

    Args:
        llm: An open pair.
        override: The user's own value.
    """
    from .info import compute_backend

    backend = compute_backend(llm.model_params.n_gpu_layers)
    params = llm.context_params
    types = [weight_type(llm.metadata), _ggml_type(params.type_k), _ggml_type(params.type_v)]
    name = "/".join(dict.fromkeys(types))
    if override is not None:
        return Cap(override, backend, name, False)
    known = DELTA_CAPS.get(backend, {})
    if all(t in known for t in types):
        return Cap(max(known[t] for t in types), backend, name, True)
    return Cap(max(DELTA_CAPS["CPU"].values()), backend, name, False)


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
