"""n responses of n for IN = n, the last one marked as final; n = 0 is an empty final, n < 0 raises."""

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            n = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            if n < 0:
                raise ValueError("negative")
            sender = request.get_response_sender()
            if n == 0:
                sender.send(flags=FINAL)
            for index in range(n):
                response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([n], np.int32))])
                sender.send(response, flags=FINAL if index == n - 1 else 0)
        return None
