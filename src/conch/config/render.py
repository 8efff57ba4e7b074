"""Converts the configuration to JSON and back.

``GET …/config`` returns this JSON, Python models receive it, and a load may override it. It contains all primitive
fields, including defaults, enums by name, and only the sub-messages that are set.
"""

from __future__ import annotations

import json
from math import isfinite
from struct import Struct
from typing import Any

import orjson
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from conch.config.schema import ModelConfig, unknown_enum_value
from conch.core.errors import internal

#: 64-bit integers are strings in proto3's JSON, but Triton prints these fields as numbers.
_NUMBERS = {
    "inference.ModelInput.dims",
    "inference.ModelOutput.dims",
    "inference.ModelTensorReshape.shape",
    "inference.ModelVersionPolicy.Specific.versions",
    "inference.ModelDynamicBatching.max_queue_delay_microseconds",
    "inference.ModelDynamicBatching.priority_levels",
    "inference.ModelDynamicBatching.default_priority_level",
    "inference.ModelQueuePolicy.default_timeout_microseconds",
    "inference.ModelSequenceBatching.max_sequence_idle_microseconds",
    "inference.ModelSequenceBatching.StrategyDirect.max_queue_delay_microseconds",
    "inference.ModelSequenceBatching.StrategyOldest.max_queue_delay_microseconds",
    "inference.ModelSequenceBatching.State.dims",
    "inference.ModelEnsembling.Step.model_version",
    "inference.ModelWarmup.Input.dims",
}
#: Fields newer than the baseline version of Triton, printed only when set.
_ONLY_WHEN_SET = {"inference.ModelEnsembling.max_inflight_requests"}
_INT64 = {
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_SINT64,
    FieldDescriptor.TYPE_FIXED64,
    FieldDescriptor.TYPE_SFIXED64,
}
_FLOAT = Struct("<f")
#: Exceptions other than ParseError that malformed JSON raises. Text from clients must not stop the server.
_PARSER_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def to_json(config: ModelConfig) -> str:
    """Return the configuration as compact JSON, with keys in schema order."""
    return orjson.dumps(_message(config)).decode()


def from_json(text: str, *, lenient: bool = False) -> ModelConfig:
    """Parse a configuration from JSON; field names may be in camelCase, and enum values in any case.

    ``lenient`` ignores unknown fields, which a newer server may send. Raises INTERNAL ``Invalid config override: …``.
    """
    config = ModelConfig()
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("Root element must be a message.")
        values = _with_enum_names(values, ModelConfig.DESCRIPTOR)
        json_format.ParseDict(values, config, ignore_unknown_fields=lenient)
    except (*_PARSER_ERRORS, json_format.ParseError) as error:
        raise internal(f"Invalid config override: {error}") from error
    if unknown := unknown_enum_value(config):
        raise internal(f"Invalid config override: unknown value of '{unknown}'")
    return config


def _message(message: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    chosen: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.default_value == []:  # Repeated fields and maps; the oldest protobuf lacks ``is_repeated``.
            values[field.name] = _repeated(field, getattr(message, field.name))
        elif not field.has_presence:
            if field.full_name not in _ONLY_WHEN_SET or getattr(message, field.name):
                values[field.name] = _scalar(field, getattr(message, field.name))
        elif message.HasField(field.name):
            if field.message_type is not None:
                values[field.name] = _message(getattr(message, field.name))
            else:
                # Scalar alternatives of a oneof are printed last.
                chosen[field.name] = _scalar(field, getattr(message, field.name))
    return values | chosen


def _repeated(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is None:
        return [_scalar(field, element) for element in value]
    if not field.message_type.GetOptions().map_entry:
        return [_message(element) for element in value]
    of = field.message_type.fields_by_name["value"]
    return {
        str(key): _scalar(of, value[key]) if of.message_type is None else _message(value[key]) for key in sorted(value)
    }


def _scalar(field: FieldDescriptor, value: Any) -> Any:
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else value
    if field.type in _INT64 and field.full_name not in _NUMBERS:
        return str(value)
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return _float(value)
    return value


def _float(value: float) -> float | int | str:
    """Round a 32-bit float to 6 digits if they suffice, else to 9; whole numbers up to 2**53 become integers.

    For example, 0.3 is printed instead of 0.30000001192092896, and 1 instead of 1.0.
    """
    if not isfinite(value):
        return str(value)
    short = float(f"{value:.6g}")
    number = short if _FLOAT.unpack(_FLOAT.pack(short))[0] == value else float(f"{value:.9g}")
    return int(number) if number.is_integer() and abs(number) <= 2**53 else number


def _with_enum_names(value: Any, descriptor: Descriptor) -> Any:
    """Return ``value`` with enum names in the schema's spelling; other values are left to the parser."""
    if not isinstance(value, dict):
        return value
    fields = {name: field for field in descriptor.fields for name in (field.name, field.json_name)}
    return {key: _with_enum_name(item, fields[key]) if key in fields else item for key, item in value.items()}


def _with_enum_name(value: Any, field: FieldDescriptor) -> Any:
    if isinstance(value, list):
        return [_with_enum_name(element, field) for element in value]
    if field.enum_type is not None:
        return value.upper() if isinstance(value, str) else value
    if field.message_type is None:
        return value
    if field.message_type.GetOptions().map_entry:
        of = field.message_type.fields_by_name["value"]
        return {key: _with_enum_name(item, of) for key, item in value.items()} if isinstance(value, dict) else value
    return _with_enum_names(value, field.message_type)
