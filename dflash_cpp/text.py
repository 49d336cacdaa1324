"""From a prompt to tokens, and from tokens to text that never cuts a character."""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dflash_convert.errors import InputError

if TYPE_CHECKING:
    from llama_cpp import Llama

_TEMPLATE_KEY = "tokenizer.chat_template"


def has_chat_template(metadata: Mapping[str, str]) -> bool:
    """Tell whether a GGUF's metadata holds a chat template."""
    return bool(metadata.get(_TEMPLATE_KEY))


def usable_context(llm: Llama) -> int:
    """Return the tokens that prompt and text may have together.

    llama.cpp rounds a small context up, but `Llama` keeps no ids beyond what was asked for.
    """
    return min(llm.n_ctx(), len(llm.input_ids))


def encode_prompt(llm: Llama, text: str, *, chat: bool | None = None) -> list[int]:
    """Turn what the user says into the tokens that the target continues.

    Args:
        llm: An open model; only its tokenizer and metadata are used.
        text: The user's message, or the text to continue.
        chat: True to wrap it with the target's chat template, False to continue it as it is,
            None for the template if the target has one.

    Raises:
        InputError: There is no template although one was asked for, it fails, or nothing is left
            to continue.
    """
    metadata = llm.metadata
    if chat is None:
        chat = has_chat_template(metadata)
    if chat:
        rendered = _render(llm, text, metadata)
        tokens = llm.tokenize(rendered.encode("utf-8"), add_bos=False, special=True)
    else:
        tokens = llm.tokenize(text.encode("utf-8"), add_bos=True, special=False)
    if not tokens:
        raise InputError("the prompt is empty, expected at least one token")
    return tokens


def _render(llm: Llama, text: str, metadata: Mapping[str, str]) -> str:
    if not has_chat_template(metadata):
        raise InputError(
            "the target has no chat template", hint="use --no-chat to continue the text as it is"
        )
    import jinja2
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    try:
        formatter = Jinja2ChatFormatter(
            template=metadata[_TEMPLATE_KEY],
            eos_token=_special_text(llm, llm.token_eos()),
            bos_token=_special_text(llm, llm.token_bos()),
        )
        return formatter(messages=[{"role": "user", "content": text}]).prompt
    except (jinja2.TemplateError, ValueError, TypeError) as exc:
        raise InputError(
            f"the target's chat template fails: {exc}",
            hint="use --no-chat to continue the text as it is",
        ) from exc


def _special_text(llm: Llama, token: int) -> str:
    if token < 0:
        return ""
    return TokenText(llm, special=True).piece(token).decode("utf-8", "replace")


class TokenText:
    """Text of a growing sequence of tokens; incomplete characters wait for their last byte.

    Args:
        llm: An open model; only its vocabulary is used.
        special: True to spell out control tokens, False to leave them out.
    """

    def __init__(self, llm: Llama, *, special: bool = False):
        import llama_cpp

        self._to_piece = llama_cpp.llama_token_to_piece
        self._vocab = llama_cpp.llama_model_get_vocab(llm.model)
        self._special = special
        self._buffer = ctypes.create_string_buffer(64)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token."""
        for _ in range(2):
            size = len(self._buffer)
            n = self._to_piece(self._vocab, token, self._buffer, size, 0, self._special)
            if n >= 0:
                return self._buffer.raw[:n]
            # A negative answer is the room that the piece needs.
            self._buffer = ctypes.create_string_buffer(-n)
        raise RuntimeError(f"llama_token_to_piece fails for token {token}")

    def push(self, token: int) -> str:
        """Add a token; return the characters that are complete now (maybe none)."""
        return self._decoder.decode(self.piece(token))

    def finish(self) -> str:
        """Return what is left at the end: U+FFFD for an incomplete character, else nothing."""
        return self._decoder.decode(b"", final=True)
