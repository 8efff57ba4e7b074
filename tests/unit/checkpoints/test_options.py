"""Parameters of a configuration as typed options."""

from __future__ import annotations

from typing import Any

import pytest

from conch.checkpoints.options import Options
from conch.core.errors import Code, ConchError


def parameters(**values: str) -> dict[str, Any]:
    return {"parameters": {name: {"string_value": value} for name, value in values.items()}}


def test_configuration_without_parameters_leaves_everything_to_the_checkpoint() -> None:
    assert Options.from_config({}) == Options.from_config({"parameters": {}}) == Options()


def test_parameters_become_typed() -> None:
    options = Options.from_config(
        parameters(
            task="rerank",
            engine="ONNXRuntime",
            max_length="128",
            normalize="false",
            trust_remote_code="True",
            threads="2",
        )
    )

    assert options == Options(
        task="rerank", engine="onnxruntime", max_length=128, normalize=False, trust_remote_code=True, threads=2
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "engine",
            "onnx",
            "parameter 'engine' is 'onnx'; it must be one of auto, torch, onnxruntime, openvino, llamacpp, "
            "transformers, vllm",
        ),
        ("dtype", "int8", "parameter 'dtype' is 'int8'; it must be one of auto, float32, bfloat16, float16"),
        ("truncation", "yes", "parameter 'truncation' is 'yes'; it must be one of auto, truncate, refuse"),
        ("pooling", "sum", "parameter 'pooling' is 'sum'; it must be one of mean, cls, max, last"),
        ("max_length", "-1", "parameter 'max_length' is '-1'; it must be a whole number that is not negative"),
        ("max_length", "1e3", "parameter 'max_length' is '1e3'; it must be a whole number that is not negative"),
        ("normalize", "maybe", "parameter 'normalize' is 'maybe'; it must be true or false"),
    ],
)
def test_wrong_value_is_refused_by_the_parameter_s_name(name: str, value: str, message: str) -> None:
    with pytest.raises(ConchError) as refused:
        Options.from_config(parameters(**{name: value}))

    assert (refused.value.message, refused.value.code) == (message, Code.INVALID_ARG)


def test_value_that_is_neither_text_nor_number_is_refused() -> None:
    with pytest.raises(ConchError, match="parameter 'task' must be a text, a number or a truth value, not list"):
        Options.from_values({"task": ["a"]})


def test_json_in_a_file_is_the_text_that_a_configuration_gives() -> None:
    written = Options.from_values({"lora_modules": {"pirate": "adapters/pirate"}})
    assert written.text("lora_modules") == '{"pirate": "adapters/pirate"}'


@pytest.mark.parametrize("name", ["", "red\0", "a\u2028b", "n" * 256])
def test_adapter_with_a_name_that_cannot_be_printed_is_refused(name: str) -> None:
    options = Options.from_values({"lora_modules": {"ok/ä 1": "a", name: "b"}})
    with pytest.raises(ConchError, match="must have 1 to 255 printable characters") as refused:
        _ = options.adapters
    assert refused.value.param == "lora_modules" and refused.value.message.isprintable()


def test_values_of_a_file_may_have_the_types_of_json() -> None:
    options = Options.from_values({"max_length": 64, "normalize": True, "trust_remote_code": None})

    assert options == Options(max_length=64, normalize=True)


def test_configuration_goes_before_the_model_s_file() -> None:
    options = Options.from_config(parameters(task="fill-mask", engine="auto", chunk="5")).over(
        {"model": "org/name", "task": "ner", "engine": "torch", "chunk": 7, "stride": 2}
    )

    assert (options.model, options.task, options.engine) == ("org/name", "fill-mask", "auto")
    assert options.extra == {"chunk": "5", "stride": "2"}


def test_laying_the_same_file_under_twice_changes_nothing() -> None:
    options = Options.from_config(parameters(engine="auto"))
    document = {"model": "org/name", "engine": "torch"}

    assert options.over(document).over(document) == options.over(document)


def test_undeclared_parameters_are_kept_for_the_task() -> None:
    options = Options.from_config(parameters(chunk_length="30", stride="2.5", timestamps="true"))

    assert options.integer("chunk_length") == 30
    assert options.number("stride") == 2.5
    assert options.flag("timestamps")
    assert (options.integer("other", 3), options.text("other", "x")) == (3, "x")


@pytest.mark.parametrize("value", ["nan", "inf", "long"])
def test_undeclared_parameter_that_is_no_number_is_refused_when_read(value: str) -> None:
    with pytest.raises(ConchError, match=f"parameter 'stride' is '{value}'; it must be a number"):
        Options(extra={"stride": value}).number("stride")


def test_the_longest_text_follows_from_the_tokens_that_a_model_takes_unless_it_is_given() -> None:
    assert Options().text_limit(512) == 1 << 20
    assert Options().text_limit(131_072) == 4 << 20
    assert Options(max_text_bytes=100).text_limit(131_072) == 100
