"""Parameters of gRPC messages (``map<string, InferParameter>``), in both directions.

Called for every inference by :mod:`conch.wire.grpc.infer`; does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tritonclient.grpc import service_pb2

from conch.core.errors import invalid
from conch.core.inference import SEQUENCE_END, SEQUENCE_START, InferRequest, ParameterValue
from conch.wire.regions import OFFSET, REGION, SIZE

Parameters = Mapping[str, service_pb2.InferParameter]

#: Requests a message for the empty final response of a decoupled model; on a stream only.
EMPTY_FINAL: Final = "triton_enable_empty_final_response"
#: Marks the last response of a request on a stream.
FINAL_RESPONSE: Final = "triton_final_response"
#: Metadata that makes conch end a stream with an error and its code: ``triton_grpc_error`` for failed executions, this
#: also for refused requests. Triton does not support this one, and crashes when a model continues after such an error.
ERRORS_WITH_CODES: Final = "conch_grpc_error"


def read_request_parameters(parameters: Parameters, request: InferRequest) -> bool:
    """Store the parameters of a message in ``request``; returns whether it wants an empty final response.

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


def response_parameter(value: ParameterValue) -> service_pb2.InferParameter:
    """Return the message of a response parameter."""
    if isinstance(value, bool):
        return service_pb2.InferParameter(bool_param=value)
    if isinstance(value, int):
        return service_pb2.InferParameter(int64_param=value)
    if isinstance(value, float):
        return service_pb2.InferParameter(double_param=value)
    return service_pb2.InferParameter(string_param=value)


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


def _expect_memory(parameter: service_pb2.InferParameter, name: str, kind: str, tensor: str) -> None:
    if parameter.WhichOneof("parameter_choice") != kind:
        raise invalid(f"invalid value type for '{name}' parameter for tensor '{tensor}', expected {kind}.")
