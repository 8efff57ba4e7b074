"""Keeps the texts in an array distinct (``uniqueItems``), which a grammar cannot express.

``UniqueItems`` follows a JSON text as it is written, by its bytes. A token that would repeat a text, or that would
leave no other text to write, is not admitted; the sampler then draws another one.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

#: The keyword of rewritten schemas that marks such an array: true if its items may be any texts, or a list of texts.
UNIQUE: Final = "x-unique"


@dataclass(frozen=True, slots=True)
class _Container:
    """An open array or object, and the schemas that may apply to it, each with whether it certainly does.

    ``key`` is the name of the current property (None before it is written), or the index of the current item. Items of
    a unique array are compared as they are written, with quotes: ``written`` are the items so far, and ``allowed``
    those that are possible, or None if they may be any texts.
    """

    schemas: tuple[tuple[Any, bool], ...]
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
        self._text: bytearray | None = None

    def admits(self, token: int) -> bool:
        """Whether a token keeps the items of arrays distinct."""
        return self._after(token) is not None

    def advance(self, token: int) -> bool:
        """Move to the position after a token. Returns False for one that is not admitted."""
        after = self._after(token)
        if after is None:
            return False
        self._open, self._text, end = after
        if self._text is not None:
            self._text += end
        return True

    def _after(self, token: int) -> tuple[list[_Container], bytearray | None, bytes] | None:
        """Return the position after a token; None if it is not admitted.

        The last element is what the token adds to a text that it does not end.
        """
        containers, before = list(self._open), self._text
        written = self._tokens[token] if token < len(self._tokens) else b""
        at = 0
        while at < len(written):
            if before is not None:
                end = _end_of_text(before, written, at)
                if end < 0:
                    break
                text = bytes(before) + written[at:end]
                before, at = None, end
                top = containers[-1] if containers else None
                if top is not None and top.unique:
                    if text in top.written:
                        return None
                    containers[-1] = replace(top, written=top.written | {text})
                elif top is not None and top.key is None:
                    containers[-1] = replace(top, key=json.loads(text))
                continue
            character = written[at : at + 1]
            at += 1
            if character == b'"':
                before = bytearray(b'"')
            elif character in b"{[":
                containers.append(self._container(containers, character))
            elif character in b"}]" and containers:
                containers.pop()
            elif character == b"," and containers:
                top = containers[-1]
                if top.unique and not top.admits(b""):
                    return None
                containers[-1] = replace(top, key=top.key + 1 if isinstance(top.key, int) else None)
        end_of_token = written[at:]
        top = containers[-1] if containers and before is not None else None
        if top is not None and top.allowed is not None and not top.admits(bytes(before or b"") + end_of_token):
            return None
        return containers, before, end_of_token

    def _container(self, containers: list[_Container], bracket: bytes) -> _Container:
        outer = containers[-1] if containers else None
        inner = (
            [(self._schema, True)]
            if outer is None
            else [
                (part, certain and is_part)
                for node, certain in outer.schemas
                for part, is_part in _parts(node, outer.key)
            ]
        )
        schemas = tuple(self._applied(inner))
        if bracket == b"{":
            return _Container(schemas, None)
        marks = [(node[UNIQUE], certain) for node, certain in schemas if UNIQUE in node]
        return _Container(schemas, 0, bool(marks), frozenset(), _allowed(marks))

    def _applied(self, nodes: list[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
        """Yield the schemas that may apply where ``nodes`` do, first those that certainly do."""
        left = deque(sorted(nodes, key=lambda node: node[1]))
        seen = set()
        while left:
            node, certain = left.pop()
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            yield node, certain
            left.extendleft((branch, False) for keyword in ("anyOf", "oneOf") for branch in node.get(keyword, ()))
            nodes = node.get("allOf", [])
            if "$ref" in node:
                nodes = [*nodes, self._schema["$defs"][node["$ref"].rpartition("/")[2]]]
            for part in nodes:
                (left.append if certain else left.appendleft)((part, certain))


def _parts(node: Any, key: str | int | None) -> Iterator[tuple[Any, bool]]:
    """Yield the schemas of a property or an item, each with whether it certainly applies."""
    if isinstance(key, int):
        first = node.get("prefixItems", ())
        yield first[key] if key < len(first) else node.get("items"), True
    else:
        yield from ((inner, True) for name, inner in node.get("properties", {}).items() if name == key)
        yield from ((inner, False) for inner in node.get("patternProperties", {}).values())
        yield node.get("additionalProperties"), False


def _allowed(marks: list[tuple[Any, bool]]) -> frozenset[bytes] | None:
    """Return the items that the marks of an array allow, at least one of which applies; None if any texts."""
    texts = [(frozenset(map(_written, mark)), certain) for mark, certain in marks if mark is not True]
    if any(certain for _, certain in texts):
        return frozenset.intersection(*(items for items, certain in texts if certain))
    if not texts or (True, False) in marks:
        return None
    return frozenset().union(*(items for items, _ in texts))


def _written(text: str) -> bytes:
    """Return a text as JSON, with the escapes that structured output has."""
    return json.dumps(text, ensure_ascii=False).encode()


#: Characters of a text and escapes up to its closing quote.
_TEXT: Final = re.compile(rb'(?:[^"\\]|\\.)*+"', re.DOTALL)


def _end_of_text(before: bytearray, written: bytes, start: int) -> int:
    """Return the index after the quote that ends a text, which ``written`` continues at ``start``; -1 if none."""
    if _backslashes(before) % 2:
        start += 1  # an escaped character
    match = _TEXT.match(written, start)
    return match.end() if match is not None else -1


def _backslashes(text: bytearray) -> int:
    """Return the number of backslashes at the end of a text."""
    count = 0
    while text[-count - 1] == ord("\\"):  # the first character is a quote
        count += 1
    return count
