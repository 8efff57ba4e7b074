"""Text to token ids with the fast tokenizer, the texts of a batch in one call; each request keeps its own length."""

import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        folder = json.loads(args["model_config"])["parameters"]["checkpoint"]["string_value"]
        self.tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        self.tokenizer.enable_truncation(256)
        self.tokenizer.no_padding()

    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().ravel() for request in requests]
        encodings = iter(self.tokenizer.encode_batch([text.decode() for row_texts in texts for text in row_texts]))
        return [self.respond([next(encodings).ids for _ in row_texts]) for row_texts in texts]

    def respond(self, rows):
        longest = max(map(len, rows))
        ids = np.array([row + [0] * (longest - len(row)) for row in rows], np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("input_ids", ids)])
