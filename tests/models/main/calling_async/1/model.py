"""Calls ``plus_one`` X times at the same time and ``repeat`` once, from ``async def execute``."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return await asyncio.gather(*(self.one(request) for request in requests))

    async def one(self, request):
        count = int(request.inputs()[0].as_numpy()[0])
        calls = [
            pb_utils.InferenceRequest(
                model_name="plus_one",
                requested_output_names=["Y"],
                inputs=[pb_utils.Tensor("X", np.full((1, 1), number, np.float32))],
            ).async_exec()
            for number in range(count)
        ]
        results = [int(response.output_tensors()[0].as_numpy()[0, 0]) for response in await asyncio.gather(*calls)]
        repeated = await pb_utils.InferenceRequest(
            model_name="repeat",
            requested_output_names=["OUT"],
            inputs=[pb_utils.Tensor("IN", np.arange(count, dtype=np.int32))],
        ).async_exec(decoupled=True)
        for response in repeated:
            results += [int(tensor.as_numpy()[0]) for tensor in response.output_tensors()]
        return pb_utils.InferenceResponse([pb_utils.Tensor("RESULT", np.array(results, np.int32))])
