"""Says in which process of Ray it runs, after as many seconds as it is told to."""

import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils

ANSWER = "first"


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        seconds = pb_utils.get_input_tensor_by_name(request, "SECONDS")
        if seconds is not None:
            time.sleep(float(seconds.as_numpy().max()))
        rows = len(pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy())
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("ANSWER", np.array([[ANSWER]] * rows, np.object_)),
                pb_utils.Tensor("PROCESS", np.full((rows, 1), os.getppid(), np.int64)),
            ]
        )
