"""Which tokens a draft may propose: the most frequent of texts, by the target's tokenizer.

Tokens outside of the list are never drafted, so the texts should be like what the target writes.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_convert.console import printable
from dflash_convert.errors import InputError
from dflash_convert.write import check_output, new_file

from .opening import open_vocab

if TYPE_CHECKING:
    from llama_cpp import Llama

# Where the lines of a .jsonl file have their text; `messages` has it under `content` again.
TEXT_KEYS = ("text", "content", "answer", "response")
_KEYS_SHOWN = "text under `text`, `content`, `answer`, `response` or `messages`"

_CHUNK = 1 << 18  # bytes that are tokenised at once, or a longer line
_BOM = b"\xef\xbb\xbf"


@dataclass
class Counted:
    """Tokens that were counted.

    Attributes:
        vocab: Number of tokens of the target.
        ends: Tokens that end a text; part of every list.
        counts: Occurrences by token.
        sources: Tokens by file, in the order of the files.
    """

    vocab: int
    ends: tuple[int, ...]
    counts: Counter[int] = field(default_factory=Counter)
    sources: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Tokens counted."""
        return self.counts.total()

    def choose(self, n: int) -> list[int]:
        """Return the `n` most frequent tokens, ascending; fewer where fewer were seen.

        Those that end a text come first, then the more frequent, then the lower id.
        """
        ranked = sorted(self.counts, key=lambda i: (-self.counts[i], i))
        others = (i for i in ranked if i not in self.ends)
        room = max(0, n - len(self.ends))
        return sorted([*self.ends, *(i for i, _ in zip(others, range(room), strict=False))])

    def covered(self, ids: Sequence[int]) -> float:
        """Return the share of the counted tokens that `ids` stand for, 0 to 1."""
        return sum(self.counts[i] for i in ids) / self.total


