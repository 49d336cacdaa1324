"""Read typed values from config.json, collecting every problem instead of stopping at the first."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import InputError

REQUIRED: Any = object()

_NESTED = "dflash_config"
_SMALLEST, _LARGEST = 2.0**-126, 2.0**128 - 2.0**104  # normal float32
_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        InputError: The file is missing, unreadable, not JSON or not an object.
    """
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"no `{path.name}` in `{path.parent}`") from None
    except RecursionError:
        raise InputError(f"`{path}` is nested too deeply") from None
    except ValueError as exc:  # covers JSONDecodeError and UnicodeDecodeError
        raise InputError(f"`{path}` is not valid JSON: {exc}") from None
    if not isinstance(document, dict):
        raise InputError(f"`{path}` holds {_found(document)}, expected an object")
    return document


def _found(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


class KeyReader:
    """Typed access to a config, where the draft's own keys may be nested in `dflash_config`.

    Attributes:
        problems: A sentence for each value that is missing, of the wrong type or out of range.
        used: Full names of the keys that were asked for.
    """

    def __init__(self, raw: Mapping[str, Any]):
        self.raw = raw
        self.problems: list[str] = []
        self.used: set[str] = {_NESTED}
        nested = raw.get(_NESTED)
        if nested is not None and not isinstance(nested, dict):
            self.problems.append(f"`{_NESTED}` is {_found(nested)}, expected an object")
            nested = None
        self.nested: Mapping[str, Any] = nested or {}

    def own(self, key: str, kind: type, default: Any = REQUIRED, **limits: Any) -> Any:
        """Read a key of the draft: nested in `dflash_config`, else at top level."""
        self.used.add(f"{_NESTED}.{key}")
        if self.nested.get(key) is not None:
            self.used.add(key)
            return self._check(self.nested[key], f"{_NESTED}.{key}", kind, default, **limits)
        return self.top(key, kind, default, **limits)

    def top(self, key: str, kind: type, default: Any = REQUIRED, **limits: Any) -> Any:
        """Read a key at top level; null counts as missing."""
        self.used.add(key)
        return self._check(self.raw.get(key), key, kind, default, **limits)

    def inside(
        self,
        where: str,
        table: Mapping[str, Any],
        key: str,
        kind: type,
        default: Any,
        **limits: Any,
    ) -> Any:
        """Read a key of another object of the config, called `where` in messages."""
        return self._check(table.get(key), f"{where}.{key}", kind, default, **limits)

    def _check(
        self,
        value: Any,
        name: str,
        kind: type,
        default: Any,
        *,
        low: float | None = None,
        high: float | None = None,
        above: float | None = None,
    ) -> Any:
        fallback = None if default is REQUIRED else default
        if value is None:
            if default is REQUIRED:
                self.problems.append(f"`{name}` is missing, expected {_WORDS[kind]}")
            return fallback
        expected, found = _WORDS[kind], _found(value)
        # bool is an int for Python, and 1 a bool for nobody.
        right = (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))) or (
            kind is float and type(value) is int
        )
        if right and kind is float:
            try:
                value = float(value)
            except OverflowError:
                value = math.inf
            # The GGUF stores 32 bits: beyond them a number becomes infinite or zero.
            right = value == 0 or _SMALLEST <= abs(value) <= _LARGEST
            expected = "a number that fits 32 bits" if math.isfinite(value) else expected
        if not right:
            self.problems.append(f"`{name}` is {found}, expected {expected}")
            return fallback
        for wrong, text in (
            (low is not None and value < low, f"at least {low}"),
            (high is not None and value > high, f"at most {high}"),
            (above is not None and value <= above, f"more than {above}"),
        ):
            if wrong:
                self.problems.append(f"`{name}` is {value}, expected {text}")
                return fallback
        return value

    def list_of(
        self, name: str, values: Any, fits: Callable[[Any], bool], expected: str
    ) -> tuple[Any, ...] | None:
        """Check every item of a list that was read before; None when it was missing or wrong."""
        if values is None:
            return None
        wrong = [v for v in values if not fits(v)]
        if wrong or not values:
            found = f"contains {_found(wrong[0])}" if wrong else "is empty"
            self.problems.append(f"`{name}` {found}, expected {expected}")
            return None
        return tuple(values)

    def unknown(self, known: frozenset[str]) -> tuple[list[str], list[str]]:
        """Return the keys that nobody asked for: at top level, and nested in `dflash_config`."""
        top = [k for k, v in self.raw.items() if k not in self.used | known and v is not None]
        nested = [
            f"{_NESTED}.{k}"
            for k, v in self.nested.items()
            if f"{_NESTED}.{k}" not in self.used and k not in known and v is not None
        ]
        return top, nested
