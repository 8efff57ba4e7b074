"""Waits for files: for each request writes ``<NAME>.started`` into the folder EVENTS and returns when all of the
batch have their ``<NAME>.go`` or were cancelled (then it writes ``<NAME>.cancelled``).

A request named ``fail…`` gets an error of its own, one named ``raise…`` makes execute raise.
"""

import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


def text(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().flatten()[0].decode()


def answer(name, count):
    if name.startswith("fail"):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(name, pb_utils.TritonError.NOT_FOUND))
    return pb_utils.InferenceResponse(
        [
            pb_utils.Tensor("OUTPUT", np.array([[name]], np.object_)),
            pb_utils.Tensor("REQUESTS", np.full((1, 1), count, np.int32)),
        ]
    )


class TritonPythonModel:
    def execute(self, requests):
        waiting = {}
        for request in requests:
            path = Path(text(request, "EVENTS")) / text(request, "NAME")
            waiting[path] = request
            path.with_suffix(".started").touch()
        names = [path.name for path in waiting]
        while waiting:
            for path, request in list(waiting.items()):
                if request.is_cancelled():
                    path.with_suffix(".cancelled").touch()
                    del waiting[path]
                elif path.with_suffix(".go").exists():
                    del waiting[path]
            time.sleep(0.003)
        if any(name.startswith("raise") for name in names):
            raise ValueError("told to raise")
        return [answer(name, len(requests)) for name in names]

    def finalize(self):
        pb_utils.Logger.log_info("gate: finalized")
