"""The tools of a chat, its ``tool_choice``, and parsers of tool calls in a model's text, which arrives in parts.

Formats: ``<tool_call>{…}</tool_call>`` (Hermes, Qwen), ``[TOOL_CALLS]`` with a list or ``name{…}`` (Mistral),
``<|python_tag|>{…}`` and bare ``{"name": …, "parameters": …}`` (Llama 3). Text that only resembles a call stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol
from urllib.parse import quote
from uuid import uuid4

import orjson

from conch.wire.openai.reading import ApiError, Fields, wrong

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


#: Keywords whose members are named schemas, and keywords whose values are no schemas.
_NAMED_SCHEMAS: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_VALUES: Final = frozenset({"const", "enum", "default", "example", "examples"})
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
    for part, reference in parts:
        for name in (part.get("$id"), part.get("id"), f"#{part.get('$anchor')}"):
            if type(name) is str and name.startswith("#"):
                anchors.setdefault(name, reference)
    for part, _ in parts:
        for keyword in {"$ref", "$dynamicRef"} & part.keys():
            target = part[keyword]
            if type(target) is str and (base or target) and (local := target.removeprefix(base))[:1] in ("#", ""):
                part[keyword] = anchors.get(local) or place + local[1:]
        if old and type(part.get("$ref")) is str:
            for keyword in part.keys() - {"$ref", "$defs", "definitions"}:
                del part[keyword]
    return schema


def _parts(schema: Any, place: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the schemas in a schema, and the references to them; ``place`` is the reference to the whole."""
    left: list[tuple[Any, str, bool]] = [(schema, place, False)]
    while left:
        node, reference, named = left.pop()
        if type(node) is list:
            left += [(item, f"{reference}/{index}", False) for index, item in enumerate(node)]
        elif type(node) is dict:
            if not named:
                yield node, reference
            left += [
                (value, f"{reference}/{_escaped(key)}", not named and key in _NAMED_SCHEMAS)
                for key, value in node.items()
                if named or key not in _VALUES
            ]


def _escaped(name: str) -> str:
    """Return a name as a step of a JSON pointer in a reference."""
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="$~")


def _named(choice: Any) -> str:
    function = choice.get("function") if type(choice) is dict and choice.get("type") == "function" else None
    name = function.get("name") if type(function) is dict else None
    if type(name) is not str:
        raise wrong("tool_choice", choice, "none, auto, required, or an object that names a function")
    return name


Delta = dict[str, Any]

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
#: Marks followed only by calls.
_REST: Final = ("[TOOL_CALLS]", "<|python_tag|>")
_MARKS: Final = (_OPEN, *_REST)
_MARK: Final = re.compile("|".join(map(re.escape, _MARKS)))
#: Prefixes of a call without a mark, without white space.
_BARE: Final = (
    '{"name":',
    '[{"name":',
    '{"type":"function",',
    '[{"type":"function",',
    '{"arguments":',
    '{"parameters":',
)
_NAMED: Final = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")
_BETWEEN: Final = re.compile(rf"(?:[\s;,]|{_MARK.pattern})*")
_SPACE: Final = re.compile(r"\s+")
_decoder: Final = json.JSONDecoder(strict=False)


class Parser(Protocol):
    """Converts parts of a text to deltas of a message: ``{"content": …}`` or ``{"tool_calls": [call]}``."""

    def add(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]:
        """Return the last deltas; called at the end of the text."""


def parser_for(tools: Tools) -> Parser | None:
    """Return the parser for a chat's tools, None if all text is content."""
    match tools.mode:
        case "auto":
            return CallParser(tools)
        case "required":
            return ListParser()
        case "named":
            return ArgumentsParser(tools.name)
    return None


def _delta(index: int, name: str, arguments: str) -> Delta:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "id": f"call_{uuid4().hex}", "type": "function", "function": function}]}


