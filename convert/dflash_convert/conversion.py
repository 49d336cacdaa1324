"""The conversion from beginning to end, as a function."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .checkpoint import open_checkpoint
from .config import DraftConfig, read_config
from .console import Console
from .draft_vocab import Rows, with_draft_vocab
from .errors import InputError
from .hub import fetch_draft, fetch_shards, fetch_target
from .keys import load_json
from .mask_embedding import with_mask_embedding
from .naming import Names, output_path
from .plan import Plan, build_plan, require_pair
from .scan import scan
from .target import read_target
from .tensor_types import AUTO, out_type
from .verify import verify
from .write import check_output, new_file, write_gguf


@dataclass(frozen=True)
class ConvertResult:
    """What a conversion did, or would do in a dry run.

    Attributes:
        path: The GGUF.
        size: Bytes of the file; of its tensors alone in a dry run.
        seconds: Time it took.
        dry_run: Nothing was written.
        plan: Every key and tensor.
        source_sha256: Digest over the checkpoint's tensors.
        warnings: Sentences worth showing.
    """

    path: Path
    size: int
    seconds: float
    dry_run: bool
    plan: Plan
    source_sha256: str
    warnings: tuple[str, ...]

    @property
    def outtype(self) -> str:
        """The type of the file."""
        return self.plan.out.name

    @property
    def shared(self) -> tuple[str, ...]:
        """What the draft takes from the target: the embedding, the head, both or nothing."""
        names = {t.name for t in self.plan.tensors}
        embedding = () if "token_embd.weight" in names else ("token embedding",)
        own_head = "output.weight" in names or not embedding
        return embedding + (() if own_head else ("output head",))

    @property
    def draft_vocab(self) -> int | None:
        """Number of tokens that the draft can propose, None for all of the target's."""
        reduced = any(t.name == "d2t" for t in self.plan.tensors)
        return self.plan.config.draft_vocab if reduced else None

    @property
    def head_rows_from(self) -> str | None:
        """Tensor of the target whose rows the file carries as its head, None if it has no such."""
        sources = (t.source for t in self.plan.tensors)
        return next((s.raw_name for s in sources if isinstance(s, Rows) and s.borrowed), None)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready data."""
        return {
            "path": str(self.path),
            "size": self.size,
            "seconds": round(self.seconds, 3),
            "dry_run": self.dry_run,
            "outtype": self.outtype,
            "types": self.plan.types,
            "version": self.plan.config.version,
            "parameters": self.plan.parameters,
            "shared_with_target": list(self.shared),
            "vocab": self.plan.config.vocab,
            "draft_vocab": self.draft_vocab,
            "head_rows_from_target": self.head_rows_from,
            "source_sha256": self.source_sha256,
            "skipped": list(self.plan.skipped),
            "warnings": list(self.warnings),
            "tensors": [
                {
                    "name": t.name,
                    "source": None if t.source is None else t.source.raw_name,
                    "shape": list(t.shape),
                    "source_type": None if t.source is None else t.source.dtype,
                    "type": t.out.name,
                    "bytes": t.nbytes,
                }
                for t in self.plan.tensors
            ],
        }


def convert(
    checkpoint: Path | str,
    target: Path | str | None,
    outfile: Path | str | None = None,
    outtype: str = AUTO,
    force: bool = False,
    *,
    dry_run: bool = False,
    strict: bool = False,
    causal: bool | None = None,
    ignore_keys: tuple[str, ...] = (),
    tensor_types: Sequence[str] = (),
    draft_vocab: Path | str | None = None,
    threads: int | None = None,
    console: Console | None = None,
) -> ConvertResult:
    """Convert a DFlash or DFlash 2 checkpoint to a GGUF that llama.cpp loads.

    Args:
        checkpoint: Directory with config.json and safetensors files, or a hub id
            `org/name[@revision]`.
        target: Target, which gives the tokenizer and is what the draft is checked against: its
            GGUF, its Hugging Face directory, or a hub id.
        outfile: File, directory, or name with `{ftype}`; None names it by convention here.
        outtype: A name of llama-quantize's (`bf16`, `q8_0`, `q4_k_m`, ...; see
            `tensor_types.OUT_TYPES`), or `auto` for the type of the checkpoint.
        force: Replace an existing file.
        dry_run: Check everything (the output's place, too), read every weight, write nothing.
        strict: Turn a type fallback, an ignored config key or a skipped tensor into an error.
        causal: Causality to write whatever the config says; None follows the config.
        ignore_keys: Unknown keys of `dflash_config` to accept.
        tensor_types: Rules `REGEX=TYPE` for the types of single tensors, searched in their GGUF
            names; of those that match the last decides.
        draft_vocab: File with the ids of the tokens that the draft may propose, see
            `draft_vocab.read_ids`; the file written has a head for these alone. None for all.
        threads: Number of threads; None for one per usable core.
        console: For progress; None is silent.

    Raises:
        InputError: Something about the arguments, the checkpoint or the pair.
        FailureError: Writing or verifying failed. In both cases nothing is left behind.
    """
    started = time.monotonic()
    console = console or Console(quiet=True)
    outtype = outtype.lower()
    if outtype != AUTO:
        out_type(outtype)  # before the work: a mistyped name is found at once
    if threads is not None and threads < 1:
        raise InputError(f"{threads} threads, expected at least one")
    if target is None:
        raise InputError(
            "no target given: the draft takes its tokenizer from the target",
            hint=f"`dflash-convert {checkpoint} --target TARGET.gguf`",
        )
    progress = console.show_progress
    target_repo = fetch_target(target)
    model = (
        read_target(target_repo.path, name=target_repo.id) if target_repo else read_target(target)
    )

    def read(directory: Path) -> DraftConfig:
        return read_config(
            load_json(directory / "config.json"),
            target_layers=model.layers,
            mrope=model.mrope,
            causal=causal,
            ignore_keys=frozenset(ignore_keys),
            name=str(directory / "config.json"),
        )

    repo = fetch_draft(checkpoint, read, progress=progress)
    source = open_checkpoint(repo.path if repo else checkpoint)
    config = read(source.path)

    def fetch(tensors: tuple[str, ...]) -> None:
        if target_repo is not None:
            fetch_shards(target_repo, tensors, progress=progress)

    inputs = [model.path, *source.files]
    notes = []
    if draft_vocab is not None:
        require_pair(source, config, model)  # before ids and rows are taken for another target's
        listed = Path(draft_vocab)
        source, config, note = with_draft_vocab(source, config, model, listed, fetch)
        inputs.append(listed)
        notes.append(note)
    source, note = with_mask_embedding(source, config, model, fetch)
    notes.append(note)
    plan = build_plan(source, config, model, outtype, strict, tensor_types)
    names = Names(source.path, model, repo, None if draft_vocab is None else config.draft_vocab)
    path = output_path(None if outfile is None else Path(outfile), names, plan.out)
    check_output(path, force=force, nbytes=plan.nbytes)
    if path.exists() and any(path.samefile(p) for p in inputs):
        raise InputError(f"`{path}` is an input of this conversion, expected another name")

    with console.progress("checking", plan.source_nbytes) as ticker:
        digest = scan(plan, ticker, threads)
    plan = replace(plan, keys=(*names.keys(digest), *plan.keys))
    size = plan.nbytes
    if not dry_run:
        with new_file(path, force=force, nbytes=plan.nbytes) as part:
            with console.progress("writing", plan.nbytes) as ticker:
                checksums = write_gguf(plan, part, ticker, threads)
            with console.progress("verifying", plan.nbytes) as ticker:
                verify(plan, part, ticker, checksums, threads)
            size = part.stat().st_size
    warnings = (*plan.warnings, *names.warnings, *filter(None, notes))
    if model.file.truncated_tensors():
        warnings += (f"the target `{target}` is cut off: download it again before using it",)
    return ConvertResult(
        path=path.absolute(),
        size=size,
        seconds=time.monotonic() - started,
        dry_run=dry_run,
        plan=plan,
        source_sha256=digest,
        warnings=warnings,
    )
