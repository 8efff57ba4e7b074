"""The tokenizer of all-MiniLM-L6-v2; needs neither PyTorch nor transformers."""

import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

#: The checkpoint's maximum in training; longer texts are truncated.
MAX_TOKENS = 256


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        checkpoint = parameters["checkpoint"]["string_value"]
        self.tokenizer = Tokenizer.from_file(os.path.join(checkpoint, "tokenizer.json"))
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.enable_padding()

    def execute(self, requests):
        return [self.tokenize(pb_utils.get_input_tensor_by_name(request, "text").as_numpy()) for request in requests]

    def tokenize(self, texts):
        encodings = self.tokenizer.encode_batch([text.decode(errors="replace") for text in texts.ravel()])
        input_ids = np.array([encoding.ids for encoding in encodings], np.int64)
        attention_mask = np.array([encoding.attention_mask for encoding in encodings], np.int64)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("input_ids", input_ids), pb_utils.Tensor("attention_mask", attention_mask)]
        )
