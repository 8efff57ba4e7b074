"""``async def execute`` of a decoupled model: 0, 1 … IN - 1, each after giving others their turn."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.gather(*(self.count(request) for request in requests))

    async def count(self, request):
        sender = request.get_response_sender()
        for index in range(int(request.inputs()[0].as_numpy()[0])):
            await asyncio.sleep(0.001)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([index], np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
