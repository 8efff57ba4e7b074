"""The priority that a request of OpenAI's API gives becomes that of its requests to the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conch.core.inference import InferRequest, ModelSignature
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.openai import GenerationResponder
from conch.wire.openai.chat import read_chat
from conch.wire.openai.completions import read_completion
from conch.wire.openai.reading import ApiError, Fields
from tests.unit.frontends.http.site import WrittenConnection

CHAT = {"messages": [{"role": "user", "content": "a"}]}


class Model:
    """Keeps the requests that it gets."""

    name = "m"
    signature = ModelSignature("m", 1, 0, {}, {})

    def __init__(self) -> None:
        self.requests: list[InferRequest] = []

    def infer(self, request: InferRequest) -> None:
        self.requests.append(request)


@pytest.mark.parametrize(("read", "body"), [(read_chat, CHAT), (read_completion, {"prompt": ["a", "b"]})])
@pytest.mark.parametrize(("members", "expected"), [({}, 0), ({"priority": 2}, 2)])
def test_requests_to_the_model_have_the_priority(
    read: Any, body: dict[str, Any], members: dict[str, int], expected: int
) -> None:
    model, exchange = Model(), HttpExchange(WrittenConnection(), b"POST", b"/", {}, True)  # type: ignore[arg-type]
    plan = read(Fields({**body, **members})).plan
    inputs: list[Any] = [{}] * len(body.get("prompt", "a"))
    GenerationResponder(exchange, model, plan, inputs).start(model, SimpleNamespace(on=False))  # type: ignore[arg-type]
    assert [request.priority for request in model.requests] == [expected] * len(inputs)


@pytest.mark.parametrize("priority", [-1, 1.5, "high", 2**40])
def test_priority_that_is_no_level_is_refused(priority: Any) -> None:
    with pytest.raises(ApiError) as caught:
        read_chat(Fields({**CHAT, "priority": priority}))
    assert caught.value.param == "priority"
