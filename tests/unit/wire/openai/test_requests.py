"""Bodies of requests: what is read from them, and that nothing else than an error with a sentence comes of bad ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.inference import ModelSignature, TensorSpec
from conch.core.tensors import split_bytes
from conch.wire.openai.chat import read_chat
from conch.wire.openai.completions import read_completion
from conch.wire.openai.inputs import generation_inputs, text_tensor
from conch.wire.openai.reading import ApiError, Fields, read_body
from conch.wire.openai.sampling import read_sampling
from conch.wire.openai.tool_calls import read_tools


def sampling(**members: Any) -> dict[str, Any]:
    fields = Fields(members)
    read, _ = read_sampling(fields)
    fields.finish()
    return read


def refusal(read: Any, **members: Any) -> ApiError:
    fields = Fields(members)
    with pytest.raises(ApiError) as caught:
        read(fields)
        fields.finish()
    return caught.value


def test_only_what_is_given_is_passed_on() -> None:
    assert sampling() == {}
    assert sampling(temperature=None, stop=None) == {}
    assert sampling(temperature=0, seed=-1, max_tokens=3.0) == {"temperature": 0, "seed": 2**64 - 1, "max_tokens": 3}


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("", {}),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        ('{"a":', '{"a":'),
        ("[" * 300 + "]" * 300, "[" * 300 + "]" * 300),
    ],
    ids=["none", "large_number", "cut", "nested"],
)
def test_arguments_of_earlier_calls_are_read(arguments: str, read: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [message] = json.loads(read_chat(Fields({"messages": [{"role": "assistant", "tool_calls": [call]}]})).messages)
    assert message["tool_calls"][0]["function"]["arguments"] == read


def test_newer_name_of_max_tokens_goes_first() -> None:
    assert sampling(max_tokens=5, max_completion_tokens=7) == {"max_tokens": 7}


@pytest.mark.parametrize(
    ("members", "structure"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json": {"type": "object", "additionalProperties": True}}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}}, {"json": {"a": 1}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": "x"}}, {"grammar": "x"}),
    ],
)
def test_structured_output_under_all_its_names(members: dict[str, Any], structure: Any) -> None:
    assert sampling(**members).get("structured_outputs") == structure


def test_two_structures_contradict_each_other() -> None:
    assert "only one" in refusal(read_sampling, guided_regex="a", response_format={"type": "json_object"}).message


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[1]", b'"a"', b'{"a": NaN}', b"\xff", b"[" * 5000])
def test_body_must_be_an_object(body: bytes) -> None:
    with pytest.raises(ApiError):
        read_body(body)


def test_unknown_member_is_refused_with_the_nearest_one() -> None:
    error = refusal(read_sampling, temprature=0)
    assert (error.param, error.reason) == ("temprature", "unknown_parameter")
    assert error.message == "'temprature' is not known here; did you mean 'temperature'?"
    assert refusal(read_sampling, zzz=0).message == "'zzz' is not known here"
    long = refusal(read_sampling, **{"z" * 1_000_000: 0})
    assert len(long.message) + len(long.param or "") < 40_000


def test_number_beyond_any_integer_is_shown_as_it_was_given() -> None:
    assert "'max_tokens' is 1.8446744073709552e+19; it must be" in refusal(read_sampling, max_tokens=2.0**64).message


def test_error_shows_the_value_in_short() -> None:
    error = refusal(lambda fields: fields.text("user"), user=["a" * 1000])
    assert error.param == "user"
    assert len(error.message) < 120


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=5,
)
MEMBERS = (
    "messages", "prompt", "input", "n", "max_tokens", "temperature", "top_p", "stop", "seed", "logprobs", "echo",
    "top_logprobs", "logit_bias", "response_format", "tools", "tool_choice", "stream", "stream_options", "suffix",
    "encoding_format", "dimensions", "best_of", "parallel_tool_calls", "modalities", "chat_template_kwargs",
)  # fmt: skip


@pytest.mark.parametrize("read", [read_chat, read_completion])
@given(members=st.dictionaries(st.sampled_from(MEMBERS), JSON, max_size=4))
def test_any_members_are_read_or_refused(read: Any, members: dict[str, Any]) -> None:
    good = {"messages": [{"role": "user", "content": "a"}], "prompt": "a"}
    kept = {"read_chat": "messages", "read_completion": "prompt"}[read.__name__]
    try:
        read(Fields({kept: good[kept], **members}))
    except ApiError as error:
        assert error.message


@given(messages=st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), JSON), min_size=1))
def test_any_messages_are_read_or_refused(messages: list[Any]) -> None:
    for message in messages:
        message.setdefault("role", "assistant")
    try:
        assert json.loads(read_chat(Fields({"messages": messages})).messages)
    except ApiError as error:
        assert error.param and error.param.startswith("messages[")


def _called(**schemas: Any) -> Any:
    """Return the schema of the calls of a chat that requires a call to tools with these parameters."""
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in schemas.items()]
    messages = [{"role": "user", "content": "a"}]
    chat = read_chat(Fields({"messages": messages, "tools": tools, "tool_choice": "required"}))
    return chat.sampling["structured_outputs"]["json"]


def _arguments(schema: dict[str, Any]) -> Any:
    """Return the schema of the arguments of a tool in a list of calls."""
    return _called(f=schema, g={})["$defs"]["f"]


def test_references_of_a_tool_stay_in_its_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "from": {"type": "string"},
            "to": {"$ref": "#/properties/from"},
            "more": {"type": "array", "items": {"$ref": "#"}},
            "$ref": {"const": {"$ref": "#/no-reference"}},
        },
    }  # fmt: skip
    calls = _called(**{"f": schema, "a/b%": {"$ref": "#/definitions/A", "definitions": {"A": {"type": "object"}}}})
    assert [call["properties"]["parameters"] for call in calls["items"]["anyOf"]] == [
        {"$ref": "#/$defs/f"}, {"$ref": "#/$defs/a~1b%25"}
    ]  # fmt: skip
    assert calls["$defs"] == {
        "f": {
            "type": "object",
            "properties": {
                **schema["properties"],
                "to": {"$ref": "#/$defs/f/properties/from"},
                "more": {"type": "array", "items": {"$ref": "#/$defs/f"}},
            },
        },
        "a/b%": {"$ref": "#/$defs/a~1b%25/definitions/A", "definitions": {"A": {"type": "object"}}},
    }


def test_tools_may_define_the_same_name_differently() -> None:
    kinds = ("string", "integer")
    schemas = [{"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": kind}}} for kind in kinds]
    definitions = _called(f=schemas[0], g=schemas[1])["$defs"]
    assert [definitions[name]["$defs"]["A"]["type"] for name in "fg"] == list(kinds)
    assert [definitions[name]["properties"]["a"]["$ref"] for name in "fg"] == ["#/$defs/f/$defs/A", "#/$defs/g/$defs/A"]


def test_references_to_anchors_and_to_the_identifier_of_a_tool() -> None:
    arguments = _arguments(
        {
            "$id": "http://example.com/s#",
            "properties": {"a": {"$ref": "#x"}, "b": {"$ref": "http://example.com/s#/$defs/X"}},
            "additionalProperties": {"$ref": "http://example.com/other"},
            "$defs": {"X": {"$anchor": "x"}},
        }
    )
    assert arguments["properties"] == {key: {"$ref": "#/$defs/f/$defs/X"} for key in "ab"}
    assert arguments["additionalProperties"] == {"$ref": "http://example.com/other"}
    assert "$id" not in arguments


def test_references_of_earlier_drafts_hide_the_keywords_beside_them() -> None:
    schema = {"properties": {"a": {"$ref": "#/definitions/A", "maximum": 0}}, "definitions": {"A": {}}}
    assert _arguments(schema)["properties"]["a"] == {"$ref": "#/$defs/f/definitions/A", "maximum": 0}
    old = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    assert _arguments(old)["properties"]["a"] == {"$ref": "#/$defs/f/definitions/A"}


# Inputs.


def signature(*specs: TensorSpec, batch: int = 0, decoupled: bool = False) -> ModelSignature:
    return ModelSignature("m", 1, batch, {spec.name: spec for spec in specs}, {}, decoupled)


TEXT = TensorSpec("text_input", "BYTES", (1,))


def test_json_of_sampling_goes_where_a_model_takes_it() -> None:
    model = signature(TEXT, TensorSpec("sampling_parameters", "BYTES", (1,)), TensorSpec("stream", "BOOL", (1,)))
    inputs = generation_inputs(model, {"text_input": b"hi"}, {"n": 2}, stream=True)
    assert split_bytes(inputs["sampling_parameters"].data) == [b'{"n":2}']
    assert inputs["sampling_parameters"].shape == (1,)
    # Not decoupled: the model could not send pieces.
    assert inputs["stream"].data == b"\0"


def test_values_go_into_tensors_of_their_own() -> None:
    specs = (
        TEXT,
        TensorSpec("max_tokens", "UINT32", (-1,)),
        TensorSpec("stop_words", "BYTES", (-1, -1)),
        TensorSpec("bad_words", "BYTES", (-1,)),
        TensorSpec("sampling_param_top_p", "FP32", (1,), optional=True),
        TensorSpec("guided_decoding_guide_type", "BYTES", (1,), optional=True),
        TensorSpec("guided_decoding_guide", "BYTES", (1,), optional=True),
        TensorSpec("streaming", "BOOL", (1,), optional=True),
    )
    asked = {"stop": ["a", "b"], "top_p": 0.5, "temperature": 1, "structured_outputs": {"json": {}}}
    inputs = generation_inputs(signature(*specs, batch=4, decoupled=True), {"text_input": b"hi"}, asked, stream=True)
    assert {name: tensor.shape for name, tensor in inputs.items()} == {
        "text_input": (1, 1), "max_tokens": (1, 1), "stop_words": (1, 1, 2), "bad_words": (1, 1),
        "sampling_param_top_p": (1, 1), "guided_decoding_guide_type": (1, 1), "guided_decoding_guide": (1, 1),
        "streaming": (1, 1),
    }  # fmt: skip
    assert inputs["max_tokens"].data == b"\x10\0\0\0"
    assert split_bytes(inputs["guided_decoding_guide"].data) == [b"{}"]


@pytest.mark.parametrize(
    ("member", "value", "names"),
    [
        ("seed", 7, ("seed", "random_seed")),
        ("min_tokens", 7, ("min_tokens", "min_length")),
        ("top_k", 7, ("top_k", "runtime_top_k")),
        ("length_penalty", 7, ("length_penalty", "len_penalty")),
        ("stop", ["a"], ("stop_words", "stop")),
    ],
)
def test_a_value_goes_into_the_first_input_that_may_take_it(member: str, value: Any, names: tuple[str, str]) -> None:
    datatype = "BYTES" if member == "stop" else "INT32"
    specs = [TensorSpec(name, datatype, (1,), optional=True) for name in reversed(names)]
    both = generation_inputs(signature(TEXT, *specs), {"text_input": b"hi"}, {member: value}, stream=False)
    assert set(both) == {"text_input", names[0]}
    other = generation_inputs(signature(TEXT, specs[0]), {"text_input": b"hi"}, {member: value}, stream=False)
    assert set(other) == {"text_input", names[1]}


@pytest.mark.parametrize(
    "value", [{"top_k": 0}, {"top_k": -1}, {"min_tokens": 0}, {"length_penalty": 1}, {"beam_width": 1}]
)
def test_values_that_change_nothing_need_no_input(value: dict[str, Any]) -> None:
    assert set(generation_inputs(signature(TEXT), {"text_input": b"hi"}, value, stream=False)) == {"text_input"}


def test_top_k_that_is_off_is_off_under_both_of_its_values() -> None:
    model = signature(TEXT, TensorSpec("top_k", "INT32", (1,), optional=True))
    for value, sent in ((-1, 0), (0, 0), (5, 5), (-2, -2)):
        inputs = generation_inputs(model, {"text_input": b"hi"}, {"top_k": value}, stream=False)
        assert int.from_bytes(inputs["top_k"].data, "little", signed=True) == sent


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"n": 2}, "n"),
        ({"top_k": "five"}, "top_k"),
        ({"structured_outputs": {"choice": ["a"]}}, "response_format"),
    ],
)
def test_what_a_model_has_no_input_for_is_refused(asked: dict[str, Any], param: str) -> None:
    model = signature(TEXT, TensorSpec("top_k", "INT32", (1,), optional=True))
    with pytest.raises(ApiError) as caught:
        generation_inputs(model, {"text_input": b"hi"}, asked, stream=False)
    assert caught.value.param == param


def test_texts_are_rows_of_a_batch_or_elements() -> None:
    assert text_tensor(signature(TEXT, batch=8), "text_input", [b"a", b"b"]).shape == (2, 1)
    assert text_tensor(signature(TensorSpec("text_input", "BYTES", (-1,))), "text_input", [b"a", b"b"]).shape == (2,)
    with pytest.raises(ApiError):
        text_tensor(signature(TEXT), "text_input", [b"a", b"b"])


TEMPLATED = ModelSignature(
    "m",
    1,
    0,
    {name: TensorSpec(name, "BYTES", (1,), optional=True) for name in ("messages", "chat_template_kwargs", "tools")},
    {"text_output": TensorSpec("text_output", "BYTES", (-1,))},
)
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("members", "values"),
    [
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}},
            {"reasoning_effort": "low", "enable_thinking": True, "thinking": False},
        ),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}),
    ],
)
def test_members_are_values_of_the_template(members: dict[str, Any], values: dict[str, Any]) -> None:
    (inputs,) = read_chat(Fields({**ASKED, **members})).inputs(TEMPLATED)
    assert json.loads(split_bytes(inputs["chat_template_kwargs"].data)[0]) == values


def test_effort_has_no_effect_without_a_template() -> None:
    untemplated = ModelSignature("m", 1, 0, {"messages": TEMPLATED.inputs["messages"]}, TEMPLATED.outputs)
    (inputs,) = read_chat(Fields({**ASKED, "reasoning_effort": "high"})).inputs(untemplated)
    assert list(inputs) == ["messages"]
    with pytest.raises(ApiError, match="no input for 'chat_template_kwargs'"):
        read_chat(Fields({**ASKED, "add_generation_prompt": False})).inputs(untemplated)
    assert refusal(read_chat, **ASKED, reasoning_effort="some").param == "reasoning_effort"


@pytest.mark.parametrize(("others", "hint"), [(99, "; 'mesages' is not known here"), (100, "")])
def test_missing_member_is_compared_with_the_first_hundred(others: int, hint: str) -> None:
    fields = Fields({**{f"{index}": 1 for index in range(others)}, "mesages": []})
    assert fields.missing("messages").message == f"'messages' is missing{hint}"


def test_schema_whose_references_would_take_much_memory_is_refused() -> None:
    """A schema below long names has references as long as all of them together, and so has a reference to an anchor."""
    deep: Any = {"properties": {str(index): {} for index in range(1000)}}
    for _ in range(20):
        deep = {"k" * 2000: deep}
    anchored: Any = {"k" * 10_000: {"$anchor": "x"}, "oneOf": [{"$ref": "#x"}] * 2000}
    for schema in (deep, anchored):
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        error = refusal(read_tools, tools=tools, tool_choice="required")
        assert (error.param, error.message) == ("tools", "the schemas of 'tools' have names that are too long")
        assert read_tools(Fields({"tools": tools})).mode == "auto"


def test_required_tools_need_no_input() -> None:
    inputs = dict.fromkeys(("messages", "sampling_parameters"), TEMPLATED.inputs["messages"])
    model = ModelSignature("m", 1, 0, inputs, TEMPLATED.outputs)
    tools = [{"type": "function", "function": {"name": "f"}}]
    (tensors,) = read_chat(Fields({**ASKED, "tools": tools, "tool_choice": "required"})).inputs(model)
    assert "tools" not in tensors
    with pytest.raises(ApiError, match="no input for 'tools'"):
        read_chat(Fields({**ASKED, "tools": tools})).inputs(model)


def test_allowed_tokens_have_the_largest_bias() -> None:
    assert sampling(allowed_token_ids=[7, 9])["logit_bias"] == {"7": 100, "9": 100}
    assert refusal(read_sampling, allowed_token_ids=[]).param == "allowed_token_ids"
    assert refusal(read_sampling, allowed_token_ids=[1], logit_bias={"2": 1}).param == "allowed_token_ids"
