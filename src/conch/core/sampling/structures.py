"""Parses and validates the structured output parameters of requests, before an engine compiles them.

Pure functions, used by workers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from conch.core.errors import invalid

#: The kinds of structured output.
KINDS: Final = ("json", "regex", "grammar", "choice")
#: The kind of the structure of tool calls within a text that is otherwise free; no parameter names it.
TOOL_CALL: Final = "tool call"
#: The in-flight batcher's names of the kinds it supports, in ``guided_decoding_guide_type``.
GUIDE_TYPES: Final[Mapping[str, str]] = {"json": "json_schema", "regex": "regex", "grammar": "ebnf_grammar"}

#: Limits of structures, because compiling a large one delays all other requests of an engine.
MAX_LENGTH: Final = 1 << 18
MAX_CHOICES: Final = 1024
MAX_DEPTH: Final = 64
MAX_PROPERTIES: Final = 2000


@dataclass(frozen=True, slots=True)
class Structure:
    """A constraint on generated text.

    ``kind`` is one of ``KINDS``; ``text`` is the JSON schema (as JSON), the regular expression, the EBNF grammar, or a
    JSON list of texts. For ``TOOL_CALL``, it is what ``call_structure`` writes.
    """

    kind: str
    text: str


#: Matches brackets, and escaped characters, which do not count as brackets.
_BRACKETS: Final = re.compile(r"\\.|[()]", re.DOTALL)
#: An index into a list of a ``$ref``; no schema has a longer list.
_INDEX: Final = re.compile(r"[0-9]{1,9}")
_ANY_OBJECT: Final = Structure("json", '{"type": "object"}')


def json_of(name: str, value: Any) -> Any:
    """Return ``value``, parsed as JSON if it is a text. Raises INVALID_ARG for a text that is not JSON."""
    return parsed(f"'{name}'", value) if isinstance(value, str) else value


def parsed(label: str, text: str) -> Any:
    """Parse a JSON text. Raises INVALID_ARG if it is not JSON; ``label`` is its name in the error."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise invalid(f"{label} is not valid JSON: {error}") from None
    except RecursionError:
        raise invalid(f"{label} is nested too deeply") from None


def structured_outputs(name: str, value: Any) -> Structure | None:
    """Parse vLLM's ``structured_outputs`` (formerly ``guided_decoding``): an object with one kind of structure."""
    document = json_of(name, value)
    if document is None:
        return None
    kinds = (*KINDS, "json_object")
    constraints = (
        {key: item for key, item in document.items() if item is not None} if isinstance(document, dict) else {}
    )
    if len(constraints) != 1 or not constraints.keys() <= set(kinds):
        raise invalid(f"'{name}' must be an object with exactly one of {', '.join(kinds)}")
    [(kind, content)] = constraints.items()
    if kind == "json_object":
        return _ANY_OBJECT if content else None
    return structure_of(kind, content, name)


def response_format(name: str, value: Any) -> Structure | None:
    """Parse OpenAI's ``response_format``."""
    document = json_of(name, value)
    kind = document.get("type") if isinstance(document, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _ANY_OBJECT
    if kind == "json_schema" and isinstance(document.get("json_schema"), dict):
        return structure_of("json", document["json_schema"].get("schema"), name)
    raise invalid(f"'{name}' must be of type text, json_object or json_schema (with its json_schema)")


def structure_of(kind: str, content: Any, name: str) -> Structure:
    """Create a structure of one of ``KINDS`` from a JSON value or its text. Raises INVALID_ARG, naming ``name``."""
    if kind == "json":
        schema = json_of(name, content)
        if not isinstance(schema, dict | bool):
            raise invalid(f"'{name}' must be a JSON schema, which is an object")
        _check_schema(schema, name)
        return _bounded(Structure(kind, json.dumps(schema)), name)
    if kind == "choice":
        texts = json_of(name, content)
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise invalid(f"'{name}' must be a list of texts to choose from")
        if len(texts) > MAX_CHOICES:
            raise invalid(f"'{name}' has {len(texts)} texts to choose from; at most {MAX_CHOICES} are allowed")
        for text in texts:
            _check_unicode(text, name)
        return _bounded(Structure(kind, json.dumps(texts)), name)
    if not isinstance(content, str) or not content:
        raise invalid(f"'{name}' must be a text with a {'regular expression' if kind == 'regex' else kind}")
    _check_unicode(content, name)
    if _nesting(content) > MAX_DEPTH:
        raise invalid(f"'{name}' has a {kind} that is nested deeper than {MAX_DEPTH} levels")
    return _bounded(Structure(kind, content), name)


def call_structure(grammar: Mapping[str, str], schemas: Mapping[str, Any], name: str) -> Structure:
    """Create the structure of tool calls. Raises INVALID_ARG, naming ``name``.

    ``grammar`` has the members of ``CallGrammar``, and ``schemas`` the JSON schemas of the arguments by tool.
    """
    for schema in schemas.values():
        _check_schema(schema, name)
    return _bounded(Structure(TOOL_CALL, json.dumps({**grammar, "schemas": schemas})), name)


def _bounded(structure: Structure, name: str) -> Structure:
    if len(structure.text) > MAX_LENGTH:
        raise invalid(
            f"'{name}' has a {structure.kind} of {len(structure.text)} characters; at most {MAX_LENGTH} are allowed"
        )
    return structure


def _nesting(text: str) -> int:
    """Return the maximum depth of nested parentheses."""
    depth = deepest = 0
    for bracket in _BRACKETS.findall(text):
        depth = max(0, depth + (1 if bracket == "(" else -1 if bracket == ")" else 0))
        deepest = max(deepest, depth)
    return deepest


def _check_unicode(text: str, name: str) -> None:
    """Raise INVALID_ARG for an unpaired surrogate, which JSON can encode but output cannot contain."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(f"'{name}' has half of a surrogate pair, which is not a character") from None


def _check_schema(schema: Any, name: str) -> None:
    """Raise INVALID_ARG for a schema that is nested too deeply, has too large an object, or has a circular ``$ref``."""
    for node, depth in _nodes(schema):
        if depth > MAX_DEPTH:
            raise invalid(f"'{name}' has a JSON schema that is nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, str):
            _check_unicode(node, name)
        elif isinstance(node, dict):
            if len(node) > MAX_PROPERTIES:
                raise invalid(
                    f"'{name}' has a JSON schema with an object of {len(node)} members; at most {MAX_PROPERTIES} "
                    "are allowed"
                )
            for key in node:
                _check_unicode(key, name)
    for node, _ in _nodes(schema):
        seen: set[str] = set()
        while isinstance(node, dict) and isinstance(reference := node.get("$ref"), str):
            if reference in seen:
                raise invalid(f"'{name}' has a JSON schema whose $ref '{reference[:80]}' refers to itself")
            seen.add(reference)
            node = _target(schema, reference)


def _nodes(document: Any) -> Iterator[tuple[Any, int]]:
    """Yield each value in a JSON document with its depth."""
    left = [(document, 0)]
    while left:
        node, depth = left.pop()
        yield node, depth
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        left += [(value, depth + 1) for value in inner]


def _target(schema: Any, reference: str) -> Any:
    """Return the node that a ``$ref`` within the schema refers to; None for other references, which engines reject."""
    if not reference.startswith("#"):
        return None
    node = schema
    for step in filter(None, reference[1:].split("/")):
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and _INDEX.fullmatch(key) and int(key) < len(node):
            node = node[int(key)]
        elif isinstance(node, dict):
            node = node.get(key)
        else:
            return None
    return node
