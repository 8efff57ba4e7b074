"""Requests of the Messages API, translated to chats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Final

from conch.core.sampling.values import INT32
from conch.wire.anthropic.message import CountForm, MessageForm
from conch.wire.openai.chat import TEMPLATE_VALUES, ChatRequest
from conch.wire.openai.conversation import read_translated
from conch.wire.openai.media import decode_base64, image_file
from conch.wire.openai.reading import ApiError, Fields, one_of, wrong

#: The members of the chat, and the members of the request that they come from: what an error names.
_NAMES: Final = {
    "max_completion_tokens": "max_tokens",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    TEMPLATE_VALUES: "thinking",
    ".function.parameters": ".input_schema",
    ".function": "",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "stop": "stop_sequences",
}
_IGNORED: Final = (
    "cache_control", "inference_geo", "metadata", "service_tier", "user_profile_id", "workspace_id",
)  # fmt: skip
_REFUSED: Final = ("container", "context_management", "diagnostics", "mcp_servers")
_IMAGE_TYPES: Final = ("image/jpeg", "image/png", "image/gif", "image/webp")
_ROLES: Final = ("user", "assistant", "system")
#: The values of chat templates that turn thinking on or off.
_THINKING: Final = ("enable_thinking", "thinking")
#: The choices of a chat for those of a request.
_CHOICES: Final[Mapping[str, Any]] = {"auto": "auto", "any": "required", "none": "none"}


def read_message_request(members: Fields) -> ChatRequest:
    """Read the members of a request, except ``model``. Raises ApiError for invalid or unknown ones."""
    limit = members.integer("max_tokens", 1, INT32)
    if limit is None:
        raise members.missing("max_tokens")
    chat, shows_thinking = _read_conversation(members)
    chat |= {
        "max_completion_tokens": limit,
        "stream": members.take("stream"),
        "stop": _read_stops(members) or None,
        "temperature": members.number("temperature", 0, 1),
        "top_p": members.take("top_p"),
        "top_k": members.integer("top_k", 0, INT32) or None,
        "priority": members.take("priority"),
        "cache_salt": members.take("cache_salt"),
    }
    members.finish()
    return read_translated(chat, _NAMES, MessageForm(shows_thinking=shows_thinking))


def read_count_request(members: Fields) -> ChatRequest:
    """Read a request for the number of tokens, as :func:`read_message_request` does."""
    chat, _ = _read_conversation(members)
    members.finish()
    return replace(read_translated({**chat, "max_completion_tokens": 1}, _NAMES, CountForm()), tokenize_only=True)


def _read_conversation(members: Fields) -> tuple[dict[str, Any], bool]:
    """Read the members that messages and counts have in common.

    Returns the chat, and whether the response has the model's thinking.
    """
    messages = members.array("messages")
    if messages is None:
        raise members.missing("messages")
    if not messages:
        raise ApiError("'messages' must have at least one message", "messages")
    read = [part for index, message in enumerate(messages) for part in _read_message(message, f"messages[{index}]")]
    system = members.take("system")
    if system is not None:
        read.insert(0, {"role": "system", "content": [_text_part(_read_texts(system, "system"))]})
    read = _combined(read)
    thinking, values = _read_thinking(members)
    chat: dict[str, Any] = {"messages": read, TEMPLATE_VALUES: values or None}
    if read[-1]["role"] == "assistant":  # the response continues it
        if "tool_calls" in read[-1]:
            raise ApiError("the last message must not call tools: send their results", "messages")
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    tools = members.array("tools")
    if tools:
        chat["tools"] = [_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    chat |= _read_choice(members, bool(tools))
    output = members.object("output_config")
    if output is not None:
        chat["reasoning_effort"] = output.take("effort")
        chat["response_format"] = _read_format(output)
        output.finish()
    if (speed := members.text("speed")) not in (None, "standard"):
        raise wrong("speed", speed, "standard")
    members.ignore(*_IGNORED)
    members.refuse(*_REFUSED)
    return chat, thinking


def _read_message(message: Any, path: str) -> list[dict[str, Any]]:
    """Read a message, which becomes several; :func:`_combined` combines those that are not results of tools."""
    if type(message) is not dict:
        raise wrong(path, message, "an object")
    members = Fields(message, path)
    role, content = one_of(members.name("role"), members.take("role"), _ROLES), members.take("content")
    members.finish()
    if type(content) is str:
        return [{"role": role, "content": [_text_part(content)]}]
    if type(content) is not list:
        raise wrong(f"{path}.content", content, "a string or an array of content blocks")
    if role == "assistant":
        return [_read_assistant(content, f"{path}.content")]
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        where = f"{path}.content[{index}]"
        if _kind(block) == "tool_result" and role == "user":
            messages.append(_read_result(block, where))
        else:
            messages.append({"role": role, "content": [_read_part(block, where)]})
    return messages or [{"role": role, "content": []}]


def _combined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Combine consecutive messages of a role, as the API does: many chat templates require that roles alternate."""
    combined: list[dict[str, Any]] = []
    for role, group in groupby(messages, itemgetter("role")):
        together = list(group)
        combined += together if role == "tool" else [_joined(together)]
    return combined


