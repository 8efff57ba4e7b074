"""Determines which OpenAI endpoints a model supports, from its declared tensors; lists models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from conch.core.inference import ModelSignature
from conch.wire.json import text
from conch.wire.openai.reading import ApiError

PROMPT: Final = "text_input"
MESSAGES: Final = "messages"
#: The input for a prompt as token ids.
TOKEN_IDS: Final = "token_ids"
TEXT: Final = "text_output"
AUDIO: Final = "audio"
#: The output with the parts of a transcription and their times, as JSON.
CHUNKS: Final = "chunks"
EMBEDDINGS: Final = ("embedding", "sentence_embedding")


def generates(signature: ModelSignature) -> bool:
    """Whether the model generates text from a prompt."""
    return _is_text(signature.inputs, PROMPT) and _is_text(signature.outputs, TEXT)


def chats(signature: ModelSignature) -> bool:
    """Whether the model accepts conversations."""
    return _is_text(signature.inputs, MESSAGES) and _is_text(signature.outputs, TEXT)


def embeds(signature: ModelSignature) -> bool:
    """Whether the model embeds texts."""
    return _is_text(signature.inputs, PROMPT) and embedding_output(signature) is not None


def transcribes(signature: ModelSignature) -> bool:
    """Whether the model transcribes recordings."""
    return _is_text(signature.inputs, AUDIO) and all(_is_text(signature.outputs, name) for name in (TEXT, CHUNKS))


def embedding_output(signature: ModelSignature) -> str | None:
    """Return the name of the output with a vector per text, None if there is none."""
    for name in EMBEDDINGS:
        spec = signature.outputs.get(name)
        if spec is not None and spec.datatype == "FP32" and 1 <= len(spec.dims) <= 2:
            return name
    return None


def require_chat(signature: ModelSignature) -> None:
    """Raise ApiError for a model that does not accept conversations."""
    if not chats(signature):
        raise ApiError(
            f"model '{signature.name}' has no chat template: it takes no '{MESSAGES}'; use /v1/completions"
            if generates(signature)
            else f"model '{signature.name}' does not generate text",
            "model",
        )


def require_completion(signature: ModelSignature) -> None:
    """Raise ApiError for a model that does not generate text from a prompt."""
    if not generates(signature):
        raise ApiError(f"model '{signature.name}' does not continue texts", "model")


def model_object(name: str, created: int, context: int, parent: str | None = None) -> dict[str, Any]:
    """Return OpenAI's object of a model, with vLLM's members.

    ``context`` is the maximum length of a text (tokens), 0 if it is unknown. ``parent`` is the model of a LoRA adapter.
    """
    members: dict[str, Any] = {"id": name, "object": "model", "created": created, "owned_by": "conch"}
    if context:
        members["max_model_len"] = context
    return members if parent is None else {**members, "parent": parent}


def model_body(name: str, created: int, context: int, parent: str | None = None) -> bytes:
    return text.dumps(model_object(name, created, context, parent))


def list_body(contexts: Mapping[str, int], adapters: Mapping[str, str], created: int) -> bytes:
    """Return the list of models, by name with their contexts, and of ``adapters`` with their models."""
    models = [model_object(name, created, context) for name, context in contexts.items()]
    models += [model_object(name, created, contexts[parent], parent) for name, parent in sorted(adapters.items())]
    return text.dumps({"object": "list", "data": models})


def _is_text(tensors: Any, name: str) -> bool:
    spec = tensors.get(name)
    return spec is not None and spec.datatype == "BYTES"
