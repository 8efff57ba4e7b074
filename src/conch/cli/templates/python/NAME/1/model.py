"""Greets people by name."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        """Called once, before the first request: load weights here."""
        config = json.loads(args["model_config"])
        self.greeting = config["parameters"]["greeting"]["string_value"]

    def execute(self, requests):
        """Called with the requests of a batch; returns a response to each, in their order."""
        return [self.answer(request) for request in requests]

    def answer(self, request):
        names = pb_utils.get_input_tensor_by_name(request, "name").as_numpy()  # [rows, 1], of bytes
        if any(not name.strip() for name in names.ravel()):
            error = pb_utils.TritonError("a name is empty", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        greetings = np.array([f"{self.greeting}, {name.decode()}!" for name in names.ravel()], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("greeting", greetings.reshape(names.shape))])

    def finalize(self):
        """Called once, after the last request."""
