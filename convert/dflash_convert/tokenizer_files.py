"""The tokenizer files of a Hugging Face directory, read as far as a GGUF needs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InputError
from .keys import load_json

# Tokens that tokenizer_config.json may name, as `bos_token` and so on.
NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True)
class AddedToken:
    """A token beside those of the model, or one of them with flags.

    Attributes:
        special: Marks a control token.
        normalized: Looked for in the text after its normalization.
    """

    id: int
    text: str
    special: bool
    normalized: bool


class TokenizerFiles:
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

    def added(self) -> dict[str, AddedToken]:
        """Return the added tokens with their flags, as the transformers library completes them.

        tokenizer_config.json may add tokens, and the tokens it gives a role become special.
        """
        found = {entry.text: entry for entry in self.entries()}
        base = self.vocabulary
        following = max(len(base), *(e.id + 1 for e in found.values()), 0)
        for text in self.roles():
            entry = found.get(text)
            if entry is None:
                number = base.get(text, following)
                following = max(following, number + 1)
                entry = AddedToken(number, text, True, False)
            found[text] = AddedToken(entry.id, text, True, entry.normalized)
        return found

    def entries(self) -> Iterator[AddedToken]:
        """Yield the added tokens of tokenizer.json, then those only tokenizer_config.json has."""
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

    def _entry(self, entry: Any, number: Any) -> AddedToken:
        text = entry.get("content") if isinstance(entry, dict) else None
        if type(number) is not int or number < 0 or not isinstance(text, str):
            raise self.unknown("an added token has no `content` or no id")
        special = bool(entry.get("special"))
        return AddedToken(number, text, special, bool(entry.get("normalized", not special)))

    def roles(self) -> list[str]:
        """Return the texts of all tokens with a role (`bos_token`, `image_token`, ...)."""
        settings = dict(self.settings or {})
        if "added_tokens_decoder" not in settings:
            settings |= self._optional("special_tokens_map.json") or {}
        extra = settings.get("extra_special_tokens", settings.get("additional_special_tokens"))
        named = {f"{name}_token" for name in NAMED}
        values = [settings.get(f"{name}_token") for name in NAMED]
        if isinstance(extra, (dict, list)):
            values += extra.values() if isinstance(extra, dict) else extra
        # Any other key of this form names a token too, but only as a plain text.
        values += [
            v
            for k, v in settings.items()
            if k.endswith("_token") and k not in named and isinstance(v, str)
        ]
        return list(dict.fromkeys(t for t in map(token_text, values) if t is not None))


def token_text(value: Any) -> str | None:
    """Return the text of a token given as such or as an object with `content`, else None."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None
