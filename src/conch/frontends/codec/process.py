"""A codec process as the server sees it: started, given one piece of work after the other, killed.

Runs on the event loop, in the thread whose end the process does not survive.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from conch.errors import ConchError
from conch.frontends.codec import memory
from conch.frontends.codec.memory import Header, SharedMessage
from conch.tensors import Buffer
from conch.workers.host.activity import TICKS, activity
from conch.workers.host.spawn import SpawnedProcess

_PROGRAM = Path(__file__).with_name("program.py")
#: Messages of more bytes than this are written in a thread.
_LARGE = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")

#: Answers what the process asks, or raises to refuse the request.
Answer = Callable[[Header], Header]


class CodecProcess:
    """One process.  Raises OSError where it cannot be started."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            with theirs:
                fd = theirs.fileno()
                popen = subprocess.Popen(
                    [sys.executable, "-P", str(_PROGRAM), str(fd)],
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(fd,),
                )
            self._process = SpawnedProcess(popen.pid, popen.wait, None, self._exited)
        except OSError:
            self._socket.close()
            raise
        self.pid = popen.pid
        self.exited = False
        self._closed = False

    async def perform(self, header: Header, parts: list[Buffer], answer: Answer | None) -> tuple[Header, memoryview]:
        """What the process replies to some work.  Empties ``parts`` as soon as they are written.

        Raises EOFError when it has ended, UNAVAILABLE where there is no memory, and what ``answer`` raises.
        """
        await self._send(header, parts)
        reply, body = await self._receive()
        if "ask" not in reply:
            return reply, body
        assert answer is not None
        try:
            told = answer(reply["ask"])
        except ConchError:
            await self._tell({"refused": True})
            await self._receive()
            raise
        await self._tell(told)
        return await self._receive()

    @property
    def resident(self) -> int:
        """The memory that the process has (bytes), 0 where the system does not tell."""
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * _PAGE
        except (OSError, IndexError):
            return 0

    @property
    def processor_seconds(self) -> float:
        """The processor time that the process has used (s), 0 where the system does not tell."""
        seen = activity(self.pid)
        return 0.0 if seen is None else seen.cpu / TICKS

    def close(self) -> None:
        """Let the process end when it has done its work."""
        if not self._closed:
            self._closed = True
            self._socket.close()

    def kill(self) -> None:
        """End the process now; what it does fails with EOFError."""
        self._process.kill()

    async def _send(self, header: Header, parts: list[Buffer]) -> None:
        write = partial(SharedMessage, header, parts)
        large = sum(map(len, parts)) > _LARGE
        message = await self._loop.run_in_executor(self._threads, write) if large else write()
        del write
        parts.clear()
        with message:
            try:
                message.send(self._socket)
            except OSError:
                raise EOFError("the codec process has ended") from None

    async def _tell(self, header: Header) -> None:
        """Answer what the process asked; one that gets no answer would take the next work for it, and is given up."""
        try:
            await self._send(header, [])
        except ConchError as error:
            raise EOFError(f"the codec process got no answer: {error}") from None

    async def _receive(self) -> tuple[Header, memoryview]:
        readable = self._loop.create_future()
        fd = self._socket.fileno()
        self._loop.add_reader(fd, _wake, readable)
        try:
            await readable
        finally:
            self._loop.remove_reader(fd)
        try:
            return memory.receive(self._socket)
        except OSError:
            raise EOFError("the codec process has ended") from None

    def _exited(self) -> None:
        self.exited = True


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _environment() -> dict[str, str]:
    """This process's environment, with its search path, and without threads for linear algebra."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
