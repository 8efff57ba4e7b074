"""Credentials for stores, from Triton's credentials file or the environment. Messages never contain them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from conch.config.reading import read_small
from conch.core.errors import invalid
from conch.repository.stores.urls import StoreUrl

_FILE: Final = "TRITON_CLOUD_CREDENTIAL_PATH"
#: Environment variables with Triton's directories for copies, by scheme.
MOUNTS: Final = {
    "s3": "TRITON_AWS_MOUNT_DIRECTORY",
    "gs": "TRITON_GCS_MOUNT_DIRECTORY",
    "as": "TRITON_AZURE_MOUNT_DIRECTORY",
}


def credential(url: StoreUrl, environment: Mapping[str, str]) -> Any:
    """Return the entry of the credentials file for ``url``, chosen by the longest name that is a prefix of the URL.

    Returns None if the environment names no such file, or for the Hub. Raises INVALID_ARG if the file is unreadable or
    has no matching entry.
    """
    named = environment.get(_FILE, "")
    if not named or url.scheme not in MOUNTS:
        return None
    try:
        document = json.loads(read_small(Path(named)))
    except OSError as error:
        raise invalid(f"{_FILE} names {named}, which cannot be read: {error.strerror}") from None
    except ValueError:  # its text may contain parts of the file
        raise invalid(f"{_FILE} names {named}, which is not JSON") from None
    entries = document.get(url.scheme, {}) if isinstance(document, dict) else None
    if not isinstance(entries, dict):
        raise invalid(f'{_FILE} names {named}, which must hold an object such as {{"{url.scheme}": {{"": …}}}}')
    matching = [name for name in entries if url.text.startswith(name)]
    if not matching:
        raise invalid(f"{_FILE} names {named}, which has no entry for {url}")
    return entries[max(matching, key=len)]


def fields(entry: Any, url: StoreUrl, *names: str) -> dict[str, str]:
    """Return the non-empty strings of an entry of the file, by name. Raises INVALID_ARG for a malformed entry."""
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name, ""), str) for name in names):
        raise invalid(f"{_FILE}: the entry for {url} must be an object with {', '.join(names)}")
    return {name: entry[name] for name in names if entry.get(name)}
