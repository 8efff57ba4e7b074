"""Structures that the engine over OpenVINO GenAI does not compile: those that it would ignore, or never finish."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conch.backends.engines.openvino.grammars import check_structure
from conch.core.errors import Code, ConchError
from conch.core.sampling.structures import Structure


@pytest.mark.parametrize(
    ("kind", "text", "states"),
    [
        ("regex", "([a-z]{1,200}){1,200}", 40000),
        ("regex", "x.{0,50000}y", 50002),
        ("regex", r"(\w|\d){1,500}", 6000),
        ("regex", "((a{20}){20}b){20}", 8020),
        ("grammar", 'root ::= ("ab" | [0-9]){1000}', 5009),
    ],
)
def test_what_is_too_large(kind: str, text: str, states: int) -> None:
    with pytest.raises(ConchError) as caught:
        check_structure(Structure(kind, text))
    assert caught.value.message == (
        f"the {kind} has {states} characters with its repetitions; engine 'openvino' compiles at most 2000"
    )
    assert caught.value.code is Code.INVALID_ARG


@pytest.mark.parametrize("text", [".*a.{20}", "(a|b)*a(a|b){15}", "x(.*[0-9].{30})+"])
def test_expressions_whose_automata_explode(text: str) -> None:
    with pytest.raises(ConchError, match="the regex makes an automaton that is too large for engine 'openvino'"):
        check_structure(Structure("regex", text))
    with pytest.raises(ConchError, match="the pattern makes an automaton"):
        check_structure(Structure("json", json.dumps({"pattern": text})))


@pytest.mark.parametrize(
    "text",
    [
        r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:\d{2})",
        r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,10}",
        "[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}",
        r"[^\n]{1,1000}\s*",
        "|".join(f"value {number}" for number in range(150)),
    ],
)
def test_expressions_that_people_write(text: str) -> None:
    check_structure(Structure("regex", text))


def test_properties_that_may_be_left_out_are_limited() -> None:
    schema: dict[str, Any] = {"properties": {f"p{number}": {"type": "string"} for number in range(301)}}
    with pytest.raises(ConchError, match="more optional properties than engine 'openvino' compiles, which is 300 in"):
        check_structure(Structure("json", json.dumps(schema)))
    check_structure(Structure("json", json.dumps({**schema, "required": ["p0"]})))


@pytest.mark.parametrize("text", ["a*", r"\d{4}-\d{2}", ")))(((", "{", "{,}", "[(]{3}", r"\({3}\)", '"(((" {3}'])
def test_what_is_not(text: str) -> None:
    check_structure(Structure("regex", text))


def test_numbers_of_any_length() -> None:
    with pytest.raises(ConchError, match="with its repetitions"):
        check_structure(Structure("regex", f"a{{{'9' * 5000}}}"))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"items": {"not": {"type": "null"}}}, "engine 'openvino' does not support JSON schemas with 'not'"),
        ({"properties": {"a": {"multipleOf": 3}}}, "engine 'openvino' does not support JSON schemas with 'multipleOf'"),
        (
            {"anyOf": [{"allOf": [{"type": "string"}, {"type": "number"}]}]},
            "engine 'openvino' does not support JSON schemas with 'allOf' of more than one",
        ),
        (
            {"$defs": {"a": {"$ref": "http://127.0.0.1/a"}}},
            "engine 'openvino' does not support JSON schemas with a '$ref' to another document",
        ),
        (
            {"properties": {str(name): {"maxLength": 5000} for name in range(2)}},
            "the lengths of strings in the JSON schema sum up to 10000; engine 'openvino' compiles at most 8000",
        ),
        ({"pattern": "(a{99}){99}"}, "the pattern has 9801 characters with its repetitions; engine 'openvino' "),
    ],
)
def test_schemas_that_would_be_ignored_or_are_too_large(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ConchError) as caught:
        check_structure(Structure("json", json.dumps(schema)))
    assert caught.value.message.startswith(message)


def test_names_and_values_are_no_keywords() -> None:
    schema = {"properties": {"not": {"type": "string"}, "if": {"uniqueItems": False}}, "enum": [{"contains": 1}]}
    check_structure(Structure("json", json.dumps(schema)))
    check_structure(Structure("json", "true"))
