"""Hybrid targets: a sequence is cut back to the right state whatever the others do.

Recurrent layers keep a snapshot per drafted token. Sequences that verify different numbers of
tokens go through the target one after another within a batch; the later ones must not disturb the
snapshots of the earlier ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from native_target import NativeTarget

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("our_library")]

CLOSE = 1e-4  # of the largest logit: sums in another order
N_SEQ = 3


class Sequences(NativeTarget):
    """A target with several sequences."""

    def __init__(self, path: Any, unified: bool) -> None:
        super().__init__({"target": str(path), "n_rs_seq": 7, "kv": "f32"})
        lc = self.lc
        lc.llama_free(self.ctx)
        self.params.n_seq_max = N_SEQ
        self.params.kv_unified = unified
        self.ctx = lc.llama_init_from_model(self.model, self.params)
        self.memory = lc.llama_get_memory(self.ctx)

    def decode_all(self, rows: dict[int, tuple[int, list[int]]]) -> dict[int, np.ndarray]:
        """Decode `{seq: (position, tokens)}` in one batch; returns the logits of each sequence."""
        batch = self.lc.llama_batch_init(256, 0, 1)
        at: dict[int, list[int]] = {}
        for seq, (pos, tokens) in rows.items():
            for i, token in enumerate(tokens):
                n = batch.n_tokens
                batch.token[n], batch.pos[n] = token, pos + i
                batch.n_seq_id[n], batch.seq_id[n][0], batch.logits[n] = 1, seq, 1
                at.setdefault(seq, []).append(n)
                batch.n_tokens += 1
        assert self.lc.llama_decode(self.ctx, batch) == 0
        self.lc.llama_batch_free(batch)
        return {seq: np.stack([self.logits(n) for n in where]) for seq, where in at.items()}

    def cut(self, seq: int, pos: int) -> None:
        """Forget everything of `seq` at and after `pos`."""
        assert self.lc.llama_memory_seq_rm(self.memory, seq, pos, -1)


def tokens(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 300, n).tolist()


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(N_SEQ))))
def test_unequal_drafts(order: tuple[int, ...], unified: bool, make_pair: Callable) -> None:
    """Prompts come in any order; every sequence verifies another number of tokens, many rounds."""
    path = make_pair("qwen35").target
    texts = {seq: tokens(10 + seq, seq) for seq in range(N_SEQ)}
    rng = np.random.default_rng(order)
    target = Sequences(path, unified)
    alone = Sequences(path, unified)
    try:
        for seq in order:
            target.decode_all({seq: (0, texts[seq])})
        for step in range(12):
            drafts = {s: tokens(int(rng.integers(1, 9)), 100 * step + s) for s in range(N_SEQ)}
            if step % 4 == 3:
                del drafts[int(rng.integers(N_SEQ))]  # one that waits keeps its rows for later
            target.decode_all({s: (len(texts[s]), d) for s, d in drafts.items()})
            for seq, draft in drafts.items():
                kept = int(rng.integers(1, len(draft) + 1))
                texts[seq] += draft[:kept]
                if kept < len(draft):
                    target.cut(seq, len(texts[seq]))
        for seq, text in texts.items():
            probe = tokens(4, 7)
            found = target.decode_all({seq: (len(text), probe)})[seq]
            alone.cut(0, 0)
            expected = alone.decode_all({0: (0, [*text, *probe])})[0][-len(probe) :]
            assert np.abs(found - expected).max() <= CLOSE * np.abs(expected).max(), seq
    finally:
        target.close()
        alone.close()
