"""Reads the outputs of a model's response by choice: text, finish reason, log-probabilities and token counts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

import orjson

from conch.core.errors import ConchError, internal
from conch.core.inference import InferResponse
from conch.core.tensors import WireTensor, split_bytes
from conch.wire.json.tensor import to_json

#: Minimum log-probability, sent in place of minus infinity.
_LEAST: Final = -9999.0
#: The finish reasons of choices that have not ended.
_UNFINISHED: Final = frozenset({"", "none", "null"})


@dataclass(slots=True)
class Token:
    """A chosen token, and the likeliest tokens at its position, best first."""

    text: str
    logprob: float
    top: list[tuple[str, float]]


@dataclass(slots=True)
class ChoiceDelta:
    """The part of a choice in one response; ``finish`` is empty until the choice ends."""

    text: str = ""
    finish: str = ""
    logprobs: list[Token] | None = None
    tokens: int | None = None


@dataclass(slots=True)
class ModelResponse:
    """A response: a delta for each choice, and the length of the prompt if the model reports it."""

    pieces: list[ChoiceDelta]
    prompt_tokens: int | None = None


def read_response(response: InferResponse, top: int = 0) -> ModelResponse:
    """Read a response, with the ``top`` likeliest alternatives. Raises INTERNAL for invalid outputs."""
    try:
        return _read(response, top)
    except (ConchError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise internal(f"the model's response cannot be read: {error}") from None


def _read(response: InferResponse, top: int) -> ModelResponse:
    result = ModelResponse([])
    pieces = result.pieces
    for tensor in response.outputs:
        match tensor.name:
            case "text_output":
                for piece, text in zip(_first(pieces, tensor), split_bytes(tensor.data), strict=True):
                    piece.text = text.decode("utf-8", "replace")
            case "finish_reason":
                for piece, text in zip(_first(pieces, tensor), split_bytes(tensor.data), strict=True):
                    reason = text.decode("utf-8", "replace").lower()
                    piece.finish = "" if reason in _UNFINISHED else reason
            case "logprobs":
                for piece, text in zip(_first(pieces, tensor), split_bytes(tensor.data), strict=True):
                    piece.logprobs = _tokens(text, top)
            case "num_input_tokens":
                result.prompt_tokens = max(to_json(tensor), default=None)
            case "num_output_tokens":
                for piece, count in zip(_first(pieces, tensor), to_json(tensor), strict=True):
                    piece.tokens = count
    return result


def _first(pieces: list[ChoiceDelta], tensor: WireTensor) -> list[ChoiceDelta]:
    """Return the deltas for the elements of ``tensor``; adds missing ones."""
    count = 1
    for dim in tensor.shape:
        count *= dim
    while len(pieces) < count:
        pieces.append(ChoiceDelta())
    return pieces[:count]


def _tokens(text: bytes, top: int) -> list[Token] | None:
    try:
        listed = orjson.loads(text)
    except orjson.JSONDecodeError:
        listed = json.loads(text)  # may contain infinities
    return None if listed is None else [_token(entry, top) for entry in listed if entry]


def _token(entry: dict[str, dict[str, Any]], top: int) -> Token:
    """Read the tokens of a position: first the chosen token, which need not be among the likeliest, then those."""
    tokens = [(_shown(id, token), max(float(token["logprob"]), _LEAST)) for id, token in entry.items()]
    text, logprob = tokens[0]
    likeliest = sorted(tokens if len(tokens) <= top else tokens[1:], key=lambda token: -token[1])
    return Token(text, logprob, likeliest[:top])


def _shown(id: str, token: dict[str, Any]) -> str:
    decoded = token.get("decoded_token")
    return f"token_id:{id}" if decoded is None else str(decoded)
