"""The backend ``identity``: each output ``OUTPUT<n>`` is the input ``INPUT<n>``.

For tests of clients and schedulers; has the parameters of Triton's backend of that name.
"""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

#: The parameters of every response, unless the request overrides them.
RESPONSE_PARAMETERS = {"param0": "an example string parameter", "param1": 42, "param2": False}
#: The request parameters that are copied to the response.
ECHOED = ("param0", "param1", "param2", "param3")


class TritonPythonModel:
    """Copies inputs to outputs, after ``execute_delay_ms``.

    With ``instance_wise_delay_multiplier``, the delay of instance number ``i`` is multiplied by that number times
    ``i``, at least by 1. ``creation_delay_sec`` delays the start of an instance.
    """

    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        self._batched = config["max_batch_size"] > 0
        self._inputs = _pairs(config)
        number = int(args["model_instance_name"].rpartition("_")[2])
        times = max(1, int(parameters.get("instance_wise_delay_multiplier", "0")) * number)
        self._delay = int(parameters.get("execute_delay_ms", "0")) * times / 1000
        time.sleep(int(parameters.get("creation_delay_sec", "0")))

    def execute(self, requests):
        time.sleep(self._delay)
        return [self._respond(request) for request in requests]

    def _respond(self, request):
        inputs = {tensor.name(): tensor for tensor in request.inputs()}
        rows = next((tensor.shape()[0] for tensor in inputs.values() if tensor.shape()), 1)
        outputs = []
        for name in request.requested_output_names():
            config = self._inputs[name]
            tensor = inputs.get(config["name"])
            outputs.append(self._zeros(name, config, rows) if tensor is None else _renamed(tensor, name))
        given = json.loads(request.parameters() or "{}")
        echoed = {name: given[name] for name in ECHOED if isinstance(given.get(name), (bool, int, str))}
        return pb_utils.InferenceResponse(outputs, parameters={**RESPONSE_PARAMETERS, **echoed})

    def _zeros(self, name, config, rows):
        """Return the replacement for an omitted optional input."""
        shape = [max(0, int(size)) for size in config["dims"]]
        dtype = pb_utils.triton_string_to_numpy(config["data_type"])
        return pb_utils.Tensor(name, np.zeros([rows] * self._batched + shape, dtype))


def _pairs(config):
    """Return the configuration of the input of each output. Raises ValueError if they do not match."""
    inputs = {_index(tensor["name"], "INPUT", "input"): tensor for tensor in config["input"]}
    outputs = {_index(tensor["name"], "OUTPUT", "output"): tensor for tensor in config["output"]}
    if len(config["input"]) != len(config["output"]):
        raise ValueError("model configuration must have equal input/output pairs")
    for index, output in outputs.items():
        if index not in inputs:
            raise ValueError("expected input and output indices to match")
        types = inputs[index]["data_type"], output["data_type"]
        if types[0] != types[1]:
            raise ValueError("expected input and output datatype to match, got {} and {}".format(*types))
        shapes = _shape(inputs[index]), _shape(output)
        if shapes[0] != shapes[1]:
            raise ValueError("expected input and output shape to match, got {} and {}".format(*shapes))
    return {output["name"]: inputs[index] for index, output in outputs.items()}


def _index(name, prefix, kind):
    if not name.startswith(prefix):
        raise ValueError(f"expected {kind} name to follow {prefix}<index> pattern, got '{name}'")
    return name.removeprefix(prefix)


def _shape(tensor):
    dims = tensor["reshape"]["shape"] if tensor.get("reshape") else tensor["dims"]
    return "[" + ",".join(str(int(size)) for size in dims) + "]"


def _renamed(tensor, name):
    if pb_utils.triton_to_numpy_type(tensor.triton_dtype()) is np.object_:
        return pb_utils.Tensor(name, tensor.as_numpy())
    return pb_utils.Tensor.from_dlpack(name, tensor)
