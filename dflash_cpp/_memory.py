"""The target's memory, the draft's and the counters of `Llama` kept in step.

`Llama` counts evaluated tokens in `n_tokens` and lets the memory hold more; a session counts them
in `n_past`. Everything that changes one of them passes through `TargetMemory`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _capi
from ._lock import OwnerLock
from .errors import DFlashMemoryError, DFlashStateError
from .session import Session

_capi.api()  # points llama_cpp at our libraries: must come before its first import

import llama_cpp  # noqa: E402
from llama_cpp import _internals  # noqa: E402

__all__ = ["TargetMemory", "llama_cpp"]

# Its table numbers the levels as ggml once did: warnings pass for errors, which are always shown.
llama_cpp._logger.GGML_LOG_LEVEL_TO_LOGGING_LEVEL[3] = logging.WARNING

if TYPE_CHECKING:
    from llama_cpp.llama import LlamaState

    from .stats import Recorder


class _TargetContext(_internals.LlamaContext):
    """Tells the session about the one cut that `Llama.generate` makes by itself."""

    _dflash_owner: weakref.ref[TargetMemory]

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        owner = self._dflash_owner()
        if owner is not None and seq_id <= 0 and p1 < 0 and not owner._may_cut(max(p0, 0)):
            return False
        return bool(super().kv_cache_seq_rm(seq_id, p0, p1))


class TargetMemory(llama_cpp.Llama):
    """A `Llama` that tells a session about every token it evaluates or forgets."""

    # defaults of the class, so that close() works however far __init__ came
    _session: Session | None = None
    _closed: bool = True
    _n_rs_seq: int = 0

    def __init__(self, model_path: str, **kwargs: Any):
        self._lock = OwnerLock("DFlashLlama")
        self._turn = object()  # whose tokens the context holds; an outside change makes a new one
        self._surplus: tuple[int, ...] = ()  # tokens in memory that the caller has not seen yet
        self._blind = 0  # leading tokens without features in the draft
        self._record: Recorder | None = None
        self._closed = False
        super().__init__(model_path, **kwargs)
        self._ctx.__class__ = _TargetContext
        vars(self._ctx)["_dflash_owner"] = weakref.ref(self)
        weakref.finalize(self, _close_if_alive, weakref.ref(self))  # at exit

    # `Llama` has no keyword for the number of snapshots: slip it in when the parameters are made
    @property
    def context_params(self) -> Any:
        """The `llama_context_params` of the target."""
        return self.__dict__["context_params"]

    @context_params.setter
    def context_params(self, params: Any) -> None:
        params.n_rs_seq = self._n_rs_seq
        self.__dict__["context_params"] = params

    def close(self) -> None:
        """Free the draft, then the target. A second call does nothing.

        Another thread's call ends at its next token with DFlashStateError.
        """
        self._closed = True
        if "_lock" not in self.__dict__ or not self._lock.mine:
            return
        with self._lock:
            session, self._session = self._session, None
            if session is not None:
                session.close()
            if "_stack" in self.__dict__:
                super().close()

    # --- memory -------------------------------------------------------------------------------

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate a list of tokens; the draft takes their features."""
        with self._lock:
            self._need_open()
            self._take_turn()
            if self._session is None:
                super().eval(tokens)
            else:
                for i in range(0, len(tokens), self.n_batch):
                    self._feed(self._session, tokens[i : i + self.n_batch])
            if self._record is not None:
                self._record.fed(len(tokens))

    def _feed(self, session: Session, tokens: Sequence[int]) -> None:
        """Decode at most n_batch tokens at n_tokens, in target and draft."""
        n = self.n_tokens
        if session.n_past > n:
            self._rewind(session, n)
        if session.n_past == n:
            session.prompt(tokens)
            self.input_ids[n : n + len(tokens)] = tokens
            self.n_tokens += len(tokens)
            self._requires_eval = False
        else:
            # the memory was filled without the session: by a restored state or an image
            self._blind = n
            super().eval(tokens)
            session.decoded(len(tokens))

    def _rewind(self, session: Session, n_keep: int) -> None:
        """Drop everything from `n_keep` on; a target that cannot go back decodes again."""
        self._blind = min(self._blind, n_keep)
        try:
            session.rollback(n_keep)
        except DFlashMemoryError:
            session.rollback(0)
            self._blind = 0
            session.prompt(self.input_ids[:n_keep])

    def _may_cut(self, n_keep: int) -> bool:
        """`Llama` is about to keep `n_keep` tokens of the memory: can it, and tell the session."""
        session = self._session
        if session is not None and n_keep <= session.n_past:
            try:
                session.rollback(n_keep)
            except DFlashMemoryError:
                return False
            self._blind = min(self._blind, n_keep)
            return True
        if not (self._is_recurrent or self._is_hybrid) or n_keep == 0:
            return True
        # without a session nobody knows which snapshots belong to the latest tokens
        return bool(llama_cpp.llama_memory_seq_pos_max(self._ctx.memory, 0) < n_keep)

    def reset(self) -> None:
        """Reset the model state."""
        with self._lock:
            self._need_open()
            self._take_turn()
            super().reset()  # type: ignore[no-untyped-call]
            self._blind = 0
            if self._session is not None:
                self._session.rollback(0)

    def save_state(self) -> LlamaState:
        """Save the target's state; the draft's is not part of it."""
        with self._lock:
            self._need_open()
            session, surplus = self._session, self._surplus
            if session is None or session.n_past < self.n_tokens:
                return super().save_state()
            self._rewind(session, self.n_tokens)
            state = super().save_state()
            if surplus:
                session.prompt(surplus)  # a generator in the middle of a block goes on
            return state

    def load_state(self, state: LlamaState) -> None:
        """Restore a state; the draft starts without features for its tokens."""
        with self._lock:
            self._need_open()
            self._take_turn()
            if self._session is not None:
                self._session.rollback(0)
            super().load_state(state)

    def _take_turn(self) -> object:
        self._surplus = ()
        self._turn = object()
        return self._turn

    def _check_turn(self, turn: object) -> None:
        self._need_open()
        if self._turn is not turn:
            raise DFlashStateError(
                "another call has changed the context of this generator, expected it untouched",
                hint="finish or close a generator before the next call, or use two DFlashLlama",
            )

    def _need_open(self) -> None:
        self._lock.check()
        if self._closed:
            raise DFlashStateError("this DFlashLlama is closed, expected an open one")

    # --- a closed Llama would hand freed pointers to llama.cpp --------------------------------

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """Sample a token from the model; see `llama_cpp.Llama.sample`."""
        with self._lock:
            self._need_open()
            return int(super().sample(*args, **kwargs))

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Embed a string; see `llama_cpp.Llama.embed`."""
        with self._lock:
            self._need_open()
            return super().embed(*args, **kwargs)

    def tokenize(self, *args: Any, **kwargs: Any) -> list[int]:
        """Tokenize a string; see `llama_cpp.Llama.tokenize`."""
        with self._lock:
            self._need_open()
            return list(super().tokenize(*args, **kwargs))

    def detokenize(self, *args: Any, **kwargs: Any) -> bytes:
        """Detokenize a list of tokens; see `llama_cpp.Llama.detokenize`."""
        with self._lock:
            self._need_open()
            return bytes(super().detokenize(*args, **kwargs))


def _close_if_alive(target: weakref.ref[TargetMemory]) -> None:
    alive = target()
    if alive is not None:
        alive.close()
