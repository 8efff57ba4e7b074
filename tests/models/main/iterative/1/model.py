"""Has each request given to it TIMES times; SEEN are the flags that it came with each time."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.seen = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        times = pb_utils.get_input_tensor_by_name(request, "TIMES").as_numpy()[0, 0]
        seen = self.seen.setdefault(request.correlation_id(), [])
        seen.append(request.flags())
        if len(seen) < times:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        output = pb_utils.Tensor("SEEN", np.array([self.seen.pop(request.correlation_id())], np.int32))
        return pb_utils.InferenceResponse([output])
