"""The work of offloading processes: functions that decode requests and encode responses, and the loop that calls them.

Front ends pass the functions to :meth:`~conch.frontends.offloading.offloader.Offloader.run`, which calls them here for
small bodies, and for large ones in a process that runs :func:`main`. A function does no I/O, except that a process
queries the server when it calls one of the callables among its arguments.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn

from conch.core.errors import ConchError, error_text, internal, invalid
from conch.core.inference import InferRequest, InferResponse, ModelSignature, ignore
from conch.core.tensors import CONFIG_NAME, Buffer, WireTensor
from conch.core.validation import count_strings, validate_request
from conch.frontends.offloading.messages import Header, Packing, SharedMessage, Span, receive, unpack
from conch.wire import compression
from conch.wire.endpoints import ENDPOINTS, GenerationRequest
from conch.wire.json.control import read_load
from conch.wire.json.generate import decode_generate, encode_generate, encode_texts
from conch.wire.json.infer import JsonOutputPlan, decode_infer, decode_split, parse_header_length
from conch.wire.json.infer import encode_infer as encode_parts
from conch.wire.multipart import read_form
from conch.wire.openai.media import Fetch, fetch_media
from conch.wire.openai.models import require_chat
from conch.wire.openai.reading import Fields, read_body
from conch.wire.openai.response import ResponsePlan
from conch.wire.openai.responses.items import list_items, read_items
from conch.wire.openai.responses.request import read_responses
from conch.wire.regions import Regions
from conch.wire.retrieval import endpoints as retrieval_endpoints
from conch.wire.retrieval.plans import Results, RetrievalPlan
from conch.wire.transcriptions import TranscriptionPlan, read_transcription
from conch.workers.child.forked import end_with_parent

# Limits of what a process returns: the server reads it on its event loop.


#: Maximum size of a header (bytes).
MOST_HEADER: Final = 8 << 20
#: Maximum number of tensors in a request, or of requests in a body.
MOST_PARTS: Final = 100_000
#: Maximum number of parameters of a request, or of files of a load.
MOST_PARAMETERS: Final = 10_000
#: Maximum size of a gRPC message without its tensors (bytes).
MOST_BESIDES: Final = 512 << 10


# Decoding


def infer(
    signature: ModelSignature,
    body: Buffer,
    behind: int,
    encoding: str,
    header_length: bytes | None,
    limit: int,
    regions: Regions,
) -> tuple[list[InferRequest], JsonOutputPlan]:
    """Decode ``infer``: one request, and the form of its response.

    ``encoding`` and ``header_length`` are the headers ``Content-Encoding`` and ``Inference-Header-Content-Length``. If
    ``behind`` is not 0, ``body`` is only the JSON, and the request has spans of the ``behind`` bytes that follow it.
    """
    if behind:
        rest: Any = Span("", 0, behind)
        request, plan = decode_split(body, rest, signature, ignore, max_input_size=limit, regions=regions)
    else:
        data = compression.decompress(body, encoding, limit)
        length = parse_header_length(header_length, len(data))
        request, plan = decode_infer(data, length, signature, ignore, max_input_size=limit, regions=regions)
    return [request], plan


def openai(
    body: Buffer,
    encoding: str,
    limit: int,
    signature_of: Callable[[str], ModelSignature],
    endpoint: str,
    fetch: Fetch | None = None,
) -> tuple[ResponsePlan, list[dict[str, WireTensor]]]:
    """Decode a request to one of ``ENDPOINTS``: the plan of its response, and the inputs of each request to the model.

    ``signature_of`` is called with the id of the model or LoRA adapter; its errors refuse the request. ``fetch``
    returns the files at the URLs of images and recordings; None if there are no hosts to fetch from.
    """
    fields = read_body(compression.decompress(body, encoding, limit), partial(fetch_media, fetch=fetch))
    return _decode(fields, signature_of, *ENDPOINTS[endpoint])


def responses(
    body: Buffer,
    encoding: str,
    limit: int,
    signature_of: Callable[[str], ModelSignature],
    find_response: Callable[[str], Buffer],
    fetch: Fetch | None = None,
) -> tuple[ResponsePlan, list[dict[str, WireTensor]]]:
    """Decode a request of the Responses API as :func:`openai` does.

    ``find_response`` is called with the ids of responses before ``signature_of``; see :func:`read_items`.
    """
    fields = read_body(compression.decompress(body, encoding, limit), partial(fetch_media, fetch=fetch))
    previous, earlier, items = read_items(fields, find_response)
    read = partial(read_responses, previous=previous, earlier=earlier, items=items)
    return _decode(fields, signature_of, require_chat, read)


def _decode(
    fields: Fields,
    signature_of: Callable[[str], ModelSignature],
    require: Callable[[ModelSignature], None],
    read: Callable[[Fields], GenerationRequest],
) -> tuple[ResponsePlan, list[dict[str, WireTensor]]]:
    name = fields.required_text("model")
    signature = signature_of(name)
    require(signature)
    request = read(fields)
    adapter = name.removeprefix(f"{signature.name}:")
    if name != signature.name and adapter in signature.adapters:
        request = request.with_adapter(name, adapter)
    return request.plan, request.inputs(signature)


def retrieval(
    body: Buffer,
    encoding: str,
    limit: int,
    signature_of: Callable[[list[str]], ModelSignature],
    endpoint: str,
    model: str,
) -> tuple[RetrievalPlan, list[dict[str, WireTensor]]]:
    """Decode a request of one of the APIs of retrieval: the plan of its response, and the inputs of each request.

    ``model`` is the name in the path, or empty. For ``signature_of``, see ``conch.wire.retrieval.endpoints.decode``.
    """
    fields = read_body(compression.decompress(body, encoding, limit))
    plan, inputs = retrieval_endpoints.decode(fields, endpoint, model, signature_of)
    return plan, inputs


def transcription(
    body: Buffer,
    encoding: str,
    limit: int,
    signature_of: Callable[[str], ModelSignature],
    content_type: str,
    task: str,
) -> tuple[TranscriptionPlan, list[dict[str, WireTensor]]]:
    """Decode the form of a transcription or translation: the plan of its response, and the inputs of each request.

    ``task`` is ``transcribe`` or ``translate``. ``signature_of`` is called with the name of the model.
    """
    return read_transcription(
        read_form(compression.decompress(body, encoding, limit), content_type), task, signature_of
    )


def grpc_infer(message: Buffer) -> tuple[bytes, list[Buffer], list[int | None]]:
    """Return a ``ModelInferRequest`` without tensor data, the data of each tensor, and the numbers of BYTES elements.

    The message may carry tensors as lists of numbers and texts, for which the library creates objects. If all inputs
    had data, the result is the same as for raw contents. Raises INTERNAL for an invalid message, INVALID_ARG for values
    that do not fit their datatype.
    """
    # These imports take as long as all others, and not every server uses gRPC.
    from google.protobuf.message import DecodeError

    from conch.core.protocol import grpc_service
    from conch.wire.grpc.infer import read_contents, sent_inputs

    try:
        parsed = grpc_service.ModelInferRequest.FromString(bytes(message))
    except DecodeError:
        raise internal("Unable to parse request") from None  # Triton's message
    raw: list[Buffer] = list(parsed.raw_input_contents)
    if raw:
        parsed.ClearField("raw_input_contents")
    else:
        # Only the inputs up to the first without data: the server refuses a request with missing data.
        for tensor in sent_inputs(parsed):
            if not tensor.HasField("contents"):
                break
            datatype = tensor.datatype if tensor.datatype in CONFIG_NAME else "<invalid>"
            raw.append(read_contents(tensor.contents, tensor.name, datatype, parsed.model_name))
            tensor.ClearField("contents")
    for tensor in parsed.inputs:
        if tensor.HasField("contents"):
            # The empty field stays set: contents beside raw contents are refused, and differ from missing data.
            tensor.contents.Clear()
            tensor.contents.SetInParent()
    request = InferRequest(parsed.model_name, {}, ignore, id=parsed.id)
    elements = [
        count_strings(parsed.model_name, request, WireTensor(tensor.name, "BYTES", (), data))
        if tensor.datatype == "BYTES"
        else None
        for tensor, data in zip(sent_inputs(parsed), raw, strict=False)
    ]
    rest = parsed.SerializeToString()
    if len(rest) > MOST_BESIDES:
        raise invalid(
            f"the request has {len(rest)} bytes in addition to its tensors; at most {MOST_BESIDES} are allowed"
        )
    return rest, raw, elements


def strings(model: str, id: str, tensors: Sequence[WireTensor]) -> list[int]:
    """Return the number of elements of BYTES inputs of a request. Raises INVALID_ARG for malformed data."""
    request = InferRequest(model, {}, ignore, id=id)
    return [count_strings(model, request, tensor) for tensor in tensors]


# Encoding


def encode_infer(
    request: InferRequest,
    response: InferResponse,
    plan: JsonOutputPlan,
    labels: Mapping[str, Sequence[str]],
    encoding: str,
) -> tuple[int, list[Buffer]]:
    """Return the size of the JSON before binary tensors, 0 without them, and the body, compressed with ``encoding``."""
    document, blobs = encode_parts(request, response, plan, labels.get)
    parts: list[Buffer] = [document, *blobs]
    if encoding != "identity":
        parts = [compression.compress(parts, encoding)]
    return len(document) if blobs else 0, parts


def retrieval_body(plan: RetrievalPlan, model: str, parts: list[Sequence[WireTensor]]) -> Buffer:
    """Return the body of a response to a request for retrieval, from the outputs of each request to the model."""
    return plan.body(model, Results(plan, parts))


def transcription_body(plan: TranscriptionPlan, parts: list[Sequence[WireTensor]], sent: str) -> Buffer:
    """Return the body of a response to a transcription, or the events after the text ``sent``.

    ``parts`` are the outputs of each request to the model.
    """
    return plan.body(parts, sent)


# The process


FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    function.__name__: function
    for function in (
        infer, decode_generate, openai, responses, retrieval, read_load, grpc_infer, strings, encode_infer,
        encode_generate, encode_texts, list_items, retrieval_body, transcription, transcription_body,
    )
}  # fmt: skip


def main(fd: int) -> NoReturn:
    """Serve the socket at ``fd``: do one piece of work at a time until the server closes the socket or dies."""
    end_with_parent()
    # Ctrl+C and service managers signal the whole process group; the server ends this process when it is unused.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _be_killed_first()
    # Parsed data has no cycles, and the collector would traverse all of it repeatedly.
    gc.disable()
    connection = socket.socket(fileno=fd)
    while True:
        try:
            header, parts, _ = receive(connection)
        except EOFError:
            sys.exit(0)
        with _perform(connection, header, parts) as message:
            del header, parts, _
            message.send(connection)


def _perform(connection: socket.socket, header: Header, parts: list[memoryview]) -> SharedMessage:
    """Return the message with the result of some work, or with its error."""

    def call(number: int, argument: Any) -> Any:
        """Call a callable of the server; members of an object are passed by their names alone."""
        if isinstance(argument, Mapping):
            argument = list(_at_most(argument, "parameters"))
        with SharedMessage({"ask": number, "argument": argument}) as message:
            message.send(connection)
        reply, parts, _ = receive(connection)
        if "refused" in reply:
            raise _RefusedError
        return unpack(reply["result"], parts)

    error: ConchError | None = None
    more: Header = {}
    try:
        return _result(header["function"], unpack(header["arguments"], parts, call))
    except ConchError as raised:
        error = raised
    except _RefusedError:
        pass  # the error came from the server
    except Exception as raised:
        error = internal(error_text(raised))
        more = {"traceback": traceback.format_exc()}
    packing = Packing()
    return SharedMessage({"error": packing.pack(error), **more, **_usage()}, packing.parts)


def _result(function: str, arguments: list[Any]) -> SharedMessage:
    """Call a function; returns the message with its result.

    Raises the errors of the function, and INVALID_ARG if the server would take long to read the result.
    """
    result = FUNCTIONS[function](*arguments)
    if isinstance(arguments[0], ModelSignature):
        for request in result[0]:
            _prepare(arguments[0], request)
    elif function == read_load.__name__:
        _at_most(result.files, "files")
    packing = Packing()
    document = packing.pack(result)
    if len(packing.parts) > MOST_PARTS:
        raise invalid(f"the request has {len(packing.parts)} tensors; at most {MOST_PARTS} are allowed")
    message = SharedMessage({"result": document, **_usage()}, packing.parts)
    if message.header_size > MOST_HEADER:
        message.close()
        raise invalid(
            f"the names and parameters of the request take {message.header_size} bytes; at most {MOST_HEADER} may be"
        )
    return message


def _prepare(signature: ModelSignature, request: InferRequest) -> None:
    """Count the elements of BYTES inputs, and refuse names that the server's validation would take long to refuse."""
    _at_most(request.parameters, "parameters")
    if len(request.inputs) > len(signature.inputs) or len(request.outputs) > len(signature.outputs):
        validate_request(signature, request)  # raises the error
    for tensor in request.inputs.values():
        if tensor.datatype == "BYTES" and not isinstance(tensor.data, Span):
            tensor.elements = count_strings(signature.name, request, tensor)


def _at_most(entries: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return ``entries``; each costs the server time, regardless of its size. Raises INVALID_ARG for too many."""
    if len(entries) > MOST_PARAMETERS:
        raise invalid(f"the request has {len(entries)} {kind}; at most {MOST_PARAMETERS} are allowed")
    return entries


class _RefusedError(Exception):
    """Raised when the server's callable has raised an error, which refuses the request."""


def _usage() -> Header:
    """Return the peak resident memory of this process (bytes); the server replaces a process that has become large."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("VmHWM:")]
    except OSError:
        lines = []
    return {"peak": int(lines[0][1]) << 10 if lines else 0}


def _be_killed_first() -> None:
    """Let the kernel end this process rather than the server when memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass
