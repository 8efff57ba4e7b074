"""Text to text as the Hugging Face tutorial of Triton serves it: a pipeline for a batch, all of it until its longest
answer is complete, and nothing before that."""

import json

import numpy as np
import torch
import transformers
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        folder = json.loads(args["model_config"])["parameters"]["huggingface_model"]["string_value"]
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
        # Rows of different lengths share a batch.
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        self.pipeline = transformers.pipeline(
            "text-generation", model=folder, tokenizer=tokenizer, dtype=torch.bfloat16, device="cpu"
        )

    def execute(self, requests):
        texts = [row.decode() for request in requests for row in values(request, "text_input")]
        counts = [int(row) for request in requests for row in values(request, "max_tokens")]
        texts_out = iter(self.generate(texts, counts))
        return [self.respond([next(texts_out) for _ in values(request, "text_input")]) for request in requests]

    def generate(self, texts, counts):
        maximum = max(counts)
        outputs = self.pipeline(
            texts,
            batch_size=len(texts),
            max_new_tokens=maximum,
            min_new_tokens=maximum,
            do_sample=False,
            return_tensors=True,
        )
        rows = [output[0]["generated_token_ids"][-maximum:] for output in outputs]
        return [self.pipeline.tokenizer.decode(row[:count]) for row, count in zip(rows, counts, strict=True)]

    def respond(self, texts):
        rows = np.array([[text.encode()] for text in texts], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("text", rows)])


def values(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()
