"""An HTTP/2 client that sends exactly what a test tells it, over a blocking socket."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field

import hpack

from conch.frontends.grpc.messages import PREFIX
from conch.http2 import frames

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"


def headers(path: str = LIVE, *more: tuple[str, str], **replaced: str) -> list[tuple[str, str]]:
    """The fields of a gRPC request; ``replaced`` are pseudo-fields by name, ``more`` go behind."""
    pseudo = {"method": "POST", "scheme": "http", "path": path, "authority": "test", **replaced}
    given = {name for name, _ in more}
    regular = [("te", "trailers"), ("content-type", "application/grpc")]
    return [(f":{name}", value) for name, value in pseudo.items()] + [
        (name, value) for name, value in [*(one for one in regular if one[0] not in given), *more]
    ]


def message(data: bytes, compressed: bool = False) -> bytes:
    """A gRPC message with its prefix."""
    return PREFIX.pack(compressed, len(data)) + data


@dataclass
class OpenAiResponse:
    """What came on one stream; ``headers`` joins header blocks and trailers."""

    headers: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    ended: bool = False
    reset: int | None = None
    sizes: list[int] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.headers["grpc-status"])

    def messages(self) -> list[bytes]:
        found, at = [], 0
        while at < len(self.data):
            _, length = PREFIX.unpack_from(self.data, at)
            found.append(self.data[at + 5 : at + 5 + length])
            at += 5 + length
        return found


class RawClient:
    """``answers`` by stream; ``goaway`` is the code and the text of the last one, ``closed`` set at the end."""

    def __init__(self, address: tuple[str, int], *, greet: bool = True, **settings: int) -> None:
        self.socket = socket.create_connection(address, timeout=60)
        self.encoder = hpack.Encoder()
        self.decoder = hpack.Decoder()
        self.answers: dict[int, OpenAiResponse] = {}
        self.goaway: tuple[int, str] | None = None
        self.goaways: list[int] = []
        self.pongs: list[bytes] = []
        self.window_updates: list[tuple[int, int]] = []
        self.settings: dict[int, int] = {}
        self.settings_acks = 0
        self.closed = False
        self.answer_pings = True
        self.pinged = False
        self._buffer = b""
        self._next = 1
        if greet:
            numbers = {getattr(frames, name.upper()): value for name, value in settings.items()}
            self.send(frames.PREFACE + frames.settings(numbers))

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def new_stream(self) -> int:
        self._next += 2
        return self._next - 2

    def head(self, stream: int, fields: list[tuple[str, str]], *, end: bool = False) -> bytes:
        """A HEADERS frame."""
        flags = frames.END_HEADERS | (frames.END_STREAM if end else 0)
        return frames.frame(frames.HEADERS, flags, stream, self.encoder.encode(fields))

    def request(self, path: str, data: bytes, *more: tuple[str, str]) -> int:
        """Send a whole unary request; returns its stream."""
        stream = self.new_stream()
        self.send(
            self.head(stream, headers(path, *more))
            + frames.frame(frames.DATA, frames.END_STREAM, stream, message(data))
        )
        return stream

    def receive(self) -> bool:
        """Take one frame in; False at the end of the connection."""
        head = self._exactly(9)
        if head is None:
            self.closed = True
            return False
        word, flags, stream = frames.FRAME.unpack(head)
        payload = self._exactly(word >> 8) or b""
        self.handle(word & 0xFF, flags, stream, payload)
        return True

    def _exactly(self, size: int) -> bytes | None:
        while len(self._buffer) < size:
            try:
                data = self.socket.recv(1 << 20)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self._buffer += data
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def handle(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        answer = self.answers.setdefault(stream, OpenAiResponse()) if stream else OpenAiResponse()
        if kind == frames.HEADERS:
            answer.headers.update(self.decoder.decode(payload))
            answer.ended = bool(flags & frames.END_STREAM)
        elif kind == frames.DATA:
            answer.data += payload
            answer.sizes.append(len(payload))
            answer.ended = bool(flags & frames.END_STREAM)
        elif kind == frames.RST_STREAM:
            answer.reset = frames.WORD.unpack(payload)[0]
        elif kind == frames.SETTINGS:
            if flags & frames.ACK:
                self.settings_acks += 1
            else:
                self.settings.update(frames.SETTING.iter_unpack(payload))
        elif kind == frames.PING:
            if flags & frames.ACK:
                self.pongs.append(payload)
            else:
                self.pinged = True
                if self.answer_pings:
                    self.send(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.GOAWAY:
            self.goaways.append(frames.WORD.unpack(payload[:4])[0])
            self.goaway = (frames.WORD.unpack(payload[4:8])[0], payload[8:].decode())
        elif kind == frames.WINDOW_UPDATE:
            self.window_updates.append((stream, frames.WORD.unpack(payload)[0]))

    def answer(self, stream: int) -> OpenAiResponse:
        """What comes on a stream, once it has ended or was reset, or the connection is closed."""
        while True:
            known = self.answers.get(stream)
            if known is not None and (known.ended or known.reset is not None):
                return known
            if not self.receive():
                return known or OpenAiResponse()

    def reset_connection(self) -> None:
        """Close without ceremony: the server sees a reset, not an end."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def ping(self, payload: bytes = b"rawclien") -> None:
        """Return when the server has handled all that was sent so far, or has closed the connection."""
        self.send(frames.frame(frames.PING, 0, 0, payload))
        while payload not in self.pongs and self.receive():
            pass

    def until_closed(self) -> None:
        """Take in everything up to the end of the connection."""
        while self.receive():
            pass
