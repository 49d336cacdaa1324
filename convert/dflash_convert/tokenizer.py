"""A target's tokenizer from its Hugging Face files, as the keys that its GGUF would have.

What is written is what the base's own converter writes; a test compares the two for every family.
"""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .families import Family
from .gguf_file import Field, make_field
from .special_tokens import special_keys
from .tokenizer_files import TokenizerFiles

NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6

# Gemma 4's tokens for channels and tool calls: shown, so that a chat parser can read them.
_GEMMA4_SHOWN = frozenset(
    {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"}
    | {"<|tool_response>", "<tool_response|>", '<|"|>'}
)
_RESERVED_SPECIAL = 256  # ids after the ranks of Kimi's tiktoken.model


def read_tokenizer(
    directory: Path, config: Mapping[str, Any], vocab: int, family: Family
) -> dict[str, Field]:
    """Return the `tokenizer.*` keys of a target.

    Args:
        directory: With tokenizer.json (or tiktoken.model) and tokenizer_config.json.
        config: The target's config.json.
        vocab: Rows of the token embedding; ids without a token become unused ones.
        family: From `FAMILIES`, by the config's architecture.

    Raises:
        InputError: A file is missing, damaged, or not a tokenizer of the family.
    """
    files = TokenizerFiles(directory)
    try:
        if family.kind == "tiktoken":
            keys = _tiktoken(files, vocab)
        elif family.kind == "gemma4":
            keys = _gemma4(files, vocab)
        else:
            keys = _byte_level(files, vocab, family)
        keys |= special_keys(files, config, vocab, family)
    except UnicodeEncodeError as exc:
        raise files.unknown(f"a text is not valid Unicode ({exc.reason})") from None
    return keys


# --- tokens -------------------------------------------------------------------------------------


def _byte_level(files: TokenizerFiles, vocab: int, family: Family) -> dict[str, Field]:
    pre = _pre_tokenizer(files, family)
    added = files.added()
    texts = _by_id(files, {**files.vocabulary, **{t: e.id for t, e in added.items()}}, vocab)
    tokens, types = [], []
    for number in range(vocab):
        text = texts.get(number)
        if text is None:
            tokens.append(f"[PAD{number}]")
            types.append(UNUSED)
        elif text not in added:
            tokens.append(text)
            types.append(NORMAL)
        else:
            entry = added[text]
            shown = text if entry.normalized else _decoded(text)
            special = entry.special or _looks_special(shown)
            tokens.append(shown if special else shown.replace("\u2581", " "))
            types.append(CONTROL if special else USER_DEFINED)
    return {
        "tokenizer.ggml.model": make_field("str", "gpt2"),
        "tokenizer.ggml.pre": make_field("str", pre),
        "tokenizer.ggml.tokens": make_field("str[]", tokens),
        "tokenizer.ggml.token_type": make_field("i32[]", types),
        **_merges(files),
    }


def _pre_tokenizer(files: TokenizerFiles, family: Family) -> str:
    """Return the name by which llama.cpp knows the splitting rule."""
    model = files.model
    if model.get("byte_fallback") or (files.directory / "tokenizer.model").is_file():
        raise files.unknown("it is a SentencePiece model, expected a byte-level BPE")
    if family.architecture == "llama" and not model.get("ignore_merges"):
        raise files.unknown("it does not ignore merges as Llama 3's does")
    normalizer = files.document.get("normalizer")
    kind = normalizer.get("type") if isinstance(normalizer, dict) else normalizer
    if kind not in (None, "NFC"):
        raise files.unknown(f"its normalizer is {kind}, expected none or NFC")
    found = files.document.get("pre_tokenizer")
    steps = found.get("pretokenizers") if isinstance(found, dict) else None
    steps = steps if isinstance(steps, list) else [found]
    rules = []
    for step in steps:
        step = step if isinstance(step, dict) else {}
        pattern = step.get("pattern")
        if step.get("type") == "Split" and isinstance(pattern, dict):
            whole = step.get("behavior") == "Isolated" and not step.get("invert")
            rules.append(pattern.get("Regex") if whole else None)
        elif step.get("type") != "ByteLevel" or step.get("use_regex", True):
            rules.append(None)
    name = family.pre.get(rules[0]) if len(rules) == 1 and isinstance(rules[0], str) else None
    if name is None:
        expected = " or ".join(f"`{n}`" for n in family.pre.values())
        raise files.unknown(f"its pre-tokenizer is not that of {expected}")
    return name


def _gemma4(files: TokenizerFiles, vocab: int) -> dict[str, Field]:
    model = files.model
    if not model.get("byte_fallback"):
        raise files.unknown("it is a byte-level BPE, expected one with byte fallback")
    base = files.vocabulary
    added, roles = files.added(), set(files.roles())
    texts = _by_id(files, {**base, **{t: e.id for t, e in added.items()}}, vocab)
    count = len(base) + sum(e.id >= len(base) for e in added.values())
    absent = next((i for i in range(count) if i not in texts), None)
    if absent is not None:
        raise files.unknown(f"no token has the id {absent}")
    tokens = [texts[i] for i in range(count)]
    types = []
    for number, text in enumerate(tokens):
        if text in _GEMMA4_SHOWN:
            types.append(USER_DEFINED)
        elif re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text) and number < len(base):
            types.append(BYTE)
        elif text in roles:
            types.append(CONTROL)
        else:
            types.append(NORMAL if number < len(base) else USER_DEFINED)
    return {
        "tokenizer.ggml.model": make_field("str", "gemma4"),
        "tokenizer.ggml.tokens": make_field("str[]", tokens),
        "tokenizer.ggml.scores": make_field("f32[]", [-1000.0] * count),
        "tokenizer.ggml.token_type": make_field("i32[]", types),
        "tokenizer.ggml.add_space_prefix": make_field("bool", False),
        **_merges(files),
    }


