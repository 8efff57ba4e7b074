"""A request of the Responses API, translated to a chat."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, Final

import orjson

from conch.core.errors import clipped
from conch.wire.openai.chat import TEMPLATE_VALUES, ChatRequest
from conch.wire.openai.conversation import read_translated
from conch.wire.openai.reading import ApiError, Fields, wrong
from conch.wire.openai.responses.items import Item, chat_messages
from conch.wire.openai.responses.response import ResponsesForm
from conch.wire.openai.sampling import EXTENSIONS

#: The members of the chat, and the members of the request that they come from: what an error names.
_NAMES: Final = {
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    ".function": "",
}
_LOGPROBS: Final = "message.output_text.logprobs"
#: Values of ``include`` without effect: the reasoning is sent as text, and there are no hosted tools.
_INCLUDED: Final = ("reasoning.encrypted_content",)
_REFUSED: Final = (
    "access_programs", "background_options", "context_management", "conversation", "image", "moderation", "prompt",
)  # fmt: skip
_IGNORED: Final = (
    "client_metadata", "max_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier",
)  # fmt: skip
_SUMMARIES: Final = (None, "auto", "concise", "detailed")
#: Maximum number of entries of ``metadata``, and maximum lengths of their names and values (characters), as at OpenAI.
_METADATA: Final = (16, 64, 512)


def read_responses(members: Fields, *, previous: str | None, earlier: list[Item], items: list[Item]) -> ChatRequest:
    """Read the members of a request, except ``model`` and those of :func:`read_items`, whose results are given.

    Raises ApiError for invalid or unknown members.
    """
    if members.take("background") not in (None, False):
        raise ApiError("'background' is not supported: responses end with their connection", "background")
    instructions = members.text("instructions")
    messages = chat_messages(earlier, items)
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    if not messages:
        raise ApiError("'input' must have at least one item", "input")
    chat: dict[str, Any] = {
        "messages": messages,
        "max_completion_tokens": members.take("max_output_tokens"),
        "stream": members.take("stream"),
        "stream_options": members.take("stream_options"),
        TEMPLATE_VALUES: members.take(TEMPLATE_VALUES),
    }
    tools = members.array("tools")
    choice = members.take("tool_choice")
    chat["tools"], namespaces = _chat_tools(tools or [])
    chat["tool_choice"], chat["tools"] = _chat_choice(choice, chat["tools"])
    parallel = members.flag("parallel_tool_calls", True)
    if chat["tools"]:
        chat["parallel_tool_calls"] = parallel
    text = members.object("text") or Fields({}, "text")
    text_format = text.take("format")
    chat["response_format"] = _response_format(text_format)
    verbosity = text.take("verbosity")
    chat["verbosity"] = None if verbosity == "medium" else verbosity
    text.finish()
    reasoning, effort, summary = _read_reasoning(members)
    chat["reasoning_effort"] = effort
    include, top = _read_include(members), members.take("top_logprobs")
    if _LOGPROBS in include or top:
        chat |= {"logprobs": True, "top_logprobs": top}
    truncation = members.text("truncation")
    if truncation not in (None, "auto", "disabled"):
        raise wrong("truncation", truncation, "auto or disabled")
    metadata = _read_metadata(members)
    store = members.flag("store", True)
    echo = {
        "instructions": instructions,
        "max_output_tokens": chat["max_completion_tokens"],
        "max_tool_calls": None,
        "metadata": metadata,
        "parallel_tool_calls": parallel,
        "previous_response_id": previous,
        "reasoning": {"effort": effort, "summary": reasoning},
        "temperature": (temperature := members.take("temperature")),
        "text": {"format": text_format or {"type": "text"}, "verbosity": verbosity or "medium"},
        "tool_choice": choice or "auto",
        "tools": [{"strict": None, "parameters": None, **tool} for tool in tools or []],
        "top_logprobs": top or 0,
        "top_p": (top_p := members.take("top_p")),
        "truncation": truncation or "disabled",
        "user": members.text("user"),
        "background": False,
        "service_tier": "default",
    }
    chat |= {"temperature": temperature, "top_p": top_p}
    chat |= {name: members.take(name) for name in (*EXTENSIONS, "priority")}
    members.refuse(*_REFUSED)
    members.ignore(*_IGNORED)
    members.finish()
    stored = orjson.dumps(earlier + items) if store else None
    form = ResponsesForm(echo=orjson.dumps(echo), items=stored, summary=summary, namespaces=namespaces)
    return replace(read_translated(chat, _NAMES, form), drop_oldest=truncation == "auto")


def _chat_tools(tools: list[Any]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the tools of a chat, and the namespaces of functions that have one, by the names of the functions."""
    functions: list[dict[str, Any]] = []
    namespaces: dict[str, str] = {}
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if type(tool) is not dict or tool.get("type") != "namespace":
            functions.append(_chat_tool(tool, path))
            continue
        members = Fields(tool, path)
        members.ignore("type", "description")
        name = members.required_text("name")
        inner = members.array("tools") or []
        members.finish()
        for number, function in enumerate(inner):
            functions.append(_chat_tool(function, f"{path}.tools[{number}]"))
            namespaces[functions[-1]["function"]["name"]] = name
    counts = Counter(function["function"]["name"] for function in functions)
    twice = next((name for name in namespaces if counts[name] > 1), None)
    if twice is not None:
        raise ApiError(f"'tools' has two functions called '{clipped(twice)}': the model cannot choose one", "tools")
    return functions, namespaces


