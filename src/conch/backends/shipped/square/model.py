"""The backend ``square``: a decoupled model that sends n responses ``OUT`` = n for ``IN`` = n.

For tests of clients and statistics, like Triton's backend of that name.
"""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Responds to each request from a separate thread.

    Every response is delayed by ``CUSTOM_INFER_DELAY_NS``, and a response with an output also by
    ``CUSTOM_OUTPUT_DELAY_NS``. The last ``CUSTOM_EMPTY_COUNT`` responses are not sent, and the ``CUSTOM_FAIL_COUNT``
    before them are errors.
    """

    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_INT32", "dims": [1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]})
        if not config.as_dict().get("model_transaction_policy"):
            config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        for kind, name in (("input", "IN"), ("output", "OUT")):
            tensors = [
                (tensor["name"], tensor["data_type"], [int(size) for size in tensor["dims"]]) for tensor in config[kind]
            ]
            if tensors != [(name, "TYPE_INT32", [1])]:
                raise ValueError(f"expected 1 {kind}, {name}, with datatype INT32 and shape [1]")
        self._infer_delay = _number(config, "CUSTOM_INFER_DELAY_NS") / 1e9
        self._output_delay = _number(config, "CUSTOM_OUTPUT_DELAY_NS") / 1e9
        self._failures = _number(config, "CUSTOM_FAIL_COUNT")
        self._empty = _number(config, "CUSTOM_EMPTY_COUNT")
        self._threads = set()

    def execute(self, requests):
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().copy()
            thread = threading.Thread(target=self._send, args=(request.get_response_sender(), value))
            self._threads.add(thread)
            thread.start()

    def finalize(self):
        for thread in list(self._threads):
            thread.join()

    def _send(self, sender, value):
        if value.size != 1:
            error = pb_utils.TritonError("unexpected shape for IN input", pb_utils.TritonError.INVALID_ARG)
            sender.send(pb_utils.InferenceResponse(error=error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        count = int(value.ravel()[0])
        for index in range(count):
            time.sleep(self._infer_delay)
            if index + self._empty >= count:
                continue
            time.sleep(self._output_delay)
            if index + self._failures + self._empty >= count:
                error = pb_utils.TritonError("simulated failure", pb_utils.TritonError.UNKNOWN)
                sender.send(pb_utils.InferenceResponse(error=error))
            else:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full_like(value, count))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self._threads.discard(threading.current_thread())


def _number(config, name):
    """Return the value of a parameter; 0 if it is missing or not a number."""
    text = config.get("parameters", {}).get(name, {}).get("string_value", "")
    return int(text) if text.isdigit() else 0
