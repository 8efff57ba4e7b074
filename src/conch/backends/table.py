"""The table of backends: by the name in a configuration, the code that runs it and what the server must know of it.

The server passes the implementation's name on to the worker, which imports it; nothing here imports a backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from conch.sampling import TEXT_GENERATION
from conch.sampling.parameters import IGNORED, NAMES, REFUSED


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """The ``names`` that the parameters of a request may have.

    With ``others``, a request may have parameters that mean nothing to the backend, as in Triton, but none that looks
    like an input or a parameter misspelt.
    """

    names: frozenset[str] = frozenset()
    others: bool = False


@dataclass(frozen=True, slots=True)
class Backend:
    """Where a backend's code is, and how the server treats its models.

    ``implementation`` is the ``module:Class`` that workers make, empty where other servers run the models;
    ``parameters`` the ``module:name`` of the ``ParameterTable`` with the parameters that its models may have, empty
    where those are the models' own affair.

    ``shared``: instances on one device are threads of one worker, over the same weights; otherwise each has a worker.
    ``prepares``: the worker decodes requests while they wait, says how long they are, and gets them batched by length.
    ``on_request``: outputs that only requests get that name them.  ``generates``: the worker takes requests one by
    one, into a batch that changes at every step.

    ``request_parameters``: what a request's parameters may be; None leaves them to the model, as Triton does.
    ``by_row``: ``generate`` takes several texts and answers with a value for each, where Triton's way is one flat list.
    """

    implementation: str
    parameters: str = ""
    shared: bool = False
    prepares: bool = False
    on_request: frozenset[str] = frozenset()
    generates: bool = False
    request_parameters: RequestParameters | None = None
    by_row: bool = False


#: Of backends that sample tokens; they refuse themselves what they do not support.
_SAMPLING: Final = RequestParameters(frozenset(NAMES) | IGNORED | set(REFUSED))
#: Of backends that Triton has as well, and whose requests may be written for it.
_TRITONS: Final = RequestParameters(others=True)

BACKENDS: Final[dict[str, Backend]] = {
    "python": Backend("conch.backends.python.backend:PythonBackend"),
    "huggingface": Backend(
        "conch.backends.huggingface:open_huggingface",
        "conch.backends.huggingface:PARAMETERS",
        shared=True,
        prepares=True,
        on_request=frozenset({"logits", "num_input_tokens"}),
        request_parameters=RequestParameters(),
        by_row=True,
    ),
    "vllm": Backend(
        "conch.backends.io_formats.vllm:VllmBackend",
        "conch.backends.io_formats.vllm:PARAMETERS",
        shared=True,
        generates=True,
        request_parameters=_SAMPLING,
        by_row=True,
    ),
    "tensorrtllm": Backend(
        "conch.backends.io_formats.tensorrtllm.backend:TensorRtLlmBackend",
        "conch.backends.io_formats.tensorrtllm.backend:PARAMETERS",
        shared=True,
        generates=True,
        request_parameters=_TRITONS,
    ),
    "onnxruntime": Backend(
        "conch.backends.graphs.onnxruntime.backend:OnnxRuntimeBackend",
        "conch.backends.graphs.onnxruntime.backend:PARAMETERS",
        shared=True,
        request_parameters=_TRITONS,
    ),
    "openvino": Backend(
        "conch.backends.graphs.openvino.backend:OpenVinoBackend",
        "conch.backends.graphs.openvino.backend:PARAMETERS",
        shared=True,
        request_parameters=_TRITONS,
    ),
    "pytorch": Backend(
        "conch.backends.graphs.pytorch.backend:PyTorchBackend",
        "conch.backends.graphs.pytorch.backend:PARAMETERS",
        shared=True,
        request_parameters=_TRITONS,
    ),
    "remote": Backend("", "conch.config.remote:PARAMETERS"),
}

#: What to do with models of Triton's backends that are not here, by name.
WAYS_OUT: Final[dict[str, str]] = {
    "tensorrt": 'serve the ONNX file that the plan was built from with backend "onnxruntime", whose accelerator '
    '"tensorrt" builds plans itself',
    "tensorflow": 'convert the model to ONNX (python -m tf2onnx.convert), and serve it with backend "onnxruntime"',
    "dali": 'write the pipeline as a Python model (backend "python"), which may import nvidia.dali itself',
    "fil": 'convert the forest to ONNX (skl2onnx, onnxmltools) for backend "onnxruntime", or load it with its own '
    'library in a Python model (backend "python")',
}

#: What ``huggingface`` is for checkpoints that write text.
_GENERATION: Final = replace(
    BACKENDS["huggingface"],
    prepares=False,
    on_request=frozenset(),
    generates=True,
    request_parameters=_SAMPLING,
)


def backend_of(name: str, parameters: Mapping[str, str]) -> Backend:
    """The backend of a model with these ``parameters``; the task among them has been completed from its checkpoint.

    A remote model answers as models of the backend do that runs it on the other server.

    Raises KeyError for a name that is none of ``BACKENDS``.
    """
    if name == "huggingface" and parameters.get("task") == TEXT_GENERATION:
        return _GENERATION
    there = BACKENDS.get(parameters.get("backend", "")) if name == "remote" else None
    if there is not None:
        return replace(BACKENDS[name], on_request=there.on_request, by_row=there.by_row)
    return BACKENDS[name]
