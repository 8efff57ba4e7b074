"""A model server that works like NVIDIA Triton and serves Hugging Face models directly.

As a library, the package exports the names below, each imported on first use, so that ``import conch`` alone is cheap.
Workers import it under Python 3.9 and newer, where only ``__version__`` is used.
"""

from __future__ import annotations

__version__ = "0.2.0.dev0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from conch.client.client import Client
    from conch.client.results import InferResult
    from conch.client.service import AsyncInferenceService, AsyncResultStream, InferenceService, ResultStream
    from conch.core.errors import Code, ConchError
    from conch.library.async_server import AsyncServer
    from conch.library.server import Server, serve

__all__ = [
    "AsyncInferenceService",
    "AsyncResultStream",
    "AsyncServer",
    "Client",
    "Code",
    "ConchError",
    "InferResult",
    "InferenceService",
    "ResultStream",
    "Server",
    "__version__",
    "serve",
]

_MODULES = {
    "AsyncInferenceService": "conch.client.service",
    "AsyncResultStream": "conch.client.service",
    "AsyncServer": "conch.library.async_server",
    "Client": "conch.client.client",
    "Code": "conch.core.errors",
    "ConchError": "conch.core.errors",
    "InferResult": "conch.client.results",
    "InferenceService": "conch.client.service",
    "ResultStream": "conch.client.service",
    "Server": "conch.library.server",
    "serve": "conch.library.server",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'conch' has no attribute '{name}'")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
