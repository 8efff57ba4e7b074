"""Tools that are called, in one answer and in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.openai_api.asking import TOOL, say


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn"}}\n</tool_call>',
        '{"name": "weather", "parameters": {"place": "Bonn"}}',
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"place": "Bonn"}}]',
    ],
)
def test_tool_is_called(client: Any, stream: bool, text: str) -> None:
    message, reason = talk(client, stream, **say(f"!say {text}", tools=[TOOL]))
    (call,) = message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"place": "Bonn"}
    assert call.id.startswith("call_")
    assert not message.content
    assert reason == "tool_calls"


def test_text_that_is_no_call_stays_text(client: Any) -> None:
    for stream in (False, True):
        message, reason = talk(client, stream, **say('!say {"name": "nobody"} is fine', tools=[TOOL]))
        assert (message.content, message.tool_calls, reason) == ('{"name": "nobody"} is fine', None, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_named_tool_is_called_with_the_text_as_arguments(client: Any, stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    message, reason = talk(client, stream, **say('!say {"place": "Bonn"}', tools=[TOOL], tool_choice=choice))
    assert (message.tool_calls[0].function.name, message.tool_calls[0].function.arguments, reason) == (
        "weather", '{"place":"Bonn"}', "tool_calls",
    )  # fmt: skip


def test_required_tool_is_called_from_a_list(client: Any) -> None:
    text = '!say [{"name": "weather", "parameters": {"place": "Bonn"}}, {"name": "weather", "parameters": {}}]'
    message, _ = talk(client, False, **say(text, tools=[TOOL], tool_choice="required"))
    assert [call.function.arguments for call in message.tool_calls] == ['{"place":"Bonn"}', "{}"]
    shown = client.chat.completions.create(**say("!inputs", tools=[TOOL], tool_choice="required"))
    schema = json.loads(json.loads(shown.choices[0].message.content)["sampling_parameters"])["structured_outputs"]
    assert schema["json"]["items"]["properties"]["name"] == {"type": "string", "enum": ["weather"]}


def test_tools_are_not_offered_where_none_may_be_called(client: Any) -> None:
    answer = client.chat.completions.create(**say("!inputs", tools=[TOOL], tool_choice="none"))
    assert "tools" not in json.loads(answer.choices[0].message.content)


def talk(client: Any, stream: bool, **asked: Any) -> tuple[Any, str]:
    """The message and why it ended; OpenAI's client puts pieces together."""
    if not stream:
        (choice,) = client.chat.completions.create(**asked).choices
        return choice.message, choice.finish_reason
    with client.chat.completions.stream(**asked) as pieces:
        (choice,) = pieces.get_final_completion().choices
    return choice.message, choice.finish_reason
