"""The tools of a conversation, as the parsers of its output need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools as passed to the chat template (``offered``, JSON), and how calls appear in the model's text.

    ``mode`` is ``none`` (the text is content), ``auto`` (marks identify calls), ``required`` (the text is a JSON list
    of calls) or ``named`` (the text is the arguments of ``name``). ``schema`` is the schema that the text must match.
    ``single`` allows only one call.
    """

    offered: bytes | None = None
    mode: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""
    names: frozenset[str] = frozenset()
    schema: dict[str, Any] | None = None
    single: bool = False