@dataclass(frozen=True)
class DraftVocab:
    """A list that was written.

    Attributes:
        path: The file.
        ids: The tokens, ascending.
        asked: Number of tokens asked for.
        counted: What they were chosen from.
    """

    path: Path
    ids: tuple[int, ...]
    asked: int
    counted: Counted

    def coverage(self) -> list[tuple[int, float]]:
        """Return number of tokens and covered share for half, once and twice as many."""
        sizes = (self.asked // 2, self.asked, 2 * self.asked)
        chosen = [self.counted.choose(n) for n in sizes]
        return sorted({len(ids): self.counted.covered(ids) for ids in chosen}.items())

    def to_json(self) -> dict[str, Any]:
        """Return everything but the ids as plain data."""
        return {
            "path": str(self.path),
            "vocab": self.counted.vocab,
            "asked": self.asked,
            "tokens": len(self.ids),
            "covered": self.counted.covered(self.ids),
            "end_tokens": list(self.counted.ends),
            "counted": self.counted.total,
            "distinct": len(self.counted.counts),
            "coverage": [{"tokens": n, "covered": share} for n, share in self.coverage()],
            "sources": [{"path": p, "counted": n} for p, n in self.counted.sources.items()],
        }


def make_list(
    model: Path,
    texts: Sequence[Path],
    n: int,
    path: Path,
    *,
    force: bool = False,
    on_bytes: Callable[[int], object] = lambda n: None,
) -> DraftVocab:
    """Count the tokens of texts and write the most frequent ones, one id a line.

    Args:
        model: GGUF of the target; only its vocabulary is loaded.
        texts: Files of plain text, or `.jsonl` (see `TEXT_KEYS`).
        n: Number of tokens, those that end a text included.
        path: File to write.
        force: Replace an existing file.
        on_bytes: Told the bytes that were read.

    Raises:
        InputError: A file is missing or malformed or has no text, `n` has no room for the tokens
            that end a text, or `path` exists.
    """
    check_output(path, force=force)
    for text in texts:
        _need_text(text)
        if path.exists() and path.samefile(text):
            raise InputError(f"`{path}` is one of the texts, expected another name for the list")
    with open_vocab(model) as llm:
        counted = count(llm, texts, on_bytes)
    if not counted.total:
        raise InputError(
            f"no tokens in {', '.join(f'`{t}`' for t in texts)}, expected text to count tokens of"
        )
    if n < len(counted.ends):
        raise InputError(
            f"-n {n} has no room for the {len(counted.ends)} tokens that end a text, expected "
            "more tokens than that"
        )
    result = DraftVocab(path, tuple(counted.choose(n)), n, counted)
    data = _lines(result, model).encode()
    with new_file(path, force=force, nbytes=len(data)) as part, part.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return result


def _lines(made: DraftVocab, model: Path) -> str:
    name = printable(model.name).replace("\n", " ").replace("\t", " ")
    share = 100 * made.counted.covered(made.ids)
    comment = (
        f"# {len(made.ids)} of the {made.counted.vocab} tokens of {name}: they cover {share:.2f} % "
        f"of {made.counted.total} counted"
    )
    return "\n".join([comment, *map(str, made.ids)]) + "\n"


def count(
    llm: Llama, texts: Sequence[Path], on_bytes: Callable[[int], object] = lambda n: None
) -> Counted:
    """Count the tokens of texts.

    Args:
        llm: The target, or its vocabulary alone.
        texts: As for `make_list`.
        on_bytes: Told the bytes that were read.

    Raises:
        InputError: A file is malformed.
    """
    import llama_cpp

    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    size = llm.n_vocab()
    ends = tuple(i for i in range(size) if llama_cpp.llama_vocab_is_eog(vocab, i))
    counted = Counted(size, ends)
    for path in texts:
        before = counted.total
        jsonl = path.suffix.lower() in (".jsonl", ".ndjson")
        for piece in (_records if jsonl else _chunks)(path, size, on_bytes):
            # What a model writes has its control tokens as such.
            counted.counts.update(
                llm.tokenize(piece, add_bos=False, special=True)
                if isinstance(piece, bytes)
                else piece
            )
        counted.sources[str(path)] = counted.sources.get(str(path), 0) + counted.total - before
    return counted


# --- reading --------------------------------------------------------------------------------------


def _need_text(path: Path) -> None:
    if path.is_dir():
        raise InputError(f"`{path}` is a directory, expected a file of text")
    if not path.exists():
        raise InputError(f"no file `{path}`, expected text to count tokens of")


def _chunks(
    path: Path, vocab: int, on_bytes: Callable[[int], object]
) -> Iterator[bytes | list[int]]:
    """Yield a text in pieces of whole lines."""
    start = 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK) + stream.readline():
            try:
                chunk.decode("utf-8")
            except UnicodeDecodeError as exc:
                raise InputError(
                    f"`{path}` is not UTF-8 text (byte {start + exc.start}), expected text to "
                    "count tokens of"
                ) from None
            yield chunk.removeprefix(_BOM) if start == 0 else chunk
            start += len(chunk)
            on_bytes(len(chunk))


def _records(
    path: Path, vocab: int, on_bytes: Callable[[int], object]
) -> Iterator[bytes | list[int]]:
    """Yield the texts in the lines of a .jsonl file, and the ids of answers that are such."""
    found = False
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                where = f"`{path}` line {number}"
                for piece in _pieces(_record(line, where), where, vocab):
                    found = True
                    yield piece.encode("utf-8", "replace") if isinstance(piece, str) else piece
            on_bytes(len(line))
    if not found:
        raise InputError(f"`{path}` has no text, expected objects with {_KEYS_SHOWN}")


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.removeprefix(_BOM))
    except (ValueError, RecursionError) as exc:
        why = getattr(exc, "msg", "not UTF-8 text")
        raise InputError(f"{where} is not JSON ({why}), expected an object") from None
    if not isinstance(record, dict):
        raise InputError(f"{where} is not an object, expected one with {_KEYS_SHOWN}")
    return record


def _pieces(record: dict[str, Any], where: str, vocab: int) -> Iterator[str | list[int]]:
    for key in TEXT_KEYS:
        value = record.get(key)
        if key == "answer" and isinstance(value, list):
            if value:
                yield _ids(value, where, vocab)
        else:
            yield from _texts(value)
    messages = record.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            yield from _texts(message.get("content"))


def _texts(value: Any) -> Iterator[str]:
    """A content is a text, or a list of parts of which some are."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part["text"]


def _ids(value: list[Any], where: str, vocab: int) -> list[int]:
    wrong = [i for i in value if type(i) is not int or not 0 <= i < vocab]
    if wrong:
        raise InputError(
            f"{where} has `{json.dumps(wrong[0])[:40]}` in `answer`, expected a text, or token ids "
            f"of the target (0 to {vocab - 1})"
        )
    return value
