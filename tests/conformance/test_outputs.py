"""Outputs that a model returns but its configuration does not declare, and the reverse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conformance.raw import post, tensor
from tests.conftest import Start
from tests.models import write

CONFIG = """
{head}
input [{{ name: "IN" data_type: TYPE_FP32 dims: [1] }}]
output [{{ name: "A" data_type: TYPE_FP32 dims: [1] }}, {{ name: "B" data_type: TYPE_FP32 dims: [1] }}]
"""
PYTHON = CONFIG.format(head='backend: "python" instance_group [{ count: 2 kind: KIND_CPU }]')
ENSEMBLE = (
    CONFIG.format(head='platform: "ensemble"')
    + """
ensemble_scheduling { step [{
    model_name: "odd" model_version: -1 input_map { key: "IN" value: "IN" }
    output_map [{ key: "A" value: "A" }, { key: "B" value: "B" }]
}] }
"""
)
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.Tensor("A", np.zeros(1, np.float32)), pb_utils.Tensor("EXTRA", np.ones(3, np.float32))]
        return [pb_utils.InferenceResponse(tensors) for _ in requests]
"""


def test_neither_is_an_error(tmp_path: Path, start: Start, server_kind: str) -> None:
    write(tmp_path / "models", "odd", PYTHON, {"1/model.py": MODEL})
    write(tmp_path / "models", "around", ENSEMBLE)
    (tmp_path / "models" / "around" / "1").mkdir()
    log = tmp_path / "log"
    with start(tmp_path / "models", "--log-verbose=1", log=log) as server:

        def outputs(model: str, *names: str) -> Any:
            body: dict[str, Any] = {"inputs": [tensor("IN", "FP32", [1.0], [1])]}
            if names:
                body["outputs"] = [{"name": name} for name in names]
            reply = post(server.http, f"/v2/models/{model}/infer", body)
            return [output["name"] for output in reply.json()["outputs"]] if reply.status == 200 else reply.error

        for model in ("odd", "around"):
            assert outputs(model) == ["A"]
            assert outputs(model, "A") == ["A"]
        assert outputs("odd", "B") == []
        assert outputs("odd", "EXTRA") == "unexpected inference output 'EXTRA' for model 'odd'"
        assert post(server.http, "/v2/models/odd/generate", {"IN": 1}).json()["A"] == 0.0
        text = log.read_text(errors="replace")
    assert text.count("Composing models did not output tensor B") == 1
    if server_kind == "conch":
        assert text.count("returned the output 'EXTRA', which its configuration does not declare") == 1
        assert text.count("did not return the output 'B'") == 1
