"""`dflash-cpp bench`: does drafting pay here? Plain, stock and ours in turns, by llama-server."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_convert.console import Console
from dflash_convert.errors import FailureError, InputError

from . import bench_stats
from .bench_lanes import BenchLane, Servers, ask, ask_together, hang_up_terminates, make_lanes
from .bench_options import BenchOptions
from .bench_store import Key, Store, open_store
from .info import build_info
from .machine import busy_share, file_facts, machine
from .promptset import Prompt
from .server import need_program

_CONTEXT = 2048
_CONTEXT_STEP = 256
_WARM_UP = 32  # tokens; enough for adaptive lengths to learn what rounds cost
_SPARE = 32  # beyond the last token: the block that is verified there


@dataclass
class BenchResult:
    """What came out.

    Attributes:
        lanes: Those that were to be measured.
        missing: Words for a lane (and its number of slots) -> why it was not measured.
        settings, store: As in the file of results.
    """

    options: BenchOptions
    lanes: list[BenchLane]
    settings: dict[str, Any]
    store: Store
    missing: dict[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the whole benchmark as plain data, raw measurements included."""
        records, lanes, options = self.store.measurements, self.lanes, self.options
        return {
            "settings": self.settings,
            "sessions": self.store.sessions,
            "lanes": [{"name": x.name, "words": x.words} for x in lanes],
            "not_measured": self.missing,
            "speed": bench_stats.speed_rows(
                records, lanes, options.temps, classes(options.prompts)
            ),
            "concurrency": bench_stats.concurrent_rows(records, lanes, options.concurrency),
            "prompt": bench_stats.prompt_rows(records, lanes, options.prompt_tokens),
            "measurements": records,
        }


@dataclass(frozen=True)
class Step:
    """One measurement to make; the fields that its kind does not need are empty."""

    kind: str
    lane: BenchLane
    repetition: int
    prompt: Prompt | None = None
    temp: float = 0.0
    count: int = 1

    @property
    def slots(self) -> int:
        """Slots of the server."""
        return self.count if self.kind == "concurrent" else 1

    @property
    def identity(self) -> dict[str, Any]:
        """What tells the measurement from others, as in the file of results."""
        own: dict[str, dict[str, Any]] = {
            "answer": {"temp": self.temp, "prompt": self.prompt.id if self.prompt else ""},
            "prompt": {"n_tokens": self.count},
            "concurrent": {"requests": self.count},
        }
        return {"lane": self.lane.name, **own[self.kind], "repetition": self.repetition}

    @property
    def key(self) -> Key:
        """The identity as a key of `Store.done`."""
        return (self.kind, *self.identity.values())


def classes(prompts: Sequence[Prompt]) -> list[str]:
    """Return the classes of prompts in the order of their first one."""
    return list(dict.fromkeys(p.klass for p in prompts))


# --- measuring ------------------------------------------------------------------------------------


def run_bench(
    options: BenchOptions, folder: Path, console: Console, *, resume: bool, force: bool
) -> BenchResult:
    """Measure what is not in the folder yet.

    Args:
        options: What to measure.
        folder: For `results.jsonl`, see `bench_store`.
        console: For progress and notes on stderr.
        resume, force: See `open_store`.

    Raises:
        InputError: Results of other settings, or a prompt is longer than the context.
        FailureError: A server of ours does not start or dies; what was measured stays.
    """
    missing: dict[str, str] = {}
    groups = [g for g in options.groups if g != "stock" or options.stock]
    if "stock" in options.groups and options.stock is None:
        missing["stock"] = options.no_stock
    lanes = make_lanes(options.draft, options.n_draft, options.n_max, groups)
    tokens = _encode(options)
    n_ctx = _context(options, tokens)
    here = machine(options.threads)
    settings = _settings(options, lanes, n_ctx, here)
    store = open_store(folder, settings, resume=resume, force=force)
    result = BenchResult(options, lanes, settings, store, missing)
    done = store.done
    todo = [step for step in plan(options, lanes) if step.key not in done]
    if done:
        console.info(f"{len(done)} measurements are in `{store.path}`, {len(todo)} are left")
    if not todo:
        return result
    store.add("session", here)
    servers = Servers(
        options.target,
        options.stock,
        n_ctx=n_ctx,
        threads=options.threads,
        extra=options.server_args,
        warm_up=tokens[options.prompts[0].id],
        n_warm_up=min(options.n_predict, _WARM_UP),
        one_at_a_time=options.one_at_a_time,
    )
    try:
        with (
            hang_up_terminates(),
            servers,
            console.progress("measuring", len(todo), "measurements") as ticker,
        ):
            for step in todo:
                _measure(step, result, servers, tokens)
                ticker.advance(1)
    except BaseException:
        made, wanted = len(store.measurements), len(todo) + len(done)
        console.info(f"{made} of {wanted} measurements are kept in `{store.path}`: see --resume")
        raise
    store.add("session_end", {"busy_after": busy_share()})
    return result


