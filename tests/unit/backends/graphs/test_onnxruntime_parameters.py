"""A configuration's parameters as settings of a session."""

from __future__ import annotations

from typing import Any

import pytest

from conch.backends.graphs.onnxruntime import SessionSettings, session_settings
from conch.core.errors import ConchError
from tests.unit.backends.tensor_backends import parameters

CPU = ("CPUExecutionProvider", {})


def _settings(
    config: dict[str, Any], *, kind: str = "CPU", backend_config: dict[str, str] | None = None, instances: int = 1
) -> SessionSettings:
    return session_settings(config, backend_config or {}, kind=kind, device_id=2, instances=instances, cores=8)


def _accelerated(gpu: list[dict[str, Any]] | None = None, cpu: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    accelerators = {"gpu_execution_accelerator": gpu or [], "cpu_execution_accelerator": cpu or []}
    return {"optimization": {"execution_accelerators": accelerators}}


def test_without_parameters_instances_and_the_pool_share_the_cores() -> None:
    settings = _settings({}, instances=3)
    assert settings.threads == 6
    assert (settings.inter_op_threads, settings.parallel, settings.graph) == (0, False, "all")
    assert settings.providers == [CPU]


def test_thread_counts_are_the_models_or_else_the_backends() -> None:
    backend_config = {"intra_op_thread_count": "2", "inter_op_thread_count": "3"}
    settings = _settings({"parameters": parameters(intra_op_thread_count="1")}, backend_config=backend_config)
    assert (settings.threads, settings.inter_op_threads) == (1, 3)
    assert _settings({"parameters": parameters(intra_op_thread_count="0")}).threads == 8


def test_session_entries_are_passed_on() -> None:
    given = parameters(**{"session.a": "1", "other": "2", "memory.enable_memory_arena_shrinkage": "cpu:0"})
    settings = _settings({"parameters": given})
    assert settings.entries == {"session.a": "1"}
    assert settings.run_entries == {"memory.enable_memory_arena_shrinkage": "cpu:0"}


def test_memory_can_be_taken_as_it_is_needed() -> None:
    settings = _settings({"parameters": parameters(enable_mem_arena="0", enable_mem_pattern="0")})
    assert not settings.memory_arena
    assert not settings.memory_pattern


@pytest.mark.parametrize(("level", "graph"), [(-1, "basic"), (0, "all"), (1, "extended"), (2, "disable_all")])
def test_levels_of_optimisation(level: int, graph: str) -> None:
    assert _settings({"optimization": {"graph": {"level": level}}}).graph == graph


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"parameters": parameters(execution_mode="2")}, "'execution_mode' is 2; it must be 0 .* or 1"),
        ({"parameters": parameters(intra_op_thread_count="two")}, "failed to convert intra_op_thread_count 'two'"),
        ({"parameters": parameters(intra_op_thread_count="-5")}, "intra_op_thread_count is -5; it must be the size"),
        ({"parameters": parameters(inter_op_thread_count=str(1 << 31))}, "inter_op_thread_count is 2147483648"),
        ({"optimization": {"graph": {"level": 3}}}, "optimization.graph.level is 3"),
        (_accelerated(cpu=[{"name": "tensorrt"}]), "unknown Execution Accelerator 'tensorrt' is requested"),
        (_accelerated(gpu=[{"name": "openvino"}]), "unknown Execution Accelerator 'openvino' is requested"),
        (
            _accelerated(gpu=[{"name": "tensorrt", "parameters": {"precision_mode": "FP8"}}]),
            "unsupported precision mode 'FP8' is requested",
        ),
        (
            _accelerated(gpu=[{"name": "tensorrt", "parameters": {"speed": "1"}}]),
            "unknown parameter 'speed' is provided for TensorRT Execution Accelerator",
        ),
    ],
)
def test_values_without_a_meaning_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConchError, match=message):
        _settings(config)


def test_a_gpu_runs_with_cuda_on_its_device() -> None:
    given = parameters(cudnn_conv_algo_search="1", gpu_mem_limit="1000", arena_extend_strategy="1")
    (name, options), last = _settings({"parameters": given}, kind="GPU").providers
    assert (name, last) == ("CUDAExecutionProvider", CPU)
    assert options == {
        "device_id": "2",
        "cudnn_conv_algo_search": "HEURISTIC",
        "gpu_mem_limit": "1000",
        "arena_extend_strategy": "kSameAsRequested",
    }


def test_tensorrt_goes_before_cuda() -> None:
    tensorrt = {
        "precision_mode": "FP16",
        "max_workspace_size_bytes": "1073741824",
        "trt_engine_cache_enable": "1",
    }
    config = _accelerated(
        gpu=[
            {"name": "tensorrt", "parameters": tensorrt},
            {"name": "cuda", "parameters": {"use_tf32": "0"}},
            {"name": "gpu_io"},
        ]
    )
    assert _settings(config, kind="GPU").providers == [
        (
            "TensorrtExecutionProvider",
            {
                "device_id": "2",
                "trt_fp16_enable": "1",
                "trt_max_workspace_size": "1073741824",
                "trt_engine_cache_enable": "1",
            },
        ),
        ("CUDAExecutionProvider", {"device_id": "2", "use_tf32": "0"}),
        CPU,
    ]


def test_openvino_accelerates_the_cpu() -> None:
    config = _accelerated(cpu=[{"name": "openvino"}])
    assert _settings(config).providers == [("OpenVINOExecutionProvider", {"device_type": "CPU"}), CPU]
