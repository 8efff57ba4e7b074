"""Tells which inputs it got."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

NAMES = ("text_input", "max_tokens", "stop_words", "temperature", "random_seed", "stream")


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            inputs = {}
            for name in NAMES:
                tensor = pb_utils.get_input_tensor_by_name(request, name)
                if tensor is not None:
                    values = tensor.as_numpy()
                    inputs[name] = [[v.decode() if isinstance(v, bytes) else v.item() for v in row] for row in values]
            text = np.array([[json.dumps(inputs).encode()]], np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]))
        return responses
