"""Text generation with Persimmon, written the way the tutorial on Hugging Face models writes it."""

import os

# Before the import, as the tutorial says. Later versions of transformers look at HF_HUB_CACHE instead.
os.environ["TRANSFORMERS_CACHE"] = "/opt/tritonserver/model_repository/persimmon8b/hf_cache"

import json

import numpy as np
import torch
import transformers
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.logger = pb_utils.Logger
        self.model_config = json.loads(args["model_config"])
        parameters = self.model_config.get("parameters", {})
        model = parameters.get("huggingface_model", {}).get("string_value", "adept/persimmon-8b-base")
        self.max_output_length = int(parameters.get("max_output_length", {}).get("string_value", "20"))
        self.logger.log_info(f"Max sequence length: {self.max_output_length}")
        self.logger.log_info(f"Loading HuggingFace model: {model}...")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self.pipeline = transformers.pipeline(
            "text-generation",
            model=model,
            torch_dtype=torch.float16,
            tokenizer=self.tokenizer,
            device_map="auto",
        )
        self.pipeline.tokenizer.pad_token_id = self.tokenizer.eos_token_id

    def execute(self, requests):
        prompts = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            # With batching each request has a batch dimension of its own.
            rows = tensor if tensor.ndim == 1 else tensor[:, 0]
            prompts.append([row.decode("utf-8") for row in rows])
        texts = iter(self.generate([prompt for rows in prompts for prompt in rows]))
        return [self.respond([next(texts) for _ in rows]) for rows in prompts]

    def generate(self, prompts):
        self.logger.log_verbose(f"Generating for {len(prompts)} prompts")
        sequences = self.pipeline(
            prompts,
            max_length=self.max_output_length,
            pad_token_id=self.tokenizer.eos_token_id,
            batch_size=len(prompts),
        )
        return [sequence[0]["generated_text"] for sequence in sequences]

    def respond(self, texts):
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array(texts, dtype=np.object_))])

    def finalize(self):
        print("Cleaning up...")
