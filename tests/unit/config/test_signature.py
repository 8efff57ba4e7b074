"""What requests are checked against."""

from __future__ import annotations

from conch.config.pbtxt import parse
from conch.config.schema import datatype, datatype_name, datatype_number
from conch.config.signature import full_shape, parameters, platform, signature
from conch.core.inference import TensorSpec
from conch.core.tensors import CONFIG_NAME


def test_signature_has_the_tensors_without_the_batch_dimension() -> None:
    config = parse(
        """
        name: "m" max_batch_size: 4
        input [{ name: "A" data_type: TYPE_STRING dims: [-1] optional: true allow_ragged_batch: true },
               { name: "S" data_type: TYPE_INT64 dims: [1] reshape { shape: [] } }]
        output { name: "B" data_type: TYPE_FP32 dims: [2, 3] reshape { shape: [6] } }
        model_transaction_policy { decoupled: true }
        """,
        "c",
    )

    of = signature(config, 7)

    assert (of.name, of.version, of.max_batch_size, of.decoupled) == ("m", 7, 4, True)
    assert dict(of.inputs) == {
        "A": TensorSpec("A", "BYTES", (-1,), optional=True, ragged=True),
        "S": TensorSpec("S", "INT64", (1,), reshape=()),
    }
    assert dict(of.outputs) == {"B": TensorSpec("B", "FP32", (2, 3), reshape=(6,))}


def test_metadata_shows_the_batch_dimension_only_where_there_is_one() -> None:
    assert full_shape(parse("max_batch_size: 1", "c"), [3]) == [-1, 3]
    assert full_shape(parse("", "c"), [3]) == [3]


def test_platform_is_the_backend_where_none_is_given() -> None:
    assert platform(parse('backend: "python"', "c")) == "python"
    assert platform(parse('backend: "x" platform: "y"', "c")) == "y"


def test_parameters_are_strings_by_name() -> None:
    text = 'parameters { key: "b" value { string_value: "1" } } parameters { key: "a" value {} }'

    assert parameters(parse(text, "c")) == {"a": "", "b": "1"}


def test_every_datatype_goes_to_the_configuration_and_back() -> None:
    for name, configured in CONFIG_NAME.items():
        assert datatype(datatype_number(name)) == name
        assert datatype_name(datatype_number(name)) == configured


def test_unknown_datatypes_are_invalid() -> None:
    assert (datatype_number("FP99"), datatype(0), datatype(99), datatype_name(99)) == (
        0, "<invalid>", "<invalid>", "TYPE_INVALID",
    )  # fmt: skip
