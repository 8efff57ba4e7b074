"""Messages between the server and a codec process: a JSON header and buffers in one in-memory file.

The sender writes them once and the receiver maps them. Only the descriptor passes through the socket, so that neither
side waits for the other to read. Used on both sides.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
from array import array
from collections.abc import Iterable, Sequence
from struct import Struct
from types import TracebackType
from typing import Any, Final

from conch.core.errors import unavailable
from conch.core.tensors import Buffer
from conch.workers.child.memory import anonymous_file

Header = dict[str, Any]

#: The size of the header and of the whole message (bytes).
_SIZES: Final = Struct("<QQ")
_ANCILLARY: Final = socket.CMSG_SPACE(4)


class SharedMessage:
    """A written message; as a context manager, closes it on exit."""

    __slots__ = ("_fd", "_sizes")

    def __init__(self, header: Header, parts: Iterable[Buffer] = ()) -> None:
        """Write a message. Raises UNAVAILABLE if there is not enough memory."""
        text = json.dumps(header).encode()  # Python's JSON can carry non-finite numbers
        self._fd = anonymous_file()
        try:
            size = sum(_write(self._fd, part) for part in (text, *parts))
        except OSError as error:
            os.close(self._fd)
            raise unavailable(f"not enough memory for a large request: {error.strerror}") from None
        except BaseException:
            os.close(self._fd)
            raise
        self._sizes = _SIZES.pack(len(text), size)

    def send(self, connection: socket.socket) -> None:
        """Send without blocking: the other side has read the previous message. Raises OSError if it is closed."""
        connection.sendmsg([self._sizes], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [self._fd]))])

    def __enter__(self) -> SharedMessage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def receive(connection: socket.socket) -> tuple[Header, memoryview]:
    """Return the header and the concatenated parts of the next message; the memory is freed with the last view.

    Raises EOFError if the other side is gone, BlockingIOError from a socket that would block.
    """
    data, ancillary, _, _ = connection.recvmsg(_SIZES.size, _ANCILLARY, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    if not data:
        raise EOFError("the other end of the codec's socket is gone")
    fds = array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
    header_size, size = _SIZES.unpack(data)
    try:
        mapped = memoryview(mmap.mmap(fds[0], size, prot=mmap.PROT_READ))
    finally:
        for fd in fds:
            os.close(fd)
    return json.loads(bytes(mapped[:header_size])), mapped[header_size:]


def split(parts: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Split a message into parts of these sizes (bytes)."""
    buffers = []
    at = 0
    for size in sizes:
        buffers.append(parts[at : at + size])
        at += size
    return buffers


def _write(fd: int, part: Buffer) -> int:
    view = memoryview(part).cast("B") if len(part) else memoryview(b"")
    size = len(view)
    while view:
        view = view[os.write(fd, view) :]
    return size
