"""Chats in other APIs: reads requests that were translated to chats, and writes responses that consist of parts.

The parts are texts, reasoning and tool calls in their order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from conch.wire.openai.chat import ChatForm, ChatPlan, ChatRequest, read_chat
from conch.wire.openai.reading import ApiError, Fields
from conch.wire.openai.response import ChoiceDelta, GenerationResponse, Token
from conch.wire.output.events import ArgumentsDelta, ReasoningDelta, TextDelta, ToolCallStart


def read_translated(chat: Mapping[str, Any], names: Mapping[str, str], form: ChatForm | None) -> ChatRequest:
    """Read a chat whose response has another ``form``; errors name the members of the original request.

    ``names`` has the original of each member, or of a part of its path, that an error may name. Raises ApiError.
    """

    def original(path: str) -> str:
        for member, name in names.items():
            path = path.replace(member, name)
        return path

    try:
        request = read_chat(Fields({member: value for member, value in chat.items() if value is not None}))
    except ApiError as error:
        param = error.param and original(error.param)
        message = error.message.replace(f"'{error.param}'", f"'{param}'")
        raise ApiError(message, param, code=error.code, reason=error.reason) from None
    members = {"messages": "messages", **request.members}
    return replace(request, members={name: original(member) for name, member in members.items()}, form=form)


class ConversationResponse(GenerationResponse):
    """A response with one choice.

    Its methods for the parts of a text collect them, and in a stream also send them as events.
    """

    def __init__(self, id: str, plan: ChatPlan) -> None:
        super().__init__(id, 1, plan.limit)
        self._parser = plan.parser()
        self._stream = plan.stream
        self._unsent: list[bytes] = []
        self._begun = False
        #: Tokens whose log-probabilities have not been sent yet.
        self._tokens: list[Token] = []
        self._reasoning_length = self._length = 0

    def events(self, index: int, piece: ChoiceDelta, *, last: bool) -> bytes:
        self.add(index, piece, last=last)
        return self._sent()

    def add(self, index: int, piece: ChoiceDelta, *, last: bool) -> None:
        end = self._end(index, piece, last)
        if not self._begun:
            self._begun = True
            self._begin()
        self._tokens += piece.logprobs or ()
        events = self._feed(piece.text, last=bool(end))
        for event in events:
            match event:
                case TextDelta(text):
                    self._length += len(text)
                    self._add_text(text)
                case ReasoningDelta(text):
                    self._length += len(text)
                    self._reasoning_length += len(text)
                    self._add_reasoning(text)
                case ToolCallStart():
                    self._start_call(event)
                case ArgumentsDelta(_, text):
                    self._length += len(text)
                    self._add_arguments(text)
        if events:
            self._tokens = []
        if end:
            self._end_parts(end)

    @property
    def _reasoning_tokens(self) -> int:
        """The tokens of the reasoning: the completion's, by the share of the characters."""
        return round((self.usage.completion or 0) * self._reasoning_length / self._length) if self._length else 0

    def _feed(self, text: str, *, last: bool) -> list[Any]:
        """Return the events of a part of the text; the last part ends it."""
        events = self._parser.feed(text) if text else []
        return events + self._parser.finish() if last else events

    def _send(self, kind: str, **members: Any) -> None:
        """Add an event of type ``kind`` to the stream, if the client requests one."""
        if self._stream:
            self._unsent.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **members})))

    def _sent(self) -> bytes:
        """Return the events that have not been sent yet."""
        unsent, self._unsent = self._unsent, []
        return b"".join(unsent)

    @abstractmethod
    def _begin(self) -> None:
        """Begin the response, before its first part."""

    @abstractmethod
    def _add_text(self, text: str) -> None: ...

    @abstractmethod
    def _add_reasoning(self, text: str) -> None: ...

    @abstractmethod
    def _start_call(self, call: ToolCallStart) -> None: ...

    @abstractmethod
    def _add_arguments(self, text: str) -> None:
        """Add arguments (JSON) to the tool call that has been started last."""

    @abstractmethod
    def _end_parts(self, end: str) -> None:
        """End the last part; ``end`` is the finish reason."""
