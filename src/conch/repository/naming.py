"""The keys of models inside the server, where several repositories may have the same name (``--model-namespacing``).

A key is the name of the model, or with namespacing ``<repository>::<name>``, as Triton's log has it.  Clients know
names only.
"""

from __future__ import annotations

from collections.abc import Sequence

_BETWEEN = "::"


class Naming:
    """Makes keys of names, and names of keys; ``roots`` are the repositories, empty where names are keys."""

    def __init__(self, roots: Sequence[str] = ()) -> None:
        self._prefixes = [f"{root}{_BETWEEN}" for root in roots]

    def __bool__(self) -> bool:
        """Whether several models may have one name."""
        return bool(self._prefixes)

    def keys(self, name: str) -> list[str]:
        """Every key that a model of this name can have; last its name, which a model that a client brought has."""
        return [*(prefix + name for prefix in self._prefixes), name]

    def name(self, key: str) -> str:
        """The name of the model with a key."""
        return key.removeprefix(self._prefix(key))

    def namespace(self, key: str) -> str:
        """The repository of the model with a key; empty without namespacing."""
        return self._prefix(key).removesuffix(_BETWEEN)

    def _prefix(self, key: str) -> str:
        return next((prefix for prefix in self._prefixes if key.startswith(prefix)), "")


def qualified(namespace: str, name: str) -> str:
    """A name with its namespace, if it has one."""
    return f"{namespace}{_BETWEEN}{name}" if namespace else name
