"""How to ask a model that is served alone: the line that is logged when it is ready, for ``conch serve MODEL``."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from conch.config.complete import CHAT_TEMPLATE
from conch.errors import ConchError

if TYPE_CHECKING:
    from conch.inference import TensorSpec
    from conch.server.core import InferenceServer

LOG = logging.getLogger("conch")

#: Values of inputs in the example of a request.
_SAMPLES: Final[Mapping[str, Any]] = {
    "text_input": "Where is the library?",
    "text_pair": "The library is near the station.",
    "question": "Where is the library?",
    "context": "The library is near the station.",
    "candidate_labels": ["travel", "cooking"],
    "max_tokens": 50,
}


def announcer(name: str) -> Callable[[InferenceServer, Mapping[str, tuple[str, int]]], None]:
    """Logs how to ask the model ``name`` of a server that listens at ``addresses``, once it is loaded."""

    def announce(server: InferenceServer, addresses: Mapping[str, tuple[str, int]]) -> None:
        if "http" not in addresses:
            return
        try:
            model = server.model(name)
        except ConchError:
            return  # it is to be loaded later
        host, port = addresses["http"]
        if host in ("0.0.0.0", "::", "127.0.0.1", "::1"):
            host = "localhost"
        elif ":" in host:
            host = f"[{host}]"
        root = f"http://{host}:{port}"
        if model.statistics.runtime_facts.get(CHAT_TEMPLATE) == "yes":
            command = chat_example(root, name)
        else:
            command = example(f"{root}/v2/models/{name}", model.signature.inputs.values())
        # As it is, so that it can be copied: log lines are quoted.
        LOG.info("Ask it:", extra={"table": command})

    return announce


def chat_example(root: str, name: str) -> str:
    """A curl command that asks the model ``name`` of the server at ``root`` in a conversation."""
    question = {"role": "user", "content": _SAMPLES["text_input"]}
    body = json.dumps({"model": name, "messages": [question], "max_tokens": _SAMPLES["max_tokens"]})
    return f"curl {root}/v1/chat/completions -d '{body}'"


def example(url: str, inputs: Iterable[TensorSpec]) -> str:
    """A curl command that asks a model, or that shows its tensors where they are not text."""
    specs = list(inputs)
    needed = [spec.name for spec in specs if not spec.optional]
    if not needed and {"text_input", "max_tokens"} <= {spec.name for spec in specs}:
        needed = ["text_input", "max_tokens"]  # it generates text, and takes conversations in place of a text too
    if not needed or any(name not in _SAMPLES for name in needed):
        return f"curl {url}"
    body = json.dumps({name: _SAMPLES[name] for name in needed})
    return f"curl {url}/generate -d '{body}'"
