"""The command: exit codes, what goes where, help that is quick, and no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_convert.gguf_file import read_gguf
from dflash_convert.tensor_types import OUT_TYPES

Make = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def error_of(result: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """Check the form of an error and return all of stderr."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    return result.stderr


def test_convert_inspect_check(run: Run, small: Make, small_target: Path, tmp_path: Path) -> None:
    checkpoint = small("ckpt")
    result = run(checkpoint, "--target", small_target, "--outtype", "BF16", "-o", "d.gguf")
    assert result.returncode == 0, result.stderr
    assert "wrote and verified" in result.stdout
    assert "from the target: token embedding and output head" in result.stdout
    shown = run("inspect", "d.gguf")
    assert shown.returncode == 0
    assert "DFlash 2 draft" in shown.stdout
    assert any(
        line.split() == ["selector_hidden.weight", "8", "x", "32", "BF16", "512"]
        for line in shown.stdout.splitlines()
    )
    fits = run("check", small_target, "d.gguf")
    assert (fits.returncode, fits.stdout.strip()) == (0, f"d.gguf fits {small_target}")


def test_check_lists_reasons_and_exits_1(
    run: Run, small: Make, small_target: Path, target: Path
) -> None:
    run(small("ckpt"), "--target", small_target, "-o", "d.gguf")
    result = run("check", target, "d.gguf")
    assert result.returncode == 1
    assert "the draft's hidden size is 32, the target's 288" in result.stdout
    data = json.loads(run("check", target, "d.gguf", "--json").stdout)
    assert (data["schema"], data["fits"]) == (1, False)
    assert run("check", target, "d.gguf", "-q").stdout == "no\n"


def test_json_and_quiet_print_exactly_that(run: Run, small: Make, small_target: Path) -> None:
    checkpoint = small("ckpt")
    result = run(checkpoint, "--target", small_target, "-o", "d.gguf", "--json", "--dry-run")
    data = json.loads(result.stdout)
    assert (data["schema"], data["dry_run"], data["outtype"]) == (1, True, "bf16")
    assert len(data["tensors"]) == 21
    quiet = run(checkpoint, "--target", small_target, "-o", "d.gguf", "-q")
    assert Path(quiet.stdout.strip()).name == "d.gguf"
    assert quiet.stderr == ""
    inspected = json.loads(run("inspect", "d.gguf", "--json").stdout)
    assert inspected["kind"] == "DFlash 2 draft"
    assert {t["type"] for t in inspected["types"]} == {"F32", "BF16"}


def test_dry_run_prints_the_plan(run: Run, small: Make, small_target: Path, tmp_path: Path) -> None:
    result = run(small("ckpt"), "--target", small_target, "-o", "d.gguf", "--dry-run")
    assert result.returncode == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["fc.weight", "fc.weight", "32", "x", "64", "BF16", "bf16", "4,096"] in lines
    assert "would write" in result.stdout
    assert not (tmp_path / "d.gguf").exists()


def test_warnings_go_to_stderr(run: Run, small: Make, small_target: Path) -> None:
    checkpoint = small("ckpt", config_overrides={"frobnicate": 1})
    result = run(checkpoint, "--target", small_target, "-o", "d.gguf", "-q")
    assert result.stderr == "warning: config keys without effect: frobnicate\n"
    strict = run(checkpoint, "--target", small_target, "-o", "e.gguf", "--strict")
    assert "`--strict` allows no fallback, no ignored key" in error_of(strict)


def test_usage_errors(run: Run, small: Make) -> None:
    assert "no target given" in error_of(run(small("ckpt")))
    assert "hint: `dflash-convert" in error_of(run("ckpt"))
    assert "no such option: --frob" in error_of(run("ckpt", "--frob"))
    assert "did you mean `dflash-convert inspect`?" in error_of(run("inspct", "x.gguf"))
    wrong = error_of(run("ckpt", "--outtype", "q3"))
    assert all(name in wrong for name in OUT_TYPES)
    assert "missing argument" in error_of(run("inspect"))


def test_input_errors_list_everything(run: Run, small: Make, small_target: Path) -> None:
    checkpoint = small("ckpt", config_overrides={"hidden_act": "relu", "head_dim": "x"})
    text = error_of(run(checkpoint, "--target", small_target))
    assert text.count("\n  - ") == 2
    result = run("inspect", "missing.gguf")
    assert error_of(result) == "error: no GGUF file `missing.gguf`\n"


def test_mixed_layers_can_be_decided(run: Run, small: Make, small_target: Path) -> None:
    checkpoint = small(
        "ckpt", layers=2, layer_types=["sliding_attention", "full_attention"], is_causal=None
    )
    text = error_of(run(checkpoint, "--target", small_target, "-o", "d.gguf"))
    assert "one flag for all" in text
    assert run(checkpoint, "--target", small_target, "-o", "d.gguf", "--causal").returncode == 0


