"""Classifies texts as short or long, by calling the model `${name}_length`."""

import asyncio
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.limit = int(json.loads(args["model_config"])["parameters"]["limit"]["string_value"])

    async def execute(self, requests):
        """A coroutine, so that the calls of all requests run concurrently."""
        return list(await asyncio.gather(*(self.answer(request) for request in requests)))

    async def answer(self, request):
        call = pb_utils.InferenceRequest(
            model_name="${name}_length",
            inputs=[pb_utils.get_input_tensor_by_name(request, "text")],
            requested_output_names=["length"],
        )
        called = await call.async_exec()
        if called.has_error():
            return pb_utils.InferenceResponse(error=called.error())
        lengths = pb_utils.get_output_tensor_by_name(called, "length").as_numpy()  # [rows, 1]
        verdicts = np.where(lengths > self.limit, "long", "short").astype(np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("verdict", verdicts)])
