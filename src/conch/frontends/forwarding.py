"""Forwards request headers (HTTP) or metadata (gRPC) as parameters of inference requests.

``--http-header-forward-pattern`` and ``--grpc-header-forward-pattern`` select the headers. Created once from the
settings; does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from conch.core.errors import invalid
from conch.core.inference import InferRequest, ParameterValue
from conch.options.triton_values import header_pattern

_RESERVED: Final = {
    "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output",
}  # fmt: skip


class HeaderForwarding:
    """Forwards headers whose names match ``pattern``, ignoring case unless it begins with ``(?-i)``.

    An empty pattern forwards none. Raises INVALID_ARG, naming ``option``, for an invalid regular expression.
    """

    def __init__(self, pattern: str, option: str) -> None:
        try:
            self._pattern = header_pattern(pattern) if pattern else None
        except re.error as error:
            raise invalid(f"invalid {option} '{pattern}': {error}") from None
        #: Whether any header can be forwarded.
        self.enabled = self._pattern is not None

    def add(self, headers: Iterable[tuple[str, str]], request: InferRequest) -> None:
        """Add the matching headers to a request's parameters; raises INVALID_ARG for reserved names."""
        if self._pattern is None:
            return
        forwarded: dict[str, ParameterValue] = {}
        for name, value in headers:
            if self._pattern.search(name):
                if name in _RESERVED or name.startswith("triton_"):
                    raise invalid(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
                forwarded[name] = value
        request.parameters = {**request.parameters, **forwarded}
