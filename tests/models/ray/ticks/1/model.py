"""Sends the requested number of responses, ten per second; writes the file MARK when its client has gone."""

import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            mark = pb_utils.get_input_tensor_by_name(request, "MARK").as_numpy()[0].decode()
            for tick in range(count):
                if sender.is_cancelled():
                    Path(mark).write_text(str(tick))
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("TICK", np.array([tick], np.int32))]))
                time.sleep(0.1)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
