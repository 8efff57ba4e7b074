"""Token ids to texts: one for each beam of each row."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        # The library alone: transformers takes seconds to import.
        self.tokenizer = Tokenizer.from_file(f"{parameters['tokenizer_dir']}/tokenizer.json")
        self.skip = parameters.get("skip_special_tokens", "").lower() not in ("false", "0", "f", "n", "no")
        self.dims = len(config["output"][0]["dims"])

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
        given = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH")
        lengths = given.as_numpy() if given else np.full(tokens.shape[:2], tokens.shape[2])
        texts = [
            self.tokenizer.decode(beam[:length], skip_special_tokens=self.skip).encode()
            for row, row_lengths in zip(tokens, lengths, strict=True)
            for beam, length in zip(row, row_lengths, strict=True)
        ]
        shape = tokens.shape[:2] if self.dims == 2 else (len(texts),)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array(texts, object).reshape(shape))])
