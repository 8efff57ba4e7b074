"""Log-probabilities in the forms of chats and of completions."""

from __future__ import annotations

from typing import Any

from conch.wire.openai.responses import Token


def chat_logprobs(tokens: list[Token]) -> dict[str, Any]:
    """The ``logprobs`` object of a chat."""
    return {
        "content": [
            {**_entry(token.text, token.logprob), "top_logprobs": [_entry(text, value) for text, value in token.top]}
            for token in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(tokens: list[Token], offset: int, top: int) -> tuple[dict[str, Any], int]:
    """The ``logprobs`` object of a completion, and the offset (characters) after its tokens.

    ``offset`` is that of the first token; without ``top`` there are no alternatives.
    """
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    logprobs = {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_likeliest(token) for token in tokens] if top else None,
        "text_offset": offsets,
    }
    return logprobs, offset


def _likeliest(token: Token) -> dict[str, float]:
    """The likeliest tokens, and the chosen one whether or not it is among them."""
    return {**dict(reversed(token.top)), token.text: token.logprob}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    # The bytes of a token that is only part of a character are not known.
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
