"""The models of the server, of all kinds, and the requests to them over all routes."""

from __future__ import annotations

import gzip
import json
import random
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson
from tritonclient.grpc import service_pb2 as pb

from tests.checkpoints import train_tokenizer, write_adapter, write_checkpoint
from tests.clients.asking import recording
from tests.models import write

#: A client that sends and reads at leisure needs as many texts as a decoder in another process takes (bytes).
LARGE: Final = 300_000
_MODEL: Final = '''"""Adds one to each element of X; the first one is the time that this takes (ms)."""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def values(request):
    return pb_utils.get_input_tensor_by_name(request, "X").as_numpy()


def added(array):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", array + 1)])


class TritonPythonModel:
    def initialize(self, args):
        self.does = json.loads(args["model_config"])["parameters"]["DOES"]["string_value"]
        self.seen = {}
        self.totals = {}

    def execute(self, requests):
        return getattr(self, self.does)(requests)

    def add(self, requests):
        time.sleep(max(float(values(request).flat[0]) for request in requests) / 1000)
        return [added(values(request)) for request in requests]

    def iterate(self, requests):
        time.sleep(max(float(values(request).flat[0]) for request in requests) / 3000)
        return [self.again(request) for request in requests]

    def again(self, request):
        times = self.seen.get(request.correlation_id(), 0) + 1
        if times < 3:
            self.seen[request.correlation_id()] = times
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        self.seen.pop(request.correlation_id())
        return added(values(request))

    def count(self, requests):
        time.sleep(0.003)
        return [self.total(request) for request in requests]

    def total(self, request):
        start, id = (pb_utils.get_input_tensor_by_name(request, name).as_numpy().flat[0] for name in ("START", "ID"))
        self.totals[id] = values(request) + (0 if start else self.totals.get(id, 0))
        return added(self.totals[id])

    def stream(self, requests):
        for request in requests:
            arguments = request.get_response_sender(), values(request)
            threading.Thread(target=self.send, args=arguments, daemon=True).start()

    def send(self, sender, array):
        for _ in range(5):
            time.sleep(float(array.flat[0]) / 5000)
            if sender.is_cancelled():
                break
            sender.send(added(array))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def call(self, requests):
        return [self.passed_on(request, "plain") for request in requests]

    def passed_on(self, request, model):
        called = self.request(request, model).exec()
        if called.has_error():
            return pb_utils.InferenceResponse(error=called.error())
        return pb_utils.InferenceResponse(called.output_tensors())

    def request(self, request, model):
        return pb_utils.InferenceRequest(
            model_name=model, requested_output_names=["Y"], inputs=[pb_utils.Tensor("X", values(request))]
        )

    def relay(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for response in self.request(request, "streamer").exec(decoupled=True):
                if response.has_error():
                    sender.send(pb_utils.InferenceResponse(error=response.error()))
                elif response.output_tensors():
                    sender.send(pb_utils.InferenceResponse(response.output_tensors()))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
_CONFIG: Final = """backend: "python"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
parameters { key: "DOES" value { string_value: "%s" } }
%s
"""
_LIMIT: Final = 'instance_group { count: 2 kind: KIND_CPU rate_limiter { resources { name: "R" count: 1 } } }'
_CONTROLS: Final = """max_sequence_idle_microseconds: 1000000
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }"""
_TIMEOUT: Final = """dynamic_batching { default_queue_policy {
  default_timeout_microseconds: 30000 allow_timeout_override: true max_queue_size: 8 } }"""
_DECOUPLED: Final = "model_transaction_policy { decoupled: true }"
#: What each model in Python does, and its further settings.
_MODELS: Final = {
    "plain": ("add", "dynamic_batching { } instance_group { count: 2 kind: KIND_CPU }"),
    "cached": ("add", "dynamic_batching { } response_cache { enable: true }"),
    "limited": ("add", _LIMIT),
    "limited_too": ("add", _LIMIT),
    "timed": ("add", _TIMEOUT),
    "caller": ("call", ""),
    "iterating": ("iterate", "sequence_batching { iterative_sequence: true }"),
    "rows": ("count", f"sequence_batching {{ {_CONTROLS} }}"),
    "oldest": ("count", f"sequence_batching {{ oldest {{ max_candidate_sequences: 3 }} {_CONTROLS} }}"),
    "streamer": ("stream", _DECOUPLED),
    "relaying": ("relay", _DECOUPLED),
}
_STEP: Final = """step { model_name: "%s" model_version: -1 input_map { key: "X" value: "%s" }
         output_map { key: "Y" value: "%s" } }"""
_ENSEMBLE: Final = """platform: "ensemble"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling { %s %s }
%s
"""
_REMOTE: Final = """backend: "remote"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
parameters { key: "url" value { string_value: "%s" } }
parameters { key: "model" value { string_value: "%s" } }
"""
#: Numbers of elements of requests.
_SIZES: Final = (1, 1, 1, 1, 30, 30, LARGE // 4)
#: What follows the first element.
_REST: Final = [float(number % 7) for number in range(LARGE // 4)]
#: Models that respond once to ``X`` with ``Y``; models that stream; models with sequences.
SINGLE: Final = (
    "plain", "cached", "limited", "limited_too", "timed", "caller", "iterating", "chain", "cached_chain",
    "remote_http", "remote_grpc",
)  # fmt: skip
STREAMING: Final = ("streamer", "relaying", "bounded")
SEQUENCES: Final = ("rows", "oldest", "remote_rows")


def write_repository(folder: Path, http: str, grpc: str) -> Path:
    """Write the models; ``http`` and ``grpc`` are the addresses of their server, to which remote models send."""
    from tests import retrieval_models, task_checkpoints, text_checkpoints

    repository = folder / "models"
    for name, (does, more) in _MODELS.items():
        write(repository, name, _CONFIG % (does, more), {"1/model.py": _MODEL})
    chains = {
        "chain": ("plain", "limited", ""),
        "cached_chain": ("cached", "remote_http", ""),
        "bounded": ("streamer", "plain", _DECOUPLED),
    }
    for name, (first, second, more) in chains.items():
        steps = " ".join((_STEP % (first, "X", "middle"), _STEP % (second, "middle", "Y")))
        limit = "max_inflight_requests: 2" if name == "bounded" else ""
        (write(repository, name, _ENSEMBLE % (limit, steps, more)) / "1").mkdir()
    remotes = {
        "remote_http": (http, "plain"),
        "remote_grpc": (f"grpc://{grpc}", "plain"),
        "remote_rows": (http, "rows"),
    }
    for name, (url, model) in remotes.items():
        url = url if "://" in url else f"http://{url}"
        (write(repository, name, _REMOTE % (url, model)) / "1").mkdir()
    config = repository / "remote_rows/config.pbtxt"
    config.write_text(f"{config.read_text()} sequence_batching {{ {_CONTROLS} }}")

    from transformers import LlamaConfig

    writer = repository / "writer/1"
    write_checkpoint(writer, LlamaConfig, {"intermediate_size": 64}, train_tokenizer(), seed=1)
    for number in range(2):
        write_adapter(writer, folder / "adapters" / f"a{number}", number)
    parameters = {"engine": "transformers", "lora_folders": json.dumps([str(folder / "adapters")])}
    entries = (f'parameters {{ key: "{k}" value {{ string_value: {json.dumps(v)} }} }}' for k, v in parameters.items())
    (repository / "writer/config.pbtxt").write_text(" ".join(('backend: "huggingface"', *entries)))
    retrieval_models.pooled(repository / "embedder/1")
    for leftover in repository.glob("embedder/*-backbone"):
        leftover.rename(folder / leftover.name)
    text_checkpoints.write(repository / "ranker/1", "AutoModelForSequenceClassification", num_labels=1)
    task_checkpoints.whisper(repository / "listener/1")
    return repository


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request as it is sent; ``chunked`` sends the body in chunks."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    chunked: bool = False

    def encode(self) -> bytes:
        headers = {"host": "localhost", "content-type": "application/json", **self.headers}
        body = self.body
        if self.chunked:
            headers["transfer-encoding"] = "chunked"
            parts = [body[start : start + 5000] for start in range(0, len(body), 5000)]
            body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        else:
            headers["content-length"] = str(len(body))
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def transcription(more: bytes = b"", *, stream: bool = False) -> HttpRequest:
    """Return a request for the transcription of a recording, with ``more`` bytes behind it."""
    fields = {"model": "listener", "stream": json.dumps(stream)}
    parts = [f'--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in fields.items()]
    head = '--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    body = "".join((*parts, head)).encode() + recording() + more + b"\r\n--b--\r\n"
    return HttpRequest("/v1/audio/transcriptions", body, {"content-type": "multipart/form-data; boundary=b"})


class RandomRequests:
    """Draws requests to all routes; ``regions`` are the names of registered regions of shared memory."""

    def __init__(self, chance: random.Random, regions: list[str]) -> None:
        self._chance = chance
        self._regions = regions
        self.ids: list[str] = []

    def http(self) -> HttpRequest:
        chance = self._chance
        makers = (self._infer, self._infer, self._generate, self._sequence, self._openai, self._openai, self._retrieval,
                  self._recording, self._control)  # fmt: skip
        return chance.choice(makers)()

    def unary(self) -> pb.ModelInferRequest:
        """Return a request for ``ModelInfer``."""
        chance = self._chance
        name = chance.choice((*SINGLE, *SEQUENCES))
        size = 1 if name in SEQUENCES else chance.choice(_SIZES)
        request = pb.ModelInferRequest(model_name=name)
        tensor = request.inputs.add(name="X", datatype="FP32", shape=[1, size])
        values = self._values(size)
        if chance.random() < 0.2 and self._regions:
            tensor.parameters["shared_memory_region"].string_param = chance.choice(self._regions)
            tensor.parameters["shared_memory_byte_size"].int64_param = 4 * size
            output = request.outputs.add(name="Y")
            output.parameters["shared_memory_region"].string_param = chance.choice(self._regions)
            output.parameters["shared_memory_byte_size"].int64_param = 4 * size
        elif chance.random() < 0.3:
            tensor.contents.fp32_contents.extend(values)
        else:
            request.raw_input_contents.append(array("f", values).tobytes())
        if name in SEQUENCES:
            request.parameters["sequence_id"].int64_param = chance.randint(1, 6)
            request.parameters["sequence_start"].bool_param = chance.random() < 0.4
            request.parameters["sequence_end"].bool_param = chance.random() < 0.3
        elif chance.random() < 0.2:
            request.parameters["timeout"].int64_param = chance.choice((1000, 20_000, 100_000))
        return request

    def streamed(self) -> pb.ModelInferRequest:
        """Return a request for ``ModelStreamInfer``."""
        request = self.unary()
        if self._chance.random() < 0.5:
            request.model_name = self._chance.choice(STREAMING)
        return request

    def _values(self, size: int) -> list[float]:
        return [float(self._chance.choice((0, 1, 5, 20, 60))), *_REST[: size - 1]]

    def _infer(self) -> HttpRequest:
        chance = self._chance
        size = chance.choice(_SIZES)
        values, path = self._values(size), f"/v2/models/{chance.choice(SINGLE)}/infer"
        tensor: dict[str, Any] = {"name": "X", "datatype": "FP32", "shape": [1, size]}
        document: dict[str, Any] = {"inputs": [tensor]}
        if chance.random() < 0.3:
            document["parameters"] = {"timeout": chance.choice((1000, 20_000, 100_000))}
        if chance.random() < 0.3:
            document["outputs"] = [{"name": "Y", "parameters": {"binary_data": True}}]
        kind = chance.choice(("json", "json", "binary", "gzip", "chunked", "region"))
        if kind == "region" and self._regions:
            tensor["parameters"] = {
                "shared_memory_region": chance.choice(self._regions), "shared_memory_byte_size": 4 * size
            }  # fmt: skip
            outputs = {"shared_memory_region": chance.choice(self._regions), "shared_memory_byte_size": 4 * size}
            document["outputs"] = [{"name": "Y", "parameters": outputs}]
            return HttpRequest(path, orjson.dumps(document))
        if kind == "binary":
            tensor["parameters"] = {"binary_data_size": 4 * size}
            header = orjson.dumps(document)
            sizes = {"inference-header-content-length": str(len(header))}
            return HttpRequest(path, header + array("f", values).tobytes(), sizes)
        tensor["data"] = values
        body = orjson.dumps(document)
        if kind == "gzip":
            encodings = {"content-encoding": "gzip", "accept-encoding": "gzip"}
            return HttpRequest(path, gzip.compress(body, 1), encodings)
        return HttpRequest(path, body, chunked=kind == "chunked")

    def _generate(self) -> HttpRequest:
        name = self._chance.choice((*STREAMING, *STREAMING, "plain", "caller"))
        body: dict[str, Any] = {"X": self._values(self._chance.choice(_SIZES))}
        if self._chance.random() < 0.3:
            name, body = "writer", {"text_input": self._text(), "max_tokens": 60, "stream": True}
        kind = "generate_stream" if self._chance.random() < 0.7 else "generate"
        return HttpRequest(f"/v2/models/{name}/{kind}", orjson.dumps(body))

    def _sequence(self) -> HttpRequest:
        chance = self._chance
        document = {
            "inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [1]}],
            "parameters": {
                "sequence_id": chance.randint(1, 6),
                "sequence_start": chance.random() < 0.4,
                "sequence_end": chance.random() < 0.3,
            },
        }
        return HttpRequest(f"/v2/models/{chance.choice(SEQUENCES)}/infer", orjson.dumps(document))

    def _text(self) -> str:
        chance = self._chance
        words = chance.choices(("the", "market", "morning", "station", "is", "open", "library", "near"), k=20)
        return " ".join(words) * (LARGE // 50 if chance.random() < 0.05 else 1)

    def _openai(self) -> HttpRequest:
        chance = self._chance
        members: dict[str, Any] = {"model": chance.choice(("writer", "writer", "a0", "a1"))}
        if chance.random() < 0.6:
            members["stream"] = True
        text, tokens = self._text(), chance.choice((1, 20, 80))
        kind = chance.choice(("completions", "chat/completions", "responses", "messages"))
        if kind == "completions":
            members |= {"prompt": [text] * chance.choice((1, 3)), "max_tokens": tokens, "n": chance.choice((1, 2))}
            members["ignore_eos"] = True
        elif kind == "responses":
            members |= {"input": text, "max_output_tokens": max(tokens, 16)}
            if self.ids and chance.random() < 0.3:
                members["previous_response_id"] = chance.choice(self.ids)
        else:
            members |= {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}
        return HttpRequest(f"/v1/{kind}", orjson.dumps(members))

    def _retrieval(self) -> HttpRequest:
        chance = self._chance
        texts = [self._text() for _ in range(chance.choice((1, 5, 200)))]
        kind = chance.choice(("/v1/embeddings", "/v2/embed", "/embed", "/rerank", "/v1/rerank", "/tokenize"))
        members: dict[str, Any] = {"model": "embedder"}
        if kind == "/v1/embeddings":
            members["input"] = texts
        elif kind == "/v2/embed":
            members |= {"texts": texts[:90], "input_type": "search_query"}
        elif "rerank" in kind:
            members = {"model": "ranker", "query": texts[0], "documents": texts}
        else:
            members = {"inputs": texts}
        return HttpRequest(kind, orjson.dumps(members))

    def _recording(self) -> HttpRequest:
        return transcription(bytes(16000 * self._chance.choice((0, 0, 20))), stream=self._chance.random() < 0.5)

    def _control(self) -> HttpRequest:
        paths = ("/v2/models/stats", "/v1/models", "/metrics", "/v2/models/plain", "/console/events", "/openapi.json")
        return HttpRequest(self._chance.choice(paths), b"", method="GET")
