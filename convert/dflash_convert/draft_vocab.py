"""A reduced draft vocabulary: the draft proposes only the tokens of a list.

The draft gets a head with just their rows, and `d2t`, which says what tokens these are. Rows of a
target's GGUF keep their bits, so that the logits of these tokens stay what they were.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import STORED, Checkpoint, SourceTensor
from .config import DraftConfig
from .errors import FailureError, InputError
from .keys import load_json
from .target import Target
from .target_tensors import EMBEDDING, HEAD, Fetch, in_directory, in_gguf, index_names
from .tensor_types import TensorType, type_layout

if TYPE_CHECKING:
    import numpy as np

    from .gguf_file import TensorInfo

IDS = "d2t"

_FORM = "expected one token id a line, or a JSON list of ids"
_INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_WHOLE = "give the whole target: a GGUF in one file, or a directory with its weights"
# A text ends with one of these, whatever the list's texts do.
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


@dataclass(frozen=True)
class Rows(SourceTensor):
    """Some rows of a table, read as if they were a table of their own.

    `dtype` is that of the table: a safetensors type, or ggml's name of any other.

    Attributes:
        numbers: The rows.
        borrowed: The table is the target's.
        kept: Type that the rows keep, bit for bit; None for one that the output type decides.
    """

    numbers: np.ndarray | None = dataclass_field(default=None, compare=False)
    borrowed: bool = False
    kept: TensorType | None = None

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return self.elements // self.row * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        if self.kept is not None:
            return self.kept.nbytes(self.row)
        return self.row * int(STORED[self.dtype][2])

    def read(self, start: int, count: int) -> np.ndarray:
        """Read whole rows, as stored; blocks of quantised types as bytes."""
        import numpy as np

        assert self.numbers is not None
        assert start % self.row == count % self.row == 0
        first = start // self.row
        chosen = self.numbers[first : first + count // self.row]
        size = self._row_bytes
        raw = np.empty((len(chosen), size), np.uint8)
        with open(self.file, "rb") as stream:
            for place, number in zip(raw, chosen.tolist(), strict=True):
                stream.seek(self.offset + number * size)
                if stream.readinto(place.data) != size:
                    raise FailureError(f"`{self.file}` ended inside tensor `{self.raw_name}`")
        return raw.reshape(-1).view(STORED.get(self.dtype, "u1"))


@dataclass(frozen=True)
class _Listed(SourceTensor):
    """The list in the form of a checkpoint's `d2t`: target id minus draft id."""

    values: np.ndarray | None = dataclass_field(default=None, compare=False)

    def read(self, start: int, count: int) -> np.ndarray:
        assert self.values is not None
        return self.values[start : start + count].copy()


def with_draft_vocab(
    checkpoint: Checkpoint,
    config: DraftConfig,
    target: Target,
    path: Path,
    fetch: Fetch | None = None,
) -> tuple[Checkpoint, DraftConfig, str | None]:
    """Give a draft a reduced vocabulary.

    Args:
        path: The list of token ids, see `read_ids`.
        fetch: Brings the files with the named tensors of a target on the hub.

    Returns:
        The checkpoint with `d2t` and the head's rows, the config with their number, and a sentence
        worth showing or None.

    Raises:
        InputError: The list cannot be used, the draft has a reduced vocabulary already, or neither
            it nor the target has a head whose rows could be taken.
    """
    import numpy as np

    present = checkpoint.tensors.get(IDS)
    if present is not None or config.draft_vocab != config.vocab:
        size = config.draft_vocab if present is None else present.elements
        raise InputError(
            f"the draft `{checkpoint.path}` has a reduced vocabulary already ({size} of "
            f"{config.vocab} tokens), expected one with the target's",
            hint="leave `--draft-vocab` out",
        )
    ids = np.array(read_ids(path, config.vocab, config.top_k or 1), np.int64)
    head = _own_head(checkpoint, config) or _target_head(target, fetch)
    if head.shape != (config.vocab, config.hidden):
        found = " x ".join(map(str, head.shape))
        raise InputError(
            f"the head `{head.raw_name}` in `{head.file}` is {found}, expected {config.vocab} x "
            f"{config.hidden}: the draft's tokens and hidden size",
            hint="give the target that the draft was trained for" if head.borrowed else None,
        )
    rows = replace(head, name=HEAD, shape=(len(ids), config.hidden), numbers=ids)
    listed = _Listed(IDS, path.name, path, "I64", ids.shape, 0, values=ids - np.arange(len(ids)))
    tensors = {**checkpoint.tensors, HEAD: rows, IDS: listed}
    return (
        replace(checkpoint, tensors=tensors),
        replace(config, draft_vocab=len(ids)),
        _missing_ends(target, path, ids),
    )


def _missing_ends(target: Target, path: Path, ids: np.ndarray) -> str | None:
    ends = {n for key in _END_KEYS if (n := target.file.integer(key)) is not None}
    missing = sorted(ends - set(ids.tolist()))
    if not missing:
        return None
    names = " and ".join(map(str, missing))
    return f"`{path}` lacks token {names}, which ends a text: the draft will never propose it"


# --- the list -------------------------------------------------------------------------------------


