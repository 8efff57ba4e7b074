"""Sums the inputs of each sequence, and says in which process of Ray it runs."""

import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        number, start, sequence = (
            int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().flat[0])
            for name in ("INPUT", "START", "CORRID")
        )
        self.sums[sequence] = number + (0 if start else self.sums[sequence])
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("SUM", np.array([[self.sums[sequence]]], np.int32)),
                pb_utils.Tensor("PROCESS", np.array([[os.getppid()]], np.int64)),
            ]
        )
