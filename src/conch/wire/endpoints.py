"""The endpoints that generate text in all client APIs: the models they accept, and their request readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from conch.core.inference import ModelSignature
from conch.wire.openai.chat import ChatForm, ChatRequest, read_chat
from conch.wire.openai.completions import CompletionRequest, read_completion
from conch.wire.openai.models import require_chat, require_completion
from conch.wire.openai.reading import Fields
from conch.wire.openai.responses.response import ResponsesForm

OpenAiRequest = ChatRequest | CompletionRequest


class OpenAiEndpoint(NamedTuple):
    """``require`` raises ApiError for an unsuitable model, ``read`` for invalid members."""

    require: Callable[[ModelSignature], None]
    read: Callable[[Fields], OpenAiRequest]


ENDPOINTS: Final[Mapping[str, OpenAiEndpoint]] = {
    "chat": OpenAiEndpoint(require_chat, read_chat),
    "completion": OpenAiEndpoint(require_completion, read_completion),
}

#: The classes of forms of responses, which offloading processes return.
FORMS: Final[tuple[type[ChatForm], ...]] = (ResponsesForm,)
