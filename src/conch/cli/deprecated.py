"""What is said, in Triton's words, of flags that only old command lines have; printed before the server starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_TRACE: Final = (
    "'--{}' has been deprecated and will be removed in future releases. Please use '--trace-config {} instead."
)
#: By flag, without the leading dashes.
DEPRECATED: Final[Mapping[str, str]] = {
    "strict-model-config": (
        "'--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' instead."
    ),
    "trace-file": _TRACE.format("trace-file", "triton,file=<filepath>"),
    "trace-level": _TRACE.format("trace-level", "level=<OFF|TIMESTAMPS|TENSORS>"),
    "trace-rate": _TRACE.format("trace-rate", "rate=<rate value>"),
    "trace-count": _TRACE.format("trace-count", "count=<count value>"),
    "trace-log-frequency": _TRACE.format("trace-log-frequency", "triton,log-frequency=<log frequency value>"),
}
