"""The one path of the server that a platform's requests go to."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

#: Those that a model has by its name, and all.
OF_MODELS: Final = ("infer", "generate", "generate_stream")
ENDPOINTS: Final = (*OF_MODELS, "openai")
_OPENAI: Final = "/v1/chat/completions"


def path_of(endpoint: str, model: str) -> str:
    """The path of one of ``ENDPOINTS`` for a model; that of ``openai`` is the same for all, whose requests name it."""
    return _OPENAI if endpoint == "openai" else f"/v2/models/{quote(model, safe='')}/{endpoint}"
