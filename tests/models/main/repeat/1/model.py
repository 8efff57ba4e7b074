"""One response for each element of IN, sent by a thread, DELAY[i] ms before each and WAIT ms in execute.

A negative element is answered by an error response instead.
"""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.threads = set()

    def execute(self, requests):
        for request in requests:
            thread = threading.Thread(target=self.send, args=(request, request.get_response_sender()), daemon=True)
            self.threads.add(thread)
            thread.start()
            wait = pb_utils.get_input_tensor_by_name(request, "WAIT")
            if wait is not None:
                time.sleep(wait.as_numpy()[0] / 1000)
        return None

    def send(self, request, sender):
        values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        delay = pb_utils.get_input_tensor_by_name(request, "DELAY")
        delays = np.zeros(len(values)) if delay is None else delay.as_numpy()
        for index, value in enumerate(values):
            time.sleep(delays[index] / 1000)
            if sender.is_cancelled():
                pb_utils.Logger.log_info(f"repeat: cancelled before response {index}")
                break
            if value < 0:
                response = pb_utils.InferenceResponse(
                    error=pb_utils.TritonError("negative", pb_utils.TritonError.INVALID_ARG)
                )
            else:
                response = pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("OUT", np.array([value], np.int32)),
                        pb_utils.Tensor("IDX", np.array([index], np.uint32)),
                    ]
                )
            sender.send(response)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self.threads.discard(threading.current_thread())

    def finalize(self):
        for thread in list(self.threads):
            thread.join()
