"""Tool calls, thinking and its budget: what acts token by token acts inside an accepted block."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from bigram import Bigram

from dflash_cpp.server import LlamaServer

pytestmark = pytest.mark.native

N_MAX = ("--spec-draft-n-max", 7, "--spec-draft-adaptive", "off")
PROMPT = [40, 41, 42, 60]
# the shape of a template whose models think: the generation prompt opens the tag
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['reasoning_content'] %}<think>\n{{ m['reasoning_content'] }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)


def post(server: LlamaServer, path: str, **body: Any) -> dict[str, Any]:
    with httpx.Client(trust_env=False, timeout=120.0) as http:
        answer = http.post(f"{server.url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def accepted_some(timings: dict[str, Any]) -> bool:
    return 0 < timings["draft_n_accepted"] < timings["draft_n"]


@pytest.fixture
def servers(bigram: Callable[..., Bigram], start: Any, tmp_path: Path) -> Any:
    """A plain server and one that drafts, over a target whose template thinks."""
    pair = bigram("llama")
    template = tmp_path / "thinking.jinja"
    template.write_text(THINKING)
    options = ("--jinja", "--chat-template-file", template, "--spec-draft-verify", "match")
    return start(pair.target, None, *options), start(pair.target, pair.draft, *N_MAX, *options)


def own_tag(server: LlamaServer, **body: Any) -> str:
    """A text of one token that the target writes by itself after a few others."""
    for token in post(server, "/completion", **body)["tokens"][9:]:
        tag = post(server, "/detokenize", tokens=[token])["content"]
        if post(server, "/tokenize", content=tag)["tokens"] == [token]:
            return tag
    raise AssertionError("no such token")


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_tool_grammar_begins_within_a_block(servers: Any, temperature: float) -> None:
    """Tool calls are grammars that wait for a word: what follows it must obey at once."""
    body = {"prompt": PROMPT, "n_predict": 60, "temperature": temperature, "top_k": 6, "seed": 11}
    body["return_tokens"] = True
    tag = own_tag(servers[0], **body)
    body |= {
        "grammar": f'root ::= "{tag}" [a-k0-9]+',
        "grammar_lazy": True,
        "preserved_tokens": [tag],
        "grammar_triggers": [{"type": 1, "value": tag}],
    }
    plain, found = (post(server, "/completion", **body) for server in servers)
    assert found["tokens"] == plain["tokens"]
    _, called, after = found["content"].partition(tag)
    assert called
    assert re.fullmatch("[a-k0-9]+", after)
    assert found["timings"]["draft_rule"] == "match"
    assert accepted_some(found["timings"])


@pytest.mark.parametrize("budget", [1, 3, 9, 10, 11])
def test_thinking_ends_at_its_budget(servers: Any, budget: int) -> None:
    """The budget runs out at every position of a block; the forced tag overrules the draft."""
    body = {
        "messages": [{"role": "user", "content": "weather"}],
        "thinking_budget_tokens": budget,
        "reasoning_budget_message": "stop",
        "max_tokens": 60,
        "temperature": 0.0,
    }
    plain, found = (post(server, "/v1/chat/completions", **body) for server in servers)
    message = found["choices"][0]["message"]
    assert message == plain["choices"][0]["message"]
    assert message["reasoning_content"].endswith("stop")
    assert message["content"]
    assert accepted_some(found["timings"])


def test_an_answer_without_thinking(servers: Any) -> None:
    body = {
        "messages": [{"role": "user", "content": "weather"}],
        "chat_template_kwargs": {"enable_thinking": False},
        "max_tokens": 40,
        "temperature": 0.0,
    }
    plain, found = (post(server, "/v1/chat/completions", **body) for server in servers)
    assert found["choices"][0]["message"] == plain["choices"][0]["message"]
    assert "reasoning_content" not in found["choices"][0]["message"]
    assert accepted_some(found["timings"])


def test_a_budget_within_a_block(servers: Any) -> None:
    """A tag that the model writes itself starts the budget in the middle of a round."""
    body = {"prompt": PROMPT, "n_predict": 60, "temperature": 0.0, "return_tokens": True}
    tag = own_tag(servers[0], **body)
    body |= {
        "reasoning_budget_tokens": 6,
        "reasoning_budget_start_tag": tag,
        "reasoning_budget_end_tags": ["#"],
        "reasoning_budget_message": "over",
    }
    expected, answer = (post(server, "/completion", **body) for server in servers)
    before, found_tag, after = expected["content"].partition(tag)
    assert found_tag
    assert "over#" in after
    assert "over#" not in before
    assert answer["tokens"] == expected["tokens"]
    assert accepted_some(answer["timings"])
