"""Restricts groups of RPCs to calls whose metadata has a key: ``--grpc-restricted-protocol``.

Made once from the settings; pure.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Final

from conch.errors import ConchError, unavailable
from conch.frontends.grpc.requests import RequestHead
from conch.settings import Restriction

_HEADER: Final = "triton-grpc-protocol-"


class Access:
    """Checks the calls of one group of RPCs (``inference``, ``health`` …)."""

    def __init__(self, restrictions: Iterable[Restriction], group: str) -> None:
        self._required = [
            (_HEADER + restriction.header, restriction.value)
            for restriction in restrictions
            if group in restriction.apis
        ]

    def check(self, head: RequestHead) -> ConchError | None:
        """The error that refuses a call with this head; None if it is allowed."""
        for header, value in self._required:
            if not hmac.compare_digest((head.get(header.lower()) or "").encode(), value.encode()):
                return unavailable(f"This protocol is restricted, expecting header '{header}'")
        return None