def plan(options: BenchOptions, lanes: Sequence[BenchLane]) -> Iterator[Step]:
    """Yield all measurements in order.

    Lanes take turns at every prompt and the order rotates, so that a machine that speeds up or
    slows down does so for all of them. With one server at a time they take turns at every
    repetition.
    """
    turn = 0

    def rotated() -> list[BenchLane]:
        nonlocal turn
        turn += 1
        first = (turn - 1) % len(lanes)
        return [*lanes[first:], *lanes[:first]]

    questions = [(temp, prompt) for temp in options.temps for prompt in options.prompts]
    for repetition in range(options.repeat):
        if options.one_at_a_time:
            for lane in rotated():
                for temp, prompt in questions:
                    yield Step("answer", lane, repetition, prompt, temp)
                for n in options.prompt_tokens:
                    yield Step("prompt", lane, repetition, count=n)
            continue
        for temp, prompt in questions:
            for lane in rotated():
                yield Step("answer", lane, repetition, prompt, temp)
        for n in options.prompt_tokens:
            for lane in rotated():
                yield Step("prompt", lane, repetition, count=n)
    for n in options.concurrency:
        for repetition in range(options.repeat):
            for lane in rotated():
                yield Step("concurrent", lane, repetition, count=n)


def _measure(
    step: Step, result: BenchResult, servers: Servers, tokens: dict[str, list[int]]
) -> None:
    """Make one measurement and keep it; a lane of stock that fails is missing from then on."""
    lane, options = step.lane, result.options
    name = lane.words + (f", {step.slots} requests" if step.slots > 1 else "")
    if name in result.missing:
        return
    try:
        server = servers.get(lane, step.slots)
        if step.kind == "answer" and step.prompt is not None:
            prompt = tokens[step.prompt.id]
            record = ask(lane, server, prompt, options.n_predict, step.temp)
            record["class"] = step.prompt.klass
        elif step.kind == "prompt":
            record = ask(lane, server, _long_prompt(tokens, step.count), 1, 0.0)
        else:
            texts = [tokens[p.id] for p in options.concurrent_prompts[: step.count]]
            temp = options.temps[0]
            record = ask_together(lane, server, texts, options.n_predict, temp)
    except FailureError as exc:
        servers.stop(lane)
        if lane.stock:
            result.missing[name] = ": ".join([exc.message, *exc.problems[-1:]])
            return
        raise FailureError(
            f"{name}: {exc.message}", hint=exc.hint or "go on with --resume", problems=exc.problems
        ) from exc
    result.store.add(step.kind, step.identity | record)


def _long_prompt(tokens: dict[str, list[int]], n: int) -> list[int]:
    """Return n tokens: the prompts one after the other, as often as it takes."""
    once = [t for prompt in tokens.values() for t in prompt]
    return (once * (n // len(once) + 1))[:n]


def _encode(options: BenchOptions) -> dict[str, list[int]]:
    """Return {prompt id: token ids}, from the target's vocabulary alone.

    Raises:
        InputError: The target cannot be loaded, or a prompt cannot be encoded.
    """
    from .opening import open_vocab
    from .text import encode_prompt

    with open_vocab(options.target) as llm:
        prompts = [*options.prompts, *options.concurrent_prompts]
        return {p.id: encode_prompt(llm, p.text, chat=options.chat) for p in prompts}


def _context(options: BenchOptions, tokens: dict[str, list[int]]) -> int:
    """Return the tokens of context that each slot gets."""
    longest = max(tokens, key=lambda name: len(tokens[name]))
    needed = max(
        len(tokens[longest]) + options.n_predict + _SPARE,
        max(options.prompt_tokens, default=0) + _SPARE,
    )
    if options.n_ctx is None:
        return max(_CONTEXT, -(-needed // _CONTEXT_STEP) * _CONTEXT_STEP)
    if options.n_ctx < needed:
        raise InputError(
            f"the context is {options.n_ctx} tokens, expected at least {needed} (the longest "
            f"prompt, `{longest}`, has {len(tokens[longest])})",
            hint="raise -c, or leave it out for as much as is needed",
        )
    return options.n_ctx


def _settings(
    options: BenchOptions, lanes: Sequence[BenchLane], n_ctx: int, here: dict[str, Any]
) -> dict[str, Any]:
    """Return everything that the results depend on, as plain data."""
    return {
        "target": file_facts(options.target),
        "draft": file_facts(options.draft),
        "server": file_facts(need_program("llama-server")),
        "stock": file_facts(options.stock) if options.stock and "stock" in options.groups else None,
        "build": build_info(),
        "lanes": [lane.name for lane in lanes],
        "prompts": [_text(p) for p in options.prompts],
        "concurrent_prompts": [_text(p) for p in options.concurrent_prompts],
        "temperatures": list(options.temps),
        "concurrency": list(options.concurrency),
        "prompt_tokens": list(options.prompt_tokens),
        "n_predict": options.n_predict,
        "repeat": options.repeat,
        "threads": options.threads,
        "n_ctx": n_ctx,
        "chat": options.chat,
        "server_args": list(options.server_args),
        "one_at_a_time": options.one_at_a_time,
        "environment": {
            k: v for k, v in sorted(os.environ.items()) if k.startswith(("LLAMA_ARG_", "GGML_"))
        },
        "cpu": here["cpu"],
        "cores": here["cores"],
    }


def _text(prompt: Prompt) -> dict[str, str]:
    digest = hashlib.sha256(prompt.text.encode("utf-8")).hexdigest()[:16]
    return {"id": prompt.id, "class": prompt.klass, "digest": digest}
