"""Measure wall time and peak memory of dflash-convert beside llama.cpp's own converter.

    python convert/bench/speed.py [--scale N] [--types bf16,q8_0,q4_k_m] [--repeat 3]

Generates a checkpoint with the shapes of Qwen3.8-27B-DFlash2 (3.85 GB) and a target, and converts
it in turn with `dflash-convert` and with the base's convert_hf_to_gguf.py, for a k-quant followed
by llama-quantize. Every run is a process of its own; the output of one is removed, and the disk
given time to settle, before the next begins. Needs `make build stock` and the test extra (torch
and transformers, which the base's converter imports); `--scale 4` takes a sixteenth of the space.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "release" / "llama.cpp"
QUANTIZE = ROOT / "build" / "stock" / "bin" / "llama-quantize"
STOCK = ROOT / "tests" / "stock_convert.py"

# What the base's converter writes itself; everything else takes llama-quantize.
DIRECT = ("f32", "f16", "bf16", "q8_0")
MAX_RATIO, MAX_MIB = 0.7, 1024
NEEDED_BYTES = 10e9  # at scale 1: the checkpoint, the base's bf16 file and one of ours
# Nothing is on the network for either of them; the base's tokenizer library might ask all the same.
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Run:
    """Wall and processor time in seconds, and peak resident memory in MiB."""

    seconds: float
    cpu: float
    mib: float


def run(*commands: list[str]) -> Run:
    """Run commands one after the other: total time and the largest memory of any."""
    os.sync()
    seconds, cpu, mib = 0.0, 0.0, 0.0
    for command in commands:
        with tempfile.TemporaryFile() as log:
            started = time.monotonic()
            files = [
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
            ]
            pid = os.posix_spawn(command[0], command, ENVIRONMENT, file_actions=files)
            _, status, usage = os.wait4(pid, 0)
            seconds += time.monotonic() - started
            cpu += usage.ru_utime + usage.ru_stime
            if status:
                log.seek(0)
                sys.exit(f"error: {' '.join(command)} failed\n{log.read()[-3000:].decode()}")
        # Linux counts in KiB, macOS in bytes.
        mib = max(mib, usage.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10))
    return Run(seconds, cpu, mib)


def measure(folder: Path, outtype: str, threads: int) -> tuple[Run, Run]:
    """Convert once with ours and once with the base's; the files are removed."""
    python, checkpoint = sys.executable, str(folder / "draft")
    out, middle = folder / "out.gguf", folder / "middle.gguf"
    ours = [python, "-m", "dflash_convert", checkpoint, "--target", str(folder / "target.gguf")]
    ours += ["--outtype", outtype, "--outfile", str(out), "--threads", str(threads), "--quiet"]
    first = outtype if outtype in DIRECT else "bf16"
    target = str(folder / "target")
    stock = [python, str(STOCK), str(TREE), "qwen2", checkpoint, "--target-model-dir", target]
    if first == outtype:
        commands = [[*stock, "--outtype", first, "--outfile", str(out)]]
    else:
        commands = [[*stock, "--outtype", first, "--outfile", str(middle)]]
        commands.append([str(QUANTIZE), str(middle), str(out), outtype, str(threads)])
    results = []
    for job in ([ours], commands):
        results.append(run(*job))
        size = out.stat().st_size
        for path in (out, middle):
            path.unlink(missing_ok=True)
        print(
            f"  {outtype:8} {'ours' if job == [ours] else 'base'} {results[-1].seconds:7.1f} s, "
            f"{results[-1].cpu:7.1f} s of CPU, {results[-1].mib:5.0f} MiB, {size / 1e9:.2f} GB",
            file=sys.stderr,
            flush=True,
        )
    return results[0], results[1]


def main() -> None:
    """Generate, measure, print a table (or JSON), fail when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--scale", type=int, choices=(1, 2, 4), default=1, help="divide all widths")
    parser.add_argument("--types", default="bf16,q8_0,q4_k_m", help="comma-separated")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; medians are shown")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of both programs")
    parser.add_argument("--folder", type=Path, help="where to make a temporary folder (10 GB)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    for path in (TREE, QUANTIZE):
        if not path.exists():
            sys.exit(f"error: no `{path.relative_to(ROOT)}`, run `make build stock` first")

    folder = Path(tempfile.mkdtemp(prefix="dflash-bench-", dir=options.folder))
    needed = NEEDED_BYTES / options.scale**2
    if shutil.disk_usage(folder).free < needed:
        folder.rmdir()
        sys.exit(f"error: `{folder.parent}` has no {needed / 1e9:.1f} GB free, see --folder")
    try:
        # In a process of its own: Linux counts the memory of the parent as a child's peak.
        generate = Path(__file__).with_name("generate.py")
        command = [sys.executable, generate, folder, "--scale", str(options.scale)]
        subprocess.run(command, check=True)
        rows = []
        for outtype in options.types.split(","):
            runs = [measure(folder, outtype, options.threads) for _ in range(options.repeat)]
            rows.append({"type": outtype, **_summary(runs)})
        source = (folder / "draft" / "model.safetensors").stat().st_size
    finally:
        shutil.rmtree(folder)
    if options.json:
        print(json.dumps({"scale": options.scale, "source_bytes": source, "results": rows}))
    else:
        _print_table(rows)
    missed = [r["type"] for r in rows if r["ratio"] > MAX_RATIO or r["ours_mib"] > MAX_MIB]
    if missed:
        sys.exit(f"missed {MAX_RATIO} of the time or {MAX_MIB} MiB: {', '.join(missed)}")


def _summary(runs: list[tuple[Run, Run]]) -> dict[str, float]:
    ours, base = zip(*runs, strict=True)
    return {
        "ours_seconds": statistics.median(r.seconds for r in ours),
        "base_seconds": statistics.median(r.seconds for r in base),
        # Pairs run next to each other, so their ratio is what noise disturbs least.
        "ratio": statistics.median(a.seconds / b.seconds for a, b in runs),
        "ours_cpu_seconds": statistics.median(r.cpu for r in ours),
        "base_cpu_seconds": statistics.median(r.cpu for r in base),
        "ours_mib": max(r.mib for r in ours),
        "base_mib": max(r.mib for r in base),
    }


def _print_table(rows: list[dict[str, float]]) -> None:
    print("| type | ours, s | base, s | ratio | ours, MiB | base, MiB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for r in rows:
        print(
            f"| {r['type']} | {r['ours_seconds']:.1f} | {r['base_seconds']:.1f} | "
            f"{r['ratio']:.2f} | {r['ours_mib']:.0f} | {r['base_mib']:.0f} |"
        )


if __name__ == "__main__":
    main()
