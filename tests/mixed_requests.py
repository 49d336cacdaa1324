"""Requests of every kind at once, the same for any server; a soak as a program.

    python tests/mixed_requests.py --minutes 60 [--slots 4] [--seed 1] [-- llama-server options]

plays them against a plain server and one that drafts, in rounds, compares every greedy answer, and
prints what was sent, what came back and the memory of the drafting server. Exit code 1 if an answer
differs, a request gets no answer, or memory grows.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

N_TEXT = 300  # ids below are ordinary tokens
TIMEOUT = 120.0
# llama-server puts an action on a busy slot off until some slot is free, one action each time:
# those that are left when all requests are done wait for the next one.
SLOT_TIMEOUT = 10.0
TIE = 0.02  # of a logit; margins of these models are whole numbers, as a rule


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        kind: name for reports.
        body: of /completion, or of `path`.
        compare: the answer depends on nothing but the target.
        cut: close the connection after so many bytes of a stream; None: read all.
    """

    kind: str
    body: dict[str, Any]
    path: str = "/completion"
    compare: bool = False
    cut: int | None = None
    allowed: tuple[int, ...] = (200,)


@dataclass(frozen=True)
class Answer:
    """What came back: HTTP status (0: the connection was closed on purpose) and what must agree."""

    status: int
    content: Any = None
    timings: dict[str, Any] = field(default_factory=dict)


def make_requests(seed: int, n: int, n_ctx: int, *, save: bool = False) -> list[Request]:
    """`n` requests. `n_ctx`: context of one slot in tokens. `save`: the server saves slots."""
    rng = random.Random(seed)
    kinds = [make for make, share in _KINDS.items() for _ in range(share)]
    if save:
        kinds += [_slot] * 2
    return [rng.choice(kinds)(rng, n_ctx) for _ in range(n)]


def _prompt(rng: random.Random, longest: int = 60) -> list[int]:
    # a few beginnings, so that cached prompts are met again
    begin = random.Random(rng.randrange(4)).choices(range(5, N_TEXT), k=24)
    return begin[: rng.randrange(1, 24)] + rng.choices(
        range(5, N_TEXT), k=rng.randrange(longest - 24)
    )


def _greedy(rng: random.Random, n_ctx: int) -> Request:
    body: dict[str, Any] = {
        "prompt": _prompt(rng),
        "n_predict": rng.choice([1, 2, 7, 8, 9, 30, 60]),
        "temperature": 0.0,
        "cache_prompt": rng.random() < 0.5,
        "ignore_eos": rng.random() < 0.3,
        "return_tokens": True,
    }
    if rng.random() < 0.3:
        body["n_probs"] = rng.choice([1, 5])
    if rng.random() < 0.2:
        body["logit_bias"] = [[rng.randrange(5, N_TEXT), -100.0] for _ in range(3)]
    if rng.random() < 0.2:
        body["repeat_penalty"], body["repeat_last_n"] = 1.3, 16
    if rng.random() < 0.2:
        body["stream"] = True
    return Request("greedy", body, compare=True)


def _stop(rng: random.Random, n_ctx: int) -> Request:
    body = {"prompt": _prompt(rng), "n_predict": 60, "temperature": 0.0, "return_tokens": True}
    return Request("stop string", body | {"stop": [rng.choice("abcdefgh"), "xyz"]}, compare=True)


def _grammar(rng: random.Random, n_ctx: int) -> Request:
    rule = rng.choice(["root ::= [a-z ]*", 'root ::= "a" [a-z]+', "root ::= [^e]{3,9}"])
    body = {"prompt": _prompt(rng), "n_predict": 20, "temperature": 0.0, "return_tokens": True}
    return Request("grammar", body | {"grammar": rule}, compare=True)


def _sampled(rng: random.Random, n_ctx: int) -> Request:
    chain = rng.choice(
        [
            {"temperature": 0.7},
            {"temperature": 1.5, "top_k": 5},
            {"temperature": 1.0, "top_k": 0, "top_p": 0.8, "min_p": 0.1},
            {"temperature": 1.0, "mirostat": 2},
            {"temperature": 1.0, "xtc_probability": 0.5},
            {"temperature": 1.0, "typical_p": 0.7, "repeat_penalty": 1.2},
            {"temperature": 0.8, "n_probs": 3},
            {"temperature": 0.8, "grammar": "root ::= [a-z ]*"},
        ]
    )
    body = {"prompt": _prompt(rng), "n_predict": rng.choice([1, 20, 50]), "seed": rng.randrange(99)}
    return Request("sampled", body | chain)


