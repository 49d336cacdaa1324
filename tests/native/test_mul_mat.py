"""Products of few columns: right, the same bits for every number of columns, and ours.

`mul_mat.cpp` runs one product through ggml's CPU backend and measures it in double precision.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SWITCH = "GGML_DFLASH_SMALL_BATCH"

# Errors relative to sum |w x|. Float weights: a few roundings of 2^-24, spread over the lanes.
# Quantised: each x is off by at most 1/254 of its block's largest value, which among 32 normal
# numbers is about three times the mean size; more blocks average out. K-quants take x in blocks of
# 256, whose largest value is about four times the mean size. A group's minimum is multiplied with
# the sum of the same quantised x, so it is part of w and adds no error of its own.
BOUND = {"f32": 1e-6, "f16": 1e-6, "bf16": 1e-6, "q8_0": 1.2e-2, "q4_0": 1.2e-2}
BOUND |= dict.fromkeys(("q4_K", "q5_K", "q6_K"), 1.6e-2)
ARM = platform.machine() in ("aarch64", "arm64") or "aarch64" in os.environ.get(
    "DFLASH_NATIVE_RUN", ""
)
# what the base interleaves when loading, of the types that are ours
INTERLEAVED = ("q8_0", "q4_0", "q4_K", "q5_K", "q6_K") if ARM else ("q4_0", "q4_K")
TYPES = [*((name, "file") for name in BOUND), *((name, "repack") for name in INTERLEAVED)]

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def program(build: Callable[..., Path], ggml_dir: Path) -> Path:
    return build("mul_mat", libraries=("ggml", "ggml-cpu", "ggml-base"), lib_dir=ggml_dir)


def whole_blocks(k: int, name: str) -> int:
    """Return the next width that consists of whole blocks."""
    return -(-k // 256) * 256 if name.endswith("_K") else k


def run(
    program: Path,
    kind: tuple[str, str],
    k: int,
    rows: int,
    n: int,
    *,
    threads: int = 1,
    seed: int = 1,
    scale: float = 1.0,
    switch: str | None = None,
    special: str = "none",
) -> list[dict[str, Any]]:
    """One entry per number of columns 1..n."""
    name, layout = kind
    environment = {key: value for key, value in os.environ.items() if key != SWITCH}
    if switch is not None:
        environment[SWITCH] = switch
    done = subprocess.run(
        [program, name, *map(str, (k, rows, n, threads, seed, scale)), layout, special],
        capture_output=True, text=True, timeout=300, check=True, env=environment,
    )  # fmt: skip
    result = json.loads(done.stdout)
    if "skip" in result:
        pytest.skip(result["skip"])
    return result["columns"]


@pytest.fixture(scope="module")
def ours(program: Path) -> None:
    """Skips where this CPU has no kernel: then the switch changes nothing."""
    kind = ("q8_0", "file")
    if run(program, kind, 64, 64, 1) == run(program, kind, 64, 64, 1, switch="0"):
        # another build is given in order to test its kernels
        (pytest.fail if "DFLASH_NATIVE_LIB_DIR" in os.environ else pytest.skip)(
            "no kernel for this CPU (AVX-512 VNNI, AVX2 with FMA and F16C, NEON with dotprod)"
        )


@pytest.mark.parametrize("kind", TYPES, ids="-".join)
@pytest.mark.parametrize(
    ("k", "rows"),
    # the smallest, odd numbers of rows, many blocks, a whole head's width
    [(32, 16), (64, 24), (96, 40), (576, 1000), (1536, 72), (5120, 32)],
)
def test_right_and_the_same_for_every_number_of_columns(
    program: Path, kind: tuple[str, str], k: int, rows: int, ours: None
) -> None:
    k = whole_blocks(k, kind[0])
    for result in run(program, kind, k, rows, 18, threads=1 + rows % 3):
        assert result["error"] < BOUND[kind[0]], result
        assert result["different"] == 0, result


@pytest.mark.parametrize("kind", TYPES, ids="-".join)
@pytest.mark.parametrize("rows", [1, 4, 8, 12, 15, 17, 23, 31, 33, 47])
def test_rows_that_fill_no_tile(
    program: Path, kind: tuple[str, str], rows: int, ours: None
) -> None:
    if kind[1] == "repack":
        together = 4 if ARM and kind[0].endswith("_0") else 8
        rows = max(together, rows - rows % together)
    for result in run(program, kind, whole_blocks(64, kind[0]), rows, 9):
        assert result["error"] < BOUND[kind[0]]
        assert result["different"] == 0


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("k", [16, 17, 31, 33, 100, 577])
def test_widths_that_fill_no_vector(program: Path, name: str, k: int, ours: None) -> None:
    for result in run(program, (name, "file"), k, 19, 9):
        assert result["error"] < BOUND[name]
        assert result["different"] == 0


@pytest.mark.parametrize("kind", TYPES, ids="-".join)
@pytest.mark.parametrize("scale", [1e-4, 30.0])
def test_scales(program: Path, kind: tuple[str, str], scale: float, ours: None) -> None:
    # at 1e-4 the blocks' own scales are subnormal halves: a few bits are left of them
    loose = 100 if scale < 1 and kind[0].startswith("q") else 1
    base = run(program, kind, 256, 48, 5, scale=scale, switch="0")
    for result, other in zip(run(program, kind, 256, 48, 5, scale=scale), base, strict=True):
        assert result["error"] < max(BOUND[kind[0]] * loose, 1.01 * other["error"])
        assert result["different"] == 0


@pytest.mark.parametrize("kind", TYPES, ids="-".join)
def test_threads_change_nothing(program: Path, kind: tuple[str, str], ours: None) -> None:
    k = whole_blocks(160, kind[0])
    one = run(program, kind, k, 200, 9)
    assert all(run(program, kind, k, 200, 9, threads=n) == one for n in (2, 3, 7))


@pytest.mark.parametrize("kind", TYPES, ids="-".join)
def test_the_switch(program: Path, kind: tuple[str, str], ours: None) -> None:
    """Off is the base's product: as right, with other roundings (but for some interleaved)."""
    k = whole_blocks(576, kind[0])
    on, off = (run(program, kind, k, 96, 8, switch=value) for value in ("1", "0"))
    assert max(r["error"] for r in on) < 1.5 * max(r["error"] for r in off) + 1e-7
    assert on != off or kind in (("q4_0", "repack"), ("q8_0", "repack"))


