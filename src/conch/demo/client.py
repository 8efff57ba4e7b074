"""The few requests of the demo, over plain HTTP with nothing but the standard library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from conch.errors import ConchError, unavailable

#: No answer of the demo takes longer (s).
TIMEOUT = 120


@dataclass(frozen=True)
class DemoClient:
    """A server at ``url``.  Methods raise ConchError for any answer but a successful one."""

    url: str

    def ready(self) -> bool:
        try:
            with urlopen(f"{self.url}/v2/health/ready", timeout=TIMEOUT):
                return True
        except (HTTPError, URLError, ConnectionError):
            return False

    def index(self) -> list[dict[str, str]]:
        """Name, version and state of every model."""
        entries: list[dict[str, str]] = json.loads(self._post("/v2/repository/index", {}))
        return entries

    def loaded(self) -> set[str]:
        """The names of the models that are ready; none while the server does not answer yet."""
        try:
            return {entry["name"] for entry in self.index() if entry.get("state") == "READY"}
        except ConchError:
            return set()

    def embed(self, model: str, texts: list[str]) -> list[list[float]]:
        """The vectors of all texts, from one request."""
        tensor = {"name": "text_input", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}
        answer = json.loads(self._post(f"/v2/models/{model}/infer", {"inputs": [tensor]}))
        output = answer["outputs"][0]
        rows, width = output["shape"]
        return [output["data"][row * width : (row + 1) * width] for row in range(rows)]

    def chat(self, model: str, question: str, max_tokens: int) -> Iterator[str]:
        """The pieces of an answer, as they arrive."""
        messages = json.dumps([{"role": "user", "content": question}])
        body = {"messages": messages, "max_tokens": max_tokens, "stream": True}
        with self._open(f"/v2/models/{model}/generate_stream", body) as response:
            for line in response:
                if line.startswith(b"data: "):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise ConchError(f"{model}: {event['error']}")
                    yield event["text_output"]

    def _post(self, path: str, body: dict[str, Any]) -> bytes:
        with self._open(path, body) as response:
            content: bytes = response.read()
            return content

    def _open(self, path: str, body: dict[str, Any]) -> Any:
        request = Request(f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            return urlopen(request, timeout=TIMEOUT)
        except HTTPError as error:
            with error:
                raise ConchError(f"POST {path}: {error.code} {error.read().decode(errors='replace')}") from None
        except (URLError, ConnectionError, TimeoutError) as error:
            raise unavailable(f"POST {path}: {error}") from None
