"""From raw measurements to medians, spreads, ratios and acceptance; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from .bench_lanes import PLAIN, STOCK_PLAIN, BenchLane, add_up

Records = Sequence[dict[str, Any]]


def spread(values: Iterable[float]) -> dict[str, Any] | None:
    """Return median, smallest and largest of one value per repetition; None without any."""
    found = list(values)
    if not found:
        return None
    return {"median": median(found), "min": min(found), "max": max(found), "values": found}


def select(records: Records, **wanted: Any) -> list[dict[str, Any]]:
    """Return the records with these values."""
    return [r for r in records if all(r.get(k) == v for k, v in wanted.items())]


def by_repetition(
    records: Records, amount: str, seconds: Callable[[dict[str, Any]], float]
) -> dict[int, float]:
    """Return {repetition: amount per second}, over all records of a repetition together."""
    sums: dict[int, list[float]] = {}
    for r in records:
        total = sums.setdefault(r["repetition"], [0.0, 0.0])
        total[0] += r[amount]
        total[1] += seconds(r)
    return {rep: n / s for rep, (n, s) in sorted(sums.items()) if s > 0}


def tokens_per_second(records: Records) -> dict[int, float]:
    """Return {repetition: decoded tokens per second} of answers."""
    return by_repetition(records, "predicted_n", lambda r: r["predicted_ms"] / 1e3)


def ratios(fast: dict[int, float], slow: dict[int, float]) -> list[float]:
    """Divide speeds repetition by repetition, where both have one."""
    return [fast[rep] / slow[rep] for rep in sorted(fast.keys() & slow.keys()) if slow[rep] > 0]


def same_prompts(a: Records, b: Records) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Leave out answers that the other side lacks (an interrupted run, a server that died)."""

    def key(r: dict[str, Any]) -> tuple[Any, ...]:
        return (r["prompt"], r["repetition"])

    common = {key(r) for r in a} & {key(r) for r in b}
    return [r for r in a if key(r) in common], [r for r in b if key(r) in common]


def speed_ratio(fast: Records, slow: Records) -> dict[str, Any] | None:
    """Return the spread of the ratios of two lanes' speeds over the same prompts."""
    mine, other = same_prompts(fast, slow)
    return spread(ratios(tokens_per_second(mine), tokens_per_second(other)))


def acceptance(records: Records) -> dict[str, Any]:
    """Add up the draft's counters.

    Returns:
        `draft_n_rounds`, `draft_n_skipped` (rounds without a draft), `draft_n`,
        `draft_n_accepted`, the lists per position, and from them `mean_accepted_length` (1 +
        accepted / rounds), `skipped_share` of all rounds, `acceptance_per_position` (accepted /
        drafted there; where drafted is unknown, as of stock, accepted / rounds). None for what is
        unknown.
    """
    drafted = [r for r in records if "draft_n_rounds" in r]
    if not drafted:
        return {}
    rounds, skipped, n, accepted = (
        sum(r.get(key, 0) for r in drafted)
        for key in ("draft_n_rounds", "draft_n_skipped", "draft_n", "draft_n_accepted")
    )
    accepted_there = add_up([r.get("draft_n_accepted_per_pos", []) for r in drafted])
    drafted_there = add_up([r.get("draft_n_per_pos", []) for r in drafted])
    of = drafted_there or [rounds] * len(accepted_there)
    pairs = zip(accepted_there, of, strict=False)
    return {
        "draft_n_rounds": rounds,
        "draft_n_skipped": skipped,
        "draft_n": n,
        "draft_n_accepted": accepted,
        "draft_n_per_pos": drafted_there or None,
        "draft_n_accepted_per_pos": accepted_there,
        "mean_accepted_length": 1 + accepted / rounds if rounds else None,
        "skipped_share": skipped / (rounds + skipped) if rounds + skipped else None,
        "acceptance_per_position": [a / d if d else None for a, d in pairs],
    }


def same_text(lane: Records, plain: Records) -> dict[str, int] | None:
    """Count prompts with the same tokens in all repetitions of both; None without answers."""
    mine, other = same_prompts(lane, plain)
    texts: dict[str, set[str]] = {}
    for r in [*mine, *other]:
        texts.setdefault(r["prompt"], set()).add(r.get("tokens", ""))
    if not texts:
        return None
    return {"same": sum(len(t) == 1 for t in texts.values()), "of": len(texts)}


