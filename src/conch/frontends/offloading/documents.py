"""Converts signatures, requests, responses and errors to JSON, with the bytes of tensors beside it.

Used on both sides of a codec process. There are no pickles, so received data is never executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from sys import maxsize
from typing import Any, Final

from conch.core.errors import Code, ConchError, clipped, invalid
from conch.core.inference import InferRequest, InferResponse, ModelSignature, TensorSpec
from conch.core.tensors import Buffer, WireTensor
from conch.wire.openai.reading import ApiError
from conch.wire.regions import NO_REGIONS, Regions

#: Maximum number of parameters of a large request; each costs the server time, regardless of its size.
MOST_PARAMETERS: Final = 10_000


class BodySpan:
    """Bytes held only by the server: the position of a tensor after the JSON of a body."""

    __slots__ = ("size", "start")

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> BodySpan:
        start, stop, _ = part.indices(self.size)
        return BodySpan(self.start + start, max(stop - start, 0))


class RegionSpan:
    """A part of a shared memory region, which only the server can access."""

    __slots__ = ("part",)

    def __init__(self, region: str, offset: int, size: int) -> None:
        self.part = region, offset, size

    def __len__(self) -> int:
        return min(self.part[2], maxsize)


class SpanRegions(Regions):
    """The regions of a codec process: records reads and placements for the server.

    ``parts`` has the parts of regions to which outputs are written.
    """

    __slots__ = ("parts",)

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, tuple[str, int, int]] = {}

    def read(self, datatype: str, name: str, offset: int, size: int) -> Any:
        return RegionSpan(name, offset, size)

    def place(self, output: str, name: str, offset: int, size: int) -> None:
        self.parts[output] = name, offset, size


def signature_document(signature: ModelSignature) -> dict[str, Any]:
    """Return a signature without its check of parameters, which stays in the server."""
    return {
        "name": signature.name,
        "version": signature.version,
        "max_batch_size": signature.max_batch_size,
        "inputs": [asdict(spec) for spec in signature.inputs.values()],
        "outputs": [asdict(spec) for spec in signature.outputs.values()],
        "decoupled": signature.decoupled,
        "by_row": signature.by_row,
    }


def read_signature(document: dict[str, Any]) -> ModelSignature:
    return ModelSignature(**{**document, "inputs": _specs(document["inputs"]), "outputs": _specs(document["outputs"])})


def _specs(documents: Iterable[dict[str, Any]]) -> dict[str, TensorSpec]:
    specs = {}
    for document in documents:
        reshape = None if document["reshape"] is None else tuple(document["reshape"])
        specs[document["name"]] = TensorSpec(**{**document, "dims": tuple(document["dims"]), "reshape": reshape})
    return specs


def tensor_documents(tensors: Iterable[WireTensor], parts: list[Buffer]) -> list[dict[str, Any]]:
    """Return documents of tensors; appends their data to ``parts`` unless it is a ``BodySpan`` or ``RegionSpan``."""
    documents = []
    for tensor in tensors:
        document: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if isinstance(tensor.data, BodySpan):
            document["span"] = [tensor.data.start, tensor.data.size]
        elif isinstance(tensor.data, RegionSpan):
            document["region"] = tensor.data.part
        else:
            document["part"] = len(parts)
            document["elements"] = tensor.elements
            parts.append(tensor.data)
        documents.append(document)
    return documents


def read_tensors(
    documents: Iterable[dict[str, Any]],
    parts: Sequence[memoryview],
    body: memoryview | None = None,
    regions: Regions = NO_REGIONS,
) -> list[WireTensor]:
    """Return tensors that refer to ``parts``, to ``body``, the bytes after the JSON of a request, or to ``regions``.

    Raises the errors of ``regions``.
    """
    tensors = []
    for document in documents:
        data: Buffer
        if "span" in document:
            assert body is not None
            start, size = document["span"]
            data = body[start : start + size]
        elif "region" in document:
            data = regions.read(document["datatype"], *document["region"])
        else:
            data = parts[document["part"]]
        tensor = WireTensor(document["name"], document["datatype"], tuple(document["shape"]), data)
        tensor.elements = document.get("elements")
        tensors.append(tensor)
    return tensors


def request_document(request: InferRequest, parts: list[Buffer]) -> dict[str, Any]:
    """Return the document of a request. Raises INVALID_ARG for more parameters than ``MOST_PARAMETERS``."""
    if len(request.parameters) > MOST_PARAMETERS:
        raise invalid(f"the request has {len(request.parameters)} parameters; at most {MOST_PARAMETERS} are allowed")
    return {
        "id": request.id,
        "outputs": request.outputs,
        "parameters": dict(request.parameters),
        "correlation_id": request.correlation_id,
        "flags": request.flags,
        "priority": request.priority,
        "timeout": request.timeout,
        "inputs": tensor_documents(request.inputs.values(), parts),
    }


def read_request(
    document: dict[str, Any],
    parts: Sequence[memoryview],
    signature: ModelSignature,
    on_response: Callable[[InferResponse], None],
    body: memoryview | None = None,
    regions: Regions = NO_REGIONS,
) -> InferRequest:
    """Return the request of a document.

    Raises INVALID_ARG for parameters that the model does not accept, and the errors of ``regions``.
    """
    inputs, places = document.pop("inputs"), document.pop("places", {})
    tensors = read_tensors(inputs, parts, body, regions)
    outputs = tuple(document.pop("outputs"))
    request = InferRequest(
        signature.name,
        {tensor.name: tensor for tensor in tensors},
        on_response,
        model_version=signature.version,
        outputs=outputs,
        **document,
    )
    for output, part in places.items():
        regions.place(output, *part)
    if places or any("region" in tensor for tensor in inputs):
        request.shared = regions
    if request.parameters and signature.check_parameters is not None:
        signature.check_parameters(request.parameters)
    return request


def error_document(error: ConchError) -> dict[str, Any]:
    document: dict[str, Any] = {"code": error.code.name, "message": clipped(error.message)}
    if isinstance(error, ApiError):
        document |= {"api": True, "param": error.param and clipped(error.param), "reason": error.reason}
    return document


def read_error(document: dict[str, Any]) -> ConchError:
    code = Code[document["code"]]
    if "api" in document:
        return ApiError(document["message"], document["param"], code=code, reason=document["reason"])
    return ConchError(document["message"], code)
