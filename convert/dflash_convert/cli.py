"""The command `dflash-convert`: options in, output out; what happens is in the other modules."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .console import Console, human_bytes
from .errors import EXIT_FAILURE, InputError, run_cli
from .tensor_types import AUTO, OUT_TYPES, TENSOR_TYPES

_DEFAULT = "convert"

_OUT_TYPES = (AUTO, *OUT_TYPES)


class _Commands(TyperGroup):
    """Commands with a default: `dflash-convert DIR` is `dflash-convert convert DIR`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command in front unless there is a command or an option for the group."""
        own = {name for p in self.get_params(ctx) for name in (*p.opts, *p.secondary_opts)}
        if args and args[0] not in self.commands and args[0] not in own:
            _check_mistyped(args[0], list(self.commands))
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


def _check_mistyped(word: str, commands: list[str]) -> None:
    """`dflash-convert inspct x` reads as a directory `inspct`: say what was probably meant."""
    close = difflib.get_close_matches(word, commands, n=1)
    if close and not Path(word).exists():
        raise InputError(
            f"no command and no checkpoint directory `{word}`",
            hint=f"did you mean `dflash-convert {close[0]}`?",
        )


app = typer.Typer(
    name="dflash-convert",
    cls=_Commands,
    help="Convert DFlash drafts to GGUF, upgrade the files of forks, look into GGUF files and "
    "compare them, check whether a pair fits. "
    "`dflash-convert DIR ...` is short for `dflash-convert convert DIR ...`.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print only the result.")]
Verbose = Annotated[
    int, typer.Option("-v", "--verbose", count=True, show_default=False, help="Print the plan.")
]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="No progress bar.")]


def main() -> None:
    """Run the command line of this process."""
    run_cli(app, prog_name="dflash-convert")


def _version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        Console().text(f"dflash-convert {__version__}")
        raise typer.Exit


@app.callback()
def _group(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(_DEFAULT)
def convert_command(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Draft: a directory with config.json and safetensors, or a hub id "
            "org/name[@revision].",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "--target-model-dir",
            help="Target: its GGUF, its Hugging Face directory, or a hub id.",
            metavar="TARGET",
        ),
    ] = None,
    outtype: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            help=f"Type of the matrices, mixed as llama-quantize does: {', '.join(_OUT_TYPES)}. "
            "auto: as stored.",
            autocompletion=lambda: list(_OUT_TYPES),
        ),
    ] = AUTO,
    tensor_type: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX=TYPE",
            help="Type of the tensors whose GGUF name matches, over that of --outtype; may be "
            f"repeated, the last match wins. Types: {', '.join(TENSOR_TYPES)}.",
        ),
    ] = None,
    draft_vocab: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Ids of the tokens that the draft may propose, one a line or a JSON list: the "
            "file gets a head with their rows alone (`dflash-cpp draft-vocab` makes lists).",
        ),
    ] = None,
    outfile: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--outfile",
            help="File, directory, or a name with {ftype}; without it a name by convention in the "
            "current directory.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the plan; write nothing.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Refuse type fallbacks, config keys without effect and skipped tensors.",
        ),
    ] = False,
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--no-causal",
            help="Causality inside a block, whatever the config says.",
            show_default=False,
        ),
    ] = None,
    ignore_key: Annotated[
        list[str] | None,
        typer.Option(help="Accept this unknown key of dflash_config; may be repeated."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Number of threads.", show_default="one per usable core"),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
    no_progress: NoProgress = False,
) -> None:
    """Convert a DFlash or DFlash 2 checkpoint to a GGUF that llama.cpp loads."""
    console = Console(json=json, quiet=quiet, verbose=verbose, progress=not no_progress)
    from .conversion import convert

    result = convert(
        checkpoint,
        target,
        outfile,
        outtype,
        force,
        dry_run=dry_run,
        strict=strict,
        causal=causal,
        ignore_keys=tuple(ignore_key or ()),
        tensor_types=tuple(tensor_type or ()),
        draft_vocab=draft_vocab,
        threads=threads,
        console=console,
    )
    for warning in result.warnings:
        console.warning(warning)
    console.json(result.as_dict())
    if dry_run or verbose:
        _print_plan(console, result.plan)
    for name in result.plan.skipped:
        console.text(f"skipped {name}: not used at run time")
    shared = " and ".join(result.shared) or "nothing"
    config = result.plan.config
    types = ", ".join(f"{count} {name}" for name, count in result.plan.types.items())
    console.text(
        f"DFlash {config.version} draft, block {config.block_size}, "
        f"{result.plan.parameters:,} weights, {result.outtype} ({types}); from the target: {shared}"
    )
    if result.draft_vocab is not None:
        rows = result.head_rows_from
        console.text(
            f"drafts {result.draft_vocab:,} of {config.vocab:,} tokens"
            + (f"; their rows of the target's `{rows}` are in the file" if rows else "")
        )
    verb = "would write" if dry_run else "wrote and verified"
    console.text(f"{verb} {result.path} ({human_bytes(result.size)}, {result.seconds:.1f} s)")
    if not dry_run:
        model = target if Path(str(target)).is_file() else "TARGET.gguf"
        console.text(f"next: dflash-cpp run -m {model} -md {result.path}")
    console.result(result.path)


def _print_plan(console: Console, plan: Any) -> None:
    rows = [
        (
            t.name,
            "computed" if t.source is None else t.source.raw_name,
            " x ".join(map(str, t.shape)),
            "" if t.source is None else t.source.dtype,
            t.out.name,
            f"{t.nbytes:,}",
        )
        for t in plan.tensors
    ]
    columns = ("tensor", "source", "shape", "from", "to", "bytes")
    console.table(columns, rows, right=("bytes",))
    console.text(f"{len(rows)} tensors, {human_bytes(plan.nbytes)}")


@app.command("inspect")
def inspect_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A GGUF file.")],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the keys and tensors of a GGUF file."""
    console = Console(json=json, quiet=quiet)
    from .inspection import inspect_file

    data = inspect_file(file)
    console.json(data)
    console.text(
        f"{data['path']}: {data['kind']}, architecture {data['architecture'] or 'unknown'}"
        + _reduced(data["draft_vocab"], data["vocab"])
    )
    console.table(
        ("key", "type", "value"),
        [(k["name"], k["type"], _shown(k)) for k in data["keys"]],
    )
    console.table(
        ("tensor", "shape", "type", "bytes"),
        [
            (
                t["name"],
                " x ".join(map(str, t["shape"])),
                t["type"],
                None if t["bytes"] is None else f"{t['bytes']:,}",
            )
            for t in data["tensors"]
        ],
        right=("bytes",),
    )
    parts = [f"{t['tensors']} {t['type']} ({human_bytes(t['bytes'])})" for t in data["types"]]
    console.text(
        f"{len(data['tensors'])} tensors, {data['parameters']:,} weights: {', '.join(parts)}"
    )
    if data["truncated"]:
        console.warning(
            f"the file is cut off: {len(data['truncated'])} tensors reach beyond its end"
        )
    console.result(data["kind"])


