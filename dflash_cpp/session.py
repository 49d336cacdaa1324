"""One draft attached to one target context: the handle of the C API as a Python object."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _capi
from ._lock import OwnerLock
from .errors import DFlashArgumentError, DFlashStateError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class RoundTrace:
    """What the selector saw in one round; L drafted positions, k candidates, V tokens, H width.

    Attributes:
        pos, anchor: Position and id of the last token of the text before the round.
        draft: Proposed tokens; the first `n_accepted` of them were accepted.
        candidates: int32 [L, k], by descending logit; k = 0 for a draft without selector.
        scores: float32 [L, k] along the chosen path: logit + bilinear term.
        lattice: float32 [L, k, k], predecessors by candidates.
        hidden: float32 [L, H], final normalised hidden states.
        logits: float32 [L, V], after output multiplier and soft cap.
    """

    pos: int
    anchor: int
    draft: tuple[int, ...]
    n_accepted: int
    candidates: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    lattice: npt.NDArray[np.float32]
    hidden: npt.NDArray[np.float32]
    logits: npt.NDArray[np.float32]


ADAPTIVE_VARIABLE = "LLAMA_ARG_SPEC_DRAFT_ADAPTIVE"

VERIFY = {
    "auto": _capi.DFLASH_VERIFY_AUTO,
    "reject": _capi.DFLASH_VERIFY_REJECT,
    "match": _capi.DFLASH_VERIFY_MATCH,
}


@dataclass(frozen=True)
class StepResult:
    """Tokens of one round: the first `n_accepted` came from the draft."""

    tokens: tuple[int, ...]
    n_accepted: int


def check_pair(target_path: str | os.PathLike[str], draft_path: str | os.PathLike[str]) -> None:
    """Check by file headers alone that a draft fits a target.

    Raises:
        DFlashPairError: They do not fit; `reasons` has every reason.
        DFlashFileError: A file is missing, damaged or not a GGUF.
    """
    api = _capi.api()
    _capi.check(api.dflash_check_pair(_path(target_path), _path(draft_path)))


def check_verify(verify: object) -> int:
    """Return the code of an acceptance rule, one of `VERIFY`.

    Raises:
        DFlashArgumentError: There is no such rule.
    """
    if not isinstance(verify, str) or verify not in VERIFY:
        names = ", ".join(f"`{name}`" for name in VERIFY)
        raise DFlashArgumentError(f"verify is `{verify}`, expected one of {names}")
    return VERIFY[verify]


def choose_adaptive(adaptive: bool | None) -> bool:
    """Return whether lengths adapt: as asked, else as the variable that llama-server reads says.

    Raises:
        DFlashArgumentError: The variable is neither on nor off.
    """
    if adaptive is not None:
        return bool(adaptive)
    value = os.environ.get(ADAPTIVE_VARIABLE, "on")
    if value not in ("on", "off"):
        raise DFlashArgumentError(f"{ADAPTIVE_VARIABLE} is `{value}`, expected `on` or `off`")
    return value == "on"


class Session:
    """A draft model loaded beside a target context; see `dflash.h` for the rules.

    One thread at a time may use a session; a lock makes a second one wait. The session keeps the
    target context alive, and closing the target closes the session first.

    Args:
        target: A `llama_cpp.Llama` (or its `LlamaContext`) that generates text.
        draft_path: GGUF file of the draft.
        n_draft: Tokens to draft per round, 1 to block - 1; None for block - 1.
        p_min: Stop a draft before the first token less probable than this; 0 = never.
        n_gpu_layers: Layers of the draft on the GPU; negative for all.
        n_threads, n_threads_batch: 0 for the target's.
        use_mmap: Map the draft file instead of reading it.
        trace: Record every round for `trace()`; slow.
        verify: How a sampled text is verified: `auto` (rejection sampling where the chain has a
            distribution), `reject` (the same, always with a sampled draft) or `match` (a seed
            gives the same text as without a draft). All leave the target's distribution intact.
        adaptive: Choose how many tokens to draft and verify, none included, by what pays;
            `n_draft` is the ceiling. False drafts `n_draft` in every round. None: as the
            environment's LLAMA_ARG_SPEC_DRAFT_ADAPTIVE (on, off) says, else on.

    Raises:
        DFlashPairError, DFlashFileError, DFlashTargetError, DFlashArgumentError,
        DFlashMemoryError, DFlashLibraryError: with the reason.
    """

    def __init__(
        self,
        target: Any,
        draft_path: str | os.PathLike[str],
        *,
        n_draft: int | None = None,
        p_min: float = 0.0,
        n_gpu_layers: int = -1,
        n_threads: int = 0,
        n_threads_batch: int = 0,
        use_mmap: bool = True,
        trace: bool = False,
        verify: str = "auto",
        adaptive: bool | None = None,
    ):
        self._api = _capi.api()
        self._lock = OwnerLock("session")
        context = getattr(target, "_ctx", target)
        if getattr(context, "ctx", None) is None:
            raise DFlashArgumentError("the target has been closed, expected an open one")

        params = self._api.dflash_params_default()
        params.n_draft = 0 if n_draft is None else n_draft
        params.p_min = p_min
        params.n_gpu_layers = n_gpu_layers
        params.n_threads = n_threads
        params.n_threads_batch = n_threads_batch
        params.use_mmap = use_mmap
        params.trace = trace
        params.verify = check_verify(verify)
        params.adaptive = choose_adaptive(adaptive)

        handle = _capi.dflash_session_p()
        _capi.check(
            self._api.dflash_session_open(
                context.ctx, _path(draft_path), ctypes.byref(params), ctypes.byref(handle)
            )
        )
        self._handle = handle
        self._target = context
        # runs at exit too, before anything of the target goes away
        self._finalizer = weakref.finalize(self, _free, self._api, handle.value, self._lock)
        context._exit_stack.callback(_close_if_alive, weakref.ref(self))

        self.n_draft = int(self._api.dflash_session_n_draft(handle))
        self.block_size = int(self._api.dflash_session_block_size(handle))
        self._out = (_capi.llama_token * (self.n_draft + 1))()
        self._n_out = ctypes.c_int32()
        self._n_accepted = 0

    @property
    def closed(self) -> bool:
        """True once the session is closed, and in a forked child."""
        return not (self._finalizer.alive and self._lock.mine)

    @property
    def n_past(self) -> int:
        """Tokens of the sequence that are valid in the target's memory."""
        with self._lock:
            return int(self._api.dflash_session_n_past(self._open()))

    def prompt(self, tokens: Sequence[int] | npt.NDArray[np.intc]) -> None:
        """Append prompt tokens at `n_past`: decode them in the target and feed the draft.

        Args:
            tokens: Ids, int32; chunks of the target's n_batch are decoded.

        Raises:
            DFlashArgumentError: An id outside the vocabulary.
            DFlashMemoryError: The context is full.
            DFlashDecodeError: The forward pass failed.
        """
        import numpy as np

        ids = np.ascontiguousarray(tokens, dtype=np.intc)
        pointer = ids.ctypes.data_as(ctypes.POINTER(_capi.llama_token))
        with self._lock:
            _capi.check(self._api.dflash_session_prompt(self._open(), pointer, len(ids)))

    def decoded(self, n_tokens: int) -> None:
        """Tell that the caller has just decoded `n_tokens` by one llama_decode of sequence 0.

        The draft takes its features from that call. Tokens before them that the session has not
        seen count as valid, without features.
        """
        with self._lock:
            _capi.check(self._api.dflash_session_decoded(self._open(), n_tokens))

    def step(self, sampler: Any, id_last: int, n_draft_max: int = -1) -> StepResult:
        """Draft a block, verify it and return the next tokens of the text, at least one.

        Args:
            sampler: `llama_sampler *` (a chain that ends with a selecting sampler).
            id_last: Last token of the text, not yet in the target's memory.
            n_draft_max: Draft at most so many tokens; negative for no further limit.

        Raises:
            DFlashMemoryError: The context is full.
            DFlashDecodeError: The forward pass failed or was aborted.
        """
        with self._lock:
            handle = self._open()
            _capi.check(
                self._api.dflash_session_step(
                    handle,
                    sampler,
                    id_last,
                    n_draft_max,
                    self._out,
                    len(self._out),
                    ctypes.byref(self._n_out),
                )
            )
            tokens = tuple(self._out[: self._n_out.value])
            total = int(self.stats().n_accepted)
            accepted, self._n_accepted = total - self._n_accepted, total
        return StepResult(tokens, accepted)

    def set_adaptive(self, adaptive: bool) -> None:
        """Change `adaptive` between rounds.

        Adaptive lengths follow measured time, so where tokens are accepted by rejection sampling, a
        seed need not give the same text twice. Greedy text and `verify="match"` do not depend on
        lengths.
        """
        with self._lock:
            _capi.check(self._api.dflash_session_set_adaptive(self._open(), adaptive))

    def rollback(self, n_keep: int) -> None:
        """Keep the first `n_keep` tokens of the sequence, drop the rest in target and draft.

        Raises:
            DFlashArgumentError: `n_keep` is negative or exceeds `n_past`.
            DFlashMemoryError: Recurrent layers cannot go back that far; only 0 is possible now.
        """
        with self._lock:
            _capi.check(self._api.dflash_session_rollback(self._open(), n_keep))

    def stats(self) -> _capi.dflash_stats:
        """Return the counters since the session was opened (`struct dflash_stats`)."""
        out = _capi.dflash_stats()
        out.size = ctypes.sizeof(out)
        with self._lock:
            _capi.check(self._api.dflash_session_stats(self._open(), ctypes.byref(out)))
        return out

    def trace(self) -> RoundTrace:
        """Return the latest round of a session opened with `trace=True`, copied.

        Raises:
            DFlashArgumentError: The session does not trace.
        """
        raw = _capi.dflash_trace()
        raw.size = ctypes.sizeof(raw)
        with self._lock:
            _capi.check(self._api.dflash_session_trace(self._open(), ctypes.byref(raw)))
            n, k = raw.n_pos, raw.n_top_k
            return RoundTrace(
                pos=raw.pos,
                anchor=raw.anchor,
                draft=tuple(raw.draft[: raw.n_draft]) if raw.n_draft else (),
                n_accepted=raw.n_accepted,
                candidates=_copy(raw.candidates, (n, k)),
                scores=_copy(raw.scores, (n, k)),
                lattice=_copy(raw.lattice, (n, k, k)),
                hidden=_copy(raw.hidden, (n, raw.n_embd)),
                logits=_copy(raw.logits, (n, raw.n_vocab)),
            )

    def close(self) -> None:
        """Free the session and its draft; the target stays. A second call does nothing."""
        self._finalizer()

    def leave_exit_to_target(self) -> None:
        """Be closed at the end of the process by the target that closes its own sessions.

        It first makes calls of other threads end, which then cannot hold the session any longer.
        """
        self._finalizer.atexit = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> Any:
        if self.closed:
            raise DFlashStateError("the session is closed, expected an open one")
        return self._handle


def _free(api: ctypes.CDLL, handle: int | None, lock: OwnerLock) -> None:
    # threads of the parent do not exist in a forked child: freeing there could wait for ever
    if lock.mine:
        with lock:
            api.dflash_session_close(handle)


def _close_if_alive(session: weakref.ref[Session]) -> None:
    alive = session()
    if alive is not None:
        alive.close()


def _path(path: str | os.PathLike[str]) -> bytes:
    raw = os.fsencode(path)
    if b"\0" in raw:
        raise DFlashArgumentError("the path contains a NUL character")
    return raw


def _copy(pointer: Any, shape: tuple[int, ...]) -> Any:
    import numpy as np

    dtype = np.int32 if pointer._type_ is ctypes.c_int32 else np.float32
    if not pointer or 0 in shape:
        return np.zeros(shape, dtype)
    return np.ctypeslib.as_array(pointer, shape=shape).astype(dtype, copy=True)
