"""Prompts and the target's own answers: `data.py answers` and `data.py heldout`.

Answers come in numbered shards of JSON lines (prompt and answer token ids). A finished shard is
never made again, so the command can be stopped and repeated, and several workers can share it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

import torch
from prompts import heldout_prompts, training_prompts
from target import Target, finish
from tokens import chat_ids, load_tokenizer

HERE = Path(__file__).resolve().parent


def write_lines(path: Path, rows: list[dict]) -> None:
    """JSON lines to a temporary name beside `path`, then renamed."""
    tmp = path.with_name(path.name + f".{os.getpid()}.tmp")
    tmp.write_text("".join(json.dumps(r) + "\n" for r in rows))
    tmp.replace(path)


def read_lines(path: Path) -> list[dict]:
    """The rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def own_prompts(target: Target, count: int, seed: int) -> list[list[int]]:
    """Token ids of prompts that the target invents: it continues the opening of a user turn."""
    tok = load_tokenizer(target.path)
    opening = chat_ids(tok, "")
    cut = len(opening) - len(tok.encode("<|im_end|>\n<|im_start|>assistant\n").ids)
    gen = torch.Generator().manual_seed(seed)
    turns = target.generate([opening[:cut]] * count, 80, torch.full((count,), 0.9), gen)
    return [
        opening[:cut] + t[:-1] + opening[cut:]
        for t in turns
        if t[-1] == target.config.eos and len(t) > 4
    ]


def answer(target: Target, rows: list[dict], max_new: int, seed: int, name: str = "") -> list[dict]:
    """Adds `answer` (token ids) to rows that hold `ids` and `temperature`."""
    gen = torch.Generator().manual_seed(seed)
    heat = torch.tensor([r["temperature"] for r in rows], dtype=torch.float32)
    start = time.time()
    out = target.generate([r["ids"] for r in rows], max_new, heat, gen)
    total, spent = sum(map(len, out)), time.time() - start
    print(f"{name}{len(rows)} answers, {total} tokens, {total / spent:.0f} tokens/s", flush=True)
    return [r | {"answer": a} for r, a in zip(rows, out, strict=True)]


def cmd_answers(args: argparse.Namespace) -> None:
    """Shards of templated prompts, every third shard of prompts the target made up itself."""
    args.out.mkdir(parents=True, exist_ok=True)
    target = Target(args.target)
    tok = load_tokenizer(args.target)
    held = {r["prompt"] for r in read_lines(HERE / "heldout.jsonl")}
    templated = [
        p for p in training_prompts(args.shards * args.per_shard) if p["prompt"] not in held
    ]
    random.Random(args.seed).shuffle(templated)
    if args.compile:
        target.compile()
    # more shards than before: the longer list of prompts holds those already answered
    answered = {tuple(r["ids"]) for p in args.out.glob("*.jsonl") for r in read_lines(p)}
    worker, workers = (int(x) for x in args.worker.split("/"))
    for shard in range(worker, args.shards, workers):
        path = args.out / f"answers-{shard:04d}.jsonl"
        if path.exists():
            continue
        seed = args.seed * 100_003 + shard
        rng = random.Random(seed)
        if shard % 3 == 2:
            rows = [{"class": "own", "ids": i} for i in own_prompts(target, args.per_shard, seed)]
        else:
            part = templated[shard * args.per_shard : (shard + 1) * args.per_shard]
            rows = [{"class": p["class"], "ids": chat_ids(tok, p["prompt"])} for p in part]
            rows = [r for r in rows if tuple(r["ids"]) not in answered]
            if not rows:
                continue
        for r in rows:
            r["temperature"] = 0.0 if rng.random() < args.greedy else rng.choice((0.7, 1.0))
        write_lines(path, answer(target, rows, args.max_new, seed, f"shard {shard}: "))


def cmd_heldout(args: argparse.Namespace) -> None:
    """The answers to the held-out prompts: greedy and at temperature 1."""
    target = Target(args.target)
    tok = load_tokenizer(args.target)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = read_lines(args.prompts)
    for heat, name in ((0.0, "greedy"), (1.0, "sampled")):
        path = args.out / f"heldout-{name}.jsonl"
        if path.exists():
            continue
        part = [
            {
                "class": r["class"],
                "origin": r["origin"],
                "ids": chat_ids(tok, r["prompt"]),
                "temperature": heat,
            }
            for r in rows
        ]
        write_lines(path, answer(target, part, args.max_new, 7, f"{name}: "))


def cmd_prompts(args: argparse.Namespace) -> None:
    """Rewrites the templated part of heldout.jsonl; handwritten rows are kept."""
    kept = [r for r in read_lines(args.prompts) if r["origin"] == "handwritten"]
    trained = {r["prompt"] for r in training_prompts(20_000)}  # templates of numbers only collide
    made = [
        r | {"origin": "template"}
        for r in heldout_prompts(2 * args.count)
        if r["prompt"] not in trained
    ][: args.count]
    write_lines(args.prompts, kept + made)
    print(f"{args.prompts}: {len(kept)} handwritten, {len(made)} from templates")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    sub = parser.add_subparsers(required=True)
    for name, run in (("answers", cmd_answers), ("heldout", cmd_heldout), ("prompts", cmd_prompts)):
        p = sub.add_parser(name, help=run.__doc__)
        p.set_defaults(run=run)
        if name != "prompts":
            p.add_argument("--target", type=Path, required=True, help="the target's GGUF")
            p.add_argument("--out", type=Path, required=True, help="folder outside the repository")
            p.add_argument("--max-new", type=int, default=256, help="longest answer in tokens")
            p.add_argument("--threads", type=int, default=2)
        if name != "answers":
            p.add_argument("--prompts", type=Path, default=HERE / "heldout.jsonl")
    answers = sub.choices["answers"]
    answers.add_argument("--shards", type=int, default=48)
    answers.add_argument("--per-shard", type=int, default=128)
    answers.add_argument("--greedy", type=float, default=0.8, help="share of greedy answers")
    answers.add_argument("--seed", type=int, default=1)
    answers.add_argument("--compile", action="store_true", help="torch.compile: a sixth faster")
    answers.add_argument("--worker", default="0/1", help="this worker / number of workers")
    sub.choices["prompts"].add_argument("--count", type=int, default=96)
    args = parser.parse_args()
    torch.set_num_threads(getattr(args, "threads", 1))
    return finish(lambda: args.run(args))


if __name__ == "__main__":
    sys.exit(main())
