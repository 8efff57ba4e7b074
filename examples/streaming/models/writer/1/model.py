"""Streams what ``generate`` of transformers writes, piece by piece; a client that leaves stops it."""

import json
import threading

import numpy as np
import transformers
import triton_python_backend_utils as pb_utils


class Cancelled(transformers.StoppingCriteria):
    """Stops ``generate`` when the client has gone."""

    def __init__(self, sender):
        self.sender = sender

    def __call__(self, input_ids, scores, **_):
        return self.sender.is_cancelled()


class TritonPythonModel:
    def initialize(self, args):
        name = json.loads(args["model_config"])["parameters"]["model"]["string_value"]
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(name).eval()
        self.one_at_a_time = threading.Lock()

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.write, args=(request, request.get_response_sender())).start()

    def write(self, request, sender):
        try:
            prompt = pb_utils.get_input_tensor_by_name(request, "prompt").as_numpy().item().decode()
            limit = pb_utils.get_input_tensor_by_name(request, "max_new_tokens")
            limit = 32 if limit is None else int(limit.as_numpy().item())
            streamer = Streamer(self.tokenizer, sender)
            with self.one_at_a_time:
                self.model.generate(
                    **self.tokenizer(prompt, return_tensors="pt"),
                    max_new_tokens=limit,
                    streamer=streamer,
                    stopping_criteria=[Cancelled(sender)],
                )
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as error:  # An exception in a thread would not be noticed.
            failed = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
            sender.send(failed, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class Streamer(transformers.TextStreamer):
    """Sends each piece of text as one response."""

    def __init__(self, tokenizer, sender):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.sender = sender

    def on_finalized_text(self, text, stream_end=False):
        if text:
            tensor = pb_utils.Tensor("text", np.array([text.encode()], np.object_))
            self.sender.send(pb_utils.InferenceResponse([tensor]))
