"""gRPC messages of a client: encodes inference requests and decodes responses, the reverse of :mod:`.infer`.

Does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from conch.core.errors import Code, ConchError, internal, invalid
from conch.core.inference import SEQUENCE_END, SEQUENCE_START, InferRequest, InferResponse, ParameterValue
from conch.core.protocol import grpc_service
from conch.core.tensors import ELEMENT_SIZE, Buffer, WireTensor, plain
from conch.wire.grpc.fields import varint
from conch.wire.grpc.infer import EMPTY_FINAL, FINAL_RESPONSE, read_contents, response_parameter

#: The path of the service's methods, and the channel options: tensors have any size.
SERVICE_PATH: Final = "/inference.GRPCInferenceService/"
ANY_SIZE: Final = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
#: The codes of gRPC's statuses by number; all others are UNKNOWN.
CODES: Final[Mapping[int, Code]] = {
    1: Code.CANCELLED,
    3: Code.INVALID_ARG,
    4: Code.UNAVAILABLE,  # the deadline has passed
    5: Code.NOT_FOUND,
    6: Code.ALREADY_EXISTS,
    8: Code.UNAVAILABLE,  # resources are exhausted
    11: Code.INVALID_ARG,  # out of range
    12: Code.UNSUPPORTED,
    13: Code.INTERNAL,
    14: Code.UNAVAILABLE,
}


def _write_parameters(target: Any, request: InferRequest) -> None:
    """Write the parameters of a request, including the protocol's own, into a message's map.

    Raises INVALID_ARG for numbers that do not fit.
    """
    try:
        for name, value in request.parameters.items():
            target[name].CopyFrom(response_parameter(value))
    except ValueError as error:
        raise invalid(f"a number does not fit into its parameter: {error}") from None
    if request.priority:
        target["priority"].uint64_param = request.priority
    if request.timeout:
        target["timeout"].int64_param = min(request.timeout, 2**63 - 1)
    sequence_id = request.correlation_id
    if isinstance(sequence_id, str):
        if sequence_id:
            target["sequence_id"].string_param = sequence_id
    elif sequence_id:
        target["sequence_id"].int64_param = sequence_id - (2**64 if sequence_id >= 2**63 else 0)
    for name, flag in (("sequence_start", SEQUENCE_START), ("sequence_end", SEQUENCE_END)):
        if request.flags & flag:
            target[name].bool_param = True


def encode_request(request: InferRequest, model: str, version: int, *, streamed: bool = False) -> bytes:
    """Encode a ``ModelInferRequest`` for ``model`` with raw tensors; version -1 means any.

    ``streamed`` requests a message for the empty final response, which only a stream can carry.
    """
    message = grpc_service.ModelInferRequest(
        model_name=model, model_version="" if version < 0 else str(version), id=request.id
    )
    _write_parameters(message.parameters, request)
    if streamed:
        message.parameters[EMPTY_FINAL].bool_param = True
    for name in request.outputs:
        message.outputs.add(name=name)
    parts: list[Buffer] = []
    for tensor in request.inputs.values():
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        parts += (_RAW_INPUT, varint(len(tensor.data)), tensor.data)
    # Repeated fields may follow all others, so the tensors are copied only once, into the result.
    return b"".join([message.SerializeToString(), *(plain(part) for part in parts)])


#: The tag of ``raw_input_contents``, a field of bytes.
_RAW_INPUT: Final = bytes([grpc_service.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | 2])


def decode_response(message: grpc_service.ModelInferResponse) -> InferResponse:
    """Decode a response; it is ``final`` unless the message has another value.

    Raises INTERNAL for a message with inconsistent tensors.
    """
    final = True
    parameters: dict[str, ParameterValue] = {}
    for name in message.parameters:
        parameter = message.parameters[name]
        kind = parameter.WhichOneof("parameter_choice")
        if name == FINAL_RESPONSE:
            final = bool(parameter.bool_param)
        elif kind is not None:
            parameters[name] = getattr(parameter, kind)
    raw = message.raw_output_contents
    if raw and len(raw) != len(message.outputs):
        raise internal(f"the response has {len(message.outputs)} outputs and the data of {len(raw)}")
    outputs = []
    for index, tensor in enumerate(message.outputs):
        if tensor.datatype not in ELEMENT_SIZE and tensor.datatype != "BYTES":
            raise internal(f"output '{tensor.name}' of the response has the unknown datatype '{tensor.datatype}'")
        data = raw[index] if raw else _typed(tensor)
        outputs.append(WireTensor(tensor.name, tensor.datatype, tuple(tensor.shape), data))
    return InferResponse(outputs, final=final, parameters=parameters)


def _typed(tensor: Any) -> bytes:
    """Return the data of an output without raw contents, as some servers of the protocol send it."""
    try:
        return read_contents(tensor.contents, tensor.name, tensor.datatype, "")
    except ConchError:
        raise internal(f"output '{tensor.name}' of the response has data of another datatype") from None
