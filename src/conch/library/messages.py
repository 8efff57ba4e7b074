"""Messages of protocol buffers as the documents that HTTP has for them."""

from __future__ import annotations

from typing import Any


def document_of(message: Any) -> dict[str, Any]:
    """All fields of a message by name, those without a value as well; numbers stay numbers, maps become dicts."""
    document: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            of = field.message_type.fields_by_name["value"]
            document[field.name] = {
                key: value[key] if of.message_type is None else document_of(value[key]) for key in value
            }
        elif field.message_type is None:
            document[field.name] = list(value) if isinstance(field.default_value, list) else value
        elif isinstance(field.default_value, list):
            document[field.name] = [document_of(one) for one in value]
        else:
            document[field.name] = document_of(value)
    return document
