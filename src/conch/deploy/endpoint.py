"""The server's endpoint for a platform's requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal
from urllib.parse import quote

from conch.core.errors import invalid
from conch.core.sampling import TEXT_GENERATION

#: Endpoints of a single model, and all endpoints.
ModelEndpoint = Literal["infer", "generate", "generate_stream"]
Endpoint = Literal[ModelEndpoint, "openai"]
#: The variant of ``openai`` for embedding models.
EMBEDDINGS: Final = "openai_embeddings"
_OPENAI: Final[Mapping[str, str]] = {"openai": "/v1/chat/completions", EMBEDDINGS: "/v1/embeddings"}
_TASKS: Final[Mapping[str, str]] = {"": "openai", TEXT_GENERATION: "openai", "feature-extraction": EMBEDDINGS}


def endpoint_for(endpoint: str, model: str, task: str) -> str:
    """Resolve an ``Endpoint`` for a model's ``task``, which is empty if unknown.

    Raises INVALID_ARG for ``openai`` if the OpenAI API does not support the task.
    """
    if endpoint != "openai":
        return endpoint
    if task not in _TASKS:
        raise invalid(
            f"the OpenAI API has no endpoint for the task '{task}' of model '{model}': choose another --endpoint"
        )
    return _TASKS[task]


def path_of(endpoint: str, model: str) -> str:
    """Return the path of an endpoint for a model; paths of the OpenAI API do not depend on the model."""
    return _OPENAI.get(endpoint) or f"/v2/models/{quote(model, safe='')}/{endpoint}"
