"""Next-token logits of the target alone, computed in any sequence of passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_convert.errors import FailureError

if TYPE_CHECKING:
    import numpy as np
    from llama_cpp import Llama


@dataclass(frozen=True)
class Round:
    """One pass of the target.

    Attributes:
        start: Index of the first token it decodes (the anchor), counted in generated tokens.
        rows: Tokens it decodes: the anchor and the drafted ones; 1 in plain decoding.
    """

    start: int
    rows: int


class Rescorer:
    """Scores a prefix again in a context of its own, with the settings of an open model.

    The draft has no part in it: what differs between passes of one row and passes of several is
    rounding that depends on how many rows the target sees at once.

    Args:
        llm: An open target; its weights are shared, its context is left alone.

    Raises:
        FailureError: No memory for a second context.
    """

    def __init__(self, llm: Llama):
        import llama_cpp

        self._c = llama_cpp
        self._params = llm.context_params
        self._ctx = llama_cpp.llama_init_from_model(llm.model, self._params)
        if not self._ctx:
            raise FailureError("no memory for a second context of the target to re-score with")
        self._n_vocab = llm.n_vocab()
        self._n_batch = llm.n_batch
        self._batch = llama_cpp.llama_batch_init(self._n_batch, 0, 1)

    def close(self) -> None:
        """Free the context."""
        if self._ctx:
            self._c.llama_batch_free(self._batch)
            self._c.llama_free(self._ctx)
            self._ctx = None

    def score(
        self, prompt: Sequence[int], text: Sequence[int], rounds: Sequence[Round]
    ) -> np.ndarray:
        """Score what follows `text`; see `walk`.

        Returns:
            float32 [n_vocab].
        """
        return deque(self.walk(prompt, text, rounds), maxlen=1).pop()[1]

    def walk(
        self, prompt: Sequence[int], text: Sequence[int], rounds: Sequence[Round]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Decode `prompt` and `text` from an empty memory, in the passes that `rounds` describes.

        Args:
            prompt: Tokens before the text.
            text: Generated tokens.
            rounds: Passes in order, the first one at 0; a pass ends where the next one starts.

        Yields:
            Index and logits (float32 [n_vocab]) for every token of `text` and the one after it.

        Raises:
            FailureError: The target cannot decode, or cannot drop rejected rows.
        """
        yield 0, self._prompt(prompt)
        passes = [r for r in rounds if r.start < len(text)]
        ends = [r.start for r in passes[1:]] + [len(text)]
        for r, end in zip(passes, ends, strict=True):
            kept = end - r.start
            pos = len(prompt) + r.start
            # Rows after the kept ones stand for rejected drafts. No kept row looks at them, so
            # which token they hold does not matter; only their number does.
            rows = max(kept, r.rows)
            block = [*text[r.start : end], *[text[end - 1]] * (rows - kept)]
            logits = self._decode(block, pos)
            for i in range(kept):
                yield r.start + i + 1, logits[i]
            if rows > kept and end < len(text):
                memory = self._c.llama_get_memory(self._ctx)
                if not self._c.llama_memory_seq_rm(memory, 0, pos + kept, -1):
                    raise FailureError(
                        f"the target's memory refuses to drop {rows - kept} rejected rows"
                    )

    # --- helpers ------------------------------------------------------------------------------

    def _prompt(self, prompt: Sequence[int]) -> np.ndarray:
        self._c.llama_memory_clear(self._c.llama_get_memory(self._ctx), True)
        logits: Any = None
        for first in range(0, len(prompt), self._n_batch):
            chunk = prompt[first : first + self._n_batch]
            logits = self._decode(chunk, first, last_only=True)[0]
        return logits

    def _decode(self, tokens: Sequence[int], pos: int, *, last_only: bool = False) -> np.ndarray:
        """Decode one batch; return logits, float32 [1 if last_only else len(tokens), n_vocab].

        The number of output rows is part of the shape that kernels see (the head runs on these
        rows alone), so a block asks for all of its rows, as verification does.
        """
        import numpy as np

        batch = self._batch
        batch.n_tokens = len(tokens)
        rows = [len(tokens) - 1] if last_only else list(range(len(tokens)))
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = pos + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = not last_only or i == rows[0]
        status = self._c.llama_decode(self._ctx, batch)
        if status != 0:
            raise FailureError(f"re-scoring fails: llama_decode answers {status} at token {pos}")
        out = np.empty((len(rows), self._n_vocab), dtype=np.float32)
        for i, row in enumerate(rows):
            pointer = self._c.llama_get_logits_ith(self._ctx, row)
            out[i] = np.ctypeslib.as_array(pointer, shape=(self._n_vocab,))
        return out


@contextmanager
def rescorer(llm: Llama) -> Iterator[Rescorer]:
    """Open a Rescorer for the duration of a `with` block."""
    scorer = Rescorer(llm)
    try:
        yield scorer
    finally:
        scorer.close()
