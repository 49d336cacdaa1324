"""The report of `dflash-cpp parity`: Markdown, one HTML page, JSON and plots."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_convert.console import JSON_SCHEMA_VERSION, Console, printable
from dflash_convert.errors import InputError

from . import figures, parity
from .distribution import DistributionTest
from .parity_runs import Result, Run, summary_line
from .trace_page import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "DFlash parity"
MARKDOWN_FILE, HTML_FILE, JSON_FILE = "parity.md", "parity.html", "parity.json"
LENGTHS, P_VALUES = "lengths.png", "p-values.png"
INSTALL = "no plots, because matplotlib is not installed (`pip install matplotlib`)"


@dataclass(frozen=True)
class Table:
    """A table of the report; the columns in `right` are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    right: Sequence[str]


def check_folder(folder: Path | None) -> None:
    """Make sure that a report can be written, before anything is computed.

    Raises:
        InputError: It is a file, or cannot be made.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise InputError(f"--out `{folder}` cannot be a folder: {exc.strerror}") from exc


def write_report(result: Result, folder: Path, command: str) -> list[Path]:
    """Write all files; each appears in one step. Returns their paths."""
    whole = {"schema": JSON_SCHEMA_VERSION, "command": command, **result.to_json()}
    plots = write_plots(result, folder)
    return [
        figures.write_text(folder / MARKDOWN_FILE, markdown(result, plots, command)),
        figures.write_text(folder / HTML_FILE, html(result, plots, command)),
        figures.write_text(folder / JSON_FILE, json.dumps(whole, indent=1) + "\n"),
        *plots,
    ]


def show(result: Result, console: Console) -> None:
    """Print the report; one greedy comparison as the table of its prompts."""
    if result.plan.simple:
        only = result.runs[0].report
        columns, rows, right = parity.table(only)
        console.table(columns, rows, right=right)
        for line in parity.summary(only):
            console.text(line)
    else:
        for table in tables(result, brief=True):
            console.table(table.columns, table.rows, title=table.title, right=table.right)
            console.text()
    console.text(summary_line(result))


def document(result: Result) -> dict[str, Any]:
    """Return the JSON document; one greedy comparison has its own keys at the top."""
    whole = result.to_json()
    return whole | result.runs[0].report.to_json() if result.plan.simple else whole


def command_line(argv: Sequence[str]) -> str:
    """Return what was typed, with file names instead of paths."""
    words = [Path(word).name if "/" in word and Path(word).exists() else word for word in argv]
    return shlex.join(words)


# --- content --------------------------------------------------------------------------------------


def tables(result: Result, *, brief: bool = False) -> Iterator[Table]:
    """Return the tables, those without rows left out; a brief one sums tests up."""
    if result.runs:
        yield _runs(result)
    different = [(run, p) for run in result.runs for p in run.report.prompts if p.difference]
    if different:
        yield _differences(different)
    if result.tests:
        yield _tests_summed_up(result) if brief else _tests(result)


def _runs(result: Result) -> Table:
    numbers = ["texts", "tokens", "identical", "tie", "mismatch", "accepted length", "cap"]
    rows = []
    for run in result.runs:
        counts, length = run.report.counts, accepted_length(run)
        rows.append(
            [
                run.condition.words(),
                "in process" if run.slots is None else f"server, slots {run.slots}",
                len(run.report.prompts),
                run.report.compared,
                *(counts[v] for v in parity.VERDICTS),
                "" if length is None else f"{length:.2f}",
                f"{run.report.cap.value:g}",
            ]
        )
    return Table("Greedy texts", ["condition", "where", *numbers], rows, numbers)


def _differences(different: Sequence[tuple[Run, parity.PromptParity]]) -> Table:
    rows = []
    for run, prompt in different:
        d = prompt.difference
        assert d is not None
        rows.append(
            [
                run.words(),
                prompt.id,
                prompt.verdict,
                d.index,
                f"{d.plain_text!r} / {d.speculative_text!r}",
                d.judgement.reason,
            ]
        )
    columns = ["condition", "prompt", "verdict", "token", "plain / speculative", "why"]
    return Table("Differences", columns, rows, ["token"])


def _tests(result: Result) -> Table:
    rows = [
        [
            condition.words(),
            f"{t.temp:g}",
            t.prompt,
            t.what,
            t.n,
            t.cells,
            "" if t.statistic is None else f"{t.statistic:.1f}",
            "" if t.p is None else f"{t.p:.3g}",
            "failed" if result.failed(t) else "",
        ]
        for condition, t in result.tests
    ]
    numbers = ["temp", "texts each", "values", "chi-square", "p"]
    columns = ["condition", "temp", "prompt", "what", *numbers[1:], ""]
    title = f"Sampled texts: p below {result.limit:.2g} fails ({result.plan.alpha:g} for all tests)"
    return Table(title, columns, rows, numbers)


def _tests_summed_up(result: Result) -> Table:
    """Return a row for each condition and temperature."""
    groups: dict[tuple[str, float], list[DistributionTest]] = {}
    for condition, test in result.tests:
        groups.setdefault((condition.words(), test.temp), []).append(test)
    rows: list[list[object]] = []
    for (words, temp), tests in groups.items():
        found = [t.p for t in tests if t.p is not None]
        failed = [t for t in tests if result.failed(t)]
        where = ", ".join(f"{t.prompt} {t.what}" for t in failed[:3])
        smallest = f"{min(found):.3g}" if found else ""
        rows.append([words, f"{temp:g}", tests[0].n, len(found), smallest, len(failed), where])
    numbers = ["temp", "texts each", "tests", "smallest p", "failed"]
    return Table(_tests(result).title, ["condition", *numbers, "where"], rows, numbers)


def accepted_length(run: Run) -> float | None:
    """Return tokens per verification over all prompts; None where it is not known."""
    rounds = sum(p.stats.get("draft_rounds") or 0 for p in run.report.prompts)
    accepted = sum(p.stats.get("draft_n_accepted") or 0 for p in run.report.prompts)
    return 1 + accepted / rounds if rounds else None


def lines(result: Result, command: str) -> Iterator[str]:
    """Return the sentences of the report besides its tables."""
    at = result.facts["machine"]
    yield summary_line(result)
    yield f"verdict: {result.verdict}"
    yield f"{at['cpu']}, {at['cores']} cores, {at['threads']} threads, {at['system']}, {at['date']}"
    yield command
    if not figures.have_matplotlib():
        yield INSTALL


def markdown(result: Result, plots: Sequence[Path], command: str) -> str:
    """Return the report as Markdown."""
    parts = [f"# {TITLE}", *(f"`{_one_line(line)}`" for line in lines(result, command))]
    for table in tables(result):
        rule = ["--:" if name in table.right else "---" for name in table.columns]
        rows = [table.columns, rule, *table.rows]
        parts += [f"## {table.title}", "\n".join(_markdown_row(row) for row in rows)]
    parts += [f"![{path.stem}]({path.name})" for path in plots]
    return "\n\n".join(parts) + "\n"


def _markdown_row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(_one_line(str(c)).replace("|", "\\|") for c in cells) + " |"


def _one_line(text: str) -> str:
    return printable(text).replace("\n", " ")


def html(result: Result, plots: Sequence[Path], command: str) -> str:
    """Return the report as a page that needs nothing else: plots are inside."""
    parts = [f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{TITLE}']
    parts += [f"</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{TITLE}</h1>"]
    parts += [f"<p><code>{_safe(line)}</code></p>" for line in lines(result, command)]
    for table in tables(result):
        parts += [f"<h2>{_safe(table.title)}</h2>", '<div class="wide"><table>']
        parts += [_html_row(table.columns, "th"), *(_html_row(row, "td") for row in table.rows)]
        parts += ["</table></div>"]
    for path in plots:
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        parts.append(f'<p><img alt="{path.stem}" src="data:image/png;base64,{data}"></p>')
    return "\n".join([*parts, "</body>\n</html>\n"])


def _html_row(cells: Sequence[object], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{_safe(c)}</{tag}>" for c in cells) + "</tr>"


def _safe(value: object) -> str:
    return escape(printable(str(value)))


# --- plots ----------------------------------------------------------------------------------------


def write_plots(result: Result, folder: Path) -> list[Path]:
    """Draw what there is to draw; an older plot that is not drawn again is removed."""
    for name in (LENGTHS, P_VALUES):
        (folder / name).unlink(missing_ok=True)
    if not figures.have_matplotlib():
        return []
    files = []
    runs = [run for run in result.runs if accepted_length(run) is not None]
    if runs:
        files.append(_draw(folder / LENGTHS, 0.9 + 0.4 * len(runs), lambda a: _lengths(a, runs)))
    if any(t.p is not None for _, t in result.tests):
        files.append(_draw(folder / P_VALUES, 4.0, lambda a: _p_values(a, result)))
    return files


def _draw(path: Path, height: float, draw: Any) -> Path:
    figure = figures.new_figure(8.0, height)
    axes = figure.subplots()
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    return figures.save(figure, path)


def _lengths(axes: Axes, runs: Sequence[Run]) -> None:
    colour = {parity.IDENTICAL: 3, parity.TIE: 1, parity.MISMATCH: 6}
    places = range(len(runs), 0, -1)
    colours = [figures.COLOURS[colour[run.report.verdict]] for run in runs]
    axes.barh(places, [accepted_length(run) or 0.0 for run in runs], color=colours)
    axes.set_yticks(places, [f"{r.words()}: {r.report.verdict}" for r in runs])
    axes.set_xlabel("accepted length (tokens per verification)")


def _p_values(axes: Axes, result: Result) -> None:
    """Sorted p-values against those expected without a fault: the points follow the diagonal."""
    found = sorted(t.p for _, t in result.tests if t.p is not None)
    floor = min(result.limit / 10, 1e-6)
    expected = [(i + 0.5) / len(found) for i in range(len(found))]
    axes.loglog(expected, [max(p, floor) for p in found], "o", color=figures.COLOURS[5])
    axes.loglog([expected[0], 1.0], [expected[0], 1.0], color="0.4", linewidth=0.8)
    axes.axhline(result.limit, color=figures.COLOURS[6], linestyle="--", label="limit")
    axes.set_xlabel("expected p")
    axes.set_ylabel("found p")
    axes.legend(frameon=False)