def read_ids(path: Path, vocab: int, least: int = 1) -> list[int]:
    """Read a list of token ids: one a line with `#` comments, or a JSON list.

    Args:
        vocab: Number of tokens of the target.
        least: So many ids are needed.

    Returns:
        The ids, ascending.

    Raises:
        InputError: No such file, or something in it is no id, out of range or there twice, or there
            are too few.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"no file `{path}`, {_FORM}") from None
    except IsADirectoryError:
        raise InputError(f"`{path}` is a directory, {_FORM}") from None
    except UnicodeDecodeError as exc:
        raise InputError(f"`{path}` is not UTF-8 text (byte {exc.start}), {_FORM}") from None
    found = _from_json(path, text) if text.lstrip().startswith("[") else _from_lines(path, text)
    if not found:
        raise InputError(f"`{path}` lists no tokens, {_FORM}")
    outside = [i for i in found if not 0 <= i < vocab]
    if outside:
        raise InputError(
            f"`{path}` lists {len(outside)} ids outside the vocabulary (the first is "
            f"{outside[0]}), expected 0 to {vocab - 1}",
            hint="make the list with this target: `dflash-cpp draft-vocab`",
        )
    doubled = [i for i, count in Counter(found).items() if count > 1]
    if doubled:
        raise InputError(
            f"`{path}` lists {len(doubled)} ids more than once (the first is {doubled[0]}), "
            "expected each once",
            hint=f"`sort -n -u {path}` drops the repetitions",
        )
    if len(found) < least:
        raise InputError(
            f"`{path}` lists {len(found)} tokens, expected at least {least}: the draft's selector "
            "chooses among so many candidates (selector_top_k)",
            hint="list more tokens",
        )
    return sorted(found)


def _from_lines(path: Path, text: str) -> list[int]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        if not _INTEGER.fullmatch(entry):
            raise InputError(f"`{path}` line {number} is `{entry[:40]}`, {_FORM}")
        found.append(int(entry))
    return found


def _from_json(path: Path, text: str) -> list[int]:
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InputError(f"`{path}` is not valid JSON ({exc}), {_FORM}") from None
    wrong = [entry for entry in found if type(entry) is not int]
    if wrong:
        raise InputError(f"`{path}` holds `{json.dumps(wrong[0])[:40]}`, {_FORM}")
    return list(found)


# --- the head -------------------------------------------------------------------------------------


def _own_head(checkpoint: Checkpoint, config: DraftConfig) -> Rows | None:
    own = checkpoint.tensors.get(HEAD)
    if own is None and config.tied:
        own = checkpoint.tensors.get(EMBEDDING)
    return None if own is None else _rows(own, borrowed=False)


def _rows(table: SourceTensor, *, borrowed: bool, kept: TensorType | None = None) -> Rows:
    place = (table.name, table.raw_name, table.file, table.dtype, table.shape, table.offset)
    return Rows(*place, borrowed=borrowed, kept=kept)


def _target_head(target: Target, fetch: Fetch | None) -> Rows:
    if target.is_directory:
        return _head_in_directory(target, fetch)
    scales = [n for n in ("output.scale", "output.input_scale") if n in target.file.tensors]
    if scales:
        raise InputError(
            f"the head of `{target.path}` has a scale, `{scales[0]}`, expected one without: its "
            "rows alone would be other numbers",
            hint="give the target in another type, or its Hugging Face directory",
        )
    info = in_gguf(target, (HEAD,))
    if info is None and target.is_split:
        raise InputError(
            f"`{target.path}` is the first part of a split model and has no `output.weight`, "
            "expected the output head in it",
            hint="merge the parts first: `llama-gguf-split --merge`",
        )
    info = info or in_gguf(target, (EMBEDDING,))
    if info is None:
        raise InputError(
            f"`{target.path}` has neither `output.weight` nor `token_embd.weight`, expected the "
            "output head whose rows the draft takes",
            hint=_WHOLE,
        )
    return _head_in_gguf(target, info)


def _head_in_gguf(target: Target, info: TensorInfo) -> Rows:
    layout = type_layout(info.type_id)
    if layout is None or info.nbytes is None:
        raise InputError(
            f"the head `{info.name}` in `{target.path}` has {info.type_name}, which is not known "
            "here, expected a type of ggml's",
            hint="give the target in another type, or its Hugging Face directory",
        )
    if info.name in target.file.truncated_tensors():
        raise InputError(
            f"the head `{info.name}` of `{target.path}` is cut off, expected all of it",
            hint="download the target again",
        )
    name, block, block_bytes = layout
    table = SourceTensor(HEAD, info.name, target.path, name, info.shape, info.offset)
    kept = TensorType(name.lower(), info.type_id, block, block_bytes)
    return _rows(table, borrowed=True, kept=kept)


def _head_in_directory(target: Target, fetch: Fetch | None) -> Rows:
    table = in_directory(target, (HEAD, EMBEDDING), fetch)
    if table is None or not table.raw_name.endswith(HEAD):
        absent = index_names(target, HEAD)
        if table is None or absent or not _is_tied(target):
            why = " (its index names files that are absent)" if absent else ""
            raise InputError(
                f"`{target.path}` has no `{HEAD}`{why}, expected the output head whose rows the "
                "draft takes",
                hint=_WHOLE,
            )
    return _rows(table, borrowed=True)


def _is_tied(target: Target) -> bool:
    """Only an untied model says so: families differ in what they leave out."""
    config = load_json(target.path / "config.json")
    inner: Any = config.get("text_config")
    found: Sequence[Any] = [
        c.get("tie_word_embeddings") for c in (inner, config) if isinstance(c, dict)
    ]
    return next((value for value in found if value is not None), True) is not False
