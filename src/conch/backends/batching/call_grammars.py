"""Structured output of the tool calls that a model begins itself: their grammar, and the mark that begins them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from conch.backends.batching.json_schemas import rewrite
from conch.checkpoints.tokenizers.fast import TokenBytes

#: A mark, or a place for something else, in the expressions of a format's grammar.
_PLACE: Final = re.compile(r"~([^~]+)~|\b(CALL|OBJECT|NAME|ARGUMENTS)\b")
#: A call in the form of a JSON object.
_OBJECT: Final = (
    r'/[ \n]{0,8}\{[ \n]{0,8}"name" ?: ?"/ NAME /",[ \n]{0,8}"arguments" ?: ?/ ARGUMENTS /[ \n]{0,8}\}[ \n]{0,8}/'
)


def call_grammar(calls: Mapping[str, Any], tokens: TokenBytes, options: Mapping[str, Any]) -> str:
    """Return llguidance's grammar of the text after the mark that begins calls.

    ``calls`` are the members of a structure (``call_structure``), and ``options`` those of llguidance for JSON. Raises
    INVALID_ARG for a JSON schema that is not supported.
    """
    special = {tokens.tokens[id].decode(): id for id in tokens.special_ids if id < len(tokens.tokens)}
    rules = [f"start: {_expanded(calls['block'], special, {'CALL': 'call', 'OBJECT': 'object'})}"]
    for place, form in (("CALL", calls["call"]), ("OBJECT", _OBJECT)):
        if place not in (match[2] for match in _PLACE.finditer(calls["block"])):
            continue
        rule, count = place.lower(), len(calls["schemas"])
        rules.append(f"{rule}: {' | '.join(f'{rule}_{index}' for index in range(count))}")
        for index, name in enumerate(calls["schemas"]):
            places = {"NAME": json.dumps(name), "ARGUMENTS": f"@arguments_{index}"}
            rules.append(f"{rule}_{index}: {_expanded(form, special, places)}")
    grammars: list[dict[str, Any]] = [{"name": "calls", "lark_grammar": "\n".join(rules)}]
    for index, schema in enumerate(calls["schemas"].values()):
        grammars.append({"name": f"arguments_{index}", "json_schema": {**rewrite(schema), "x-guidance": options}})
    return json.dumps({"grammars": grammars})


def _expanded(expression: str, special: Mapping[str, int], places: Mapping[str, str]) -> str:
    """Return an expression with ``places``, and with marks as ``special`` tokens (ids by name) or as texts."""

    def part(match: re.Match[str]) -> str:
        mark = match[1]
        if mark is None:
            return places[match[2]]
        return f"<[{special[mark]}]>" if mark in special else json.dumps(mark, ensure_ascii=False)

    return _PLACE.sub(part, expression)


class StartMark:
    """The mark that begins a structure in a text, written as a special token or as any tokens with its bytes."""

    def __init__(self, mark: str, tokens: TokenBytes, vocabulary: int) -> None:
        self.text = mark.encode()
        self._tokens = tokens.tokens
        known = range(len(self._tokens))
        #: Special tokens, which add no text, except for the mark itself.
        self._hidden = frozenset(id for id in tokens.special_ids if id not in known or self._tokens[id] != self.text)
        #: The tokens that end the mark and add more text, by the number of bytes of the mark before them.
        self._crossing: list[list[int]] = [[] for _ in self.text]
        for id, piece in enumerate(self._tokens[:vocabulary]):
            before = piece[:-1]
            if self.text[-1] in before and id not in self._hidden:
                for length, ids in enumerate(self._crossing):
                    rest = self.text[length:]
                    if before.startswith(rest) if length else rest in before:
                        ids.append(id)

    def piece(self, token: int) -> bytes:
        """Return the text that a token adds."""
        return b"" if token in self._hidden else b"".join(self._tokens[token : token + 1])

    def crossing(self, tail: bytes) -> list[int]:
        """Return the tokens that end the mark after the text ``tail`` and add more, which the structure would miss."""
        return [id for length, ids in enumerate(self._crossing) if tail.endswith(self.text[:length]) for id in ids]
