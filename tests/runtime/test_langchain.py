"""LangChain's `LlamaCpp` around a `DFlashLlama`, as docs/python.md shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from twins import SETTINGS, make_files, need_library

pytestmark = [
    pytest.mark.native,
    # the package's own: it says that it is no longer maintained
    pytest.mark.filterwarnings("ignore"),
]

PROMPT = "the cat sat"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    need_library()
    from dflash_cpp import DFlashLlama

    target, draft = make_files(tmp_path_factory.mktemp("pair"), "llama")
    with DFlashLlama(target, draft_path=draft, **SETTINGS) as opened:
        yield opened


@pytest.fixture
def chain(llm: Any) -> Any:
    need_library()  # before langchain imports llama_cpp
    module = pytest.importorskip(
        "langchain_community.llms", reason="langchain-community is not installed"
    )
    return module.LlamaCpp.model_construct(
        client=llm, model_path="", max_tokens=24, temperature=0.0, repeat_penalty=1.0
    )


def expected(llm: Any, **options: Any) -> str:
    options = {"max_tokens": 24, "temperature": 0.0, "repeat_penalty": 1.0} | options
    return str(llm(PROMPT, **options)["choices"][0]["text"])


def test_invoke_and_stream(llm: Any, chain: Any) -> None:
    assert chain.invoke(PROMPT) == expected(llm)
    assert llm.last_stats.accepted > 0
    assert "".join(chain.stream(PROMPT)) == expected(llm)


def test_stop(llm: Any, chain: Any) -> None:
    stop = expected(llm)[10:12]
    assert chain.invoke(PROMPT, stop=[stop]) == expected(llm, stop=[stop])
