"""Reading config.pbtxt, and finding a field's line in it."""

from __future__ import annotations

import pytest

from conch.config.pbtxt import locate, parse
from conch.config.reading import ConfigError
from conch.core.errors import Code

TEXT = """\
name: "m"  # a comment with name: "other" { and [
input [
  { name: "A"
    dims: [ -1, 4,
            5 ] },
  { name: "B"
    dims: 3 dims: -1 }
]
output { name: 'with { brace'
         "continued" label_filename: "l" }
output <
  name: "C" >
"""


def test_text_format_is_read_with_lists_comments_and_concatenation() -> None:
    config = parse('input [{ name: "A" "B", dims: [1, -1]; data_type: TYPE_FP32 }] # end', "config.pbtxt")

    assert config.input[0].name == "AB"
    assert list(config.input[0].dims) == [1, -1]


def refusal(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(text, "/r/m/config.pbtxt")
    return caught.value


def test_unreadable_text_is_refused_with_file_line_and_column() -> None:
    error = refusal('name: "m"\ninput { name "A" }')

    assert error.message.startswith("failed to read text proto from /r/m/config.pbtxt: 2:14: ")
    assert 'Expected ":"' in error.message
    assert (error.code, error.path, error.line, error.column) == (Code.INTERNAL, "/r/m/config.pbtxt", 2, 14)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("max_batchsize: 4", "did you mean 'max_batch_size'?"),
        ('input { nam: "A" }', "did you mean 'name'?"),
        ("input { data_type: TYPE_FP31 }", "did you mean 'TYPE_FP32'?"),
        ("dynamic_batching { delay: 1 preferred_batch_sizes: 4 }", "the valid names are "),
        ("instance_group { kind: KIND_GPUS }", "did you mean 'KIND_GPU'?"),
        ("instance_group { kind: GPU }", "did you mean 'KIND_GPU'?"),
        ("instance_group { kind: KIND_CUDA }", "did you mean 'KIND_GPU'?"),
        ("input { data_type: TYPE_BYTES }", "did you mean 'TYPE_STRING'?"),
        ("input { data_type: BYTES }", "did you mean 'TYPE_STRING'?"),
        ("input { data_type: FP32 }", "did you mean 'TYPE_FP32'?"),
        ("input { data_type: TYPE_FLOAT64 }", "did you mean 'TYPE_FP64'?"),
        ("output { shape: [ 1 ] }", "did you mean 'dims'?"),
    ],
)
def test_misspelt_name_is_answered_with_the_nearest_one(text: str, hint: str) -> None:
    assert refusal(text).hint.startswith(hint)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('input { data_type: "TYPE_STRING" }', "write TYPE_STRING, without quotation marks"),
        ('max_batch_size: "8"', "write 8, without quotation marks"),
        ("max_batch_size = 8", "write ':' in place of '='"),
        ("backend: python", 'write "python", in quotation marks'),
        ('backend: "python', "close the quotation mark on the same line"),
        ('parameters { key: "task" value: "ner" }', 'write { string_value: "ner" }'),
        (
            'parameters: { "task": "ner" }',
            "this is not JSON: write name: value, without quotation marks around the name",
        ),
        ('{ "name": "m" }', "this is not JSON: write name: value, without quotation marks around the name"),
        ("dynamic_batching: true", "write { }"),
        ("input [ { dims: 1 } { dims: 2 } ]", "write ',' between the elements of a list"),
        ("input [ { dims: 1 }, ]", "leave out the ',' after the last element of the list"),
        ('max_batch_size: 8\ninput {\n  name: "A {" # {\n\n', "close the bracket of line 2"),
        ('\ninput {\n  name: "A {" # {\noutput { name: "B" }\n', "close the bracket of line 2 first"),
        ('input [\n  { name: "A"\n  , { name: "B" }\n]\n', "close the bracket of line 2 first"),
    ],
)
def test_what_cannot_be_read_is_answered_with_what_to_write(text: str, hint: str) -> None:
    assert refusal(text).hint == hint