def _cancelled(rng: random.Random, n_ctx: int) -> Request:
    body = {"prompt": _prompt(rng), "n_predict": 400, "stream": True, "ignore_eos": True}
    return Request("cancelled", body, cut=rng.choice([1, 300, 3000]))


def _long(rng: random.Random, n_ctx: int) -> Request:
    prompt = rng.choices(range(5, N_TEXT), k=n_ctx + rng.choice([-30, 1, 500]))
    body = {"prompt": prompt, "n_predict": 60, "temperature": 0.0}
    return Request("long prompt", body, allowed=(200, 400))


def _full(rng: random.Random, n_ctx: int) -> Request:
    """Runs into the end of the context."""
    prompt = rng.choices(range(5, N_TEXT), k=n_ctx - 40)
    body = {"prompt": prompt, "n_predict": 200, "temperature": 0.0, "ignore_eos": True}
    return Request("full context", body)


def _odd(rng: random.Random, n_ctx: int) -> Request:
    body, allowed = rng.choice(
        [
            ({"prompt": "", "n_predict": 5}, (200, 400)),
            ({"prompt": [], "n_predict": 5}, (200, 400)),
            ({"prompt": "a", "n_predict": 0}, (200,)),
            ({"prompt": "a", "grammar": "root ::= ("}, (400,)),
            ({"prompt": "a", "temperature": "warm"}, (400, 500)),
            ({"prompt": [10**9], "n_predict": 2}, (200, 400)),
            ({"prompt": "a", "speculative.n_max": 99, "n_predict": 9}, (200,)),
            ({"prompt": "a", "speculative.n_max": -3, "n_predict": 9}, (200, 400)),
            ({"prompt": "a", "n_probs": 10**6, "n_predict": 2}, (200, 400)),
            ({}, (200, 400)),
        ]
    )
    return Request("odd", {"n_predict": 4} | body, allowed=allowed)


def _slot(rng: random.Random, n_ctx: int) -> Request:
    action = rng.choice(["save", "restore", "erase"])
    path = f"/slots/{rng.randrange(2)}?action={action}"
    body = {"filename": f"slot-{rng.randrange(2)}.bin"}
    return Request(f"slot {action}", body, path, allowed=(-1, 200, 400, 404, 500, 501))


_KINDS = {
    _greedy: 10,
    _sampled: 5,
    _stop: 2,
    _grammar: 2,
    _cancelled: 2,
    _long: 1,
    _full: 1,
    _odd: 2,
}


def send(url: str, request: Request) -> Answer:
    """Send one request and read its answer, or as much of it as wanted; status -1: none came."""
    try:
        return _send(url, request)
    except httpx.TimeoutException:
        return Answer(-1)


def _send(url: str, request: Request) -> Answer:
    target = url + request.path
    timeout = SLOT_TIMEOUT if request.path.startswith("/slots") else TIMEOUT
    with httpx.Client(trust_env=False, timeout=timeout) as client:
        if not request.body.get("stream"):
            reply = client.post(target, json=request.body)
            return _answer(request, reply.status_code, reply.json())
        with client.stream("POST", target, json=request.body) as stream:
            text = ""
            for piece in stream.iter_text():
                text += piece
                if request.cut is not None and len(text) >= request.cut:
                    return Answer(0)
            return _answer(request, stream.status_code, _joined(text))


def _joined(stream: str) -> dict[str, Any]:
    """The parts of a stream as one answer."""
    parts = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    last = parts[-1] if parts else {}
    tokens = [token for part in parts for token in part.get("tokens", [])]
    return last | {"content": "".join(p.get("content", "") for p in parts), "tokens": tokens}


def _answer(request: Request, status: int, reply: dict[str, Any]) -> Answer:
    keys = ("content", "tokens", "stop_type", "truncated", "tokens_predicted", "stopping_word")
    content = {key: reply.get(key) for key in keys} if request.compare else None
    return Answer(status, content, reply.get("timings") or {})


