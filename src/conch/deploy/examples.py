"""An example of a request to a model, from the inputs that its configuration has."""

from __future__ import annotations

import json
from math import prod
from typing import Any, Final

from conch.config.schema import ModelConfig
from conch.config.signature import full_shape, signature
from conch.deploy.endpoint import EMBEDDINGS

_TEXT: Final = "What is a conch?"
#: Of a model whose inputs are completed when it loads: a checkpoint's.
_UNKNOWN: Final = (("text_input", "BYTES", (1, 1)),)


def example(config: ModelConfig, endpoint: str, model: str, writes: bool = False) -> str:
    """The body, as JSON, of a request to what ``endpoint.endpoint_for`` gives; dimensions that vary are 1.

    ``writes`` says that the model is a language model, whose inputs its configuration need not have.
    """
    if endpoint == "openai":
        return json.dumps({"model": model, "messages": [{"role": "user", "content": _TEXT}]})
    if endpoint == EMBEDDINGS:
        return json.dumps({"model": model, "input": [_TEXT]})
    declared = signature(config, 1).inputs
    inputs = [
        (one.name, one.datatype, tuple(max(size, 1) for size in full_shape(config, one.dims)))
        for one in declared.values()
        if not one.optional
    ] or _UNKNOWN
    if endpoint == "infer":
        tensors = [
            {"name": name, "datatype": datatype, "shape": list(shape), "data": [_element(datatype)] * prod(shape)}
            for name, datatype, shape in inputs
        ]
        return json.dumps({"inputs": tensors})
    values: dict[str, Any] = {
        name: _element(datatype) if prod(shape) == 1 else [_element(datatype)] * prod(shape)
        for name, datatype, shape in inputs
    }
    if endpoint == "generate_stream" and (writes or "stream" in declared):
        values["stream"] = True  # without it, the whole text is one response
    return json.dumps(values)


def _element(datatype: str) -> Any:
    if datatype == "BYTES":
        return _TEXT
    if datatype == "BOOL":
        return False
    return 0.0 if datatype.startswith(("FP", "BF")) else 0
