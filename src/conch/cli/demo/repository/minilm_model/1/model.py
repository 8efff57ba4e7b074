"""The encoder of all-MiniLM-L6-v2: the requests of a batch, padded to the longest, in one forward pass."""

import json

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import AutoModel


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        torch.set_num_threads(int(parameters["threads"]["string_value"]))
        self.model = AutoModel.from_pretrained(parameters["checkpoint"]["string_value"]).eval()

    def execute(self, requests):
        input_ids = self.padded(requests, "input_ids")
        attention_mask = self.padded(requests, "attention_mask")
        with torch.inference_mode():
            hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state.numpy()
        responses = []
        start = 0
        for request in requests:
            rows, length = pb_utils.get_input_tensor_by_name(request, "input_ids").shape()
            tensor = pb_utils.Tensor("hidden", hidden[start : start + rows, :length])
            responses.append(pb_utils.InferenceResponse([tensor]))
            start += rows
        return responses

    @staticmethod
    def padded(requests, name):
        """Return an input of all requests as one tensor [all rows, longest], with shorter rows padded by zeros."""
        parts = [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
        longest = max(part.shape[1] for part in parts)
        return torch.from_numpy(np.vstack([np.pad(part, ((0, 0), (0, longest - part.shape[1]))) for part in parts]))
