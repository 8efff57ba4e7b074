"""Asks a small classifier, and a large one where the small one is unsure."""

import asyncio
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.threshold = float(json.loads(args["model_config"])["parameters"]["threshold"]["string_value"])

    async def execute(self, requests):
        return await asyncio.gather(*map(self.answer, requests))

    async def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(1, 1)
        name, (label, score) = "small", await self.ask("small", text)
        if score < self.threshold:
            name, (label, score) = "large", await self.ask("large", text)
        outputs = [
            pb_utils.Tensor("label", np.array([label], np.object_)),
            pb_utils.Tensor("score", np.array([score], np.float32)),
            pb_utils.Tensor("answered_by", np.array([name], np.object_)),
        ]
        return pb_utils.InferenceResponse(outputs)

    async def ask(self, model, text):
        """The best label of ``model`` for ``text`` (BYTES [1, 1]), and its score."""
        request = pb_utils.InferenceRequest(
            model_name=model, requested_output_names=["label", "score"], inputs=[pb_utils.Tensor("text_input", text)]
        )
        response = await request.async_exec()
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        label, score = (pb_utils.get_output_tensor_by_name(response, name).as_numpy() for name in ("label", "score"))
        return label[0, 0], score[0, 0]
