"""Models that tests of ``conch.testing`` load: where the toy repository is, and sources to be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from conch.testing import ModelUnderTest
from tests.models import HERE

MAIN = HERE / "main"
BATCHED = """\
backend: "python"
max_batch_size: 4
input { name: "name" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "greeting" data_type: TYPE_STRING dims: [ 1 ] }
"""
PREAMBLE = "import numpy as np, triton_python_backend_utils as pb_utils\n"

Write = Callable[..., Path]

GREETER = """
class TritonPythonModel:
    def initialize(self, args):
        self.args, self.batches, self.ended = args, [], False
    def execute(self, requests):
        self.batches.append(len(requests))
        responses = []
        for request in requests:
            names = pb_utils.get_input_tensor_by_name(request, "name").as_numpy()
            if b"nobody" in names:
                error = pb_utils.TritonError("nobody is there", pb_utils.TritonError.NOT_FOUND)
                responses.append(pb_utils.InferenceResponse([], error))
                continue
            greetings = np.array([b"Hello, " + name for name in names.ravel()], np.object_).reshape(names.shape)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("greeting", greetings)]))
        return responses
    def finalize(self):
        self.ended = True
"""


def ones(model: ModelUnderTest) -> dict[str, Any]:
    """An input of each name, without the batch dimension."""
    return {
        name: np.full([max(dim, 1) for dim in spec.dims], "x" if spec.datatype == "BYTES" else 1).tolist()
        for name, spec in model.signature.inputs.items()
    }
