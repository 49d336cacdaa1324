"""Open a pair for a command: options as in llama.cpp, errors as sentences."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_convert.errors import DFlashError, FailureError, InputError

if TYPE_CHECKING:
    from llama_cpp import Llama

    from .llama import DFlashLlama

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class PairOptions:
    """What to open and how.

    Attributes:
        model, draft: GGUF files of target and draft.
        n_draft: Tokens drafted per round; None for block - 1.
        n_ctx: Tokens of context; 0 for what the target was trained with.
        n_batch, n_ubatch: Logical and physical batch, in tokens.
        threads: CPU threads; None for `default_threads()`.
        n_gpu_layers: Layers on the GPU; -1 for all.
        flash_attn: Whether to use flash attention.
        verbose: Show llama.cpp's own log on stderr.
        verify: How a sampled text is verified, see `DFlashLlama`.
        adaptive: Whether draft lengths follow what pays; None as `DFlashLlama` decides.
        trace: Record every round for `DFlashLlama.draft_trace`.
        kv_types: Types of keys and values in the cache, as `F16`; None for llama.cpp's own.
    """

    model: Path
    draft: Path
    n_draft: int | None = None
    n_ctx: int = DEFAULT_CONTEXT
    n_batch: int = 512
    n_ubatch: int = 512
    threads: int | None = None
    n_gpu_layers: int = -1
    flash_attn: bool = True
    verbose: bool = False
    verify: str = "auto"
    adaptive: bool | None = None
    trace: bool = False
    kv_types: tuple[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the settings that a result depends on."""
        return {
            "model": str(self.model),
            "draft": str(self.draft),
            "n_ctx": self.n_ctx,
            "n_batch": self.n_batch,
            "n_ubatch": self.n_ubatch,
            "threads": self.threads or default_threads(),
            "n_gpu_layers": self.n_gpu_layers,
            "flash_attn": self.flash_attn,
        }


def default_threads() -> int:
    """Return how many CPU threads to use: the cores this process may run on.

    On larger machines half of the logical ones: the other half usually are hyper-threads, which
    matrix products do not gain from.
    """
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:
        usable = os.cpu_count() or 1
    return usable if usable <= 4 else usable // 2


def need_file(path: Path, what: str) -> Path:
    """Return `path` if it is a readable file; raise InputError that says which file it was."""
    if not path.exists():
        raise InputError(f"the {what} `{path}` does not exist, expected a GGUF file")
    if not path.is_file():
        raise InputError(f"the {what} `{path}` is not a file, expected a GGUF file")
    if not os.access(path, os.R_OK):
        raise InputError(f"the {what} `{path}` cannot be read: permission denied")
    return path


def open_pair(options: PairOptions, *, speculate: bool = True) -> DFlashLlama:
    """Open target and draft.

    Raises:
        InputError: A file is missing or damaged, or the pair does not fit.
        FailureError: No memory for the context, or no native libraries.
    """
    need_file(options.model, "target")
    need_file(options.draft, "draft")
    from .llama import DFlashLlama

    threads = options.threads or default_threads()
    cache = {}
    if options.kv_types is not None:
        from gguf import GGMLQuantizationType as Type

        cache = dict(
            zip(("type_k", "type_v"), (int(Type[t]) for t in options.kv_types), strict=True)
        )
    try:
        return DFlashLlama(
            options.model,
            draft_path=options.draft,
            n_draft=options.n_draft,
            verify=options.verify,
            adaptive=options.adaptive,
            draft_trace=options.trace,
            speculate=speculate,
            n_ctx=options.n_ctx,
            n_batch=options.n_batch,
            n_ubatch=options.n_ubatch,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=options.n_gpu_layers,
            flash_attn=options.flash_attn,
            verbose=options.verbose,
            **cache,
        )
    except DFlashError:
        raise
    except ValueError as exc:
        # llama_cpp says ValueError for everything, and why only in the native log
        hint = "run again with -vv to see llama.cpp's own log"
        if "context" in str(exc).lower():
            raise FailureError(
                f"no context of {options.n_ctx} tokens for `{options.model}`: {exc}", hint=hint
            ) from exc
        raise InputError(f"llama.cpp cannot load `{options.model}`: {exc}", hint=hint) from exc


@contextmanager
def open_vocab(model: Path) -> Iterator[Llama]:
    """Open a target's vocabulary and metadata, without weights.

    Raises:
        InputError: The file is missing or damaged.
        FailureError: No native libraries.
    """
    need_file(model, "target")
    from . import _libs

    _libs.load()
    import llama_cpp

    @llama_cpp.llama_log_callback
    def mute(level: int, text: bytes, user_data: object) -> None:
        pass

    try:
        # without weights there is no trained context, which it would warn of
        llama_cpp.llama_log_set(mute, None)
        llm = llama_cpp.Llama(str(model), vocab_only=True, verbose=False)
    except ValueError as exc:
        raise InputError(f"llama.cpp cannot load `{model}`: {exc}") from exc
    finally:
        llama_cpp.llama_log_set(llama_cpp._logger.llama_log_callback, None)
    try:
        yield llm
    finally:
        llm.close()
