"""Identity by ``async def execute``; negative input raises."""

import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return await asyncio.gather(*(self.one(request) for request in requests))

    async def one(self, request):
        value = request.inputs()[0].as_numpy()
        await asyncio.sleep(0)
        if (value < 0).any():
            raise ValueError("negative")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value)])
