"""What a model can be used for through this API, by the tensors that it declares; and the list of models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from conch.inference import ModelSignature
from conch.wire.json import text
from conch.wire.openai.errors import ApiError

PROMPT: Final = "text_input"
MESSAGES: Final = "messages"
TEXT: Final = "text_output"
EMBEDDINGS: Final = ("embedding", "sentence_embedding")


def generates(signature: ModelSignature) -> bool:
    """Whether the model continues texts."""
    return _is_text(signature.inputs, PROMPT) and _is_text(signature.outputs, TEXT)


def chats(signature: ModelSignature) -> bool:
    """Whether the model takes conversations."""
    return _is_text(signature.inputs, MESSAGES) and _is_text(signature.outputs, TEXT)


def embeds(signature: ModelSignature) -> bool:
    """Whether the model makes vectors of texts."""
    return _is_text(signature.inputs, PROMPT) and embedding_output(signature) is not None


def usable(signature: ModelSignature) -> bool:
    """Whether any endpoint takes the model."""
    return generates(signature) or chats(signature) or embeds(signature)


def embedding_output(signature: ModelSignature) -> str | None:
    """The name of the output with a vector for each text, None without one."""
    for name in EMBEDDINGS:
        spec = signature.outputs.get(name)
        if spec is not None and spec.datatype == "FP32" and 1 <= len(spec.dims) <= 2:
            return name
    return None


def require_chat(signature: ModelSignature) -> None:
    """Raise ApiError for a model that takes no conversations."""
    if not chats(signature):
        raise ApiError(
            f"model '{signature.name}' has no chat template: it takes no '{MESSAGES}'; use /v1/completions"
            if generates(signature)
            else f"model '{signature.name}' does not generate text",
            "model",
        )


def require_completion(signature: ModelSignature) -> None:
    """Raise ApiError for a model that continues no texts."""
    if not generates(signature):
        raise ApiError(f"model '{signature.name}' does not continue texts", "model")


def require_embedding(signature: ModelSignature) -> None:
    """Raise ApiError for a model that embeds no texts."""
    if not embeds(signature):
        raise ApiError(f"model '{signature.name}' does not embed texts", "model")


def model_object(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "conch"}


def model_body(name: str, created: int) -> bytes:
    return text.dumps(model_object(name, created))


def list_body(names: Iterable[str], created: int) -> bytes:
    return text.dumps({"object": "list", "data": [model_object(name, created) for name in names]})


def _is_text(tensors: Any, name: str) -> bool:
    spec = tensors.get(name)
    return spec is not None and spec.datatype == "BYTES"
