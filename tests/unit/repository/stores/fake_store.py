"""A store in memory, with faults, and repositories over it."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

from conch.core.errors import ConchError
from conch.repository.stores.root import StoreRoot
from conch.repository.stores.store import Arrived, Redacted, RemoteFile, explained
from conch.repository.stores.urls import parse_url

URL = parse_url("s3://bucket/models")
CONFIG = b'backend: "python" input { name: "I" data_type: TYPE_FP32 dims: [ 1 ] }'


class FakeStore:
    """``files`` are the contents by path.

    ``failing`` is raised by listings, ``faults`` by the next fetches, each once; ``garbled`` paths arrive
    otherwise than they are. Listings hang while ``answers`` is cleared.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.failing: Exception | None = None
        self.faults: list[Exception] = []
        self.garbled: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.listings = 0
        self.digests = True
        self.answers = threading.Event()
        self.answers.set()

    def find(self, below: str = "") -> list[RemoteFile]:
        self.listings += 1
        self.answers.wait()
        if self.failing is not None:
            raise self.failing
        start = f"{below}/" if below else ""
        return [self.entry(path) for path in self.files if path.startswith(start)]

    def entry(self, path: str) -> RemoteFile:
        content = self.files[path]
        digest = hashlib.md5(content).hexdigest()
        return RemoteFile(path, len(content), digest, 1_700_000_000.0, f"md5:{digest}" if self.digests else "")

    def fetch(self, file: RemoteFile, target: Path, arrived: Arrived) -> None:
        self.fetched.append(file.path)
        content = self.garbled.get(file.path, self.files[file.path])
        target.write_bytes(content[: len(content) // 2])
        arrived(len(content) // 2)
        if self.faults:
            raise self.faults.pop(0)
        target.write_bytes(content)
        arrived(len(content) - len(content) // 2)

    def digest_holds(self, file: RemoteFile) -> bool:
        return True

    def explain(self, error: Exception) -> ConchError:
        return explained(URL, error, "AWS_ACCESS_KEY_ID", Redacted(("hidden-key",)))


def two_versions() -> FakeStore:
    """A store with one model of versions 1 and 2, of which the second serves."""
    return FakeStore(
        {"m/config.pbtxt": CONFIG, "m/1/model.py": b"one", "m/2/model.py": b"two", "m/2/weights": b"w" * 9}
    )


def root_over(store: FakeStore, cache: Path, *, whole: bool = False) -> StoreRoot:
    """A repository that waits for nothing between two attempts."""
    return StoreRoot(URL, cache, whole=whole, opener=lambda url: store, pauses=(0.0, 0.0))
