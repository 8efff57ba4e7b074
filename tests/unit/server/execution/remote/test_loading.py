"""A remote model's configuration, completed from the server that has it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from conch.config.complete import complete
from conch.config.pbtxt import parse
from conch.config.schema import ModelConfig, scheduler
from conch.core.errors import Code, ConchError
from conch.server.execution.remote.executor import RemoteSequences, complete_remote, make_executor
from conch.telemetry.statistics import ModelStatistics

THEIRS = """
name: "theirs" backend: "python" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } }
input { name: "o" data_type: TYPE_STRING dims: [ -1 ] optional: true }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" }
instance_group { count: 3 kind: KIND_GPU gpus: 0 }
sequence_batching { max_sequence_idle_microseconds: 7000000 oldest { max_candidate_sequences: 4 } }
"""
DECOUPLED = 'output { name: "y" data_type: TYPE_FP32 dims: 1 } model_transaction_policy { decoupled: true }'


class ConfigServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Has one model, with the configuration that the test gives it."""

    def __init__(self, config: str) -> None:
        self.config = parse(config, "theirs")

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=request.name == "theirs")

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.NOT_FOUND, f"no {request.name}")

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        config = model_config_pb2.ModelConfig.FromString(self.config.SerializeToString())
        return service_pb2.ModelConfigResponse(config=config)


@asynccontextmanager
async def serving(config: str) -> AsyncIterator[str]:
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(ConfigServer(config), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        await server.stop(0)


def written(url: str, more: str = "", model: str = "theirs") -> ModelConfig:
    text = f'backend: "remote" {more}'
    for key, value in (("url", url), ("model", model)):
        text += f' parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
    return complete(parse(text, "mine"), "mine", ())


async def test_what_is_left_out_is_theirs(tmp_path: Path) -> None:
    async with serving(THEIRS) as url:
        config = await complete_remote(written(url), tmp_path)
    assert (config.name, config.backend, config.max_batch_size) == ("mine", "remote", 4)
    assert [(one.name, list(one.dims), one.optional) for one in config.input] == [("x", [4], False), ("o", [-1], True)]
    assert not config.input[0].HasField("reshape")
    assert [(one.name, one.label_filename) for one in config.output] == [("y", "")]
    assert scheduler(config) == "sequence_batching"
    assert config.sequence_batching.max_sequence_idle_microseconds == 7_000_000
    assert not config.instance_group
    assert config.parameters["backend"].string_value == "python"


async def test_what_is_written_is_kept_without_a_question(tmp_path: Path) -> None:
    tensors = 'input { name: "a" data_type: TYPE_FP32 dims: 1 } output { name: "b" data_type: TYPE_FP32 dims: 1 }'
    config = written("grpc://127.0.0.1:1", tensors)
    assert await complete_remote(config, tmp_path) == config
    executor = await make_executor(config, 1, tmp_path, ModelStatistics("mine", 1), 10, "mine", RemoteSequences())
    assert "grpc://127.0.0.1:1: no connection: Connection refused" in executor.unavailable_reason
    await executor.stop(0)


async def test_nothing_to_complete_it_from_is_said_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConchError) as raised:
        await complete_remote(written("grpc://127.0.0.1:1,http://127.0.0.1:1"), tmp_path)
    assert raised.value.code is Code.UNAVAILABLE
    assert raised.value.message == (
        "the configuration of remote model 'mine' cannot be completed: grpc://127.0.0.1:1: no connection: Connection "
        "refused; http://127.0.0.1:1: no connection: Connection refused. With inputs and outputs in its "
        "configuration, it can load while its server is unavailable"
    )


async def test_a_model_that_they_do_not_have_is_named(tmp_path: Path) -> None:
    async with serving(THEIRS) as url:
        with pytest.raises(ConchError, match=r"it has no model 'mine' \(no mine\)"):
            await complete_remote(written(url, model="mine"), tmp_path)


async def test_a_decoupled_model_is_completed_over_grpc(tmp_path: Path) -> None:
    async with serving(DECOUPLED) as url:
        assert (await complete_remote(written(url), tmp_path)).model_transaction_policy.decoupled
        with pytest.raises(ConchError, match="'mine' is decoupled, and its responses can be forwarded only over gRPC"):
            await complete_remote(written(f"{url},http://127.0.0.1:1"), tmp_path)
