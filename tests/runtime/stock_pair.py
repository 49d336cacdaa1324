"""Greedy speculative decoding with the unpatched llama.cpp, by its own public and staging functions.

Run as a program, because one process can load only one libllama:

    LLAMA_CPP_LIB_PATH=<stock libraries> python stock_pair.py job.json result.npz

The job names `target`, `draft`, `prompt` (ids), `n_predict`, and optionally `n_draft`, `kv` ("f16" or "f32"), `n_ctx`,
`n_batch`, `n_threads`. The result holds `tokens`, and per round `anchors`, `drafts` (padded with -1), `accepted`, `ids`
and `lattice` as stock's draft graph returns them.
"""

from __future__ import annotations

import ctypes
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lc
import numpy as np

_FLOATS = ctypes.POINTER(ctypes.c_float)


def _staging(name: str, result: Any, *arguments: Any) -> Any:
    """A function of llama-ext.h; its C++ symbol is mangled."""
    function = getattr(lc._lib, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


_ctx = lc.llama_context_p_ctypes
_model = lc.llama_model_p_ctypes
set_layer_inp = _staging(
    "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
    None,
    _ctx,
    ctypes.c_uint32,
    ctypes.c_bool,
)
get_layer_inp = _staging(
    "_Z30llama_get_embeddings_layer_inpP13llama_contextj", _FLOATS, _ctx, ctypes.c_uint32
)
set_nextn = _staging(
    "_Z26llama_set_embeddings_nextnP13llama_contextbb",
    None,
    _ctx,
    ctypes.c_bool,
    ctypes.c_bool,
)
get_nextn = _staging("_Z26llama_get_embeddings_nextnP13llama_context", _FLOATS, _ctx)
layer_ids = _staging(
    "_Z28llama_model_target_layer_idsPK11llama_model", ctypes.POINTER(ctypes.c_int32), _model
)
layer_ids_n = _staging(
    "_Z30llama_model_target_layer_ids_nPK11llama_model", ctypes.c_uint32, _model
)
selector_top_k = _staging(
    "_Z33llama_model_dflash_selector_top_kPK11llama_model", ctypes.c_int32, _model
)


@dataclass
class Round:
    """One drafted and verified block."""

    anchor: int
    pos: int
    draft: list[int]
    accepted: int
    ids: np.ndarray = field(repr=False)  # [n_draft, k]
    lattice: np.ndarray = field(repr=False)  # [n_draft, k, k]


class StockPair:
    """A target and a DFlash 2 draft in one process, sequence 0."""

    def __init__(self, job: dict[str, Any]) -> None:
        lc.llama_backend_init()
        self.log = lc.llama_log_callback(lambda *_: None)
        lc.llama_log_set(self.log, None)
        params = lc.llama_model_default_params()
        params.n_gpu_layers = 0
        self.target = lc.llama_model_load_from_file(job["target"].encode(), params)
        self.draft = lc.llama_model_load_from_file(job["draft"].encode(), params)
        if not self.target or not self.draft:
            raise RuntimeError("llama.cpp refused the target or the draft")
        block = ctypes.create_string_buffer(16)
        lc.llama_model_meta_val_str(self.draft, b"dflash.block_size", block, 16)
        causal = ctypes.create_string_buffer(16)
        lc.llama_model_meta_val_str(self.draft, b"dflash.attention.causal", causal, 16)
        self.n_draft = job.get("n_draft") or int(block.value) - 1
        self.n_batch = job.get("n_batch", 512)

        context = lc.llama_context_default_params()
        context.n_ctx = job.get("n_ctx", 2048)
        context.n_batch = context.n_ubatch = self.n_batch
        context.n_threads = context.n_threads_batch = job.get("n_threads", 1)
        if job.get("kv", "f16") == "f32":
            context.type_k = context.type_v = 0
            # flash attention would round keys, values and queries to F16 again
            context.flash_attn_type = lc.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context.n_rs_seq = self.n_draft
        self.ctx = lc.llama_init_from_model(self.target, context)
        context.n_rs_seq = 0
        context.swa_full = False
        context.ctx_other = self.ctx
        self.ctx_draft = lc.llama_init_from_model(self.draft, context)

        self.n_vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self.target))
        self.mask = lc.llama_vocab_mask(lc.llama_model_get_vocab(self.draft))
        self.n_embd = lc.llama_model_n_embd(self.draft)
        self.top_k = selector_top_k(self.draft)
        self.taps = layer_ids(self.draft)[: layer_ids_n(self.draft)]
        for tap in self.taps:
            set_layer_inp(self.ctx, tap, True)
        set_nextn(self.ctx_draft, True, False)
        lc.llama_set_causal_attn(self.ctx_draft, causal.value == b"true")
        self.batch = lc.llama_batch_ext_init(self.ctx)
        self.batch_draft = lc.llama_batch_ext_init(self.ctx_draft)
        self.pos = 0

    def _process(self, ctx: Any, batch: Any) -> None:
        code = lc.llama_process(ctx, lc.LLAMA_PROCESS_TYPE_DECODE, batch)
        if code != 0:
            raise RuntimeError(f"llama_process returned {code}")

    def _add(self, batch: Any, token: int, pos: int, output: bool) -> None:
        i = lc.llama_batch_ext_add_token(batch, 0, token)
        lc.llama_batch_ext_set_pos(batch, i, ctypes.byref(lc.llama_pos(pos)))
        lc.llama_batch_ext_set_output_logits(batch, i, output)

    def decode(self, tokens: list[int], pos: int) -> np.ndarray:
        """Decode tokens in the target; returns the logits of all of them."""
        lc.llama_batch_ext_clear(self.batch)
        for i, token in enumerate(tokens):
            self._add(self.batch, token, pos + i, True)
        self._process(self.ctx, self.batch)
        rows = [lc.llama_get_logits_ith(self.ctx, i) for i in range(len(tokens))]
        return np.stack([np.ctypeslib.as_array(r, (self.n_vocab,)).copy() for r in rows])

    def features(self, n: int) -> np.ndarray:
        """Taps of the first n rows of the latest decode, [n, taps * n_embd]."""
        rows = [get_layer_inp(self.ctx, tap) for tap in self.taps]
        return np.concatenate([np.ctypeslib.as_array(r, (n, self.n_embd)) for r in rows], axis=1)

    def inject(self, n: int, pos: int) -> None:
        """Give the draft the features of the first n rows of the latest decode."""
        features = np.ascontiguousarray(self.features(n), np.float32)
        lc.llama_batch_ext_clear(self.batch_draft)
        for i, row in enumerate(features):
            data = lc.llama_embd(row.ctypes.data_as(_FLOATS), 1, len(row))
            index = lc.llama_batch_ext_add_embd(self.batch_draft, 0, data)
            where = (lc.llama_pos * 4)(pos + i, pos + i, pos + i, 0)
            lc.llama_batch_ext_set_pos(self.batch_draft, index, where)
        self._process(self.ctx_draft, self.batch_draft)

    def prompt(self, tokens: list[int]) -> int:
        """Decode a prompt; returns the first generated token."""
        for start in range(0, len(tokens), self.n_batch):
            chunk = tokens[start : start + self.n_batch]
            logits = self.decode(chunk, self.pos)
            self.inject(len(chunk), self.pos)
            self.pos += len(chunk)
        return int(logits[-1].argmax())

    def propose(self, anchor: int) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Greedy draft after the tokens so far: path, candidate ids and lattice."""
        lc.llama_batch_ext_clear(self.batch_draft)
        for i in range(self.n_draft + 1):
            self._add(self.batch_draft, self.mask if i else anchor, self.pos + i, False)
        self._process(self.ctx_draft, self.batch_draft)
        rows = np.ctypeslib.as_array(
            get_nextn(self.ctx_draft), (self.n_draft + 1, self.n_embd)
        ).copy()[1:]
        memory = lc.llama_get_memory(self.ctx_draft)
        lc.llama_memory_seq_rm(memory, 0, self.pos, -1)
        k = self.top_k
        ids = rows[:, :k].astype(np.int64)
        lattice = rows[:, k : k + k * k].reshape(-1, k, k)
        path, row = [], 0
        for i in range(self.n_draft):
            row = int(lattice[i, row].argmax())
            path.append(int(ids[i, row]))
        return path, ids, lattice

    def step(self, anchor: int) -> tuple[list[int], Round]:
        """One round: the next tokens of the text, and what was drafted."""
        draft, ids, lattice = self.propose(anchor)
        logits = self.decode([anchor, *draft], self.pos)
        choice = logits.argmax(axis=1).tolist()
        accepted = 0
        while accepted < len(draft) and draft[accepted] == choice[accepted]:
            accepted += 1
        done = Round(anchor, self.pos, draft, accepted, ids, lattice)
        self.inject(accepted + 1, self.pos)
        self.pos += accepted + 1
        if accepted < len(draft):
            memory = lc.llama_get_memory(self.ctx)
            if not lc.llama_memory_seq_rm(memory, 0, self.pos, -1):
                raise RuntimeError("the target could not be rolled back")
        return choice[: accepted + 1], done


def run(job: dict[str, Any]) -> dict[str, np.ndarray]:
    """Generate `n_predict` tokens and report every round."""
    pair = StockPair(job)
    tokens = [pair.prompt(job["prompt"])]
    rounds = []
    while len(tokens) < job["n_predict"]:
        new, done = pair.step(tokens[-1])
        tokens += new
        rounds.append(done)
    return {
        "tokens": np.array(tokens[: job["n_predict"]]),
        "anchors": np.array([r.anchor for r in rounds]),
        "positions": np.array([r.pos for r in rounds]),
        "drafts": np.array([r.draft for r in rounds]),
        "accepted": np.array([r.accepted for r in rounds]),
        "ids": np.stack([r.ids for r in rounds]),
        "lattice": np.stack([r.lattice for r in rounds]),
    }


if __name__ == "__main__":
    np.savez(sys.argv[2], **run(json.loads(Path(sys.argv[1]).read_text())))
