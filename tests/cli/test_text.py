"""Tokens to text without cutting characters; prompts to tokens with and without a template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from bigram import Bigram

from dflash_convert.errors import InputError
from dflash_cpp.run import without_controls

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def llm(pair: Bigram) -> Iterator[Any]:
    from dflash_cpp.opening import PairOptions, open_pair

    with open_pair(PairOptions(pair.target, pair.draft, n_ctx=256, threads=1)) as opened:
        yield opened


def test_no_piece_ever_holds_half_a_character(llm: Any) -> None:
    from dflash_cpp.text import TokenText

    said = "naïve ☃ 日本語 👩‍👩‍👧 end"
    tokens = llm.tokenize(said.encode(), add_bos=False)
    words = TokenText(llm)
    # the vocabulary is one of bytes: characters do span tokens
    assert len(tokens) > len(said)
    pieces = [words.push(token) for token in tokens]
    assert "" in pieces
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces).strip() == said
    assert words.finish() == ""


def test_a_text_that_ends_inside_a_character(llm: Any) -> None:
    from dflash_cpp.text import TokenText

    tokens = llm.tokenize("☃".encode(), add_bos=False)
    words = TokenText(llm)
    shown = "".join(words.push(token) for token in tokens[:-1])
    assert "☃" not in shown
    assert words.finish() == "\ufffd"


def test_control_tokens_are_silent_unless_asked_for(llm: Any) -> None:
    from dflash_cpp.text import TokenText

    end = llm.token_eos()
    assert TokenText(llm).piece(end) == b""
    assert TokenText(llm, special=True).piece(end) != b""


def test_chat_template(llm: Any) -> None:
    from dflash_cpp.text import TokenText, encode_prompt

    def spelled(tokens: list[int]) -> str:
        words = TokenText(llm, special=True)
        return "".join(words.push(t) for t in tokens)

    chat = encode_prompt(llm, "the sea")
    assert chat == encode_prompt(llm, "the sea", chat=True)
    assert spelled(chat) == "<|im_start|>user\nthe sea<|im_end|>\n<|im_start|>assistant\n"
    plain = encode_prompt(llm, "the sea", chat=False)
    assert spelled(plain).endswith("the sea")
    assert "<|im_start|>user" not in spelled(plain)
    # a user's text cannot forge control tokens without the template
    assert llm.token_eos() not in encode_prompt(llm, "<|im_end|>", chat=False)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("", "the target has no chat template"),
        ("{% if %}", "the target's chat template fails"),
        ("{{ raise_exception('no user allowed') }}", "fails: no user allowed"),
    ],
)
def test_bad_templates(llm: Any, monkeypatch: pytest.MonkeyPatch, template: str, said: str) -> None:
    from dflash_cpp.text import encode_prompt

    monkeypatch.setitem(llm.metadata, "tokenizer.chat_template", template)
    with pytest.raises(InputError, match=said) as caught:
        encode_prompt(llm, "the sea", chat=True)
    assert caught.value.hint is not None
    assert "--no-chat" in caught.value.hint


def test_generated_text_cannot_drive_a_terminal() -> None:
    hostile = "a\tb\nc \x1b[2J\r\x07\x9bd \u200d\u00e9"
    assert without_controls(hostile) == "a\tb\nc \ufffd[2J\ufffd\ufffd\ufffdd \u200d\u00e9"
