"""The backend ``repeat``: a decoupled model that returns the elements of ``IN``, one per response.

For tests of clients, like Triton's backend of that name.
"""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

INPUTS = {"IN": "TYPE_INT32", "DELAY": "TYPE_UINT32", "WAIT": "TYPE_UINT32"}
OUTPUTS = {"OUT": "TYPE_INT32", "IDX": "TYPE_UINT32"}
#: The tensors with one element per requested response.
LONG = ("IN", "DELAY")


class TritonPythonModel:
    """Sends element ``i`` of ``IN`` as ``OUT`` and ``i`` as ``IDX``, ``DELAY[i]`` ms after the previous one.

    ``execute`` returns after ``WAIT`` ms, whether or not everything has been sent.
    """

    @staticmethod
    def auto_complete_config(config):
        for names, add in ((INPUTS, config.add_input), (OUTPUTS, config.add_output)):
            for name, data_type in names.items():
                add({"name": name, "data_type": data_type, "dims": [-1] if name in LONG else [1]})
        if not config.as_dict().get("model_transaction_policy"):
            config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        for kind, wanted in (("input", INPUTS), ("output", OUTPUTS)):
            _check(config[kind], kind, wanted)
        self._threads = set()

    def execute(self, requests):
        waits = [0]
        for request in requests:
            sender = request.get_response_sender()
            values, delays, wait = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("IN", "DELAY", "WAIT")
            )
            waits.append(int(wait.ravel()[0]))
            if values.shape != delays.shape:
                shapes = f"{list(values.shape)} and {list(delays.shape)}"
                message = "expected IN and DELAY shape to match, got " + shapes.replace(", ", ",").replace("'", "")
                error = pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)
                sender.send(pb_utils.InferenceResponse(error=error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            thread = threading.Thread(target=self._send, args=(sender, values.ravel().copy(), delays.ravel().copy()))
            self._threads.add(thread)
            thread.start()
        time.sleep(max(waits) / 1000)

    def finalize(self):
        for thread in list(self._threads):
            thread.join()

    def _send(self, sender, values, delays):
        for index, (value, delay) in enumerate(zip(values, delays)):
            time.sleep(int(delay) / 1000)
            outputs = [
                pb_utils.Tensor("OUT", np.array([value], np.int32)),
                pb_utils.Tensor("IDX", np.array([index], np.uint32)),
            ]
            sender.send(pb_utils.InferenceResponse(outputs))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self._threads.discard(threading.current_thread())


def _check(tensors, kind, wanted):
    if len(tensors) != len(wanted):
        raise ValueError(f"expected {len(wanted)} {kind}s, got {len(tensors)}")
    found = {tensor["name"]: tensor for tensor in tensors}
    for name, data_type in wanted.items():
        if name not in found:
            raise ValueError("expected {} tensor {}, got {}".format(kind, name, ", ".join(found)))
        tensor = found[name]
        if tensor["data_type"] != data_type:
            raise ValueError("expected {} datatype to be {}, got {}".format(name, data_type[5:], tensor["data_type"]))
        dims = [int(size) for size in tensor["dims"]]
        if len(dims) != 1 or (name not in LONG and dims != [1]):
            raise ValueError(f"expected {name} shape to have one dimension, got {dims}")
