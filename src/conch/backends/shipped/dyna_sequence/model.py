"""The backend ``dyna_sequence``: sums the elements of ``INPUT`` over each sequence, identified by its correlation ID.

For tests of the sequence batcher's ``oldest`` strategy, like Triton's backend of that name.
"""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

CONTROLS = ("START", "END", "READY", "CORRID")


class TritonPythonModel:
    """Returns the running sum in each element of ``OUTPUT``, after ``execute_delay_ms``.

    ``START`` restarts the sum; ``END`` adds the correlation ID to it.
    """

    def initialize(self, args):
        config = json.loads(args["model_config"])
        batcher = config.get("sequence_batching", {})
        names = sorted(control["name"] for control in batcher.get("control_input", ()))
        if names != sorted(CONTROLS):
            raise ValueError("'START', 'END, 'READY' and 'CORRID' must be configured as the control inputs")
        parameters = config.get("parameters", {})
        self._delay = int(parameters.get("execute_delay_ms", {}).get("string_value", "0")) / 1000
        self._sums = {}

    def execute(self, requests):
        time.sleep(self._delay)
        return [self._respond(request) for request in requests]

    def _respond(self, request):
        start, end, ready, values, correlation = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in ("START", "END", "READY", "INPUT", "CORRID")
        )
        if not ready.ravel()[0]:
            return pb_utils.InferenceResponse([])
        identity = int(correlation.ravel()[0])  # of BYTES, too
        total = values.sum(dtype=np.int32) if start.ravel()[0] else self._sums.get(identity, 0) + values.sum()
        if end.ravel()[0]:
            self._sums.pop(identity, None)
            total = int(total) + identity
        else:
            self._sums[identity] = int(total)
        wrapped = np.array(int(total) & 0xFFFFFFFF, np.uint32).astype(np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.full_like(values, wrapped))])