# --- the tables -----------------------------------------------------------------------------------


def speed_rows(
    records: Records, lanes: Sequence[BenchLane], temps: Sequence[float], classes: Sequence[str]
) -> list[dict[str, Any]]:
    """Summarise single answers: a row per temperature and lane that answered anything."""
    rows = []
    for temp in temps:
        answers = {
            lane.name: select(records, kind="answer", temp=temp, lane=lane.name) for lane in lanes
        }
        for lane in lanes:
            mine = answers[lane.name]
            if not mine:
                continue
            plain, stock = answers[PLAIN], answers.get(STOCK_PLAIN, [])
            own_plain = answers.get(lane.plain, [])
            by_class = {
                c: speed_ratio(select(mine, **{"class": c}), select(plain, **{"class": c}))
                for c in classes
            }
            rows.append(
                {
                    "temp": temp,
                    "lane": lane.name,
                    "tokens_per_second": spread(tokens_per_second(mine).values()),
                    "ratio": speed_ratio(mine, plain),
                    "ratio_to_stock": speed_ratio(mine, stock),
                    "ratio_by_class": by_class,
                    **acceptance(mine),
                    "same_text": same_text(mine, own_plain) if temp == 0 and lane.drafts else None,
                }
            )
    return rows


def concurrent_rows(
    records: Records, lanes: Sequence[BenchLane], levels: Sequence[int]
) -> list[dict[str, Any]]:
    """Summarise simultaneous requests: a row per level and lane that was measured."""
    return _rate_rows(
        records, lanes, "concurrent", "requests", levels, "predicted_n", lambda r: r["wall_s"]
    )


def prompt_rows(
    records: Records, lanes: Sequence[BenchLane], lengths: Sequence[int]
) -> list[dict[str, Any]]:
    """Summarise the reading of prompts: a row per length and lane that was measured."""
    return _rate_rows(
        records, lanes, "prompt", "n_tokens", lengths, "prompt_n", lambda r: r["prompt_ms"] / 1e3
    )


def _rate_rows(
    records: Records,
    lanes: Sequence[BenchLane],
    kind: str,
    variable: str,
    values: Sequence[int],
    amount: str,
    seconds: Callable[[dict[str, Any]], float],
) -> list[dict[str, Any]]:
    rows = []
    for value in values:
        chosen: list[dict[str, Any]] = select(records, kind=kind, **{variable: value})
        plain = by_repetition(select(chosen, lane=PLAIN), amount, seconds)
        for lane in lanes:
            mine = select(chosen, lane=lane.name)
            if not mine:
                continue
            speeds = by_repetition(mine, amount, seconds)
            rows.append(
                {
                    variable: value,
                    "lane": lane.name,
                    "tokens_per_second": spread(speeds.values()),
                    "ratio": spread(ratios(speeds, plain)),
                    **acceptance(mine),
                }
            )
    return rows


def verdict(rows: Sequence[dict[str, Any]], lanes: Sequence[BenchLane], temp: float) -> str | None:
    """Say whether drafting pays at a temperature; None without a draft of ours measured.

    Judged by the fastest of our lanes with a draft: it pays if every repetition was faster than
    plain decoding, costs if every one was slower, and makes no clear difference otherwise.
    """
    words = {lane.name: lane.words for lane in lanes if lane.drafts and not lane.stock}
    ours = [r for r in select(rows, temp=temp) if r["lane"] in words and r["ratio"]]
    if not ours:
        return None
    best = max(ours, key=lambda r: r["ratio"]["median"])
    low, mid, high = (best["ratio"][k] for k in ("min", "median", "max"))
    if low > 1:
        judged = "drafting pays"
    elif high < 1:
        judged = "drafting costs more than it saves"
    else:
        judged = "drafting makes no clear difference"
    times = f"{mid:.2f} times plain ({low:.2f} to {high:.2f})"
    return f"temperature {temp:g}: {judged}; the fastest is `{words[best['lane']]}`, {times}"
