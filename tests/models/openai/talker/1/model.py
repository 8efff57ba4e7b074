"""Says the last message again, a word a token; texts that begin with a mark of their own do something else.

``!inputs``: the inputs as JSON. ``!say X``: X as it is. ``!fail N``: an error after N tokens. ``!wait NAME``: one
token, then nothing until the request is cancelled, which the event NAME tells.
"""

import json
import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

DECLARED = (
    "text_input", "messages", "tools", "stream", "sampling_parameters", "exclude_input_in_output",
    "return_finish_reason", "return_logprobs", "return_num_input_tokens", "return_num_output_tokens",
)  # fmt: skip


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        sender = request.get_response_sender()
        asked = {name: value for name in DECLARED if (value := read(request, name)) is not None}
        sampling = json.loads(asked.get("sampling_parameters", "{}"))
        messages = json.loads(asked["messages"]) if "messages" in asked else None
        text = (messages[-1].get("content") or "") if messages is not None else asked["text_input"]
        n, limit = sampling.get("n", 1), sampling.get("max_tokens", 1000)
        top, fail = sampling.get("logprobs"), None
        words = re.findall(r"\S+\s*", text)
        prompt = len(words)
        if text.startswith("!inputs"):
            words = [json.dumps(asked)]
        elif text.startswith("!say "):
            words = re.findall(r"\S+\s*|\s+", text[5:])
        elif text.startswith("!fail "):
            words, fail = ["word "] * 5, int(words[1])
        elif text.startswith("!wait "):
            return self.wait(request, sender, words[1].strip())
        choices = [words[:limit] if index % 2 == 0 else words[::-1][:limit] for index in range(n)]
        ends = ["length" if len(words) > limit else "stop"] * n

        def response(first, last, done):
            parts = [choice[first:last] for choice in choices]
            tensors = [text_tensor("text_output", ["".join(part) for part in parts])]
            if asked.get("return_finish_reason"):
                tensors.append(text_tensor("finish_reason", ends if done else ["None"] * n))
            if asked.get("return_logprobs"):
                tensors.append(
                    text_tensor("logprobs", [json.dumps([logprobs(t, top) for t in part]) for part in parts])
                )
            if asked.get("return_num_input_tokens"):
                tensors.append(pb_utils.Tensor("num_input_tokens", np.array([prompt], np.uint32)))
            if asked.get("return_num_output_tokens"):
                counts = np.array([len(part) for part in parts], np.uint32)
                tensors.append(pb_utils.Tensor("num_output_tokens", counts))
            return pb_utils.InferenceResponse(tensors)

        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        length = max(map(len, choices))
        if fail is not None:
            for index in range(fail):
                sender.send(response(index, index + 1, False))
            error = pb_utils.TritonError("the engine broke", pb_utils.TritonError.INTERNAL)
            sender.send(pb_utils.InferenceResponse(error=error), flags=final)
        elif asked.get("stream"):
            for index in range(length):
                sender.send(response(index, index + 1, False))
            sender.send(response(length, length, True), flags=final)
        else:
            sender.send(response(0, length, True), flags=final)

    def wait(self, request, sender, name):
        events = Path(os.environ["EVENTS"])
        sender.send(pb_utils.InferenceResponse([text_tensor("text_output", ["word "])]))
        (events / f"{name}.started").touch()
        while not request.is_cancelled():
            time.sleep(0.01)
        (events / f"{name}-cancelled.started").touch()
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def read(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    value = tensor.as_numpy()[0]
    return value.decode() if isinstance(value, bytes) else bool(value)


def text_tensor(name, texts):
    return pb_utils.Tensor(name, np.array([text.encode() for text in texts], np.object_))


def logprobs(token, top):
    chosen = {"7": {"logprob": -0.5, "rank": 2, "decoded_token": token}}
    others = {
        str(index): {"logprob": -float(index), "rank": index, "decoded_token": f"t{index}"} for index in range(top)
    }
    return {**chosen, **others}
