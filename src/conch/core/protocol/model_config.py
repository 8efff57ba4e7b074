"""The messages of model configurations, declared in ``model_config.proto``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from conch.core.protocol.proto_files import load, members

DESCRIPTOR: Final = load("model_config.proto")
globals().update(members(DESCRIPTOR))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
