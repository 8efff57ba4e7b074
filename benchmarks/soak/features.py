"""The models of the soak that use what schedulers, caches and limits offer: a Python-based backend runs them all.

Each answers numbers with ``tripled`` numbers, one at a time or all at once; ``ragged`` answers with their sum.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from benchmarks.sequences import write_repository as write_sequences
from tests.models import write

#: Names of models that answer ``X`` with :func:`tripled`.
TRIPLING: Final = ("plain", "cached", "limited", "limited_too")
#: Names of decoupled models that answer each element of ``IN`` tripled: a model that calls others, and an ensemble.
RELAYING: Final = ("relay", "bounded")
_BACKEND: Final = '''"""Triples numbers, sums them, or has others triple each: what the model's parameter DOES says."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


def given(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.execute = getattr(self, config["parameters"]["DOES"]["string_value"])

    def triple(self, requests):
        tripled = [given(request, "X") * 3 + 1 for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", values)]) for values in tripled]

    def sum(self, requests):
        sums = [given(request, "X").sum(axis=1, keepdims=True, dtype=np.int32) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", total)]) for total in sums]

    def relay(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                for value in self.each(request):
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
            except pb_utils.TritonModelException as error:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def each(self, request):
        for response in self.call("repeat", "OUT", pb_utils.Tensor("IN", given(request, "IN")), decoupled=True):
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            for value in response.output_tensors():
                answer = self.call("plain", "Y", pb_utils.Tensor("X", value.as_numpy()[None]), decoupled=False)
                if answer.has_error():
                    raise pb_utils.TritonModelException(answer.error().message())
                yield answer.output_tensors()[0].as_numpy()[0]

    def call(self, model, output, tensor, decoupled):
        request = pb_utils.InferenceRequest(model_name=model, requested_output_names=[output], inputs=[tensor])
        return request.exec(decoupled=decoupled)
'''
_BATCHED: Final = """backend: "soaked"
max_batch_size: 16
input { name: "X" data_type: TYPE_INT32 dims: [ -1 ] %(ragged)s }
output { name: "Y" data_type: TYPE_INT32 dims: [ -1 ] }
instance_group { count: 2 kind: KIND_CPU %(limit)s }
parameters { key: "DOES" value { string_value: "%(does)s" } }
dynamic_batching { }
%(more)s
"""
_RELAY: Final = """backend: "soaked"
input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
instance_group { count: 2 kind: KIND_CPU }
parameters { key: "DOES" value { string_value: "relay" } }
model_transaction_policy { decoupled: true }
"""
_BOUNDED: Final = """platform: "ensemble"
input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
ensemble_scheduling {
  max_inflight_requests: 2
  step { model_name: "repeat" model_version: -1 input_map { key: "IN" value: "IN" }
         output_map { key: "OUT" value: "one" } }
  step { model_name: "plain" model_version: -1 input_map { key: "X" value: "one" }
         output_map { key: "Y" value: "OUT" } }
}
"""
_LIMIT: Final = 'rate_limiter { resources { name: "R" count: 1 } priority: %d }'
#: What each model that batches has beside the others.
_MODELS: Final[dict[str, dict[str, str]]] = {
    "plain": {},
    "cached": {"more": "response_cache { enable: true }"},
    "limited": {"limit": _LIMIT % 1},
    "limited_too": {"limit": _LIMIT % 2},
    "ragged": {"does": "sum", "ragged": "allow_ragged_batch: true"},
}


def write_features(repository: Path, backends: Path) -> None:
    """Write the models, those of :mod:`benchmarks.sequences` among them, and the backend that runs them."""
    (backends / "soaked").mkdir(parents=True)
    (backends / "soaked" / "model.py").write_text(_BACKEND)
    for name, differences in _MODELS.items():
        config = _BATCHED % {"ragged": "", "limit": "", "does": "triple", "more": "", **differences}
        (write(repository, name, config) / "1").mkdir()
    for name, config in (("relay", _RELAY), ("bounded", _BOUNDED)):
        (write(repository, name, config) / "1").mkdir()
    write_sequences(repository)


def server_flags(folder: Path) -> tuple[str, ...]:
    """What the server needs to be told: the backends below ``folder``, where it also writes its traces."""
    traces = ("level=TIMESTAMPS", "rate=20", f"triton,file={folder / 'trace.json'}", "triton,log-frequency=1000")
    return (
        f"--backend-directory={folder / 'backends'}",
        "--cache-config=local,size=1048576",
        "--allow-client-shm=true",
        "--rate-limit=execution_count",
        "--rate-limit-resource=R:1",
        *(f"--trace-config={setting}" for setting in traces),
    )
