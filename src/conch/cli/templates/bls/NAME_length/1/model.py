"""Counts the characters of texts."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
            lengths = np.array([len(text.decode()) for text in texts.ravel()], np.int32).reshape(texts.shape)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("length", lengths)]))
        return responses
