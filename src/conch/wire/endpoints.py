"""The endpoints that generate text in all client APIs: the models they accept, and their request readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from conch.core.inference import ModelSignature
from conch.wire.anthropic.message import CountForm, MessageForm
from conch.wire.anthropic.request import read_count_request, read_message_request
from conch.wire.openai.chat import ChatForm, ChatRequest, read_chat
from conch.wire.openai.completions import CompletionRequest, read_completion
from conch.wire.openai.models import require_chat, require_completion
from conch.wire.openai.reading import Fields
from conch.wire.openai.responses.response import ResponsesForm

GenerationRequest = ChatRequest | CompletionRequest


class GenerationEndpoint(NamedTuple):
    """``require`` raises ApiError for an unsuitable model, ``read`` for invalid members."""

    require: Callable[[ModelSignature], None]
    read: Callable[[Fields], GenerationRequest]


ENDPOINTS: Final[Mapping[str, GenerationEndpoint]] = {
    "chat": GenerationEndpoint(require_chat, read_chat),
    "message": GenerationEndpoint(require_chat, read_message_request),
    "message_count": GenerationEndpoint(require_chat, read_count_request),
    "completion": GenerationEndpoint(require_completion, read_completion),
}

#: The classes of forms of responses, which offloading processes return.
FORMS: Final[tuple[type[ChatForm], ...]] = (CountForm, MessageForm, ResponsesForm)
