"""Starts a program, forks itself, and starts a program that it leaves alone; answers with their ids, or dies."""

import os
import subprocess
import time

import numpy as np
import triton_python_backend_utils as pb_utils

PROGRAM = ["sleep", "600"]


class TritonPythonModel:
    def initialize(self, args):
        forked = os.fork()
        if not forked:
            time.sleep(600)
            os._exit(0)
        self.started = [
            subprocess.Popen(PROGRAM).pid,
            forked,
            subprocess.Popen(PROGRAM, start_new_session=True).pid,
        ]

    def execute(self, requests):
        for request in requests:
            if request.inputs()[0].as_numpy()[0] == b"die":
                os._exit(3)
        pids = pb_utils.Tensor("PIDS", np.array(self.started, np.int64))
        return [pb_utils.InferenceResponse([pids]) for _ in requests]