def _by_id(files: TokenizerFiles, ids: Mapping[str, int], vocab: int) -> dict[int, str]:
    largest = max(ids.values(), default=-1)
    if not ids or largest >= vocab or min(ids.values()) < 0:
        raise files.unknown(
            f"its ids reach {largest}, but the target's config has a vocabulary of {vocab}"
        )
    texts = {number: text for text, number in ids.items()}
    if len(texts) < len(ids):
        raise files.unknown(f"{len(ids)} tokens share {len(texts)} ids")
    return texts


def _merges(files: TokenizerFiles) -> dict[str, Field]:
    merges = files.model.get("merges")
    if isinstance(merges, list) and merges:
        if all(isinstance(m, str) for m in merges):
            return {"tokenizer.ggml.merges": make_field("str[]", merges)}
        if all(
            isinstance(m, list) and len(m) == 2 and all(isinstance(p, str) for p in m)
            for m in merges
        ):
            # GGUF has one text for the pair, so a space inside of it takes its byte symbol.
            pairs = [" ".join(p.replace(" ", "\u0120") for p in m) for m in merges]
            return {"tokenizer.ggml.merges": make_field("str[]", pairs)}
    raise files.unknown("`model.merges` is no list of merges")


def _byte_symbols() -> dict[int, str]:
    """Byte -> the printable character that stands for it in a byte-level BPE."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = itertools.count(0x100)
    return {b: chr(b if b in plain else next(spare)) for b in range(256)}


_SYMBOLS = _byte_symbols()
_BYTES = {symbol: byte for byte, symbol in _SYMBOLS.items()}


def _decoded(text: str) -> str:
    """Return what decoding an added token gives: byte symbols become the bytes they stand for."""
    if not all(c in _BYTES for c in text):
        return text
    return bytes(_BYTES[c] for c in text).decode("utf-8", "replace")


def _looks_special(text: str) -> bool:
    """Control tokens that some tokenizers do not mark as such."""
    if text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]"):
        return True
    pairs = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    return any(text.startswith(a) and text.endswith(b) for a, b in pairs)


# --- tiktoken -----------------------------------------------------------------------------------


def _tiktoken(files: TokenizerFiles, vocab: int) -> dict[str, Field]:
    """Kimi: ranks of byte strings; a merge is how a token falls into two of lower rank."""
    path = files.directory / "tiktoken.model"
    if not path.is_file():
        raise files.unknown("there is no tiktoken.model")
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            token, _, rank = line.partition(b" ")
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError:
        raise files.unknown("tiktoken.model is damaged") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or b"" in ranks:
        raise files.unknown("tiktoken.model has gaps in its ranks")
    named = {e.id: e.text for e in files.entries()}
    reserved = range(len(ranks), len(ranks) + _RESERVED_SPECIAL)
    special = {i: named.get(i, f"<|reserved_token_{i}|>") for i in reserved}
    texts = {rank: _symbols(token) for token, rank in ranks.items()} | special
    if max(texts) >= vocab:
        raise files.unknown(f"its ids reach {max(texts)}, expected fewer than {vocab}")
    merges = []
    for piece, number in ranks.items():
        parts = _split(ranks, piece, number) if len(piece) > 1 else []
        if len(parts) == 2:
            merges.append(" ".join(map(_symbols, parts)))
    kinds = [CONTROL if i in special else NORMAL if i in texts else UNUSED for i in range(vocab)]
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(vocab)]
    return {
        "tokenizer.ggml.model": make_field("str", "gpt2"),
        "tokenizer.ggml.pre": make_field("str", "kimi-k2"),
        "tokenizer.ggml.tokens": make_field("str[]", tokens),
        "tokenizer.ggml.token_type": make_field("i32[]", kinds),
        "tokenizer.ggml.merges": make_field("str[]", merges),
    }


def _symbols(token: bytes) -> str:
    return "".join(_SYMBOLS[b] for b in token)


def _split(ranks: Mapping[bytes, int], token: bytes, limit: int) -> list[bytes]:
    """Merge the bytes of a token by rank as long as the merged rank stays below `limit`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        joined = [ranks.get(a + b, limit) for a, b in itertools.pairwise(parts)]
        best = min(joined)
        if best >= limit:
            break
        at = joined.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
