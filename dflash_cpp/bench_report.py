"""The benchmark's tables, notes and files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_convert.console import JSON_SCHEMA_VERSION, Console

from . import bench_plots, bench_stats, figures
from .bench import BenchResult, classes
from .bench_lanes import STOCK_PLAIN
from .machine import BUSY_SHARE

JSON_FILE = "bench.json"


def write_files(result: BenchResult, folder: Path) -> tuple[dict[str, Any], list[Path]]:
    """Write bench.json and the plots.

    Returns:
        The document, with `plots` and, if there are none, `no_plots`, the reason; and the files.
    """
    document = result.document()
    plots, why = bench_plots.write_plots(document, folder)
    document |= {"plots": [p.name for p in plots], "no_plots": why}
    whole = {"schema": JSON_SCHEMA_VERSION, **document}
    path = figures.write_text(folder / JSON_FILE, json.dumps(whole, indent=1) + "\n")
    return document, [path, *plots]


def show(
    result: BenchResult, document: dict[str, Any], files: Sequence[Path], console: Console
) -> None:
    """Print the tables, what they say, and what they were measured on."""
    words = {lane["name"]: lane["words"] for lane in document["lanes"]}
    _show_speed(document["speed"], words, console)
    _show_classes(result, document["speed"], words, console)
    _show_drafts(document["speed"], words, console)
    _show_positions(document["speed"], words, console)
    _show_concurrency(document["concurrency"], words, console)
    _show_prompts(document["prompt"], words, console)
    console.text()
    options = result.options
    for temp in options.temps:
        if said := bench_stats.verdict(document["speed"], result.lanes, temp):
            console.text(said)
    for name, why in result.missing.items():
        console.text(f"{name}: not measured, because {why}")
    if document["no_plots"]:
        console.text(f"no plots, because {document['no_plots']}")
    console.text(
        f"{len(options.prompts)} prompts, {options.n_predict} tokens each at most, "
        f"{options.repeat} repetitions in turns; medians, spread from smallest to largest, ratios "
        "to `plain`."
    )
    show_machine(result.store.sessions, result.settings["build"], console)
    console.text(f"written: {', '.join(str(f.resolve()) for f in files)}")


def headline(result: BenchResult, document: dict[str, Any]) -> str:
    """Return what `-q` prints: the largest ratio of our drafts at the first temperature."""
    ours = {lane.name for lane in result.lanes if lane.drafts and not lane.stock}
    first = result.options.temps[0]
    found = [
        row["ratio"]["median"]
        for row in document["speed"]
        if row["lane"] in ours and row["temp"] == first and row["ratio"]
    ]
    return f"{max(found):.2f}" if found else ""


# --- tables ---------------------------------------------------------------------------------------


def _show_speed(rows: list[dict[str, Any]], words: dict[str, str], console: Console) -> None:
    with_stock = STOCK_PLAIN in words
    numbers = ["tokens/s", "ratio", "spread", *(["to stock"] if with_stock else [])]
    table: list[list[object]] = []
    for row in rows:
        speed, ratio = row["tokens_per_second"], row["ratio"]
        cells = [median_text(speed, 1), median_text(ratio), range_text(ratio)]
        cells += [median_text(row["ratio_to_stock"])] if with_stock else []
        table.append([f"{row['temp']:g}", words[row["lane"]], *cells])
    console.table(
        ["temp", "decoding", *numbers],
        table,
        title="Speed of llama-server, one request at a time",
        right=["temp", *numbers],
    )


def _show_drafts(rows: list[dict[str, Any]], words: dict[str, str], console: Console) -> None:
    table: list[list[object]] = []
    for row in rows:
        if "draft_n_rounds" in row:
            same = row["same_text"]
            cells = [
                _number(row["mean_accepted_length"]),
                _percent(row["skipped_share"]),
                f"{same['same']} of {same['of']}" if same else "",
            ]
            table.append([f"{row['temp']:g}", words[row["lane"]], *cells])
    if not table:
        return
    numbers = ["accepted length", "not drafted", "same text"]
    console.text()
    console.table(["temp", "decoding", *numbers], table, title="Drafts", right=["temp", *numbers])


def _show_classes(
    result: BenchResult, rows: list[dict[str, Any]], words: dict[str, str], console: Console
) -> None:
    names = classes(result.options.prompts)
    if len(names) < 2:
        return
    table: list[list[object]] = [
        [f"{r['temp']:g}", words[r["lane"]], *(median_text(r["ratio_by_class"][n]) for n in names)]
        for r in rows
        if r["lane"] != "plain"
    ]
    console.text()
    console.table(
        ["temp", "decoding", *names],
        table,
        title="Ratio by class of prompt",
        right=["temp", *names],
    )


def _show_positions(rows: list[dict[str, Any]], words: dict[str, str], console: Console) -> None:
    drafted = [r for r in rows if r.get("acceptance_per_position")]
    if not drafted:
        return
    width = max(len(r["acceptance_per_position"]) for r in drafted)
    table: list[list[object]] = []
    for row in drafted:
        cells = [_percent(share) for share in row["acceptance_per_position"]]
        cells += [""] * (width - len(cells))
        table.append([f"{row['temp']:g}", words[row["lane"]], *cells])
    positions = [str(i) for i in range(1, width + 1)]
    console.text()
    console.table(
        ["temp", "decoding", *positions],
        table,
        title="Drafted tokens that were accepted, by position in the block",
        right=["temp", *positions],
    )


def _show_concurrency(rows: list[dict[str, Any]], words: dict[str, str], console: Console) -> None:
    _show_rates(rows, words, "requests", "Tokens/s of all simultaneous requests", console)


def _show_prompts(rows: list[dict[str, Any]], words: dict[str, str], console: Console) -> None:
    _show_rates(rows, words, "n_tokens", "Prompt tokens/s by length of the prompt", console)


def _show_rates(
    rows: list[dict[str, Any]], words: dict[str, str], variable: str, title: str, console: Console
) -> None:
    """Print a row per lane and a column per value, each cell a speed and its ratio to plain."""
    if not rows:
        return
    values = sorted({r[variable] for r in rows})

    def cell(r: dict[str, Any]) -> str:
        return f"{median_text(r['tokens_per_second'], 1)} ({median_text(r['ratio'])})"

    cells = {(r["lane"], r[variable]): cell(r) for r in rows}
    table: list[list[object]] = [
        [text, *(cells.get((name, v), "") for v in values)]
        for name, text in words.items()
        if any((name, v) in cells for v in values)
    ]
    headings = [str(v) for v in values]
    console.text()
    console.table(["decoding", *headings], table, title=f"{title} (ratio)", right=headings)


def show_machine(
    sessions: Sequence[dict[str, Any]], build: dict[str, Any], console: Console
) -> None:
    """Print what was measured on, and a warning if it was busy with other work.

    Args:
        sessions: Of `machine`, with `busy_after`.
        build: Of `build_info`.
    """
    if not sessions:
        return
    first, last = sessions[0], sessions[-1]
    when = first["date"] if len(sessions) == 1 else f"{first['date']} to {last['date']}"
    commit = str(build.get("base_commit", "unknown"))[:9]
    console.text(
        f"{last['cpu']}, {last['cores']} cores, {last['threads']} threads, {last['system']}; "
        f"llama.cpp {commit}; {when}."
    )
    shares = [s.get(k) for s in sessions for k in ("busy_before", "busy_after")]
    busy = max((s for s in shares if s is not None), default=0.0)
    if busy > BUSY_SHARE:
        console.warning(
            f"other work took {100 * busy:.0f} % of the processor before or after the run: the "
            "speeds say little, run the benchmark again when the machine is idle"
        )


def median_text(value: dict[str, Any] | None, digits: int = 2) -> str:
    """Format the median of a `spread`; nothing for None."""
    return "" if value is None else f"{value['median']:.{digits}f}"


def range_text(value: dict[str, Any] | None, digits: int = 2) -> str:
    """Format smallest and largest of a `spread`; nothing for None."""
    return "" if value is None else f"{value['min']:.{digits}f} to {value['max']:.{digits}f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
