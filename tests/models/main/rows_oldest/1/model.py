"""Says what was in the batch of each request, row by row."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


def value(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().flatten()[0].item()


class TritonPythonModel:
    def execute(self, requests):
        rows = []
        for request in requests:
            row = [request.correlation_id(), request.flags(), value(request, "START"), value(request, "END")]
            rows.append([*row, value(request, "CORRID")] if value(request, "READY") else row)
        batch = np.array([[json.dumps(rows)]], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("BATCH", batch)]) for _ in requests]
