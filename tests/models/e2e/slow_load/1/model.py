"""Identity whose ``initialize`` writes ``loading`` into the folder ``$EVENTS`` and waits there for the file ``load``."""

import os
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        events = Path(os.environ["EVENTS"])
        (events / "loading").touch()
        while not (events / "load").exists():
            time.sleep(0.01)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", r.inputs()[0].as_numpy())]) for r in requests]
