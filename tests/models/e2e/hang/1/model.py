"""Hangs on request, for some seconds or forever; otherwise answers with the id of its process.

``spin 3`` and ``sleep 3`` hold the interpreter in C code for 3 s, computing or not; ``wait`` writes ``waiting`` into the
folder ``$EVENTS``, waits for ever and lets other threads run; ``finalize`` makes ``finalize`` do so.
"""

import ctypes
import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


def wait_for_ever():
    (Path(os.environ["EVENTS"]) / "waiting").touch()
    threading.Event().wait()


def spin(seconds):
    """Match regular expressions, each in one call that takes some tenths of a second, without a chance for others."""
    end = time.monotonic() + seconds
    length = 20
    while time.monotonic() < end:
        begun = time.monotonic()
        re.match("(x+x+)+y", "x" * length)
        length += time.monotonic() - begun < 1


class TritonPythonModel:
    stuck = False

    def execute(self, requests):
        for request in requests:
            how, _, seconds = request.inputs()[0].as_numpy().flatten()[0].decode().partition(" ")
            if how == "spin":
                spin(float(seconds))
            elif how == "sleep":
                ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))
            elif how == "wait":
                wait_for_ever()
            elif how == "finalize":
                self.stuck = True
        pid = pb_utils.Tensor("PID", np.array([[os.getpid()]], np.int64))
        return [pb_utils.InferenceResponse([pid]) for _ in requests]

    def finalize(self):
        if self.stuck:
            wait_for_ever()
