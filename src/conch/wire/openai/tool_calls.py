"""The tools of a chat and its ``tool_choice``, and the schema that forces a call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

import orjson

from conch.wire.openai.reading import ApiError, Fields, wrong
from conch.wire.output.tools import Tools, parameter_types

_ANY_ARGUMENTS: Final = {"type": "object", "additionalProperties": True}


def read_tools(fields: Fields) -> Tools:
    """Read ``tools``, ``tool_choice`` and ``parallel_tool_calls``. Raises ApiError with the path of an error."""
    tools = fields.array("tools")
    choice = fields.take("tool_choice")
    single = not fields.flag("parallel_tool_calls", True)
    fields.refuse("functions", "function_call", hint=": use 'tools' and 'tool_choice'")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError("'tool_choice' requires a tool, but 'tools' is missing", "tool_choice")
        return Tools()
    schemas = dict(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    parameters = {name: parameter_types(schema) for name, schema in schemas.items()}
    offered = orjson.dumps(tools)
    if choice is None or choice == "auto":
        return Tools(offered, "auto", parameters=parameters, single=single)
    if choice == "none":
        return Tools()
    if choice == "required":
        return Tools(offered, "required", parameters=parameters, schema=_calls_schema(schemas, single), single=single)
    name = _named(choice)
    if name not in schemas:
        raise ApiError(f"'tool_choice' names '{name}', which is not among 'tools'", "tool_choice")
    return Tools(offered, "named", name, parameters, schemas[name])


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
    """Return the JSON schema of a list of calls, with the schema of each tool in ``$defs``."""
    definitions: dict[str, Any] = {}
    calls = []
    for name, schema in schemas.items():
        reference = f"#/$defs/{_escaped(name)}"
        definitions[name] = _embedded(schema, reference)
        calls.append(_call_schema(name, {"$ref": reference}))
    items = {"anyOf": calls} if len(calls) > 1 else calls[0]
    schema = {"type": "array", "minItems": 1, "items": items}
    return schema | ({"maxItems": 1} if single else {}) | {"$defs": definitions}


def _call_schema(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": schema},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


#: Keywords whose members are named schemas, and keywords whose values are not schemas.
_NAMED_SCHEMAS: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_VALUES: Final = frozenset({"const", "enum", "default", "example", "examples"})
#: Maximum length of the references to all parts of a schema together (characters).
_LONGEST_REFERENCES: Final = 16 << 20
#: Drafts of JSON Schema in which ``$ref`` hides the keywords beside it.
_OLD_DRAFTS: Final = re.compile("draft-0[3-7]")


def _embedded(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a schema as a part of another document: ``place`` is the reference to it there.

    References within the schema begin with ``place``. The identifier and the draft, which are those of a document, are
    left out; in earlier drafts, so are the keywords that a ``$ref`` hides.
    """
    schema = orjson.loads(orjson.dumps(schema))
    draft, identifier = schema.pop("$schema", None), schema.get("$id") or schema.get("id")
    old = type(draft) is str and _OLD_DRAFTS.search(draft) is not None
    base = identifier.rstrip("#") if type(identifier) is str and not identifier.startswith("#") else ""
    if base:
        schema.pop("$id", None)
        schema.pop("id", None)
    parts = list(_parts(schema, place))
    anchors: dict[str, str] = {}
    length = 0
    for part, reference in parts:
        for name in (part.get("$id"), part.get("id"), f"#{part.get('$anchor')}"):
            if type(name) is str and name.startswith("#"):
                anchors.setdefault(name, reference)
    for part, _ in parts:
        for keyword in {"$ref", "$dynamicRef"} & part.keys():
            target = part[keyword]
            if type(target) is str and (base or target) and (local := target.removeprefix(base))[:1] in ("#", ""):
                part[keyword] = anchors.get(local) or place + local[1:]
                length += len(part[keyword])
                _check_length(length)
        if old and type(part.get("$ref")) is str:
            for keyword in part.keys() - {"$ref", "$defs", "definitions"}:
                del part[keyword]
    return schema


def _parts(schema: Any, place: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the schemas in a schema, and the references to them; ``place`` is the reference to the whole."""
    #: Each with the reference to the schema or object around it, and the step from there.
    left: list[tuple[Any, str, str, bool]] = [(schema, place, "", False)]
    length = 0
    while left:
        node, reference, step, named = left.pop()
        reference += step
        length += len(reference)
        _check_length(length)
        if type(node) is list:
            left += [(item, reference, f"/{index}", False) for index, item in enumerate(node)]
        elif type(node) is dict:
            if not named:
                yield node, reference
            left += [
                (value, reference, f"/{_escaped(key)}", not named and key in _NAMED_SCHEMAS)
                for key, value in node.items()
                if named or key not in _VALUES
            ]


def _check_length(length: int) -> None:
    """Refuse references of together more than ``_LONGEST_REFERENCES`` characters, which long names can have."""
    if length > _LONGEST_REFERENCES:
        raise ApiError("the schemas of 'tools' have names that are too long", "tools")


def _escaped(name: str) -> str:
    """Return a name as a step of a JSON pointer in a reference."""
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="$~")


def _named(choice: Any) -> str:
    function = choice.get("function") if type(choice) is dict and choice.get("type") == "function" else None
    name = function.get("name") if type(function) is dict else None
    if type(name) is not str:
        raise wrong("tool_choice", choice, "none, auto, required, or an object that names a function")
    return name
