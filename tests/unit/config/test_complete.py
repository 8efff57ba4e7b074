"""Completing a configuration from the files beside it; expectations were seen on the real Triton 2.51."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conch.config.complete import (
    complete,
    complete_ensemble,
    merge_completion,
    normalise,
)
from conch.config.pbtxt import parse
from conch.config.reading import Problem
from conch.config.render import to_json
from conch.config.schema import InstanceGroup, ModelConfig
from conch.core.errors import ConchError


def completed(text: str = "", *files: str, name: str = "m", gpus: tuple[int, ...] = ()) -> ModelConfig:
    return complete(parse(text, "config.pbtxt"), name, files or {"model.py"}, gpus=gpus)


def as_json(config: ModelConfig) -> Any:
    return json.loads(to_json(config))


def test_model_without_a_configuration_gets_one_from_its_file() -> None:
    config = completed()

    assert (config.name, config.backend, config.platform, config.default_model_filename) == (
        "m", "python", "", "model.py",
    )  # fmt: skip
    assert config.version_policy.latest.num_versions == 1


def test_completing_leaves_the_configuration_as_written_alone() -> None:
    written = ModelConfig()

    complete(written, "m", {"model.py"})

    assert written == ModelConfig()


@pytest.mark.parametrize(
    ("file", "backend", "platform"),
    [
        ("model.savedmodel", "tensorflow", "tensorflow_savedmodel"),
        ("model.graphdef", "tensorflow", "tensorflow_graphdef"),
        ("model.plan", "tensorrt", "tensorrt_plan"),
        ("model.onnx", "onnxruntime", "onnxruntime_onnx"),
        ("model.xml", "openvino", ""),
        ("model.pt", "pytorch", "pytorch_libtorch"),
        ("model.pt2", "pytorch", "torch_aoti"),
    ],
)
def test_backend_is_derived_from_the_model_file(file: str, backend: str, platform: str) -> None:
    config = completed("", file)

    assert (config.backend, config.platform, config.default_model_filename) == (backend, platform, file)


@pytest.mark.parametrize(
    ("text", "files", "backend", "platform", "filename"),
    [
        ("", ("model.py", "model.onnx"), "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ('backend: "python"', ("model.onnx",), "python", "", "model.py"),
        ('backend: "python" default_model_filename: "o.py"', ("o.py",), "python", "", "o.py"),
        ('backend: "onnxruntime"', ("x",), "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ('backend: "tensorflow"', ("model.graphdef",), "tensorflow", "tensorflow_graphdef", "model.graphdef"),
        ('platform: "pytorch_libtorch"', ("model.py",), "pytorch", "pytorch_libtorch", "model.pt"),
        ('platform: "onnxruntime_onnx" backend: "python"', (), "python", "onnxruntime_onnx", "model.py"),
        ('default_model_filename: "model.onnx"', ("model.py",), "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ('default_model_filename: "other.py"', ("other.py",), "", "", "other.py"),
        ('platform: "foo"', ("model.py",), "", "foo", ""),
        ('backend: "huggingface"', ("config.json",), "huggingface", "", ""),
    ],
)
def test_what_the_configuration_says_goes_before_the_files(
    text: str, files: tuple[str, ...], backend: str, platform: str, filename: str
) -> None:
    config = completed(text, *files)

    assert (config.backend, config.platform, config.default_model_filename) == (backend, platform, filename)


@pytest.mark.parametrize(
    ("text", "files", "backend"),
    [
        ("", ("config.json", "model.safetensors"), "huggingface"),
        ("", ("modules.json", "model.safetensors"), "huggingface"),
        ("", ("model.json",), "huggingface"),
        ("", ("conch.json", "config.json", "model.onnx", "model.py"), "huggingface"),
        ("", ("model.py", "model.json"), "python"),
        ("", ("model.onnx", "model.py", "config.json"), "onnxruntime"),
        ("", ("model.onnx", "config.json"), "onnxruntime"),
        ('platform: "onnxruntime_onnx"', ("conch.json",), "onnxruntime"),
        ('default_model_filename: "model.onnx"', ("conch.json",), "onnxruntime"),
        ('default_model_filename: "other.bin"', ("config.json",), ""),
        ('backend: "python"', ("conch.json", "model.py"), "python"),
    ],
)
def test_checkpoint_is_recognised_after_the_files_of_triton_and_a_converted_one_before(
    text: str, files: tuple[str, ...], backend: str
) -> None:
    assert completed(text, *files).backend == backend


def test_checkpoint_has_no_single_model_file() -> None:
    config = completed("", "config.json", "model.safetensors")

    assert (config.platform, config.default_model_filename) == ("", "")


def test_backend_is_derived_from_the_name_if_nothing_else_determines_it() -> None:
    config = completed("", "weights.bin", name="m.foo")

    assert (config.backend, config.default_model_filename) == ("foo", "model.foo")


def test_model_of_no_known_kind_is_refused() -> None:
    with pytest.raises(
        Problem, match=r"Could not determine backend for model 'm' with no backend in model configuration"
    ):
        completed("", "weights.bin")


def test_ensemble_gets_neither_backend_nor_instances_nor_optimization() -> None:
    config = completed('platform: "ensemble" ensemble_scheduling { step { model_name: "x" } }', "model.py")

    assert (config.backend, config.default_model_filename, len(config.instance_group)) == ("", "", 0)
    assert not config.HasField("optimization")


def test_batches_are_preferred_full_where_no_size_is_preferred() -> None:
    assert list(completed("max_batch_size: 8 dynamic_batching {}").dynamic_batching.preferred_batch_size) == [8]
    oldest = completed("max_batch_size: 8 sequence_batching { oldest {} }").sequence_batching.oldest
    assert list(oldest.preferred_batch_size) == [8]


def test_preferred_sizes_stay_as_written_and_absent_without_batching() -> None:
    written = completed("max_batch_size: 8 dynamic_batching { preferred_batch_size: [2, 4] }")
    assert list(written.dynamic_batching.preferred_batch_size) == [2, 4]
    assert list(completed("dynamic_batching {}").dynamic_batching.preferred_batch_size) == []


def test_sequences_idle_for_a_second_by_default() -> None:
    assert completed("sequence_batching {}").sequence_batching.max_sequence_idle_microseconds == 1_000_000
    text = "sequence_batching { max_sequence_idle_microseconds: 5 }"
    assert completed(text).sequence_batching.max_sequence_idle_microseconds == 5


def test_pinned_memory_is_on_unless_the_configuration_speaks() -> None:
    shown = as_json(completed("optimization { input_pinned_memory { enable: false } }"))["optimization"]

    assert (shown["input_pinned_memory"], shown["output_pinned_memory"]) == ({"enable": False}, {"enable": True})


def groups(config: ModelConfig) -> list[tuple[str, str, int, list[int]]]:
    return [(g.name, InstanceGroup.Kind.Name(g.kind), g.count, list(g.gpus)) for g in config.instance_group]


def test_backend_decides_about_instances_where_the_configuration_does_not() -> None:
    assert groups(completed("", "model.py", gpus=(0, 1))) == [("m", "KIND_CPU", 1, [])]
    assert groups(completed("", "model.xml", gpus=(0, 1))) == [("m", "KIND_CPU", 1, [])]
    assert groups(completed("", "model.pt", gpus=(0, 1))) == [("m", "KIND_GPU", 1, [0, 1])]
    assert groups(completed("", "model.pt")) == [("m", "KIND_CPU", 1, [])]


def test_groups_get_names_kinds_and_counts() -> None:
    text = 'instance_group [{ count: 2 kind: KIND_CPU }, { name: "x" count: -1 }, { kind: KIND_MODEL }]'

    assert groups(completed(text)) == [
        ("m_0", "KIND_CPU", 2, []), ("x", "KIND_CPU", 1, []), ("m_2", "KIND_MODEL", 1, []),
    ]  # fmt: skip


def test_onnxruntime_on_the_cpu_has_two_instances() -> None:
    assert groups(completed("", "model.onnx")) == [("m", "KIND_CPU", 2, [])]
    assert groups(completed("", "model.onnx", gpus=(0,))) == [("m", "KIND_GPU", 1, [0])]
    assert groups(completed("instance_group { count: 1 }", "model.onnx")) == [("m_0", "KIND_CPU", 1, [])]


def test_automatic_kind_falls_back_to_the_cpu_when_a_device_is_missing() -> None:
    text = "instance_group [{ gpus: [0] }, { gpus: [0, 7] }, { kind: KIND_GPU }]"

    assert [group[1:] for group in groups(completed(text, gpus=(0, 1)))] == [
        ("KIND_GPU", 1, [0]), ("KIND_CPU", 1, [0, 7]), ("KIND_GPU", 1, [0, 1]),
    ]  # fmt: skip


def test_backend_completion_is_taken_over_and_normalised() -> None:
    config = completed()
    reply = parse(
        'max_batch_size: 6 dynamic_batching {} model_transaction_policy { decoupled: true } name: "ignored"'
        'input { name: "I" data_type: TYPE_FP32 dims: 2 } output { name: "O" data_type: TYPE_FP32 dims: 2 }',
        "reply",
    )

    merge_completion(config, reply)

    assert (config.name, config.max_batch_size) == ("m", 6)
    assert list(config.dynamic_batching.preferred_batch_size) == [6]
    assert [tensor.name for tensor in (*config.input, *config.output)] == ["I", "O"]
    assert config.model_transaction_policy.decoupled


def test_parameters_are_completed_but_never_changed() -> None:
    config = completed('parameters { key: "task" value { string_value: "mine" } }')
    reply = parse(
        'parameters { key: "task" value { string_value: "theirs" } }'
        'parameters { key: "engine" value { string_value: "vllm" } }',
        "reply",
    )

    merge_completion(config, reply)

    assert {name: value.string_value for name, value in config.parameters.items()} == {"task": "mine", "engine": "vllm"}


@pytest.mark.parametrize(
    ("text", "files", "backend"),
    [
        ("", ("SmolLM2.Q4_1.gguf",), "huggingface"),
        ("", ("model.onnx", "weights.gguf"), "onnxruntime"),
        ('backend: "vllm"', ("model.json",), "vllm"),
        ('backend: "vllm"', ("model.json", "weights.gguf"), "vllm"),
    ],
)
def test_gguf_file_is_a_checkpoint_where_there_is_no_other_model(
    text: str, files: tuple[str, ...], backend: str
) -> None:
    assert completed(text, *files).backend == backend


def test_backend_cannot_choose_another_scheduler() -> None:
    config = completed("sequence_batching {}")

    with pytest.raises(ConchError, match="from sequence_batching to dynamic_batching when auto-completing"):
        merge_completion(config, parse("dynamic_batching {}", "reply"))


def test_ensemble_is_decoupled_when_a_member_is() -> None:
    plain, decoupled = ModelConfig(), parse("model_transaction_policy { decoupled: true }", "d")
    ensemble = ModelConfig()

    complete_ensemble(ensemble, [plain, plain])
    assert as_json(ensemble)["model_transaction_policy"] == {"decoupled": False}
    complete_ensemble(ensemble, [plain, decoupled])
    assert as_json(ensemble)["model_transaction_policy"] == {"decoupled": True}


def test_normalising_twice_changes_nothing() -> None:
    once = completed("max_batch_size: 8 dynamic_batching {}")
    twice = completed("max_batch_size: 8 dynamic_batching {}")
    normalise(twice)

    assert once == twice


@pytest.mark.parametrize(("file", "left"), [("model.py", ["conch.engine"]), ("model.onnx", [])])
def test_what_a_model_runs_with_is_no_parameter_except_where_it_is_the_models_own(file: str, left: list[str]) -> None:
    given = 'parameters { key: "conch.engine" value { string_value: "x" } }'
    assert list(completed(given, file).parameters) == left


@pytest.mark.parametrize(
    ("program", "backend"), [("model.py", "python"), ("model.pt", "pytorch"), ("model.pt2", "pytorch")]
)
@pytest.mark.parametrize("file", ["config.json", "modules.json", "weights.gguf"])
def test_program_beside_a_checkpoint_is_not_run_unasked(file: str, program: str, backend: str) -> None:
    with pytest.raises(Problem) as refused:
        completed("", program, file)
    assert refused.value.message == (
        f"model 'm' has both {program} and {file}, which belongs to a checkpoint that may include {program}: "
        "set 'backend' in config.pbtxt, "
        f'to "{backend}" to run {program}, or to "huggingface" to serve the checkpoint'
    )


@pytest.mark.parametrize("backend", ["python", "huggingface"])
def test_backend_that_is_written_is_that_of_a_checkpoint_with_model_py(backend: str) -> None:
    assert completed(f'backend: "{backend}"', "model.py", "config.json").backend == backend
