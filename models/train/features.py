"""What training reads: target features and the target's own predictions, one file per shard.

For every answers shard: token ids of all sequences end to end, the outputs of the chosen layers
(bf16), and for each answer token the 16 best predictions of the target with their log
probabilities. A finished file is never made again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from data import read_lines
from model import DraftConfig
from safetensors.torch import save_file
from target import Target, finish
from torch import Tensor

TEACHER_K = 16


@torch.inference_mode()
def collect(target: Target, rows: list[dict], layer_ids: tuple[int, ...], batch: int = 8) -> dict:
    """Tensors of one shard.

    `ids` [N] int32, `starts` [S + 1] and `prompts` [S] int32 (offsets and prompt lengths),
    `features` [N, n, H] bf16, and aligned to the *predicted* token `top_ids` [N, 16] int32,
    `top_logp` [N, 16] and `logp` [N] float32 (zero in prompts).
    """
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["ids"]) + len(rows[i]["answer"]))
    parts: dict[str, list] = {
        k: [None] * len(rows) for k in ("ids", "features", "top_ids", "top_logp", "logp")
    }
    for at in range(0, len(order), batch):
        chosen = order[at : at + batch]
        seqs = [rows[i]["ids"] + rows[i]["answer"] for i in chosen]
        longest = max(map(len, seqs))
        pad = torch.tensor([longest - len(s) for s in seqs])
        ids = torch.tensor([[0] * (longest - len(s)) + s for s in seqs])
        last, feats = target.forward(ids, pad, layer_ids)
        for j, i in enumerate(chosen):
            p, n = len(rows[i]["ids"]), len(seqs[j])
            seq = ids[j, pad[j] :]
            top_ids = torch.zeros(n, TEACHER_K, dtype=torch.int32)
            top_logp, logp = torch.zeros(n, TEACHER_K), torch.zeros(n)
            logits = target.logits(last[j, pad[j] + p - 1 : -1]).float()
            norm = logits.logsumexp(-1, keepdim=True)
            value, index = logits.topk(TEACHER_K, -1)
            top_ids[p:], top_logp[p:] = index.int(), value - norm
            logp[p:] = (logits.gather(1, seq[p:, None]) - norm)[:, 0]
            for key, y in (
                ("ids", seq.int()),
                ("features", feats[j, pad[j] :].bfloat16()),
                ("top_ids", top_ids),
                ("top_logp", top_logp),
                ("logp", logp),
            ):
                parts[key][i] = y.clone()
    out: dict[str, Tensor] = {k: torch.cat(v).contiguous() for k, v in parts.items()}
    sizes = torch.tensor([0] + [len(x) for x in parts["ids"]])
    out["starts"] = sizes.cumsum(0).int()
    out["prompts"] = torch.tensor([len(r["ids"]) for r in rows], dtype=torch.int32)
    return out


def save_shard(path: Path, tensors: dict[str, Tensor], rows: list[dict]) -> None:
    """Safetensors with the classes as metadata; written beside `path`, then renamed."""
    meta = {
        "classes": json.dumps([r["class"] for r in rows]),
        "temperatures": json.dumps([r["temperature"] for r in rows]),
        "origins": json.dumps([r.get("origin", "") for r in rows]),
    }
    tmp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    save_file(tensors, tmp, meta)
    tmp.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="the target's GGUF")
    parser.add_argument("--answers", type=Path, required=True, help="folder of data.py's shards")
    parser.add_argument("--out", type=Path, required=True, help="folder outside the repository")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--float32", action="store_true", help="compute in float32 (held-out set)")
    parser.add_argument("--pattern", default="*.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)

    def work() -> None:
        target = Target(args.target, torch.float32 if args.float32 else torch.bfloat16)
        layer_ids = DraftConfig.for_target(target).target_layer_ids
        for path in sorted(args.answers.glob(args.pattern)):
            out = args.out / f"{path.stem}.safetensors"
            if out.exists():
                continue
            rows, start = read_lines(path), time.time()
            tensors = collect(target, rows, layer_ids)
            save_shard(out, tensors, rows)
            n = len(tensors["ids"])
            print(f"{out.name}: {n} tokens, {n / (time.time() - start):.0f}/s", flush=True)

    return finish(work)


if __name__ == "__main__":
    sys.exit(main())
