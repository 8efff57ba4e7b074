"""``conch top`` reads both servers: states, rates, means and the number of instances."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.core.errors import ConchError
from conch.measure.top.figures import ServerHistory
from conch.measure.top.source import ServerSource, TopAddress
from tests.conformance.raw import post, tensor
from tests.conftest import Start
from tests.models import write

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""
CONFIG = """
backend: "python" instance_group { count: 2 kind: KIND_CPU }
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
"""


def test_models_of_a_server_and_its_end_are_read(start: Start, tmp_path: Path) -> None:
    write(tmp_path / "models", "used", CONFIG, {"1/model.py": MODEL})
    write(tmp_path / "models", "other", CONFIG, {"1/model.py": MODEL})
    flags = ("--metrics-config=summary_latencies=true", "--model-control-mode=explicit", "--load-model=used")
    with start(tmp_path / "models", *flags, log=tmp_path / "log") as server:
        source = ServerSource(TopAddress.of(server.http, server.metrics, {}))
        history = ServerHistory()
        first = source.read()
        history.add(0.0, first.counts, first.models, first.instances)
        for _ in range(5):
            reply = post(server.http, "/v2/models/used/infer", {"inputs": [tensor("X", "INT32", [1])]})
            assert reply.status == 200, reply.body
        reading = source.read()
        figures = history.add(10.0, reading.counts, reading.models, reading.instances)
    other, used = figures.models
    assert (used.name, used.version, used.state, used.instances, used.rate) == ("used", "1", "READY", 2, 0.5)
    assert used.mean and used.median and used.p99 and used.median <= used.p99
    assert set(used.parts) == {"queue", "compute_input", "compute_infer", "compute_output"} and used.batch == 1.0
    assert (other.name, other.state, other.rate) == ("other", "UNLOADED", None)
    assert figures.cpu is not None and figures.memory is not None and "2.51.0" in reading.server
    with pytest.raises(ConchError, match="does not respond"):
        source.read()
    source.close()
