"""Text generation with Llama 2, written the way the Gaudi walkthrough writes it (on the device that is there)."""

import os

os.environ["TRANSFORMERS_CACHE"] = "/opt/tritonserver/model_repository/llama2/hf_cache"

import json

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import AutoModelForCausalLM, AutoTokenizer


class TritonPythonModel:
    def initialize(self, args):
        self.logger = pb_utils.Logger
        self.model_config = json.loads(args["model_config"])
        parameters = self.model_config["parameters"]
        model = parameters["huggingface_model"]["string_value"]
        self.max_output_length = int(parameters["max_output_length"]["string_value"])
        private_token = os.environ.get("PRIVATE_REPO_TOKEN")
        self.device = torch.device(os.environ.get("DEVICE", "cpu"))
        self.tokenizer = AutoTokenizer.from_pretrained(model, token=private_token)
        self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.bfloat16, token=private_token)
        self.model.eval().to(self.device)
        output = pb_utils.get_output_config_by_name(self.model_config, "OUTPUT0")
        self.output_type = pb_utils.triton_string_to_numpy(output["data_type"])
        self.logger.log_info(f"{model} is on {self.device}")

    def execute(self, requests):
        responses = []
        for request in requests:
            prompts = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            texts = self.generate([prompt.decode("utf-8") for prompt in prompts])
            tensor = pb_utils.Tensor("OUTPUT0", np.array(texts).astype(self.output_type))
            responses.append(pb_utils.InferenceResponse(output_tensors=[tensor]))
        return responses

    def generate(self, prompts):
        tokens = self.tokenizer(prompts, return_tensors="pt", padding=True).to(self.device)
        with torch.no_grad():
            sequences = self.model.generate(
                **tokens, max_new_tokens=self.max_output_length, pad_token_id=self.tokenizer.eos_token_id
            )
        return self.tokenizer.batch_decode(sequences, skip_special_tokens=True)

    def finalize(self):
        self.logger.log_info("Cleaning up...")
