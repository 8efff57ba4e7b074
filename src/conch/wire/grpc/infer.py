"""gRPC inference messages: decodes ``ModelInferRequest`` and encodes the bytes of responses.

Called by the gRPC front end for every inference, on the event loop. The tensors of a response are never copied into a
message object: their own buffers are sent between small encoded parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from tritonclient.grpc import service_pb2

from conch.core.errors import clipped, invalid
from conch.core.inference import InferRequest, InferResponse, ModelSignature, ParameterValue
from conch.core.tensors import CONFIG_NAME, Buffer, WireTensor
from conch.wire.classification import classify
from conch.wire.grpc.contents import read_contents
from conch.wire.grpc.fields import varint
from conch.wire.grpc.parameters import (
    FINAL_RESPONSE,
    read_classification,
    read_part,
    read_request_parameters,
    response_parameter,
)
from conch.wire.regions import NO_REGIONS, REGION, Regions

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
    message: service_pb2.ModelInferRequest,
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


def sent_inputs(message: service_pb2.ModelInferRequest) -> list[service_pb2.ModelInferRequest.InferInputTensor]:
    """Return the inputs whose data is in the message; the others are in shared memory."""
    return [tensor for tensor in message.inputs[:] if not tensor.parameters or REGION not in tensor.parameters]


def _read_inputs(
    message: service_pb2.ModelInferRequest, contents: Sequence[Buffer], request: InferRequest, regions: Regions
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
    output: service_pb2.ModelInferRequest.InferRequestedOutputTensor,
    request: InferRequest,
    plan: GrpcOutputPlan,
    regions: Regions,
) -> None:
    part = read_part(output.parameters, output.name)
    classes = read_classification(output.parameters)
    if part is not None:
        if classes:
            raise invalid("output can't set both 'shared_memory_region' and 'classification'")
        regions.place(output.name, *part)
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
    wanted = request.outputs
    for tensor in response.outputs:
        if wanted and tensor.name not in wanted:
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
    infer_response = service_pb2.ModelInferResponse(id=request_id)
    return [
        service_pb2.ModelStreamInferResponse(
            error_message=_text(error), infer_response=infer_response
        ).SerializeToString()
    ]


def encode_execution_error(error: str, request: InferRequest, plan: GrpcOutputPlan, final: bool) -> list[Buffer]:
    """Encode a ``ModelStreamInferResponse`` for an error of the model; more responses follow unless it is ``final``."""
    message = service_pb2.ModelStreamInferResponse(error_message=_text(error))
    _fill(message.infer_response, request, plan, final)
    return [message.SerializeToString()]


def encode_empty_final(request: InferRequest, plan: GrpcOutputPlan) -> list[Buffer]:
    """Encode a ``ModelStreamInferResponse`` without outputs that marks the end of its request."""
    message = service_pb2.ModelStreamInferResponse()
    _fill(message.infer_response, request, plan, True)
    return [message.SerializeToString()]


def _fill(response: service_pb2.ModelInferResponse, request: InferRequest, plan: GrpcOutputPlan, final: bool) -> None:
    response.id = request.id
    response.model_name = request.model_name
    response.model_version = plan.version
    response.parameters[FINAL_RESPONSE].bool_param = final


def _text(text: str) -> str:
    """Return a message without lone surrogates, which protocol buffers refuse."""
    return clipped(text).encode("utf-8", "replace").decode()


# Concatenated encoded messages are the encoding of their merged fields, so repeated parts are encoded once.


def _encode(response: service_pb2.ModelInferResponse) -> bytes:
    encoded: bytes = response.SerializeToString()
    return encoded


@lru_cache(1024)
def _model(name: str, version: int) -> bytes:
    return _encode(service_pb2.ModelInferResponse(model_name=name, model_version=str(version)))


@lru_cache(4096)
def _output(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    response = service_pb2.ModelInferResponse()
    response.outputs.add(name=name, datatype=datatype, shape=shape)
    return _encode(response)


def _parameter(key: str, value: ParameterValue) -> bytes:
    response = service_pb2.ModelInferResponse()
    response.parameters[key].CopyFrom(response_parameter(value))
    return _encode(response)


#: The parameter of every response on a stream.
_FINAL: Final = _parameter(FINAL_RESPONSE, True)
_NOT_FINAL: Final = _parameter(FINAL_RESPONSE, False)
