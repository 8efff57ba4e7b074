"""A Hub on this machine: models by id, each with one revision, public, private or gated."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

COMMIT: Final = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """``files`` by model id; a ``token`` opens what is private, and nothing opens what is gated.

    ``fetched`` are the names of the files that clients downloaded.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    fetched: list[str] = field(default_factory=list)
    url: str = ""

    @contextmanager
    def listening(self) -> Iterator[FakeHub]:
        hub = self

        class Handler(_Handler):
            fake = hub

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        model = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        token = self.fake.private.get(model)
        if model not in self.fake.files or (token and self.headers.get("Authorization") != f"Bearer {token}"):
            self._refuse(401, "RepoNotFound")
        elif parts[0] != "api":
            self._file(model, "/".join(parts[4:]))
        elif parts[4] == "revision" and parts[5] != "main":
            self._refuse(404, "RevisionNotFound")
        elif parts[4] == "revision":
            siblings = [_sibling(*item) for item in self.fake.files[model].items()] if "blobs=" in self.path else []
            self._answer(
                {"id": model, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False, "downloads": 0}
            )
        else:
            self._answer([
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.fake.files[model].items()
            ])  # fmt: skip

    def _file(self, model: str, name: str) -> None:
        data = self.fake.files[model].get(name)
        if model in self.fake.gated:
            self._refuse(403, "GatedRepo")
        elif data is None:
            self._refuse(404, "EntryNotFound")
        else:
            if self.command == "GET":
                self.fake.fetched.append(name)
            self._send(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def _answer(self, document: object) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _sibling(name: str, data: bytes) -> dict[str, object]:
    """A file in the answer to what a model has: what ends with ``.bin`` is large."""
    entry: dict[str, object] = {"rfilename": name, "size": len(data)}
    entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    if name.endswith(".bin"):
        entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry
