"""Sends a text word by word."""

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.stream(request, request.get_response_sender())

    def stream(self, request, sender):
        text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[0].decode()
        for index, word in enumerate(text.split()):
            if sender.is_cancelled():  # the client has hung up
                break
            sender.send(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("word", np.array([word], np.object_)),
                        pb_utils.Tensor("index", np.array([index], np.int32)),
                    ]
                )
            )
        sender.send(flags=FINAL)  # always: until then the client waits
