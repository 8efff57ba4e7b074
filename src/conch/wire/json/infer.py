"""Bodies of ``POST …/infer``: from JSON (and binary tensors behind it) to a request, and from a response back.

Called by the HTTP front end for every inference: on the event loop, but for large JSON in a codec process.
Tensors given in binary are slices of the body, never copies.  Source: the KServe v2 protocol with Triton's extensions
for binary data, classification, sequences, scheduling and parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from conch.errors import invalid
from conch.inference import SEQUENCE_END, SEQUENCE_START, InferRequest, InferResponse, ModelSignature, ParameterValue
from conch.tensors import Buffer
from conch.wire.classification import classify
from conch.wire.json import tensor as tensor_data
from conch.wire.json import text
from conch.wire.json.inputs import raw_input, read_inputs, read_part
from conch.wire.regions import NO_REGIONS, REGION, Regions

#: What ``--http-max-input-size`` is unless given, in bytes.
MAX_INPUT_SIZE: Final = 64 << 20
_NAME: Final = "Unable to parse 'name'"


class RequestedOutput(NamedTuple):
    """How the client wants one output: in binary or as JSON, whole or as its ``classification`` best classes."""

    binary: bool
    classification: int = 0


@dataclass(slots=True)
class JsonOutputPlan:
    """How the client wants the response.

    ``outputs`` is empty if the client names none and gets all, in binary if ``binary`` says so.  ``batched`` says
    whether outputs begin with a batch dimension.
    """

    binary: bool = False
    batched: bool = False
    outputs: dict[str, RequestedOutput] = field(default_factory=dict)


def parse_header_length(value: bytes | None, content_length: int) -> int | None:
    """The value of ``Inference-Header-Content-Length``: how many bytes of the body are JSON.

    ``None`` without the header (all of the body is JSON), 0 for a raw request.
    ``content_length`` is that of the body after decompression.
    """
    if value is None:
        return None
    shown = value.decode("latin-1")
    if not re.fullmatch(r"[ \t]*[+-]?[0-9]{1,100}[ \t]*", shown):
        raise invalid(f"Unable to parse Inference-Header-Content-Length, got: {shown}")
    length = int(shown)
    if not -(2**31) <= length < 2**31:
        raise invalid(
            "Unable to parse Inference-Header-Content-Length, value is out of range"
            f" [ -2147483648, 2147483647 ], got: {shown}"
        )
    if not 0 <= length <= content_length:
        raise invalid(f"inference header size should be in range (0, {content_length}), got: {shown}")
    return length


def decode_infer(
    body: Buffer,
    header_length: int | None,
    signature: ModelSignature,
    on_response: Callable[[InferResponse], None],
    *,
    max_input_size: int = MAX_INPUT_SIZE,
    regions: Regions = NO_REGIONS,
) -> tuple[InferRequest, JsonOutputPlan]:
    """The request in ``body``, and how its response is to be written.

    ``header_length`` comes from :func:`parse_header_length`.  The request is not yet checked
    against the model (:mod:`conch.validation` does that).  Raises :class:`ConchError` with
    Triton's texts and codes for whatever is wrong with the body.
    """
    if header_length == 0 or (header_length is None and not body):
        request = InferRequest(signature.name, {}, on_response, model_version=signature.version)
        raw_input(body, signature, request, max_input_size)
        return request, JsonOutputPlan(binary=True, batched=signature.max_batch_size > 0)
    header, binary = _split(body, header_length)
    return decode_split(header, binary, signature, on_response, max_input_size=max_input_size, regions=regions)


def decode_split(
    header: Buffer,
    binary: Buffer,
    signature: ModelSignature,
    on_response: Callable[[InferResponse], None],
    *,
    max_input_size: int = MAX_INPUT_SIZE,
    regions: Regions = NO_REGIONS,
) -> tuple[InferRequest, JsonOutputPlan]:
    """The request in the JSON ``header`` of a body with ``binary`` behind it, as :func:`decode_infer` has it."""
    request = InferRequest(signature.name, {}, on_response, model_version=signature.version)
    plan = JsonOutputPlan(batched=signature.max_batch_size > 0)
    check_json_size(len(header), max_input_size)
    document = text.loads(header)
    if type(document) is not dict:
        document = {}
    if "id" in document:
        request.id = text.as_string(document["id"], "Unable to parse 'id'")
    if "parameters" in document:
        _read_parameters(document["parameters"], request, plan)
        if request.parameters and signature.check_parameters is not None:
            signature.check_parameters(request.parameters)
    read_inputs(document, binary, request, max_input_size, regions)
    if "outputs" in document:
        _read_outputs(document["outputs"], request, plan, regions)
    return request, plan


def check_json_size(size: int, max_input_size: int) -> None:
    """Refuse JSON of more bytes than ``--http-max-input-size``."""
    if size > max_input_size:
        raise invalid(
            f"request JSON size of {size} bytes exceeds the maximum allowed input size of {max_input_size} bytes."
            " Use --http-max-input-size to increase the limit."
        )


def _split(body: Buffer, header_length: int | None) -> tuple[Buffer, Buffer]:
    """The JSON of a body and the binary data that follows it."""
    size = len(body)
    if header_length is None or header_length == size:
        return body, b""
    if header_length > size:
        raise invalid(f"unexpected size for request JSON, expecting {header_length - size} more bytes")
    view = memoryview(body)
    return view[:header_length], view[header_length:]


def _read_parameters(value: Any, request: InferRequest, plan: JsonOutputPlan) -> None:
    custom: dict[str, ParameterValue] = {}
    for key, item in text.as_members(value, "failed to get request params.").items():
        if key == "sequence_id":
            request.correlation_id = _correlation_id(item)
        elif key == "sequence_start":
            request.flags |= SEQUENCE_START if text.as_bool(item, _unable(key)) else 0
        elif key == "sequence_end":
            request.flags |= SEQUENCE_END if text.as_bool(item, _unable(key)) else 0
        elif key == "priority":
            request.priority = text.as_unsigned(item, _unable(key))
        elif key == "timeout":
            request.timeout = text.as_unsigned(item, _unable(key))
        elif key == "binary_data_output":
            plan.binary = text.as_bool(item, _unable(key))
        elif key.startswith("triton_"):
            raise invalid(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        else:
            custom[key] = as_parameter(key, item)
    request.parameters = custom


def _correlation_id(value: Any) -> int | str:
    if type(value) is int and 0 <= value < 2**64:
        return value
    return text.as_string(value, "Unable to parse 'sequence_id'")


def as_parameter(key: str, value: Any) -> ParameterValue:
    """A custom request parameter: a string, a bool, an integer of 64 bits or another number."""
    text.as_string(key)
    if isinstance(value, str):
        return text.as_string(value)
    if isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else float(value)
    raise invalid(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def _unable(key: str) -> str:
    return f"Unable to parse '{key}'"


def _read_outputs(value: Any, request: InferRequest, plan: JsonOutputPlan, regions: Regions) -> None:
    wanted = plan.outputs
    for item in text.as_array(value, "Unable to parse 'outputs'"):
        name = text.as_string(text.member(item, "name", _NAME), _NAME)
        if name in wanted:
            raise request.error(f"output '{name}' already exists in request")
        parameters = text.optional_object(item, "parameters")
        # ``binary_data_output`` is for requests that name no outputs (so does Triton).
        wanted[name] = _requested(parameters) if parameters else RequestedOutput(binary=False)
        if REGION in parameters:
            regions.place(name, *read_part(parameters))
            request.shared = regions
    request.outputs = tuple(wanted)


def _requested(parameters: dict[str, Any]) -> RequestedOutput:
    classification, binary = 0, False
    if "classification" in parameters:
        classification = text.as_unsigned(parameters["classification"], "Unable to set 'classification'")
    if REGION in parameters:
        if classification:
            raise invalid("Output can't set both 'shared_memory_region' and 'classification'")
        if text.as_bool(parameters.get("binary_data", False), _unable("binary_data")):
            raise invalid("Output can't set both 'shared_memory_region' and 'binary_data'")
    if "binary_data" in parameters:
        binary = text.as_bool(parameters["binary_data"], _unable("binary_data"))
    return RequestedOutput(binary, classification)


def encode_infer(
    request: InferRequest,
    response: InferResponse,
    plan: JsonOutputPlan,
    labels: Callable[[str], Sequence[str] | None],
) -> tuple[bytes, list[Buffer]]:
    """A response as its JSON and the binary tensors that follow it.

    ``labels`` gives the label file's lines of an output, if it has one; outputs in shared memory have been
    written there.  Without binary tensors
    the body is plain JSON and needs no ``Inference-Header-Content-Length``.  Raises INVALID_ARG
    for outputs that cannot be written the way the client asked.
    """
    outputs: list[dict[str, Any]] = []
    blobs: list[Buffer] = []
    wanted, shared = plan.outputs, request.shared
    for tensor in response.outputs:
        binary, classes = plan.binary, 0
        if wanted:
            if tensor.name not in wanted:
                continue
            binary, classes = wanted[tensor.name]
        if classes:
            tensor = classify(tensor, classes, labels(tensor.name), plan.batched)
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if shared is not None and tensor.name in shared.places:
            outputs.append(entry)
            continue
        if binary:
            size = len(tensor.data)
            entry["parameters"] = {"binary_data_size": size}
            if size:
                blobs.append(tensor.data)
        else:
            entry["data"] = text.numbers(tensor_data.to_json(tensor))
        outputs.append(entry)

    document: dict[str, Any] = {}
    if request.id:
        document["id"] = request.id
    document["model_name"] = request.model_name
    document["model_version"] = str(request.model_version)
    if response.parameters:
        document["parameters"] = {key: text.numbers(value) for key, value in response.parameters.items()}
    document["outputs"] = outputs
    return text.dumps(document), blobs
