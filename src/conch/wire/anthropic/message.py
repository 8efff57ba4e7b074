"""The responses of the Messages API: content blocks, objects and events, counts of tokens, and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

import orjson

from conch.core.errors import ConchError, unsupported
from conch.wire.json.text import dumps, error_message
from conch.wire.openai.chat import ChatPlan
from conch.wire.openai.conversation import ConversationResponse
from conch.wire.openai.response import ChoiceDelta, GenerationResponse
from conch.wire.output.events import ToolCallStart

#: Thinking is not signed: any model may have written it.
_SIGNATURE: Final = "unsigned"
#: The ``type`` of errors by HTTP status; other 4xx are ``invalid_request_error``, other 5xx ``api_error``.
_ERROR_TYPES: Final = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error",
}  # fmt: skip


def error_body(status: int, error: ConchError) -> bytes:
    """Return the body of an error response, also used as the data of an event that ends a stream."""
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return dumps({"type": "error", "error": {"type": kind, "message": error_message(error.public)}})


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """``shows_thinking``: the response has blocks with the model's thinking."""

    shows_thinking: bool

    def answer(self, plan: ChatPlan, model: str) -> MessageResponse:
        return MessageResponse(plan, model, self)


class MessageResponse(ConversationResponse):
    """A message of the assistant."""

    def __init__(self, plan: ChatPlan, model: str, form: MessageForm) -> None:
        super().__init__(f"msg_{uuid4().hex}", plan)
        self._model = model
        self._shows_thinking = form.shows_thinking
        self._stop_sequence: str | None = None
        self._stop_reason: str | None = None
        self._blocks: list[dict[str, Any]] = []
        self._open = ""
        #: The text, thinking or arguments of the last block until it ends.
        self._parts: list[str] = []

    def closing(self) -> bytes:
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        self._send("message_delta", delta=delta, usage=self._usage())
        self._send("message_stop")
        return self._sent()

    def failure(self, status: int, error: ConchError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error_body(status, error)

    def body(self) -> bytes:
        return orjson.dumps(self._message())

    def _message(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        cached = self.usage.cached or 0
        return {
            "input_tokens": (self.usage.prompt or 0) - cached,
            "output_tokens": (self.usage.completion or 0) if self._stop_reason else 0,
            "cache_creation_input_tokens": None,
            "cache_read_input_tokens": cached,
        }

    def add(self, index: int, piece: ChoiceDelta, *, last: bool) -> None:
        self._stop_sequence = piece.stop or self._stop_sequence
        super().add(index, piece, last=last)

    def _begin(self) -> None:
        self._send("message_start", message=self._message())
        self._send("ping")

    def _add_text(self, text: str) -> None:
        if self._open != "text":
            self._start_block({"type": "text", "text": ""})
        self._add_part({"type": "text_delta", "text": text}, text)

    def _add_reasoning(self, text: str) -> None:
        if not self._shows_thinking:
            return
        if self._open != "thinking":
            self._start_block({"type": "thinking", "thinking": "", "signature": ""})
        self._add_part({"type": "thinking_delta", "thinking": text}, text)

    def _start_call(self, call: ToolCallStart) -> None:
        self._start_block({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})

    def _add_arguments(self, text: str) -> None:
        self._add_part({"type": "input_json_delta", "partial_json": text}, text)

    def _end_parts(self, end: str) -> None:
        if not self._blocks:
            self._start_block({"type": "text", "text": ""})
        self._end_block()
        if self._stop_sequence is not None:
            self._stop_reason = "stop_sequence"
        elif end == "length":
            self._stop_reason = "max_tokens"
        else:
            called = any(block["type"] == "tool_use" for block in self._blocks)
            self._stop_reason = "tool_use" if called else "end_turn"

    def _start_block(self, block: dict[str, Any]) -> None:
        self._end_block()
        self._open = block["type"]
        self._blocks.append(block)
        self._send("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _add_part(self, delta: dict[str, Any], text: str) -> None:
        self._parts.append(text)
        self._send("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _end_block(self) -> None:
        """End the open block, if there is one."""
        kind, self._open = self._open, ""
        if not kind:
            return
        block, text, index = self._blocks[-1], "".join(self._parts), len(self._blocks) - 1
        self._parts = []
        match kind:
            case "text":
                block["text"] = text
            case "thinking":
                block |= {"thinking": text, "signature": _SIGNATURE}
                delta = {"type": "signature_delta", "signature": _SIGNATURE}
                self._send("content_block_delta", index=index, delta=delta)
            case "tool_use":
                block["input"] = _arguments(text)
        self._send("content_block_stop", index=index)


def _arguments(text: str) -> Any:
    """Return the arguments of a call as they are; others than objects become one, because the API has nothing else."""
    try:
        arguments = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {"arguments": text}
    fragment = orjson.Fragment(text or "{}")
    return fragment if type(arguments) is dict else {"arguments": fragment}


@dataclass(frozen=True, slots=True)
class CountForm:
    """The form of a response that has only the number of tokens of the prompt."""

    def answer(self, plan: ChatPlan, model: str) -> CountResponse:
        return CountResponse(f"count_{uuid4().hex}", 1, plan.limit)


class CountResponse(GenerationResponse):
    """The number of tokens of the prompt; never streamed."""

    def add(self, index: int, piece: ChoiceDelta, *, last: bool) -> None:
        self._end(index, piece, last)

    def body(self) -> bytes:
        if self.usage.prompt is None:
            raise unsupported("the model does not report the number of tokens")
        return orjson.dumps({"input_tokens": self.usage.prompt})
