"""The demo's tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_convert.console import Console

from .demo import LANES, DemoOptions, TypeResult, python_speed
from .info import build_info
from .machine import BUSY_SHARE
from .measure import same_tokens, speed_ratio


def show(
    options: DemoOptions,
    results: Sequence[TypeResult],
    where: dict[str, Any],
    console: Console,
) -> None:
    """Print the tables and what they were measured on."""
    _show_speed(results, console)
    _show_acceptance(results, console)
    _show_parity(results, console)
    console.text()
    for result in results:
        for name, why in result.missing.items():
            console.text(f"{result.type}, {LANES[name]}: not measured, because {why}")
        for prompt in result.parity.prompts:
            if prompt.difference is not None:
                judgement = prompt.difference.judgement
                console.text(
                    f"{result.type}, {prompt.id}: {prompt.verdict} at token "
                    f"{prompt.difference.index}: {judgement.reason}"
                )
    build = build_info()
    console.text(
        f"{len(options.prompts)} prompts, {options.n_predict} tokens each at most, greedy, one "
        f"request at a time, {options.repeat} repetitions in turns."
    )
    console.text(
        f"{where['cpu']}, {where['cores']} cores, {where['threads']} threads, {where['system']}; "
        f"llama.cpp {str(build.get('base_commit', 'unknown'))[:9]}; {where['date']}."
    )
    busy = [share for share in (where["busy_before"], where.get("busy_after")) if share is not None]
    if busy and max(busy) > BUSY_SHARE:
        console.warning(
            f"other work took {100 * max(busy):.0f} % of the processor before or after the run: "
            "the speeds say little, run the demo again when the machine is idle"
        )


def _show_speed(results: Sequence[TypeResult], console: Console) -> None:
    rows: list[list[object]] = []
    for result in results:
        for name, words in LANES.items():
            if name not in result.lanes:
                rows.append([result.type, words, "not measured", "", "", "", ""])
                continue
            lane = result.lanes[name]
            length = lane.mean_accepted_length
            row = [result.type, words, _number(lane.tokens_per_second)]
            if lane is result.reference:
                rows.append([*row, "1.00", "", "", ""])
                continue
            ratio = speed_ratio(lane, result.reference)
            same, total = same_tokens(lane, result.plain_of(lane))
            rows.append(
                [
                    *row,
                    "" if ratio is None else f"{ratio[0]:.2f}",
                    "" if ratio is None else f"{ratio[1]:.2f} to {ratio[2]:.2f}",
                    "" if length is None else f"{length:.2f}",
                    "" if lane is result.plain_of(lane) else f"{same} of {total}",
                ]
            )
    numbers = ["tokens/s", "ratio", "smallest to largest", "accepted length", "same text"]
    console.text()
    console.table(
        ["target", "decoding", *numbers], rows, title="Speed of llama-server", right=numbers
    )


def _show_acceptance(results: Sequence[TypeResult], console: Console) -> None:
    rows: list[list[object]] = []
    width = max(r.n_draft for r in results)
    for result in results:
        for name, lane in result.lanes.items():
            if shares := lane.acceptance_per_position:
                cells = [f"{100 * share:.0f} %" for share in shares[:width]]
                rows.append([result.type, LANES[name], *cells, *[""] * (width - len(cells))])
    positions = [str(i) for i in range(1, width + 1)]
    console.text()
    console.table(
        ["target", "decoding", *positions],
        rows,
        title="Drafts accepted up to each position of the block",
        right=positions,
    )


def _show_parity(results: Sequence[TypeResult], console: Console) -> None:
    rows: list[list[object]] = []
    for result in results:
        speeds = [python_speed(result.parity, speculative=s) for s in (False, True)]
        rows.append([result.type, *result.parity.counts.values(), *map(_number, speeds)])
    numbers = [*results[0].parity.counts, "plain tokens/s", "DFlash tokens/s"]
    console.text()
    console.table(
        ["target", *numbers],
        rows,
        title="Texts compared with plain decoding, Python layer",
        right=numbers,
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
