"""all-MiniLM-L6-v2: the texts of a batch of requests in one forward pass, averaged over tokens, with length 1."""

import json

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import AutoModel, AutoTokenizer

#: What the checkpoint was trained for; longer texts are cut.
MAX_TOKENS = 256


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        torch.set_num_threads(int(parameters["threads"]["string_value"]))
        checkpoint = parameters["checkpoint"]["string_value"]
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.model = AutoModel.from_pretrained(checkpoint).eval()

    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "text").as_numpy().ravel() for request in requests]
        embeddings = self.embed([text.decode(errors="replace") for batch in texts for text in batch])
        ends = np.cumsum([len(batch) for batch in texts])
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("embedding", rows)]) for rows in np.split(embeddings, ends[:-1])
        ]

    @torch.inference_mode()
    def embed(self, texts):
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        hidden = self.model(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean).numpy()
