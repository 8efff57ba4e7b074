"""The worker channel between the server and a worker: frames, and file descriptors of shared memory.

``Endpoint`` is the state of either end and never blocks; the server drives one from its event loop. ``Channel`` is the
blocking end in a worker. Runs in any environment (standard library only).
"""

from __future__ import annotations

import select
import socket
import threading
from array import array
from collections import deque
from typing import Callable

from conch.core.errors import internal
from conch.core.tensors import Buffer
from conch.workers.child.buffers import BufferMap, BufferPool
from conch.workers.child.frames import Frame, FrameReader, Header, encode_frame
from conch.workers.child.packing import Packer

__all__ = ["Channel", "Endpoint", "Frame", "Header", "Message", "write"]

#: Buffers to write in order, and file descriptors to send with the first byte.
Message = tuple[list[Buffer], list[int]]

_MAX_BUFFERS = 64
# A plain integer: enum members are slow to combine.
_DONTWAIT = int(socket.MSG_DONTWAIT)


class Endpoint:
    """One end of a channel: encodes and decodes frames, and tracks the channel buffers of both sides.

    Handles frames about buffers (``buffer``, ``file``, ``forget``, ``release``, ``trim`` and the key ``release``) and
    does not return them. Not thread-safe, except ``buffers.returned``.
    """

    def __init__(self) -> None:
        self.pool = BufferPool()
        self.buffers = BufferMap()
        self._reader = FrameReader()

    def encode(self, header: Header, packer: Packer | None = None) -> Message:
        """Encode a frame, preceded by announcements of the buffers that it refers to.

        Completes the tensor descriptors in ``header`` that came from ``packer``. The endpoint keeps ownership of the
        file descriptors; they must not be sent later than the buffers.
        """
        if packer is not None and (packer.large or packer.offers):
            packer.fill_buffer(self.pool)
        returned = self.buffers.returned
        if returned:
            header["release"] = _drain(returned)
        frame = encode_frame(header, packer.payload, packer.size) if packer is not None else encode_frame(header)
        if not self.pool.has_changes:
            return frame, []
        before, fds = self._announcements()
        return [*before, *frame], fds

    def flush(self) -> Message | None:
        """Return a message with pending buffer changes that no frame has carried; None if there are none."""
        if self.buffers.returned:
            return self.encode({"op": "release", "buffers": _drain(self.buffers.returned)})
        if self.pool.has_changes:
            return self._announcements()
        return None

    @property
    def has_changes(self) -> bool:
        """Whether buffer changes wait for a frame."""
        return bool(self.buffers.returned) or self.pool.has_changes

    @property
    def shares(self) -> bool:
        """Whether either end has channel buffers."""
        return bool(self.pool.free or self.pool.lent or len(self.buffers))

    def trim(self) -> Message:
        """Drop the free buffers of this end; return the message that makes the other end do the same."""
        self.pool.trim()
        return self.encode({"op": "trim"})

    def receive(self, connection: socket.socket, flags: int = 0) -> list[Frame]:
        """Read once and return the completed frames. Raises as ``FrameReader.receive`` does."""
        frames = self._reader.receive(connection, flags)
        for header, _ in frames:
            if header["op"] in _OWN or "release" in header:
                return [frame for frame in frames if self._is_for_owner(frame[0])]
        return frames

    def close(self) -> None:
        """Release all memory and descriptors; data that was unpacked without a copy stays valid."""
        self.pool.close()
        self.buffers.close()
        self._reader.close()

    def _announcements(self) -> Message:
        created, dropped = self.pool.take_changes()
        parts: list[Buffer] = []
        for id in dropped:
            parts += encode_frame({"op": "forget", "buffer": id})
        for buffer in created:
            parts += encode_frame(buffer.announcement)
        return parts, [buffer.fd for buffer in created]

    def _is_for_owner(self, header: Header) -> bool:
        op = header["op"]
        try:
            if op == "buffer" or op == "file":
                if not self._reader.fds:
                    raise internal("a channel buffer was announced without its file descriptor")
                fd = self._reader.fds.popleft()
                if op == "file":
                    self.buffers.add_file(header["buffer"], fd)
                else:
                    self.buffers.add(header["buffer"], header["size"], fd)
            elif op == "forget":
                self.buffers.forget(header["buffer"])
            elif op == "release":
                self.pool.release(header["buffers"])
            elif op == "trim":
                self.pool.trim()
            if "release" in header:
                self.pool.release(header.pop("release"))
        except (KeyError, TypeError) as error:
            raise internal(f"a frame {op!r} is invalid: {error!r}") from None
        return op not in _OWN