@pytest.mark.parametrize(
    ("text", "place", "names"),
    [
        ('name: "a"\nmax_batch_size: ${size}', "2:17", "${size} of the template still needs a value"),
        ("model_transaction_policy { decoupled: ${mode} }", "1:39", "${mode} of"),
        ("input { data_type: ${type} }", "1:20", "${type} of"),
        ("dynamic_batching { preferred_batch_size: [ ${a} ] }", "1:44", "${a} of"),
        (
            'max_batch_size: ${a} # ${b}\nbackend: "${c}"\ninstance_group { count: ${d} count: ${a} kind: ${e} }',
            "1:17",
            "${a} of the template still needs a value, and so do ${d}, ${e}",
        ),
    ],
)
def test_placeholder_of_a_template_is_named_where_it_cannot_stay(text: str, place: str, names: str) -> None:
    assert refusal(text).message.startswith(f"failed to read text proto from /r/m/config.pbtxt: {place}: {names}")


def test_placeholder_in_a_string_is_a_string() -> None:
    assert parse('default_model_filename: "${name}"', "config.pbtxt").default_model_filename == "${name}"


@pytest.mark.parametrize(
    "text", ['name: "a" name: "b"', "input {", 'name: "x\n', "max_batch_size: 99999999999", "}", "\0"]
)
def test_broken_text_never_escapes_as_another_exception(text: str) -> None:
    assert refusal(text).message.startswith("failed to read text proto from /r/m/config.pbtxt: ")


@pytest.mark.parametrize(
    "text",
    ["instance_group { kind: 77 }", "dynamic_batching { priority_queue_policy { value { timeout_action: 9 } } }"],
)
def test_number_that_no_enum_value_has_is_refused(text: str) -> None:
    assert "unknown value of" in refusal(text).message


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("name",), 1),
        (("input", 0), 3),
        (("input", 0, "dims", 0), 4),
        (("input", 0, "dims", 2), 5),
        (("input", 1, "dims"), 7),
        (("input", 1, "dims", 1), 7),
        (("output", 0, "label_filename"), 10),
        (("output", 1, "name"), 12),
    ],
)
def test_field_is_found_in_every_way_of_writing_it(path: tuple[str | int, ...], line: int) -> None:
    assert locate(TEXT, path) == line


def test_field_that_is_not_written_is_placed_at_its_parent() -> None:
    assert locate(TEXT, ("input", 1, "data_type")) == 6
    assert locate(TEXT, ("input", 7)) == 1
    assert locate(TEXT, ("instance_group",)) == 1
    assert locate("", ("name",)) == 1


@pytest.mark.parametrize(
    "text",
    ["input { data_type: 18446744073709551616 }", "input { dims: 9999999999999999999999 }", "max_batch_size: 1e400"],
)
def test_number_that_no_field_takes_is_refused(text: str) -> None:
    assert refusal(text).message.startswith("failed to read text proto from /r/m/config.pbtxt: ")


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("max_batch_size: four", "1:17: Expected integer, got: four"),
        ('max_batch_size: "4"', '1:17: Expected integer, got: "4"'),
        ("max_batch_size: 1.5", "1:17: Expected integer, got: 1.5"),
        ("max_batch_size: 12345678901", "1:17: Integer out of range (12345678901)"),
        ("dynamic_batching { priority_levels: -5 }", "1:37: Expected integer, got: -"),
        ("ensemble_scheduling { max_inflight_requests: -5 }", "1:46: Expected integer, got: -"),
        ("ensemble_scheduling { max_inflight_requests: 12345678901 }", "1:46: Integer out of range (12345678901)"),
    ],
)
def test_number_is_refused_in_the_words_that_triton_logs(field: str, told: str) -> None:
    assert refusal(field).message == f"failed to read text proto from /r/m/config.pbtxt: {told}"