def _joined(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one message with the texts and lists of messages of a role."""
    joined = {"role": messages[0]["role"]}
    for name in dict.fromkeys(name for message in messages for name in message if name != "role"):
        values = [message[name] for message in messages if name in message]
        joined[name] = "".join(values) if type(values[0]) is str else [*chain.from_iterable(values)]
    return joined


def _read_assistant(content: list[Any], path: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(content):
        where = f"{path}[{index}]"
        match _kind(block):
            case "thinking":
                members = Fields(block, where)
                members.ignore("type", "signature")
                thoughts.append(members.text("thinking") or "")
                members.finish()
            case "redacted_thinking":
                continue
            case "tool_use":
                calls.append(_read_call(Fields(block, where)))
            case _:
                texts.append(_read_text(block, where))
    text = "".join(texts)
    message: dict[str, Any] = {"role": "assistant", "content": [_text_part(text)] if text else []}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _read_call(members: Fields) -> dict[str, Any]:
    members.ignore("type", "cache_control", "caller", "toolset_name")
    id, name, arguments = members.required_text("id"), members.required_text("name"), members.take("input")
    if type(arguments) is not dict:
        raise wrong(members.name("input"), arguments, "an object")
    members.finish()
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_result(block: dict[str, Any], path: str) -> dict[str, Any]:
    members = Fields(block, path)
    members.ignore("type", "cache_control", "toolset_name")
    failed = members.flag("is_error")
    content = members.take("content")
    id = members.required_text("tool_use_id")
    members.finish()
    read: str | list[dict[str, Any]]
    # Chat templates have no place for the flag.
    error = "Error: " if failed else ""
    if type(content) is list and any(_kind(block) == "image" for block in content):
        parts = [_read_part(block, f"{path}.content[{index}]") for index, block in enumerate(content)]
        read = [*([_text_part(error)] if failed else ()), *parts]
    else:
        read = error + ("" if content is None else _read_texts(content, f"{path}.content"))
    return {"role": "tool", "tool_call_id": id, "content": read}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _read_part(block: Any, path: str) -> dict[str, Any]:
    """Read a text or an image of a message."""
    if _kind(block) != "image":
        return _text_part(_read_text(block, path))
    members = Fields(block, path)
    members.ignore("type", "cache_control")
    source = members.object("source")
    members.finish()
    if source is None:
        raise members.missing("source")
    kind = one_of(source.name("type"), source.take("type"), ("base64", "url"))
    if kind == "url":
        file = image_file(source.required_text("url"), source.path)
    else:
        one_of(source.name("media_type"), source.take("media_type"), _IMAGE_TYPES)
        file = decode_base64(source.required_text("data"), source.path)
    source.finish()
    return {"type": "image_url", "image_url": (source.path, file)}


def _read_texts(content: Any, path: str) -> str:
    if type(content) is str:
        return content
    if type(content) is not list:
        raise wrong(path, content, "a string or an array of text blocks")
    return "\n".join([_read_text(block, f"{path}[{index}]") for index, block in enumerate(content)])


def _read_text(block: Any, path: str) -> str:
    kind = _kind(block)
    if kind == "image":
        raise ApiError(
            f"'{path}' is an image: only messages of the user and results of tools have images", f"{path}.type"
        )
    if kind != "text":
        raise wrong(f"{path}.type", kind, "text: models here read no other content")
    members = Fields(block, path)
    members.ignore("type", "cache_control", "citations")
    text = members.text("text")
    members.finish()
    if text is None:
        raise members.missing("text")
    return text


def _kind(block: Any) -> Any:
    return block.get("type") if type(block) is dict else None


def _read_tool(tool: Any, path: str) -> dict[str, Any]:
    if type(tool) is not dict:
        raise wrong(path, tool, "an object")
    members = Fields(tool, path)
    kind = members.text("type")
    if kind not in (None, "custom"):
        raise wrong(f"{path}.type", kind, "custom: this server runs no tools")
    members.ignore("allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples")
    function: dict[str, Any] = {"name": members.required_text("name")}
    optional = {"description": members.text("description"), "strict": members.take("strict")}
    function |= {name: value for name, value in optional.items() if value is not None}
    schema = members.take("input_schema")
    if type(schema) is not dict:
        raise wrong(f"{path}.input_schema", schema, "a JSON schema")
    members.finish()
    return {"type": "function", "function": {**function, "parameters": schema}}


def _read_choice(members: Fields, has_tools: bool) -> dict[str, Any]:
    """Read ``tool_choice``; return the members of the chat for it."""
    choice = members.object("tool_choice")
    if choice is None:
        return {}
    kind, name = choice.take("type"), choice.text("name")
    parallel = not choice.flag("disable_parallel_tool_use")
    choice.finish()
    kind = one_of("tool_choice.type", kind, (*_CHOICES, "tool"))
    chosen = _CHOICES.get(kind, {"type": "function", "function": {"name": name}})
    return {"tool_choice": chosen, **({"parallel_tool_calls": parallel} if has_tools else {})}


def _read_thinking(members: Fields) -> tuple[bool, dict[str, Any]]:
    """Return whether the response has the model's thinking, and the values for its chat template."""
    thinking = members.object("thinking")
    if thinking is None:
        return True, {}
    kind = thinking.take("type")
    if kind not in ("enabled", "disabled", "adaptive", "between_tools"):
        raise wrong("thinking.type", kind, "enabled, adaptive or disabled")
    thinking.integer("budget_tokens", 1, INT32)  # the model decides
    display = thinking.text("display")
    if display not in (None, "summarized", "omitted"):
        raise wrong("thinking.display", display, "summarized or omitted")
    thinking.finish()
    enabled = kind != "disabled"
    return enabled and display != "omitted", {} if kind == "adaptive" else dict.fromkeys(_THINKING, enabled)


def _read_format(output: Fields) -> dict[str, Any] | None:
    form = output.object("format")
    if form is None:
        return None
    kind, schema = form.take("type"), form.take("schema")
    form.finish()
    if kind != "json_schema":
        raise wrong("output_config.format.type", kind, "json_schema")
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _read_stops(members: Fields) -> list[str]:
    stops = members.array("stop_sequences") or []
    for index, stop in enumerate(stops):
        if type(stop) is not str or not stop:
            raise wrong(f"stop_sequences[{index}]", stop, "a string that is not empty")
    return stops
