"""Measures a draft on the held-out answers: accepted length and recall, by class and position.

The target's answers fix the path, so no decoding is needed. Greedy: a round starts at an anchor,
accepts the drafts that equal the answer, and the next anchor is the token after them. Temperature
1: given the target's own sampled path, the draft agrees at a position with probability
min(1, q(y) / p(y)), which by maximal coupling is the law of speculative sampling; the expectation
over the draft's luck is computed exactly. Accepted length counts the target's own token of each
round; a round that reaches the answer's end counts what was there.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import TextIO

import torch
from export import load_run
from model import Draft, DraftConfig, propose
from safetensors import safe_open
from safetensors.torch import load_file
from target import Target, finish
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def load_checkpoint(folder: Path) -> Draft:
    """A draft from an exported checkpoint (only the shapes this recipe makes)."""
    raw = json.loads((folder / "config.json").read_text())
    nested = raw["dflash_config"]
    weights = load_file(folder / "model.safetensors")
    config = DraftConfig(
        raw["hidden_size"],
        raw["intermediate_size"],
        raw["num_hidden_layers"],
        raw["num_attention_heads"],
        raw["num_key_value_heads"],
        raw["head_dim"],
        raw["vocab_size"],
        raw["rms_norm_eps"],
        raw["rope_theta"],
        raw["max_position_embeddings"],
        raw["num_target_layers"],
        raw["eos_token_id"],
        tuple(nested["target_layer_ids"]),
        nested["mask_token_id"],
        nested["block_size"],
        raw["sliding_window"],
        nested["conv_kernel_size"],
        nested["conv_group_size"],
        nested["selector_rank"],
        nested["selector_top_k"],
        use_conv=any("conv" in k for k in weights),
        use_selector=any("selector" in k for k in weights),
    )
    draft = Draft(config)
    draft.load_state_dict({k: v.float() for k, v in weights.items()})
    return draft.eval()


@torch.inference_mode()
def blocks(
    draft: Draft,
    target: Target,
    features: Tensor,
    ids: Tensor,
    prompt: int,
    length: int,
    bf16: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """All anchors of one answer: positions [M], hidden [M, length, H], logits [M, length, V]."""
    anchors = torch.arange(prompt, len(ids) - 1)
    tokens = torch.full((len(anchors), length + 1), draft.config.mask_token_id)
    tokens[:, 0] = ids[anchors]
    rows = F.embedding(tokens, target.embedding).float()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        hidden = draft(features[None].float(), anchors[None], rows[None])[0, :, 1:]
        logits = F.linear(hidden, target.head if bf16 else target.head.to(hidden.dtype))
    return anchors, hidden.float(), logits.float()


def confidences(
    draft: Draft, hidden: Tensor, logits: Tensor, anchor: Tensor, path: Tensor, candidates: Tensor
) -> Tensor:
    """Probability of the likeliest candidate at each position of the path [M, length]."""
    score = logits.gather(-1, candidates)
    if draft.candidate_selector is not None:
        previous = torch.cat([anchor[:, None], path[:, :-1]], 1)
        score = score + draft.candidate_selector.bonus(hidden, previous, candidates).float()
    return score.softmax(-1).amax(-1)


def agreement(
    draft: Draft, hidden: Tensor, logits: Tensor, ids: Tensor, anchors: Tensor, logp: Tensor
) -> Tensor:
    """P(draft agrees with the sampled path | it agreed so far) [M, length], temperature 1."""
    length = hidden.shape[1]
    unary, candidates = logits.topk(draft.config.top_k, -1)
    padded = F.pad(ids, (0, length))
    at = anchors[:, None] + torch.arange(1, length + 1)
    if draft.candidate_selector is None:
        q = (logits.argmax(-1) == padded[at]).float()  # independent positions: one-hot proposals
    else:
        score = unary + draft.candidate_selector.bonus(hidden, padded[at - 1], candidates).float()
        q = (score.softmax(-1) * (candidates == padded[at][..., None])).sum(-1)
    return (q / F.pad(logp, (0, length))[at].exp().clamp_min(1e-9)).clamp_max(1)


def expected_rounds(agree: Tensor, left: Tensor) -> tuple[float, float]:
    """Expected number of rounds and tokens from the first anchor on.

    agree [M, L]; left [M] tokens that remain after each anchor. A token is emitted once, so tokens
    = left[0]; rounds come from the chance that each position is an anchor.
    """
    m, length = agree.shape
    reach = [0.0] * (m + 1)
    reach[0] = 1.0
    table = agree.tolist()
    for i in range(m):
        chance = reach[i]
        for j in range(length):
            if i + j + 1 > m - 1:
                break
            stop = 1 - table[i][j]
            reach[i + j + 1] += chance * stop
            chance *= table[i][j]
        else:
            if i + length + 1 < m:
                reach[i + length + 1] += chance
    return sum(reach[:m]), float(left[0])


@torch.inference_mode()
def evaluate(
    draft: Draft,
    target: Target,
    shard: Path,
    sampled: bool,
    length: int,
    bf16: bool,
    every: int = 1,
    trace: TextIO | None = None,
) -> dict:
    """Totals by class (and "all") over each `every`-th answer: rounds, tokens, hits by position.

    trace: gets a line with class and number of anchors for each answer, and a line for each anchor:
    drafted tokens that would be accepted, and the confidence (the likeliest candidate's
    probability) at each position of the path.
    """
    meta = safe_open(shard, "pt").metadata()
    classes, origins = json.loads(meta["classes"]), json.loads(meta["origins"])
    data = load_file(shard)
    starts, prompts = data["starts"].tolist(), data["prompts"].tolist()

    def zero():
        return {
            "rounds": 0.0,
            "tokens": 0.0,
            "answers": 0,
            "hits": torch.zeros(4, length),
            "blocks": torch.zeros(length),
        }

    totals: dict[str, dict] = defaultdict(zero)
    for i, prompt in enumerate(prompts):
        part = slice(starts[i], starts[i + 1])
        ids, features = data["ids"][part].long(), data["features"][part]
        if i % every or len(ids) - prompt < 2:
            continue
        anchors, hidden, logits = blocks(draft, target, features, ids, prompt, length, bf16)
        left = len(ids) - 1 - anchors
        if i % 20 == 0:
            print(f"{shard.name}: answer {i + 1} of {len(prompts)}", file=sys.stderr, flush=True)
        at = anchors[:, None] + torch.arange(1, length + 1)
        there = at < len(ids)
        truth = F.pad(ids, (0, length))[at]
        path, candidates = propose(draft, hidden, logits, ids[anchors])
        if sampled:
            agree = agreement(draft, hidden, logits, ids, anchors, data["logp"][part])
            rounds, tokens = expected_rounds(agree * there, left)
        else:
            good = ((path == truth) & there).long().cumprod(-1).sum(-1).tolist()
            if trace is not None:
                confidence = confidences(draft, hidden, logits, ids[anchors], path, candidates)
                print(classes[i], len(anchors), file=trace)
                for n, row in zip(good, confidence.tolist(), strict=True):
                    print(n, *(f"{x:.2f}" for x in row), file=trace)
            rounds, tokens, a = 0.0, float(left[0]), 0
            while a < len(anchors):
                rounds, a = rounds + 1, a + good[a] + 1
        # recall of the logits alone, of the candidates, and of the selector after the true token
        top1 = candidates[..., 0] == truth
        top16 = (candidates == truth[..., None]).any(-1)
        whole = ((path == truth) & there).long().cumprod(-1).bool()
        score = logits.gather(-1, candidates)
        if draft.candidate_selector is not None:
            previous = F.pad(ids, (0, length))[at - 1]
            score = score + draft.candidate_selector.bonus(hidden, previous, candidates).float()
        best = candidates.gather(-1, score.argmax(-1, keepdim=True))[..., 0] == truth
        hits = torch.stack([(x & there).float().sum(0) for x in (top1, top16, best, whole)])
        for name in ("all", classes[i], f"origin: {origins[i]}"):
            t = totals[name]
            t["rounds"], t["tokens"] = t["rounds"] + rounds, t["tokens"] + tokens
            t["answers"] += 1
            t["hits"], t["blocks"] = t["hits"] + hits, t["blocks"] + there.float().sum(0)
    return totals


def report(totals: dict, title: str) -> str:
    """Markdown: accepted length by class, and recall by position over all answers."""
    lines = [
        f"**{title}**",
        "",
        "| prompts | answers | tokens | accepted length |",
        "| --- | --: | --: | --: |",
    ]
    for name in sorted(totals, key=lambda n: (n != "all", n.startswith("origin"), n)):
        t = totals[name]
        lines.append(
            f"| {name} | {t['answers']} | {t['tokens']:.0f} | {t['tokens'] / t['rounds']:.2f} |"
        )
    t = totals["all"]
    length = len(t["blocks"])
    lines += [
        "",
        "| recall at position | " + " | ".join(str(i + 1) for i in range(length)) + " |",
        "| --- |" + " --: |" * length,
    ]
    for row, name in enumerate(
        (
            "Top-1 of the logits",
            "Top-16 of the logits",
            "selector, given the true predecessor",
            "whole path up to here right",
        )
    ):
        values = (t["hits"][row] / t["blocks"]).tolist()
        lines.append(f"| {name} | " + " | ".join(f"{v:.3f}" for v in values) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--target", type=Path, required=True, help="the target's GGUF")
    p.add_argument("--heldout", type=Path, required=True, help="features of the held-out answers")
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", type=Path, help="exported checkpoint folder")
    source.add_argument("--run", type=Path, help="run folder of train.py")
    p.add_argument("--length", type=int, default=7, help="drafted tokens per round")
    p.add_argument("--limit", choices=("greedy", "sampled", "both"), default="both")
    p.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th answer")
    p.add_argument("--trace", type=Path, help="write what each greedy block would do (pace.cpp)")
    p.add_argument("--bf16", action="store_true", help="faster, slightly different numbers")
    p.add_argument("--threads", type=int, default=2)
    args = p.parse_args()
    if args.trace and args.limit == "sampled":
        p.error("--trace is of the greedy answers, but --limit leaves them out")
    if args.trace and (args.trace.is_dir() or not os.access(args.trace.parent, os.W_OK)):
        p.error(f"--trace {args.trace}: cannot be written, expected a file in a writable folder")
    torch.set_num_threads(args.threads)

    def work() -> None:
        target = Target(args.target)
        draft = load_checkpoint(args.checkpoint) if args.checkpoint else load_run(args.run)[0]
        if not 1 <= args.length < draft.config.block:
            p.error(f"--length {args.length}, expected 1 to {draft.config.block - 1}")
        for name, title in (("greedy", "Temperature 0"), ("sampled", "Temperature 1")):
            if args.limit in (name, "both"):
                shard = args.heldout / f"heldout-{name}.safetensors"
                if not shard.is_file():
                    p.error(f"{shard} is missing; run data.py heldout and features.py first")
                trace = io.StringIO() if args.trace and name == "greedy" else None
                totals = evaluate(
                    draft,
                    target,
                    shard,
                    name == "sampled",
                    args.length,
                    args.bf16,
                    args.every,
                    trace,
                )
                print(report(totals, title), flush=True)
                if trace is not None:
                    tmp = args.trace.with_name(f"{args.trace.name}.{os.getpid()}.tmp")
                    tmp.write_text(trace.getvalue())
                    tmp.replace(args.trace)

    return finish(work)


if __name__ == "__main__":
    sys.exit(main())
