"""An output of another shape than its configuration declares is sent unchanged, and reported once, over every
protocol."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import conch
from tests.models import write

pytest.importorskip("onnxruntime")
onnx_graphs = pytest.importorskip("tests.onnx_graphs")

SHAPES = "in the shape [1, 2], but its configuration declares it as [-1, 3]; it is sent unchanged"

TENSORS = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }
"""


def test_shape_that_is_not_the_declared_one_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "m", f'backend: "onnxruntime" instance_group {{ count: 2 kind: KIND_CPU }} {TENSORS}', {})
    (tmp_path / "m" / "1").mkdir()
    onnx_graphs.identity(tmp_path / "m" / "1" / "model.onnx", "FP32")
    with caplog.at_level(logging.WARNING, "conch"), conch.Server(
        model_repository=tmp_path, http_port=0, grpc_port=0
    ) as server, conch.Client(server.urls["http"]) as http, conch.Client(server.urls["grpc"]) as grpc:  # fmt: skip
        for service in (server, http, grpc):
            assert service.infer("m", {"x": [[1.0, 2.0, 3.0]]})["y"].shape == (1, 3)
        assert "declares it as" not in caplog.text
        for service in (server, http, grpc):
            assert service.infer("m", {"x": [[1.0, 2.0]]})["y"].shape == (1, 2)
    told = [record.getMessage() for record in caplog.records if "declares it as" in record.getMessage()]
    assert len(told) == 1
    assert f"model 'm' returned the output 'y' {SHAPES}" in told[0]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_shape_from_another_server_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    write(tmp_path / "back", "m", TENSORS.replace("[ 3 ]", "[ -1 ]"), {})
    (tmp_path / "back" / "m" / "1").mkdir()
    onnx_graphs.identity(tmp_path / "back" / "m" / "1" / "model.onnx", "FP32")
    with conch.Server(model_repository=tmp_path / "back", http_port=0, grpc_port=0) as back:
        url = f"{protocol}://{back.urls[protocol].rpartition('/')[2]}"
        remote = f"""
            backend: "remote"
            parameters {{ key: "url" value {{ string_value: "{url}" }} }}
            parameters {{ key: "model" value {{ string_value: "m" }} }}
            """
        write(tmp_path / "front", "front", remote + TENSORS, {})
        with caplog.at_level(logging.WARNING, "conch"), conch.Server(
            model_repository=tmp_path / "front", http_port=0, grpc_port=0
        ) as server, conch.Client(server.urls["http"]) as http, conch.Client(server.urls["grpc"]) as grpc:  # fmt: skip
            for values in ([1.0, 2.0, 3.0], [1.0, 2.0]):
                assert "declares it as" not in caplog.text
                for service in (server, http, grpc):
                    assert service.infer("front", {"x": [values]})["y"].shape == (1, len(values))
    told = [record.getMessage() for record in caplog.records if "declares it as" in record.getMessage()]
    assert told == [f"model 'front' returned the output 'y' {SHAPES}"]
