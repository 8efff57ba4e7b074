"""Checks of model names before they are used in paths, and the keys of models inside the server.

A key is the model's name, or with ``--model-namespacing``, where several repositories may use the same name,
``<repository>::<name>``, as in Triton's log. Clients use names only.
"""

from __future__ import annotations

from collections.abc import Sequence

from conch.core.errors import invalid


def is_directory_name(name: str) -> bool:
    """Return whether ``name`` joined to a directory is a visible entry of that directory."""
    return bool(name) and not is_hidden(name) and not _leads_elsewhere(name)


def is_hidden(name: str) -> bool:
    """Return whether directory listings omit a file of that name; names of three or more dots are not hidden."""
    return name.startswith(".") and (bool(name.strip(".")) or len(name) < 3)


def is_utf8(name: str) -> bool:
    """Return whether a file name is valid UTF-8, without undecodable bytes."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def check_model_name(name: str) -> None:
    """Refuse a client's model name that is blank or contains path traversal characters, with INVALID_ARG."""
    if not name.strip():
        raise invalid("Model name cannot be empty. Please enter a valid name to deploy.")
    if _leads_elsewhere(name):
        printable = name.replace("\0", "\\0")
        raise invalid(f"invalid model name '{printable}', model name must not contain path traversal characters")


def _leads_elsewhere(name: str) -> bool:
    """Return whether ``name`` joined to a directory may not be an entry of that directory."""
    return name in (".", "..") or any(mark in name for mark in "/\\\0")


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

    def number(self, key: str) -> int:
        """Return the number of a key's repository, from 1; 0 without namespacing."""
        prefix = self._prefix(key)
        return self._prefixes.index(prefix) + 1 if prefix else 0

    def public(self, key: str) -> str:
        """Return a key with the number of its repository in place of the path, which clients do not see."""
        number = self.number(key)
        return f"{number}{_BETWEEN}{self.name(key)}" if number else key

    def _prefix(self, key: str) -> str:
        return next((prefix for prefix in self._prefixes if key.startswith(prefix)), "")


def qualified(namespace: str, name: str) -> str:
    """Return a name prefixed with its namespace, if it has one."""
    return f"{namespace}{_BETWEEN}{name}" if namespace else name
