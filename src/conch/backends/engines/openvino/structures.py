"""Refuses structures that OpenVINO GenAI's grammar compiler would ignore in part, or compile for minutes.

Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from conch.backends.engines.openvino.automata import has_at_most
from conch.errors import invalid, unsupported
from conch.sampling.structures import Structure

#: The characters of a structure, with all of its repetitions spelt out: compiling takes 1 ms each.
MOST_STATES: Final = 2000
#: The lengths of strings in a JSON schema, which take a third of that.
MOST_LENGTH: Final = 8000
#: Properties that an object may leave out: compiling takes 25 us for each pair of them.
MOST_OPTIONAL: Final = 300
#: States of an expression's automaton that need not be in proportion to its characters: 10 ms each, at worst.
MOST_EXTRA_STATES: Final = 128
#: What a large class of characters counts as.
_LARGE: Final = 10

#: Keywords of JSON schemas that the compiler ignores (of ``allOf``, all schemas but one).
_IGNORED: Final = (
    "not", "if", "dependentRequired", "dependentSchemas", "multipleOf", "uniqueItems", "contains", "minContains",
    "maxContains",
)  # fmt: skip
#: Keywords whose values are schemas: objects of schemas by name, and lists or single schemas.
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
_WITHIN: Final = (
    "allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalProperties", "unevaluatedProperties",
    "unevaluatedItems", "propertyNames",
)  # fmt: skip
#: What the compiler of 2026.4 takes for one character: it writes the first one as an escape of any length.
_MISSPELT: Final = re.compile(r"(?:[\u0080-\u00ff]|\\u00[89a-fA-F][0-9a-fA-F])[0-9a-fA-F]")
_PIECES: Final = re.compile(
    r"""(?P<open>\()|(?P<close>\))|\{(?P<least>\d*),?(?P<most>\d*)\}|(?P<large>\\[wWDSpP])|\\.|"(?:\\.|[^"\\])*"|"""
    r"""\[(?:\\.|[^\]\\])*\]|.""",
    re.DOTALL,
)


def check_structure(structure: Structure) -> None:
    """Raise UNSUPPORTED for a structure that the compiler would ignore in part, INVALID_ARG for too large a one."""
    if structure.kind in ("json", "grammar") and _MISSPELT.search(structure.text):
        raise unsupported(
            "engine 'openvino' does not have structures with a character of U+0080 to U+00FF before a hexadecimal digit"
        )
    if structure.kind == "json":
        try:
            schema = json.loads(structure.text)
        except ValueError:
            return  # for the compiler to say
        _check_schema(schema)
    elif structure.kind != "choice":
        _check_states(structure.kind, structure.text)


def _check_schema(schema: Any) -> None:
    length = pairs = 0
    for node in _schemas(schema):
        for keyword in _IGNORED:
            if node.get(keyword) not in (None, False):
                raise unsupported(f"engine 'openvino' does not have JSON schemas with '{keyword}'")
        if isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1:
            raise unsupported("engine 'openvino' does not have JSON schemas with 'allOf' of more than one")
        if isinstance(reference := node.get("$ref"), str) and not reference.startswith("#"):
            raise unsupported("engine 'openvino' does not have JSON schemas with a '$ref' to another document")
        if isinstance(pattern := node.get("pattern"), str):
            _check_states("pattern", pattern)
        pairs += _optional(node) ** 2
        lengths = (node.get("minLength"), node.get("maxLength"))
        length += max(bound if isinstance(bound, int) else 0 for bound in lengths)
    if pairs > MOST_OPTIONAL**2:
        raise invalid(
            f"the JSON schema has objects with more optional properties than engine 'openvino' compiles, which is "
            f"{MOST_OPTIONAL} in one object: name those that are always there in 'required'"
        )
    if length > MOST_LENGTH:
        raise invalid(
            f"the lengths of strings in the JSON schema sum up to {length}; engine 'openvino' compiles at most "
            f"{MOST_LENGTH}"
        )


def _optional(node: Mapping[str, Any]) -> int:
    """How many properties an object may leave out."""
    properties, required = node.get("properties"), node.get("required")
    named = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return len(properties.keys() - named) if isinstance(properties, dict) else 0


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and all schemas within it."""
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            yield node
            for keyword in _BY_NAME:
                if isinstance(named := node.get(keyword), dict):
                    left += named.values()
            for keyword in _WITHIN:
                inner = node.get(keyword)
                left += inner if isinstance(inner, list) else [inner]


def _check_states(kind: str, text: str) -> None:
    states = _states(text)
    if states > MOST_STATES:
        raise invalid(
            f"the {kind} has {states} characters with its repetitions; engine 'openvino' compiles at most {MOST_STATES}"
        )
    if kind != "grammar" and not has_at_most(max(MOST_EXTRA_STATES, 2 * states + 2), text):
        raise invalid(
            f"the {kind} makes an automaton that is too large for engine 'openvino', as a long repetition does after "
            "another that may end anywhere"
        )


def _states(text: str) -> int:
    """The characters of a regular expression or grammar, with each repetition spelt out."""
    sums, last = [0], 0
    for piece in _PIECES.finditer(text):
        if piece["open"]:
            sums.append(0)
        elif piece["close"]:
            if len(sums) > 1:
                last = sums.pop()
                sums[-1] += last
        elif piece["least"] or piece["most"]:
            repeated = last * int(min(max(float(piece["most"] or 0), float(piece["least"] or 0), 1), 1e9))
            sums[-1] += repeated - last
            last = repeated
        else:
            last = _LARGE if piece["large"] else 1
            sums[-1] += last
    return sum(sums)
