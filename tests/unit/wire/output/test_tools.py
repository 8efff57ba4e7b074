"""The types of the parameters of tools."""

from __future__ import annotations

from typing import Any

import pytest

from conch.wire.output.tools import parameter_types


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer", "nullable": True}, ["integer", "null"]),
        ({"type": ["string", "null", 5]}, ["string", "null"]),
        ({"enum": [1, "a", None]}, ["integer", "string", "null"]),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/x"}]}, ["string", "number"]),
        ({"anyOf": [{"type": "string"}, {}]}, []),
        ({"allOf": [{"type": "string"}, {}]}, ["string"]),
        ({"$ref": "#/$defs/missing"}, []),
        ({"type": "dict"}, []),
        (True, []),
    ],
)
def test_types_of_a_parameter_come_from_its_schema(schema: Any, types: list[str]) -> None:
    document = {"properties": {"a": schema}, "$defs": {"x": {"type": "number"}}}
    assert parameter_types(document) == {"a": types}


@pytest.mark.parametrize(("keyword", "types"), [("anyOf", []), ("oneOf", []), ("allOf", ["string"])])
def test_schema_that_refers_to_itself_many_times_is_read_once(keyword: str, types: list[str]) -> None:
    itself = {keyword: [{"$ref": "#/$defs/x"}] * 1000 + [{"type": "string"}]}
    assert parameter_types({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": itself}}) == {"a": types}
