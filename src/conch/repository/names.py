"""Model names are checked here before they become paths."""

from __future__ import annotations

from conch.errors import invalid


def is_directory_name(name: str) -> bool:
    """Whether ``name`` joined to a directory is an entry of that directory, and not a hidden one."""
    return bool(name) and not is_hidden(name) and not _leads_elsewhere(name)


def is_hidden(name: str) -> bool:
    """Whether a file of that name is one that listings leave out; a name of three dots or more is as good as any."""
    return name.startswith(".") and (bool(name.strip(".")) or len(name) < 3)


def is_utf8(name: str) -> bool:
    """Whether the name of a file is text, and not bytes that only the system understands."""
    return not any("\ud800" <= one <= "\udfff" for one in name)


def check_model_name(name: str) -> None:
    """Refuse, with INVALID_ARG, a client's name that is blank or looks as if it led out of the repository."""
    if not name.strip():
        raise invalid("Model name cannot be empty. Please enter a valid name to deploy.")
    if _leads_elsewhere(name):
        printable = name.replace("\0", "\\0")
        raise invalid(f"invalid model name '{printable}', model name must not contain path traversal characters")


def _leads_elsewhere(name: str) -> bool:
    """Whether ``name`` joined to a directory may be something else than an entry of that directory."""
    return name in (".", "..") or any(mark in name for mark in "/\\\0")