def play(url: str, requests: Sequence[Request], at_once: int) -> list[Answer]:
    """Send all, so many at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda request: send(url, request), requests))


def faults(
    requests: Sequence[Request],
    plain: Sequence[Answer],
    drafted: Sequence[Answer],
    plain_url: str,
) -> list[str]:
    """A sentence for each answer that is not as it should be.

    Rounding depends on what else is in a batch, and with hybrid targets and small batches the plain
    server's state is not always right. So where two texts part, the text so far is run afresh: it
    must not prefer the plain server's token by more than `TIE`.
    """
    found = []
    for request, a, b in zip(requests, plain, drafted, strict=True):
        if b.status not in (*request.allowed, *([0] if request.cut else [])):
            found.append(f"{request.kind}: status {b.status} for {request.body}")
        elif request.compare and a != Answer(b.status, b.content, a.timings):
            margin = _margin(plain_url, request, a.content["tokens"], b.content["tokens"])
            if margin > TIE:
                text = f"{b.content}, plain {a.content} ahead by {margin:.3f}, for {request.body}"
                found.append(f"{request.kind}: {text}")
    return found


def _margin(url: str, request: Request, a: list[int], b: list[int]) -> float:
    """By how much a fresh run of the text so far prefers a's first different token to b's."""
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if same is None:
        return float("inf")
    body = {"prompt": [*request.body["prompt"], *a[:same]], "n_predict": 1, "n_probs": 512}
    reply = httpx.post(
        f"{url}/completion", json=body | {"temperature": 0.0, "cache_prompt": False},
        trust_env=False, timeout=TIMEOUT,
    ).json()  # fmt: skip
    top = {t["id"]: t["logprob"] for t in reply["completion_probabilities"][0]["top_logprobs"]}
    return top.get(a[same], -1e9) - top.get(b[same], -1e9)


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def soak(minutes: float, slots: int, seed: int, options: Sequence[str]) -> int:
    """Returns the exit code."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from bigram import make_bigram

    from dflash_cpp.server import LlamaServer

    n_ctx = 256
    with tempfile.TemporaryDirectory() as folder:
        pair = make_bigram(folder, "llama", wrong=0.2, drift=0.5, ends=True)
        base = ["-m", str(pair.target), "-c", str(n_ctx * slots), "-np", str(slots), "-t", "1"]
        # the cache of prompts grows to what it is given, 8 GiB by default, which is no leak
        base += ["--slot-save-path", folder, "--cache-ram", "16", *options]
        draft = ["-md", str(pair.draft), "--spec-type", "draft-dflash"]
        sent: collections.Counter[str] = collections.Counter()
        wrong: list[str] = []
        sizes: list[float] = []
        with LlamaServer(base) as plain, LlamaServer([*base, *draft]) as drafting:
            end = time.monotonic() + 60 * minutes
            while time.monotonic() < end and len(wrong) < 20:
                seed += 1
                requests = make_requests(seed, 20 * slots, n_ctx, save=True)
                answers = [play(s.url, requests, 2 * slots) for s in (plain, drafting)]
                wrong += faults(requests, *answers, plain.url)
                sent.update(request.kind for request in requests)
                sizes.append(memory_mib(drafting.pid))
                left = max(0.0, end - time.monotonic()) / 60
                print(
                    f"{left:5.1f} minutes left, {sum(sent.values())} requests, {len(wrong)} faults,"
                    f" {sizes[-1]:.0f} MiB",
                    file=sys.stderr,
                    flush=True,
                )
        for fault in wrong:
            print(fault)
        print(f"{sum(sent.values())} requests in {len(sizes)} rounds: {dict(sent)}")
        third = sizes[len(sizes) // 3] if sizes else 0.0
        print(f"memory {sizes[0]:.0f} MiB at first, {third:.0f} after a third, {sizes[-1]:.0f} MiB")
        print(f"{len(wrong)} faults")
        return int(bool(wrong) or sizes[-1] > 1.1 * third + 8)


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description="Requests of every kind, for so many minutes.")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("options", nargs="*", help="of llama-server")
    given = parser.parse_args()
    return soak(given.minutes, given.slots, given.seed, given.options)


if __name__ == "__main__":
    raise SystemExit(main())
