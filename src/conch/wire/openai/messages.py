"""The messages of a chat, checked, and converted to what the chat templates of open models expect.

The role ``developer`` becomes ``system`` and ``function`` becomes ``tool``; content becomes text, and the arguments of
tool calls become objects.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from conch.wire.openai.errors import ApiError
from conch.wire.openai.reading import Fields, wrong

_ROLES: Final = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip
#: Members of OpenAI's answers that clients send back and templates do not know.
_DROPPED: Final = ("annotations", "audio", "function_call", "refusal")


def read_messages(fields: Fields) -> bytes:
    """Read the messages; returns them as JSON.  Raises ApiError, naming what is wrong by its path."""
    messages = fields.array("messages")
    if not messages:
        raise ApiError("'messages' must be an array of at least one message", "messages")
    return orjson.dumps([_message(message, f"messages[{index}]") for index, message in enumerate(messages)])


def _message(message: Any, path: str) -> dict[str, Any]:
    if type(message) is not dict:
        raise wrong(path, message, "an object")
    role = message.get("role")
    if type(role) is not str or role not in _ROLES:
        raise wrong(f"{path}.role", role, f"one of {', '.join(_ROLES)}")
    calls = message.get("tool_calls")
    content = message.get("content")
    if content is None and not calls and role != "assistant":
        raise ApiError(f"'{path}.content' is missing", f"{path}.content", reason="missing_required_parameter")
    read = {key: value for key, value in message.items() if value is not None and key not in _DROPPED}
    read["role"] = _ROLES[role]
    read["content"] = _content(content, f"{path}.content")
    if calls:
        if type(calls) is not list:
            raise wrong(f"{path}.tool_calls", calls, "an array")
        read["tool_calls"] = [_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)]
    else:
        read.pop("tool_calls", None)
    return read


def _content(content: Any, path: str) -> str:
    if content is None:
        return ""
    if type(content) is str:
        return content
    if type(content) is not list:
        raise wrong(path, content, "a string or an array of parts")
    return "\n".join([_part(part, f"{path}[{index}]") for index, part in enumerate(content)])


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if type(part) is dict else None
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise wrong(f"{path}.type", kind, "text: models here read nothing else")
    text = part.get("refusal" if kind == "refusal" else "text")
    if type(text) is not str:
        raise wrong(f"{path}.text", text, "a string")
    return text


def _call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if type(call) is dict else None
    if type(function) is not dict or type(function.get("name")) is not str:
        raise ApiError(f"'{path}.function.name' must be a string", f"{path}.function.name")
    arguments = function.get("arguments")
    if type(arguments) is str:
        try:
            arguments = orjson.loads(arguments) if arguments else {}
        except orjson.JSONDecodeError:
            pass  # what the model wrote; the template shows it as it is
    return {**call, "function": {**function, "arguments": arguments}}
