"""The table of backends: for each name, its implementation and its properties for the server.

The server passes the name of the implementation to the worker, which imports it. This module imports no backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from conch.core import text_parameters
from conch.core.sampling import TEXT_GENERATION
from conch.core.sampling.parameters import IGNORED, NAMES, REFUSED


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """The ``names`` of the parameters that a request may have.

    With ``others``, a request may have other parameters, which the backend ignores, as in Triton. Names that look like
    a misspelt input or parameter are still refused.
    """

    names: frozenset[str] = frozenset()
    others: bool = False


@dataclass(frozen=True, slots=True)
class Backend:
    """The implementation of a backend, and properties that the server needs.

    ``implementation`` is the ``module:Class`` that workers create, empty if another server runs the models.
    ``parameters`` is the ``module:name`` of the ``ParameterTable`` with the parameters of its models, empty if models
    define their own parameters.

    ``shared``: instances on one device are threads of one worker and share the weights; otherwise each instance has its
    own worker. ``prepares``: the worker decodes waiting requests and reports their lengths, and the server batches them
    by length. ``on_request``: outputs that a response has only if the request names them; None if only another server
    has this information. ``generates``: the worker takes requests one by one into a batch that changes at every step.

    ``request_parameters``: the allowed request parameters; None leaves them to the model, as in Triton. ``by_row``:
    ``generate`` takes several texts and returns a value for each, instead of one flat list as in Triton.
    """

    implementation: str
    parameters: str = ""
    shared: bool = False
    prepares: bool = False
    on_request: frozenset[str] | None = frozenset()
    generates: bool = False
    request_parameters: RequestParameters | None = None
    by_row: bool = False

    @property
    def takes_sequences(self) -> bool:
        """Whether the models may have sequence batching; those of checkpoints may not."""
        return not (self.prepares or self.generates)


def sequences_unsupported(model: str, backend: str) -> str:
    """Return the error message for sequence batching with a backend that does not support it."""
    return f"model '{model}' uses sequence batching, which backend '{backend}' does not support"


#: Request parameters of backends that sample tokens; these backends refuse unsupported values themselves.
_SAMPLING: Final = RequestParameters(frozenset(NAMES) | IGNORED | set(REFUSED))
#: Those of the I/O format ``text``, and its outputs on request.
_TEXT: Final = RequestParameters(_SAMPLING.names | {text_parameters.ADD_SPECIAL_TOKENS})
_TOKENS: Final = frozenset({"tokens"})
#: Request parameters of backends that Triton also has; clients may have been written for Triton.
_TRITONS: Final = RequestParameters(others=True)

BACKENDS: Final[dict[str, Backend]] = {
    "python": Backend("conch.backends.python.python_backend:PythonBackend"),
    "huggingface": Backend(
        "conch.backends.huggingface:open_huggingface",
        "conch.backends.huggingface:PARAMETERS",
        shared=True,
        prepares=True,
        on_request=frozenset({"last_hidden_state", "logits", "num_input_tokens", "tokens"}),
        request_parameters=RequestParameters(text_parameters.NAMES),
        by_row=True,
    ),
    "vllm": Backend(
        "conch.backends.io_formats.vllm:VllmBackend",
        "conch.backends.io_formats.vllm:PARAMETERS",
        shared=True,
        generates=True,
        on_request=_TOKENS,
        request_parameters=_TEXT,
        by_row=True,
    ),
    "tensorrtllm": Backend(
        "conch.backends.io_formats.tensorrtllm:TensorRtLlmBackend",
        "conch.backends.io_formats.tensorrtllm:PARAMETERS",
        shared=True,
        generates=True,
        request_parameters=_TRITONS,
    ),
    "onnxruntime": Backend(
        "conch.backends.graphs.onnxruntime:OnnxRuntimeBackend",
        "conch.backends.graphs.onnxruntime:PARAMETERS",
        shared=True,
        request_parameters=_TRITONS,
    ),
    "openvino": Backend(
        "conch.backends.graphs.openvino:OpenVinoBackend",
        "conch.backends.graphs.openvino:PARAMETERS",
        shared=True,
        request_parameters=_TRITONS,
    ),
    "pytorch": Backend(
        "conch.backends.graphs.pytorch:PyTorchBackend",
        "conch.backends.graphs.pytorch:PARAMETERS",
        shared=True,
        request_parameters=_TRITONS,
    ),
    "remote": Backend("", "conch.config.remote:PARAMETERS", on_request=None),
}

#: Advice for models of Triton backends that are not supported here, by backend name.
WAYS_OUT: Final[dict[str, str]] = {
    "tensorrt": 'serve the ONNX file that the plan was built from with backend "onnxruntime", whose accelerator '
    '"tensorrt" builds plans itself',
    "tensorflow": 'convert the model to ONNX (python -m tf2onnx.convert), and serve it with backend "onnxruntime"',
    "dali": 'write the pipeline as a Python model (backend "python"), which may import nvidia.dali itself',
    "fil": 'convert the forest to ONNX (skl2onnx, onnxmltools) for backend "onnxruntime", or load it with its own '
    'library in a Python model (backend "python")',
}

#: The entry of ``huggingface`` for checkpoints that generate text.
_GENERATION: Final = replace(
    BACKENDS["huggingface"],
    prepares=False,
    on_request=_TOKENS,
    generates=True,
    request_parameters=_TEXT,
)


def backend_of(name: str, parameters: Mapping[str, str]) -> Backend:
    """Return the entry for a model with backend ``name``; its ``parameters`` must include the task of its checkpoint.

    A remote model has the response properties of the backend that runs it on the other server.

    Raises KeyError for a name that is not in ``BACKENDS``.
    """
    if name == "huggingface" and parameters.get("task") == TEXT_GENERATION:
        return _GENERATION
    there = parameters.get("backend", "")
    if name == "remote" and there in BACKENDS and there != "remote":
        running = backend_of(there, parameters)
        return replace(BACKENDS[name], on_request=running.on_request, by_row=running.by_row)
    return BACKENDS[name]
