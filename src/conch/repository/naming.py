"""Keys of models inside the server, where several repositories may use the same name (``--model-namespacing``).

A key is the model's name, or with namespacing ``<repository>::<name>``, as in Triton's log. Clients use names only.
"""

from __future__ import annotations

from collections.abc import Sequence

_BETWEEN = "::"


class Naming:
    """Converts between names and keys; ``roots`` are the repositories, empty without namespacing."""

    def __init__(self, roots: Sequence[str] = ()) -> None:
        self._prefixes = [f"{root}{_BETWEEN}" for root in roots]

    def __bool__(self) -> bool:
        """Return whether several models may have the same name."""
        return bool(self._prefixes)

    def keys(self, name: str) -> list[str]:
        """Return all possible keys of a model name; the last is the name itself, the key of an uploaded model."""
        return [*(prefix + name for prefix in self._prefixes), name]

    def name(self, key: str) -> str:
        """Return the model name in a key."""
        return key.removeprefix(self._prefix(key))

    def namespace(self, key: str) -> str:
        """Return the repository in a key; empty without namespacing."""
        return self._prefix(key).removesuffix(_BETWEEN)

    def _prefix(self, key: str) -> str:
        return next((prefix for prefix in self._prefixes if key.startswith(prefix)), "")


def qualified(namespace: str, name: str) -> str:
    """Return a name prefixed with its namespace, if it has one."""
    return f"{namespace}{_BETWEEN}{name}" if namespace else name
