"""The response to a chat or completion: its events or single object, its usage, and the finish reasons.

Each request has one ``Answer``, on the event loop. The front end adds deltas in the order in which the model sends
them, and gets events if the client wants a stream, otherwise one object at the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from time import time
from typing import Any, ClassVar
from uuid import uuid4

import orjson

from conch.wire.openai.responses import ChoiceDelta

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """Return an event of a ``text/event-stream``; ``data`` is JSON on one line."""
    return b"data: %b\n\n" % data


class Usage:
    """Counts the tokens of prompts and completions, as far as the model reports them."""

    def __init__(self) -> None:
        self.prompt: int | None = None
        self.completion: int | None = None

    def add(self, prompt: int | None, pieces: list[ChoiceDelta]) -> None:
        """Add the counts of a response; ``prompt`` is None if the prompt has been counted."""
        if prompt is not None:
            self.prompt = (self.prompt or 0) + prompt
        for piece in pieces:
            if piece.tokens is not None:
                self.completion = (self.completion or 0) + piece.tokens

    def object(self) -> dict[str, int] | None:
        """Return the ``usage`` object, None if the model does not report its tokens."""
        if self.prompt is None or self.completion is None:
            return None
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan(ABC):
    """The settings of the response to a chat or completion; small, regardless of the size of the request.

    ``choices`` is the number of choices per prompt, ``limit`` is ``max_tokens`` if given, ``logprobs`` the number of
    alternatives to each token (None: no log-probabilities).
    """

    choices: int
    limit: int | None
    logprobs: int | None
    stream: bool
    include_usage: bool

    @abstractmethod
    def answer(self, model: str) -> Answer:
        """Create the response of the model with this name."""


class Answer(ABC):
    """A response with a number of choices."""

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, model: str, choices: int, plan: AnswerPlan) -> None:
        self.id = f"{self.prefix}-{uuid4().hex}"
        self.usage = Usage()
        self._head = {"id": self.id, "object": self.kind, "created": int(time()), "model": model}
        self._chunk_head = {**self._head, "object": self.chunk_kind, "system_fingerprint": None}
        self._include_usage = plan.include_usage
        self._limit = plan.limit
        self._counts = [0] * choices
        #: The finish reason of each choice; empty until it ends.
        self._ends = [""] * choices

    def events(self, index: int, piece: ChoiceDelta, *, last: bool) -> bytes:
        """Return the events for a delta of choice ``index``; ``last`` marks its final delta."""
        chunks = self._chunks(index, piece, self._end(index, piece, last))
        return b"".join([event(self._chunk([chunk])) for chunk in chunks])

    def closing(self) -> bytes:
        """Return the events at the end of the stream."""
        usage = self.usage.object()
        if not self._include_usage or usage is None:
            return DONE
        return event(orjson.dumps({**self._chunk_head, "choices": [], "usage": usage})) + DONE

    def add(self, index: int, piece: ChoiceDelta, *, last: bool) -> None:
        """Add a delta of choice ``index`` to the object."""
        self._keep(index, piece, self._end(index, piece, last))

    def body(self) -> bytes:
        """Return the object; called when all choices have ended."""
        choices = [self._choice(index) for index in range(len(self._ends))]
        return orjson.dumps(
            {**self._head, "choices": choices, "usage": self.usage.object(), "system_fingerprint": None}
        )

    def ended(self, index: int) -> bool:
        """Whether a choice has ended."""
        return bool(self._ends[index])

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
        chunk = {**self._chunk_head, "choices": choices}
        if self._include_usage:
            chunk["usage"] = None
        return orjson.dumps(chunk)

    def _end(self, index: int, piece: ChoiceDelta, last: bool) -> str:
        self._counts[index] += piece.tokens or 0
        if not piece.finish and not last:
            return ""
        cut = piece.finish == "length" or (
            not piece.finish and self._limit is not None and self._counts[index] >= self._limit
        )
        self._ends[index] = "length" if cut else "stop"
        return self._ends[index]
