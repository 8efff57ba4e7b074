"""Model names are checked here before they become paths."""

from __future__ import annotations

from conch.errors import invalid

#: The longest name that common file systems accept, in bytes.
MAX_NAME_BYTES = 255


def check_model_name(name: str) -> None:
    """Refuse, with INVALID_ARG, a name that is blank or could lead out of the repository."""
    if not name.strip():
        raise invalid("Model name cannot be empty. Please enter a valid name to deploy.")
    if "/" in name or "\\" in name or ".." in name or "\0" in name or name == ".":
        printable = name.replace("\0", "\\0")
        raise invalid(f"invalid model name '{printable}', model name must not contain path traversal characters")
