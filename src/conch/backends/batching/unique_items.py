"""Keeps the texts in an array distinct (``uniqueItems``), which a grammar cannot express.

``UniqueItems`` follows a JSON text as it is written, by its bytes. A token that would repeat a text, or that would
leave no other text to write, is not admitted; the sampler then draws another one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

#: The keyword of rewritten schemas that marks such an array: true if its items may be any texts, or a list of texts.
UNIQUE: Final = "x-unique"


@dataclass(frozen=True, slots=True)
class _Container:
    """An open array or object, and the schemas that may apply to it.

    ``key`` is the name of the current property (None before it is written), or the index of the current item. Items of
    a unique array are compared as they are written, with quotes: ``written`` are the items so far, and ``allowed``
    those that are possible, or None if they may be any texts.
    """

    schemas: tuple[Any, ...]
    key: str | int | None
    unique: bool = False
    written: frozenset[bytes] = frozenset()
    allowed: frozenset[bytes] | None = None

    def admits(self, text: bytes) -> bool:
        """Whether an item that begins with ``text`` can still differ from the others."""
        return self.allowed is None or any(item.startswith(text) for item in self.allowed - self.written)


class UniqueItems:
    """The position in a JSON text that fits a rewritten ``schema``; ``tokens`` are the bytes of tokens by id."""

    def __init__(self, schema: Any, tokens: Sequence[bytes]) -> None:
        self._schema, self._tokens = schema, tokens
        self._open: list[_Container] = []
        #: The text in quotes that is being written, from its first quote; None outside of texts.
        self._text: bytes | None = None

    def admits(self, token: int) -> bool:
        """Whether a token keeps the items of arrays distinct."""
        return self._after(token) is not None

    def advance(self, token: int) -> bool:
        """Move to the position after a token. Returns False for one that is not admitted."""
        after = self._after(token)
        if after is not None:
            self._open, self._text = after
        return after is not None

    def _after(self, token: int) -> tuple[list[_Container], bytes | None] | None:
        """Return the position after a token; None if it is not admitted."""
        containers, text = list(self._open), self._text
        for byte in self._tokens[token] if token < len(self._tokens) else b"":
            character = bytes([byte])
            if text is not None:
                text += character
                if character != b'"' or _is_escaped(text):
                    continue
                top = containers[-1] if containers else None
                if top is not None and top.unique:
                    if text in top.written:
                        return None
                    containers[-1] = replace(top, written=top.written | {text})
                elif top is not None and top.key is None:
                    containers[-1] = replace(top, key=json.loads(text))
                text = None
            elif character == b'"':
                text = character
            elif character in b"{[":
                containers.append(self._container(containers, character))
            elif character in b"}]" and containers:
                containers.pop()
            elif character == b"," and containers:
                top = containers[-1]
                if top.unique and not top.admits(b""):
                    return None
                containers[-1] = replace(top, key=top.key + 1 if isinstance(top.key, int) else None)
        if text is not None and containers and containers[-1].unique and not containers[-1].admits(text):
            return None
        return containers, text

    def _container(self, containers: list[_Container], bracket: bytes) -> _Container:
        outer = containers[-1] if containers else None
        inner = [self._schema] if outer is None else [part for node in outer.schemas for part in _part(node, outer.key)]
        schemas = tuple(self._applied(inner))
        if bracket == b"{":
            return _Container(schemas, None)
        marks = [node[UNIQUE] for node in schemas if UNIQUE in node]
        texts = None if True in marks else frozenset(_written(text) for mark in marks for text in mark)
        return _Container(schemas, 0, bool(marks), frozenset(), texts)

    def _applied(self, nodes: list[Any]) -> Iterator[Any]:
        """Yield the schemas that may apply where ``nodes`` do."""
        left, seen = list(nodes), set()
        while left:
            node = left.pop()
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            yield node
            for keyword in ("anyOf", "oneOf", "allOf"):
                left += node.get(keyword, ())
            if "$ref" in node:
                left.append(self._schema["$defs"][node["$ref"].rpartition("/")[2]])


def _part(node: Any, key: str | int | None) -> Iterator[Any]:
    """Yield the schemas of a property or an item."""
    if isinstance(key, int):
        first = node.get("prefixItems", ())
        yield first[key] if key < len(first) else node.get("items")
    else:
        yield from (inner for name, inner in node.get("properties", {}).items() if name == key)
        yield from node.get("patternProperties", {}).values()
        yield node.get("additionalProperties")


def _written(text: str) -> bytes:
    """Return a text as JSON, with the escapes that structured output has."""
    return json.dumps(text, ensure_ascii=False).encode()


def _is_escaped(text: bytes) -> bool:
    """Whether the last character of a text, which is a quote, is escaped."""
    before = text[:-1]
    return bool((len(before) - len(before.rstrip(b"\\"))) % 2)