def test_unwritable_directory(run: Run, small: Make, small_target: Path) -> None:
    missing = run(small("ckpt"), "--target", small_target, "-o", "no/where/d.gguf")
    assert "no directory `no/where` to write to" in error_of(missing)
    proc = run("ckpt", "--target", small_target, "-o", "/proc/d.gguf")
    assert proc.returncode in (1, 2)
    assert proc.stderr.startswith("error: ")


def test_disk_full(small: Make, small_target: Path, tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from dflash_convert.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "sys.argv = ['dflash-convert', *sys.argv[1:]]\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, small("ckpt"), "--target", small_target, "-o", "d.gguf"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert "larger than the file system or the process limit allows" in error_of(result, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


_SLOW = """
import sys, time
from dflash_convert import conversion, write
original = write.make_piece
def slow(*args):
    print("piece", file=sys.stderr, flush=True)
    time.sleep(0.5)
    return original(*args)
write.make_piece = slow
from dflash_convert.cli import main
sys.argv = ["dflash-convert", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [(signal.SIGINT, 130, "error: interrupted"), (signal.SIGTERM, 143, "error: terminated")],
)
def test_killed_while_writing(
    small: Make, small_target: Path, tmp_path: Path, kind: signal.Signals, code: int, message: str
) -> None:
    command = [sys.executable, "-c", _SLOW, small("ckpt"), "--target", small_target]
    with subprocess.Popen(
        [*map(str, command), "-o", "d.gguf"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "piece\n"
        assert [p for p in tmp_path.iterdir() if p.name.endswith(".part")]
        process.send_signal(kind)
        rest = process.stderr.read()
        assert process.wait(timeout=60) == code
    assert message in rest
    assert "Traceback" not in rest
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_closed_pipe_is_quiet(small: Make, small_target: Path, run: Run, tmp_path: Path) -> None:
    run(small("ckpt"), "--target", small_target, "-o", "d.gguf")
    command = [sys.executable, "-m", "dflash_convert", "inspect", "d.gguf"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 1


def test_debug_shows_the_traceback(run: Run) -> None:
    result = run("inspect", "missing.gguf", env={"DFLASH_DEBUG": "1"})
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert "error: no GGUF file" in result.stderr


def test_version_and_help(run: Run) -> None:
    assert run("--version").stdout.startswith("dflash-convert ")
    everything = run("--help").stdout + run("convert", "--help").stdout
    for word in ("convert", "inspect", "check", "--target", "--outtype", "--dry-run", *OUT_TYPES):
        assert word in everything
    assert run().returncode == 2


def test_help_is_quick(run: Run) -> None:
    """Time on the CPU, not on the clock, and what must not be imported."""
    best = min(_cpu_seconds(["--help"]) for _ in range(3))
    assert best < 0.4
    heavy = ("numpy", "gguf", "rich", "safetensors")
    code = f"import sys, dflash_convert.cli; print([m for m in {heavy} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def _cpu_seconds(args: list[str]) -> float:
    before = os.times()
    subprocess.run([sys.executable, "-m", "dflash_convert", *args], capture_output=True, check=True)
    after = os.times()
    return (after.children_user - before.children_user) + (
        after.children_system - before.children_system
    )


def test_terminal_codes_in_names_are_escaped(run: Run, small_target: Path, edited: Make) -> None:
    edited(small_target, "evil", keys={"general.name": "a\x1b[2Jb", "x.\x1b]0;t\x07": "v"})
    out = run("inspect", "evil.gguf").stdout
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "a\\x1b[2Jb" in out


def test_progress_on_a_pipe_is_silent_for_short_work(
    run: Run, small: Make, small_target: Path
) -> None:
    result = run(small("ckpt"), "--target", small_target, "-o", "d.gguf")
    assert result.stderr == ""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status")
def test_memory_stays_far_below_the_checkpoint(make: Make, tmp_path: Path) -> None:
    """A checkpoint of about 450 MB converts within 0.6 of that (numpy and gguf included)."""
    from tiny import make_target

    sizes: dict[str, Any] = {"hidden": 1024, "ffn": 4096, "vocab": 20_000, "rank": 256}
    checkpoint = make(layers=6, heads=16, kv_heads=8, dtype="f32", **sizes)
    model = make_target(tmp_path / "t.gguf", "qwen3", n_layer=8, n_embd=1024, n_vocab=20_000)
    size = (checkpoint / "model.safetensors").stat().st_size
    assert size > 400e6
    code = (
        "import pathlib, sys, dflash_convert\n"
        "dflash_convert.convert(sys.argv[1], sys.argv[2], 'x.gguf', sys.argv[3], True)\n"
        # Not ru_maxrss: that one remembers the size of the process that started this one.
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "print(next(l.split()[1] for l in status.splitlines() if l.startswith('VmHWM')))\n"
    )
    for outtype in ("f32", "q8_0"):
        out = subprocess.run(
            [sys.executable, "-c", code, checkpoint, model, outtype],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(out.stdout) * 1024 < 0.6 * size
    assert read_gguf(tmp_path / "x.gguf").architecture == "dflash"
