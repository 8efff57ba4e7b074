"""What a client's load may bring, by ``--model-load-overrides``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conch.core.errors import Code, ConchError
from conch.repository.override import Override, check_allowed
from tests.unit.server.loads import CONFIG, House

PARAMETER = 'parameters {key: "task" value {string_value: "a"}} '


@pytest.mark.parametrize(
    ("allowed", "config", "files", "brings"),
    [
        ("none", "{}", {}, "a configuration"),
        ("none", "{}", {"1/model.py": b""}, "files"),
        ("config", "{}", {"1/model.py": b""}, "files"),
    ],
)
def test_load_that_brings_more_than_is_allowed_is_refused(
    allowed: str, config: str, files: dict[str, bytes], brings: str
) -> None:
    with pytest.raises(ConchError) as refused:
        check_allowed(allowed, config, files)
    assert refused.value.code is Code.INVALID_ARG
    assert f"a load must not contain {brings}, because this server has --model-load-overrides={allowed}" in str(
        refused.value
    )


@pytest.mark.parametrize(
    ("allowed", "config", "files"),
    [("none", None, {}), ("config", None, {}), ("config", "{}", {}), ("files", "{}", {"1/model.py": b""})],
)
def test_load_that_brings_what_is_allowed_is_not_refused(
    allowed: str, config: str | None, files: dict[str, bytes]
) -> None:
    check_allowed(allowed, config, files)


def override(**config: Any) -> Override:
    tensors: dict[str, Any] = {
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}],
    }
    return Override(json.dumps({**tensors, **config}), of_any_code=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "python", "max_batch_size": 4},
        {"backend": "python", "instance_group": [{"count": 2, "kind": "KIND_CPU"}]},
        {"backend": "python", "parameters": {"task": {"string_value": "a"}, "conch.engine": {"string_value": "x"}}},
    ],
)
async def test_configuration_that_runs_the_same_code_is_taken(tmp_path: Path, changes: dict[str, Any]) -> None:
    house = House(tmp_path)
    house.write("m", CONFIG + PARAMETER)
    await house.lifecycle.load("m", override(**changes))
    assert house.table.find("m").config.max_batch_size == changes.get("max_batch_size", 0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"backend": "huggingface"}, "backend"),
        ({"backend": "python", "platform": "onnxruntime_onnx"}, "platform"),
        ({"backend": "python", "default_model_filename": "labels.txt"}, "default_model_filename"),
        ({"backend": "python", "parameters": {"task": {"string_value": "b"}}}, "parameters['task']"),
        (
            {"backend": "python", "parameters": {"trust_remote_code": {"string_value": "true"}}},
            "parameters['trust_remote_code']",
        ),
        (
            {"backend": "python", "parameters": {"EXECUTION_ENV_PATH": {"string_value": "/tmp/x.tar.gz"}}},
            "parameters['EXECUTION_ENV_PATH']",
        ),
        (
            {
                "backend": "python",
                "optimization": {
                    "execution_accelerators": {
                        "gpu_execution_accelerator": [
                            {"name": "tensorrt", "parameters": {"trt_extra_plugin_lib_paths": "/tmp/x.so"}}
                        ]
                    }
                },
            },
            "optimization",
        ),
    ],
)
async def test_configuration_that_would_choose_what_code_runs_is_refused(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    house = House(tmp_path)
    house.write("m", CONFIG + PARAMETER)
    with pytest.raises(ConchError, match=r"--model-load-overrides=config") as refused:
        await house.lifecycle.load("m", override(**changes))
    assert f"may not change {field} from" in refused.value.message
    assert refused.value.code is Code.INVALID_ARG
