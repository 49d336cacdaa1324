"""A target in llama.cpp through its C API, for drivers of the stock and of our build."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

FLOATS = ctypes.POINTER(ctypes.c_float)

JOB_HELP = """A job is a dict with the paths `target` and `draft`, the ids `prompt` and `n_predict`;
optional are log (llama.cpp's own log goes to stderr), n_draft, kv ("f16", or "f32", which also
turns flash attention off), n_ctx, n_batch, n_ubatch, n_threads, n_rs_seq."""


@functools.lru_cache(maxsize=1)
def _silent_log() -> Any:
    """Kept for ever: llama.cpp calls it as long as the process lives."""
    import llama_cpp.llama_cpp as lc

    return lc.llama_log_callback(lambda *_: None)


class NativeTarget:
    """Model and context of a target; sequence 0 is used."""

    def __init__(self, job: dict[str, Any]) -> None:
        import llama_cpp.llama_cpp as lc

        self.lc = lc
        self.job = job
        lc.llama_backend_init()
        if not job.get("log"):
            lc.llama_log_set(_silent_log(), None)
        self.model = self.load(job["target"])
        self.params = lc.llama_context_default_params()
        self.params.n_ctx = job.get("n_ctx", 2048)
        self.params.n_batch = job.get("n_batch", 512)
        self.params.n_ubatch = job.get("n_ubatch", self.params.n_batch)
        self.params.n_threads = self.params.n_threads_batch = job.get("n_threads", 1)
        self.params.n_rs_seq = job.get("n_rs_seq", 15)
        if job.get("kv", "f16") == "f32":
            self.params.type_k = self.params.type_v = 0
            # flash attention would round keys, values and queries to F16 again
            self.params.flash_attn_type = lc.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.ctx = lc.llama_init_from_model(self.model, self.params)
        if not self.ctx:
            raise RuntimeError(f"llama.cpp could not create a context for {job['target']}")
        self.n_vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self.model))

    def load(self, path: str) -> Any:
        """Load a model on the CPU."""
        params = self.lc.llama_model_default_params()
        params.n_gpu_layers = 0
        model = self.lc.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise RuntimeError(f"llama.cpp refused {path}")
        return model

    def decode(self, tokens: list[int], pos: int) -> np.ndarray:
        """Decode tokens at `pos`; returns the logits of all of them, F32 [n, n_vocab]."""
        batch = self.lc.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i] = token, pos + i
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
            code = self.lc.llama_decode(self.ctx, batch)
        finally:
            self.lc.llama_batch_free(batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        return np.stack([self.logits(i) for i in range(len(tokens))])

    def logits(self, row: int) -> np.ndarray:
        """A copy of the logits of a row of the latest decode."""
        pointer = self.lc.llama_get_logits_ith(self.ctx, row)
        return np.ctypeslib.as_array(pointer, (self.n_vocab,)).copy()

    def greedy(self, prompt: list[int], n_predict: int) -> list[int]:
        """Plain decoding from position 0 by the highest logit."""
        self.lc.llama_memory_seq_rm(self.lc.llama_get_memory(self.ctx), 0, -1, -1)
        for start in range(0, len(prompt), self.params.n_batch):
            rows = self.decode(prompt[start : start + self.params.n_batch], start)
        out = [int(rows[-1].argmax())]
        while len(out) < n_predict:
            out.append(int(self.decode(out[-1:], len(prompt) + len(out) - 1)[0].argmax()))
        return out

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text; special tokens are parsed, none is added."""
        vocab, raw = self.lc.llama_model_get_vocab(self.model), text.encode()
        ids = (self.lc.llama_token * (len(raw) + 8))()
        n = self.lc.llama_tokenize(vocab, raw, len(raw), ids, len(ids), False, True)
        return list(ids[:n])

    def eog_ids(self) -> set[int]:
        """Ids that end a generation."""
        vocab = self.lc.llama_model_get_vocab(self.model)
        return {i for i in range(self.n_vocab) if self.lc.llama_vocab_is_eog(vocab, i)}

    def close(self) -> None:
        """Free context and model."""
        self.lc.llama_free(self.ctx)
        self.lc.llama_model_free(self.model)
