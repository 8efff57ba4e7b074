"""Changes to a ``config.pbtxt`` that leave the rest of its text as it is, comments included.

Changes are by field, nested and named as ``GET …/config`` shows them.  Used by ``conch analyze``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from google.protobuf import json_format, text_format

from conch.config import pbtxt
from conch.config.problem import ConfigError
from conch.config.schema import ModelConfig, copied, unknown_enum_value
from conch.errors import invalid

_OPENING: Final = {"{": "}", "<": ">", "[": "]"}
#: The groups of instances, which have no name to be known by: they are matched by their place.
_BY_PLACE: Final = "inference.ModelConfig.instance_group"


def merge(config: ModelConfig, changes: Mapping[str, Any]) -> ModelConfig:
    """A copy of ``config`` with ``changes``: messages field by field, parameters by their key, lists as a whole.

    None takes a field or a parameter away; instance groups are changed by their place in the list.  Raises
    INVALID_ARG for a field that there is not, or a value that it does not take.
    """
    merged = copied(config)
    _apply(merged, changes, "")
    if unknown := unknown_enum_value(merged):
        raise invalid(f"unknown value of '{unknown}'")
    return merged


def edit(text: str, changes: Mapping[str, Any], source: str = "config.pbtxt") -> str:
    """The text of a configuration with ``changes``; ``source`` is its path, for messages.

    Fields that change are written anew where they stood, further ones at the end.  Raises as :func:`merge` and
    :func:`conch.config.pbtxt.parse` do.
    """
    before = pbtxt.parse(text, source)
    after = merge(before, changes)
    if before == after:
        return text
    edited = _rewritten(text, before, after)
    try:
        if pbtxt.parse(edited, source) == after:
            return edited
    except ConfigError:
        pass
    # A text in a form that is not understood here, such as an extension's.
    return str(text_format.MessageToString(after, as_utf8=True))


def _apply(message: Any, changes: Mapping[str, Any], where: str) -> None:
    fields = {name: field for field in message.DESCRIPTOR.fields for name in (field.name, field.json_name)}
    for name, value in changes.items():
        path = f"{where}{name}"
        field = fields.get(name)
        if field is None:
            raise invalid(f"there is no field '{path}' in a model's configuration")
        repeated = field.default_value == []
        if value is None:
            message.ClearField(field.name)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            _apply_entries(message, field.name, value, path)
        elif field.full_name == _BY_PLACE and isinstance(value, list):
            _apply_by_place(getattr(message, field.name), value, path)
        elif field.message_type is not None and not repeated and isinstance(value, Mapping):
            getattr(message, field.name).SetInParent()
            _apply(getattr(message, field.name), value, f"{path}.")
        else:
            _parse(message, field.name, value, path)


def _apply_entries(message: Any, name: str, changes: Any, path: str) -> None:
    if not isinstance(changes, Mapping):
        raise invalid(f"{path}: expected names and values, not {changes!r}")
    for key, value in changes.items():
        if key in getattr(message, name):
            del getattr(message, name)[key]
        if value is not None:
            entry = type(message)()
            _parse(entry, name, {key: value}, f"{path}.{key}")
            message.MergeFrom(entry)


def _apply_by_place(groups: Any, changes: list[Any], path: str) -> None:
    del groups[len(changes) :]
    for number, change in enumerate(changes):
        if not isinstance(change, Mapping):
            raise invalid(f"{path}[{number}]: expected an instance group, not {change!r}")
        _apply(groups[number] if number < len(groups) else groups.add(), change, f"{path}[{number}].")


def _parse(message: Any, name: str, value: Any, path: str) -> None:
    message.ClearField(name)
    try:
        json_format.ParseDict({name: value}, message)
    except (json_format.ParseError, TypeError, ValueError, AttributeError) as error:
        raise invalid(f"{path}: {error}") from error


class _Field(NamedTuple):
    """A top-level field of a text: its name, and where it begins and ends."""

    name: str
    start: int
    end: int


def _rewritten(text: str, before: ModelConfig, after: ModelConfig) -> str:
    fields = list(_top_level(text))
    places = {
        key: [one for one in fields if one.name == key[0] and key[1] in _keys(text, one)]
        for key in _changed(before, after)
    }
    edits: list[tuple[int, int, str]] = []
    added = ""
    for key, found in places.items():
        written = _written(after, *key)
        for number, one in enumerate(found):
            edits.append((*_span(text, one, whole_line=not written or number > 0), written if number == 0 else ""))
        if not found and written:
            added += written + "\n"
    for start, end, written in sorted(edits, reverse=True):
        text = text[:start] + written + text[end:]
    if added and text and not text.endswith("\n"):
        text += "\n"
    return text + added


def _changed(before: ModelConfig, after: ModelConfig) -> Iterator[tuple[str, str]]:
    """The names of fields that differ; of parameters and the like with the key of each."""
    for field in ModelConfig.DESCRIPTOR.fields:
        old, new = getattr(before, field.name), getattr(after, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            yield from ((field.name, key) for key in sorted({*old, *new}) if _entry(old, key) != _entry(new, key))
        elif old != new or (field.has_presence and before.HasField(field.name) != after.HasField(field.name)):
            yield field.name, ""


def _entry(entries: Any, key: str) -> Any:
    return entries.get(key)


def _written(config: ModelConfig, name: str, key: str) -> str:
    """A field, or one entry of it, in text format; empty where it is not set."""
    part = ModelConfig()
    for field, value in config.ListFields():
        if field.name == name:
            if key and key not in value:
                continue
            part.MergeFrom(config)
            for other, _ in config.ListFields():
                if other.name != name:
                    part.ClearField(other.name)
            for other_key in [one for one in getattr(part, name) if one != key] if key else []:
                del getattr(part, name)[other_key]
    return str(text_format.MessageToString(part, as_utf8=True)).rstrip("\n")


def _keys(text: str, field: _Field) -> set[str]:
    """The key of a parameter; a single empty text for other fields."""
    of = ModelConfig.DESCRIPTOR.fields_by_name.get(field.name)
    if of is None or of.message_type is None or not of.message_type.GetOptions().map_entry:
        return {""}
    return set(getattr(pbtxt.parse(text[field.start : field.end], ""), field.name))


def _span(text: str, field: _Field, *, whole_line: bool) -> tuple[int, int]:
    """Where a field is; with its line if nothing else is there."""
    start, end = field.start, field.end
    if not whole_line:
        return start, end
    line = text.rfind("\n", 0, start) + 1
    after = text.find("\n", end)
    after = len(text) if after < 0 else after + 1
    alone = not text[line:start].strip() and not text[end:after].strip()
    return (line, after) if alone else (start, end)


def _top_level(text: str) -> Iterator[_Field]:
    """The fields of a readable text, in its order; a separator after one is part of it."""
    tokens = [(match[0].rstrip(), match.start()) for match in pbtxt.TOKEN.finditer(text) if match.lastgroup != "blank"]
    at = 0
    while at < len(tokens):
        name, start = tokens[at]
        at += 1
        if at < len(tokens) and tokens[at][0] == ":":
            at += 1
        at = _after_value(tokens, at)
        if at < len(tokens) and tokens[at][0] in (",", ";"):
            at += 1
        last, position = tokens[at - 1]
        yield _Field(name, start, position + len(last))


def _after_value(tokens: list[tuple[str, int]], at: int) -> int:
    """The index of the token after the value that begins at ``at``."""
    closing: list[str] = []
    while at < len(tokens):
        token = tokens[at][0]
        at += 1
        if token in _OPENING:
            closing.append(_OPENING[token])
        elif closing and token == closing[-1]:
            closing.pop()
        if not closing:
            return at
    return at
