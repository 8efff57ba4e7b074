"""An object store with the models of a simulated repository; it may respond late, never, or with errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from conch.core.errors import ConchError
from conch.repository.stores.store import RemoteFile, explained
from tests.simulation.threads import block


class SimulatedStore:
    """See :class:`conch.repository.stores.store.Store`. ``hangs`` and ``failures`` apply to the next calls."""

    def __init__(self, folder: Path, latency: Callable[[float], float]) -> None:
        self._folder = folder
        self._latency = latency
        #: Additional time of each of the next calls (s).
        self.hangs: list[float] = []
        #: The number of next calls that fail.
        self.failures = 0

    def heal(self) -> None:
        """End all faults."""
        self.hangs.clear()
        self.failures = 0

    def find(self, below: str = "") -> list[RemoteFile]:
        self._answer()
        top = self._folder / below
        files = sorted(path for path in top.rglob("*") if path.is_file()) if top.is_dir() else []
        return [
            RemoteFile(
                path.relative_to(self._folder).as_posix(), path.stat().st_size, str(path.stat().st_mtime_ns),
                path.stat().st_mtime,
            )
            for path in files
        ]  # fmt: skip

    def fetch(self, file: RemoteFile, target: Path, arrived: Callable[[int], None]) -> None:
        self._answer()
        data = (self._folder / file.path).read_bytes()
        target.write_bytes(data)
        arrived(len(data))

    def digest_holds(self, file: RemoteFile) -> bool:
        return True

    def explain(self, error: Exception) -> ConchError:
        return explained("s3://bucket/models", error, "the credentials", lambda text: text)

    def _answer(self) -> None:
        block(self._latency(0.02) + (self.hangs.pop() if self.hangs else 0.0))
        if self.failures:
            self.failures -= 1
            raise TimeoutError("the store does not answer")
