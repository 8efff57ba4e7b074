"""Texts in arrays that may not repeat, however tokens divide them."""

from __future__ import annotations

from typing import Any

import pytest

from conch.backends.batching.json_schemas import rewrite
from conch.backends.batching.unique_items import UniqueItems

TEXTS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
COLOURS = {"type": "array", "items": {"enum": ["red", "redder", "blue", 'a"b']}, "uniqueItems": True}
COLD = {"type": "array", "items": {"enum": ["green", "red", "blue"]}, "uniqueItems": True}
BOTH = {"allOf": [TEXTS, COLOURS, COLD]}
EITHER = {"anyOf": [TEXTS, COLOURS]}
#: Texts of which an alternative is a list.
CHOICE = {"allOf": [TEXTS], "anyOf": [{**COLD, "items": {"enum": ["red", "blue"]}}, {"type": "null"}]}
NESTED = {
    "type": "object",
    "properties": {
        "names": {"anyOf": [TEXTS, {"type": "null"}]},
        "free": {"type": "array", "items": {"type": "string"}},
        "rows": {"type": "array", "items": {"$ref": "#/$defs/row"}},
    },
    "$defs": {"row": {"allOf": [TEXTS]}},
}


def admitted(schema: Any, *tokens: str) -> list[bool]:
    """Whether each token is admitted; those that are not are left out."""
    items = UniqueItems(rewrite(schema), [token.encode() for token in tokens])
    results = []
    for token in range(len(tokens)):
        results.append(items.admits(token))
        assert items.advance(token) is results[-1]
    return results


@pytest.mark.parametrize(
    ("schema", "tokens", "last"),
    [
        (TEXTS, ["[", '"', "a", '"', ",", '"', "a", '"'], False),
        (TEXTS, ['["a', '","', "a", 'b"'], True),
        (TEXTS, ['["a"', ', "a"]'], False),
        (TEXTS, ['["a","a"'], False),
        (TEXTS, ['["a"]', '["a"]'], True),
        (TEXTS, ['["a\\"', '","a\\"', '"'], False),
        (TEXTS, ['["a\\\\"', ',"a\\\\"'], False),
        (TEXTS, ['["a\\', '"', '"', ',"a\\"b"'], True),
        (COLOURS, ['["red",', ' "', "redd"], True),
        (COLOURS, ['["red","redder",', '"r'], False),
        (COLOURS, ['["red","redder","blue","a\\"b"', ","], False),
        (COLOURS, ['["red","redder","blue","a\\"b"', "]"], True),
        (BOTH, ['["red","blue"', ","], False),
        (BOTH, ['["red"', ',"b'], True),
        (EITHER, ['["red","blue"', ',"g'], True),
        (EITHER, ['["red","red"'], False),
        (CHOICE, ['["red","blue"', ","], False),
        (CHOICE, ['["red"', ',"b'], True),
        (TEXTS, ['["a\\\\', "\\", '"', '","a\\\\\\""'], False),
        (TEXTS, [f'["{"long" * 50_000}"', f',"{"long" * 50_000}', '"'], False),
        (NESTED, ['{"names":["free"],"free":["a"', ',"a"'], True),
        (NESTED, ['{"names":["free"', ',"free"'], False),
        (NESTED, ['{"rows":[["a"],["a"', ',"b"', ',"a"'], False),
        (NESTED, ['{"rows":[["a"],["a"]', ',["a"'], True),
        (NESTED, ['{"names":["n\\"', '"', "]", ', "free": ["x","x"', "]"], True),
    ],
)
def test_token_that_repeats_a_text_is_not_admitted(schema: Any, tokens: list[str], last: bool) -> None:
    assert admitted(schema, *tokens) == [True] * (len(tokens) - 1) + [last]
