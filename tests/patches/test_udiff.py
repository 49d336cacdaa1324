"""Strict unified diffs: what is made applies, here and with GNU patch; the inexact is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchlib import PatchsetError, udiff

LINES = st.lists(st.sampled_from([b"a\n", b"b\n", b"}\n", b"\n", b"\tc \r\n", b"\xff\x00d\n"]),
                 max_size=25)  # fmt: skip
LAST = st.sampled_from([b"", b"end", b"\r"])


def text(lines: list[bytes], last: bytes) -> list[bytes]:
    return [*lines, last] if last else lines


def written(path: str, old: list[bytes], new: list[bytes]) -> bytes:
    return udiff.render(path, udiff.make_hunks(old, new))


@given(LINES, LAST, LINES, LAST)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_made_patch_parses_and_gives_the_new_file(a, a_last, b, b_last):
    old, new = text(a, a_last), text(b, b_last)
    if old == new:
        assert udiff.make_hunks(old, new) == []
        return
    header, files = udiff.parse(b"Description: x\n\n" + written("d/f.c", old, new), "p")
    assert header == [b"Description: x\n", b"\n"]
    assert udiff.apply(old, files["d/f.c"], "p") == new


def shortest(a: list[bytes], b: list[bytes]) -> int:
    """Number of insertions and deletions by the textbook table, as an independent reference."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], last if x == y else 1 + min(row[j], row[j - 1])
    return row[-1]


@given(LINES, LINES)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_diff_is_shortest(a, b):
    regions = udiff.changed_regions(a, b)
    assert sum(a1 - a0 + b1 - b0 for a0, a1, b0, b1 in regions) == shortest(a, b)


@given(LINES.filter(bool), LAST, LINES.filter(bool), LAST)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_gnu_patch_agrees(tmp_path_factory, gnu_patch, a, a_last, b, b_last):
    old, new = text(a, a_last), text(b, b_last)
    if old == new:
        return
    folder = tmp_path_factory.mktemp("gnu")
    (folder / "f").write_bytes(b"".join(old))
    command = [gnu_patch, "--binary", "--fuzz=0", "-p1", "--no-backup-if-mismatch"]
    done = subprocess.run(command, cwd=folder, input=written("f", old, new), capture_output=True)
    assert done.returncode == 0, done.stdout
    assert b"offset" not in done.stdout
    assert (folder / "f").read_bytes() == b"".join(new)


def numbered(*lines: str) -> list[bytes]:
    return [f"{line}\n".encode() for line in lines]


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        (numbered("x", "one", "two", "y"), 1),  # `one, two` is unique
        (numbered("x", "one", "two", "y", "one", "two", "z"), 2),
        (numbered("p", "x", "one", "two", "y", "q", "r", "x", "one", "two", "y", "s"), 3),
        (numbered(*(["x", "one", "two", "y"] * 3)), 1),  # never unique: the line number decides
    ],
)
def test_context_is_as_short_as_names_one_place(old, expected):
    at = next(i for i, line in enumerate(old) if line == b"two\n")
    hunk = udiff.make_hunks(old, [*old[:at], b"new\n", *old[at:]])[0]
    leading = [sign for sign, _ in hunk.lines].index(b"+")
    assert leading == expected


OLD = numbered(*"abcdefgh")
GOOD = b"--- a/f\n+++ b/f\n@@ -3,2 +3,3 @@\n c\n+new\n d\n"


def applied(patch: bytes, old: list[bytes] = OLD) -> list[bytes]:
    return udiff.apply(old, udiff.parse(patch, "p")[1]["f"], "p, `f`")


def test_good_patch_applies():
    assert applied(GOOD) == numbered("a", "b", "c", "new", *"defgh")


@pytest.mark.parametrize(
    ("patch", "old", "sentence"),
    [
        (GOOD, numbered(*"Xabcdefgh"), "hunk 1 no longer applies at line 3: found `b`"),
        (GOOD, numbered(*"abcXefgh"), "no longer applies at line 4: found `X`, expected `d`"),
        (GOOD, numbered(*"abc"), "no longer applies at line 4: found `(end of file)`"),
        (GOOD.replace(b"+3,3", b"+4,3"), OLD, "hunk 1 has a wrong new line number"),
        (GOOD.replace(b" c", b" c "), OLD, "found 'c\\n', expected 'c \\n'"),  # white space counts
        (GOOD + GOOD[GOOD.index(b"@@") :], OLD, "hunk 2 starts inside or before the one above"),
        (b"--- a/f\n+++ b/f\n@@ -12,0 +13 @@\n+new\n", OLD, "found 8 lines, expected at least 12"),
    ],
)  # fmt: skip
def test_inexact_patch_is_refused(patch, old, sentence):
    with pytest.raises(PatchsetError) as error:
        applied(patch, old)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("patch", "sentence"),
    [
        (b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n", "expected `--- a/PATH`"),
        (b"--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n", "a new file belongs in patches/overlay"),
        (b"--- a/f\n+++ b/g\n@@ -1 +1 @@\n-x\n+y\n", "expected `+++ b/f`"),
        (b"--- a/../f\n+++ b/../f\n@@ -1 +1 @@\n-x\n+y\n", "`../f` is not a plain relative path"),
        (b"--- a//f\n+++ b//f\n@@ -1 +1 @@\n-x\n+y\n", "`/f` is not a plain relative path"),
        (b"--- a/a\\b\n+++ b/a\\b\n@@ -1 +1 @@\n-x\n+y\n", "is not a plain relative path"),
        (b"--- a/f\n+++ b/f\n", "`f` has no hunk"),
        (b"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n", "its line counts do not fit its lines"),
        (b"--- a/f\n+++ b/f\n@@ -1 +1,2 @@\n a\n b\n", "its line counts do not fit its lines"),
        (b"--- a/f\n+++ b/f\n@@ nonsense @@\n a\n", "not a hunk header"),
        (GOOD + b"trailing\n", "found `trailing`, expected `--- a/PATH`"),
        (GOOD + GOOD, "`f` appears twice"),
    ],
)
def test_malformed_patch_is_refused(patch, sentence):
    with pytest.raises(PatchsetError) as error:
        udiff.parse(patch, "p")
    assert sentence in str(error.value)


def test_file_of_paths_stays_below_the_tree(tmp_path: Path):
    for bad in ("", "/x", "a/../../x", "./a", "a//b", "c:/x", "a\nb"):
        with pytest.raises(PatchsetError):
            udiff.checked_path(bad, "here")
    assert udiff.checked_path("a/.hidden/b-c.txt", "here") == "a/.hidden/b-c.txt"