@pytest.mark.parametrize("name", INTERLEAVED)
def test_the_layout_changes_nothing(program: Path, name: str, ours: None) -> None:
    one, other = (run(program, (name, layout), 768, 88, 9) for layout in ("file", "repack"))
    assert one == other


@pytest.mark.parametrize("kind", TYPES, ids="-".join)
@pytest.mark.parametrize("special", ["nan", "inf", "-inf", "zero", "spike"])
def test_special_columns(program: Path, kind: tuple[str, str], special: str, ours: None) -> None:
    """One such column: finite where the base's result is, and the others do not see it."""
    plain, on, off = (
        run(program, kind, 512, 40, 6, switch=switch, special=what)
        for switch, what in (("1", "none"), ("1", special), ("0", special))
    )
    for ordinary, result, base in zip(plain, on, off, strict=True):
        assert result["different"] == 0
        assert result["others"] == ordinary["others"]
        assert result["finite"] == base["finite"]
        if special in ("zero", "spike"):
            assert result["finite"] == 40
        elif special != "nan" or not kind[0].startswith("q"):  # quantising drops NaN
            assert result["finite"] == 0


def test_beyond_the_limit_the_base_computes(program: Path, ours: None) -> None:
    kind = ("q8_0", "file")
    on, off = (run(program, kind, 64, 32, 66, switch=value) for value in ("1", "0"))
    assert [r["n"] for r in on if r["digest"] == off[r["n"] - 1]["digest"]] == [65, 66]
