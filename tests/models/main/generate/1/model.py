"""A language model in two lines: says PROMPT ``times`` times (a request parameter, 1 by default).

With the parameter ``fail_at`` the response of that index is an error.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            prompt = pb_utils.get_input_tensor_by_name(request, "PROMPT").as_numpy()
            parameters = json.loads(request.parameters() or "{}")
            sender = request.get_response_sender()
            for index in range(int(parameters.get("times", 1))):
                if index == parameters.get("fail_at", -1):
                    error = pb_utils.TritonError("told to fail", pb_utils.TritonError.UNAVAILABLE)
                    sender.send(pb_utils.InferenceResponse(error=error))
                    continue
                sender.send(
                    pb_utils.InferenceResponse(
                        [
                            pb_utils.Tensor("TEXT", prompt),
                            pb_utils.Tensor("COUNT", np.array([index], np.int32)),
                        ]
                    )
                )
            sender.send(flags=FINAL)
        return None
