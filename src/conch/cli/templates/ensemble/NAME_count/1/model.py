"""Counts the words of each row that are not empty."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            words = pb_utils.get_input_tensor_by_name(request, "words").as_numpy()  # [rows, words]
            counts = (words != b"").sum(axis=1, keepdims=True).astype(np.int32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("count", counts)]))
        return responses
