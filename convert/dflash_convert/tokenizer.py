"""A target's tokenizer from its Hugging Face files, as the keys that its GGUF would have.

What is written is what the base's own converter writes; a test compares the two for every family.
That converter tells pre-tokenizers apart by what they make of one text, which works for published
vocabularies only; here the pre-tokenizer's own definition is compared, so a fine-tune with added
tokens is recognised and one with another splitting rule is not taken for its family.
"""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import InputError
from .gguf_file import Field, make_field
from .keys import load_json

NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"

# The rule by which a tokenizer.json cuts a text into words.
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|{_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_GPT4O = (
    rf"{_WORD}[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?|{_WORD}[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)


@dataclass(frozen=True)
class Family:
    """Targets whose tokenizers are written the same way.

    Attributes:
        architecture: GGUF architecture.
        pre: Splitting rule -> value of `tokenizer.ggml.pre`.
        kind: `bpe` (byte-level), `gemma4` (BPE over SentencePiece pieces) or `tiktoken`.
        named: Special token -> its text, where the files leave it open.
        mrope: The model always has M-RoPE, also when its config does not say so.
    """

    architecture: str
    pre: Mapping[str, str] = field(default_factory=dict)
    kind: str = "bpe"
    named: Mapping[str, str] = field(default_factory=dict)
    mrope: bool = False


_QWEN = {_QWEN2: "qwen2", _QWEN35: "qwen35"}
_GLM = {_LLAMA3: "glm4"}
_GLM4_NAMED = dict.fromkeys(("eos", "unk", "bos"), "<|endoftext|>") | {"eot": "<|user|>"}
_GLM_NAMED = {
    "bos": "[gMASK]",
    "eot": "<|user|>",
    "unk": "<|endoftext|>",
    "eom": "<|observation|>",
}

# `architectures` of a target's config.json -> family.
FAMILIES = {
    "Qwen3ForCausalLM": Family("qwen3", _QWEN),
    "Qwen3MoeForCausalLM": Family("qwen3moe", _QWEN),
    "Qwen3NextForCausalLM": Family("qwen3next", _QWEN),
    "Qwen3_5ForCausalLM": Family("qwen35", _QWEN, mrope=True),
    "Qwen3_5ForConditionalGeneration": Family("qwen35", _QWEN, mrope=True),
    "Qwen3_5MoeForCausalLM": Family("qwen35moe", _QWEN, mrope=True),
    "Qwen3_5MoeForConditionalGeneration": Family("qwen35moe", _QWEN, mrope=True),
    "LlamaForCausalLM": Family("llama", {_LLAMA3: "llama-bpe"}),
    "Gemma4ForCausalLM": Family("gemma4", kind="gemma4"),
    "Gemma4ForConditionalGeneration": Family("gemma4", kind="gemma4"),
    "Gemma4UnifiedForConditionalGeneration": Family("gemma4", kind="gemma4"),
    "GptOssForCausalLM": Family("gpt-oss", {_GPT4O: "gpt-4o"}),
    "Glm4ForCausalLM": Family("glm4", _GLM, named=_GLM4_NAMED),
    "Glm4MoeForCausalLM": Family("glm4moe", _GLM, named=_GLM_NAMED),
    "Glm5NextForConditionalGeneration": Family("glm5-next", _GLM, named=_GLM_NAMED),
    "GlmMoeDsaForCausalLM": Family("glm-dsa", _GLM, named=_GLM_NAMED),
    "MiniMaxM2ForCausalLM": Family("minimax-m2", {_GPT4O: "minimax-m2"}),
    "DeepseekV3ForCausalLM": Family("deepseek2", kind="tiktoken"),
    "KimiK25ForConditionalGeneration": Family("deepseek2", kind="tiktoken"),
}

# Gemma 4's tokens for channels and tool calls: shown, so that a chat parser can read them.
_GEMMA4_SHOWN = frozenset(
    {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"}
    | {"<|tool_response>", "<tool_response|>", '<|"|>'}
)
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_ID_KEYS = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",  # as GGUF spells it
    "pad": "padding",
    "mask": "mask",
    "eot": "eot",
    "eom": "eom",
}
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
    files = _Files(directory)
    try:
        if family.kind == "tiktoken":
            keys = _tiktoken(files, vocab)
        elif family.kind == "gemma4":
            keys = _gemma4(files, vocab)
        else:
            keys = _byte_level(files, vocab, family)
        keys |= _special(files, config, vocab, family)
    except UnicodeEncodeError as exc:
        raise files.unknown(f"a text is not valid Unicode ({exc.reason})") from None
    return keys


class _Files:
    """The tokenizer files of a directory, each checked as far as it is used.

    Attributes:
        document: tokenizer.json, empty when there is none.
        settings: tokenizer_config.json, None when there is none.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.document = self._optional("tokenizer.json") or {}
        self.settings = self._optional("tokenizer_config.json")

    def _optional(self, name: str) -> dict[str, Any] | None:
        path = self.directory / name
        return load_json(path) if path.is_file() else None

    def unknown(self, reason: str) -> InputError:
        """Return the error for a tokenizer that is not what its family has."""
        return InputError(
            f"the tokenizer in `{self.directory}` cannot be written: {reason}",
            hint="convert the target to GGUF and give that: `--target TARGET.gguf`",
        )

    @property
    def model(self) -> dict[str, Any]:
        """`model` of tokenizer.json, which must be a BPE."""
        if not self.document:
            raise self.unknown("there is no tokenizer.json")
        model = self.document.get("model")
        if not isinstance(model, dict) or model.get("type") != "BPE":
            kind = model.get("type") if isinstance(model, dict) else None
            raise self.unknown(f"its model is {kind}, expected BPE")
        return model

    @property
    def vocabulary(self) -> dict[str, int]:
        """The tokens of the model, without added ones."""
        table = self.model.get("vocab")
        if not isinstance(table, dict) or not all(type(i) is int for i in table.values()):
            raise self.unknown("`model.vocab` is no table from tokens to ids")
        return table

    def added(self) -> dict[str, _Added]:
        """Return the added tokens with their flags, as the transformers library completes them.

        tokenizer_config.json may add tokens, and the tokens it gives a role become special.
        """
        found = {entry.text: entry for entry in self._entries()}
        base = self.vocabulary
        following = max(len(base), *(e.id + 1 for e in found.values()), 0)
        for text in self.roles():
            entry = found.get(text)
            if entry is None:
                number = base.get(text, following)
                following = max(following, number + 1)
                entry = _Added(number, text, True, False)
            found[text] = _Added(entry.id, text, True, entry.normalized)
        return found

    def _entries(self) -> Iterator[_Added]:
        listed = self.document.get("added_tokens") or []
        decoder = (self.settings or {}).get("added_tokens_decoder") or {}
        if not isinstance(listed, list) or not isinstance(decoder, dict):
            raise self.unknown("its added tokens are no list")
        known = set()
        for entry in listed:
            added = self._entry(entry, entry.get("id") if isinstance(entry, dict) else None)
            known.add(added.text)
            yield added
        for number, entry in decoder.items():
            added = self._entry(entry, int(number) if number.isdecimal() else None)
            if added.text not in known:
                yield added

    def _entry(self, entry: Any, number: Any) -> _Added:
        text = entry.get("content") if isinstance(entry, dict) else None
        if type(number) is not int or number < 0 or not isinstance(text, str):
            raise self.unknown("an added token has no `content` or no id")
        special = bool(entry.get("special"))
        return _Added(number, text, special, bool(entry.get("normalized", not special)))

    def roles(self) -> list[str]:
        """Return the texts of all tokens with a role (`bos_token`, `image_token`, ...)."""
        settings = dict(self.settings or {})
        if "added_tokens_decoder" not in settings:
            settings |= self._optional("special_tokens_map.json") or {}
        extra = settings.get("extra_special_tokens", settings.get("additional_special_tokens"))
        named = {f"{name}_token" for name in _NAMED}
        values = [settings.get(f"{name}_token") for name in _NAMED]
        if isinstance(extra, (dict, list)):
            values += extra.values() if isinstance(extra, dict) else extra
        # Any other key of this form names a token too, but only as a plain text.
        values += [
            v
            for k, v in settings.items()
            if k.endswith("_token") and k not in named and isinstance(v, str)
        ]
        return list(dict.fromkeys(t for t in map(_text, values) if t is not None))


@dataclass(frozen=True)
class _Added:
    id: int
    text: str
    special: bool
    normalized: bool


def _text(value: Any) -> str | None:
    """The text of a token that is given as such or as an object with `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


# --- tokens -------------------------------------------------------------------------------------


def _byte_level(files: _Files, vocab: int, family: Family) -> dict[str, Field]:
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


def _pre_tokenizer(files: _Files, family: Family) -> str:
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


def _gemma4(files: _Files, vocab: int) -> dict[str, Field]:
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


def _by_id(files: _Files, ids: Mapping[str, int], vocab: int) -> dict[int, str]:
    largest = max(ids.values(), default=-1)
    if not ids or largest >= vocab or min(ids.values()) < 0:
        raise files.unknown(
            f"its ids reach {largest}, but the target's config has a vocabulary of {vocab}"
        )
    texts = {number: text for text, number in ids.items()}
    if len(texts) < len(ids):
        raise files.unknown(f"{len(ids)} tokens share {len(texts)} ids")
    return texts


def _merges(files: _Files) -> dict[str, Field]:
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


def _tiktoken(files: _Files, vocab: int) -> dict[str, Field]:
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
    named = {e.id: e.text for e in files._entries()}
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


# --- special tokens and the chat template ---------------------------------------------------------


def _special(
    files: _Files, config: Mapping[str, Any], vocab: int, family: Family
) -> dict[str, Field]:
    roles: dict[str, str] = {}
    for name in _NAMED:
        text = _text((files.settings or {}).get(f"{name}_token"))
        if text is not None:
            roles[name] = text
    if "bos" not in roles and "cls" in roles:
        roles["bos"] = roles["cls"]
    if "eos" not in roles and "sep" in roles:
        roles["eos"] = roles["sep"]
    add = _added_around(files, roles)
    if files.settings is None:
        roles, add_settings = {}, {}
    else:
        add_settings = {n: files.settings.get(f"add_{n}_token") for n in _NAMED}
    for name, value in add_settings.items():
        if isinstance(value, bool):
            add.setdefault(name, value)

    listed = files.document.get("added_tokens") or []
    by_text: dict[str, Any] = {}
    for entry in listed:
        by_text.setdefault(entry.get("content"), entry.get("id"))
    ids = {name: by_text.get(text) for name, text in roles.items()}
    inner = config.get("text_config")
    inner = inner if isinstance(inner, dict) else {}
    for name in (*_NAMED, "eot", "eom"):
        if name in _NAMED or name in roles:
            key = f"{name}_token_id"
            outer = config.get(key)
            _fill(ids, name, inner.get(key) if outer is None else outer, vocab)
    added = files.added() if family.named else {}
    for name, text in family.named.items():
        if text not in added:
            raise files.unknown(f"it has no token `{text}`")
        _fill(ids, name, added[text].id, vocab)

    keys = {
        f"tokenizer.ggml.{_ID_KEYS[name]}_token_id": make_field("u32", number)
        for name, number in ids.items()
        if name in _ID_KEYS and _usable(number, vocab)
    }
    if family.kind == "gemma4":
        add["bos"] = True
    keys |= {
        f"tokenizer.ggml.add_{name}_token": make_field("bool", add[name])
        for name in ("bos", "eos", "sep")
        if name in add
    }
    return keys | (_chat_template(files) if files.settings is not None else {})


def _usable(number: Any, vocab: int) -> bool:
    return type(number) is int and 0 <= number < vocab


def _fill(ids: dict[str, Any], name: str, number: Any, vocab: int) -> None:
    """Set an id that is still open."""
    if not _usable(ids.get(name), vocab):
        ids[name] = number


def _added_around(files: _Files, roles: dict[str, str]) -> dict[str, bool]:
    """Return which special tokens the post-processor puts around a text.

    It may also tell more about the roles: a last token other than the named end of a text becomes
    that end, and the named one the end of a turn.
    """
    add: dict[str, bool] = {}
    processor = files.document.get("post_processor")
    if not isinstance(processor, dict):
        return add
    steps = processor.get("processors", [processor])
    for step in steps if isinstance(steps, list) else []:
        kind = step.get("type") if isinstance(step, dict) else None
        if kind == "ByteLevel":
            add.setdefault("bos", False)
            add.setdefault("eos", False)
        elif kind == "TemplateProcessing":
            _read_template(step, roles, add)
    return add


def _read_template(step: dict[str, Any], roles: dict[str, str], add: dict[str, bool]) -> None:
    found = (step.get(name) for name in ("single", "pair"))
    single, pair = (
        [p for p in parts if isinstance(p, dict)] if isinstance(parts, list) else []
        for parts in found
    )
    first = last = None
    if len(single) > 1:
        first, last = _special_id(single[0]), _special_id(single[-1])
    if first:
        if first not in (roles.get("bos"), roles.get("cls")):
            roles.setdefault("bos", first)
            roles.setdefault("cls", first)
        add["bos"] = first in (roles.get("bos"), roles.get("cls"))
    if last:
        if last != roles.get("eos"):
            spare = next((n for n in ("eot", "eom") if n not in roles), None)
            if spare is not None and "eos" in roles:
                roles[spare] = roles["eos"]
            roles["eos"] = last
        add["eos"] = True
    begin = 1 if pair and first and _special_id(pair[0]) == first else 0
    end = -1 if pair and last and _special_id(pair[-1]) == last else None
    inner = pair[begin:end]
    if not inner or _sequence(inner[0]) != "A" or _sequence(inner[-1]) != "B":
        return
    between = [_special_id(p) for p in inner[1:-1]]
    if between:
        separators = [t for t in (roles.get("sep"), roles.get("eos")) if t]
        add["sep"] = (between[0] in separators and not last) or (
            len(between) == 2 and between[1] in separators
        )
        if add["sep"] and "sep" not in roles and "eos" in roles:
            roles["sep"] = roles["eos"]


def _special_id(part: dict[str, Any]) -> str | None:
    entry = part.get("SpecialToken")
    text = entry.get("id") if isinstance(entry, dict) else None
    return text if isinstance(text, str) else None


def _sequence(part: dict[str, Any]) -> Any:
    entry = part.get("Sequence")
    return entry.get("id") if isinstance(entry, dict) else None


def _chat_template(files: _Files) -> dict[str, Field]:
    assert files.settings is not None
    found = files.settings.get("chat_template")
    if "chat_template" not in files.settings:
        found = _template_file(files)
    if isinstance(found, str):
        return {"tokenizer.chat_template": make_field("str", found)}
    templates = {}
    for entry in found if isinstance(found, list) else []:
        name, text = (
            entry.get(k) if isinstance(entry, dict) else None for k in ("name", "template")
        )
        if isinstance(name, str) and isinstance(text, str) and name:
            templates[re.sub(r"[^A-Za-z0-9]", "_", name)] = text
    keys = {}
    default = templates.pop("default", None)
    for name, text in templates.items():
        keys[f"tokenizer.chat_template.{name}"] = make_field("str", text)
    if templates:
        keys["tokenizer.chat_templates"] = make_field("str[]", list(templates))
    if default is not None:
        keys["tokenizer.chat_template"] = make_field("str", default)
    return keys


def _template_file(files: _Files) -> Any:
    jinja = files.directory / "chat_template.jinja"
    if jinja.is_file():
        default = _read_text(jinja)
        more = sorted((files.directory / "additional_chat_templates").glob("*.jinja"))
        if not more:
            return default
        named: Iterable[tuple[str, str]] = ((p.stem, _read_text(p)) for p in more)
        return [{"name": n, "template": t} for n, t in (("default", default), *named)]
    stored = files.directory / "chat_template.json"
    return load_json(stored).get("chat_template") if stored.is_file() else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"`{path}` is not UTF-8 text") from None
