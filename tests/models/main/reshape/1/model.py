"""The shapes that reach the model."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            scalar = pb_utils.get_input_tensor_by_name(request, "SCALAR").shape()
            matrix = pb_utils.get_input_tensor_by_name(request, "MATRIX").shape()
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("SHAPES", np.array([[f"{list(scalar)} {list(matrix)}"]], np.object_)),
                        pb_utils.Tensor("FLAT", np.arange(4, dtype=np.float32).reshape(1, 2, 2)),
                    ]
                )
            )
        return responses
