"""Four numbers that tell texts apart: length, first and last character, 3."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            texts = [row[0].decode() for row in pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()]
            vectors = np.array([[len(text), ord(text[0]), ord(text[-1]), 3] for text in texts], np.float32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("embedding", vectors)]))
        return responses
