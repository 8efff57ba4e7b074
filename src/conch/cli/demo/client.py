"""The requests of the demo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from conch.client.client import Client
from conch.core.errors import ConchError

#: The timeout of a call (s).
TIMEOUT: Final = 120.0


class DemoClient(Client):
    """A client of the demo's models."""

    def loaded(self) -> set[str]:
        """Return the names of the models that are ready; empty while the server does not respond."""
        try:
            return {entry["name"] for entry in self.models(timeout=TIMEOUT) if entry.get("state") == "READY"}
        except ConchError:
            return set()

    def embed(self, model: str, texts: list[str]) -> list[list[float]]:
        """Return the vectors of all texts, from one request."""
        result = self.infer(model, {"text_input": [[text] for text in texts]}, timeout=TIMEOUT)
        [vectors] = result.outputs.values()
        rows: list[list[float]] = vectors.tolist()
        return rows

    def chat(self, model: str, question: str, max_tokens: int) -> Iterator[str]:
        """Yield the parts of the completion as they arrive."""
        messages = json.dumps([{"role": "user", "content": question}])
        inputs = {"messages": messages, "max_tokens": max_tokens}
        with self.generate_stream(model, inputs, timeout=TIMEOUT) as stream:
            for result in stream:
                yield result.text
