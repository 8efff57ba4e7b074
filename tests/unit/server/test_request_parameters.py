"""Which parameters requests may have, by the backend of their model."""

from __future__ import annotations

import pytest

from conch.config.pbtxt import parse
from conch.core.errors import Code, ConchError
from conch.core.inference import ModelSignature, ParameterCheck
from conch.server.model import Model
from conch.telemetry.statistics import ModelStatistics
from tests.refusals import refused_argument
from tests.unit.server.test_model import FakeExecutor

INPUTS = """
    input [{ name: "text_input" data_type: TYPE_STRING dims: [1] },
           { name: "text_pair" data_type: TYPE_STRING dims: [1] optional: true },
           { name: "top_k" data_type: TYPE_INT32 dims: [1] optional: true }]
"""
GENERATES = 'parameters { key: "task" value { string_value: "text-generation" } }'


def signature_of(backend: str, more: str = "", batch: int = 0) -> ModelSignature:
    config = parse(f'name: "m" backend: "{backend}" max_batch_size: {batch} {INPUTS} {more}', "c")
    return Model(config, 1, FakeExecutor(), ModelStatistics("m", 1), {}).signature


def check_of(backend: str, more: str = "") -> ParameterCheck | None:
    return signature_of(backend, more).check_parameters


def refusal(backend: str, name: str, more: str = "") -> str:
    check = check_of(backend, more)
    assert check is not None
    return refused_argument(check, [name])


@pytest.mark.parametrize("backend", ["python", "", "nothing-known"])
def test_requests_of_other_backends_may_have_any_parameters(backend: str) -> None:
    assert check_of(backend) is None


def test_misspelt_input_is_refused_with_the_right_name() -> None:
    assert refusal("huggingface", "tpo_k") == "parameter 'tpo_k' is not known to model 'm'; did you mean 'top_k'?"
    assert "did you mean 'text_input'?" in refusal("huggingface", "text")  # optional inputs are more similar


def test_unknown_name_is_refused_with_all_that_exist() -> None:
    assert refusal("huggingface", "zzz") == (
        "parameter 'zzz' is not known to model 'm'; its requests have add_special_tokens, max_length, max_pair_tokens, "
        "prompt, skip_special_tokens, text_input, text_pair, top_k, truncation"
    )


def test_input_that_is_given_as_a_parameter_is_refused() -> None:
    assert refusal("huggingface", "top_k") == "'top_k' is an input of model 'm', not a parameter: send it as a tensor"


@pytest.mark.parametrize(("backend", "more"), [("huggingface", GENERATES), ("vllm", "")])
def test_sampling_parameters_are_known_where_text_is_generated(backend: str, more: str) -> None:
    check = check_of(backend, more)
    assert check is not None
    check(["temperature", "max_new_tokens", "top_k", "stream", "prompt_logprobs", "id"])
    assert "did you mean 'temperature'?" in refusal(backend, "temprature", more)


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "tensorrtllm"])
def test_backends_that_triton_has_take_other_parameters_unless_they_look_misspelt(backend: str) -> None:
    check = check_of(backend)
    assert check is not None
    check(["trace_id", "top_k", "user"])
    assert "did you mean 'text_input'?" in refusal(backend, "text_inptu")


@pytest.mark.parametrize(
    ("backend", "batch", "more", "by_row"),
    [
        ("huggingface", 8, "", True),
        ("huggingface", 0, GENERATES, True),
        ("vllm", 0, "", True),
        ("onnxruntime", 8, "", False),
        ("python", 8, "", False),
    ],
)
def test_checkpoints_answer_each_text_of_several(backend: str, batch: int, more: str, by_row: bool) -> None:
    assert signature_of(backend, more, batch).by_row is by_row


@pytest.mark.parametrize("name", ["id", "content_type", "headers", "binary_data_output"])
def test_what_clients_of_the_protocol_send_to_any_server_is_accepted(name: str) -> None:
    check = check_of("huggingface")
    assert check is not None
    check([name])


def test_a_name_is_compared_with_those_that_are_known_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def did_you_mean(name: str, known: object, *, likeness: float) -> str:
        compared.append(name)
        return ""

    monkeypatch.setattr("conch.server.model.did_you_mean", did_you_mean)
    check = check_of("onnxruntime")
    assert check is not None
    for _ in range(3):
        check(["tag"])
    assert compared == ["tag"]


def test_a_request_with_very_many_unknown_parameters_is_refused() -> None:
    check = check_of("onnxruntime")
    assert check is not None
    check([f"tag-{index}" for index in range(64)])
    with pytest.raises(ConchError) as caught:
        check([f"tag-{index}" for index in range(65)])
    assert caught.value.code is Code.INVALID_ARG
    assert "more than 64 parameters" in caught.value.message
