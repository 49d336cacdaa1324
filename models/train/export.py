"""Writes the trained draft as a Hugging Face checkpoint of the published form."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from model import Draft, DraftConfig
from safetensors.torch import save_file


def load_run(folder: Path) -> tuple[Draft, dict]:
    """The draft of a run folder of train.py and its saved counters."""
    for name in ("config.json", "state.pt"):
        if not (folder / name).is_file():
            raise SystemExit(f"{folder}: no {name}; give the folder that train.py wrote (--out)")
    draft = Draft(DraftConfig.load(folder / "config.json"))
    state = torch.load(folder / "state.pt", weights_only=True)
    draft.load_state_dict(state["draft"])
    return draft.eval(), {k: state[k] for k in ("step", "anchors")}


def export(draft: Draft, out: Path, command: str) -> int:
    """config.json, model.safetensors (bf16) and train_command.txt; returns the bytes of weights."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {k: v.detach().bfloat16().contiguous() for k, v in draft.state_dict().items()}
    tmp = out / f"model.safetensors.{os.getpid()}.tmp"
    save_file(weights, tmp, {"format": "pt"})
    tmp.chmod(0o644)  # save_file leaves it readable by its owner alone
    tmp.replace(out / "model.safetensors")
    for name, text in (
        ("config.json", json.dumps(draft.config.to_hf(), indent=2) + "\n"),
        ("train_command.txt", command),
    ):
        tmp = out / f"{name}.{os.getpid()}.tmp"
        tmp.write_text(text)
        tmp.replace(out / name)
    return (out / "model.safetensors").stat().st_size


def _revision() -> str:
    try:
        return subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder of train.py")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    args = parser.parse_args()
    draft, counters = load_run(args.run)
    log = args.run / "commands.txt"
    lines = [
        log.read_text().strip() if log.is_file() else "(commands not recorded)",
        f"revision {_revision()}",
        f"steps {counters['step']}, anchors {counters['anchors']}",
        *(f"{p} {version(p)}" for p in ("torch", "safetensors", "gguf")),
    ]
    size = export(draft, args.out, "\n".join(lines) + "\n")
    print(f"{args.out}: {len(draft.state_dict())} tensors, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
