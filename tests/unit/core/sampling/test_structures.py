"""Structured output as it is asked for: what no engine should be given is refused before one compiles it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conch.core.errors import Code, ConchError
from conch.core.sampling.structures import Structure, parsed, response_format, structured_outputs


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"json": {"properties": {str(number): {} for number in range(2001)}}},
            "has a JSON schema with an object of 2001 members; at most 2000 are allowed",
        ),
        ({"json": nested(65)}, "has a JSON schema that is nested deeper than 64 levels"),
        ({"json": {"$ref": "#"}}, "has a JSON schema whose $ref '#' refers to itself"),
        (
            {"json": {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/b"}}}},
            "has a JSON schema whose $ref '#/$defs/b' refers to itself",
        ),
        ({"json": {"const": "\ud800"}}, "has half of a surrogate pair, which is not a character"),
        ({"json": {"properties": {"\udfff": {}}}}, "has half of a surrogate pair, which is not a character"),
        ({"regex": "\ud83d"}, "has half of a surrogate pair, which is not a character"),
        ({"choice": ["yes", "\ud83d"]}, "has half of a surrogate pair, which is not a character"),
        ({"regex": "(" * 65 + "a" + ")" * 65}, "has a regex that is nested deeper than 64 levels"),
        ({"grammar": "root ::= " + "(" * 30000}, "has a grammar that is nested deeper than 64 levels"),
        ({"choice": [str(number) for number in range(1025)]}, "has 1025 texts to choose from; at most 1024 are"),
        ({"regex": "a" * 300_000}, "has a regex of 300000 characters; at most 262144 are allowed"),
    ],
)
def test_what_no_engine_is_given(asked: dict[str, Any], message: str) -> None:
    for value in (asked, json.dumps(asked)):
        with pytest.raises(ConchError) as caught:
            structured_outputs("structured_outputs", value)
        assert caught.value.message.startswith(f"'structured_outputs' {message}")
        assert caught.value.code is Code.INVALID_ARG


def test_what_looks_like_it_but_is_not() -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}, "other": {"$ref": "#/nowhere"}}}
    assert structured_outputs("x", {"json": tree}) == Structure("json", json.dumps(tree))
    shared = {"anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/a~1b"}], "$defs": {"a/b": {"type": "null"}}}
    assert structured_outputs("x", {"json": shared}) == Structure("json", json.dumps(shared))
    beyond = {"anyOf": [{"type": "null"}], "$ref": f"#/anyOf/{'9' * 5000}"}
    assert structured_outputs("x", {"json": beyond}) == Structure("json", json.dumps(beyond))
    brackets = r"\(" * 100 + "(a)" * 100
    assert structured_outputs("x", {"regex": brackets}) == Structure("regex", brackets)
    assert structured_outputs("x", {"json_object": True}) == response_format("x", {"type": "json_object"})


def test_json_of_any_depth_is_refused_by_name() -> None:
    with pytest.raises(ConchError) as caught:
        parsed("input 'messages'", "[" * 100_000 + "]" * 100_000)
    assert (caught.value.message, caught.value.code) == ("input 'messages' is nested too deeply", Code.INVALID_ARG)
