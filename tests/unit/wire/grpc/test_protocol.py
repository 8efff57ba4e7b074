"""The messages of the installed ``tritonclient`` are those that have been looked at: ``protocol.txt``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2, service_pb2

REVIEWED = Path(__file__).with_name("protocol.txt")


def test_no_call_message_or_field_is_new() -> None:
    """If this fails, decide for each whether conch supports it, add it here and to docs/policy.md."""
    installed = set(protocol())
    reviewed = set(REVIEWED.read_text().splitlines())
    # An older client lacks the newest fields.
    assert installed - reviewed == set()
    assert len(reviewed - installed) < 8, reviewed - installed


def protocol() -> Iterator[str]:
    for file in (service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR):
        for service in file.services_by_name.values():
            yield from (f"rpc {service.name}.{method.name}" for method in service.methods)
        yield from (f"{enum.name} {value.name}" for enum in file.enum_types_by_name.values() for value in enum.values)
        for message in file.message_types_by_name.values():
            yield from _members(message)


def _members(message: Any) -> Iterator[str]:
    yield from (f"{message.full_name} {field.name} {field.number}" for field in message.fields)
    yield from (f"{enum.full_name} {value.name}" for enum in message.enum_types for value in enum.values)
    for inner in message.nested_types:
        yield from _members(inner)
