"""Sums the inputs of each sequence, by its controls."""

import numpy as np
import triton_python_backend_utils as pb_utils


def control(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().flatten()[0]


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            if not control(request, "READY"):
                responses.append(pb_utils.InferenceResponse([]))
                continue
            corrid = int(control(request, "CORRID"))
            if control(request, "START"):
                self.sums[corrid] = 0
            self.sums[corrid] += int(control(request, "INPUT"))
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("OUTPUT", np.array([[self.sums[corrid]]], np.int32)),
                        pb_utils.Tensor("CORRELATION", np.array([[corrid]], np.uint64)),
                    ]
                )
            )
            if control(request, "END"):
                del self.sums[corrid]
        return responses
