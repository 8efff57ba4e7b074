"""Masks mail addresses and telephone numbers."""

import re

import numpy as np
import triton_python_backend_utils as pb_utils

MASKS = ((re.compile(rb"[\w.+-]+@[\w-]+(\.[\w-]+)+"), b"[mail]"), (re.compile(rb"\+?\d[\d /-]{5,}\d"), b"[phone]"))


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
            masked = np.array([self.mask(text) for text in texts.ravel()], np.object_).reshape(texts.shape)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("redacted", masked)]))
        return responses

    def mask(self, text):
        for pattern, replacement in MASKS:
            text = pattern.sub(replacement, text)
        return text
