"""Small but complete vocabularies for generated models: byte-level BPE and SentencePiece-like.

Any text can be encoded, every id can be decoded, and the usual special tokens exist, so llama.cpp
treats the models like real ones.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import gguf

# GGUF token types
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

LETTERS = "etaoinshrdlcumwfgypbvk"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Vocab:
    """Tokens with everything that GGUF's tokenizer keys need."""

    model: str  # "gpt2" or "llama"
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    scores: tuple[float, ...]
    bos: int
    eos: int
    eot: int
    mask: int  # an ordinary id: only a draft's config makes it the mask token
    text_ids: tuple[int, ...]  # ids that decode to printable ASCII

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def eog_ids(self) -> tuple[int, ...]:
        """Ids that end a generation."""
        return (self.eos, self.eot)

    def write(self, writer: gguf.GGUFWriter) -> None:
        """Add the tokenizer keys to a GGUF file that is being written."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(list(self.tokens))
        writer.add_token_types(list(self.types))
        if self.merges:
            writer.add_token_merges(list(self.merges))
        if self.scores:
            writer.add_token_scores(list(self.scores))
        writer.add_bos_token_id(self.bos)
        writer.add_eos_token_id(self.eos)
        writer.add_eot_token_id(self.eot)
        writer.add_add_bos_token(False)
        writer.add_add_space_prefix(False)
        writer.add_chat_template(CHAT_TEMPLATE)

    def write_hf(self, directory: Path) -> None:
        """Write a byte-level BPE as a Hugging Face tokenizer (tokenizer.json and its config)."""
        if self.model != "gpt2":
            raise ValueError("only byte-level BPE can be written as tokenizer.json")
        added = [
            {
                "id": i,
                "content": token,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for i, token in enumerate(self.tokens)
            if self.types[i] == CONTROL
        ]
        plain = {t: i for i, t in enumerate(self.tokens) if self.types[i] != CONTROL}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        document = {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": byte_level | {"use_regex": True},
            "decoder": byte_level | {"use_regex": True},
            "model": {"type": "BPE", "vocab": plain, "merges": list(self.merges)},
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.tokens[self.bos],
            "eos_token": self.tokens[self.eos],
            "add_bos_token": False,
            "chat_template": CHAT_TEMPLATE,
        }
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer.json").write_text(json.dumps(document))
        (directory / "tokenizer_config.json").write_text(json.dumps(config))


def make_vocab(n_vocab: int = 512, *, kind: str = "bpe", pre: str = "gpt-2") -> Vocab:
    """A vocabulary of exactly `n_vocab` tokens.

    Args:
        n_vocab: number of tokens, at least 300 for "bpe" and 400 for "spm".
        kind: "bpe" (byte-level, special tokens last) or "spm" (byte fall-back, special tokens
            first).
        pre: pre-tokenizer name for "bpe".
    """
    if kind == "bpe":
        return _bpe(n_vocab, pre)
    if kind == "spm":
        return _spm(n_vocab)
    raise ValueError(f"vocabulary kind {kind!r}, expected 'bpe' or 'spm'")


def _byte_symbols() -> list[str]:
    """The printable character that byte-level BPE uses for each byte."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = (chr(c) for c in itertools.count(0x100))
    return [chr(b) if b in plain else next(spare) for b in range(256)]


def _pairs(space: str) -> Iterator[tuple[str, str]]:
    """Endless merge rules: space + letter, letter pairs, then longer and longer runs."""
    yield from ((space, letter) for letter in LETTERS)
    runs: list[str] = list(LETTERS)
    while True:
        longer = [(run, letter) for run in runs for letter in LETTERS]
        yield from longer
        runs = [run + letter for run, letter in longer]


def _bpe(n_vocab: int, pre: str) -> Vocab:
    specials = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    symbols = _byte_symbols()
    n_merge = n_vocab - len(symbols) - len(specials)
    if n_merge < len(LETTERS):
        raise ValueError(f"n_vocab {n_vocab} is too small for byte-level BPE, use at least 300")
    merges = list(itertools.islice(_pairs(symbols[0x20]), n_merge))
    tokens = [*symbols, *("".join(pair) for pair in merges), *specials]
    first_special = n_vocab - len(specials)
    printable = {symbols[b] for b in range(0x20, 0x7F)}
    return Vocab(
        model="gpt2",
        pre=pre,
        tokens=tuple(tokens),
        types=(NORMAL,) * first_special + (CONTROL,) * len(specials),
        merges=tuple(" ".join(pair) for pair in merges),
        scores=(),
        bos=first_special,
        eos=first_special + 1,
        eot=first_special + 3,
        mask=first_special + 4,
        text_ids=tuple(
            i for i, token in enumerate(tokens[:first_special]) if set(token) <= printable
        ),
    )


def _spm(n_vocab: int) -> Vocab:
    specials = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    fallback = [f"<0x{b:02X}>" for b in range(256)]
    space = "\u2581"
    singles = [space, *(chr(c) for c in range(0x21, 0x7F))]
    n_pair = n_vocab - len(specials) - len(fallback) - len(singles)
    if n_pair < 1:
        raise ValueError(f"n_vocab {n_vocab} is too small for byte fall-back, use at least 400")
    pairs = ["".join(pair) for pair in itertools.islice(_pairs(space), n_pair)]
    pieces = [*pairs, *singles]
    first_piece = len(specials) + len(fallback)
    return Vocab(
        model="llama",
        pre="default",
        tokens=(*specials, *fallback, *pieces),
        types=(UNKNOWN, *(CONTROL,) * 5, *(BYTE,) * 256, *(NORMAL,) * len(pieces)),
        merges=(),
        scores=(0.0,) * first_piece + tuple(-float(rank) for rank in range(len(pieces))),
        bos=1,
        eos=2,
        eot=4,
        mask=5,
        text_ids=tuple(range(first_piece, n_vocab)),
    )
