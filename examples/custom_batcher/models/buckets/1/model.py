"""Forms its own batches: texts whose lengths round up to the same power of two run together.

``execute`` only tokenises requests and puts them into a queue; a thread takes them out, waits for others for at most
``max_wait_ms``, and runs one batch for each length. The output ``batch`` says how many rows and columns the batch of
a request had.
"""

import json
import queue
import threading
import time
from collections import defaultdict

import numpy as np
import torch
import transformers
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        name, rows, wait = (parameters[key]["string_value"] for key in ("model", "max_rows", "max_wait_ms"))
        self.max_rows, self.max_wait = int(rows), float(wait) / 1000
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        self.network = transformers.AutoModel.from_pretrained(name).eval()
        self.waiting = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().item().decode()
                self.waiting.put((self.tokenizer(text, truncation=True)["input_ids"], sender))
            except UnicodeDecodeError as error:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))), flags=FINAL)

    def finalize(self):
        self.waiting.put(None)
        self.thread.join()

    def run(self):
        while (first := self.waiting.get()) is not None:
            buckets = defaultdict(list)
            for ids, sender in self.gather(first):
                buckets[1 << (len(ids) - 1).bit_length()].append((ids, sender))
            for bucket in buckets.values():
                self.answer(*zip(*bucket, strict=True))

    def gather(self, first):
        """``first`` and what arrives within ``max_wait`` seconds, at most ``max_rows``."""
        gathered, deadline = [first], time.monotonic() + self.max_wait
        while len(gathered) < self.max_rows:
            try:
                item = self.waiting.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if item is None:
                self.waiting.put(None)  # the end comes after these
                break
            gathered.append(item)
        return gathered

    def answer(self, texts, senders):
        try:
            batch = self.tokenizer.pad({"input_ids": list(texts)}, return_tensors="pt")
            with torch.inference_mode():
                hidden = self.network(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            means = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).numpy()
            shape = np.array(batch["input_ids"].shape, np.int32)
            for sender, mean in zip(senders, means, strict=True):
                outputs = [pb_utils.Tensor("embedding", mean), pb_utils.Tensor("batch", shape)]
                sender.send(pb_utils.InferenceResponse(outputs), flags=FINAL)
        except Exception as error:  # An exception in a thread would not be noticed.
            for sender in senders:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))), flags=FINAL)
