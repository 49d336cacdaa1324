"""The tables of `dflash-cpp bench-draft`."""

from __future__ import annotations

from typing import Any

from dflash_convert.console import Console

from .bench_draft import DraftBenchResult
from .bench_draft_lanes import OURS
from .bench_report import median_text, range_text, show_machine
from .info import build_info

_MIB = 1 << 20

# in the tables: kind of node -> words
KINDS = {
    "convolution": "convolution",
    "selector": "selector",
    "top_k": "top-k",
    "head": "head",
    "attention": "attention",
    "products": "products",
    "rest": "rest",
}


def show(result: DraftBenchResult, console: Console) -> None:
    """Print the tables, what they say, and what they were measured on."""
    _show_rounds(result, console)
    console.text()
    _show_profile(result, console)
    console.text()
    _show_graph(result, console)
    console.text()
    options = result.options
    for row in result.agreement:
        console.text(_agreement_text(row))
    for name, why in result.missing.items():
        console.text(f"{name}: not measured, because {why}")
    console.text(
        f"{options.n_draft} tokens drafted per sequence, {options.n_prompt} tokens of context, "
        f"{options.n_inject} rows per sequence injected; {options.repeat} repetitions in turns, "
        "medians, spread from smallest to largest."
    )
    show_machine([result.session], build_info(), console)


def headline(result: DraftBenchResult) -> str:
    """Return what `-q` prints: how many times as fast as stock the first number of blocks is."""
    ours = [r for r in result.rounds if r["lane"] == OURS]
    return median_text(ours[0]["to_stock"]) if ours else ""


def _show_rounds(result: DraftBenchResult, console: Console) -> None:
    numbers = ["ms per round", "spread", "to stock", "ms to inject"]
    table: list[list[object]] = [
        [
            row["blocks"],
            row["lane"],
            median_text(row["round_ms"]),
            range_text(row["round_ms"]),
            median_text(row["to_stock"]),
            median_text(row["inject_ms"]),
        ]
        for row in result.rounds
    ]
    title = "One draft round"
    console.table(["sequences", "build", *numbers], table, title=title, right=_right(numbers))


def _show_profile(result: DraftBenchResult, console: Console) -> None:
    table: list[list[object]] = [
        [row["blocks"], row["lane"], *(_part(row, kind) for kind in KINDS)] for row in result.rounds
    ]
    words = list(KINDS.values())
    title = "Where its time goes, ms (share)"
    console.table(["sequences", "build", *words], table, title=title, right=_right(words))


def _show_graph(result: DraftBenchResult, console: Console) -> None:
    words = list(KINDS.values())
    numbers = ["compute buffer MiB", "nodes", *words]
    table: list[list[object]] = [
        [
            row["blocks"],
            row["lane"],
            f"{row['memory']['compute'] / _MIB:.1f}",
            row["graph_nodes"],
            *(row["nodes"][kind] for kind in KINDS),
        ]
        for row in result.rounds
    ]
    title = "Memory, and nodes of the graph"
    console.table(["sequences", "build", *numbers], table, title=title, right=_right(numbers))


def _right(numbers: list[str]) -> list[str]:
    return ["sequences", *numbers]


def _part(row: dict[str, Any], kind: str) -> str:
    share = row["share"][kind]
    return f"{row['profile_ms'][kind]:.2f}" + ("" if share is None else f" ({100 * share:.0f} %)")


def _agreement_text(row: dict[str, Any]) -> str:
    sequences = "1 sequence" if row["blocks"] == 1 else f"{row['blocks']} sequences"
    if row["as_built"] is None:
        return f"{sequences}: proposals not compared, the builds' blocks differ in length"
    told = f"{sequences}: both builds propose the same {_same(row['as_built'])}"
    base = row["base_kernels"]
    return told if base is None else f"{told}; with the base's kernels and graph: {_same(base)}"


def _same(found: dict[str, Any]) -> str:
    gap = found["score_difference"]
    scores = "" if gap is None else f" (scores within {gap:.2g})"
    return f"{found['same']} of {found['of']} tokens{scores}"
