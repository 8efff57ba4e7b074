"""The one path of the server that a platform's requests go to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from conch.errors import invalid
from conch.sampling import TEXT_GENERATION

#: Those that a model has by its name, and all.
OF_MODELS: Final = ("infer", "generate", "generate_stream")
ENDPOINTS: Final = (*OF_MODELS, "openai")
#: What ``openai`` is for a model of embeddings.
EMBEDDINGS: Final = "openai_embeddings"
_OPENAI: Final[Mapping[str, str]] = {"openai": "/v1/chat/completions", EMBEDDINGS: "/v1/embeddings"}
_TASKS: Final[Mapping[str, str]] = {"": "openai", TEXT_GENERATION: "openai", "feature-extraction": EMBEDDINGS}


def endpoint_for(endpoint: str, model: str, task: str) -> str:
    """What one of ``ENDPOINTS`` is for a model of a ``task``, empty where that is not known.

    Raises INVALID_ARG for ``openai`` where the OpenAI API has nothing for the task.
    """
    if endpoint != "openai":
        return endpoint
    if task not in _TASKS:
        raise invalid(
            f"the OpenAI API has no endpoint for the task '{task}' of model '{model}': choose another --endpoint"
        )
    return _TASKS[task]


def path_of(endpoint: str, model: str) -> str:
    """The path of an endpoint for a model; those of the OpenAI API are the same for all, whose requests name it."""
    return _OPENAI.get(endpoint) or f"/v2/models/{quote(model, safe='')}/{endpoint}"
