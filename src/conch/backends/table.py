"""Which code runs a backend, by the name that a configuration gives it.

The server passes the entry on to the worker, which imports it; nothing here imports a backend.
"""

from __future__ import annotations

#: ``module:Class`` by backend name.
BACKENDS: dict[str, str] = {
    "python": "conch.backends.python.backend:PythonBackend",
}
