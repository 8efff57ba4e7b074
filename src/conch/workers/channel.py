"""The channel between the server and a worker: framing, tensors, and file descriptors of shared memory.

A frame is ``<header length><payload length>`` (two little-endian unsigned 32-bit integers), a JSON
object with the key ``op``, and the payload: the bytes of small tensors, one after the other in the
order in which the header names them.  Nothing in a frame is ever executed.

``Endpoint`` is the state of either end and does no waiting: the server drives one from its event
loop.  ``Channel`` is the blocking end in a worker.  Runs in any environment (standard library only).
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from array import array
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Tuple

from conch.errors import internal
from conch.tensors import Buffer
from conch.workers.memory import RegionMap, RegionPool
from conch.workers.packing import Packer

Header = Dict[str, Any]
Frame = Tuple[Header, bytearray]
#: Buffers to write in this order, and file descriptors to send along with the first byte.
Message = Tuple[List[Buffer], List[int]]

#: A header or a payload that claims more than this is a broken frame.
FRAME_LIMIT = 256 << 20

_HEAD = struct.Struct("<II")
_CAPACITY = 256 << 10
_JOIN_LIMIT = 32 << 10
_MAX_BUFFERS = 64
_ANCILLARY = socket.CMSG_SPACE(16 * 4)
# Plain integers: enum members are slow to combine.
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_DONTWAIT = int(socket.MSG_DONTWAIT)

try:
    import orjson

    loads: Callable[[memoryview], Any] = orjson.loads
    _fast_dumps: Callable[[Header], bytes] = orjson.dumps
except ImportError:

    def loads(data: memoryview) -> Any:
        return json.loads(bytes(data))

    def _fast_dumps(header: Header) -> bytes:
        return json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()


def dumps(header: Header) -> bytes:
    """A header as JSON; text that is not valid Unicode (a surrogate from a file name) is replaced."""
    try:
        return _fast_dumps(header)
    except (TypeError, UnicodeEncodeError):
        return json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def encode_frame(header: Header, payload: Sequence[Buffer] = (), size: int = 0) -> List[Buffer]:
    """A frame as buffers; ``size`` is what the buffers of ``payload`` add up to, in bytes."""
    text = dumps(header)
    if size > _JOIN_LIMIT:
        return [_HEAD.pack(len(text), size) + text, *payload]
    return [b"".join((_HEAD.pack(len(text), size), text, *payload))]


class FrameReader:
    """Cuts a stream into frames: reads into one buffer, and keeps received descriptors in order."""

    def __init__(self) -> None:
        self.fds: Deque[int] = deque()
        self._buffer = bytearray(_CAPACITY)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    def receive(self, connection: socket.socket, flags: int = 0) -> List[Frame]:
        """Read once and return the frames that are complete by now, possibly none.

        Raises EOFError when the peer has closed, BlockingIOError from a socket that would block,
        INTERNAL for a frame that cannot be one.
        """
        count, ancillary, state, _ = connection.recvmsg_into((self._view[self._end :],), _ANCILLARY, flags | _CLOEXEC)
        if ancillary:
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    self.fds.extend(struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4]))
            if state & socket.MSG_CTRUNC:
                raise internal("file descriptors were lost on the channel")
        if not count:
            raise EOFError("the channel has been closed")
        self._end += count
        return self._cut()

    def close(self) -> None:
        """Close descriptors that no frame asked for."""
        while self.fds:
            os.close(self.fds.popleft())

    def _cut(self) -> List[Frame]:
        frames: List[Frame] = []
        start, end, buffer = self._start, self._end, self._buffer
        needed = 8
        while end - start >= 8:
            header_size, payload_size = _HEAD.unpack_from(buffer, start)
            needed = 8 + header_size + payload_size
            if end - start < needed:
                if header_size > FRAME_LIMIT or payload_size > FRAME_LIMIT:
                    raise internal(f"a frame claims {header_size} + {payload_size} bytes")
                break
            middle = start + 8 + header_size
            start += needed
            try:
                header = loads(self._view[middle - header_size : middle])
            except ValueError as error:
                raise internal(f"the header of a frame is not JSON: {error}") from None
            if type(header) is not dict or type(header.get("op")) is not str:
                raise internal("the header of a frame is not an object with an op")
            frames.append((header, buffer[middle:start]))
            needed = 8
        if start == end:
            start = end = 0
        self._start, self._end = start, end
        if start + needed > len(buffer) or (end == 0 and len(buffer) > _CAPACITY):
            self._make_room(needed)
        return frames

    def _make_room(self, needed: int) -> None:
        """Move the unfinished frame to the front of a buffer that can hold it."""
        rest = self._buffer[self._start : self._end]
        if max(needed, _CAPACITY) != len(self._buffer):
            self._buffer = bytearray(max(needed, _CAPACITY))
            self._view = memoryview(self._buffer)
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)


class Endpoint:
    """One end of a channel: this side's regions, the other side's, and what is to be said about them.

    Frames about regions (``region``, ``forget``, ``release`` and the key ``release``) are dealt with
    here and never shown.  Not thread-safe but for ``regions.returned``.
    """

    def __init__(self) -> None:
        self.pool = RegionPool()
        self.regions = RegionMap()
        self._reader = FrameReader()

    def encode(self, header: Header, packer: Optional[Packer] = None) -> Message:
        """What to write for one frame, with whatever the other side must know before it.

        The descriptors in ``header`` that came from ``packer`` are completed.  The file descriptors
        stay this endpoint's; they must not be sent later than the buffers.
        """
        if packer is not None and packer.large:
            packer.fill_region(self.pool)
        returned = self.regions.returned
        if returned:
            header["release"] = _drain(returned)
        frame = encode_frame(header, packer.payload, packer.size) if packer is not None else encode_frame(header)
        if not self.pool.has_news:
            return frame, []
        before, fds = self._announcements()
        return [*before, *frame], fds

    def flush(self) -> Optional[Message]:
        """A message for what no frame has carried yet: regions given back or dropped; None if nothing."""
        if self.regions.returned:
            return self.encode({"op": "release", "regions": _drain(self.regions.returned)})
        if self.pool.has_news:
            return self._announcements()
        return None

    def receive(self, connection: socket.socket, flags: int = 0) -> List[Frame]:
        """Read once; the frames that this completed.  Raises as ``FrameReader.receive`` does."""
        frames = self._reader.receive(connection, flags)
        for header, _ in frames:
            if header["op"] in _OWN or "release" in header:
                return [frame for frame in frames if self._is_for_owner(frame[0])]
        return frames

    def close(self) -> None:
        """Give back all memory and descriptors; data that was unpacked without a copy stays valid."""
        self.pool.close()
        self.regions.close()
        self._reader.close()

    def _announcements(self) -> Message:
        created, dropped = self.pool.news()
        buffers: List[Buffer] = []
        for id in dropped:
            buffers += encode_frame({"op": "forget", "region": id})
        for region in created:
            buffers += encode_frame({"op": "region", "region": region.id, "size": region.size})
        return buffers, [region.fd for region in created]

    def _is_for_owner(self, header: Header) -> bool:
        op = header["op"]
        try:
            if op == "region":
                if not self._reader.fds:
                    raise internal("a memory region was announced without its file descriptor")
                self.regions.add(header["region"], header["size"], self._reader.fds.popleft())
            elif op == "forget":
                self.regions.forget(header["region"])
            elif op == "release":
                self.pool.release(header["regions"])
            if "release" in header:
                self.pool.release(header.pop("release"))
        except (KeyError, TypeError) as error:
            raise internal(f"a frame {op!r} is not as it should be: {error!r}") from None
        return op not in _OWN


def write(connection: socket.socket, message: Message) -> Buffer:
    """Write once and return what is left to be written (without descriptors).

    Raises BlockingIOError when a non-blocking socket took nothing, and OSError when the peer is gone.
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
    """The worker's end: blocking, safe to send on from any thread; one thread at a time receives.

    ``on_closed`` is called when the server has gone; it does not return in a worker, where all that
    is left to do is to end.
    """

    def __init__(self, connection: socket.socket, on_closed: Optional[Callable[[], None]] = None) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._on_closed = on_closed
        self._endpoint = Endpoint()
        self._frames: Deque[Frame] = deque()
        self._posted: Deque[Tuple[Header, Optional[Packer]]] = deque()
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._waiting = False

    @property
    def regions(self) -> RegionMap:
        """The server's regions, for an ``Unpacker``."""
        return self._endpoint.regions

    def send(self, header: Header, packer: Optional[Packer] = None) -> None:
        """Write one frame, waiting while the socket is full."""
        with self._sending:
            self._write(self._endpoint.encode(header, packer))
        if self._waiting:
            self._flush()

    def receive(self) -> Frame:
        """Wait for the next frame.  Raises EOFError when the server has gone."""
        with self._receiving:
            while not self._frames:
                self._waiting = True
                self._flush()
                self._frames.extend(self._read(0))
                self._waiting = False
            return self._frames.popleft()

    def poll(self, handle: Callable[[Header], bool]) -> None:
        """Show ``handle`` the headers of frames that have arrived, without waiting.

        Those that it returns False for are kept for ``receive``, and shown again at the next call.
        Does nothing while another thread is receiving, since that one will see the frames.
        """
        if not self._receiving.acquire(False):
            return
        try:
            try:
                while True:
                    self._frames.extend(self._read(_DONTWAIT))
            except BlockingIOError:
                pass
            if self._frames:
                self._frames = deque([frame for frame in self._frames if not handle(frame[0])])
        finally:
            self._receiving.release()

    def give_back(self, region: int) -> None:
        """The worker has done with a region.  May be called by the garbage collector, in any thread.

        The next frame carries it; when none is to be expected soon it is sent alone.
        """
        self._endpoint.regions.returned.append(region)
        if self._waiting:
            self._flush()

    def post(self, header: Header, packer: Optional[Packer] = None) -> None:
        """Have a frame sent as soon as nobody else is sending; for the garbage collector, as ``give_back``."""
        self._posted.append((header, packer))
        if self._waiting:
            self._flush()

    def close(self) -> None:
        self._endpoint.close()
        self._connection.close()

    def _read(self, flags: int) -> List[Frame]:
        try:
            return self._endpoint.receive(self._connection, flags)
        except (EOFError, ConnectionError):
            if self._on_closed is not None:
                self._on_closed()
            raise EOFError("the channel has been closed") from None

    def _write(self, message: Message) -> None:
        try:
            rest = write(self._connection, message)
            if rest:
                self._connection.sendall(rest)
        except ConnectionError:
            if self._on_closed is not None:
                self._on_closed()
            raise

    def _flush(self) -> None:
        # Whoever holds the lock sends what this call would, or looks again afterwards.
        endpoint = self._endpoint
        while (self._posted or endpoint.regions.returned or endpoint.pool.has_news) and self._sending.acquire(False):
            try:
                while self._posted:
                    self._write(endpoint.encode(*self._posted.popleft()))
                message = endpoint.flush()
                if message is not None:
                    self._write(message)
            finally:
                self._sending.release()


_OWN = frozenset(("region", "forget", "release"))


def _drain(ids: Deque[int]) -> List[int]:
    """Take all; others may append meanwhile."""
    return [ids.popleft() for _ in range(len(ids))]
