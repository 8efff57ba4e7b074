"""``pb_utils.InferenceResponse``: output tensors or an error, created or received by a model.

Runs in the worker of a Python model, in any of its threads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from conch.backends.python import arguments
from conch.backends.python.errors import TritonError, TritonModelException
from conch.backends.python.tensor import MaybeNone, Tensor
from conch.workers.child.buffers import OutputLoan
from conch.workers.child.packing import Packer

#: For requests whose outputs are all sent to the server.
NO_LOANS: Mapping[str, OutputLoan] = {}


def check_parameters(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Copy the parameters of a request or response. Raises TritonModelException for unsupported types."""
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect parameters to be a dict, found type {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return dict(parameters)


class InferenceResponse:
    """Output tensors or an error; with an error, the tensors are not sent to the client."""

    __slots__ = ("__weakref__", "_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(output_tensors, (list, tuple)):
            raise TypeError(f"InferenceResponse: output_tensors must be a list of Tensor, not {type(output_tensors)}")
        for tensor in output_tensors:
            if not isinstance(tensor, Tensor):
                if tensor is None:
                    raise TritonModelException("Output tensor for inference response should not be empty.")
                raise TypeError(
                    f"InferenceResponse: output_tensors must be a list of Tensor, with a {type(tensor)} in it"
                )
        if error is not None:
            arguments.instance(error, "InferenceResponse: error", TritonError)
        self._tensors = list(output_tensors)
        self._error = error
        self._parameters = check_parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        return list(self._tensors)

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | MaybeNone:
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return json.dumps(self._parameters)

    def encode(
        self, outputs: set[str], packer: Packer, copy: bool = False, loans: Mapping[str, OutputLoan] = NO_LOANS
    ) -> dict[str, Any]:
        """Return the description of this response for a frame, with only the requested ``outputs``.

        Outputs named in ``loans`` are written to the shared memory lent for them. ``copy`` copies the tensors, so that
        later changes by the model are not sent.
        """
        if self._error is not None:
            error = [self._error.code().name, self._error.message()]
            return {"outputs": [], "parameters": self._parameters, "error": error}
        tensors = [
            tensor.pack(packer, copy, loans.get(tensor._name)) for tensor in self._tensors if tensor._name in outputs
        ]
        return {"outputs": tensors, "parameters": self._parameters}


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | MaybeNone:
    """Return the named output of a response; None if there is none."""
    return next((tensor for tensor in inference_response._tensors if tensor._name == name), None)
