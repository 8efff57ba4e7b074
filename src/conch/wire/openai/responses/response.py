"""The response of the Responses API: its output items, the object and the events of its stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import time
from typing import Any, Final
from uuid import uuid4

import orjson

from conch.core.errors import ConchError, clipped
from conch.core.tensors import Buffer
from conch.wire.openai.chat import ChatPlan
from conch.wire.openai.conversation import ConversationResponse
from conch.wire.openai.reading import error_object
from conch.wire.openai.response import chat_logprobs
from conch.wire.openai.responses.items import Item, join_entry, output_id
from conch.wire.output.events import ToolCallStart


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesForm:
    """``echo`` has the members of the request that the response repeats (JSON object).

    ``items`` are the input and the items of the responses that it continues (JSON array), None if the response is not
    stored. ``summary``: the reasoning is sent as its summary. ``namespaces`` has those of functions, by their names.
    """

    echo: Buffer
    items: Buffer | None
    summary: bool
    namespaces: Mapping[str, str]

    def answer(self, plan: ChatPlan, model: str) -> ResponsesResponse:
        return ResponsesResponse(plan, model, self)


@dataclass(frozen=True, slots=True)
class _ReasoningNames:
    """The form of reasoning: the member of its item, type and index of its part, and the events of part and text."""

    member: str
    part: str
    index: str
    part_event: str
    text_event: str


_TEXT: Final = _ReasoningNames(
    "content", "reasoning_text", "content_index", "response.content_part", "response.reasoning_text"
)
_SUMMARY: Final = _ReasoningNames(
    "summary", "summary_text", "summary_index", "response.reasoning_summary_part", "response.reasoning_summary_text"
)


class ResponsesResponse(ConversationResponse):
    """A response; it has one part in each message and in each reasoning item.

    ``stored``: whether the response says that it is or will be in the response store.
    """

    def __init__(self, plan: ChatPlan, model: str, form: ResponsesForm) -> None:
        super().__init__(f"resp_{uuid4().hex}", plan)
        self._model = model
        self._form = form
        self.stored = form.items is not None
        self._names = _SUMMARY if form.summary else _TEXT
        self._logprobs = plan.logprobs is not None
        self._created = int(time())
        self._status = "in_progress"
        self._error: dict[str, Any] | None = None
        self._output: list[Item] = []
        #: The text or arguments of the last item until it ends.
        self._text: list[str] = []
        self._text_logprobs: list[Any] = []
        self._open = ""
        self._number = 0

    def closing(self) -> bytes:
        self._send(f"response.{self._status}", response=self._object())
        return self._sent()

    def failure(self, status: int, error: ConchError) -> bytes:
        self._status = "failed"
        self.stored = False
        code = "server_error" if status >= 500 else "invalid_prompt"
        message = error_object(status, clipped(error.public))["error"]["message"]
        self._error = {"code": code, "message": message}
        return self.closing()

    def body(self) -> bytes:
        return orjson.dumps(self._object())

    def entry(self) -> bytes:
        """Return the entry of the response store; the response must be one that is stored."""
        return join_entry(self.body(), self._form.items or b"[]")

    def _object(self) -> orjson.Fragment:
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        members = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time()) if self._status == "completed" else None,
            "status": self._status,
            "error": self._error,
            "incomplete_details": incomplete,
            "model": self._model,
            "output": self._output,
            "store": self.stored,
            "usage": self._usage() if self._status != "in_progress" else None,
        }
        return orjson.Fragment(b"%b,%b" % (orjson.dumps(members)[:-1], bytes(self._form.echo)[1:]))

    def _usage(self) -> dict[str, Any] | None:
        counted = self.usage.object()
        if counted is None:
            return None
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self.usage.cached or 0, "cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": counted["total_tokens"],
        }

    def _send(self, kind: str, **members: Any) -> None:
        if self._stream:
            super()._send(kind, **members, sequence_number=self._number)
            self._number += 1

    def _begin(self) -> None:
        self._send("response.created", response=self._object())
        self._send("response.in_progress", response=self._object())

    def _add_text(self, text: str) -> None:
        if self._open != "message":
            self._end_item("completed")
            self._add_item("message", role="assistant", content=[])
            self._send_of_item("response.content_part.added", content_index=0, part=_text_part("", []))
        logprobs = chat_logprobs(self._tokens)["content"] if self._logprobs else []
        self._tokens = []
        self._text_logprobs += logprobs
        self._text.append(text)
        self._send_of_item("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _add_reasoning(self, text: str) -> None:
        names = self._names
        if self._open != "reasoning":
            self._end_item("completed")
            self._add_item("reasoning", summary=[], content=[])
            part = {"type": names.part, "text": ""}
            self._send_of_item(f"{names.part_event}.added", **{names.index: 0}, part=part)
        self._text.append(text)
        self._send_of_item(f"{names.text_event}.delta", **{names.index: 0}, delta=text)

    def _start_call(self, call: ToolCallStart) -> None:
        self._end_item("completed")
        namespace = self._form.namespaces.get(call.name)
        named = {} if namespace is None else {"namespace": namespace}
        self._add_item("function_call", call_id=call.id, name=call.name, arguments="", **named)

    def _add_arguments(self, text: str) -> None:
        self._text.append(text)
        self._send_of_item("response.function_call_arguments.delta", delta=text)

    def _end_parts(self, end: str) -> None:
        self._status = "incomplete" if end == "length" else "completed"
        if not self._output:
            self._add_text("")
        self._end_item(self._status)

    def _add_item(self, kind: str, **members: Any) -> None:
        self._open = kind
        id = output_id(kind, self.id, len(self._output))
        self._output.append({"type": kind, "id": id, "status": "in_progress", **members})
        self._send("response.output_item.added", output_index=len(self._output) - 1, item=self._output[-1])

    def _end_item(self, status: str) -> None:
        """End the open item, if there is one."""
        kind, self._open = self._open, ""
        if not kind:
            return
        item, text = self._output[-1], "".join(self._text)
        item["status"] = status
        self._text = []
        match kind:
            case "message":
                logprobs, self._text_logprobs = self._text_logprobs, []
                part = _text_part(text, logprobs)
                item["content"] = [part]
                self._send_of_item("response.output_text.done", content_index=0, text=text, logprobs=logprobs)
                self._send_of_item("response.content_part.done", content_index=0, part=part)
            case "reasoning":
                names = self._names
                part = {"type": names.part, "text": text}
                item[names.member] = [part]
                self._send_of_item(f"{names.text_event}.done", **{names.index: 0}, text=text)
                self._send_of_item(f"{names.part_event}.done", **{names.index: 0}, part=part)
            case "function_call":
                item["arguments"] = text
                self._send_of_item("response.function_call_arguments.done", name=item["name"], arguments=text)
        self._send("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _send_of_item(self, kind: str, **members: Any) -> None:
        """Send an event of the last item."""
        self._send(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **members)


def _text_part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