def _chat_tool(tool: Any, path: str) -> dict[str, Any]:
    kind = tool.get("type") if type(tool) is dict else None
    if kind != "function":
        raise wrong(f"{path}.type", kind, "function: this server runs no tools")
    members = Fields(tool, path)
    members.ignore("type", "allowed_callers", "async", "defer_loading", "output_schema")
    function: dict[str, Any] = {"name": members.required_text("name")}
    function |= {name: members.take(name) for name in ("description", "parameters", "strict")}
    members.finish()
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _chat_choice(choice: Any, tools: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """Return the ``tool_choice`` of a chat, and the tools among which it chooses."""
    if type(choice) is not dict:
        return choice, tools
    kind = choice.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}, tools
    if kind != "allowed_tools":
        raise wrong("tool_choice.type", kind, "function or allowed_tools: this server runs no tools")
    allowed, mode = choice.get("tools"), choice.get("mode")
    if mode not in ("auto", "required"):
        raise wrong("tool_choice.mode", mode, "auto or required")
    if type(allowed) is not list or not all(type(tool) is dict and type(tool.get("name")) is str for tool in allowed):
        raise wrong("tool_choice.tools", allowed, "an array of functions with their names")
    names = {tool["name"] for tool in allowed}
    unknown = names - {tool["function"]["name"] for tool in tools}
    if unknown:
        raise ApiError(f"'tool_choice' names '{min(unknown)}', which is not among 'tools'", "tool_choice")
    return mode, [tool for tool in tools if tool["function"]["name"] in names]


def _response_format(value: Any) -> Any:
    """Return the ``response_format`` of a chat for ``text.format``."""
    if type(value) is not dict or value.get("type") != "json_schema":
        return value
    return {"type": "json_schema", "json_schema": {name: value[name] for name in value.keys() - {"type"}}}


def _read_reasoning(members: Fields) -> tuple[str | None, Any, bool]:
    """Return the kind of summary, the effort, and whether the reasoning is sent as its summary."""
    reasoning = members.object("reasoning")
    if reasoning is None:
        return None, None, False
    effort = reasoning.take("effort")
    summary, older = reasoning.take("summary"), reasoning.take("generate_summary")
    summary = older if summary is None else summary
    if summary not in _SUMMARIES:
        raise wrong("reasoning.summary", summary, "auto, concise or detailed")
    reasoning.ignore("context")
    reasoning.finish()
    return summary, effort, summary is not None


def _read_include(members: Fields) -> list[str]:
    include = members.array("include") or []
    for index, value in enumerate(include):
        if value != _LOGPROBS and value not in _INCLUDED:
            known = " or ".join((_LOGPROBS, *_INCLUDED))
            raise wrong(f"include[{index}]", value, f"{known}: this server runs no tools")
    return include


def _read_metadata(members: Fields) -> dict[str, str]:
    metadata = members.take("metadata")
    if metadata is None:
        return {}
    count, longest_name, longest_value = _METADATA
    if (
        type(metadata) is not dict
        or len(metadata) > count
        or not all(
            len(name) <= longest_name and type(value) is str and len(value) <= longest_value
            for name, value in metadata.items()
        )
    ):
        expected = f"an object of at most {count} texts of at most {longest_value} characters"
        raise wrong("metadata", metadata, f"{expected}, with names of at most {longest_name}")
    return dict(metadata)
