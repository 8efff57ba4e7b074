"""Stores that fsspec has a file system for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from conch.core.errors import ConchError
from conch.machine import extras
from conch.repository.stores.store import Arrived, Redacted, RemoteFile, explained
from conch.repository.stores.urls import StoreUrl

#: Converts an error of a store's library into a readable error.
Explain = Callable[[Exception], ConchError]


class FilesystemStore:
    """Files below ``root`` in ``filesystem``, which must not cache listings.

    ``stamp`` and ``digest`` read an entry of a listing; ``credentials`` names the settings to check when access is
    denied. ``fetching`` are further arguments of ``get_file``.
    """

    def __init__(
        self,
        url: StoreUrl,
        filesystem: Any,
        *,
        stamp: Callable[[Mapping[str, Any]], str],
        digest: Callable[[Mapping[str, Any]], str],
        credentials: str,
        redacted: Redacted,
        fetching: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = url
        self.filesystem = filesystem
        self._root = f"{url.bucket}/{url.prefix}" if url.prefix else url.bucket
        self._stamp = stamp
        self._digest = digest
        self._credentials = credentials
        self._redacted = redacted
        self._fetching = dict(fetching or {})

    def find(self, below: str = "") -> list[RemoteFile]:
        path = f"{self._root}/{below}" if below else self._root
        self.filesystem.invalidate_cache()
        entries = self.filesystem.find(path, detail=True)
        files = []
        for entry in entries.values():
            name = entry["name"].removeprefix("/")
            if not name.startswith(f"{self._root}/") or entry["type"] != "file":
                continue
            files.append(
                RemoteFile(
                    name.removeprefix(f"{self._root}/"),
                    int(entry["size"] or 0),
                    self._stamp(entry),
                    modification_time(entry),
                    self._digest(entry),
                )
            )
        return files

    def fetch(self, file: RemoteFile, target: Path, arrived: Arrived) -> None:
        path = f"{self._root}/{file.path}"
        self.filesystem.get_file(path, str(target), callback=_callback(arrived), **self._fetching)

    def key(self, file: RemoteFile) -> str:
        """Return the name of a file in its bucket."""
        return f"{self.url.prefix}/{file.path}" if self.url.prefix else file.path

    def digest_holds(self, file: RemoteFile) -> bool:
        return True

    def explain(self, error: Exception) -> ConchError:
        return explained(self.url, error, self._credentials, self._redacted)


def _callback(arrived: Arrived) -> Any:
    """Return an fsspec callback that reports received bytes to ``arrived``."""
    callback = extras.load("copying files", "fsspec.callbacks", extra="stores").Callback()
    callback.relative_update = lambda inc=1: arrived(inc)

    def absolute_update(value: int) -> None:
        arrived(max(value - callback.value, 0))
        callback.value = value

    callback.absolute_update = absolute_update
    return callback


def modification_time(entry: Mapping[str, Any]) -> float:
    """Return when a file was modified (seconds since 1970); 0 if the store does not report it."""
    for name in ("LastModified", "mtime", "last_modified", "updated", "created"):
        value = entry.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
            except ValueError:
                continue
    return 0.0
