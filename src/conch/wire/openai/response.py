"""The response to a chat or completion: its events or single object, its usage, and the finish reasons.

Each request has one ``OpenAiResponse``, on the event loop. The front end adds deltas in the order in which the model
sends them, and gets events if the client requested a stream, otherwise one object at the end. The outputs of the
model's responses are read by choice: text, finish reason, log-probabilities and token counts.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from time import time
from typing import Any, ClassVar, Final
from uuid import uuid4

import orjson

from conch.core.errors import ConchError, internal
from conch.core.inference import InferResponse
from conch.core.tensors import WireTensor, split_bytes
from conch.wire.json.tensor import to_json
from conch.wire.openai.reading import error_body


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


def prompt_tokens(positions: list[Any], texts: list[str], top: int) -> list[Token]:
    """Return the tokens of a prompt with their log-probabilities; the first has none, because it follows nothing."""
    return [
        Token(text, None, []) if position is None else _token(position, top)
        for position, text in zip(positions, texts, strict=True)
    ]


def _likeliest(token: Token) -> dict[str, float] | None:
    """Return the likeliest tokens, including the chosen one; None for a token without a log-probability."""
    return None if token.logprob is None else {**dict(reversed(token.top)), token.text: token.logprob}


def _entry(text: str, logprob: float | None) -> dict[str, Any]:
    data = text.encode()
    if text.startswith(_BYTES):
        data = bytes.fromhex(text.removeprefix("bytes:").replace("\\x", ""))
    elif "\ufffd" in text:  # the model does not report the bytes of a partial character
        return {"token": text, "logprob": logprob, "bytes": None}
    return {"token": text, "logprob": logprob, "bytes": list(data)}


#: The beginning of the name of a token that is a part of a character, as at OpenAI: its bytes follow.
_BYTES: Final = "bytes:\\x"
#: Minimum log-probability, sent in place of minus infinity.
_LEAST: Final = -9999.0
#: The finish reasons of choices that have not ended.
_UNFINISHED: Final = frozenset({"", "none", "null"})


@dataclass(slots=True)
class Token:
    """A token, and the likeliest tokens at its position, best first; the first of a prompt has no ``logprob``."""

    text: str
    logprob: float | None
    top: list[tuple[str, float]]


@dataclass(slots=True)
class ChoiceDelta:
    """The part of a choice in one response; ``finish`` is empty until the choice ends."""

    text: str = ""
    finish: str = ""
    #: The stop string that ended the choice, if the model reports it.
    stop: str = ""
    logprobs: list[Token] | None = None
    prompt_logprobs: list[Any] | None = None
    #: The texts of the tokens of the prompt.
    prompt_tokens: list[str] = field(default_factory=list)
    tokens: int | None = None
    token_ids: list[int] | None = None
    #: The ids of the tokens of the prompt, in the first response.
    prompt_ids: list[int] | None = None


@dataclass(slots=True)
class ModelResponse:
    """A response: a delta for each choice, and the lengths of the prompt and its cached prefix, if reported."""

    pieces: list[ChoiceDelta]
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


def read_response(response: InferResponse, top: int = 0) -> ModelResponse:
    """Read a response, with the ``top`` likeliest alternatives. Raises INTERNAL for invalid outputs."""
    try:
        return _read(response, top)
    except (ConchError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise internal(f"the model's response cannot be read: {error}") from None


def _read(response: InferResponse, top: int) -> ModelResponse:
    result = ModelResponse([])
    pieces = result.pieces
    prompt_logprobs = None
    texts: list[str] = []
    ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    for tensor in response.outputs:
        match tensor.name:
            case "text_output":
                for piece, text in zip(_first(pieces, tensor), split_bytes(tensor.data), strict=True):
                    piece.text = text.decode("utf-8", "replace")
            case "finish_reason":
                for piece, text in zip(_first(pieces, tensor), split_bytes(tensor.data), strict=True):
                    reason = text.decode("utf-8", "replace").lower()
                    piece.finish = "" if reason in _UNFINISHED else reason
            case "stop_reason":
                for piece, text in zip(_first(pieces, tensor), split_bytes(tensor.data), strict=True):
                    piece.stop = text.decode("utf-8", "replace")
            case "logprobs":
                for piece, text in zip(_first(pieces, tensor), split_bytes(tensor.data), strict=True):
                    piece.logprobs = _tokens(text, top)
            case "prompt_logprobs":
                prompt_logprobs = [_finite(entry) for entry in _listed(split_bytes(tensor.data)[0]) or ()]
            case "prompt_tokens":
                texts = [text.decode("utf-8", "replace") for text in split_bytes(tensor.data)]
            case "token_ids":
                ids = to_json(tensor)
            case "prompt_token_ids":
                prompt_ids = to_json(tensor)
            case "num_input_tokens":
                result.prompt_tokens = max(to_json(tensor), default=None)
            case "num_cached_tokens":
                result.cached_tokens = max(to_json(tensor), default=None)
            case "num_output_tokens":
                for piece, count in zip(_first(pieces, tensor), to_json(tensor), strict=True):
                    piece.tokens = count
    start = 0
    for piece in pieces:
        piece.prompt_logprobs, piece.prompt_tokens, piece.prompt_ids = prompt_logprobs, texts, prompt_ids
        if ids is not None:  # those of all choices in order
            end = start + piece.tokens if piece.tokens is not None else len(ids)
            piece.token_ids, start = ids[start:end], end
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
    listed = _listed(text)
    return None if listed is None else [_token(entry, top) for entry in listed if entry]


def _listed(text: bytes) -> list[dict[str, dict[str, Any]] | None] | None:
    """Parse the log-probabilities of positions, each by token id; None if there are none."""
    try:
        listed: list[dict[str, dict[str, Any]] | None] | None = orjson.loads(text)
    except orjson.JSONDecodeError:
        listed = json.loads(text)  # may contain infinities
    return listed


def _finite(entry: dict[str, dict[str, Any]] | None) -> dict[str, dict[str, Any]] | None:
    """Return the log-probabilities of a position as JSON can have them."""
    if entry is None:
        return None
    return {id: {**token, "logprob": max(float(token["logprob"]), _LEAST)} for id, token in entry.items()}


def _token(entry: dict[str, dict[str, Any]], top: int) -> Token:
    """Read the tokens of a position: first the chosen token, which need not be among the likeliest, then those."""
    tokens = [(_shown(id, token), max(float(token["logprob"]), _LEAST)) for id, token in entry.items()]
    text, logprob = tokens[0]
    likeliest = sorted(tokens if len(tokens) <= top else tokens[1:], key=lambda token: -token[1])
    return Token(text, logprob, likeliest[:top])


def _shown(id: str, token: dict[str, Any]) -> str:
    if (data := token.get("bytes")) is not None:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    decoded = token.get("decoded_token")
    return f"token_id:{id}" if decoded is None else str(decoded)


DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """Return an event of a ``text/event-stream``; ``data`` is JSON on one line."""
    return b"data: %b\n\n" % data


class Usage:
    """Counts the tokens of prompts and completions, as far as the model reports them."""

    def __init__(self) -> None:
        self.prompt: int | None = None
        self.completion: int | None = None
        #: The tokens of prompts that were not computed, because the model has kept the beginning of the prompt.
        self.cached: int | None = None

    def add(self, prompt: int | None, pieces: list[ChoiceDelta], cached: int | None = None) -> None:
        """Add the counts of a response; ``prompt`` and ``cached`` are None if the prompt has been counted."""
        if prompt is not None:
            self.prompt = (self.prompt or 0) + prompt
        if cached is not None:
            self.cached = (self.cached or 0) + cached
        for piece in pieces:
            if piece.tokens is not None:
                self.completion = (self.completion or 0) + piece.tokens

    def object(self) -> dict[str, Any] | None:
        """Return the ``usage`` object, None if the model does not report its tokens."""
        if self.prompt is None or self.completion is None:
            return None
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            **({} if self.cached is None else {"prompt_tokens_details": {"cached_tokens": self.cached}}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSettings:
    """The settings of the response that a chat or completion itself contains.

    ``logprobs`` is the number of alternatives to each token (None: no log-probabilities). ``members`` are the request's
    names of parameters, where they differ from those of the model. A stream ends with the usage if ``include_usage``;
    with ``continuous_usage``, every chunk has the usage so far. With ``token_ids``, choices have the ids of their
    tokens. ``request_id`` is the client's identifier of the request, ``priority`` the level in the model's queue (0 for
    the default), ``adapter`` the id of the LoRA adapter that the request names as its model.
    """

    members: dict[str, str]
    logprobs: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool = False
    token_ids: bool = False
    request_id: str = ""
    priority: int = 0
    adapter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePlan(ResponseSettings, ABC):
    """The settings of the response to a chat or completion; small, regardless of the size of the request.

    ``choices`` is the number of choices per prompt, ``limit`` is ``max_tokens`` if given, ``output_format`` the one of
    the model's signature.
    """

    choices: int
    limit: int | None
    output_format: str = ""

    @abstractmethod
    def answer(self, model: str) -> GenerationResponse:
        """Create the response of the model with this name."""


class GenerationResponse(ABC):
    """The response to a chat or completion in the form of an API, with a number of choices."""

    def __init__(self, id: str, choices: int, limit: int | None) -> None:
        self.id = id
        self.usage = Usage()
        self._limit = limit
        self._counts = [0] * choices
        #: The finish reason of each choice; empty until it ends.
        self._ends = [""] * choices

    def ended(self, index: int) -> bool:
        """Whether a choice has ended."""
        return bool(self._ends[index])

    def events(self, index: int, piece: ChoiceDelta, *, last: bool) -> bytes:
        """Return the events for a delta of choice ``index``; ``last`` marks its final delta."""
        raise NotImplementedError  # by responses that are never streamed

    def closing(self) -> bytes:
        """Return the events at the end of the stream."""
        raise NotImplementedError

    def failure(self, status: int, error: ConchError) -> bytes:
        """Return the events that end the stream after an error; ``status`` is that of HTTP."""
        raise NotImplementedError

    @abstractmethod
    def add(self, index: int, piece: ChoiceDelta, *, last: bool) -> None:
        """Add a delta of choice ``index`` to the object."""

    @abstractmethod
    def body(self) -> bytes:
        """Return the object; called when all choices have ended."""

    def _end(self, index: int, piece: ChoiceDelta, last: bool) -> str:
        self._counts[index] += piece.tokens or 0
        if not piece.finish and not last:
            return ""
        cut = piece.finish == "length" or (
            not piece.finish and self._limit is not None and self._counts[index] >= self._limit
        )
        self._ends[index] = "length" if cut else "stop"
        return self._ends[index]


class OpenAiResponse(GenerationResponse):
    """A response of OpenAI's chats or completions."""

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, model: str, choices: int, plan: ResponsePlan) -> None:
        super().__init__(f"{self.prefix}-{plan.request_id or uuid4().hex}", choices, plan.limit)
        self._head = {"id": self.id, "object": self.kind, "created": int(time()), "model": model}
        self._chunk_head = {**self._head, "object": self.chunk_kind, "system_fingerprint": None}
        self._include_usage = plan.include_usage
        self._continuous_usage = plan.continuous_usage

    def events(self, index: int, piece: ChoiceDelta, *, last: bool) -> bytes:
        chunks = self._chunks(index, piece, self._end(index, piece, last))
        return b"".join([event(self._chunk([chunk])) for chunk in chunks])

    def closing(self) -> bytes:
        usage = self.usage.object()
        if not self._include_usage or usage is None:
            return DONE
        return event(orjson.dumps({**self._chunk_head, "choices": [], "usage": usage})) + DONE

    def failure(self, status: int, error: ConchError) -> bytes:
        return event(error_body(status, error))

    def add(self, index: int, piece: ChoiceDelta, *, last: bool) -> None:
        self._keep(index, piece, self._end(index, piece, last))

    def body(self) -> bytes:
        choices = [self._choice(index) for index in range(len(self._ends))]
        return orjson.dumps(
            {
                **self._head,
                "choices": choices,
                "usage": self.usage.object(),
                "system_fingerprint": None,
                **self._prompt(),
            }
        )

    def _prompt(self) -> dict[str, Any]:
        """Return the members about the prompt for the object or the next chunk."""
        return {}

    @abstractmethod
    def _chunks(self, index: int, piece: ChoiceDelta, end: str) -> list[dict[str, Any]]:
        """Return the ``choices`` of the chunks for a delta; ``end`` is the finish reason if the choice ends with it."""

    @abstractmethod
    def _keep(self, index: int, piece: ChoiceDelta, end: str) -> None:
        """Keep a delta for the object."""

    @abstractmethod
    def _choice(self, index: int) -> dict[str, Any]:
        """Return a choice of the object."""

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        chunk = {**self._chunk_head, "choices": choices, **self._prompt()}
        if self._include_usage:
            chunk["usage"] = self.usage.object() if self._continuous_usage else None
        return orjson.dumps(chunk)
