"""Special tokens and chat templates of a tokenizer, as GGUF keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .errors import InputError
from .families import Family
from .gguf_file import Field, make_field
from .keys import load_json
from .tokenizer_files import NAMED, TokenizerFiles, token_text

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


def special_keys(
    files: TokenizerFiles, config: Mapping[str, Any], vocab: int, family: Family
) -> dict[str, Field]:
    """Return the keys of special tokens (ids, whether they are added to a text) and templates.

    Args:
        config: The target's config.json, whose ids count where the tokenizer names no token.
        vocab: Number of tokens; ids beyond it are left out.

    Raises:
        InputError: A token that the family needs is missing, or a template is no text.
    """
    settings = files.settings
    roles = _roles(settings or {})
    add = _added_around(files, roles)
    for name in NAMED:
        value = (settings or {}).get(f"add_{name}_token")
        if isinstance(value, bool):
            add.setdefault(name, value)
    if family.kind == "gemma4":
        add["bos"] = True
    ids = _ids(files, config, vocab, family, roles if settings is not None else {})
    keys = {
        f"tokenizer.ggml.{_ID_KEYS[name]}_token_id": make_field("u32", number)
        for name, number in ids.items()
        if name in _ID_KEYS and _usable(number, vocab)
    }
    keys |= {
        f"tokenizer.ggml.add_{name}_token": make_field("bool", add[name])
        for name in ("bos", "eos", "sep")
        if name in add
    }
    return keys if settings is None else keys | _chat_template(files, settings)


def _roles(settings: Mapping[str, Any]) -> dict[str, str]:
    """Role -> text of its token, by tokenizer_config.json."""
    texts = {name: token_text(settings.get(f"{name}_token")) for name in NAMED}
    roles = {name: text for name, text in texts.items() if text is not None}
    for name, other in (("bos", "cls"), ("eos", "sep")):
        if other in roles:
            roles.setdefault(name, roles[other])
    return roles


def _ids(
    files: TokenizerFiles,
    config: Mapping[str, Any],
    vocab: int,
    family: Family,
    roles: Mapping[str, str],
) -> dict[str, Any]:
    """Role -> id: by the role's text, else by the config, else by the family."""
    by_text: dict[str, int] = {}
    if files.document:
        for entry in files.document.get("added_tokens") or []:
            by_text.setdefault(entry["content"], entry["id"])
    ids: dict[str, Any] = {name: by_text.get(text) for name, text in roles.items()}
    inner = config.get("text_config")
    inner = inner if isinstance(inner, dict) else {}
    for name in (*NAMED, "eot", "eom"):
        if name in NAMED or name in roles:
            key = f"{name}_token_id"
            outer = config.get(key)
            _fill(ids, name, inner.get(key) if outer is None else outer, vocab)
    added = files.added() if family.named else {}
    for name, text in family.named.items():
        if text not in added:
            raise files.unknown(f"it has no token `{text}`")
        _fill(ids, name, added[text].id, vocab)
    return ids


def _usable(number: Any, vocab: int) -> bool:
    return type(number) is int and 0 <= number < vocab


def _fill(ids: dict[str, Any], name: str, number: Any, vocab: int) -> None:
    """Set an id that is still open."""
    if not _usable(ids.get(name), vocab):
        ids[name] = number


def _added_around(files: TokenizerFiles, roles: dict[str, str]) -> dict[str, bool]:
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


def _chat_template(files: TokenizerFiles, settings: Mapping[str, Any]) -> dict[str, Field]:
    found = settings.get("chat_template")
    if "chat_template" not in settings:
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


def _template_file(files: TokenizerFiles) -> Any:
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
