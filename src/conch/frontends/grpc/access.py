"""Which metadata a call must have, and which of it models see.

``--grpc-restricted-protocol`` guards groups of RPCs with a key; ``--grpc-header-forward-pattern``
turns matching metadata into request parameters.  Built once from the settings; pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from conch.errors import ConchError, invalid, unavailable
from conch.frontends.grpc.requests import RequestHead
from conch.inference import InferRequest, ParameterValue
from conch.settings import Restriction

_HEADER: Final = "triton-grpc-protocol-"
_RESERVED: Final = {
    "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output",
}  # fmt: skip


class Access:
    """Checks calls of one group of RPCs (``inference``, ``health`` …)."""

    def __init__(self, restrictions: Iterable[Restriction], group: str) -> None:
        self._required = [
            (_HEADER + restriction.header, restriction.value)
            for restriction in restrictions
            if group in restriction.apis
        ]

    def check(self, head: RequestHead) -> ConchError | None:
        """What refuses a call, if something does."""
        for header, value in self._required:
            if head.get(header.lower()) != value:
                return unavailable(f"This protocol is restricted, expecting header '{header}'")
        return None


class HeaderForwarding:
    """Forwards metadata whose name matches ``pattern`` somewhere, in any case; an empty one forwards nothing."""

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern, re.IGNORECASE) if pattern else None
        except re.error as error:
            raise invalid(f"invalid --grpc-header-forward-pattern '{pattern}': {error}") from None

    def add(self, head: RequestHead, request: InferRequest) -> None:
        """Give a request the parameters that its call's metadata makes; raises INVALID_ARG for reserved names."""
        if self._pattern is None:
            return
        forwarded: dict[str, ParameterValue] = {}
        for name, value in head.metadata:
            if self._pattern.search(name):
                if name in _RESERVED or name.startswith("triton_"):
                    raise invalid(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
                forwarded[name] = value
        request.parameters = {**request.parameters, **forwarded}
