"""Dies on request; otherwise answers with the id of its process."""

import os
import signal
import sys

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            how = request.inputs()[0].as_numpy().flatten()[0].decode()
            if how == "exit":
                os._exit(3)
            elif how == "sys_exit":
                sys.exit("told to exit")
            elif how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "abort":
                os.abort()
        pid = pb_utils.Tensor("PID", np.array([[os.getpid()]], np.int64))
        return [pb_utils.InferenceResponse([pid]) for _ in requests]
