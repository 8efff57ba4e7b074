"""Splits texts into words; rows with fewer words than the longest end with empty ones."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()  # [rows, 1]
        rows = [text.split() for text in texts.ravel()]
        words = np.full((len(rows), max(map(len, rows))), b"", np.object_)
        for number, row in enumerate(rows):
            words[number, : len(row)] = row
        return pb_utils.InferenceResponse([pb_utils.Tensor("words", words)])
