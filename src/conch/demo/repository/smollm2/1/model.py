"""SmolLM2-135M-Instruct: one thread a request, one response a piece of text, and an end when the client gives up."""

import json
import os
import threading

# Answers are computed in parallel on the same cores: OpenMP threads that wait must not keep them busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, TextStreamer

DEFAULT_MAX_TOKENS = 128


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        torch.set_num_threads(int(parameters["threads"]["string_value"]))
        checkpoint = parameters["checkpoint"]["string_value"]
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        # Half the memory traffic of float32; float16 is slow on CPUs.
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
        self.concurrency = int(parameters["concurrency"]["string_value"])
        self.free = threading.BoundedSemaphore(self.concurrency)

    def execute(self, requests):
        for request in requests:
            self.free.acquire()
            threading.Thread(target=self.answer, args=(request,)).start()

    def finalize(self):
        for _ in range(self.concurrency):
            self.free.acquire()

    def answer(self, request):
        sender = request.get_response_sender()
        response = None
        try:
            self.generate(request, Sending(self.tokenizer, sender))
        except Refused as problem:
            error = pb_utils.TritonError(str(problem), pb_utils.TritonError.INVALID_ARG)
            response = pb_utils.InferenceResponse(error=error)
        except Exception as problem:
            error = pb_utils.TritonError(f"{type(problem).__name__}: {problem}")
            response = pb_utils.InferenceResponse(error=error)
        finally:
            self.free.release()
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def generate(self, request, streamer):
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode(errors="replace")
        limit = pb_utils.get_input_tensor_by_name(request, "max_tokens")
        max_tokens = DEFAULT_MAX_TOKENS if limit is None else int(limit.as_numpy()[0])
        if max_tokens < 1:
            raise Refused(f"max_tokens must be at least 1, got {max_tokens}")
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        room = self.model.config.max_position_embeddings - prompt["input_ids"].shape[1]
        if max_tokens > room:
            raise Refused(f"max_tokens is {max_tokens}, but after this text_input there is room for {max(room, 0)}")
        self.model.generate(
            **prompt,
            max_new_tokens=max_tokens,
            do_sample=False,
            streamer=streamer,
            stopping_criteria=[GivenUp(request)],
        )


class Refused(Exception):
    """The request asks for what the model cannot do."""


class Sending(TextStreamer):
    """Sends text when its last word is complete."""

    def __init__(self, tokenizer, sender):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.sender = sender

    def on_finalized_text(self, text, stream_end=False):
        if text:
            tensor = pb_utils.Tensor("text_output", np.array([text], np.object_))
            self.sender.send(pb_utils.InferenceResponse([tensor]))


class GivenUp(StoppingCriteria):
    def __init__(self, request):
        self.request = request

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), self.request.is_cancelled())
