"""The tools of a chat and its ``tool_choice``, which allows, requires or prescribes calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from conch.wire.openai.errors import ApiError
from conch.wire.openai.reading import Fields, wrong

_ANY_ARGUMENTS: Final = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools as passed to the chat template (``offered``, JSON), and how calls appear in the model's text.

    ``mode`` is ``none`` (the text is content), ``auto`` (marks identify calls), ``required`` (the text is a JSON list
    of calls) or ``named`` (the text is the arguments of ``name``). ``schema`` is the schema that the text must match.
    ``single`` allows only one call.
    """

    offered: bytes | None = None
    mode: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""
    names: frozenset[str] = frozenset()
    schema: dict[str, Any] | None = None
    single: bool = False


def read_tools(fields: Fields) -> Tools:
    """Read ``tools``, ``tool_choice`` and ``parallel_tool_calls``. Raises ApiError with the path of an error."""
    tools = fields.array("tools")
    choice = fields.take("tool_choice")
    single = not fields.flag("parallel_tool_calls", True)
    fields.refuse("functions", "function_call", hint=": use 'tools' and 'tool_choice'")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError("'tool_choice' asks for a tool, but 'tools' is missing", "tool_choice")
        return Tools()
    schemas = dict(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    offered, names = orjson.dumps(tools), frozenset(schemas)
    if choice is None or choice == "auto":
        return Tools(offered, "auto", names=names, single=single)
    if choice == "none":
        return Tools()
    if choice == "required":
        return Tools(offered, "required", names=names, schema=_calls_schema(schemas, single))
    name = _named(choice)
    if name not in schemas:
        raise ApiError(f"'tool_choice' names '{name}', which is not among 'tools'", "tool_choice")
    return Tools(offered, "named", name, names, schemas[name])


def _tool(tool: Any, path: str) -> tuple[str, dict[str, Any]]:
    if type(tool) is not dict or tool.get("type") != "function":
        raise wrong(f"{path}.type", tool.get("type") if type(tool) is dict else tool, "function")
    function = tool.get("function")
    if type(function) is not dict:
        raise wrong(f"{path}.function", function, "an object")
    name = function.get("name")
    if type(name) is not str or not name:
        raise ApiError(f"'{path}.function.name' must be a string", f"{path}.function.name")
    schema = function.get("parameters")
    if schema is not None and type(schema) is not dict:
        raise wrong(f"{path}.function.parameters", schema, "a JSON schema")
    return name, schema or _ANY_ARGUMENTS


def _calls_schema(schemas: dict[str, dict[str, Any]], single: bool) -> dict[str, Any]:
    """Return the JSON schema of a list of calls; definitions move to the top level, where references point."""
    definitions: dict[str, Any] = {}
    calls = []
    for name, schema in schemas.items():
        for key, definition in schema.get("$defs", {}).items():
            if definitions.setdefault(key, definition) != definition:
                raise ApiError(f"two of the tools define '{key}' differently", "tools")
        calls.append(_call_schema(name, {key: value for key, value in schema.items() if key != "$defs"}))
    items = {"anyOf": calls} if len(calls) > 1 else calls[0]
    schema = {"type": "array", "minItems": 1, "items": items}
    return schema | ({"maxItems": 1} if single else {}) | ({"$defs": definitions} if definitions else {})


def _call_schema(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": schema},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _named(choice: Any) -> str:
    function = choice.get("function") if type(choice) is dict and choice.get("type") == "function" else None
    name = function.get("name") if type(function) is dict else None
    if type(name) is not str:
        raise wrong("tool_choice", choice, "none, auto, required, or an object that names a function")
    return name
