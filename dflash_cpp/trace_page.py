"""A trace as one HTML page that needs nothing else: no scripts, no fonts, no addresses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from dflash_convert.errors import InputError

from .trace import ACCEPTED, REJECTED, Position, Trace, TracedRound, headline

STYLE = """
:root { color-scheme: light dark; --good: #1a7f37; --bad: #cf222e; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; font-weight: 600; }
code, td.c, .text { font-family: ui-monospace, monospace; white-space: pre-wrap; }
.text { border: 1px solid var(--line); border-radius: 6px; padding: .8rem; }
.text .a { color: var(--good); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { border: 1px solid var(--line); padding: .15rem .5rem; text-align: left; }
td small { display: block; opacity: .7; font-variant-numeric: tabular-nums; }
td.chosen { font-weight: 700; box-shadow: inset 0 0 0 2px currentColor; }
td.target { background: #1a7f3733; }
th.accepted { color: var(--good); } th.rejected { color: var(--bad); }
dl { display: grid; grid-template-columns: max-content auto; gap: 0 1rem; }
dt { opacity: .7; } dd { margin: 0; }
"""

_LEGEND = (
    "Columns are positions of the block, rows the draft's candidates by descending logit. In each "
    "cell: the token, then its score along the chosen path and its logit. Framed: what the draft "
    "chose. Green ground: what the target said. After a rejected proposal the target was not asked."
)


def page_file(path: Path | None) -> Path | None:
    """Return `path` if a page can be written there, so that nothing is computed in vain.

    Raises:
        InputError: It is a folder, or lies in none.
    """
    if path is None:
        return None
    if path.is_dir():
        raise InputError(f"`{path}` is a folder, expected the name of a page to write")
    if not path.parent.is_dir():
        raise InputError(f"the folder `{path.parent}` of the page does not exist")
    return path


def page(trace: Trace, facts: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        trace: What to show.
        facts: Named values for the top of the page: files, prompt, settings.
    """
    return "\n".join(_page(trace, facts)) + "\n"


def _page(trace: Trace, facts: Mapping[str, Any]) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f"<title>DFlash trace</title>\n<style>{STYLE}</style>\n</head>\n<body>"
    yield "<h1>DFlash trace</h1>\n<dl>"
    for name, value in facts.items():
        yield f"<dt>{_safe(name)}</dt><dd><code>{_safe(value)}</code></dd>"
    yield "</dl>\n<p>The text; in green, proposals that were accepted:</p>"
    yield f'<div class="text">{"".join(_text(trace))}</div>'
    yield f"<p>{_safe(_LEGEND)}</p>"
    for r in trace.rounds:
        yield f"<h2>{_safe(headline(trace, r))}</h2>"
        if r.positions:
            yield '<div class="wide"><table>'
            yield from _table(trace, r)
            yield "</table></div>"
    yield "</body>\n</html>"


def _text(trace: Trace) -> Iterator[str]:
    for token, accepted in zip(trace.tokens, trace.accepted, strict=True):
        shown = _safe(trace.text(token))
        yield f'<span class="a">{shown}</span>' if accepted else f"<span>{shown}</span>"


def _table(trace: Trace, r: TracedRound) -> Iterator[str]:
    heads = "".join(
        f'<th class="{_class(p)}">{p.number}: {_safe(p.outcome)}</th>' for p in r.positions
    )
    yield f"<thead><tr><th></th>{heads}</tr></thead>\n<tbody>"
    for rank in range(max(len(p.candidates) for p in r.positions)):
        cells = "".join(_cell(trace, p, rank) for p in r.positions)
        yield f"<tr><th>{rank + 1}</th>{cells}</tr>"
    if any(p.target is not None and p.rank is None for p in r.positions):
        cells = "".join(
            f'<td class="c target">{_safe(trace.text(p.target))}</td>'
            if p.target is not None and p.rank is None
            else "<td></td>"
            for p in r.positions
        )
        yield f"<tr><th>no candidate</th>{cells}</tr>"
    yield "</tbody>"


def _cell(trace: Trace, p: Position, rank: int) -> str:
    if rank >= len(p.candidates):
        return "<td></td>"
    c = p.candidates[rank]
    names = ["c"]
    names += ["chosen"] if c.token == p.chosen else []
    names += ["target"] if c.token == p.target else []
    numbers = f"{c.logit:.3f}" if c.score is None else f"{c.score:.3f} / {c.logit:.3f}"
    return (
        f'<td class="{" ".join(names)}" title="id {c.token}">{_safe(trace.text(c.token))}'
        f"<small>{numbers}</small></td>"
    )


def _class(p: Position) -> str:
    return {ACCEPTED: "accepted", REJECTED: "rejected"}.get(p.outcome, "other")


def _safe(value: object) -> str:
    return escape(str(value), quote=True)
