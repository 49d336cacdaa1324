"""Greedy speculative decoding with our build through the C API, with everything traced.

Uses the same jobs as `stock_pair`, so that results can be compared round by round. As a program:

    python our_pair.py job.json result.npz
"""

from __future__ import annotations

import ctypes
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from native_target import NativeTarget

from dflash_cpp import _capi, _libs


@dataclass(frozen=True)
class Trace:
    """`struct dflash_trace` of one round as arrays; n positions, k candidates."""

    pos: int
    anchor: int
    draft: list[int]
    accepted: int
    candidates: np.ndarray  # [n, k]
    scores: np.ndarray  # [n, k]
    lattice: np.ndarray  # [n, k, k]
    hidden: np.ndarray  # [n, n_embd]
    logits: np.ndarray  # [n, n_vocab]


class OurPair(NativeTarget):
    """A target context of ours with a traced session; a context manager."""

    def __init__(self, job: dict[str, Any], *, trace: bool = True) -> None:
        _libs.load()  # before llama_cpp is imported
        super().__init__(job)
        self.api = _capi.api()
        params = self.api.dflash_params_default()
        params.adaptive = job.get("adaptive", False)
        params.n_draft = job.get("n_draft") or 0
        params.trace = trace
        if job.get("kv", "f16") == "f32":
            params.type_k = params.type_v = params.flash_attn = 0
        self.session = _capi.dflash_session_p()
        draft = str(job["draft"]).encode()
        try:
            _capi.check(
                self.api.dflash_session_open(
                    self.ctx, draft, ctypes.byref(params), ctypes.byref(self.session)
                )
            )
        except BaseException:
            super().close()
            raise
        self.n_draft = self.api.dflash_session_n_draft(self.session)
        self.sampler = self.lc.llama_sampler_chain_init(
            self.lc.llama_sampler_chain_default_params()
        )
        self.lc.llama_sampler_chain_add(self.sampler, self.lc.llama_sampler_init_greedy())
        self._out = (_capi.llama_token * (self.n_draft + 1))()

    def prompt(self, tokens: list[int]) -> int:
        """Decode a prompt; returns the first generated token."""
        ids = (_capi.llama_token * len(tokens))(*tokens)
        _capi.check(self.api.dflash_session_prompt(self.session, ids, len(tokens)))
        return int(self.logits(-1).argmax())

    def step(self, anchor: int, n_draft_max: int = -1) -> list[int]:
        """One round: the next tokens of the text."""
        n_out = ctypes.c_int32()
        _capi.check(
            self.api.dflash_session_step(
                self.session,
                self.sampler,
                anchor,
                n_draft_max,
                self._out,
                len(self._out),
                ctypes.byref(n_out),
            )
        )
        return list(self._out[: n_out.value])

    def rollback(self, n_keep: int) -> None:
        """Drop everything at and after position n_keep."""
        _capi.check(self.api.dflash_session_rollback(self.session, n_keep))

    def trace(self) -> Trace:
        """Everything about the latest round."""
        raw = _capi.dflash_trace(size=ctypes.sizeof(_capi.dflash_trace))
        _capi.check(self.api.dflash_session_trace(self.session, ctypes.byref(raw)))
        n, k = raw.n_pos, raw.n_top_k

        def rows(pointer: Any, *shape: int) -> np.ndarray:
            if not pointer:  # a draft without selector has no candidates
                return np.zeros(shape)
            return np.ctypeslib.as_array(pointer, shape).copy()

        return Trace(
            pos=raw.pos,
            anchor=raw.anchor,
            draft=raw.draft[: raw.n_draft],
            accepted=raw.n_accepted,
            candidates=rows(raw.candidates, n, k),
            scores=rows(raw.scores, n, k),
            lattice=rows(raw.lattice, n, k, k),
            hidden=rows(raw.hidden, n, raw.n_embd),
            logits=rows(raw.logits, n, raw.n_vocab),
        )

    def generate(self, prompt: list[int], n_predict: int) -> tuple[list[int], list[int]]:
        """Greedy text, and the number of tokens that each round produced."""
        tokens, lengths = [self.prompt(prompt)], []
        while len(tokens) < n_predict:
            new = self.step(tokens[-1])
            tokens += new
            lengths.append(len(new))
        return tokens[:n_predict], lengths

    def stats(self) -> _capi.dflash_stats:
        """Counters since the session was opened."""
        out = _capi.dflash_stats(size=ctypes.sizeof(_capi.dflash_stats))
        _capi.check(self.api.dflash_session_stats(self.session, ctypes.byref(out)))
        return out

    def close(self) -> None:
        self.api.dflash_session_close(self.session)
        self.lc.llama_sampler_free(self.sampler)
        super().close()

    def __enter__(self) -> OurPair:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def run(job: dict[str, Any]) -> dict[str, np.ndarray]:
    """The job with our build, in the form of `stock_pair.run`, and the logits."""
    rounds = []
    with OurPair(job) as ours:
        tokens = [ours.prompt(job["prompt"])]
        while len(tokens) < job["n_predict"]:
            tokens += ours.step(tokens[-1])
            trace = ours.trace()
            rounds.append(
                {
                    "anchor": trace.anchor,
                    "pos": trace.pos,
                    "draft": trace.draft,
                    "accepted": trace.accepted,
                    "ids": trace.candidates,
                    "lattice": trace.lattice,
                    "logits": trace.logits,
                }
            )
    stacked = {key: np.array([r[key] for r in rounds]) for key in rounds[0]}
    return {"tokens": np.array(tokens[: job["n_predict"]]), **stacked}


if __name__ == "__main__":
    np.savez(sys.argv[2], **run(json.loads(Path(sys.argv[1]).read_text())))
