"""Trains the draft: many anchors per sequence, the target's embedding and head frozen.

One run takes `--minutes`, or `--steps`, with a linear warm-up and a linear decay to zero; the state
is saved as it goes. The same command again finishes a stopped run; `--more` starts another run (a
new decay) from the saved weights.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from model import Draft, DraftConfig, init_from_target
from safetensors import safe_open
from target import Target, finish
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

FREQUENT, RANDOM = 4096, 1024  # columns of the training softmax besides the labels


class Shards:
    """Feature shards, memory-mapped; new files are picked up between steps."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.sequences = folder, {}, []

    def refresh(self) -> None:
        """Opens shards that have appeared since."""
        for path in sorted(self.folder.glob("answers-*.safetensors")):
            if path.name in self.files:
                continue
            f = safe_open(path, "pt")
            self.files[path.name] = f
            starts = f.get_tensor("starts").tolist()
            prompts = f.get_tensor("prompts").tolist()
            small = {k: f.get_tensor(k) for k in ("ids", "top_ids", "top_logp")}
            for i, p in enumerate(prompts):
                if starts[i + 1] - starts[i] - p > 2:
                    self.sequences.append((f, small, starts[i], starts[i + 1], p))

    def counts(self, vocab: int) -> Tensor:
        """How often each token stands in the answers [V]."""
        total = torch.zeros(vocab)
        for _, small, a, b, p in self.sequences:
            total += torch.bincount(small["ids"][a + p : b].long(), minlength=vocab)
        return total

    def batch(self, size: int, anchors: int, block: int, rng: torch.Generator) -> dict:
        """`size` random sequences (padded at the end) with `anchors` anchors in each answer."""
        picks = torch.randint(len(self.sequences), (size,), generator=rng).tolist()
        chosen = [self.sequences[i] for i in picks]
        longest = max(b - a for _, _, a, b, _ in chosen)
        first = chosen[0][0].get_slice("features")
        shape = first.get_shape()
        out = {
            "features": torch.zeros(size, longest, *shape[1:], dtype=torch.bfloat16),
            "ids": torch.zeros(size, longest + block, dtype=torch.long),
            "valid": torch.zeros(size, longest + block, dtype=torch.bool),
            "top_ids": torch.zeros(size, longest + block, 16, dtype=torch.long),
            "top_p": torch.zeros(size, longest + block, 16),
        }
        where = []
        for j, (f, small, a, b, p) in enumerate(chosen):
            n = b - a
            out["features"][j, :n] = f.get_slice("features")[a:b]
            out["ids"][j, :n], out["valid"][j, :n] = small["ids"][a:b].long(), True
            out["top_ids"][j, :n] = small["top_ids"][a:b].long()
            out["top_p"][j, p:n] = small["top_logp"][a + p : b].exp()
            # one anchor in each of `anchors` equal parts of the answer
            part = (torch.arange(anchors) + torch.rand(anchors, generator=rng)) / anchors
            where.append(p + (part * (n - p - 1)).long())
        out["anchors"] = torch.stack(where)
        return out


