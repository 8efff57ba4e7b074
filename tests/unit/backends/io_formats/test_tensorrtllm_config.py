"""What the parameters of a ``tensorrt_llm`` model ask for, filled in or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conch.backends.io_formats.tensorrtllm import Parameters, checkpoint_path
from conch.backends.io_formats.tensorrtllm_tensors import complete_config, unknown_inputs
from conch.core.errors import ConchError


def read(directory: Path, **values: str) -> Parameters:
    return Parameters.of({"parameters": {name: {"string_value": text} for name, text in values.items()}}, directory)


def test_parameters_are_those_of_a_text_model_by_other_names(tmp_path: Path) -> None:
    parameters = read(
        tmp_path, gpt_model_path="/models/falcon", max_tokens_in_paged_kv_cache="2560", enable_kv_cache_reuse="true",
        batch_scheduler_policy="max_utilization", max_beam_width="4", exclude_input_in_output="true",
        kv_cache_free_gpu_mem_fraction="0.5", enable_chunked_context="true", normalize_log_probs="false",
        gpt_model_type="inflight_fused_batching", engine="transformers", max_num_seqs="8",
    )  # fmt: skip
    options = parameters.options
    assert (options.model, options.task, options.engine) == ("/models/falcon", "text-generation", "transformers")
    assert options.integer("kv_cache_tokens") == 2560
    assert options.integer("max_num_seqs") == 8
    assert options.flag("enable_prefix_caching")
    assert options.text("batch_scheduler_policy") == "max_utilization"
    assert (parameters.max_beam_width, parameters.exclude_input, parameters.normalize) == (4, True, False)
    assert parameters.arguments == {"gpu_memory_utilization": 0.5, "enable_chunked_prefill": True}
    assert not parameters.unknown


def test_placeholders_that_were_not_filled_in_are_not_set(tmp_path: Path) -> None:
    names = ("gpt_model_path", "gpt_model_type", "max_beam_width", "batch_scheduler_policy", "decoding_mode",
             "max_tokens_in_paged_kv_cache", "encoder_model_path", "exclude_input_in_output")  # fmt: skip
    parameters = read(tmp_path, **{name: f"${{{name}}}" for name in names}, FORCE_CPU_ONLY_INPUT_TENSORS="no")
    assert parameters == read(tmp_path)
    assert parameters.options.model == ""
    assert not parameters.options.flag("enable_prefix_caching", True)


def test_names_that_mean_nothing_are_reported(tmp_path: Path) -> None:
    assert read(tmp_path, team="nlp", cuda_graph_mode="true", colour="${colour}").unknown == ("team",)


def test_misspelt_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match=r"^parameter 'max_beam_widht' is not known; did you mean 'max_beam_width'\?$"):
        read(tmp_path, max_beam_widht="4")
    assert read(tmp_path, max_beam_widht="${max_beam_width}") == read(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gpt_model_type", "v2", "Invalid gpt_model_type. Must be v1/inflight_batching/inflight_fused_batching."),
        ("batch_scheduler_policy", "fast", "batch_scheduler_policy parameter was not found or is invalid (must be"),
        ("decoding_mode", "medusa", "parameter 'decoding_mode' is 'medusa', which is not supported"),
        ("decoding_mode", "best", "parameter 'decoding_mode' is 'best'; it must be one of auto, top_k"),
        ("encoder_model_path", "/models/t5", "parameter 'encoder_model_path' is set, but models with an encoder"),
        ("max_beam_width", "many", "parameter 'max_beam_width' is 'many'"),
        ("max_tokens_in_paged_kv_cache", "-1", "parameter 'max_tokens_in_paged_kv_cache' is '-1'"),
        ("kv_cache_free_gpu_mem_fraction", "1.5", "parameter 'kv_cache_free_gpu_mem_fraction' is 1.5"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, value: str, message: str) -> None:
    with pytest.raises(ConchError) as caught:
        read(tmp_path, **{name: value})
    assert caught.value.message.startswith(message)


def write(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_checkpoint_below_a_compiled_engine_takes_its_place(tmp_path: Path) -> None:
    version = write(tmp_path / "tensorrt_llm" / "1", builder_config={}, plugin_config={})
    (version / "falcon_float16_tp1_rank0.engine").touch()
    for path in (str(version), "", "."):
        with pytest.raises(ConchError, match="holds a compiled TensorRT-LLM engine, which only TensorRT-LLM runs"):
            checkpoint_path(path, version)
    checkpoint = write(version / "falcon-7b", model_type="falcon")
    assert checkpoint_path(str(version), version) == checkpoint_path("", version) == str(checkpoint)
    assert checkpoint_path("$$TRITON_MODEL_DIRECTORY/1", version) == str(checkpoint)
    write(version / "falcon-40b", model_type="falcon")
    with pytest.raises(ConchError, match="set parameter 'gpt_model_path' to the checkpoint that it was built from"):
        checkpoint_path("", version)


def test_any_other_path_stays_what_it_is(tmp_path: Path) -> None:
    version = write(tmp_path / "tensorrt_llm" / "1", model_type="llama")
    assert [checkpoint_path(path, version) for path in ("", "org/name", "/nowhere")] == ["", "org/name", "/nowhere"]


def test_a_configuration_without_tensors_gets_those_of_the_family() -> None:
    completed = complete_config({"name": "tensorrt_llm", "max_batch_size": 4})
    names = [tensor["name"] for tensor in completed["input"]]
    assert {"input_ids", "request_output_len", "streaming", "stop", "stop_words_list"} <= set(names)
    assert not unknown_inputs(completed)
    assert completed["output"][0] == {"name": "output_ids", "data_type": "TYPE_INT32", "dims": [-1, -1]}


def test_a_configuration_with_tensors_keeps_them() -> None:
    config = {"input": [{"name": "input_ids"}, {"name": "colour"}], "output": [{"name": "output_ids"}]}
    assert complete_config(config) == config
    assert unknown_inputs(config) == ("colour",)
