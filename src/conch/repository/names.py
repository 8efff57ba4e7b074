"""Checks of model names before they are used in paths."""

from __future__ import annotations

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
