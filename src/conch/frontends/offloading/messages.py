"""Messages between the server and an offloading process: values as JSON, and their bytes, in one in-memory file.

The sender writes the file once and the receiver maps it. Only the descriptor passes through the socket, so that neither
side waits for the other to read. :func:`pack` and :func:`unpack` convert values; only the classes listed here are ever
created, and nothing is pickled, so received data is never executed. Used on both sides.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from struct import Struct
from sys import maxsize
from types import TracebackType
from typing import Any, Final

from conch.core.errors import Code, ConchError, clipped, unavailable
from conch.core.inference import InferRequest, InferResponse, ModelSignature, TensorSpec, ignore
from conch.core.tensors import Buffer, WireTensor
from conch.wire.control import LoadParameters
from conch.wire.endpoints import FORMS
from conch.wire.json.generate import Layout
from conch.wire.json.infer import JsonOutputPlan, RequestedOutput
from conch.wire.openai.chat import ChatPlan
from conch.wire.openai.completions import CompletionPlan
from conch.wire.openai.reading import ApiError
from conch.wire.output.tools import Tools
from conch.wire.regions import Regions
from conch.wire.retrieval.endpoints import PLANS
from conch.wire.transcriptions import TranscriptionPlan
from conch.workers.child.buffers import anonymous_file

Header = dict[str, Any]

# Tensors whose data only the server has: parts of a body that are not sent, and of shared memory regions.


@dataclass(frozen=True, slots=True)
class Span:
    """``size`` bytes at ``start`` of a shared memory region, or of the data behind the JSON if ``region`` is empty."""

    region: str
    start: int
    size: int

    def __len__(self) -> int:
        return min(self.size, maxsize)

    def __getitem__(self, part: slice) -> Span:
        start, stop, _ = part.indices(self.size)
        return Span(self.region, self.start + start, max(stop - start, 0))


class SpanRegions(Regions):
    """The regions of an offloading process, which has none: reads and targets become spans."""

    __slots__ = ()

    def read(self, datatype: str, name: str, offset: int, size: int) -> Any:
        return Span(name, offset, size)

    def set_target(self, output: str, name: str, offset: int, size: int) -> None:
        self.output_targets[output] = Span(name, offset, size)  # type: ignore[assignment]


def resolve_spans(request: InferRequest, behind: memoryview, regions: Regions) -> None:
    """Replace the spans in a request by the data ``behind`` the JSON and by ``regions``; raises their errors."""
    for tensor in request.inputs.values():
        span: Any = tensor.data
        if type(span) is Span:
            if span.region:
                tensor.data = regions.read(tensor.datatype, span.region, span.start, span.size)
            else:
                tensor.data = behind[span.start : span.start + span.size]
    if isinstance(request.shared, SpanRegions):
        targets: Mapping[str, Any] = request.shared.output_targets
        for output, span in targets.items():
            regions.set_target(output, span.region, span.start, span.size)
        request.shared = regions


# Values


_PLAIN: Final = (str, int, float, bool, type(None))
#: Longer texts are sent as bytes beside the JSON (characters).
_SHORT: Final = 4096
_REQUEST: Final = (
    "model_name", "inputs", "model_version", "id", "outputs", "parameters", "correlation_id", "flags", "priority",
    "timeout",
)  # fmt: skip


def _make_request(**members: Any) -> InferRequest:
    batch_size, targets = members.pop("batch_size"), members.pop("targets")
    request = InferRequest(on_response=ignore, **members)
    request.batch_size = batch_size
    if targets is not None:
        request.shared = SpanRegions()
        request.shared.output_targets = targets
    return request


def _request_members(request: InferRequest) -> Header:
    targets = None
    if request.shared is not None:
        # The targets of an encoded response have been written, so that their names suffice.
        targets = {
            name: target if isinstance(target, Span) else None for name, target in request.shared.output_targets.items()
        }
    members = {name: getattr(request, name) for name in _REQUEST}
    return {**members, "batch_size": request.batch_size, "targets": targets}


def _members(*names: str) -> Callable[[Any], Header]:
    return lambda value: {name: getattr(value, name) for name in names}


def _error_members(error: ConchError) -> Header:
    return {
        "message": clipped(error.message),
        "code": error.code,
        "param": error.param and clipped(error.param),
        "reason": error.reason,
    }


#: The classes of values: a function that creates one from its members, and one that returns them. Records (data classes
#: and named tuples) need neither.
_CLASSES: Final[dict[type, tuple[Callable[..., Any], Callable[[Any], Header]]]] = {
    WireTensor: (WireTensor, _members(*WireTensor.__slots__)),
    InferRequest: (_make_request, _request_members),
    InferResponse: (InferResponse, _members("outputs", "parameters")),
    ConchError: (ConchError, _error_members),
    ApiError: (ApiError, _error_members),
}
_RECORDS: Final[tuple[Any, ...]] = (
    ChatPlan, CompletionPlan, JsonOutputPlan, LoadParameters, ModelSignature, RequestedOutput, Span, TensorSpec, Tools,
    TranscriptionPlan, *FORMS, *PLANS,
)  # fmt: skip
for record in _RECORDS:
    names = [field.name for field in fields(record)] if is_dataclass(record) else record._fields
    _CLASSES[record] = record, _members(*names)
_MAKERS: Final = {kind.__name__: maker for kind, (maker, _) in _CLASSES.items()}
_ENUMS: Final[dict[str, type[Enum]]] = {kind.__name__: kind for kind in (Code, Layout)}


class Packing:
    """The bytes and callables of values that are being packed: they are replaced by their numbers.

    The callables in a reply to a process are added to the ``callables`` of its work.
    """

    def __init__(self, callables: list[Callable[..., Any]] | None = None) -> None:
        self.parts: list[Buffer] = []
        self.callables = [] if callables is None else callables

    def pack(self, value: Any) -> Any:
        """Return a value as JSON. Raises TypeError for one of an unknown class."""
        if _is_plain(value):
            return {"json": value} if isinstance(value, list | dict) else value
        kind = type(value)
        if kind is str:
            return {"text": self._part(value.encode("utf-8", "surrogatepass"))}
        if kind in (bytes, bytearray, memoryview):
            return {"part": self._part(value)}
        if kind is list:
            return [self.pack(item) for item in value]
        if kind is tuple:
            return {"tuple": [self.pack(item) for item in value]}
        if kind is frozenset:
            return {"set": [self.pack(item) for item in sorted(value)]}
        if isinstance(value, Mapping):
            return {"dict": {name: self.pack(item) for name, item in value.items()}}
        if isinstance(value, Enum):
            return {"enum": kind.__name__, "name": value.name}
        if isinstance(value, Regions):
            return {"regions": None}
        if kind in _CLASSES:
            members = _CLASSES[kind][1](value)
            return {"class": kind.__name__, "members": {name: self.pack(item) for name, item in members.items()}}
        if callable(value):
            self.callables.append(value)
            return {"callable": len(self.callables) - 1}
        raise TypeError(f"{kind.__name__} cannot be sent to another process")

    def _part(self, data: Buffer) -> int:
        self.parts.append(data)
        return len(self.parts) - 1


def _is_plain(value: Any) -> bool:
    """Whether a value is its own JSON, without long texts."""
    kind = type(value)
    if kind is str:
        return len(value) <= _SHORT
    if kind is list:
        return all(map(_is_plain, value))
    if kind is dict:
        return all(type(name) is str and _is_plain(item) for name, item in value.items())
    return kind in _PLAIN


def unpack(document: Any, parts: Sequence[memoryview], call: Callable[..., Any] = ignore) -> Any:
    """Return a packed value; a callable becomes a function that calls ``call`` with its number and the arguments."""
    if type(document) is list:
        return [unpack(item, parts, call) for item in document]
    if type(document) is not dict:
        return document
    match document:
        case {"json": value}:
            return value
        case {"part": number}:
            return parts[number]
        case {"text": number}:
            return str(parts[number], "utf-8", "surrogatepass")
        case {"tuple": items}:
            return tuple([unpack(item, parts, call) for item in items])
        case {"set": items}:
            return frozenset([unpack(item, parts, call) for item in items])
        case {"dict": items}:
            return {name: unpack(item, parts, call) for name, item in items.items()}
        case {"enum": kind, "name": name}:
            return _ENUMS[kind][name]
        case {"regions": _}:
            return SpanRegions()
        case {"callable": number}:
            return lambda *arguments: call(number, *arguments)
        case {"class": kind, "members": members}:
            return _MAKERS[kind](**{name: unpack(member, parts, call) for name, member in members.items()})
    raise ValueError(f"unknown value {list(document)}")


# Transport


#: The size of the header and of the whole message (bytes).
_SIZES: Final = Struct("<QQ")
_ANCILLARY: Final = socket.CMSG_SPACE(4)


class SharedMessage:
    """A written message: a header of ``header_size`` bytes, and parts; as a context manager, closes it on exit."""

    __slots__ = ("_fd", "_sizes", "header_size")

    def __init__(self, header: Header, parts: Sequence[Buffer] = ()) -> None:
        """Write a message. Raises UNAVAILABLE if there is not enough memory."""
        # Python's JSON can carry non-finite numbers.
        text = json.dumps({**header, "sizes": list(map(len, parts))}).encode()
        self._fd = anonymous_file()
        try:
            size = sum(_write(self._fd, part) for part in (text, *parts))
        except OSError as error:
            os.close(self._fd)
            raise unavailable(f"not enough memory for a large request: {error.strerror}") from None
        except BaseException:
            os.close(self._fd)
            raise
        self.header_size = len(text)
        self._sizes = _SIZES.pack(len(text), size)

    def send(self, connection: socket.socket) -> None:
        """Send without blocking: the other side has read the previous message. Raises OSError if it is closed."""
        connection.sendmsg([self._sizes], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [self._fd]))])

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> SharedMessage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def receive(connection: socket.socket) -> tuple[Header, list[memoryview], mmap.mmap]:
    """Return the header and the parts of the next message, and its memory, which is freed with the last view.

    Raises EOFError if the other side is gone, BlockingIOError from a socket that would block.
    """
    data, ancillary, _, _ = connection.recvmsg(_SIZES.size, _ANCILLARY, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    if not data:
        raise EOFError("the other end of the socket is gone")
    fds = array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
    header_size, size = _SIZES.unpack(data)
    try:
        memory = mmap.mmap(fds[0], size, prot=mmap.PROT_READ)
    finally:
        for fd in fds:
            os.close(fd)
    view = memoryview(memory)
    header: Header = json.loads(bytes(view[:header_size]))
    parts = []
    at = header_size
    for size in header.pop("sizes"):
        parts.append(view[at : at + size])
        at += size
    return header, parts, memory


def _write(fd: int, part: Buffer) -> int:
    view = memoryview(part).cast("B") if len(part) else memoryview(b"")
    size = len(view)
    while view:
        view = view[os.write(fd, view) :]
    return size
