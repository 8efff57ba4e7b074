"""The server's end of a worker channel: reads frames and queues outgoing frames while the socket is full.

Never blocks. Owned by a ``WorkerProcess``; runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from conch.core.errors import ConchError
from conch.core.inference import ignore
from conch.workers.child.buffers import BufferMap
from conch.workers.child.channel import Endpoint, Frame, Message, write
from conch.workers.child.packing import Packer

#: Time without frames after which free channel buffers are released (s). Mapping new ones costs as much as writing
#: them.
IDLE_SECONDS: Final = 1.0
#: Delay before messages about channel buffers are sent without a frame (s).
FLUSH_SECONDS: Final = 0.01


class Link:
    """A connected socket and its channel buffers.

    ``on_frames`` is called with received frames. ``on_broken`` is called once, when the worker has closed the socket
    (with None) or violated the protocol (with the error).
    """

    def __init__(
        self,
        connection: socket.socket,
        on_frames: Callable[[list[Frame]], None],
        on_broken: Callable[[ConchError | None], None],
    ) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._on_frames = on_frames
        self._on_broken = on_broken
        self._endpoint = Endpoint()
        self._unsent: deque[Message] = deque()
        self._used = self._closed = False
        self._trimming: asyncio.TimerHandle | None = None
        self._flushing: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._endpoint.pool.on_loan_ended = self._flush_later
        self._loop.add_reader(connection.fileno(), self._readable)

    @property
    def buffers(self) -> BufferMap:
        """The worker's channel buffers."""
        return self._endpoint.buffers

    @property
    def shared_bytes(self) -> int:
        """Size of the channel buffers of both ends (bytes)."""
        return self._endpoint.pool.size + self._endpoint.buffers.size

    def send(self, header: dict[str, Any], packer: Packer | None = None) -> None:
        """Send a frame, or queue it while the socket is full; a broken socket is reported by the reader.

        Raises ConchError or OSError if no shared memory is available.
        """
        message = self._endpoint.encode(header, packer)
        self._used = True
        if self._unsent:
            self._keep(message)
            return
        try:
            rest = write(self._socket, message)
        except BlockingIOError:
            self._keep(message)
        except OSError:
            return  # ``_readable`` or the end of the process reports it
        else:
            if rest:
                self._keep(([rest], []))

    def flush_soon(self) -> None:
        """Send pending messages about channel buffers soon, because the next frame may be sent much later.

        A frame that is sent before carries them, which saves the worker from waking up for them.
        """
        if self._flushing is None and (self._endpoint.shares or self._endpoint.has_changes):
            self._flushing = self._loop.call_later(FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        """Send pending messages about channel buffers now."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        message = self._endpoint.flush()
        if message is not None:
            self._keep(message)
            self._writable()
        if self._trimming is None and self._endpoint.shares:
            self._trimming = self._loop.call_later(IDLE_SECONDS, self._trim)

    def _flush_later(self) -> None:
        """Schedule ``flush`` so that the worker closes a client's file; thread-safe."""
        if not self._closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._flush_if_open)

    def _flush_if_open(self) -> None:
        if not self._closed:
            self.flush()

    def _trim(self) -> None:
        """Release free channel buffers, or try again later if frames have been sent since the last attempt."""
        if self._used:
            self._used = False
            self._trimming = self._loop.call_later(IDLE_SECONDS, self._trim)
            return
        self._trimming = None
        self._keep(self._endpoint.trim())
        self._writable()

    def drain(self) -> None:
        """Deliver the frames that the worker sent before it ended."""
        try:
            while True:
                self._on_frames(self._endpoint.receive(self._socket))
        except (EOFError, OSError, ConchError):
            pass

    def stop_reading(self) -> None:
        self._loop.remove_reader(self._socket.fileno())

    def close(self) -> None:
        for timer in (self._trimming, self._flushing):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._endpoint.close()
        self._closed = True
        self._on_frames = self._on_broken = ignore  # break the reference cycle with the owner

    def _keep(self, message: Message) -> None:
        if not self._unsent:
            self._loop.add_writer(self._socket.fileno(), self._writable)
        self._unsent.append(message)

    def _writable(self) -> None:
        while self._unsent:
            try:
                rest = write(self._socket, self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()
                break
            if rest:
                self._unsent[0] = ([rest], [])
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        try:
            frames = self._endpoint.receive(self._socket)
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._on_broken(None)
            return
        except ConchError as error:
            self._on_broken(error)
            return
        self._on_frames(frames)
