"""The configuration as JSON, and back.

This is what ``GET …/config`` answers, what Python models receive and what a load may override.

Every primitive field is printed, defaults included; enums by name; sub-messages only when set.
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
from conch.errors import internal

#: 64-bit integers are strings in proto3's JSON; Triton prints those of these messages' fields as numbers.
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
#: Fields newer than the baseline, printed only where they say something.
_ONLY_WHEN_SET = {"inference.ModelEnsembling.max_inflight_requests"}
_INT64 = {
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_SINT64,
    FieldDescriptor.TYPE_FIXED64,
    FieldDescriptor.TYPE_SFIXED64,
}
_FLOAT = Struct("<f")
#: What reading JSON of the wrong shape raises besides its own error: no text from a client may stop the server.
_PARSER_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def to_json(config: ModelConfig) -> str:
    """The configuration as compact JSON, keys in the order of the schema."""
    return orjson.dumps(_message(config)).decode()


def from_json(text: str) -> ModelConfig:
    """The configuration that JSON describes; field names as in the schema or in camelCase, enum values in any case.

    Raises INTERNAL ``Invalid config override: …``.
    """
    config = ModelConfig()
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("Root element must be a message.")
        json_format.ParseDict(_with_enum_names(values, ModelConfig.DESCRIPTOR), config)
    except (*_PARSER_ERRORS, json_format.ParseError) as error:
        raise internal(f"Invalid config override: {error}") from error
    if unknown := unknown_enum_value(config):
        raise internal(f"Invalid config override: unknown value of '{unknown}'")
    return config


def _message(message: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    chosen: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.default_value == []:  # Repeated, maps too; ``is_repeated`` is newer than the oldest protobuf allowed.
            values[field.name] = _repeated(field, getattr(message, field.name))
        elif not field.has_presence:
            if field.full_name not in _ONLY_WHEN_SET or getattr(message, field.name):
                values[field.name] = _scalar(field, getattr(message, field.name))
        elif message.HasField(field.name):
            if field.message_type is not None:
                values[field.name] = _message(getattr(message, field.name))
            else:
                # Alternatives of a oneof that are plain values come after everything else.
                chosen[field.name] = _scalar(field, getattr(message, field.name))
    return values | chosen


def _repeated(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is None:
        return [_scalar(field, one) for one in value]
    if not field.message_type.GetOptions().map_entry:
        return [_message(one) for one in value]
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
    """A 32-bit float in 6 digits where they suffice, else 9: 0.3 and not 0.30000001192092896; 1 and not 1.0."""
    if not isfinite(value):
        return str(value)
    short = float(f"{value:.6g}")
    number = short if _FLOAT.unpack(_FLOAT.pack(short))[0] == value else float(f"{value:.9g}")
    return int(number) if number.is_integer() else number


def _with_enum_names(value: Any, descriptor: Descriptor) -> Any:
    """``value`` with the names of enum values in the schema's spelling; everything else is left to the parser."""
    if not isinstance(value, dict):
        return value
    fields = {name: field for field in descriptor.fields for name in (field.name, field.json_name)}
    return {key: _with_enum_name(one, fields[key]) if key in fields else one for key, one in value.items()}


def _with_enum_name(value: Any, field: FieldDescriptor) -> Any:
    if isinstance(value, list):
        return [_with_enum_name(one, field) for one in value]
    if field.enum_type is not None:
        return value.upper() if isinstance(value, str) else value
    if field.message_type is None:
        return value
    if field.message_type.GetOptions().map_entry:
        of = field.message_type.fields_by_name["value"]
        return {key: _with_enum_name(one, of) for key, one in value.items()} if isinstance(value, dict) else value
    return _with_enum_names(value, field.message_type)
