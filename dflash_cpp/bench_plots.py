"""The benchmark's plots; matplotlib is imported only here, when there is something to draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPEEDUP, ACCEPTANCE, CONCURRENCY = "speedup.png", "acceptance.png", "concurrency.png"

INSTALL = "matplotlib is not installed; `pip install matplotlib`, then repeat with --resume"

_MARKERS = "osD^vP*X"
_PANEL = (9.0, 3.6)  # inches


def write_plots(document: dict[str, Any], folder: Path) -> tuple[list[Path], str | None]:
    """Draw what was measured; plots of an earlier run that are not drawn again are removed.

    Args:
        document: `BenchResult.document()`.
        folder: Where to.

    Returns:
        The PNG files, and why there are none (None if there are).
    """
    speed, concurrency = document["speed"], document["concurrency"]
    wanted: list[tuple[str, list[dict[str, Any]], Callable[..., None]]] = [
        (SPEEDUP, [r for r in speed if r["ratio"] and r["lane"] != "plain"], _speedup),
        (ACCEPTANCE, [r for r in speed if r.get("acceptance_per_position")], _acceptance),
        (CONCURRENCY, concurrency, _concurrency),
    ]
    for name, _, _ in wanted:
        (folder / name).unlink(missing_ok=True)
    if not figures.have_matplotlib():
        return [], INSTALL
    styles = {
        lane["name"]: {
            "label": lane["words"],
            "color": figures.COLOURS[i % len(figures.COLOURS)],
            "marker": _MARKERS[(i + i // len(figures.COLOURS)) % len(_MARKERS)],
            "linestyle": "--" if lane["name"].startswith("stock") else "-",
        }
        for i, lane in enumerate(document["lanes"])
    }
    files = [_draw(folder / name, rows, draw, styles) for name, rows, draw in wanted if rows]
    return files, None if files else "nothing was measured that could be drawn"


def _draw(
    path: Path,
    rows: list[dict[str, Any]],
    draw: Callable[..., None],
    styles: dict[str, dict[str, Any]],
) -> Path:
    """Draw a panel per temperature (one where rows have none) and write the file in one step."""
    temps = list(dict.fromkeys(r.get("temp") for r in rows))
    figure = figures.new_figure(_PANEL[0], _PANEL[1] * len(temps))
    panels = figure.subplots(len(temps), 1, squeeze=False)
    for temp, axes in zip(temps, panels[:, 0], strict=True):
        draw(axes, [r for r in rows if r.get("temp") == temp], styles)
        if temp is not None:
            axes.set_title(f"temperature {temp:g}", loc="left", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figures.save(figure, path)


def _speedup(axes: Axes, rows: list[dict[str, Any]], styles: dict[str, dict[str, Any]]) -> None:
    names = list(rows[0]["ratio_by_class"])
    groups = ["all", *names] if len(names) > 1 else ["all"]
    width = 0.8 / len(rows)
    for i, row in enumerate(rows):
        found = [row["ratio"], *(row["ratio_by_class"][n] for n in names)][: len(groups)]
        here = [(x, r) for x, r in enumerate(found) if r is not None]
        axes.bar(
            [x + (i - (len(rows) - 1) / 2) * width for x, _ in here],
            [r["median"] for _, r in here],
            width,
            yerr=_bars([r for _, r in here]),
            error_kw={"elinewidth": 0.8},
            color=styles[row["lane"]]["color"],
            label=styles[row["lane"]]["label"],
        )
    axes.axhline(1.0, color="0.4", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("times plain")


def _acceptance(axes: Axes, rows: list[dict[str, Any]], styles: dict[str, dict[str, Any]]) -> None:
    for row in rows:
        shares = [(i, s) for i, s in enumerate(row["acceptance_per_position"], 1) if s is not None]
        axes.plot(
            [i for i, _ in shares],
            [100 * s for _, s in shares],
            clip_on=False,
            **styles[row["lane"]],
        )
    last = max(len(r["acceptance_per_position"]) for r in rows)
    axes.set_xticks(range(1, last + 1))
    axes.set_ylim(0, 100)
    axes.set_xlabel("position in the block")
    axes.set_ylabel("accepted, %")


def _concurrency(axes: Axes, rows: list[dict[str, Any]], styles: dict[str, dict[str, Any]]) -> None:
    levels = sorted({r["requests"] for r in rows})
    for name, style in styles.items():
        mine = [r for r in rows if r["lane"] == name and r["tokens_per_second"]]
        if mine:
            speeds = [r["tokens_per_second"] for r in mine]
            axes.errorbar(
                [levels.index(r["requests"]) for r in mine],
                [s["median"] for s in speeds],
                yerr=_bars(speeds),
                capsize=2,
                **style,
            )
    axes.set_xticks(range(len(levels)), [str(n) for n in levels])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("simultaneous requests")
    axes.set_ylabel("tokens/s of all together")


def _bars(found: list[dict[str, Any]]) -> list[list[float]]:
    """Return the distances from the medians down and up to the extremes."""
    return [
        [s["median"] - s["min"] for s in found],
        [s["max"] - s["median"] for s in found],
    ]
