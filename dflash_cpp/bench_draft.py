"""`dflash-cpp bench-draft`: what one pass of the draft costs, ours and stock's in turns."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_convert.console import Console
from dflash_convert.errors import FailureError, InputError

from . import _libs
from .bench_draft_lanes import (
    OURS,
    PROGRAM,
    STOCK,
    DraftLane,
    DraftRounds,
    base_kernels_lane,
    make_lanes,
)
from .bench_options import find_pair, find_stock, numbers
from .bench_stats import spread
from .info import build_info
from .machine import busy_share, file_facts, machine
from .opening import default_threads
from .random_pair import SHAPES, random_pair
from .server import block_size, need_program

TYPES = ("q8_0", "q4_0")
MAX_BLOCKS = 64

_WARM_UP = 2  # passes
_PROFILES = 5  # passes
_SPARE = 64  # tokens of context behind the prompt
_SETTLE_SECONDS = 0.005  # until the threads of the other build sleep


@dataclass(frozen=True)
class DraftBenchOptions:
    """What is measured.

    Attributes:
        target, draft: GGUF files that fit each other.
        ours, stock: The dflash-draft-round of each build; no stock if there is none, `no_stock`
            says why.
        blocks: Numbers of sequences that draft in one pass.
        n_draft: Tokens drafted per sequence.
        n_prompt: Tokens of context.
        n_inject: Feature rows per sequence that an injection takes.
        repeat: Repetitions.
        threads, n_ctx, n_gpu_layers: As of llama-server; the context is per sequence.
    """

    target: Path
    draft: Path
    ours: Path
    stock: Path | None
    no_stock: str
    blocks: Sequence[int]
    n_draft: int
    n_prompt: int = 256
    n_inject: int = 4
    repeat: int = 20
    threads: int = 1
    n_ctx: int = 4096
    n_gpu_layers: int = -1

    @property
    def arguments(self) -> list[str]:
        """What every lane's program is given."""
        counts = {"-c": self.n_ctx, "-p": self.n_prompt, "-t": self.threads}
        words = ["-m", str(self.target), "-md", str(self.draft), "-ngl", str(self.n_gpu_layers)]
        return words + [word for name, n in counts.items() for word in (name, str(n))]


