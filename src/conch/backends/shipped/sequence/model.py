"""The backend ``sequence``: sums the elements of ``INPUT`` over each sequence, one sequence per batch slot.

For tests of the sequence batcher's ``direct`` strategy, like Triton's backend of that name.
"""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

CONTROLS = ("START", "READY")


class TritonPythonModel:
    """Returns the running sum in each element of ``OUTPUT``, after ``execute_delay_ms``.

    The sum of a slot restarts where ``START`` is set, and is unchanged where ``READY`` is not set.
    """

    def initialize(self, args):
        config = json.loads(args["model_config"])
        batcher = config.get("sequence_batching", {})
        names = sorted(control["name"] for control in batcher.get("control_input", ()))
        if names != sorted(CONTROLS):
            raise ValueError("'START' and 'READY' must be configured as the control inputs")
        parameters = config.get("parameters", {})
        self._delay = int(parameters.get("execute_delay_ms", {}).get("string_value", "0")) / 1000
        self._sums = np.zeros(max(1, config["max_batch_size"]), np.int32)

    def execute(self, requests):
        time.sleep(self._delay)
        return [self._respond(slot, request) for slot, request in enumerate(requests)]

    def _respond(self, slot, request):
        start, ready, values = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("START", "READY", "INPUT")
        )
        if not ready.ravel()[0]:
            return pb_utils.InferenceResponse([])
        before = 0 if start.ravel()[0] else self._sums[slot]
        self._sums[slot] = np.add(before, values.sum(dtype=np.int32), dtype=np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.full_like(values, self._sums[slot]))])
