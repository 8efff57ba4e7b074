"""The generation requests and responses of each server.

Decoding is greedy, generates exactly the requested number of tokens, and ignores the end of sequence.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from benchmarks.generation.trace import Ask

Document = Mapping[str, Any]


class Dialect(ABC):
    """A server's protocol for one model.

    ``streams`` is true if text arrives while it is being generated, ``schemas`` if a request may have a JSON schema.
    """

    streams: ClassVar[bool] = True
    schemas: ClassVar[bool] = False

    def __init__(self, model: str) -> None:
        self.model = model

    @property
    @abstractmethod
    def path(self) -> str:
        """The path of requests."""

    @abstractmethod
    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the body of a request, as JSON."""

    @abstractmethod
    def text(self, event: Document) -> str:
        """Return the text in an event, or in the whole response if it is not streamed."""

    def tokens(self, events: Sequence[Document]) -> int | None:
        """Return the number of generated tokens that the server reports; None if it reports none."""
        return None

    def request(self, address: str, ask: Ask) -> bytes:
        """Return a complete HTTP request."""
        body = json.dumps(self.body(ask)).encode()
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {address}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body


class Conch(Dialect):
    """The generate extension, with the inputs of a text model. Reporting the tokens of each event has a cost, so only
    the very first request asks for it (``counted``)."""

    schemas = True

    def __init__(self, model: str, *, counted: bool = False) -> None:
        super().__init__(model)
        self.counted = counted

    @property
    def path(self) -> str:
        return f"/v2/models/{self.model}/generate_stream"

    def body(self, ask: Ask) -> dict[str, Any]:
        sampling: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
        if ask.schema:
            sampling["structured_outputs"] = {"json": json.loads(ask.schema)}
        body = {
            "text_input": ask.prompt,
            "stream": True,
            "max_tokens": ask.tokens,
            "sampling_parameters": json.dumps(sampling),
        }
        return {**body, "return_num_output_tokens": True} if self.counted else body

    def text(self, event: Document) -> str:
        return _text(event.get("text_output", ""))

    def tokens(self, events: Sequence[Document]) -> int | None:
        if not self.counted:
            return None
        return sum(_number(event.get("num_output_tokens", 0)) for event in events)


class Triton(Dialect):
    """The generate extension, with the tensors of ``peers/models/pipeline_model.py``."""

    streams = False

    @property
    def path(self) -> str:
        return f"/v2/models/{self.model}/generate"

    def body(self, ask: Ask) -> dict[str, Any]:
        return {"text_input": ask.prompt, "max_tokens": ask.tokens}

    def text(self, event: Document) -> str:
        return _text(event.get("text", ""))


class OpenAI(Dialect):
    """The completions of ``transformers serve``. Requests cannot disable the end of sequence; an ID for it that no
    token has gives the same effect."""

    @property
    def path(self) -> str:
        return "/v1/completions"

    def body(self, ask: Ask) -> dict[str, Any]:
        generation = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        return {
            "model": self.model,
            "prompt": ask.prompt,
            "max_tokens": ask.tokens,
            "stream": True,
            "generation_config": json.dumps(generation),
        }

    def text(self, event: Document) -> str:
        return "".join(choice.get("text") or "" for choice in event.get("choices", ()))

    def tokens(self, events: Sequence[Document]) -> int | None:
        said = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
        return int(said[-1]) if said else None


class Llama(Dialect):
    """llama.cpp's own completions."""

    schemas = True

    @property
    def path(self) -> str:
        return "/completion"

    def body(self, ask: Ask) -> dict[str, Any]:
        body = {
            "prompt": ask.prompt,
            "n_predict": ask.tokens,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
        return {**body, "json_schema": json.loads(ask.schema)} if ask.schema else body

    def text(self, event: Document) -> str:
        return str(event.get("content", ""))

    def tokens(self, events: Sequence[Document]) -> int | None:
        said = [event["tokens_predicted"] for event in events if event.get("stop")]
        return int(said[-1]) if said else None


DIALECTS: Final[Mapping[str, type[Dialect]]] = {"conch": Conch, "triton": Triton, "openai": OpenAI, "llama": Llama}


def _text(value: Any) -> str:
    return "".join(map(str, value)) if isinstance(value, list) else str(value)


def _number(value: Any) -> int:
    return sum(map(int, value)) if isinstance(value, list) else int(value)