class Columns:
    """The reduced softmax: frequent tokens, this batch's labels and random others.

    Random columns stand for all tokens left out, so their logits get log(left out / drawn) in the
    normaliser and never become candidates.
    """

    def __init__(self, counts: Tensor, head: Tensor) -> None:
        self.head = head
        self.frequent = counts.argsort(descending=True)[:FREQUENT]

    def build(self, needed: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids of the columns [C], their offsets [C], and a lookup [V] to columns or -1."""
        vocab = len(self.head)
        known = torch.zeros(vocab, dtype=torch.bool)
        known[self.frequent] = True
        known[needed] = True
        base = known.nonzero()[:, 0]
        others = torch.randint(vocab, (RANDOM,), generator=rng)
        others = others[~known[others]].unique()
        columns = torch.cat([base, others])
        offset = torch.zeros(len(columns))
        if len(others):
            offset[len(base) :] = torch.log(torch.tensor((vocab - len(base)) / len(others)))
        lookup = torch.full((vocab,), -1)
        lookup[base] = torch.arange(len(base))
        return columns, offset, lookup


def losses(
    draft: Draft,
    target: Target,
    data: dict,
    block: int,
    columns: Columns,
    args: argparse.Namespace,
    rng: torch.Generator,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted cross entropies of the logits and of the selector, and figures to print."""
    c = draft.config
    anchors = data["anchors"]
    s, m = anchors.shape
    row = torch.arange(s)[:, None, None]
    at = anchors[..., None] + torch.arange(block)
    ids, valid = data["ids"][row, at], data["valid"][row, at]  # [S, M, B]
    tokens = torch.full_like(ids, c.mask_token_id)
    tokens[..., 0] = ids[..., 0]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = draft(data["features"], anchors, F.embedding(tokens, target.embedding).float())
        keep = valid[..., 1:]
        hidden = hidden[..., 1:, :][keep]  # [N, H]
        label, previous = ids[..., 1:][keep], ids[..., :-1][keep]
        teacher_ids = data["top_ids"][row, at][..., 1:, :][keep]
        teacher_p = data["top_p"][row, at][..., 1:, :][keep]
        cols, offset, lookup = columns.build(torch.cat([label, teacher_ids[:, :4].flatten()]), rng)
        logits = F.linear(hidden, target.head[cols]).float()
    place = lookup[teacher_ids]
    teacher_p = teacher_p * (place >= 0)
    teacher_p = teacher_p / teacher_p.sum(-1, keepdim=True).clamp_min(1e-6)
    goal = torch.cat([lookup[label][:, None], place.clamp_min(0)], 1)  # [N, 17]
    mass = torch.cat([torch.full_like(teacher_p[:, :1], args.hard), teacher_p * (1 - args.hard)], 1)
    norm = (logits + offset).logsumexp(-1)
    depth = torch.arange(block - 1).expand(s, m, -1)[keep]
    weight = torch.exp(-depth / args.gamma)
    weight = weight / weight.sum()
    loss = (weight * (norm - (mass * logits.gather(1, goal)).sum(-1))).sum()
    with torch.no_grad():
        plain = logits.masked_fill(offset[None] > 0, -torch.inf)
        candidates = plain.topk(c.top_k, -1).indices
    figures = {"ce": loss.detach()}
    hit = candidates == goal[:, :1]
    score = logits.gather(1, candidates)
    if draft.candidate_selector is not None:
        score = (
            score
            + draft.candidate_selector.bonus(hidden.float(), previous, cols[candidates]).float()
        )
        same = candidates[:, :, None] == goal[:, None]
        share = (mass[:, None] * same).sum(-1)  # [N, k]
        chosen = -(share * score.log_softmax(-1)).sum(-1)
        selector = (weight * chosen).sum()
        loss = loss + args.selector * selector
        figures["selector"] = selector.detach()
    first = depth == 0
    right = hit.gather(1, score.argmax(-1, keepdim=True))[:, 0]
    figures |= {
        "top1@1": hit[first, 0].float().mean(),
        "sel@1": right[first].float().mean(),
        "top16@1": hit[first].any(-1).float().mean(),
        "sel@2": right[depth == 1].float().mean(),
    }
    return loss, figures


def save_state(path: Path, state: dict) -> None:
    """torch.save beside `path`, then renamed."""
    tmp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    torch.save(state, tmp)
    tmp.replace(path)


def profile_step(step) -> None:
    """Prints where one step spends its time; the first two steps warm up."""
    for _ in range(2):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
        step()
    print(p.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))


