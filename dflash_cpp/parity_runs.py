"""Parity under several conditions: draft lengths, attention, caches, slots, temperatures."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_convert.errors import InputError

from . import __version__, distribution, parity, parity_slots
from .bench_options import numbers
from .caps import delta_cap, weight_type
from .distribution import DistributionTest
from .info import build_info, compute_backend
from .machine import machine
from .opening import PairOptions, default_threads, open_pair
from .promptset import Prompt, spread
from .text import encode_prompt

if TYPE_CHECKING:
    from .llama import DFlashLlama

FAILED = "failed"  # the verdict of a distribution test
SAMPLED_PROMPTS = 3
MAX_SLOTS = 64

_FLASH = {"on": True, "off": False}
_QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
KV_TYPES = ("F32", "F16", "BF16", *_QUANTISED)  # that llama.cpp takes for a cache


@dataclass(frozen=True)
class Condition:
    """Settings that a comparison is repeated with; None for the usual ones."""

    n_draft: int | None = None
    flash_attn: bool = True
    kv_types: tuple[str, str] | None = None

    def words(self) -> str:
        """Return the condition for people."""
        draft = "full drafts" if self.n_draft is None else f"{self.n_draft} drafted"
        cache = "/".join(dict.fromkeys(self.kv_types or ("F16", "F16")))
        return f"{draft}, flash attention {'on' if self.flash_attn else 'off'}, KV {cache}"


@dataclass(frozen=True)
class Plan:
    """What to compare.

    Attributes:
        options: The pair; each condition replaces its own settings.
        prompts: For greedy texts; some of them are sampled.
        n_predict: Tokens of each greedy text.
        conditions: All settings to go through.
        temps: Temperatures above 0.
        samples: Texts of each side, prompt and temperature.
        slots: Simultaneous requests to llama-server.
        greedy: Whether greedy texts are compared.
        alpha: Probability of a failed test without a fault, all tests together.
        chat, max_delta: As in `parity.check_parity` and `caps.delta_cap`.
    """

    options: PairOptions
    prompts: Sequence[Prompt]
    n_predict: int
    conditions: Sequence[Condition]
    temps: Sequence[float] = ()
    samples: int = 400
    slots: Sequence[int] = ()
    greedy: bool = True
    alpha: float = distribution.ALPHA
    chat: bool | None = None
    max_delta: float | None = None

    @property
    def simple(self) -> bool:
        """Whether it is one greedy comparison, whose output is its table."""
        return self.greedy and len(self.conditions) == 1 and not self.temps and not self.slots

    @property
    def n_steps(self) -> int:
        """Number of texts to make, for the progress."""
        n = len(self.prompts)
        settings = len({(c.flash_attn, c.kv_types) for c in self.conditions})
        greedy = n * (len(self.conditions) + settings) if self.greedy else 0
        sampled = 2 * min(SAMPLED_PROMPTS, n) * len(self.temps) * self.samples
        slots = n * (len(self.slots) * len(self.conditions) + settings) if self.slots else 0
        return greedy + sampled * len(self.conditions) + slots


@dataclass
class Run:
    """One greedy comparison; `slots` is None for one inside this process."""

    condition: Condition
    slots: int | None
    report: parity.ParityReport

    def words(self) -> str:
        """Return what is special about it, for people."""
        slots = "" if self.slots is None else f", slots {self.slots}"
        return f"{self.condition.words()}{slots}"


@dataclass
class Result:
    """Everything that was compared."""

    plan: Plan
    facts: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    tests: list[tuple[Condition, DistributionTest]] = field(default_factory=list)

    @property
    def limit(self) -> float:
        """The p-value below which a test fails (Bonferroni)."""
        counted = sum(t.p is not None for _, t in self.tests)
        return self.plan.alpha / max(1, counted)

    def failed(self, test: DistributionTest) -> bool:
        """Tell whether the two samples differ by more than chance."""
        return test.p is not None and test.p < self.limit

    @property
    def counts(self) -> dict[str, int]:
        """Texts per verdict, of all greedy comparisons."""
        found = [run.report.counts for run in self.runs]
        return {v: sum(c[v] for c in found) for v in parity.VERDICTS}

    @property
    def compared(self) -> int:
        """Tokens of all greedy comparisons."""
        return sum(run.report.compared for run in self.runs)

    @property
    def verdict(self) -> str:
        """`mismatch`, else `failed`, else the worst of the others."""
        if self.counts[parity.MISMATCH]:
            return parity.MISMATCH
        if any(self.failed(t) for _, t in self.tests):
            return FAILED
        return parity.TIE if self.counts[parity.TIE] else parity.IDENTICAL

    @property
    def good(self) -> bool:
        """Whether nothing was found that drafting must not change."""
        return self.verdict not in (parity.MISMATCH, FAILED)

    def to_json(self) -> dict[str, Any]:
        """Return all as plain data; keys are documented in docs/parity.md."""
        return {
            "verdict": self.verdict,
            "summary": summary_line(self),
            "tokens_compared": self.compared,
            "counts": self.counts,
            **self.facts,
            "runs": [
                {"condition": _plain(run.condition), "slots": run.slots, **run.report.to_json()}
                for run in self.runs
            ],
            "alpha": self.plan.alpha,
            "p_limit": self.limit,
            "distribution_tests": [
                {"condition": _plain(c), **asdict(t), "failed": self.failed(t)}
                for c, t in self.tests
            ],
        }


def _plain(condition: Condition) -> dict[str, Any]:
    return asdict(condition) | {"words": condition.words()}


# --- options --------------------------------------------------------------------------------------


def make_conditions(n_draft: str | None, flash_attn: str, kv_types: str | None) -> list[Condition]:
    """Make all combinations of what the command line lists.

    A quantised V cache needs flash attention: such combinations without it are left out.

    Raises:
        InputError: A list has something unknown in it, or nothing is left.
    """
    lengths = [None] if n_draft is None else numbers(n_draft, "--n-draft", int, 1, 63)
    flash = [_FLASH[w] for w in _words(flash_attn, "--flash-attn", _FLASH)]
    caches = [None] if kv_types is None else [_cache(w) for w in kv_types.split(",")]
    found = [
        Condition(n, fa, kv)
        for fa, kv, n in itertools.product(flash, caches, lengths)
        if fa or kv is None or kv[1] not in _QUANTISED
    ]
    if not found:
        raise InputError("a quantised V cache needs --flash-attn on")
    return found


def _words(text: str, option: str, known: Any) -> list[str]:
    words = [w.strip().lower() for w in text.split(",")]
    unknown = [w for w in words if w not in known]
    if unknown:
        raise InputError(f"{option} has `{unknown[0]}`, expected some of {', '.join(known)}")
    return list(dict.fromkeys(words))


def _cache(word: str) -> tuple[str, str]:
    names = [n.strip().upper() for n in word.split("/")]
    unknown = [n for n in names if n not in KV_TYPES]
    if unknown or len(names) > 2:
        raise InputError(
            f"--kv-type has `{word.strip()}`, expected types such as f16,q8_0 or k/v as f16/q8_0"
        )
    return names[0], names[-1]


def make_temps(text: str) -> tuple[list[float], bool]:
    """Return the temperatures above 0, and whether 0 (greedy) is among them."""
    temps = numbers(text, "--temp", float, 0.0, 10.0)
    return [t for t in temps if t > 0], 0.0 in temps


def make_slots(text: str | None) -> list[int]:
    """Return the numbers of simultaneous requests."""
    return [] if text is None else numbers(text, "--slots", int, 1, MAX_SLOTS)


# --- comparing ------------------------------------------------------------------------------------


def run_plan(plan: Plan, on_text: Callable[[], None] = lambda: None) -> Result:
    """Compare everything; every condition opens the pair anew.

    Raises:
        FailureError: Nothing was drafted, or a server does not start.
    """
    result = Result(plan, {})
    runner = _Runner(plan, on_text)
    for condition in plan.conditions:
        options = replace(plan.options, **vars(condition))
        with open_pair(options) as llm:
            result.facts = result.facts or gather_facts(llm, options)
            runner.enter(llm, options)
            if plan.greedy:
                result.runs.append(Run(condition, None, runner.greedy()))
            result.tests += [(condition, test) for test in runner.sampled()]
            for slots in plan.slots:
                result.runs.append(Run(condition, slots, runner.served(slots)))
    return result


class _Runner:
    """Makes the comparisons of one condition after the other.

    Plain texts do not depend on the length of drafts: they are kept for the conditions that share
    attention and cache.
    """

    def __init__(self, plan: Plan, on_text: Callable[[], None]):
        self._plan = plan
        self._on_text = on_text
        self._plain: dict[Any, parity.PlainTexts] = {}
        self._served: dict[Any, parity_slots.Texts] = {}
        self._seed = 1

    def enter(self, llm: DFlashLlama, options: PairOptions) -> None:
        self._llm, self._options = llm, options
        self._key = options.flash_attn, options.kv_types
        self._cap = delta_cap(llm, self._plan.max_delta)

    def greedy(self) -> parity.ParityReport:
        plan, known = self._plan, self._plain
        if self._key not in known:
            known[self._key] = parity.plain_texts(
                self._llm, plan.prompts, plan.n_predict, plan.chat, self._on_text
            )
        return parity.check_parity(
            self._llm,
            plan.prompts,
            n_predict=plan.n_predict,
            cap=self._cap,
            plain=known[self._key],
            on_decoded=self._on_text,
        )

    def sampled(self) -> Iterator[DistributionTest]:
        plan = self._plan
        prompts = spread(plan.prompts, SAMPLED_PROMPTS)
        for temp, prompt in itertools.product(plan.temps, prompts):
            tokens = encode_prompt(self._llm, prompt.text, chat=plan.chat)
            yield from distribution.compare_prompt(
                self._llm,
                prompt.id,
                tokens,
                temp=temp,
                n=plan.samples,
                seed=self._seed,
                on_text=self._on_text,
            )
            self._seed += plan.samples  # equal seeds would make the tests depend on each other

    def served(self, slots: int) -> parity.ParityReport:
        """Compare through llama-server, against one request at a time without a draft."""
        plan, llm, known = self._plan, self._llm, self._served
        encoded = [encode_prompt(llm, p.text, chat=plan.chat) for p in plan.prompts]
        common: dict[str, Any] = {"n_predict": plan.n_predict, "on_text": self._on_text}
        if self._key not in known:
            known[self._key], _ = parity_slots.server_texts(self._options, encoded, **common)
        found, counters = parity_slots.server_texts(
            self._options, encoded, slots=slots, n_draft=llm.n_draft, **common
        )
        return parity_slots.compare_slots(
            llm,
            plan.prompts,
            encoded,
            known[self._key],
            found,
            counters,
            cap=self._cap,
            n_predict=plan.n_predict,
        )


# --- what was compared ----------------------------------------------------------------------------


def gather_facts(llm: DFlashLlama, options: PairOptions) -> dict[str, Any]:
    """Collect what a report needs besides its results: versions, files, machine."""
    import llama_cpp

    build = build_info()
    return {
        "versions": {
            "dflash_toolkit": __version__,
            "llama_cpp_python": llama_cpp.__version__,
            "base_commit": build.get("base_commit", "unknown"),
            "patch_key": build.get("patch_key", "unknown"),
        },
        "backend": compute_backend(llm.model_params.n_gpu_layers),
        "weights": weight_type(llm.metadata),
        "files": {
            name: {"path": str(path), "sha256": file_hash(path)}
            for name, path in (("target", options.model), ("draft", options.draft))
        },
        "machine": machine(options.threads or default_threads()),
    }


def file_hash(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def summary_line(result: Result) -> str:
    """Return one line for a bug report: versions, pair, conditions, what was found."""
    facts, plan = result.facts, result.plan
    versions, files = facts["versions"], facts["files"]
    base = f"llama.cpp {versions['base_commit'][:9]} + {versions['patch_key'][:9]}"
    pair = f"target {files['target']['sha256'][:10]} {facts['weights']}"
    parts = [
        f"dflash-toolkit {versions['dflash_toolkit']}, {base}, {facts['backend']}",
        f"{pair}, draft {files['draft']['sha256'][:10]}",
        _conditions(plan),
        f"{result.compared} tokens compared, {result.counts[parity.MISMATCH]} mismatches, "
        f"{result.counts[parity.TIE]} ties",
    ]
    tested = [t.p for _, t in result.tests if t.p is not None]
    if tested:
        failed = sum(result.failed(t) for _, t in result.tests)
        parts.append(
            f"{len(tested)} distribution tests, {failed} failed, smallest p {min(tested):.2g} "
            f"(limit {result.limit:.2g})"
        )
    return "; ".join(parts)


def _conditions(plan: Plan) -> str:
    conditions = plan.conditions
    drafts = dict.fromkeys("full" if c.n_draft is None else str(c.n_draft) for c in conditions)
    flash = dict.fromkeys("on" if c.flash_attn else "off" for c in conditions)
    caches = dict.fromkeys("/".join(dict.fromkeys(c.kv_types or ("F16",))) for c in conditions)
    words = [f"drafts {','.join(drafts)}", f"fa {','.join(flash)}", f"KV {','.join(caches)}"]
    if plan.slots:
        words.append(f"slots {','.join(map(str, plan.slots))}")
    temps = [0.0] * plan.greedy + list(plan.temps)
    return " ".join([*words, f"temp {','.join(f'{t:g}' for t in temps)}"])
