"""Builds inference requests from the arguments of callers.

In-process servers and remote clients share this code, so that equal arguments have equal effects. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from conch.client.deadline import NO_DEADLINE, Deadline
from conch.client.values import encode_inputs
from conch.core.errors import ConchError, invalid, unsupported
from conch.core.inference import (
    SEQUENCE_END,
    SEQUENCE_START,
    InferRequest,
    InferResponse,
    ModelSignature,
    ParameterValue,
    ignore,
)
from conch.core.tensors import WireTensor

T = TypeVar("T")

#: Names with another meaning in the protocols; most are separate arguments.
_RESERVED: Final = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output")
)
#: The input of a text model that selects a streamed response.
_STREAM: Final = "stream"


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """An inference request to the model of ``signature``; ``version`` is the requested version, -1 for any.

    Its last response must arrive before ``deadline``.
    """

    signature: ModelSignature
    version: int
    inputs: dict[str, WireTensor]
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    id: str = ""
    priority: int = 0
    sequence_id: int | str = 0
    flags: int = 0
    deadline: Deadline = NO_DEADLINE

    def __post_init__(self) -> None:
        """Raise INVALID_ARG for values that some protocol cannot carry, so that all protocols refuse them."""
        if not _is_uint64(self.priority):
            raise invalid(f"priority must be an int from 0 (the model's default) to 2**64 - 1; got {self.priority!r}")
        if not isinstance(self.sequence_id, str) and not _is_uint64(self.sequence_id):
            raise invalid(
                f"sequence_id must be a text, or an int from 0 (no sequence) to 2**64 - 1; got {self.sequence_id!r}"
            )
        _check_text("request_id", self.id)
        if isinstance(self.sequence_id, str):
            _check_text("sequence_id", self.sequence_id)

    @property
    def model(self) -> str:
        return self.signature.name

    def not_in_time(self) -> ConchError:
        """Return the error for a request without a response by the deadline."""
        return self.deadline.no_response(self.model)

    def to_infer_request(
        self, on_response: Callable[[InferResponse], None] = ignore, version: int | None = None
    ) -> InferRequest:
        """Return the request as the server represents it; ``version`` is its model's, by default the requested one."""
        return InferRequest(
            self.model,
            dict(self.inputs),
            on_response,
            model_version=self.version if version is None else version,
            id=self.id,
            outputs=self.outputs,
            parameters=self.parameters,
            correlation_id=self.sequence_id,
            flags=self.flags,
            priority=self.priority,
        )

    def only(self, results: Sequence[T]) -> T:
        """Return the only response. Raises UNSUPPORTED for none or several."""
        if len(results) != 1:
            raise unsupported(
                f"model '{self.model}' did not send exactly one response: use infer_stream or generate_stream"
            )
        return results[0]


def single_response(signature: ModelSignature) -> ModelSignature:
    """Return ``signature`` if its model returns one response per request. Raises UNSUPPORTED for a decoupled model."""
    if signature.decoupled:
        raise unsupported(
            f"model '{signature.name}' is decoupled, so a request may have any number of responses: use infer_stream"
        )
    return signature


def infer_request(
    signature: ModelSignature,
    version: int,
    inputs: Mapping[str, Any],
    *,
    outputs: Sequence[str] | None,
    parameters: Mapping[str, ParameterValue] | None,
    request_id: str,
    priority: int,
    sequence_id: int | str,
    sequence_start: bool,
    sequence_end: bool,
    deadline: Deadline,
) -> OutgoingRequest:
    """Build the request of ``infer`` and ``infer_stream``. Raises INVALID_ARG for unsuitable values."""
    if not isinstance(inputs, Mapping):
        raise invalid(f"inputs of model '{signature.name}' must be given by name, not as {type(inputs).__name__}")
    if isinstance(outputs, str):
        raise invalid(f"outputs must be a list of names, such as ['{outputs}']")
    return OutgoingRequest(
        signature,
        version,
        encode_inputs(signature, inputs),
        tuple(outputs or ()),
        _checked(parameters or {}),
        request_id,
        priority,
        sequence_id,
        (SEQUENCE_START if sequence_start else 0) | (SEQUENCE_END if sequence_end else 0),
        deadline,
    )


def generate_request(
    signature: ModelSignature,
    version: int,
    inputs: str | Mapping[str, Any],
    parameters: Mapping[str, Any],
    *,
    request_id: str,
    deadline: Deadline,
    stream: bool,
) -> OutgoingRequest:
    """Build the request of ``generate`` and ``generate_stream``: names of inputs are inputs, all others parameters.

    A text is the input ``text_input``, or else the only required BYTES input. Raises INVALID_ARG.
    """
    values: dict[str, Any] = dict(inputs) if isinstance(inputs, Mapping) else {_prompt(signature): inputs}
    for name, value in parameters.items():
        if name in values:
            raise invalid(f"'{name}' is given twice")
        values[name] = value
    if stream and _STREAM in signature.inputs:
        values.setdefault(_STREAM, True)
    tensors = {name: value for name, value in values.items() if name in signature.inputs}
    others = {name: value for name, value in values.items() if name not in signature.inputs}
    return OutgoingRequest(
        signature,
        version,
        encode_inputs(signature, tensors),
        parameters=_checked(others),
        id=request_id,
        deadline=deadline,
    )


def version_number(version: int | str) -> int:
    """Return the number of a version, an int or a text of digits; -1 for an empty text, the server's choice."""
    if version == "":
        return -1
    text = str(version)
    if not text.isdecimal() or isinstance(version, bool):
        raise invalid(f"version must be a number such as 1, or nothing for any; got {version!r}")
    return int(text)


def _prompt(signature: ModelSignature) -> str:
    if "text_input" in signature.inputs:
        return "text_input"
    names = [spec.name for spec in signature.inputs.values() if spec.datatype == "BYTES" and not spec.optional]
    if len(names) != 1:
        raise invalid(
            f"model '{signature.name}' has no single text input: pass its inputs by name "
            f"({', '.join(signature.inputs) or 'it has none'})"
        )
    return names[0]


def _checked(parameters: Mapping[str, Any]) -> dict[str, ParameterValue]:
    for name, value in parameters.items():
        if name in _RESERVED or name.startswith("triton_"):
            raise invalid(f"'{name}' cannot be a parameter: the protocols use this name for another purpose")
        if not isinstance(value, bool | int | float | str):
            raise invalid(f"parameter '{name}' must be a bool, a number or a text; got {value!r:.80}")
        if isinstance(value, str):
            _check_text(f"parameter '{name}'", value)
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise invalid(f"parameter '{name}' is out of the range of INT64: {value}")
    return dict(parameters)


def _check_text(label: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(f"{label} cannot be written in UTF-8: {error.reason}; got {text!r:.80}") from None


def _is_uint64(number: object) -> bool:
    return isinstance(number, int) and 0 <= number < 2**64