def run(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    rng = torch.Generator().manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    target = Target(args.target)
    shards = Shards(args.features)
    shards.refresh()
    if not shards.sequences:
        raise SystemExit(f"{args.features}: no answers-*.safetensors; run features.py first")
    config = DraftConfig.for_target(
        target,
        args.layers,
        rank=args.rank,
        use_conv=not args.no_conv,
        use_selector=not args.no_selector,
    )
    state_path = args.out / "state.pt"
    draft = Draft(config)
    matrices = [p for p in draft.parameters() if p.ndim == 2 and p.shape[0] != config.vocab]
    others = [p for p in draft.parameters() if p.ndim != 2 or p.shape[0] == config.vocab]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.01, "scale": 1.0},
            {"params": others, "weight_decay": 0.0, "scale": 2.0},
        ],
        lr=args.lr,
        betas=(0.9, 0.98),
        fused=True,
    )
    step, done, total = 0, 0.0, 0  # done: share of this run
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        draft.load_state_dict(state["draft"])
        optimizer.load_state_dict(state["optimizer"])
        step, done, total = state["step"], state["done"], state["anchors"]
        rng.manual_seed(args.seed + step)
        if args.more:
            done = 0.0
    else:
        f = shards.sequences[0][0].get_slice("features")
        probe = f[: min(2000, f.get_shape()[0])].float()
        rms = probe.pow(2).mean(-1).sqrt().median(0).values
        n = config.n_target_layers
        init_from_target(draft, target, tuple(range(n - 1 - args.layers, n - 1)), rms)
    if args.compile:
        draft.forward = torch.compile(draft.forward, dynamic=True)
    config.save(args.out / "config.json")
    with (args.out / "commands.txt").open("a") as f:
        f.write(f"{time.strftime('%Y-%m-%d')} train.py {' '.join(sys.argv[1:])}\n")
    columns = Columns(shards.counts(config.vocab), target.head)
    size = sum(p.numel() for p in draft.parameters())
    print(
        f"{size / 1e6:.1f} M parameters ({size * 2 / 1e6:.1f} MB in bf16), "
        f"{len(shards.sequences)} sequences",
        flush=True,
    )
    mean, clock = {}, time.time()
    shown, saved = time.time(), time.time()

    def one_step(block: int) -> dict[str, Tensor]:
        data = shards.batch(args.sequences, args.anchors, block, rng)
        loss, figures = losses(draft, target, data, block, columns, args, rng)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        return figures

    if args.profile:
        profile_step(lambda: one_step(config.block))
        return
    while done < 1:
        rate = min(1.0, (done + 1e-3) / args.warmup, (1 - done) / (1 - args.hold))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate * group["scale"]
        block = config.block
        if torch.rand((), generator=rng) < args.short:
            block = int(torch.randint(3, config.block, (), generator=rng))
        figures = one_step(block)
        step, total = step + 1, total + args.sequences * args.anchors
        for k, v in figures.items():
            mean[k] = 0.95 * mean.get(k, float(v)) + 0.05 * float(v)
        now = time.time()
        done += 1 / args.steps if args.steps else (now - clock) / (60 * args.minutes)
        clock = now
        if now - shown > 15 or done >= 1:
            text = "  ".join(f"{k} {v:.3f}" for k, v in mean.items())
            print(f"step {step}  {100 * done:.1f} %  {total} anchors  {text}", flush=True)
            shown = now
        if now - saved > 120 or done >= 1:
            save_state(
                state_path,
                {
                    "draft": draft.state_dict(),
                    "step": step,
                    "done": done,
                    "optimizer": optimizer.state_dict(),
                    "anchors": total,
                },
            )
            shards.refresh()
            saved = now


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--target", type=Path, required=True, help="the target's GGUF")
    p.add_argument("--features", type=Path, required=True, help="folder of features.py")
    p.add_argument("--out", type=Path, required=True, help="run folder, outside the repository")
    p.add_argument("--minutes", type=float, default=60.0, help="length of this run")
    p.add_argument("--steps", type=int, default=0, help="length in steps instead: reproducible")
    p.add_argument("--more", action="store_true", help="another run from the saved weights")
    p.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    p.add_argument("--warmup", type=float, default=0.03, help="share of the run")
    p.add_argument("--hold", type=float, default=0.3, help="the decay starts after this share")
    p.add_argument("--sequences", type=int, default=4)
    p.add_argument("--anchors", type=int, default=24, help="per sequence")
    p.add_argument("--short", type=float, default=0.4, help="share of steps with shorter blocks")
    p.add_argument("--hard", type=float, default=0.5, help="weight of the token itself in the goal")
    p.add_argument("--gamma", type=float, default=3.0, help="position weight exp(-i / gamma)")
    p.add_argument("--selector", type=float, default=1.0, help="weight of the selector's loss")
    p.add_argument("--layers", type=int, default=3)
    p.add_argument("--rank", type=int, default=32)
    p.add_argument("--no-conv", action="store_true", help="ablation")
    p.add_argument("--no-selector", action="store_true", help="ablation")
    p.add_argument("--compile", action="store_true", help="torch.compile: minutes at first")
    p.add_argument("--profile", action="store_true", help="show where a step's time goes, stop")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    return finish(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