def _reduced(draft_vocab: int | None, vocab: int | None) -> str:
    """What follows the kind of a draft that can propose some tokens only."""
    if draft_vocab is None:
        return ""
    return f", drafts {draft_vocab:,} of {'?' if vocab is None else format(vocab, ',')} tokens"


def _shown(key: dict[str, Any]) -> str:
    value = key["value"]
    text = ", ".join(map(repr, value)) if isinstance(value, list) else str(value)
    text = text.replace("\n", "\\n")
    return f"{text}, ..." if isinstance(value, list) and "count" in key else text


@app.command("check")
def check_command(
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="Target: its GGUF or Hugging Face directory.")
    ],
    draft: Annotated[Path, typer.Argument(metavar="DRAFT", help="GGUF of the draft.")],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check whether a draft fits a target; exit 1 when it does not."""
    console = Console(json=json, quiet=quiet)
    from .inspection import vocab_sizes
    from .pair import pair_report

    reasons, warnings = pair_report(target, draft)
    vocab, draft_vocab = vocab_sizes(draft)
    for warning in warnings:
        console.warning(warning)
    console.json(
        {
            "fits": not reasons,
            "reasons": reasons,
            "warnings": warnings,
            "vocab": vocab,
            "draft_vocab": draft_vocab,
        }
    )
    console.result("no" if reasons else "yes")
    if not reasons:
        console.text(f"{draft} fits {target}{_reduced(draft_vocab, vocab)}")
        return
    console.text(f"{draft} does not fit {target}:")
    for reason in reasons:
        console.text(f"  - {reason}")
    raise typer.Exit(EXIT_FAILURE)


@app.command("diff")
def diff_command(
    first: Annotated[Path, typer.Argument(metavar="A", help="A GGUF file.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another GGUF file.")],
    json: Json = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
) -> None:
    """Compare the keys and tensors of two GGUF files; exit 1 when they differ."""
    console = Console(json=json, quiet=quiet, progress=not no_progress)
    from .comparison import diff_files

    data = diff_files(first, second, console)
    console.json(data)
    console.result("same" if data["same"] else "different")
    keys, tensors = data["keys"], data["tensors"]
    rows: list[tuple[object, ...]] = [(k["name"], _shown(k), None) for k in keys["only_a"]]
    rows += [(k["name"], None, _shown(k)) for k in keys["only_b"]]
    rows += [(k["name"], _shown(k["a"]), _shown_change(k)) for k in keys["different"]]
    if rows:
        console.table(("key", "A", "B"), rows)
    shapes: list[tuple[object, ...]] = [
        (t["name"], _shown_tensor(t), None, None, None) for t in tensors["only_a"]
    ]
    shapes += [(t["name"], None, _shown_tensor(t), None, None) for t in tensors["only_b"]]
    shapes += [
        (
            t["name"],
            _shown_tensor(t["a"]),
            _shown_tensor(t["b"]),
            None if t.get("changed") is None else f"{t['changed']:,}",
            None if t.get("max_error") is None else f"{t['max_error']:.3g} of {t['max_value']:.3g}",
        )
        for t in tensors["different"]
    ]
    if shapes:
        columns = ("tensor", "A", "B", "changed values", "largest error")
        console.table(columns, shapes, right=("changed values",))
    console.text(f"{keys['same']} keys and {tensors['same']} tensors are the same")
    if not data["same"]:
        raise typer.Exit(EXIT_FAILURE)


def _shown_change(key: dict[str, Any]) -> str:
    text = _shown(key["b"])
    if "differences" not in key:
        return text
    return f"{text} ({key['differences']} differences, the first at {key['first_difference']})"


def _shown_tensor(tensor: dict[str, Any]) -> str:
    return f"{tensor['type']} {' x '.join(map(str, tensor['shape']))}"


@app.command("upgrade")
def upgrade_command(
    file: Annotated[Path, typer.Argument(metavar="OLD", help="GGUF of a draft, made by a fork.")],
    target: Annotated[
        Path | None,
        typer.Option(
            metavar="TARGET",
            help="Target, its GGUF or Hugging Face directory: for a draft without tokenizer, or "
            "without the rope sections that a target with M-RoPE needs.",
        ),
    ] = None,
    outfile: Annotated[
        Path | None,
        typer.Option(
            "-o", "--outfile", help="File or directory; without it dflash-OLD-upgraded.gguf, here."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
) -> None:
    """Write a draft from before the names settled under the names that llama.cpp reads."""
    console = Console(json=json, quiet=quiet, progress=not no_progress)
    from .upgrading import upgrade

    result = upgrade(file, outfile, target, force, console=console)
    for warning in result.warnings:
        console.warning(warning)
    console.json(
        {
            "path": None if result.path is None else str(result.path),
            "changes": list(result.changes),
            "warnings": list(result.warnings),
        }
    )
    for change in result.changes:
        console.text(change)
    if result.path is None:
        console.text(f"{file} has today's names: nothing to upgrade, nothing written")
    else:
        console.text(f"wrote and verified {result.path}")
    console.result(file if result.path is None else result.path)