class CallParser:
    """Finds marks anywhere in the text, and a call of one of the tools without a mark at its beginning."""

    def __init__(self, tools: Tools) -> None:
        self._names = tools.names
        self._limit = 1 if tools.single else None
        self._pending = ""
        #: White space before a mark, which is content only if no call follows.
        self._space = ""
        self._state = "start"
        self._calls = 0

    def add(self, text: str) -> list[Delta]:
        self._pending += text
        return list(self._go())

    def finish(self) -> list[Delta]:
        pending, self._pending = self._pending, ""
        calls = None
        if self._state == "hermes":
            calls = _calls_in(pending.removeprefix(_OPEN))
        elif self._state == "rest":
            calls = _calls_in(_MARK.sub("", pending, count=1), named=True)
        elif self._state == "bare":
            calls = _calls_in(pending)
            if calls and not all(name in self._names for name, _ in calls):
                calls = None
        if calls:
            return self._emit(calls)
        # White space between and after calls is not content.
        return [{"content": self._space + pending}] if pending and not (self._calls and pending.isspace()) else []

    def _go(self) -> Iterator[Delta]:
        while True:
            before = (self._state, len(self._pending))
            match self._state:
                case "start":
                    self._begin()
                case "text":
                    yield from self._text()
                case "hermes":
                    yield from self._hermes()
            if (self._state, len(self._pending)) == before:
                return

    def _begin(self) -> None:
        """Choose between text and a call without a mark once enough text has arrived."""
        compact = _SPACE.sub("", self._pending[:200])
        if not compact:
            return
        if compact.startswith(_BARE):
            self._state = "bare"
        elif not any(start.startswith(compact) for start in _BARE):
            self._state = "text"

    def _text(self) -> Iterator[Delta]:
        match = _MARK.search(self._pending)
        if match is not None:
            content, self._pending = self._pending[: match.start()], self._pending[match.start() :]
            self._state = "hermes" if match.group() == _OPEN else "rest"
            shown = content.rstrip()
            self._space = content[len(shown) :]
            if shown:
                yield {"content": shown}
            return
        sure = len(self._pending) - _partial_mark(self._pending)
        content = self._pending[:sure]
        # White space before a call is not content, and a call may follow.
        sure = len(content.rstrip())
        if sure:
            yield {"content": self._pending[:sure]}
            self._pending = self._pending[sure:]

    def _hermes(self) -> Iterator[Delta]:
        end = self._pending.find(_CLOSE)
        if end < 0:
            return
        block, self._pending = self._pending[: end + len(_CLOSE)], self._pending[end + len(_CLOSE) :]
        space, self._space = self._space, ""
        self._state = "text"
        calls = _calls_in(block[len(_OPEN) : -len(_CLOSE)])
        if calls:
            yield from self._emit(calls)
        else:
            yield {"content": space + block}

    def _emit(self, calls: list[tuple[str, str]]) -> list[Delta]:
        deltas = []
        for name, arguments in calls:
            if self._limit is None or self._calls < self._limit:
                deltas.append(_delta(self._calls, name, arguments))
                self._calls += 1
        return deltas


class ListParser:
    """Parses a text that is a JSON list of calls."""

    def __init__(self) -> None:
        self._pending: list[str] = []

    def add(self, text: str) -> list[Delta]:
        self._pending.append(text)
        return []

    def finish(self) -> list[Delta]:
        text = "".join(self._pending)
        calls = _calls_in(text)
        if calls:
            return [_delta(index, *call) for index, call in enumerate(calls)]
        return [{"content": text}] if text else []


class ArgumentsParser:
    """Passes on a text that is the arguments of a single function, part by part."""

    def __init__(self, name: str) -> None:
        self._name = name

    def add(self, text: str) -> list[Delta]:
        if self._name:
            name, self._name = self._name, ""
            return [_delta(0, name, text)]
        return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}] if text else []

    def finish(self) -> list[Delta]:
        return self.add("") if self._name else []


def _partial_mark(text: str) -> int:
    """Return the number of characters at the end of ``text`` that may begin a mark."""
    for mark in _MARKS:
        start = text.rfind(mark[0], -len(mark) + 1)
        while start >= 0:
            if mark.startswith(text[start:]):
                return len(text) - start
            start = text.find(mark[0], start + 1)
    return 0


def _calls_in(text: str, *, named: bool = False) -> list[tuple[str, str]] | None:
    """Return the name and arguments (JSON) of each call in a text of objects or lists of objects; None otherwise.

    With ``named``, ``name{…}`` is also a call.
    """
    calls: list[tuple[str, str]] = []
    at = 0
    while (at := _between(text, at)) < len(text):
        name = _NAMED.match(text, at) if named else None
        try:
            value, at = _decoder.raw_decode(text, at if name is None else name.end())
        except (ValueError, RecursionError):
            return None
        for item in [{"name": name[1], "arguments": value}] if name is not None else _listed(value):
            call = _call(item)
            if call is None:
                return None
            calls.append(call)
    return calls


def _between(text: str, at: int) -> int:
    """Return the index after white space, separators and marks that may precede a call."""
    match = _BETWEEN.match(text, at)
    return match.end() if match is not None else at


def _listed(value: Any) -> list[Any]:
    return value if type(value) is list else [value]


def _call(value: Any) -> tuple[str, str] | None:
    if type(value) is not dict:
        return None
    if type(value.get("function")) is dict:
        value = value["function"]
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if type(name) is not str or not name or not _is_utf8(name):
        return None
    if type(arguments) is str and _is_utf8(arguments):
        return name, arguments
    try:
        return name, orjson.dumps({} if arguments is None else arguments).decode()
    except orjson.JSONEncodeError:  # numbers beyond 64 bits, lone surrogates
        return name, json.dumps(arguments)


def _is_utf8(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
