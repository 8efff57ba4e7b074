"""JSON schemas as grammars: texts that are drawn from them are valid, and what is not supported is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from conch.backends.batching.grammars import Matcher
from conch.backends.batching.json_schemas import rewrite
from conch.core.errors import Code, ConchError
from tests.unit.backends.batching import schemas

COMPILER = schemas.compiler()
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_4 = "http://json-schema.org/draft-04/schema#"

OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": False}
NULL = {"type": "null"}
INTEGER = {"type": "integer"}

KEYWORDS: dict[str, Any] = {
    "names": {
        **OBJECT,
        "properties": dict.fromkeys(("größe", 'a"b', "c\\d", "e\nf", "漢/😀", "\u0001", "\x7f", ""), NULL),
        "required": ["größe", 'a"b', "c\\d", "e\nf", "\u0001", "\x7f"],
    },
    "additional": {
        "type": "object",
        "properties": {"a": INTEGER, "é": NULL},
        "additionalProperties": {"type": "boolean"},
    },
    "required only": {"type": "object", "required": ["q"], "additionalProperties": {"type": "boolean"}},
    "patterns": {**OBJECT, "patternProperties": {"^[a-c]{1,3}$": NULL, r"\d": {"type": "boolean"}}},
    "pattern and name": {
        **OBJECT,
        "properties": {"ab": {"type": "string"}},
        "patternProperties": {"a": {"maxLength": 2}},
    },
    "pattern and others": {"type": "object", "patternProperties": {'^"': INTEGER}, "additionalProperties": NULL},
    "names by pattern": {"type": "object", "propertyNames": {"pattern": "^[ab]+$"}, "additionalProperties": INTEGER},
    "names by enum": {"type": "object", "propertyNames": {"enum": ["a.b", "c|d"]}},
    "known names by pattern": {
        "type": "object",
        "properties": {"a": NULL, "b": NULL, "c": NULL},
        "propertyNames": {"pattern": "[ad]"},
        "additionalProperties": {"type": "boolean"},
    },
    "one property": {**OBJECT, "properties": {"a": INTEGER, "b": INTEGER}, "minProperties": 1},
    "few properties": {"type": "object", "maxProperties": 2, "additionalProperties": INTEGER},
    "enough required": {"type": "object", "required": ["a", "b"], "minProperties": 2},
    "dependent": {"type": "object", "properties": {"a": NULL, "b": NULL}, "dependentRequired": {"a": ["b"]}},
    "dependent schemas": {
        "type": "object",
        "properties": {"a": NULL, "b": True},
        "dependentSchemas": {"a": {"properties": {"b": INTEGER}, "required": ["b"]}},
    },
    "integer": INTEGER,
    "number": {"type": "number"},
    "integer bounds": {"type": "integer", "minimum": -17, "exclusiveMaximum": 1234.5},
    "number bounds": {"type": "number", "exclusiveMinimum": -1.25, "maximum": 3.5},
    "tiny bounds": {"type": "number", "exclusiveMinimum": -0.001, "maximum": 1e-7},
    "64 bits": {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
    "close integers": {"type": "integer", "minimum": 2**53 - 4, "maximum": 2**53 - 1},
    "large maximum": {"type": "number", "minimum": -1e300, "maximum": 1e25},
    "above exact": {"type": "integer", "maximum": 2**53 + 3, "minimum": 2**53 - 1},
    "multiple": {"type": "integer", "multipleOf": 7},
    "decimal multiple": {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 10},
    "two multiples": {"allOf": [{"multipleOf": 4}, {"multipleOf": 0.6}], "type": "number"},
    "draft 4 bounds": {"$schema": DRAFT_4, "type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 2},
    "length": {"type": "string", "minLength": 2, "maxLength": 5},
    "length and pattern": {"type": "string", "maxLength": 5, "pattern": "a"},
    "constants": {"enum": [1, "a", None, [1, {"b": []}], {'k"': "é\n"}, True, "\u2028", "", 1.5, 1e-9, -3]},
    "large constants": {"enum": [2**62, 1e20, -(10**15)]},
    "constant and type": {"enum": ["a", "bb", 3], "type": "string", "maxLength": 1},
    "constant and format": {"enum": ["2020-02-30", "2020-02-29", 7], "format": "date"},
    "one of types": {"oneOf": [{"type": "string"}, INTEGER, {"type": ["null", "boolean"]}]},
    "one of constants": {"oneOf": [{"const": 1}, {"enum": [2, "2"]}, {"const": True}]},
    "one of lengths": {"type": "string", "oneOf": [{"maxLength": 2}, {"minLength": 4, "maxLength": 5}]},
    "one of references": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": NULL, "b": INTEGER}},
    "one of kinds": {
        "oneOf": [
            {"$ref": "#/$defs/leaf"},
            {**OBJECT, "properties": {"kind": {"const": "node"}, "next": {"$ref": "#"}}, "required": ["kind", "next"]},
        ],
        "$defs": {"leaf": {"type": "object", "properties": {"kind": {"const": "leaf"}}, "required": ["kind"]}},
    },
    "one of keys": {"oneOf": [{**OBJECT, "properties": {k: NULL}, "required": [k]} for k in "abc"]},
    "one of requirements": {
        "type": "object",
        "properties": {"a": NULL, "b": NULL, "c": NULL},
        "oneOf": [{"required": ["a"]}, {"required": ["b", "c"]}, {"required": ["c", "d"]}],
        "additionalProperties": False,
    },
    "one of closed": {"oneOf": [{**OBJECT, "properties": {name: INTEGER}} for name in "abc"]},
    "any and one of": {"anyOf": [{"type": "string"}, INTEGER], "oneOf": [{"type": "string"}, NULL]},
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
            {"properties": {"a": {"maximum": 5}, "b": {"type": "string"}}, "required": ["b"]},
        ]
    },
    "all of closed": {"allOf": [{**OBJECT, "properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}]},
    "array": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [INTEGER, {"type": "string"}], "items": False, "minItems": 1},
    "tuple of draft 7": {"$schema": DRAFT_7, "type": "array", "items": [INTEGER, NULL], "additionalItems": False},
    "recursion": {
        **OBJECT,
        "properties": {"value": INTEGER, "next": {"anyOf": [{"$ref": "#"}, NULL]}},
        "required": ["value", "next"],
    },
    "reference and limit": {"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer", "maximum": 5}}},
    "reference of draft 7": {
        "$schema": DRAFT_7,
        "$ref": "#/definitions/a",
        "maximum": 0,
        "definitions": {"a": INTEGER},
    },
    "reference with a draft that has another identifier": {
        "$schema": DRAFT_7.replace("http:", "https:"),
        "$ref": "#/definitions/a",
        "maximum": 0,
        "definitions": {"a": INTEGER},
    },
    "escaped references": {"$ref": "#/$defs/a~1b%20<c>", "$defs": {"a/b <c>": INTEGER}},
    "anchor": {
        "$id": "http://example.com/s",
        "$ref": "http://example.com/s#x",
        "$defs": {"a": {"$anchor": "x", **NULL}},
    },
    "unique": {"type": "array", "items": {"enum": ["a", "b", 1, 1.0]}, "uniqueItems": True, "minItems": 2},
    "unique references": {
        "type": ["array", "null"],
        "items": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "boolean"}]},
        "uniqueItems": True,
        "$defs": {"a": {"const": {"x": 1}}},
    },
    "unique texts": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/a"}, "b": {"items": {"$ref": "#/$defs/a"}, "type": "array"}},
        "required": ["a", "b"],
        "$defs": {
            "a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 2, "maxItems": 4}
        },
    },
    "unique text constants": {
        "type": "array",
        "items": {"enum": ["a", "ab", "abc", 'a"b', "a\\", "é", "", "b", "c", "true"]},
        "uniqueItems": True,
        "minItems": 8,
    },
    "unique of many": {"items": {"enum": list(range(19))}, "uniqueItems": True, "maxItems": 2, "type": "array"},
    "unique of none": {"items": False, "uniqueItems": True, "type": "array"},
    "unique of one": {"items": {"type": "string"}, "uniqueItems": True, "maxItems": 1, "type": "array"},
    "types": {"type": ["integer", "string", "null"], "maxLength": 1, "maximum": 3},
    "annotations": {"type": "string", "format": "int32", "title": "a", "x-order": 3, "then": False, "deprecated": True},
    "anything": {},
    "true": True,
}
PATTERNS = (
    "^a|b$", r"^\w+\s\S\D\W$", r'^"\\\n\t["]\/\u00e9é$', ".", "^.*$", "(^a|^b)c", "^[^a]{2}$", r"^\-\_\@\%$",
    "^[[a]$", "^a b#c$", r"^\x41[\x00-\x7f]$", r"^[^\W\d]{2,3}$", r"^[\]\\^-]+$",
    r"^[^\s]{3}$", r"^[\D]{2}[^\S]$", "^a*?b$", "^[a-]$", r"^[&&~~]$", "^(?:a|b){2}$",
)  # fmt: skip
FORMATS = (
    "date", "time", "date-time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uuid",
    "uri", "iri", "uri-reference", "iri-reference", "uri-template", "json-pointer", "relative-json-pointer",
)  # fmt: skip
DRAWN = {
    **KEYWORDS,
    **{pattern: {"type": "string", "pattern": pattern} for pattern in PATTERNS},
    **{name: {"type": "string", "format": name} for name in FORMATS},
}


@pytest.mark.parametrize("name", DRAWN)
def test_texts_that_are_drawn_are_valid(name: str) -> None:
    compiled = schemas.compiled(COMPILER, DRAWN[name])
    validator = schemas.judge(DRAWN[name])
    random = np.random.default_rng(7)
    texts = [schemas.draw(compiled, random) for _ in range(20)]
    assert not [fault for text in texts if text is not None and (fault := schemas.fault(validator, text))]
    assert any(text is not None for text in texts)


def accepts(schema: Any, text: str) -> bool:
    """Whether the grammar of a schema allows a text."""
    state = Matcher(schemas.compiled(COMPILER, schema)).state
    data = list(text.encode())
    return bool(state.try_consume_tokens(data) == len(data) and state.is_accepting())


@pytest.mark.parametrize(
    ("schema", "allowed", "not_allowed"),
    [
        ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2000-02-29"'], ['"2023-02-29"', '"1900-02-29"']),
        ({"type": "string", "format": "date"}, ['"0001-12-31"'], ['"0000-01-01"', '"2023-04-31"', '"2023-13-01"']),
        ({"type": "string", "format": "time"}, ['"23:59:59Z"'], ['"24:00:00Z"', '"23:59:60Z"', '"23:59:59"']),
        ({"type": "string", "format": "date-time"}, ['"2024-02-29T00:00:00.5+01:00"'], ['"2023-02-30T00:00:00Z"']),
        ({"type": "string", "format": "uri-reference"}, ['"/a/b#c"', '"http://a/"'], ['"a b"']),
        (KEYWORDS["additional"], ['{"b": true}', '{"a": 1, "a/b": true}'], ['{"\\u0061": true}', '{"a": true}']),
        (KEYWORDS["additional"], ['{"é": null}'], ['{"\\u00e9": true}', '{"\\ud800": true}']),
        ({"type": "array", "items": INTEGER}, ["[ 1, 2\n    , 3 ]"], ["[  ]", "[\n\n1]"]),
        (INTEGER, ["1"], [" 1", "1\n", "1.0", "01"]),
        (KEYWORDS["unique"], ['["b", "a"]', '[1,"a","b"]'], ['["a","a"]', "[1]", '[1,"b",1]']),
        ({"type": "string", "pattern": r"^[\w-.]$"}, ['"-"', '"."', '"x"'], ['","']),
        ({"type": "string", "pattern": r"^\u{1F600}\ud83d\ude00$"}, ['"😀😀"'], ['"😀"']),
        ({"type": "string", "pattern": '^[^"]$'}, ['"a"', r'"\\"', r'"\n"'], [r'"\""']),
        ({"type": "string", "pattern": r'^"[^"\\]*\W\S$'}, [r'"\"a,,"'], [r'"\"\"a,,"', r'"\"\\,,"']),
        ({"type": "string", "pattern": r"^\P{L}$"}, ['"1"'], ['"a"', r'"\u0001"']),
        ({"type": "string", "pattern": "a$"}, ['"xa"'], ['"a\\n"', '"ab"']),
    ],
)  # fmt: skip
def test_texts_at_the_limits_of_a_schema(schema: Any, allowed: list[str], not_allowed: list[str]) -> None:
    assert [text for text in allowed if not accepts(schema, text)] == []
    assert [text for text in not_allowed if accepts(schema, text)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": NULL}, "keyword 'not' is not supported"),
        ({"if": NULL, "then": False}, "keyword 'if' is not supported"),
        ({"properties": {"a": {"contains": NULL}}}, "keyword 'contains' is not supported"),
        ({"unevaluatedProperties": False}, "keyword 'unevaluatedProperties' is not supported"),
        ({"$dynamicRef": "#a"}, "keyword '$dynamicRef' is not supported"),
        ({"$ref": "http://example.com/s"}, "keyword '$ref' to another document, 'http://example.com/s', is not"),
        ({"$ref": "#/$defs/a"}, "keyword '$ref' refers to '#/$defs/a', which does not exist"),
        ({"properties": {"a": {"$id": "b", "$ref": "#/c"}}}, "keyword '$id' is not supported for a part of a JSON"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "keyword 'oneOf' is supported only if its branches exclude"),
        (
            {"type": "object", "minProperties": 2},
            "keyword 'minProperties' above 1 requires the same number of names in 'required'",
        ),
        ({"propertyNames": {"minLength": 2}}, "keyword 'propertyNames' is supported only with one of pattern, enum or"),
        ({"type": "array", "uniqueItems": True}, "keyword 'uniqueItems' is supported only for arrays of constants, or"),
        ({"items": {"enum": ["a"]}, "uniqueItems": True, "minItems": 2}, "keyword 'minItems' requires 2 of 1 unique"),
        (
            {"items": {"enum": list(range(6))}, "uniqueItems": True},
            "keyword 'uniqueItems' is supported for at most 400 sequences, and an array of these 6 constants has more",
        ),
        ({"const": 2**53 + 1}, "the constant 9007199254740993 is outside of the range of exact integers"),
        ({"enum": ["a\u0001"]}, "a constant has a control character, U+0001"),
        ({"minimum": 10**30}, "keyword 'minimum' of 1000000000000000000000000000000 is outside of the range"),
        ({"maximum": "3"}, "keyword 'maximum' must be a number"),
        ({"multipleOf": 0}, "keyword 'multipleOf' must be a number above 0"),
        ({"allOf": [{"multipleOf": 100_003}, {"multipleOf": 100_019}]}, "keyword 'multipleOf' of 100003 is not"),
        ({"format": "regex"}, "format 'regex' is not supported"),
        ({"pattern": "\u0001"}, "the pattern '\u0001' has a control character, U+0001"),
        ({"pattern": r"^[\x01]$", "type": "string"}, "Unsatisfiable schema: Regex is empty"),
        ({"pattern": r"\bfoo\b"}, r"the pattern '\bfoo\b' has '\b', which is not supported"),
        ({"pattern": r"(a)\1"}, r"the pattern '(a)\1' has '\1', which is not supported"),
        ({"pattern": "[]a]"}, "the pattern '[]a]' has an empty class, which validators read differently"),
        ({"pattern": "[a"}, "the pattern '[a' has a class without an end"),
        (
            {"pattern": "(?!a)b"},
            "regex parse error: look-around, including look-ahead and look-behind, is not supported",
        ),
        (
            {"items": {"enum": list(range(20_000))}, "uniqueItems": True, "minItems": 9_000, "type": "array"},
            "keyword 'uniqueItems' is supported for at most 400 sequences, and an array of these 20000 constants has",
        ),
        ({"multipleOf": math.inf}, "keyword 'multipleOf' must be a number above 0"),
        ({"minimum": math.nan}, "keyword 'minimum' must be a number"),
        (
            {"items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": "a"},
            "keyword 'minItems' must be an integer of at least 0",
        ),
        ({"type": "string", "maxLength": True}, "keyword 'maxLength' must be an integer of at least 0"),
        ({"type": "object", "minProperties": "x"}, "keyword 'minProperties' must be an integer of at least 0"),
        ({"maxProperties": "x", "additionalProperties": False}, "keyword 'maxProperties' must be an integer of at"),
        ({"type": "object", "required": 5}, "keyword 'required' must be a list of names"),
        (
            {
                "oneOf": [{"$ref": "#/$defs/a"}, {"type": "object", "required": ["b"]}],
                "$defs": {"a": {"type": "object", "required": [["b"]]}},
            },
            "keyword 'required' must be a list of names",
        ),
        ({"dependentRequired": {"a": [1]}}, "keyword 'dependentRequired' must be a list of names"),
        ({"type": 5}, "keyword 'type' must be a text"),
        ({"enum": 5}, "keyword 'enum' must be a list of values"),
        ({"oneOf": [{"enum": 5}, NULL]}, "keyword 'enum' must be a list of values"),
        ({"type": "object", "propertyNames": {"enum": 5}}, "keyword 'enum' must be a list of values"),
        ({"anyOf": 3}, "keyword 'anyOf' must be a list of JSON schemas"),
        ({"properties": []}, "keyword 'properties' must be an object"),
        ({"items": 3}, "a JSON schema must be an object or true or false"),
        ({"$ref": 3}, "keyword '$ref' must be a text"),
        (False, "Unsatisfiable schema: schema is false"),
        ({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#"}]}}}, "no text fits its structure"),
    ],
)
def test_schemas_that_are_refused_by_name(schema: Any, message: str) -> None:
    with pytest.raises(ConchError) as caught:
        schemas.compiled(COMPILER, schema)
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message.startswith(f"structured_outputs: this json does not compile: {message}")


def test_branches_that_take_long_to_compare_are_refused() -> None:
    constants = {"oneOf": [{"const": number} for number in range(3000)]}
    assert len(rewrite(constants)["allOf"][0]["anyOf"]) == 3000
    many = [{"type": "object", "required": [f"p{number}"]} for number in range(2000)]
    doubled = {f"d{level}": {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(40)}
    for schema in (
        {"oneOf": many},
        {"oneOf": [{"$ref": "#/$defs/a"}] * 1000, "$defs": {"a": {"enum": list(range(5000))}}},
        {"oneOf": [{"$ref": "#/$defs/d0"}, INTEGER], "$defs": {**doubled, "d40": {"type": "string"}}},
    ):
        with pytest.raises(ConchError, match="keyword 'oneOf' has too many branches, or too large ones, to compare"):
            rewrite(schema)


def test_constants_that_references_repeat_are_compared_in_few_steps() -> None:
    values: dict[str, Any] = {f"d{level}": {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(14)}
    values["d14"] = {"enum": list(range(2000))}
    reference = {"$ref": "#/$defs/d0"}
    schemas_by_keyword: dict[str, Any] = {
        "oneOf": {"oneOf": [reference, {"type": "string"}]},
        "uniqueItems": {"type": "array", "items": reference, "uniqueItems": True},
    }
    for keyword, schema in schemas_by_keyword.items():
        with pytest.raises(ConchError, match=f"keyword '{keyword}' has too many branches, or too large ones"):
            rewrite({**schema, "$defs": values})
    # A large enumeration beside many objects is listed once, not once for each comparison.
    kinds = [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in range(40)]
    rewritten = rewrite({"oneOf": [*kinds, {"enum": [f"text {number}" for number in range(5000)]}]})
    assert len(rewritten["allOf"][0]["anyOf"]) == 41


def test_references_in_a_long_chain_are_followed() -> None:
    chain = {f"d{index}": {"items": {"$ref": f"#/$defs/d{index + 1}"}} for index in range(1000)}
    rewritten = rewrite({"$ref": "#/$defs/d0", "$defs": {**chain, "d1000": INTEGER}})
    assert len(rewritten["$defs"]) == 1001 and rewritten["$defs"]["1000"] == INTEGER


def test_numbers_in_constants_keep_their_values() -> None:
    texts = {text for index in range(40) if (text := draw_one({"enum": [1e20, 0.1, -0.5, 2**62]}, index))}
    assert {json.loads(text) for text in texts} == {1e20, 0.1, -0.5, 2**62}


def draw_one(schema: Any, seed: int) -> bytes | None:
    return schemas.draw(schemas.compiled(COMPILER, schema), np.random.default_rng(seed))
