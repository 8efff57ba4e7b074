"""What a model sees of a request, as JSON."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            seen = {
                "id": request.request_id(),
                "correlation_id": request.correlation_id(),
                "flags": request.flags(),
                "timeout": request.timeout(),
                "parameters": json.loads(request.parameters() or "{}"),
                "outputs": list(request.requested_output_names()),
                "cancelled": request.is_cancelled(),
            }
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("REQUEST", np.array([json.dumps(seen)], np.object_)),
                        pb_utils.Tensor("SPARE", np.zeros(1, np.float32)),
                    ]
                )
            )
        return responses
