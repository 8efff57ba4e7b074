"""An HTTP/2 client for attacks: it sends frames as fast as the socket accepts them, and reads in a separate thread."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from types import TracebackType
from typing import Final

import hpack

from conch.frontends.grpc.messages import PREFIX
from conch.http2 import frames

INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
LIVE: Final = "/inference.GRPCInferenceService/ServerLive"


def message(data: bytes, compressed: bool = False) -> bytes:
    """Return a gRPC message with its prefix."""
    return PREFIX.pack(compressed, len(data)) + data


def _in_frames(stream: int, data: bytes, end: bool) -> bytes:
    """Return DATA frames of a size that every server accepts; with ``end``, the last one ends the stream."""
    size = frames.DEFAULT_FRAME_SIZE
    parts = []
    for at in range(0, len(data), size):
        flags = frames.END_STREAM if end and at + size >= len(data) else 0
        parts.append(frames.frame(frames.DATA, flags, stream, data[at : at + size]))
    return b"".join(parts)


class Http2Client:
    """A connection that opens every window for the server; ``closed`` is set at its end.

    ``ended`` counts the streams that the server has ended or reset.
    """

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._changed = threading.Condition()
        self._encoder = hpack.Encoder()
        self._initial = frames.DEFAULT_WINDOW
        self._window = frames.DEFAULT_WINDOW
        self._windows: Counter[int] = Counter()
        self._opened: set[int] = set()
        self._last = -1
        self.answered: Counter[int] = Counter()
        self.ended = 0
        self.closed = False
        self.send(
            frames.PREFACE
            + frames.settings({frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW})
            + frames.window_update(0, 1 << 30)
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Http2Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._reader.join(60)
        self._socket.close()

    def send(self, data: bytes) -> bool:
        """Send bytes unchanged; returns whether the connection is still open."""
        try:
            self._socket.sendall(data)
        except OSError:
            self.closed = True
        return not self.closed

    def open(
        self, path: str, *more: tuple[str, str], indexed: bool = True, end: bool = False, encoded: bytes = b""
    ) -> tuple[int, bytes]:
        """Return a new stream and its HEADERS frame; ``encoded`` are encoded fields to append to the others."""
        self._last += 2
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers"),
                  ("content-type", "application/grpc"), *more]  # fmt: skip
        block = self._encoder.encode(fields if indexed else [hpack.NeverIndexedHeaderTuple(*field) for field in fields])
        with self._changed:
            self._opened.add(self._last)
        flags = frames.END_HEADERS | (frames.END_STREAM if end else 0)
        return self._last, frames.frame(frames.HEADERS, flags, self._last, block + encoded)

    def send_data(self, stream: int, data: bytes, *, end: bool = False) -> bool:
        """Send a body as flow control allows; returns whether the connection is still open."""
        at = 0
        while at < len(data):
            with self._changed:
                self._changed.wait_for(lambda: self.closed or self._allowed(stream) > 0, 30)
                size = min(len(data) - at, self._allowed(stream), 1 << 20)
                if self.closed or size <= 0:
                    return False
                self._window -= size
                self._windows[stream] -= size
            if not self.send(_in_frames(stream, data[at : at + size], end and at + size == len(data))):
                return False
            at += size
        return True

    def wait_ended(self, count: int, seconds: float) -> None:
        """Wait until this many streams have ended, or the connection has."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self.ended >= count, seconds)

    def wait_answered(self, stream: int, size: int, seconds: float) -> None:
        """Wait until this many bytes of responses have arrived on a stream, or the connection has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self.answered[stream] >= size, seconds)

    def _allowed(self, stream: int) -> int:
        return min(self._window, self._initial + self._windows[stream])

    def _read(self) -> None:
        buffer = b""
        try:
            while received := self._socket.recv(1 << 20):
                buffer += received
                with self._changed:
                    buffer = buffer[self._handle_all(buffer) :]
                    self._changed.notify_all()
        except OSError:
            pass
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def _handle_all(self, buffer: bytes) -> int:
        """Handle the received frames; returns the position of the first incomplete one."""
        at = 0
        while len(buffer) - at >= 9:
            word, flags, stream_id = frames.FRAME.unpack_from(buffer, at)
            end = at + 9 + (word >> 8)
            if end > len(buffer):
                break
            self._handle(word & 0xFF, flags, stream_id, buffer[at + 9 : end])
            at = end
        return at

    def _handle(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.SETTINGS and not flags & frames.ACK:
            self._initial = dict(frames.SETTING.iter_unpack(payload)).get(frames.INITIAL_WINDOW_SIZE, self._initial)
            self.send(frames.frame(frames.SETTINGS, frames.ACK, 0))
        elif kind == frames.WINDOW_UPDATE:
            (increment,) = frames.WORD.unpack(payload)
            if stream_id:
                self._windows[stream_id] += increment
            else:
                self._window += increment
        elif kind == frames.PING and not flags & frames.ACK:
            self.send(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.DATA:
            self.answered[stream_id] += len(payload)
        last = kind == frames.RST_STREAM or (kind in (frames.DATA, frames.HEADERS) and flags & frames.END_STREAM)
        if last and stream_id in self._opened:
            self._opened.discard(stream_id)
            self.ended += 1
