"""Identity with two instances, the second of which never returns from ``initialize`` unless the file ``go`` is there.

It writes ``stuck`` into the folder ``$EVENTS`` before it waits.
"""

import os
import threading
from pathlib import Path

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        events = Path(os.environ["EVENTS"])
        if args["model_instance_name"].endswith("_1") and not (events / "go").exists():
            (events / "stuck").touch()
            threading.Event().wait()

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", r.inputs()[0].as_numpy())]) for r in requests]
