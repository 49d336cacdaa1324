"""Every kind of bad input through the command: its exit code, its sentence, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import make_target
from tiny_checkpoint import draft_tensors, write_safetensors

import dflash_convert
from dflash_convert.cli import app
from dflash_convert.errors import run_cli

Make = Callable[..., Path]
Edited = Callable[..., Path]
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Command]:
    """Return a function that runs the command here; it gives exit code and stderr."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*args: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            run_cli(app, [str(a) for a in args], prog_name="dflash-convert")
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return int(left.value.code or 0), shown.err

    yield run
    signal.signal(signal.SIGTERM, before)


def config(path: Path, **changes: Any) -> None:
    """Change a config; a key that starts with `own_` lies in dflash_config, None removes it."""
    file = path / "config.json"
    document = json.loads(file.read_text())
    for key, value in changes.items():
        table = document["dflash_config"] if key.startswith("own_") else document
        key = key.removeprefix("own_")
        table.pop(key, None)
        if value is not None:
            table[key] = value
    file.write_text(json.dumps(document))


def tensors(path: Path, **changes: np.ndarray | None) -> None:
    """Change the weights: `__` in a name stands for a dot, None removes a tensor."""
    values = draft_tensors(json.loads((path / "config.json").read_text()))
    for name, value in changes.items():
        name = name.replace("__", ".")
        values.pop(name, None)
        if value is not None:
            values[name] = value
    write_safetensors(path / "model.safetensors", values, "f32")


def nan(shape: tuple[int, ...], value: float) -> np.ndarray:
    out = np.ones(shape, np.float32)
    out.flat[3] = value
    return out


def cut(path: Path) -> None:
    file = path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lose(path: Path) -> None:
    (path / "model-00002-of-00002.safetensors").unlink()


def double(path: Path) -> None:
    write_safetensors(path / "more.safetensors", {"model.norm.weight": np.ones(32, np.float32)})


CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), "no `config.json` in"),
    "config cut off": (lambda p: (p / "config.json").write_text('{"a": '), "is not valid JSON"),
    "config no object": (lambda p: (p / "config.json").write_text("3"), "expected an object"),
    "DSpark": (
        lambda p: config(p, architectures=["Qwen3DSparkModel"]),
        "convert_hf_to_gguf.py handles this one",
    ),
    "EAGLE-3": (
        lambda p: config(p, architectures=["LlamaForCausalLMEagle3"]),
        "convert_hf_to_gguf.py handles this one",
    ),
    "a target": (
        lambda p: config(p, architectures=["Qwen3ForCausalLM"]),
        "this looks like a target, not a draft",
    ),
    "speculators": (
        lambda p: config(p, speculators_model_type="dflash"),
        "is an export of the speculators library",
    ),
    "missing tensor": (lambda p: tensors(p, norm__weight=None), "missing `norm.weight` (32)"),
    "extra tensor": (
        lambda p: tensors(p, layers__0__gate__weight=np.ones(3, np.float32)),
        "unknown `layers.0.gate.weight` (3)",
    ),
    "misshapen tensor": (
        lambda p: tensors(p, norm__weight=np.ones(31, np.float32)),
        "`norm.weight` is 31, expected 32 (hidden)",
    ),
    "NaN": (
        lambda p: tensors(p, fc__weight=nan((32, 64), np.nan)),
        "NaN or infinite weights\n  - `fc.weight`: 1 of 2048",
    ),
    "infinity": (
        lambda p: tensors(p, hidden_norm__weight=nan((32,), -np.inf)),
        "`hidden_norm.weight`: 1 of 32",
    ),
    "truncated shard": (cut, "is a damaged or truncated safetensors file"),
    "absent shard": (lose, "names 1 of 2 files that are absent"),
    "tensor twice": (double, "holds tensors twice"),
    "mask token outside": (
        lambda p: config(p, own_mask_token_id=300),
        "mask_token_id is 300, expected 0 to 299 (vocab_size)",
    ),
    "no mask token": (
        lambda p: config(p, own_mask_token_id=None),
        "`mask_token_id` is missing, expected an integer",
    ),
    "layer ids beyond the target": (
        lambda p: config(p, own_target_layer_ids=[1, 9]),
        "the draft reads the output of layer 9, the target has layers 0 to 7",
    ),
    "the last layer": (
        lambda p: config(p, own_target_layer_ids=[1, 7]),
        "the draft reads the output of the last layer (7)",
    ),
    "trained for another depth": (
        lambda p: config(p, num_target_layers=36),
        "was trained for a target of 36 layers, this one has 8",
    ),
    "another vocabulary": (
        lambda p: (config(p, vocab_size=299, own_mask_token_id=1), tensors(p)),
        "the draft has 299 tokens, the target 300",
    ),
    "another width": (
        lambda p: (config(p, hidden_size=40), tensors(p)),
        "the draft's hidden size is 40, the target's 32",
    ),
    "quantised": (
        lambda p: config(p, quantization_config={"bits": 4}),
        "the checkpoint is quantised, expected the original weights",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(
    command: Command, small: Make, small_target: Path, tmp_path: Path, name: str
) -> None:
    spoil, expected = CHECKPOINTS[name]
    sharded = name in ("truncated shard", "absent shard")
    checkpoint = small("ckpt", shards=2 if sharded else 1)
    spoil(checkpoint)
    code, error = command("ckpt", "--target", small_target, "-o", "d.gguf")
    assert code == 2
    assert error.startswith("error: ")
    assert expected in error
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_the_unspoilt_checkpoint_converts(
    command: Command, small: Make, small_target: Path
) -> None:
    """Else the cases above would be refused for another reason."""
    for shards in (1, 2):
        small(f"ckpt{shards}", shards=shards)
        assert command(f"ckpt{shards}", "--target", small_target, "-o", f"{shards}.gguf")[0] == 0


def test_several_problems_are_listed_at_once(
    command: Command, small: Make, small_target: Path
) -> None:
    checkpoint = small("ckpt")
    tensors(
        checkpoint,
        norm__weight=None,
        fc__weight=np.ones((32, 32), np.float32),
        odd=np.ones(1, np.float32),
    )
    code, error = command("ckpt", "--target", small_target, "-o", "d.gguf")
    assert (code, error.count("\n  - ")) == (2, 3)


def test_targets(
    command: Command, small: Make, small_target: Path, edited: Edited, tmp_path: Path
) -> None:
    draft = dflash_convert.convert(small("ckpt"), small_target, tmp_path / "draft.gguf").path
    clip = edited(small_target, "clip", keys={"general.architecture": "clip"})
    part = make_target(tmp_path / "t.gguf", "qwen3", n_layer=8, n_embd=32, n_vocab=300)
    part.write_bytes(part.read_bytes()[:2000])
    kept = sorted(p.name for p in tmp_path.iterdir())
    for target, expected in (
        (draft, "is a draft (architecture `dflash`), expected the GGUF of its target"),
        (clip, "is not a language model"),
        (part, "is a damaged or truncated GGUF file"),
        ("nothing.gguf", "no GGUF file `nothing.gguf`"),
        ("ckpt", "is a draft (DFlash2DraftModel), expected its target"),
        (Path("ckpt/config.json"), "is not a GGUF file: it starts with"),
    ):
        code, error = command("ckpt", "--target", target, "-o", "d.gguf")
        assert (code, expected in error) == (2, True), error
        assert sorted(p.name for p in tmp_path.iterdir()) == kept


# As a user without rights: the tests may run as root, whom no permission stops. Such a user may
# not even reach the interpreter's modules, so everything is loaded by a conversion before.
_UNPRIVILEGED = """
import os, sys
from dflash_convert.cli import app
from dflash_convert.errors import run_cli
arguments = sys.argv[1:]
if os.getuid() == 0:
    try:
        run_cli(app, [*arguments[:-1], "warm.gguf", "-q"])
    except SystemExit:
        pass
    os.setuid(65534)
run_cli(app, arguments)
"""


@pytest.mark.parametrize("place", ["config", "weights", "target", "directory"])
def test_no_permission(small: Make, small_target: Path, place: str) -> None:
    import shutil

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        shutil.copytree(small(), root / "ckpt")
        shutil.copy(small_target, root / "target.gguf")
        out = root / "out"
        out.mkdir()
        out.chmod(0o555 if place == "directory" else 0o777)
        closed = {
            "config": root / "ckpt" / "config.json",
            "weights": root / "ckpt" / "model.safetensors",
            "target": root / "target.gguf",
        }
        if place in closed:
            closed[place].chmod(0)
        args = [root / "ckpt", "--target", root / "target.gguf", "-o", out / "d.gguf"]
        done = subprocess.run(
            [sys.executable, "-c", _UNPRIVILEGED, *map(str, args)],
            cwd=root,
            env={**os.environ, "NO_COLOR": "1", "HOME": str(root)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "permission denied" in done.stderr.lower(), done.stderr
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
        assert done.returncode in (1, 2)
        assert not list(out.iterdir())


def test_full_disk(
    command: Command, small: Make, small_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it fills up in the middle (too little space is known before: see test_write)."""
    small("ckpt")

    def full(*args: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("dflash_convert.write.os.fsync", full)
    code, error = command("ckpt", "--target", small_target, "-o", "d.gguf")
    assert (code, error) == (1, "error: no space left on the device\n")
    assert [p.name for p in Path().iterdir()] == ["ckpt"]


def test_interrupted(
    command: Command, small: Make, small_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small("ckpt")

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_convert.write.os.fsync", interrupt)
    code, error = command("ckpt", "--target", small_target, "-o", "d.gguf")
    assert (code, error) == (130, "error: interrupted\n")
    assert [p.name for p in Path().iterdir()] == ["ckpt"]
