"""Imports files beside it, in the version directory and in the model directory."""

import helper
import numpy as np
import shared_helper
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        output = pb_utils.Tensor("OUTPUT", np.array([f"{helper.NAME}, {shared_helper.NAME}"], np.object_))
        return [pb_utils.InferenceResponse([output]) for _ in requests]
