"""The shapes of the inputs given, as one string; VALUES holds several elements, EMPTY none."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            shapes = " ".join(f"{t.name()}{list(t.shape())}" for t in sorted(request.inputs(), key=lambda t: t.name()))
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("SHAPES", np.array([[shapes]], np.object_)),
                        pb_utils.Tensor("VALUES", np.array([[0.5, 1.0, float("nan")]], np.float32)),
                        pb_utils.Tensor("EMPTY", np.zeros((1, 0), np.float32)),
                    ]
                )
            )
        return responses
