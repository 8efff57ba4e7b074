"""Log-probabilities in the formats of chats and completions."""

from __future__ import annotations

from typing import Any

from conch.wire.openai.responses import Token


def chat_logprobs(tokens: list[Token]) -> dict[str, Any]:
    """Return the ``logprobs`` object of a chat."""
    return {
        "content": [
            {**_entry(token.text, token.logprob), "top_logprobs": [_entry(text, value) for text, value in token.top]}
            for token in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(tokens: list[Token], offset: int, top: int) -> tuple[dict[str, Any], int]:
    """Return the ``logprobs`` object of a completion, and the offset (characters) after its tokens.

    ``offset`` is the offset of the first token; without ``top`` there are no alternatives.
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
    """Return the likeliest tokens, including the chosen one."""
    return {**dict(reversed(token.top)), token.text: token.logprob}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    # The bytes of a token that is a partial character are unknown.
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
