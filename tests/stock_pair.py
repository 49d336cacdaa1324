"""Greedy speculative decoding with the unpatched llama.cpp, by its public and staging functions.

Run as a program, because one process can load only one libllama:

    LLAMA_CPP_LIB_PATH=<stock libraries> python stock_pair.py job.json result.npz

See `native_target.JOB_HELP` for the job and `run` for the result.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from native_target import FLOATS, NativeTarget


class StockPair(NativeTarget):
    """A target and a DFlash 2 draft in one process."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        lc = self.lc
        self.draft = self.load(job["draft"])
        self._bind()
        self.n_draft = job.get("n_draft") or int(self._meta(b"dflash.block_size")) - 1
        self.params.n_rs_seq = 0
        self.params.swa_full = False
        self.params.ctx_other = self.ctx
        self.ctx_draft = lc.llama_init_from_model(self.draft, self.params)
        self.mask = lc.llama_vocab_mask(lc.llama_model_get_vocab(self.draft))
        self.n_embd = lc.llama_model_n_embd(self.draft)
        self.top_k = self._selector_top_k(self.draft)
        self.taps = self._layer_ids(self.draft)[: self._layer_ids_n(self.draft)]
        for tap in self.taps:
            self._set_layer_inp(self.ctx, tap, True)
        self._set_nextn(self.ctx_draft, True, False)
        lc.llama_set_causal_attn(self.ctx_draft, self._meta(b"dflash.attention.causal") == b"true")
        self.batch = lc.llama_batch_ext_init(self.ctx_draft)
        self.pos = 0

    def _bind(self) -> None:
        """Functions of llama-ext.h; their C++ symbols are mangled."""
        lib = self.lc._lib
        context, model = self.lc.llama_context_p_ctypes, self.lc.llama_model_p_ctypes
        flag, number = ctypes.c_bool, ctypes.c_uint32

        def bind(name: str, result: Any, *arguments: Any) -> Any:
            function = getattr(lib, name)
            function.restype, function.argtypes = result, list(arguments)
            return function

        self._set_layer_inp = bind(
            "_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, context, number, flag
        )
        self._get_layer_inp = bind(
            "_Z30llama_get_embeddings_layer_inpP13llama_contextj", FLOATS, context, number
        )
        self._set_nextn = bind(
            "_Z26llama_set_embeddings_nextnP13llama_contextbb", None, context, flag, flag
        )
        self._get_nextn = bind("_Z26llama_get_embeddings_nextnP13llama_context", FLOATS, context)
        self._layer_ids = bind(
            "_Z28llama_model_target_layer_idsPK11llama_model", ctypes.POINTER(ctypes.c_int32), model
        )
        self._layer_ids_n = bind("_Z30llama_model_target_layer_ids_nPK11llama_model", number, model)
        self._selector_top_k = bind(
            "_Z33llama_model_dflash_selector_top_kPK11llama_model", ctypes.c_int32, model
        )

    def _meta(self, key: bytes) -> bytes:
        value = ctypes.create_string_buffer(64)
        self.lc.llama_model_meta_val_str(self.draft, key, value, len(value))
        return value.value

    def _process_draft(self) -> None:
        code = self.lc.llama_process(self.ctx_draft, self.lc.LLAMA_PROCESS_TYPE_DECODE, self.batch)
        if code != 0:
            raise RuntimeError(f"llama_process returned {code}")

    def inject(self, n: int, pos: int) -> None:
        """Give the draft the features of the first n rows of the latest decode."""
        lc = self.lc
        taps = [
            np.ctypeslib.as_array(self._get_layer_inp(self.ctx, t), (n, self.n_embd))
            for t in self.taps
        ]
        features = np.ascontiguousarray(np.concatenate(taps, axis=1))
        lc.llama_batch_ext_clear(self.batch)
        for i, row in enumerate(features):
            data = lc.llama_embd(row.ctypes.data_as(FLOATS), 1, len(row))
            index = lc.llama_batch_ext_add_embd(self.batch, 0, data)
            where = (lc.llama_pos * 4)(pos + i, pos + i, pos + i, 0)
            lc.llama_batch_ext_set_pos(self.batch, index, where)
        self._process_draft()

    def prompt(self, tokens: list[int]) -> int:
        """Decode a prompt; returns the first generated token."""
        for start in range(0, len(tokens), self.params.n_batch):
            chunk = tokens[start : start + self.params.n_batch]
            logits = self.decode(chunk, self.pos)
            self.inject(len(chunk), self.pos)
            self.pos += len(chunk)
        return int(logits[-1].argmax())

    def propose(self, anchor: int) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Greedy draft after the text so far: path, candidate ids [n, k], lattice [n, k, k]."""
        lc = self.lc
        lc.llama_batch_ext_clear(self.batch)
        for i in range(self.n_draft + 1):
            index = lc.llama_batch_ext_add_token(self.batch, 0, self.mask if i else anchor)
            lc.llama_batch_ext_set_pos(self.batch, index, (lc.llama_pos * 1)(self.pos + i))
        self._process_draft()
        shape = (self.n_draft + 1, self.n_embd)
        rows = np.ctypeslib.as_array(self._get_nextn(self.ctx_draft), shape)[1:].copy()
        lc.llama_memory_seq_rm(lc.llama_get_memory(self.ctx_draft), 0, self.pos, -1)
        k = self.top_k
        ids = rows[:, :k].astype(np.int64)
        lattice = rows[:, k : k + k * k].reshape(-1, k, k)
        path, row = [], 0
        for i in range(self.n_draft):
            row = int(lattice[i, row].argmax())
            path.append(int(ids[i, row]))
        return path, ids, lattice

    def step(self, anchor: int) -> tuple[list[int], dict[str, Any]]:
        """One round: the next tokens of the text, and what was drafted."""
        draft, ids, lattice = self.propose(anchor)
        choice = self.decode([anchor, *draft], self.pos).argmax(axis=1).tolist()
        accepted = 0
        while accepted < len(draft) and draft[accepted] == choice[accepted]:
            accepted += 1
        done = {"anchor": anchor, "pos": self.pos, "draft": draft, "accepted": accepted}
        self.inject(accepted + 1, self.pos)
        self.pos += accepted + 1
        memory = self.lc.llama_get_memory(self.ctx)
        if accepted < len(draft) and not self.lc.llama_memory_seq_rm(memory, 0, self.pos, -1):
            raise RuntimeError("the target could not be rolled back")
        return choice[: accepted + 1], done | {"ids": ids, "lattice": lattice}


def run(job: dict[str, Any]) -> dict[str, np.ndarray]:
    """Generate `n_predict` tokens.

    Returns:
        `tokens`, and per round `anchor`, `pos`, `draft` [rounds, n], `accepted`, `ids` [rounds, n,
        k] and `lattice` [rounds, n, k, k] in the order in which the draft graph returns candidates.
    """
    pair = StockPair(job)
    tokens = [pair.prompt(job["prompt"])]
    rounds: list[dict[str, Any]] = []
    while len(tokens) < job["n_predict"]:
        new, done = pair.step(tokens[-1])
        tokens += new
        rounds.append(done)
    stacked = {key: np.array([r[key] for r in rounds]) for key in rounds[0]}
    return {"tokens": np.array(tokens[: job["n_predict"]]), **stacked}


if __name__ == "__main__":
    np.savez(sys.argv[2], **run(json.loads(Path(sys.argv[1]).read_text())))
