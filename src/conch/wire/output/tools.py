"""The tools of a conversation, as the parsers of its output and structured output need them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from conch.core.sampling.structures import Structure, call_structure
from conch.wire.output.formats import CallGrammar

#: The types of Python's values in an enumeration.
_TYPES: Final = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", list: "array",
                 dict: "object"}  # fmt: skip
_NAMES: Final = frozenset(_TYPES.values())
#: The names of tools that every format can write.
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
#: The maximum depth of references and combinations in a schema that are followed.
_DEPTH: Final = 8


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools as passed to the chat template (``offered``, JSON), and how calls appear in the model's text.

    ``mode`` is ``none`` (the text is content), ``auto`` (marks identify calls), ``required`` (the text is a JSON list
    of calls) or ``named`` (the text is the arguments of ``name``). ``parameters`` has the types of each parameter of
    each tool, in order. ``schema`` is the schema that the text must match. ``single`` allows only one call.
    """

    offered: bytes | None = None
    mode: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""
    parameters: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict)
    schema: dict[str, Any] | None = None
    single: bool = False


def strict_calls(tools: list[Any], grammar: CallGrammar | None) -> Structure | None:
    """Return the structure of the calls that a model begins itself, for the ``tools`` of a chat.

    Arguments of a tool with ``strict`` follow its schema, those of others are any object. None if no tool is strict, or
    if the format of the model has no ``grammar``. Raises INVALID_ARG for a schema that is too large.
    """
    functions: list[Any] = [tool.get("function") if type(tool) is dict else None for tool in tools]
    if grammar is None or not any(type(function) is dict and function.get("strict") is True for function in functions):
        return None
    schemas: dict[str, Any] = {}
    for function in functions:
        name = function.get("name") if type(function) is dict else None
        if type(name) is not str or not _NAME.fullmatch(name):
            return None
        schema = function.get("parameters") if function.get("strict") is True else None
        schemas[name] = {"type": "object", **(schema if type(schema) is dict else {})}
    return call_structure(asdict(grammar), schemas, "tools")


def parameter_types(schema: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the JSON types that the schema of a tool's arguments allows for each parameter; none if it allows all."""
    properties = schema.get("properties")
    if type(properties) is not dict:
        return {}
    reader = _TypesReader(schema)
    return {name: reader.types(value) for name, value in properties.items()}


class _TypesReader:
    """Returns the types that the schemas in a document allow; reads each only once, however often it is referred to."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        #: The types by the identity of a schema and its depth.
        self._known: dict[tuple[int, int], list[str]] = {}

    def types(self, value: Any, depth: int = 0) -> list[str]:
        if type(value) is not dict or depth > _DEPTH:
            return []
        key = id(value), depth
        if key not in self._known:
            # Names that JSON Schema does not have allow all types; there may be any number of them.
            self._known[key] = [name for name in dict.fromkeys(self._read(value, depth)) if name in _NAMES]
        return self._known[key]

    def _read(self, value: dict[str, Any], depth: int) -> list[str]:
        if type(kind := value.get("type")) is str:
            return [kind, *(["null"] if value.get("nullable") is True else ())]
        if type(kind) is list:
            return [name for name in kind if type(name) is str]
        if type(values := value.get("enum")) is list:
            return [_TYPES[type(item)] for item in values if type(item) in _TYPES]
        if "const" in value:
            return [_TYPES[type(value["const"])]] if type(value["const"]) in _TYPES else []
        if type(reference := value.get("$ref")) is str:
            return self.types(_target(reference, self._root), depth + 1)
        for keyword in ("anyOf", "oneOf", "allOf"):
            if type(schemas := value.get(keyword)) is list:
                types = [self.types(schema, depth + 1) for schema in schemas]
                if all(types) or keyword == "allOf":
                    return [name for names in types for name in names]
                return []
        return []


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema for a reference within the document; None if it is elsewhere."""
    node: Any = root if reference.startswith("#") else None
    for step in reference.removeprefix("#").split("/")[1:]:
        node = node.get(step.replace("~1", "/").replace("~0", "~")) if type(node) is dict else None
    return node
