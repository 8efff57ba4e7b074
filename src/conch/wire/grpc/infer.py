"""gRPC inference messages: decodes ``ModelInferRequest`` and encodes the bytes of responses.

Includes the typed contents of tensors, and parameters (``map<string, InferParameter>``) in both directions. Called by
the gRPC front end for every inference, on the event loop. The tensors of a response are never copied into a message
object: their own buffers are sent between small encoded parts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from conch.core.errors import clipped, invalid
from conch.core.inference import (
    SEQUENCE_END,
    SEQUENCE_START,
    InferRequest,
    InferResponse,
    ModelSignature,
    ParameterValue,
)
from conch.core.protocol import grpc_service
from conch.core.tensors import CONFIG_NAME, ELEMENT_SIZE, NATIVE_FORMAT, Buffer, WireTensor, pack_bytes
from conch.wire.classification import classify
from conch.wire.grpc.fields import varint
from conch.wire.regions import NO_REGIONS, OFFSET, REGION, SIZE, Regions

#: The field of each datatype; FP16 and BF16 have none.
FIELD: Final = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
#: The datatype named in the error for an unexpected field.
_CARRIES: Final = {
    "bool_contents": "BOOL",
    "int_contents": "INT32",
    "int64_contents": "INT64",
    "uint_contents": "UINT32",
    "uint64_contents": "UINT64",
    "fp32_contents": "FP32",
    "fp64_contents": "FP64",
    "bytes_contents": "BYTES",
}


def read_contents(contents: grpc_service.InferTensorContents, name: str, datatype: str, model: str) -> bytes:
    """Return the bytes of an input; integers too large for the datatype lose their upper bits.

    Raises INVALID_ARG for values in a field of another datatype.
    """
    expected = FIELD.get(datatype, "")
    for carried in _CARRIES:
        if carried != expected and len(getattr(contents, carried)):
            raise invalid(
                f"unexpected explicit tensor data for input tensor '{name}' for model '{model}'"
                f" of type '{_CARRIES[carried]}', expected datatype '{datatype}'"
            )
    if not expected:
        return b""
    values = getattr(contents, expected)
    if datatype == "BYTES":
        return pack_bytes(values)
    if datatype == "BOOL":
        return bytes(values)
    size = ELEMENT_SIZE[datatype]
    if expected in ("int_contents", "uint_contents") and size < 4:
        mask = (1 << 8 * size) - 1
        return array("B" if size == 1 else "H", [value & mask for value in values]).tobytes()
    return array(NATIVE_FORMAT[datatype], values).tobytes()


Parameters = Mapping[str, grpc_service.InferParameter]

#: Requests a message for the empty final response of a decoupled model; on a stream only.
EMPTY_FINAL: Final = "triton_enable_empty_final_response"
#: Marks the last response of a request on a stream.
FINAL_RESPONSE: Final = "triton_final_response"
#: Metadata that makes conch end a stream with an error and its code, also for refused requests. ``triton_grpc_error``,
#: Triton's own, does so only for failed executions; Triton then crashes if the model sends further responses.
ERRORS_WITH_CODES: Final = "conch_grpc_error"


def read_request_parameters(parameters: Parameters, request: InferRequest) -> bool:
    """Store the parameters of a message in ``request``; returns whether it requests an empty final response.

    Raises INVALID_ARG with Triton's messages.
    """
    custom: dict[str, ParameterValue] = {}
    empty_final = False
    for key in parameters:  # ``items()`` takes twice as long
        parameter = parameters[key]
        kind = parameter.WhichOneof("parameter_choice")
        if key == "sequence_id":
            _expect(kind, ("int64_param", "string_param"), key, "int64_param or string_param")
            value = getattr(parameter, kind)
            # The same 64 bits, sent as a signed number.
            request.correlation_id = value if isinstance(value, str) else value % 2**64
        elif key == "sequence_start":
            _expect(kind, ("bool_param",), key, "bool_param")
            request.flags |= SEQUENCE_START if parameter.bool_param else 0
        elif key == "sequence_end":
            _expect(kind, ("bool_param",), key, "bool_param")
            request.flags |= SEQUENCE_END if parameter.bool_param else 0
        elif key == "priority":
            _expect(kind, ("int64_param", "uint64_param"), key, "int64_param or uint64_param")
            if parameter.int64_param < 0:
                raise invalid("invalid value for 'priority', expected value >= 0.")
            request.priority = getattr(parameter, kind)
        elif key == "timeout":
            _expect(kind, ("int64_param",), key, "int64_param")
            request.timeout = max(0, parameter.int64_param)
        elif key.startswith("triton_"):
            if key != EMPTY_FINAL:
                raise invalid(
                    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys"
                    f" starting with 'triton_' are allowed: {EMPTY_FINAL}"
                )
            _expect(kind, ("bool_param",), key, "bool_param")
            empty_final = parameter.bool_param
        elif kind in ("int64_param", "bool_param", "string_param", "double_param"):
            custom[key] = getattr(parameter, kind)
        else:
            raise invalid(
                f"invalid value type for '{key}' parameter, expected int64_param, bool_param, or string_param."
            )
    request.parameters = custom
    return empty_final


def _expect(kind: str | None, kinds: tuple[str, ...], key: str, words: str) -> None:
    if kind not in kinds:
        raise invalid(f"invalid value type for '{key}' parameter, expected {words}.")


def response_parameter(value: ParameterValue) -> grpc_service.InferParameter:
    """Return the message of a response parameter."""
    if isinstance(value, bool):
        return grpc_service.InferParameter(bool_param=value)
    if isinstance(value, int):
        return grpc_service.InferParameter(int64_param=value)
    if isinstance(value, float):
        return grpc_service.InferParameter(double_param=value)
    return grpc_service.InferParameter(string_param=value)


def read_classification(parameters: Parameters) -> int:
    """Return the number of classes of a requested output, 0 for none. Raises INVALID_ARG."""
    parameter = parameters.get("classification")
    if parameter is None:
        return 0
    if parameter.WhichOneof("parameter_choice") != "int64_param":
        raise invalid("invalid value type for 'classification' parameter, expected int64_param")
    if parameter.int64_param <= 0:
        raise invalid("invalid value for 'classification' parameter, expected >= 0")
    return int(parameter.int64_param)


def read_part(parameters: Parameters, tensor: str) -> tuple[str, int, int] | None:
    """Return the region name, offset and size (bytes) of a tensor in shared memory; None if it is elsewhere.

    Negative numbers are read as unsigned. Raises INVALID_ARG for malformed parameters.
    """
    region, size, offset = parameters.get(REGION), parameters.get(SIZE), parameters.get(OFFSET)
    if region is None:
        for name, parameter in ((SIZE, size), (OFFSET, offset)):
            if parameter is not None:
                raise invalid(
                    f"'{name}' can not be specified without 'shared_memory_region' parameter for tensor '{tensor}'"
                )
        return None
    _expect_memory(region, REGION, "string_param", tensor)
    if size is None:
        raise invalid(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter"
            f" for tensor '{tensor}'"
        )
    _expect_memory(size, SIZE, "int64_param", tensor)
    if offset is not None:
        _expect_memory(offset, OFFSET, "int64_param", tensor)
    start = offset.int64_param if offset is not None else 0
    return region.string_param, start % 2**64, size.int64_param % 2**64


def _expect_memory(parameter: grpc_service.InferParameter, name: str, kind: str, tensor: str) -> None:
    if parameter.WhichOneof("parameter_choice") != kind:
        raise invalid(f"invalid value type for '{name}' parameter for tensor '{tensor}', expected {kind}.")


#: Keys (field number and wire type) of a response's ID, of its tensor data and, on a stream, of the whole response.
_ID: Final = b"\x1a"
_RAW_OUTPUT_CONTENTS: Final = b"\x32"
_INFER_RESPONSE: Final = b"\x12"


@dataclass(slots=True)
class GrpcOutputPlan:
    """The form of the response that the client requested.

    ``version`` is the model version as given in the request (empty if missing). ``batched`` is true if outputs have a
    batch dimension. ``classification`` maps outputs to their numbers of classes. ``empty_final`` requests a message
    when a request completes without another response.
    """

    version: str
    batched: bool = False
    classification: dict[str, int] = field(default_factory=dict)
    empty_final: bool = False


def decode_infer(
    message: grpc_service.ModelInferRequest,
    signature: ModelSignature,
    on_response: Callable[[InferResponse], None],
    raw: Sequence[Buffer] | None = None,
    elements: Sequence[int | None] = (),
    regions: Regions = NO_REGIONS,
) -> tuple[InferRequest, GrpcOutputPlan]:
    """Decode a request to the model of ``signature``, and the form of its response.

    ``raw`` are the raw contents if they were extracted from the message; ``elements`` are the numbers of elements of
    BYTES inputs that have been counted. The request is not yet checked against the model (:mod:`conch.core.validation`
    does that). Raises INVALID_ARG with Triton's messages for an invalid message.
    """
    request = InferRequest(message.model_name, {}, on_response, model_version=signature.version, id=message.id)
    plan = GrpcOutputPlan(message.model_version, signature.max_batch_size > 0)
    parameters = message.parameters
    if parameters:
        plan.empty_final = read_request_parameters(parameters, request)
        if request.parameters and signature.check_parameters is not None:
            signature.check_parameters(request.parameters)
    _read_inputs(message, message.raw_input_contents[:] if raw is None else raw, request, regions)
    if elements:
        for tensor, count in zip(sent_inputs(message), elements, strict=False):
            request.inputs[tensor.name].elements = count
    outputs = message.outputs[:]
    if outputs:
        names: dict[str, None] = {}
        for output in outputs:
            names[output.name] = None
            if output.parameters:
                _read_output(output, request, plan, regions)
        request.outputs = tuple(names)
    return request, plan


def sent_inputs(message: grpc_service.ModelInferRequest) -> list[grpc_service.ModelInferRequest.InferInputTensor]:
    """Return the inputs whose data is in the message; the others are in shared memory."""
    return [tensor for tensor in message.inputs[:] if not tensor.parameters or REGION not in tensor.parameters]


def _read_inputs(
    message: grpc_service.ModelInferRequest, contents: Sequence[Buffer], request: InferRequest, regions: Regions
) -> None:
    # Slices of repeated fields are lists; iterating over them is several times as fast.
    inputs = request.inputs
    has_raw = bool(contents)
    raw = iter(contents)
    for tensor in message.inputs[:]:
        name = tensor.name
        part = read_part(tensor.parameters, name) if tensor.parameters else None
        if part is not None and tensor.HasField("contents"):
            raise invalid(
                f"unexpected 'content' provided when using shared memory for input tensor '{name}'"
                f" for model '{request.model_name}'"
            )
        if name in inputs:
            raise request.error(f"input '{name}' already exists in request")
        datatype = tensor.datatype
        if datatype not in CONFIG_NAME:
            datatype = "<invalid>"
        data: Buffer | None
        if part is not None:
            data = regions.read(datatype, *part)
            request.shared = regions
        elif has_raw:
            if tensor.HasField("contents"):
                raise invalid(
                    f"contents field must not be specified when using raw_input_contents for '{name}'"
                    f" for model '{request.model_name}'"
                )
            data = next(raw, None)
        elif tensor.HasField("contents"):
            data = read_contents(tensor.contents, name, datatype, request.model_name)
        else:
            data = None
        if data is None:
            raise invalid(f"unable to find data for input tensor '{name}' for model '{request.model_name}' in request.")
        inputs[name] = WireTensor(name, datatype, tuple(tensor.shape[:]), data)


def _read_output(
    output: grpc_service.ModelInferRequest.InferRequestedOutputTensor,
    request: InferRequest,
    plan: GrpcOutputPlan,
    regions: Regions,
) -> None:
    part = read_part(output.parameters, output.name)
    classes = read_classification(output.parameters)
    if part is not None:
        if classes:
            raise invalid("output can't set both 'shared_memory_region' and 'classification'")
        regions.set_target(output.name, *part)
        request.shared = regions
    if classes:
        plan.classification[output.name] = classes


def encode_infer(
    request: InferRequest,
    response: InferResponse,
    plan: GrpcOutputPlan,
    labels: Callable[[str], Sequence[str] | None],
) -> list[Buffer]:
    """Return the bytes of a ``ModelInferResponse``, in parts.

    ``labels`` returns the lines of an output's label file, if it has one. Outputs in shared memory have been written
    there. Raises INVALID_ARG for outputs that cannot be written in the requested form.
    """
    body: list[Buffer] = [_model(request.model_name, request.model_version)]
    if request.id:
        identifier = request.id.encode()
        body += (_ID, varint(len(identifier)), identifier)
    if response.parameters:
        body += [_parameter(key, value) for key, value in response.parameters.items()]
    contents: list[Buffer] = []
    requested = request.outputs
    for tensor in response.outputs:
        if requested and tensor.name not in requested:
            continue
        classes = plan.classification.get(tensor.name)
        if classes:
            tensor = classify(tensor, classes, labels(tensor.name), plan.batched)
        body.append(_output(tensor.name, tensor.datatype, tuple(tensor.shape)))
        contents += (_RAW_OUTPUT_CONTENTS, varint(len(tensor.data)), tensor.data)
    return body + contents


def encode_stream_response(body: list[Buffer], final: bool) -> list[Buffer]:
    """Wrap an encoded response in a ``ModelStreamInferResponse``, marked as the last of its request or not."""
    marker = _FINAL if final else _NOT_FINAL
    return [_INFER_RESPONSE, varint(sum(map(len, body)) + len(marker)), marker, *body]


def encode_stream_error(error: str, request_id: str) -> list[Buffer]:
    """Encode a ``ModelStreamInferResponse`` for a request that was not executed."""
    infer_response = grpc_service.ModelInferResponse(id=request_id)
    return [
        grpc_service.ModelStreamInferResponse(
            error_message=_text(error), infer_response=infer_response
        ).SerializeToString()
    ]


def encode_execution_error(error: str, request: InferRequest, plan: GrpcOutputPlan, final: bool) -> list[Buffer]:
    """Encode a ``ModelStreamInferResponse`` for an error of the model; more responses follow unless it is ``final``."""
    message = grpc_service.ModelStreamInferResponse(error_message=_text(error))
    _fill(message.infer_response, request, plan, final)
    return [message.SerializeToString()]


def encode_empty_final(request: InferRequest, plan: GrpcOutputPlan) -> list[Buffer]:
    """Encode a ``ModelStreamInferResponse`` without outputs that marks the end of its request."""
    message = grpc_service.ModelStreamInferResponse()
    _fill(message.infer_response, request, plan, True)
    return [message.SerializeToString()]


def _fill(response: grpc_service.ModelInferResponse, request: InferRequest, plan: GrpcOutputPlan, final: bool) -> None:
    response.id = request.id
    response.model_name = request.model_name
    response.model_version = plan.version
    response.parameters[FINAL_RESPONSE].bool_param = final


def _text(text: str) -> str:
    """Return a message without lone surrogates, which protocol buffers refuse."""
    return clipped(text).encode("utf-8", "replace").decode()


def _encode(response: grpc_service.ModelInferResponse) -> bytes:
    """Encode a part of a response; concatenated parts are the encoding of their merged fields."""
    encoded: bytes = response.SerializeToString()
    return encoded


@lru_cache(1024)
def _model(name: str, version: int) -> bytes:
    return _encode(grpc_service.ModelInferResponse(model_name=name, model_version=str(version)))


@lru_cache(4096)
def _output(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    response = grpc_service.ModelInferResponse()
    response.outputs.add(name=name, datatype=datatype, shape=shape)
    return _encode(response)


def _parameter(key: str, value: ParameterValue) -> bytes:
    response = grpc_service.ModelInferResponse()
    response.parameters[key].CopyFrom(response_parameter(value))
    return _encode(response)


#: The parameter of every response on a stream.
_FINAL: Final = _parameter(FINAL_RESPONSE, True)
_NOT_FINAL: Final = _parameter(FINAL_RESPONSE, False)