@dataclass
class DraftBenchResult:
    """What came out.

    Attributes:
        rounds: A row per number of sequences and lane.
        agreement: A row per number of sequences, if both lanes ran.
        missing: Lane -> why it was not measured.
        session: The machine.
    """

    options: DraftBenchOptions
    rounds: list[dict[str, Any]] = field(default_factory=list)
    agreement: list[dict[str, Any]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    session: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return everything as plain data."""
        options = self.options
        return {
            "settings": {
                "target": file_facts(options.target),
                "draft": file_facts(options.draft),
                "ours": file_facts(options.ours),
                "stock": file_facts(options.stock) if options.stock else None,
                "build": build_info(),
                "blocks": list(options.blocks),
                "n_draft": options.n_draft,
                "n_prompt": options.n_prompt,
                "n_inject": options.n_inject,
                "repeat": options.repeat,
                "threads": options.threads,
                "n_ctx": options.n_ctx,
                "n_gpu_layers": options.n_gpu_layers,
            },
            "sessions": [self.session],
            "rounds": self.rounds,
            "agreement": self.agreement,
            "not_measured": self.missing,
        }


@contextlib.contextmanager
def folder_for_pair(given: Path | None) -> Iterator[Path]:
    """Yield the folder for random pairs: the given one, or one that is removed at the end."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="dflash-bench-draft-") as name:
        yield Path(name)


def make_options(
    *,
    target: Path | None,
    draft: Path | None,
    shape: str | None,
    kind: str | None,
    draft_vocab: int | None,
    folder: Path,
    stock: Path | None,
    blocks: str,
    n_draft: int | None,
    n_prompt: int,
    n_inject: int,
    n_ctx: int,
    threads: int | None,
    console: Console,
    **rest: Any,
) -> DraftBenchOptions:
    """Check what the user gave, fill in the defaults, and write the pair if it is a random one.

    Args:
        target, draft: GGUF files; both None for the demo's pair.
        shape: Of `SHAPES`, for random weights instead.
        kind: Of `TYPES`, for the same.
        draft_vocab: Tokens of the draft's own vocabulary, for the same.
        folder: Where the files of a random pair are or shall be.
        stock: The stock build's dflash-draft-round; None for that of the checkout.
        blocks: Values separated by commas.
        rest: Further fields of `DraftBenchOptions`.

    Raises:
        InputError: A value or a file is not usable, or the pair does not fit.
        FailureError: Our program is not built, or not enough space.
    """
    # the files come last: to write them takes a while
    sequences = numbers(blocks, "--blocks", int, 1, MAX_BLOCKS)
    if n_inject > n_prompt:
        raise InputError(
            f"--inject-rows is {n_inject}, expected at most --prompt-tokens, {n_prompt}"
        )
    needed = n_prompt + max(_SPARE, n_inject)
    if n_ctx < needed:
        raise InputError(f"the context is {n_ctx} tokens, expected at least {needed}")
    ours = need_program(PROGRAM)
    program, no_stock = find_stock(stock, PROGRAM)
    target, draft = _find_files(target, draft, shape, kind, draft_vocab, folder, console)
    n_max = block_size(draft) - 1
    if n_draft is not None and n_draft > n_max:
        raise InputError(
            f"--n-draft is {n_draft}, expected 1 to {n_max} (the draft's block size less one)"
        )
    return DraftBenchOptions(
        target=target,
        draft=draft,
        ours=ours,
        stock=program,
        no_stock=no_stock,
        blocks=sequences,
        n_draft=n_draft or n_max,
        n_prompt=n_prompt,
        n_inject=n_inject,
        n_ctx=n_ctx,
        threads=threads or default_threads(),
        **rest,
    )


def _find_files(
    target: Path | None,
    draft: Path | None,
    shape: str | None,
    kind: str | None,
    draft_vocab: int | None,
    folder: Path,
    console: Console,
) -> tuple[Path, Path]:
    if shape is None:
        if kind is not None:
            raise InputError("--type is for random weights, expected --shape with it")
        if draft_vocab is not None:
            raise InputError(
                "--draft-vocab is for random weights, expected --shape with it",
                hint="dflash-convert --draft-vocab makes such a draft from a checkpoint",
            )
        target, draft = find_pair(target, draft, console, "bench-draft")
    else:
        if target is not None or draft is not None:
            raise InputError("--shape makes a pair, expected no -m and no -md with it")
        _one_of("--shape", shape, tuple(SHAPES))
        kind = _one_of("--type", kind or TYPES[0], TYPES)
        sizes = SHAPES[shape]
        if draft_vocab is not None and not sizes.top_k <= draft_vocab <= sizes.vocab:
            raise InputError(
                f"--draft-vocab is {draft_vocab}, expected {sizes.top_k} (the candidates) to "
                f"{sizes.vocab} (the vocabulary)"
            )
        target, draft = random_pair(shape, kind, folder, console, draft_vocab or 0)
    if not _libs.gguf_uint32(draft, "dflash.selector_top_k"):
        raise InputError(f"`{draft}` has no candidate selector, expected a DFlash 2 draft")
    return target, draft


def _one_of(option: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise InputError(f"{option} is `{value}`, expected {' or '.join(allowed)}")
    return value


# --- measuring ------------------------------------------------------------------------------------


def run_bench(options: DraftBenchOptions, console: Console) -> DraftBenchResult:
    """Measure.

    Raises:
        FailureError: Our build fails; stock's is left out then, and the reason noted.
    """
    result = DraftBenchResult(options)
    if options.stock is None:
        result.missing[STOCK] = options.no_stock
    base = _base_kernel_proposals(options) if options.stock else {}
    result.session = machine(options.threads)
    total = len(options.blocks) * options.repeat
    with (
        contextlib.ExitStack() as stack,
        console.progress("measuring", total, "repetitions") as ticker,
    ):
        running: list[DraftRounds] = []
        for lane in make_lanes(options.ours, options.stock):
            with _may_lack(lane, result):
                running.append(stack.enter_context(DraftRounds(lane, options.arguments)))
        for blocks in options.blocks:
            _measure(blocks, running, result, ticker.advance, base.get(blocks))
    result.session["busy_after"] = busy_share()
    return result


@contextlib.contextmanager
def _may_lack(lane: DraftLane, result: DraftBenchResult) -> Iterator[None]:
    """Note a failure of stock's build; let one of ours pass."""
    try:
        yield
    except FailureError as exc:
        if lane.name != STOCK:
            raise
        result.missing[STOCK] = ": ".join([exc.message, *exc.problems[-1:]])


def _measure(
    blocks: int,
    running: list[DraftRounds],
    result: DraftBenchResult,
    advance: Callable[[int], None],
    base: dict[str, Any] | None,
) -> None:
    """Measure one number of sequences in all lanes; a lane of stock that fails is dropped."""
    options = result.options
    still: dict[str, _Level] = {}
    for rounds in list(running):
        with _may_lack(rounds.lane, result):
            still[rounds.lane.name] = _Level(rounds, blocks, options)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in still}
    for repetition in range(options.repeat):
        # a b, b a, a b: a machine that slows down does so for both
        for name in list(still)[:: 1 if repetition % 2 == 0 else -1]:
            if name not in result.missing:
                with _may_lack(still[name].rounds.lane, result):
                    times[name].append(still[name].once())
        advance(1)
    for rounds in list(running):
        name = rounds.lane.name
        if name in result.missing:
            running.remove(rounds)
            rounds.close()
            still.pop(name, None)
    _add_rows(blocks, still, times, result)
    if len(still) == 2:
        result.agreement.append({"blocks": blocks, **_agreement(still, base, options)})


def _base_kernel_proposals(options: DraftBenchOptions) -> dict[int, dict[str, Any]]:
    """Return {sequences: proposals} of our build with the base's kernels."""
    found = {}
    with DraftRounds(base_kernels_lane(options.ours), options.arguments) as rounds:
        for blocks in options.blocks:
            rounds.ask("open", blocks, options.n_draft)
            found[blocks] = rounds.ask("lattice", blocks, options.n_draft)
    return found


class _Level:
    """A lane with contexts for so many sequences, warmed up; what is asked once is there."""

    def __init__(self, rounds: DraftRounds, blocks: int, options: DraftBenchOptions):
        self.rounds = rounds
        self._pass = (blocks, options.n_draft)
        self._injection = (blocks, options.n_inject)
        rounds.ask("open", *self._pass)
        for _ in range(_WARM_UP):
            self.once()
        self.proposals = rounds.ask("lattice", *self._pass)
        profiles = [rounds.ask("profile", *self._pass) for _ in range(_PROFILES)]
        # the least disturbed one as a whole, so that its parts belong together
        best = min(profiles, key=lambda p: sum(p["us"].values()))
        self.profile_ms = {kind: us / 1e3 for kind, us in best["us"].items()}
        self.nodes = {kind: int(n) for kind, n in best["nodes"].items()}
        self.memory = rounds.ask("memory")

    def once(self) -> tuple[float, float]:
        """Return the microseconds of a pass and of an injection."""
        time.sleep(_SETTLE_SECONDS)
        us = float(self.rounds.ask("round", *self._pass)["us"])
        return us, float(self.rounds.ask("inject", *self._injection)["us"])


def _add_rows(
    blocks: int,
    levels: dict[str, _Level],
    times: dict[str, list[tuple[float, float]]],
    result: DraftBenchResult,
) -> None:
    for name, level in levels.items():
        total = sum(level.profile_ms.values())
        result.rounds.append(
            {
                "blocks": blocks,
                "lane": name,
                "round_ms": spread(us / 1e3 for us, _ in times[name]),
                "inject_ms": spread(us / 1e3 for _, us in times[name]),
                "to_stock": _times_as_fast(times, levels) if name == OURS else None,
                "profile_ms": level.profile_ms,
                "share": {k: ms / total if total else None for k, ms in level.profile_ms.items()},
                "nodes": level.nodes,
                "graph_nodes": sum(level.nodes.values()),
                "memory": {k: int(n) for k, n in level.memory.items()},
                "proposals": [[int(t) for t in row] for row in level.proposals["tokens"]],
            }
        )


def _times_as_fast(
    times: dict[str, list[tuple[float, float]]], levels: dict[str, _Level]
) -> dict[str, Any] | None:
    """Return the spread of stock's time by ours, repetition by repetition."""
    if STOCK not in levels:
        return None
    return spread(b / a for (a, _), (b, _) in zip(times[OURS], times[STOCK], strict=True))


def _agreement(
    levels: dict[str, _Level], base: dict[str, Any] | None, options: DraftBenchOptions
) -> dict[str, Any]:
    """Compare proposals; only blocks of the same length can be equal."""
    facts = levels[OURS].rounds.facts
    if options.n_draft < facts["block"] - 1 and not facts["causal"]:
        return {"as_built": None, "base_kernels": None}
    stock = levels[STOCK].proposals
    return {
        "as_built": compare(levels[OURS].proposals, stock),
        "base_kernels": compare(base, stock) if base else None,
    }


def compare(ours: dict[str, Any], stock: dict[str, Any]) -> dict[str, Any]:
    """Compare greedy proposals, each sequence up to the first token that differs.

    Args:
        ours, stock: `tokens` and their `scores`, both by sequence.

    Returns:
        `same` of `of` tokens, and the largest `score_difference` of those, None without any.
    """
    same, gaps = 0, []
    for a, b, x, y in zip(
        ours["tokens"], stock["tokens"], ours["scores"], stock["scores"], strict=True
    ):
        # behind the first difference the scores are those of other predecessors
        n = next((i for i, (s, t) in enumerate(zip(a, b, strict=True)) if s != t), len(a))
        same += n
        gaps += [abs(s - t) for s, t in zip(x[:n], y[:n], strict=True)]
    total = sum(map(len, ours["tokens"]))
    return {"same": same, "of": total, "score_difference": max(gaps, default=None)}
