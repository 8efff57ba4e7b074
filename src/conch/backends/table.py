"""The table of backends: by the name in a configuration, the code that runs it and what the server must know of it.

The server passes the implementation's name on to the worker, which imports it; nothing here imports a backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from conch.sampling import TEXT_GENERATION


@dataclass(frozen=True, slots=True)
class Backend:
    """Where a backend's code is, and how the server treats its models.

    ``implementation`` is the ``module:Class`` that workers make; ``parameters`` the ``module:name`` of the
    ``ParameterTable`` with the parameters that its models may have, empty where those are the models' own affair.

    ``shared``: instances on one device are threads of one worker, over the same weights; otherwise each has a worker.
    ``prepares``: the worker decodes requests while they wait, says how long they are, and gets them batched by length.
    ``on_request``: outputs that only requests get that name them.  ``generates``: the worker takes requests one by
    one, into a batch that changes at every step.
    """

    implementation: str
    parameters: str = ""
    shared: bool = False
    prepares: bool = False
    on_request: frozenset[str] = frozenset()
    generates: bool = False


BACKENDS: Final[dict[str, Backend]] = {
    "python": Backend("conch.backends.python.backend:PythonBackend"),
    "huggingface": Backend(
        "conch.backends.huggingface:open_huggingface",
        "conch.backends.huggingface:PARAMETERS",
        shared=True,
        prepares=True,
        on_request=frozenset({"logits", "num_input_tokens"}),
    ),
    "vllm": Backend(
        "conch.backends.contracts.vllm:VllmBackend",
        "conch.backends.contracts.vllm:PARAMETERS",
        shared=True,
        generates=True,
    ),
    "tensorrtllm": Backend(
        "conch.backends.contracts.tensorrtllm.backend:TensorRtLlmBackend",
        "conch.backends.contracts.tensorrtllm.config:PARAMETERS",
        shared=True,
        generates=True,
    ),
    "onnxruntime": Backend(
        "conch.backends.graphs.onnxruntime.backend:OnnxRuntimeBackend",
        "conch.backends.graphs.onnxruntime.parameters:PARAMETERS",
        shared=True,
    ),
    "openvino": Backend(
        "conch.backends.graphs.openvino.backend:OpenVinoBackend",
        "conch.backends.graphs.openvino.backend:PARAMETERS",
        shared=True,
    ),
}

#: What ``huggingface`` is for checkpoints that write text.
_GENERATION: Final = replace(BACKENDS["huggingface"], prepares=False, on_request=frozenset(), generates=True)


def backend_of(name: str, parameters: Mapping[str, str]) -> Backend:
    """The backend of a model with these ``parameters``; the task among them has been completed from its checkpoint.

    Raises KeyError for a name that is none of ``BACKENDS``.
    """
    if name == "huggingface" and parameters.get("task") == TEXT_GENERATION:
        return _GENERATION
    return BACKENDS[name]
