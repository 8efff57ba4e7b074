"""Chat templates of checkpoints: a text, or an error for the client, within the limits of time and memory."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from conch.checkpoints.tokenizers.chat import ChatTemplate
from conch.checkpoints.tokenizers.chat_sandbox import MAX_TEXT
from conch.core.errors import ConchError
from tests.fuzz.target import target
from tests.unit.checkpoints.tokenizers.chat_templates import TEMPLATES

_MESSAGES: Final[list[dict[str, Any]]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, {}]}}}]},
]
_TOKENS: Final = (
    b"{% for a in range(99999) %}", b"{% endfor %}", b"{% set ns = namespace(x='x') %}",
    b"{% set ns.x = ns.x + ns.x %}",
    b"{{ ns.x * 99999 }}", b"{{ messages | tojson(indent=9999) }}",
    b"{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    b" ** 99999", b" * 99999999", b" ~ ns.x", b"| join", b"| center(9999)", b"| replace('', 'xx')", b".__class__",
    b"| map('upper') | list", b"| attr('__class__')", b"| format(1)", b"'%99d' % 1", b".format(1)", b"| sum(start=[])",
    b"{{ cycler.__init__ }}", b"{{ self }}", b"{% include 'x' %}", b"| batch(3)", b"| string", b"| sort", b"[::-1]",
)  # fmt: skip


@target(seeds=[text.encode() for text in TEMPLATES.values()], tokens=_TOKENS, most=8192)
def chat_template(data: bytes) -> None:
    template = ChatTemplate({"default": data.decode("utf-8", "replace")}, {"bos_token": "<s>"}, "m", seconds=0.3)
    with contextlib.suppress(ConchError):
        text = template.render(_MESSAGES, tools=None)
        assert isinstance(text, str) and len(text) <= MAX_TEXT
        assert " object at 0x" not in text or b"object at" in data or b"self" in data
