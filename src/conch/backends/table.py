"""Which code runs a backend, by the name that a configuration gives it, and what the server must know of it.

The server passes the implementation's name on to the worker, which imports it; nothing here imports a backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Backend:
    """``implementation`` is ``module:Class``.

    ``shared``: instances on one device are threads of one worker, over the same weights; otherwise each
    is a worker.  ``prepares``: requests are decoded by the worker while they wait, which tells how long
    they are, and are batched by length.  ``on_request`` are outputs that only requests get that name them.
    """

    implementation: str
    shared: bool = False
    prepares: bool = False
    on_request: frozenset[str] = frozenset()


BACKENDS: Final[dict[str, Backend]] = {
    "python": Backend("conch.backends.python.backend:PythonBackend"),
    "huggingface": Backend(
        "conch.backends.huggingface.backend:HuggingFaceBackend",
        shared=True,
        prepares=True,
        on_request=frozenset({"logits"}),
    ),
    "onnxruntime": Backend("conch.backends.onnxruntime.backend:OnnxRuntimeBackend", shared=True),
    "openvino": Backend("conch.backends.openvino.backend:OpenVinoBackend", shared=True),
}