def write(connection: socket.socket, message: Message) -> Buffer:
    """Write once and return the unwritten rest (without descriptors).

    Raises BlockingIOError if a non-blocking socket accepts nothing, and OSError if the peer is gone.
    """
    buffers, fds = message
    if len(buffers) > _MAX_BUFFERS:
        buffers = [b"".join(buffers)]
    if len(buffers) == 1 and not fds:
        sent = connection.send(buffers[0])
    else:
        sent = connection.sendmsg(buffers, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else [])
    for at, buffer in enumerate(buffers):
        if sent < len(buffer):
            return b"".join((memoryview(buffer)[sent:], *buffers[at + 1 :]))
        sent -= len(buffer)
    return b""


class Channel:
    """The worker's end of the channel: blocking, thread-safe.

    If several threads wait for frames, one of them receives for all. ``on_closed`` is called when the server has closed
    the channel; in a worker it exits the process.
    """

    def __init__(self, connection: socket.socket, on_closed: Callable[[], None] | None = None) -> None:
        connection.setblocking(True)
        self._connection = connection
        # A blocking ``recvmsg`` would also wake up whenever the server reads a frame, because the socket is writable.
        self._arrival = select.poll()
        self._arrival.register(connection, select.POLLIN)
        self._on_closed = on_closed
        #: Called with every frame on arrival, in the receiving thread; True removes the frame before ``receive``.
        self.early: Callable[[Header, bytearray], bool] = lambda header, payload: False
        #: Returns the header of a frame to send before the next frame, or None.
        self.ahead: Callable[[], Header | None] | None = None
        self.endpoint = Endpoint()
        self._frames: deque[Frame] = deque()
        self._keeping = threading.Lock()
        self._posted: deque[tuple[Header, Packer | None]] = deque()
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._received = threading.Condition()
        self._others = 0  # threads that wait for the receiving thread
        self._waiting = False

    @property
    def buffers(self) -> BufferMap:
        """The server's buffers, for an ``Unpacker``."""
        return self.endpoint.buffers

    def send(self, header: Header, packer: Packer | None = None) -> None:
        """Write a frame; blocks while the socket is full."""
        with self._sending:
            message = self.endpoint.encode(header, packer)
            if self.ahead is not None:
                message = self._with_ahead(self.ahead(), message)
            self._write(message)
        if self._waiting or self._posted:
            self._flush()

    def send_ahead(self) -> None:
        """Write the frame from ``ahead`` now instead of with the next frame."""
        with self._sending:
            self._write(self._with_ahead(self.ahead() if self.ahead is not None else None, ([], [])))
        if self._posted:
            self._flush()

    def share(self, header: Header, size: int) -> memoryview:
        """Allocate memory shared with the server until the channel ends; sends ``header`` with the ``buffer`` id."""
        buffer = self.endpoint.pool.take(size)
        buffer.map[:size] = bytes(size)
        self.send({**header, "buffer": buffer.id})
        return memoryview(buffer.map)[:size]

    def receive(self) -> Frame:
        """Return the next frame that ``early`` did not remove. Raises EOFError if the server has closed the channel."""
        while True:
            with self._keeping:
                if self._frames:
                    return self._frames.popleft()
            self.wait(self._has_frames)

    def wait(self, done: Callable[[], bool]) -> None:
        """Receive frames, or wait for the thread that receives them, until ``done()`` is true."""
        while not done():
            if self._receiving.acquire(False) or self._must_receive(done):
                try:
                    while not done():
                        self._waiting = True
                        self._flush()
                        self._arrival.poll()
                        frames = self._read(0)
                        self._waiting = False
                        self._keep(frames)
                        self._wake_others()
                finally:
                    self._receiving.release()
                    self._wake_others()

    def rest(self) -> None:
        """Send pending buffer changes, because the caller will wait for a frame outside of this class."""
        self._waiting = True
        self._flush()

    @property
    def buffered(self) -> bool:
        """Whether a frame has been read but not received."""
        return bool(self._frames)

    def fileno(self) -> int:
        """Return the descriptor of the socket, which becomes readable when a frame arrives."""
        return self._connection.fileno()

    def pending(self) -> bool:
        """Whether a frame, or a part of a frame, has arrived but has not been received."""
        return bool(self._frames) or bool(select.select([self._connection], (), (), 0)[0])

    def poll(self) -> None:
        """Read without blocking and pass all frames to ``early``, including those that it did not remove before."""
        if self._receiving.acquire(False):
            try:
                while True:
                    self._keep(self._read(_DONTWAIT))
            except BlockingIOError:
                pass
            finally:
                self._receiving.release()
                self._wake_others()
        if self._frames:
            with self._keeping:
                self._frames = deque([frame for frame in self._frames if not self.early(*frame)])

    def release_buffer(self, buffer: int) -> None:
        """Release a buffer to the server. May be called by the garbage collector, in any thread.

        The next frame carries the release; while the receiving thread waits, it is sent at once.
        """
        self.endpoint.buffers.returned.append(buffer)
        if self._waiting:
            self._flush()

    def post(self, header: Header, packer: Packer | None = None) -> None:
        """Send a frame as soon as no other thread is sending; may be called by the garbage collector."""
        self._posted.append((header, packer))
        self._flush()

    def close(self) -> None:
        self.endpoint.close()
        self._connection.close()

    def _with_ahead(self, header: Header | None, message: Message) -> Message:
        """Return ``message`` preceded by a frame with ``header``."""
        if header is None:
            return message
        before, fds = self.endpoint.encode(header)
        return [*before, *message[0]], [*fds, *message[1]]

    def _has_frames(self) -> bool:
        return bool(self._frames)

    def _keep(self, frames: list[Frame]) -> None:
        left = [frame for frame in frames if not self.early(*frame)]
        if left:
            with self._keeping:
                self._frames.extend(left)

    def _must_receive(self, done: Callable[[], bool]) -> bool:
        """Wait for the receiving thread; return True if this thread holds ``_receiving`` and must receive instead."""
        with self._received:
            # Counted first, so that a thread that stops receiving from now on notifies this one.
            self._others += 1
            try:
                if self._receiving.acquire(False):
                    return True
                if not done():
                    self._received.wait()
                return False
            finally:
                self._others -= 1

    def _wake_others(self) -> None:
        if self._others:
            with self._received:
                self._received.notify_all()

    def _read(self, flags: int) -> list[Frame]:
        try:
            return self.endpoint.receive(self._connection, flags)
        except (EOFError, ConnectionError):
            if self._on_closed is not None:
                self._on_closed()
            raise EOFError("the channel has been closed") from None

    def _write(self, message: Message) -> None:
        if not message[0]:
            return
        try:
            rest = write(self._connection, message)
            if rest:
                self._connection.sendall(rest)
        except ConnectionError:
            if self._on_closed is not None:
                self._on_closed()
            raise

    def _flush(self) -> None:
        # The holder of the lock sends these changes, or checks again after it releases the lock.
        endpoint = self.endpoint
        while (self._posted or endpoint.has_changes) and self._sending.acquire(False):
            try:
                while self._posted:
                    self._write(endpoint.encode(*self._posted.popleft()))
                message = endpoint.flush()
                if message is not None:
                    self._write(message)
            finally:
                self._sending.release()


_OWN = frozenset(("buffer", "file", "forget", "release", "trim"))


def _drain(ids: deque[int]) -> list[int]:
    """Remove and return all current items; other threads may append at the same time."""
    return [ids.popleft() for _ in range(len(ids))]
