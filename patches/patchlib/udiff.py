"""Strict unified diffs: exact line numbers and exact context, or an error.

Files are lists of byte lines that keep their line ends, so any encoding and a missing last newline
survive. `git apply` is not used: inside a build folder of another repository it can do nothing and
still report success.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from . import PatchsetError

MAX_CONTEXT = 3
_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = b"\\ No newline at end of file\n"


@dataclass
class Hunk:
    """One change: 1-based first lines on both sides, and the lines with their sign in front.

    As in unified diffs, a side without lines gives the line after which it stands.
    """

    old_start: int
    new_start: int
    lines: list[tuple[bytes, bytes]] = field(default_factory=list)  # (b" " | b"-" | b"+", line)

    @property
    def old(self) -> list[bytes]:
        return [text for sign, text in self.lines if sign != b"+"]

    @property
    def new(self) -> list[bytes]:
        return [text for sign, text in self.lines if sign != b"-"]


def split_lines(data: bytes) -> list[bytes]:
    """Cuts at newlines only (a carriage return or form feed is part of its line)."""
    parts = data.split(b"\n")
    lines = [part + b"\n" for part in parts[:-1]]
    return [*lines, parts[-1]] if parts[-1] else lines


def checked_path(raw: str, where: str) -> str:
    """Returns a relative path below the tree in normal form; raises PatchsetError for any other."""
    path = PurePosixPath(raw)
    odd = "\\" in raw or ":" in raw or any(ord(c) < 32 for c in raw)
    if not raw or odd or path.is_absolute() or ".." in path.parts or str(path) != raw:
        raise PatchsetError(f"{where}: `{raw}` is not a plain relative path below the tree")
    return raw


def parse(data: bytes, name: str) -> tuple[list[bytes], dict[str, list[Hunk]]]:
    """Reads a patch: (header lines before the first file, {path: hunks} in file order).

    Raises:
        PatchsetError: anything but changes to existing text files in the form we write.
    """
    lines = split_lines(data)
    start = next((i for i, line in enumerate(lines) if line.startswith(b"--- ")), len(lines))
    files: dict[str, list[Hunk]] = {}
    pos = start
    while pos < len(lines):
        path, pos = _parse_names(lines, pos, name)
        if path in files:
            raise PatchsetError(f"{name}: `{path}` appears twice; one patch has one part per file")
        hunks: list[Hunk] = []
        while pos < len(lines) and lines[pos].startswith(b"@@"):
            hunk, pos = _parse_hunk(lines, pos, name)
            hunks.append(hunk)
        if not hunks:
            raise PatchsetError(f"{name}: `{path}` has no hunk")
        files[path] = hunks
    return lines[:start], files


def _parse_names(lines: list[bytes], pos: int, name: str) -> tuple[str, int]:
    where = f"{name}, line {pos + 1}"
    if not lines[pos].startswith(b"--- a/"):
        found = lines[pos][:60].decode(errors="replace").rstrip()
        raise PatchsetError(f"{where}: found `{found}`, expected `--- a/PATH`")
    old = lines[pos][6:].rstrip(b"\n").decode(errors="replace")
    new = lines[pos + 1] if pos + 1 < len(lines) else b""
    if new.rstrip(b"\n").decode(errors="replace") != f"+++ b/{old}":
        raise PatchsetError(f"{where}: expected `+++ b/{old}` below it (no new, renamed or deleted"
                            " files: a new file belongs in patches/overlay)")  # fmt: skip
    return checked_path(old, where), pos + 2


def _parse_hunk(lines: list[bytes], pos: int, name: str) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[pos])
    if not match:
        raise PatchsetError(f"{name}, line {pos + 1}: not a hunk header")
    where = f"{name}, hunk at line {pos + 1}"
    old_left, new_left = (int(match[i]) if match[i] is not None else 1 for i in (2, 4))
    hunk = Hunk(int(match[1]), int(match[3]))
    pos += 1
    while old_left or new_left:
        sign = lines[pos][:1] if pos < len(lines) else b""
        if sign not in (b" ", b"-", b"+"):
            raise PatchsetError(f"{where}: ends early; its line counts do not fit its lines")
        text = lines[pos][1:]
        pos += 1
        if pos < len(lines) and lines[pos].startswith(b"\\"):
            text = text.removesuffix(b"\n")
            pos += 1
        old_left -= sign != b"+"
        new_left -= sign != b"-"
        if old_left < 0 or new_left < 0:
            raise PatchsetError(f"{where}: its line counts do not fit its lines")
        hunk.lines.append((sign, text))
    return hunk, pos


def apply(old: list[bytes], hunks: list[Hunk], where: str) -> list[bytes]:
    """Applies hunks at exactly the lines they name, without fuzz or offset.

    Raises:
        PatchsetError: a line differs, or hunks overlap, are unordered or count wrongly.
    """
    out: list[bytes] = []
    done = 0
    for number, hunk in enumerate(hunks, 1):
        at = hunk.old_start - 1 if hunk.old else hunk.old_start
        if at < done:
            raise PatchsetError(f"{where}: hunk {number} starts inside or before the one above it")
        out += old[done:at]
        for offset, expected in enumerate(hunk.old):
            found = old[at + offset] if at + offset < len(old) else b"(end of file)"
            if found != expected:
                raise PatchsetError(
                    f"{where}: hunk {number} no longer applies at line {at + offset + 1}: found"
                    f" {_show(found, expected)}, expected {_show(expected, found)}"
                )
        if at > len(old):
            raise PatchsetError(
                f"{where}: hunk {number} no longer applies: found {len(old)} lines,"
                f" expected at least {at}"
            )
        if (hunk.new_start - 1 if hunk.new else hunk.new_start) != len(out):
            raise PatchsetError(f"{where}: hunk {number} has a wrong new line number")
        out += hunk.new
        done = at + len(hunk.old)
    return out + old[done:]


def _show(line: bytes, other: bytes) -> str:
    """A line for a message; spelled out when it differs from the other in white space only."""
    if line.split() == other.split():
        return repr(line[:120])[1:]
    return f"`{line.decode(errors='replace').strip()[:80]}`"


def changed_regions(old: list[bytes], new: list[bytes]) -> list[tuple[int, int, int, int]]:
    """Shortest edit script (Myers) as (old from, old to, new from, new to), 0-based half-open."""
    head = 0
    while head < len(old) and head < len(new) and old[head] == new[head]:
        head += 1
    tail = 0
    limit = min(len(old), len(new)) - head
    while tail < limit and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    a, b = old[head : len(old) - tail], new[head : len(new) - tail]
    regions: list[tuple[int, int, int, int]] = []
    for x, y, width, height in reversed(_edits(a, b)):
        last = regions[-1] if regions else None
        if last and last[1] == head + x and last[3] == head + y:
            regions[-1] = (last[0], head + x + width, last[2], head + y + height)
        else:
            regions.append((head + x, head + x + width, head + y, head + y + height))
    return regions


def _edits(a: list[bytes], b: list[bytes]) -> list[tuple[int, int, int, int]]:
    """Single deletions (x, y, 1, 0) and insertions (x, y, 0, 1), last one first."""
    reach = {1: 0}  # diagonal -> furthest x
    history: list[dict[int, int]] = []
    for depth in range(len(a) + len(b) + 1):
        history.append(dict(reach))
        for k in range(-depth, depth + 1, 2):
            down = k == -depth or (k != depth and reach[k - 1] < reach[k + 1])
            x = reach[k + 1] if down else reach[k - 1] + 1
            while x < len(a) and x - k < len(b) and a[x] == b[x - k]:
                x += 1
            reach[k] = x
            if x >= len(a) and x - k >= len(b):
                return _trace(history, len(a), len(b))
    return []


def _trace(history: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int, int, int]]:
    edits = []
    for depth in range(len(history) - 1, 0, -1):
        reach, k = history[depth], x - y
        down = k == -depth or (k != depth and reach[k - 1] < reach[k + 1])
        prev_x = reach[k + 1] if down else reach[k - 1]
        prev_y = prev_x - (k + 1 if down else k - 1)
        edits.append((prev_x, prev_y, 0, 1) if down else (prev_x, prev_y, 1, 0))
        x, y = prev_x, prev_y
    return edits


Region = tuple[int, int, int, int]  # old from, old to, new from, new to


def make_hunks(old: list[bytes], new: list[bytes]) -> list[Hunk]:
    """Hunks with as little context as names one place: 1 to 3 lines, each hunk for itself.

    Where even 3 lines are not unique, 1 line is used: the line number decides, and the base is
    pinned by its hash. Both ends of a hunk have the same number of context lines, because GNU patch
    takes a shorter end for the end of the file.
    """
    hunks = []
    for context, regions in _grouped(old, changed_regions(old, new)):
        low, high = _span(old, regions, context)
        shift = regions[0][2] - regions[0][0]
        old_size = high - low
        new_size = old_size + sum(b1 - b0 - a1 + a0 for a0, a1, b0, b1 in regions)
        hunk = Hunk(low + 1 if old_size else low, low + shift + (1 if new_size else 0))
        at = low
        for a0, a1, b0, b1 in regions:
            hunk.lines += [(b" ", line) for line in old[at:a0]]
            hunk.lines += [(b"-", line) for line in old[a0:a1]]
            hunk.lines += [(b"+", line) for line in new[b0:b1]]
            at = a1
        hunk.lines += [(b" ", line) for line in old[at:high]]
        hunks.append(hunk)
    return hunks


def _span(old: list[bytes], regions: list[Region], context: int) -> tuple[int, int]:
    return max(0, regions[0][0] - context), min(len(old), regions[-1][1] + context)


def _grouped(old: list[bytes], regions: list[Region]) -> list[tuple[int, list[Region]]]:
    """Regions that share a hunk, with its context; neighbours that would touch are joined."""
    groups: list[tuple[int, list[Region]]] = []
    for region in regions:
        group = (_least_context(old, [region]), [region])
        while groups and _span(old, group[1], group[0])[0] <= _span(old, *groups[-1][::-1])[1]:
            context, earlier = groups.pop()
            group = (max(context, group[0]), earlier + group[1])
        groups.append(group)
    return groups


def _least_context(old: list[bytes], regions: list[Region]) -> int:
    for context in range(1, MAX_CONTEXT + 1):
        if _occurs_once(old, *_span(old, regions, context)):
            return context
    return 1


def _occurs_once(lines: list[bytes], low: int, high: int) -> bool:
    block = lines[low:high]
    if not block:
        return not lines
    count, at = 0, -1
    while count < 2:
        try:
            at = lines.index(block[0], at + 1)
        except ValueError:
            break
        count += lines[at : at + len(block)] == block
    return count == 1


def render(path: str, hunks: list[Hunk]) -> bytes:
    """The text of one file's part of a patch, byte for byte the same for the same input."""
    out = [f"--- a/{path}\n+++ b/{path}\n".encode()]
    for hunk in hunks:
        old, new = _range(hunk.old_start, hunk.old), _range(hunk.new_start, hunk.new)
        out.append(f"@@ -{old} +{new} @@\n".encode())
        for sign, text in hunk.lines:
            out.append(sign + text if text.endswith(b"\n") else sign + text + b"\n" + _NO_NEWLINE)
    return b"".join(out)


def _range(start: int, lines: list[bytes]) -> str:
    return str(start) if len(lines) == 1 else f"{start},{len(lines)}"
