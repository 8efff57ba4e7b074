"""The example request that ``conch serve MODEL`` logs when its model is ready."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from shlex import quote
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote as quote_url

from conch.config.complete import CHAT_TEMPLATE
from conch.core.errors import ConchError

if TYPE_CHECKING:
    from conch.core.inference import TensorSpec
    from conch.server.core import InferenceServer

LOG = logging.getLogger("conch")

#: Input values of the example request.
_SAMPLES: Final[Mapping[str, Any]] = {
    "text_input": "Where is the library?",
    "text_pair": "The library is near the station.",
    "question": "Where is the library?",
    "context": "The library is near the station.",
    "candidate_labels": ["travel", "cooking"],
    "max_tokens": 50,
}


def announcer(name: str) -> Callable[[InferenceServer, Mapping[str, tuple[str, int]]], None]:
    """Return a function that logs an example request to the model ``name`` once the server has loaded it."""

    def announce(server: InferenceServer, addresses: Mapping[str, tuple[str, int]]) -> None:
        if "http" not in addresses:
            return
        try:
            model = server.model(name)
        except ConchError:
            return  # the model is loaded later
        host, port = addresses["http"]
        if host in ("0.0.0.0", "::", "127.0.0.1", "::1"):
            host = "localhost"
        elif ":" in host:
            host = f"[{host}]"
        scheme = "https" if server.settings.listeners["http"].encrypted else "http"
        root = f"{scheme}://{host}:{port}"
        if model.statistics.runtime_facts.get(CHAT_TEMPLATE) == "yes":
            command = chat_example(root, name)
        else:
            command = example(f"{root}/v2/models/{quote_url(name, safe='')}", model.signature.inputs.values())
        # Logged as a table: the message of a log line is quoted, so the command could not be copied.
        LOG.info("Example request:", extra={"table": command})

    return announce


def chat_example(root: str, name: str) -> str:
    """Return a curl command that sends a chat request to the model ``name`` of the server at ``root``."""
    question = {"role": "user", "content": _SAMPLES["text_input"]}
    body = json.dumps({"model": name, "messages": [question], "max_tokens": _SAMPLES["max_tokens"]})
    return f"curl {root}/v1/chat/completions -d {quote(body)}"


def example(url: str, inputs: Iterable[TensorSpec]) -> str:
    """Return a curl command that sends a request, or one that shows the tensors if they are not text."""
    specs = list(inputs)
    needed = [spec.name for spec in specs if not spec.optional]
    if not needed and {"text_input", "max_tokens"} <= {spec.name for spec in specs}:
        needed = ["text_input", "max_tokens"]  # it generates text; a conversation may replace the text
    if not needed or any(name not in _SAMPLES for name in needed):
        return f"curl {url}"
    body = json.dumps({name: _SAMPLES[name] for name in needed})
    return f"curl {url}/generate -d {quote(body)}"
