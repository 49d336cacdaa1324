"""Arguments of `DFlashLlama`: what is accepted, refused, and what switches speculation off."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from typing import Any

from . import _capi
from .errors import DFlashArgumentError
from .session import check_verify

OFF_SWITCH = "speculate is False"
OFF_PROCESSOR = (
    "a Python logits processor (or logit_bias) must see every token before the next is scored"
)
# keywords of `Llama` whose truth rules speculation out, and why
_OFF = {
    "vocab_only": "vocab_only=True loads no weights",
    "embedding": "embedding=True makes a context for embeddings, not for text",
    "logits_all": "logits_all=True keeps the scores of every token, as only plain decoding does",
}

# of published drafts; only used when the file does not tell
_USUAL_BLOCK = 8


def check_keywords(kwargs: dict[str, Any], known: Collection[str]) -> None:
    """Refuse what `Llama` would swallow without a word; drops `draft_model=None`.

    Raises:
        TypeError: An unknown keyword, or `draft_model`.
    """
    if kwargs.pop("draft_model", None) is not None:
        raise TypeError(
            "draft_model= is llama-cpp-python's own way to draft; "
            "DFlashLlama drafts with the file in draft_path=, leave draft_model= out"
        )
    for name in kwargs:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            also = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"DFlashLlama() got an unexpected keyword argument {name!r}{also}")


def check_arguments(
    model_path: object, draft_path: object, n_draft: object, p_min: object, verify: object
) -> None:
    """Refuse wrong types (TypeError) and values out of range (DFlashArgumentError)."""
    for name, path in (("model_path", model_path), ("draft_path", draft_path)):
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(
                f"{name} is {type(path).__name__}, expected the path of a GGUF file (str or Path)"
            )
    if n_draft is not None:
        if isinstance(n_draft, bool) or not isinstance(n_draft, int):
            raise TypeError(f"n_draft is {n_draft!r}, expected a whole number or None")
        if not 1 <= n_draft <= _capi.DFLASH_MAX_DRAFT:
            raise DFlashArgumentError(
                f"n_draft is {n_draft}, expected 1 to {_capi.DFLASH_MAX_DRAFT}"
            )
    if isinstance(p_min, bool) or not isinstance(p_min, (int, float)):
        raise TypeError(f"p_min is {p_min!r}, expected a number from 0 to 1")
    if not 0.0 <= p_min <= 1.0:
        raise DFlashArgumentError(f"p_min is {p_min}, expected a number from 0 to 1")
    check_verify(verify)


def why_off(kwargs: Mapping[str, Any]) -> str | None:
    """Return why a target opened with these keywords never speculates; None if it can."""
    return next((why for name, why in _OFF.items() if kwargs.get(name)), None)


def draft_layers(n_gpu_layers_draft: int | None, n_gpu_layers: int) -> int:
    """Return the draft's layers on the GPU: as asked, else all if the target has any there."""
    if n_gpu_layers_draft is not None:
        return n_gpu_layers_draft
    return -1 if n_gpu_layers else 0


def snapshots(n_draft: int | None, block_size: int | None, kwargs: Mapping[str, Any]) -> int:
    """Return how many states a recurrent target must keep to take back a rejected block.

    Args:
        n_draft: Tokens to draft per round; None for block - 1.
        block_size: Of the draft; None if unknown.
        kwargs: Keywords of `Llama`: n_ctx, n_batch and n_ubatch set the limit.
    """
    wanted = n_draft or (block_size or _USUAL_BLOCK) - 1
    n_batch: int = kwargs.get("n_batch", 512)
    n_batch = min(kwargs.get("n_ctx", 512) or n_batch, n_batch)
    # llama.cpp wants the block and every state in one micro-batch
    n_ubatch: int = min(n_batch, kwargs.get("n_ubatch", 512))
    return max(0, min(wanted, n_ubatch - 2))
