"""What `dflash-cpp bench` is told to measure: checked, with the defaults filled in."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_convert.console import Console
from dflash_convert.errors import InputError

from . import demo_pair
from .bench_lanes import GROUPS
from .opening import default_threads, need_file
from .promptset import Prompt, builtin_prompts, load_prompts, spread
from .server import block_size, need_program

N_DRAFT = (1, 3, 7)  # and block - 1
CONCURRENCY = (1, 2, 4, 8)
LIMIT = 6  # built-in prompts: one of each class


@dataclass(frozen=True)
class BenchOptions:
    """What a benchmark measures.

    Attributes:
        target, draft: GGUF files that fit each other.
        stock: Unpatched llama-server; None if there is none, `no_stock` says why.
        prompts: Texts that are answered one at a time.
        concurrent_prompts: Texts for simultaneous requests, at least as many as the highest level.
        n_draft: Fixed lengths, tokens per round.
        n_max: Ceiling of adaptive lengths, block - 1.
        groups: Lanes beside `plain`, of `GROUPS`.
        temps, concurrency, prompt_tokens: Values to go through; empty to leave the part out.
        n_predict, repeat: Tokens per answer at most; repetitions.
        threads: CPU threads of each server.
        n_ctx: Context of each slot in tokens; None for enough.
        chat: Use the chat template; None if the target has one.
        server_args: Further arguments of every llama-server.
        one_at_a_time: Never run two servers at once.
    """

    target: Path
    draft: Path
    stock: Path | None
    no_stock: str
    prompts: Sequence[Prompt]
    concurrent_prompts: Sequence[Prompt]
    n_draft: Sequence[int]
    n_max: int
    groups: Sequence[str] = GROUPS
    temps: Sequence[float] = (0.0,)
    concurrency: Sequence[int] = ()
    prompt_tokens: Sequence[int] = ()
    n_predict: int = 128
    repeat: int = 3
    threads: int = 1
    n_ctx: int | None = None
    chat: bool | None = None
    server_args: Sequence[str] = ()
    one_at_a_time: bool = False


def make_options(
    *,
    target: Path | None,
    draft: Path | None,
    stock: Path | None,
    prompts: Path | None,
    limit: int | None,
    n_draft: str | None,
    temps: str,
    concurrency: str | None,
    prompt_tokens: str,
    lanes: str,
    threads: int | None,
    server_args: Sequence[str],
    console: Console,
    **rest: Any,
) -> BenchOptions:
    """Check what the user gave and fill in the defaults.

    Args:
        target, draft: GGUF files; both None for the demo's pair.
        n_draft, temps, concurrency, prompt_tokens, lanes: Values separated by commas.
        server_args: Each split as a shell would.
        rest: Further fields of `BenchOptions`.

    Raises:
        InputError: A value or a file is not usable, or the pair does not fit.
    """
    temperatures = numbers(temps, "--temp", float, 0.0, 100.0)
    lengths = [n for n in numbers(prompt_tokens, "--prompt-tokens", int, 0, 1 << 20) if n]
    levels = numbers(concurrency, "--concurrency", int, 0, 256) if concurrency else None
    groups = _groups(lanes)
    text, everything = _prompts(prompts)
    if levels is None:
        levels = [n for n in CONCURRENCY if n <= len(everything)]
    levels = [n for n in levels if n]
    if levels and max(levels) > len(everything):
        raise InputError(
            f"{max(levels)} simultaneous requests need as many prompts, {text} has "
            f"{len(everything)}",
            hint="add prompts or lower --concurrency",
        )
    need_program("llama-server")
    target, draft = find_pair(target, draft, console, "bench")
    n_max = block_size(draft) - 1
    fixed = (
        [n for n in dict.fromkeys((*N_DRAFT, n_max)) if n <= n_max]
        if n_draft is None
        else numbers(n_draft, "--n-draft", int, 1, n_max, "the draft's block size less one")
    )
    stock, no_stock = find_stock(stock, "llama-server")
    return BenchOptions(
        target=target,
        draft=draft,
        stock=stock,
        no_stock=no_stock,
        prompts=spread(everything, limit or (LIMIT if prompts is None else None)),
        concurrent_prompts=spread(everything, max(levels, default=0)),
        n_draft=fixed,
        n_max=n_max,
        groups=groups,
        temps=temperatures,
        concurrency=sorted(levels),
        prompt_tokens=sorted(lengths),
        threads=threads or default_threads(),
        server_args=[word for argument in server_args for word in _split(argument)],
        **rest,
    )


def numbers(
    text: str, option: str, kind: Callable[[str], Any], low: float, high: float, why: str = ""
) -> list[Any]:
    """Parse `1,3,7`.

    Raises:
        InputError: Something in it is no number, or outside low to high.
    """
    words = [w.strip() for w in text.split(",") if w.strip()]
    example = "1,3,7" if kind is int else "0,0.7,1"
    try:
        values = [kind(w) for w in words]
    except ValueError:
        values = []
    if not values:
        raise InputError(f"{option} is `{text}`, expected numbers with commas such as {example}")
    wrong = [v for v in values if not low <= v <= high]
    if wrong:
        reason = f" ({why})" if why else ""
        raise InputError(f"{option} has {wrong[0]:g}, expected {low:g} to {high:g}{reason}")
    return list(dict.fromkeys(values))


def _groups(text: str) -> list[str]:
    words = [w.strip().lower() for w in text.split(",") if w.strip()]
    unknown = [w for w in words if w not in GROUPS]
    if unknown or not words:
        found = f"has `{unknown[0]}`" if unknown else "is empty"
        raise InputError(f"--lanes {found}, expected some of {', '.join(GROUPS)}")
    return [g for g in GROUPS if g in words]


def _prompts(path: Path | None) -> tuple[str, list[Prompt]]:
    if path is None:
        return "the built-in set", builtin_prompts()
    return f"`{path}`", load_prompts(path)


def find_pair(
    target: Path | None, draft: Path | None, console: Console, command: str
) -> tuple[Path, Path]:
    """Return the pair to measure, checked: the demo's if none is given.

    Args:
        console: Told if it is the demo's.
        command: Of `dflash-cpp`, for a hint.

    Raises:
        InputError: Half a pair is given, a file is not usable, or they do not fit.
    """
    if target is None and draft is None:
        folder = demo_pair.work_dir()
        target, _ = demo_pair.requantise(demo_pair.find_target(), "Q8_0", folder)
        kind = demo_pair.TYPES["Q8_0"]
        draft, _ = demo_pair.convert_draft(demo_pair.find_checkpoint(), target, kind, folder)
        console.info(f"no pair given, measuring the demo's: {target.name}, {draft.name}")
    if target is None or draft is None:
        option = "-m TARGET.gguf" if target is None else "-md DRAFT.gguf"
        raise InputError(
            f"{option} is missing, expected a target and its draft",
            hint=f"dflash-cpp {command} -m TARGET.gguf -md DRAFT.gguf; without both: the demo's "
            "pair",
        )
    need_file(target, "target")
    need_file(draft, "draft")
    from .session import check_pair

    check_pair(target, draft)
    return target.resolve(), draft.resolve()


def find_stock(given: Path | None, program: str) -> tuple[Path | None, str]:
    """Return the unpatched `program`, or None and why there is none.

    Raises:
        InputError: `given` is not a program.
    """
    if given is not None:
        if not given.is_file() or not os.access(given, os.X_OK):
            found = "is not a program" if given.exists() else "does not exist"
            raise InputError(f"`{given}` {found}, expected the path of an unpatched {program}")
        return given.resolve(), ""
    root = demo_pair.checkout()
    path = root / "build" / "stock" / "bin" / program if root else None
    if path is not None and path.is_file():
        return path, ""
    where = f"`{path}` does not exist" if path else "there is no checkout"
    return None, f"{where}; `make stock` builds the unpatched {program}, --stock names one"


def _split(argument: str) -> list[str]:
    try:
        return shlex.split(argument)
    except ValueError as exc:
        raise InputError(f"--server-arg is `{argument}`, whose quotes are not closed") from exc
