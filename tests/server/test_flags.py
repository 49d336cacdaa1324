"""llama-server's options beside a draft: the plain server's text, or a refusal; never an abort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from bigram import Bigram

from dflash_convert.errors import DFlashError

pytestmark = [pytest.mark.native, pytest.mark.slow]

BODY = {"prompt": [40, 41, 42, 60], "n_predict": 40, "temperature": 0.0, "return_tokens": True}

SERVED = [
    "-b 2 -ub 1", "-ub 1", "-ub 4", "-b 8 -ub 8 -np 4", "-c 8", "-c 32", "-c 64 -np 4", "-c 0",
    "-c 1024 -np 64", "-c 100000", "--kv-unified -np 16", "-np -1", "--fit off",
    "--fit-ctx 64 -c 0", "--fit on --fit-target 100000000", "--context-shift -c 64",
    "--no-context-shift", "--keep 5",
    "--cache-reuse 4", "--ctx-checkpoints 0", "--ctx-checkpoints 1", "--cache-ram 0", "--swa-full",
    "--spec-draft-n-max 0", "--spec-draft-n-max 1000000", "--spec-draft-n-min -5",
    "--spec-draft-n-max 64 --spec-draft-n-min 60", "--spec-draft-p-min 2", "--spec-draft-p-min nan",
    "--spec-draft-backend-sampling", "--spec-draft-poll 1", "--spec-draft-verify reject",
    "--spec-type draft-dflash,ngram-simple", "--spec-type ngram-simple,draft-dflash",
    "-ctkd q8_0 -ctvd q8_0", "-ctkd q4_0", "-ctkd iq4_nl -ctvd q5_1", "-ctkd bf16 -ctvd f32",
    "-t 1 -td 2", "-t 2 -td 1", "-tb 2", "-tbd 2", "--poll 100", "--no-kv-offload",
    "--no-op-offload", "-ngl 99", "-ngld 0", "-devd none", "-dev none", "-sm row",
    "--no-warmup", "--check-tensors",
    "--no-repack", "--rope-freq-scale 0.5", "--rope-freq-base 1000", "-ot .*=CPU", "-otd .*=CPU",
    "--embedding --pooling none", "--jinja", "--backend-sampling", "--grammar root::=[a-z]*",
    "-lv 0", "-lv 9", "--log-disable", "--spm-infill", "--sleep-idle-seconds 60",
]  # fmt: skip
REFUSED = [
    "-np 300 -c 600", "--spec-draft-n-max -1", "-ctvd q4_0 -fa off", "--spec-draft-adaptive maybe",
    "--spec-type draft-mtp", "--override-kv general.architecture=str:qwen3", "--lora nowhere",
]  # fmt: skip


def answer(start: Any, pair: Bigram, flags: str, draft: bool) -> tuple[int, Any]:
    server = start(pair.target, pair.draft if draft else None, "-np", 2, *flags.split())
    with httpx.Client(trust_env=False, timeout=60.0) as http:
        got = http.post(f"{server.url}/completion", json=BODY)
    server.close()
    return got.status_code, got.json().get("tokens")


@pytest.mark.parametrize("flags", SERVED)
@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_served(bigram: Callable[..., Bigram], start: Any, arch: str, flags: str) -> None:
    pair = bigram(arch)
    assert answer(start, pair, flags, draft=True) == answer(start, pair, flags, draft=False)


@pytest.mark.parametrize("flags", REFUSED)
def test_refused(bigram: Callable[..., Bigram], start: Any, flags: str) -> None:
    pair = bigram("llama")
    with pytest.raises(DFlashError, match="ended with code 1"):
        answer(start, pair, flags, draft=True)
