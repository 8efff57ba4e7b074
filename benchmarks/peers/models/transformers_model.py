"""Text to embedding with transformers and PyTorch, the requests of a batch in one forward pass."""

import json

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import AutoModel, AutoTokenizer


class TritonPythonModel:
    def initialize(self, args):
        folder = json.loads(args["model_config"])["parameters"]["checkpoint"]["string_value"]
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder).eval()

    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().ravel() for request in requests]
        rows = self.embed([text.decode() for row_texts in texts for text in row_texts])
        ends = np.cumsum([len(row_texts) for row_texts in texts])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("EMBEDDING", part)]) for part in np.split(rows, ends[:-1])]

    @torch.inference_mode()
    def embed(self, texts):
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        hidden = self.model(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).numpy()
