"""Bodies that are valid by the schemas of OpenAI's and Anthropic's clients: each is translated or refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from conch.core.errors import Code, ConchError
from conch.core.inference import InferResponse, ModelSignature, TensorSpec
from conch.core.tensors import WireTensor, pack_bytes
from conch.frontends.offloading import work
from conch.wire.openai.response import ChoiceDelta, ResponsePlan, read_response
from conch.wire.openai.responses.items import join_entry
from tests.fuzz.schemas import RandomValues

#: A number of bodies that takes about a second; more were tried before.
BODIES = 400
_TEXTS = ("text_input", "messages", "tools", "chat_template_kwargs", "sampling_parameters")
SIGNATURE = ModelSignature(
    "m",
    1,
    0,
    {
        **{name: TensorSpec(name, "BYTES", (1,), optional=True) for name in _TEXTS},
        "stream": TensorSpec("stream", "BOOL", (1,), optional=True),
    },
    {name: TensorSpec(name, "BYTES", (-1,)) for name in ("text_output", "finish_reason", "logprobs")},
    decoupled=True,
)


def find_signature(name: Any) -> ModelSignature:
    return SIGNATURE


def find_response(id: str) -> bytes:
    return join_entry(b'{"output": []}', b"[]")


def openai(endpoint: str) -> Callable[[bytes], Any]:
    return lambda body: work.openai(body, "", 1 << 20, find_signature, endpoint)


def responses(body: bytes) -> Any:
    return work.responses(body, "", 1 << 20, find_signature, find_response)


MESSAGES = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2000}
#: The schema of each endpoint, the translation of bodies, and members that are always accepted.
ENDPOINTS: dict[str, tuple[Any, Callable[[bytes], Any], dict[str, Any]]] = {
    "chat": (chat_create_params.CompletionCreateParamsNonStreaming, openai("chat"), MESSAGES),
    "completion": (completion_create_params.CompletionCreateParamsNonStreaming, openai("completion"), {"prompt": "a"}),
    "responses": (response_create_params.ResponseCreateParamsStreaming, responses, {"input": "a"}),
    "message": (message_create_params.MessageCreateParamsNonStreaming, openai("message"), MESSAGES),
    "message_count": (
        message_count_tokens_params.MessageCountTokensParams,
        openai("message_count"),
        {"messages": MESSAGES["messages"]},
    ),
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_body_is_translated_or_refused(endpoint: str) -> None:
    schema, decode, accepted = ENDPOINTS[endpoint]
    chance = random.Random(5)
    values = RandomValues(chance)
    translated = 0
    for _ in range(BODIES):
        body = values.members(schema)
        if chance.random() < 0.5:
            # Otherwise, most are refused for a message or for a member that needs a service of the provider.
            few = chance.sample(sorted(body), min(len(body), 3))
            body = {name: body[name] for name in few} | accepted
        body |= {"model": "m"}
        try:
            plan, inputs = decode(json.dumps(body).encode())
        except ConchError as error:
            assert error.code in (Code.INVALID_ARG, Code.UNSUPPORTED), body
            assert error.param is None or isinstance(error.param, str), body
            continue
        assert inputs, body
        translated += 1
        answer(plan)
    assert translated > BODIES // 20


def answer(plan: ResponsePlan) -> None:
    """Render a response of the model in both ways."""
    texts = WireTensor(
        "text_output", "BYTES", (1,), pack_bytes([b'<tool_call>{"name": "a", "arguments": {}}</tool_call>b'])
    )
    pieces = read_response(InferResponse([texts])).pieces
    response = plan.answer("m")
    response.usage.add(1, pieces)
    for index in range(plan.choices):
        if plan.stream:
            response.events(index, pieces[0], last=False)
            response.events(index, ChoiceDelta(finish="stop"), last=True)
        else:
            response.add(index, pieces[0], last=True)
    assert response.closing() if plan.stream else json.loads(response.body())
