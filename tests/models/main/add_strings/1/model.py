"""add_sub over decimal numbers written as strings."""

import numpy as np
import triton_python_backend_utils as pb_utils


def numbers(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().astype(np.int64)


def strings(name, values):
    return pb_utils.Tensor(name, np.array([str(v) for v in values], dtype=np.object_))


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = numbers(request, "INPUT0"), numbers(request, "INPUT1")
            responses.append(pb_utils.InferenceResponse([strings("OUTPUT0", a + b), strings("OUTPUT1", a - b)]))
        return responses
