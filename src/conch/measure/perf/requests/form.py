"""The form of inference requests, independent of the protocol: tensors, their location and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conch.core.errors import invalid
from conch.core.tensors import WireTensor, format_shape
from conch.measure.perf.inputs.data import Sample
from conch.measure.perf.inputs.specs import ModelSpec
from conch.measure.perf.requests.shared_memory import MemoryLayout


@dataclass(frozen=True, slots=True)
class RequestForm:
    """The properties that all requests share: ``parameters``, and whether they reserve space for those of a sequence.

    ``binary_input``, ``binary_output``, ``host``, ``headers`` and the path ``prefix`` apply to HTTP. If ``memory`` is
    given, tensors are in shared memory. ``encoding`` is the compression of gRPC messages.
    """

    host: str = ""
    prefix: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    sequence: bool = False
    binary_input: bool = True
    binary_output: bool = True
    memory: MemoryLayout | None = None
    encoding: str = ""


def tensors_of(model: ModelSpec, batch: Sequence[Sample]) -> list[WireTensor]:
    """Return the input tensors of a batch; raises INVALID_ARG if its samples differ in shape."""
    tensors = []
    for name, spec in model.inputs.items():
        values = [sample[name] for sample in batch if name in sample]
        if not values:
            continue
        if len(values) != len(batch) or any(value.dims != values[0].dims for value in values):
            shown = ", ".join(format_shape(value.dims) for value in values[:2])
            raise invalid(f"samples of input '{name}' cannot share a batch: {shown}; use -b 1")
        shape = (len(batch), *values[0].dims) if model.max_batch_size > 0 else values[0].dims
        tensors.append(WireTensor(name, spec.datatype, shape, b"".join(value.data for value in values)))
    return tensors
