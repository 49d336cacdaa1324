"""`DFlashLlama`: `llama_cpp.Llama` with another way to generate tokens, all else unchanged."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_convert.errors import InputError

from . import _libs, _options
from ._memory import TargetMemory, llama_cpp
from .errors import DFlashArgumentError, DFlashFileError
from .hub import fetch_file
from .session import RoundTrace, Session, StepResult, check_pair, choose_adaptive
from .stats import RULE_GREEDY, RULE_MATCH, DraftStats, Recorder

if TYPE_CHECKING:
    Tokens = Generator[int, Sequence[int] | None, None]

_log = logging.getLogger("dflash")

_LLAMA_KEYWORDS = frozenset(inspect.signature(llama_cpp.Llama.__init__).parameters) - {
    "self",
    "model_path",
    "kwargs",
}
_GENERATE = inspect.signature(llama_cpp.Llama.generate)
_COMPLETION = inspect.signature(llama_cpp.Llama._create_completion)


class DFlashLlama(TargetMemory):
    """A `llama_cpp.Llama` that drafts blocks of tokens with a DFlash draft.

    Greedy text is that of `Llama`. Sampled text has the same distribution; with `verify="match"` it
    is the very text of `Llama` with the same seed. A call that speculation cannot serve (a Python
    logits processor, `logits_all`, embeddings) decodes plainly; `last_stats.reason` says why.
    Tokens that a caller sends into `generate` are proposals in `Llama`, which never change the
    text: they are ignored.

    Args:
        model_path: GGUF file of the target.
        draft_path: GGUF file of the draft; not looked at where speculation never applies
            (`vocab_only`, `embedding`, `logits_all`), so that any target can be opened.
        n_draft: Tokens to draft per round, 1 to block - 1; None for block - 1.
        p_min: Stop a draft before the first token less probable than this, 0 to 1.
        verify: How a sampled text is verified: `auto` (rejection sampling where the request has a
            distribution, else match), `reject` (the same, always with a sampled draft) or `match`
            (a seed gives the same text as without a draft). Greedy text is the same under all.
        adaptive: Choose in every round how many tokens to draft and verify, none included, by what
            pays; `n_draft` is the ceiling. A sampled text with a seed of its own that is verified
            by rejection keeps the full length, so that it repeats. False: always `n_draft`. None:
            as the environment's LLAMA_ARG_SPEC_DRAFT_ADAPTIVE (on, off) says, else on.
        speculate: False decodes plainly and loads no draft until `speculate` is set to True.
        draft_trace: Record every round for `draft_trace()`; slow.
        n_gpu_layers_draft: Layers of the draft on the GPU, -1 for all; None for all if the target
            has any there.
        **kwargs: Keywords of `llama_cpp.Llama`, except `draft_model`.

    Raises:
        TypeError: An unknown keyword, or an argument of the wrong type.
        DFlashPairError: The draft does not fit; checked before the target is loaded.
        DFlashFileError, DFlashTargetError, DFlashArgumentError, DFlashMemoryError: with the reason.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        draft_path: str | os.PathLike[str],
        n_draft: int | None = None,
        p_min: float = 0.0,
        verify: str = "auto",
        adaptive: bool | None = None,
        speculate: bool = True,
        draft_trace: bool = False,
        n_gpu_layers_draft: int | None = None,
        **kwargs: Any,
    ):
        _options.check_keywords(kwargs, _LLAMA_KEYWORDS)
        _options.check_arguments(model_path, draft_path, n_draft, p_min, verify)
        self._draft_path = os.path.abspath(draft_path)  # opened again after a change of folder
        self._draft_options: dict[str, Any] = {
            "n_draft": n_draft,
            "p_min": float(p_min),
            "verify": verify,
            "adaptive": choose_adaptive(adaptive),
            "n_gpu_layers": _options.draft_layers(
                n_gpu_layers_draft, kwargs.get("n_gpu_layers", 0)
            ),
            "use_mmap": kwargs.get("use_mmap", True),
            "trace": draft_trace,
        }
        self._n_gpu_layers_draft = n_gpu_layers_draft
        self._off = _options.why_off(kwargs)
        self._limit: int | None = None
        self._seeded = kwargs.get("seed") not in (None, llama_cpp.LLAMA_DEFAULT_SEED)
        self._call_seeded: bool | None = None  # of a completion; None outside
        self._told: set[str] = set()
        self.last_token_drafted = False

        llama_cpp._logger.set_verbose(kwargs.get("verbose", True))
        if self._off is None:
            check_pair(model_path, draft_path)
        if speculate and self._off is None:
            block = _libs.gguf_uint32(self._draft_path, "dflash.block_size")
            self._n_rs_seq = _options.snapshots(n_draft, block, kwargs)

        super().__init__(os.fspath(model_path), **kwargs)
        self._speculate = False
        try:
            self.speculate = speculate
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        additional_files: Sequence[str] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        local_dir_use_symlinks: object = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        *,
        draft_repo_id: str | None = None,
        draft_filename: str | None = None,
        draft_path: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> DFlashLlama:
        """Fetch target and draft from the hub, unless they are in its cache, and open them.

        Args:
            repo_id: `org/name` or `org/name@revision` of the target.
            filename: Name, pattern (`*Q8_0.gguf`) or type (`Q8_0`) of its file; None if there is
                only one. Split files are fetched whole.
            additional_files: Names or patterns of further files to fetch.
            local_dir, cache_dir: Where files go instead of the cache, or another cache.
            local_dir_use_symlinks: Accepted for the sake of `Llama`; the hub has dropped it.
            draft_repo_id: Of the draft; None for the target's.
            draft_filename: As `filename`; None for the only one named `dflash-...`.
            draft_path: The draft as a file, in place of the two.
            **kwargs: As for `DFlashLlama`.

        Raises:
            TypeError: Both `draft_path` and a draft of the hub are given.
            DFlashFileError: No such model, revision or access; no such file, or several.
            FailureError: The hub does not answer and the cache lacks a file.
        """
        if draft_path is not None and (draft_repo_id or draft_filename):
            raise TypeError("draft_path= names a file; leave out draft_repo_id and draft_filename")
        options: dict[str, Any] = {"progress": kwargs.get("verbose", True)}
        options |= {"local_dir": local_dir, "cache_dir": cache_dir}

        def fetch(repo: str, name: str | None, what: str, also: Sequence[str] = ()) -> Path:
            model, _, revision = repo.partition("@")
            try:
                return fetch_file(model, revision or None, name, what, also=also, **options)
            except InputError as exc:
                raise DFlashFileError(exc.message, hint=exc.hint) from None

        # the small file first: what is wrong with it shows before the large one is fetched
        if draft_path is None:
            draft_path = fetch(draft_repo_id or repo_id, draft_filename, "draft")
        target = fetch(repo_id, filename, "target", additional_files or ())
        return cls(target, draft_path=draft_path, **kwargs)

    # --- switching and closing ----------------------------------------------------------------

    @property
    def speculate(self) -> bool:
        """Whether to draft. False frees the draft, so that decoding is as plain as `Llama`'s."""
        return self._speculate

    @speculate.setter
    def speculate(self, value: bool) -> None:
        with self._lock:
            self._need_open()
            self._speculate = bool(value)
            session = self._session
            if self._off is not None or self._speculate == (session is not None):
                return
            self._take_turn()
            self._requires_eval = True  # the switch may rearrange the buffer of the logits
            if session is None:
                self._session = Session(self, self._draft_path, **self._draft_options)
                self._session.leave_exit_to_target()
                self._blind = self.n_tokens
            else:
                self._rewind(session, min(self.n_tokens, session.n_past))
                self._session = None
                session.close()

    @property
    def n_draft(self) -> int | None:
        """Tokens drafted per round at most; None while no draft is loaded."""
        return None if self._session is None else self._session.n_draft

    def __enter__(self) -> DFlashLlama:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        del state["draft_model"]
        names = ("n_draft", "p_min", "verify", "adaptive")
        return (
            state
            | {name: self._draft_options[name] for name in names}
            | {
                "draft_path": self._draft_path,
                "speculate": self._speculate,
                "draft_trace": self._draft_options["trace"],
                "n_gpu_layers_draft": self._n_gpu_layers_draft,
            }
        )

    # --- what a caller can ask afterwards -----------------------------------------------------

    @property
    def last_stats(self) -> DraftStats | None:
        """Statistics of the latest generation, also while it runs; None before the first."""
        return None if self._record is None else self._record.snapshot()

    def draft_trace(self) -> RoundTrace:
        """Return what the selector saw in the latest round (needs `draft_trace=True`)."""
        if self._session is None:
            raise DFlashArgumentError("no draft is loaded, so there is no round to show")
        return self._session.trace()

    # --- generation ---------------------------------------------------------------------------

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Tokens:
        """Create a generator of tokens from a prompt; see `llama_cpp.Llama.generate`.

        `last_token_drafted` and `last_stats` are up to date at every token.
        """
        self._need_open()
        call = _GENERATE.bind(self, tokens, *args, **kwargs).arguments
        limit, self._limit = self._limit, None
        seeded = self._seeded if self._call_seeded is None else self._call_seeded
        reason = self._why_plain(call)
        rule = RULE_GREEDY if call.get("temp", 0.8) == 0.0 else RULE_MATCH
        session = None if reason else self._session
        self._record = record = Recorder(rule, reason, session)
        self.last_token_drafted = False
        base = super().generate(tokens, *args, **kwargs)
        try:
            if session is not None:
                repeat = seeded and rule == RULE_MATCH and self._draft_options["verify"] != "match"
                session.set_adaptive(self._draft_options["adaptive"] and not repeat)
            if session is None:
                yield from self._plain(base, record)
            else:
                stop = call.get("stopping_criteria")
                yield from self._drafted(session, base, record, stop, limit)
        finally:
            base.close()
            record.finish()

    def _why_plain(self, call: dict[str, Any]) -> str | None:
        reason = self._off or (None if self._speculate else _options.OFF_SWITCH)
        if reason is None and call.get("logits_processor") is not None:
            reason = _options.OFF_PROCESSOR
        if reason is not None and self.verbose and reason not in self._told:
            self._told.add(reason)
            _log.warning("decoding plainly: %s", reason)
        return reason

    def _plain(self, base: Tokens, record: Recorder) -> Tokens:
        """Pass on what `Llama` yields and is sent, and keep the time."""
        try:
            record.resume()
            with self._lock:
                token, turn = next(base), self._turn
            while True:
                record.pause()
                sent = yield token
                record.resume()
                with self._lock:
                    self._check_turn(turn)
                    token, turn = base.send(sent), self._turn
        except StopIteration:
            return

    def _drafted(
        self, session: Session, base: Tokens, record: Recorder, stop: Any, limit: int | None
    ) -> Tokens:
        """Take the first token from `Llama`, all others from rounds of the session."""
        record.resume()
        with self._lock:
            try:
                token = next(base)  # prompt, prefix cache, sampler chain: all as in `Llama`
            except StopIteration:
                return
            base.close()
            sampler, turn = self._sampler, self._take_turn()
        if self._blind:
            record.note(f"the draft lacks the features of the first {self._blind} tokens")
        try:
            record.pause()
            yield token
            record.resume()
            while True:
                room = -1 if limit is None else max(0, limit - record.emitted - 1)
                start, result = self._round(turn, session, sampler, token, room)
                for k, token in enumerate(result.tokens):
                    self._advance(turn, start, result, k)
                    if stop is not None and stop(self._input_ids, self._scores[0, :]):
                        return
                    record.pause()
                    yield token
                    record.resume()
        finally:
            # The surplus is not rolled back here but by the next call: a recurrent target can go
            # back only once, and the next prompt may want to go back further.
            if self._lock.mine:
                self._end_turn(turn)

    def _end_turn(self, turn: object) -> None:
        with self._lock:
            if self._turn is turn:
                if self._surplus:
                    self._sampler = None  # it has accepted tokens that nobody has seen
                self._take_turn()

    def _advance(self, turn: object, start: int, result: StepResult, k: int) -> None:
        """Make it look as if token `k` alone had been sampled after everything before it."""
        with self._lock:
            self._check_turn(turn)
            if k:
                self.input_ids[start + k - 1 : start + k] = result.tokens[k - 1]
            self.n_tokens = start + k
            self._surplus = result.tokens[k:-1]
            self.last_token_drafted = k < result.n_accepted

    def _round(
        self, turn: object, session: Session, sampler: Any, token: int, room: int
    ) -> tuple[int, StepResult]:
        """Decode `token` and a draft; returns the number of tokens after `token`, and the next."""
        with self._lock:
            self._check_turn(turn)
            n = self.n_tokens
            if session.n_past > n:
                self._rewind(session, n)
            self._requires_eval = True  # the logits at hand will be those of the block's last row
            if session.n_past == n:
                result = session.step(sampler.sampler, token, room)
            else:
                # positions that the session has not seen (an image): one plain token joins them
                self._feed(session, [token])
                self.n_tokens = n
                result = StepResult((int(sampler.sample(self._ctx)),), 0)
            self.input_ids[n : n + 1] = token
            return n + 1, result

    def _create_completion(self, *args: Any, **kwargs: Any) -> Any:
        self._need_open()
        call = _COMPLETION.bind(self, *args, **kwargs).arguments
        wanted = call.get("max_tokens", 16)
        self._limit = wanted if wanted is not None and wanted > 0 else None
        self._call_seeded = self._seeded or call.get("seed") is not None
        try:
            yield from super()._create_completion(*args, **kwargs)
        finally:
            self._limit = None
            self._call_seeded = None

    def set_seed(self, seed: int) -> None:
        """Set the random seed; see `llama_cpp.Llama.set_seed`."""
        if self._call_seeded is None:
            self._seeded = True
        super().set_seed(seed)  # type: ignore[no-untyped-call]
