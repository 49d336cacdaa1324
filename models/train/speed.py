"""Tokens per second of llama-server by draft length, unpatched and ours, in one run.

The last row lets our server choose the length in every round (`--spec-draft-adaptive on`).

Held-out prompts, greedy, one request at a time; the servers take turns prompt by prompt. Needs the
installed package (`make build`) and, for the comparison, `make stock`.
"""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from data import HERE, read_lines
from target import finish
from tokens import chat_ids, load_tokenizer

from dflash_convert.errors import DFlashError
from dflash_cpp.machine import machine
from dflash_cpp.measure import Lane, run_lanes, same_tokens, speed_ratio
from dflash_cpp.promptset import Prompt, spread
from dflash_cpp.server import SPEC_TYPE, LlamaServer

STOCK = HERE.parents[1] / "build" / "stock" / "bin" / "llama-server"


def measure(args: argparse.Namespace) -> str:
    """Markdown: a row for plain decoding and one for each draft length."""
    where = machine(args.threads)
    tokenizer = load_tokenizer(args.target)
    rows = read_lines(args.prompts)
    prompts = spread(
        [Prompt(str(i), r["class"], r["prompt"]) for i, r in enumerate(rows)], args.limit
    )
    builds = {"stock": STOCK, "ours": None} if STOCK.exists() else {"ours": None}
    common = [
        "-m",
        str(args.target),
        "-c",
        "2048",
        "-np",
        "1",
        "-t",
        str(args.threads),
        "--metrics",
    ]
    adaptive = max(args.lengths) + 1  # stands for the last row
    lanes: dict[tuple[str, int], Lane] = {}
    with ExitStack() as stack:
        for length in (0, *args.lengths, adaptive):
            draft = [
                "-md",
                str(args.draft),
                "--spec-type",
                SPEC_TYPE,
                "--spec-draft-n-max",
                str(min(length, max(args.lengths))),
            ]
            for build, program in builds.items():
                if length == adaptive and build == "stock":
                    continue
                arguments = common + (draft if length else [])
                if length and build == "ours":
                    arguments += ["--spec-draft-adaptive", "on" if length == adaptive else "off"]
                server = stack.enter_context(LlamaServer(arguments, program=program))
                lanes[build, length] = Lane(f"{build} {length}", server)
        run_lanes(
            list(lanes.values()),
            [chat_ids(tokenizer, p.text) for p in prompts],
            n_predict=args.n_predict,
            repeat=args.repeat,
        )
    first = lanes[next(iter(builds)), 0]
    head = "".join(f" {b}: tokens/s | ratio | accepted | same text |" for b in builds)
    lines = [f"| drafted |{head}", "| --: |" + " --: | --: | --: | --: |" * len(builds)]
    for length in (0, *args.lengths, adaptive):
        cells = ["adaptive" if length == adaptive else str(length)]
        for build in builds:
            if (build, length) not in lanes:
                cells += [""] * 4
                continue
            lane = lanes[build, length]
            ratio, accepted = speed_ratio(lane, first), lane.mean_accepted_length
            same = same_tokens(lane, lanes[build, 0])
            cells += [
                f"{lane.tokens_per_second:.1f}",
                f"{ratio[0]:.2f}" if ratio else "",
                f"{accepted:.2f}" if accepted else "",
                f"{same[0]} of {same[1]}" if length else "",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    busy = where["busy_before"]
    lines += [
        "",
        f"{args.target.name}, {args.draft.name}; {len(prompts)} held-out prompts, answers of "
        f"{args.n_predict} tokens, greedy, in turns, repetitions: {args.repeat}; ratio to "
        f"the first row's first. {where['cpu']}, {where['threads']} threads, {where['date']}"
        + ("" if busy is None else f", {100 * busy:.0f} % of the processor busy before")
        + ".",
    ]
    return "\n".join(lines)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--target", type=Path, required=True, help="the target's GGUF")
    p.add_argument("--draft", type=Path, required=True, help="the draft's GGUF (dflash-convert)")
    p.add_argument("--prompts", type=Path, default=HERE / "heldout.jsonl")
    p.add_argument("--lengths", type=int, nargs="+", default=list(range(1, 8)))
    p.add_argument("--limit", type=int, default=8, help="prompts, spread over the classes")
    p.add_argument("--n-predict", type=int, default=64)
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--threads", type=int, default=2)
    args = p.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: no server stays behind
    try:
        return finish(lambda: print(measure(args)))
    except DFlashError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
