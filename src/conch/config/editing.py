"""Edits fields of a ``config.pbtxt`` and preserves the rest of its text, including comments.

Changes are nested mappings of fields, named as in ``GET …/config``. Used by ``conch analyze``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from google.protobuf import json_format, text_format

from conch.config import pbtxt
from conch.config.reading import ConfigError
from conch.config.schema import ModelConfig, copied, unknown_enum_value
from conch.core.errors import invalid

_OPENING: Final = {"{": "}", "<": ">", "[": "]"}
#: Instance groups have no stable names, so changes match them by position.
_BY_PLACE: Final = "inference.ModelConfig.instance_group"


def merge(config: ModelConfig, changes: Mapping[str, Any]) -> ModelConfig:
    """Return a copy of ``config`` with ``changes``: messages by field, parameters by key, lists as a whole.

    None removes a field or a parameter; instance groups are matched by position. Raises INVALID_ARG for an unknown
    field or an invalid value.
    """
    merged = copied(config)
    _apply(merged, changes, "")
    if unknown := unknown_enum_value(merged):
        raise invalid(f"unknown value of '{unknown}'")
    return merged


def edit(text: str, changes: Mapping[str, Any], source: str = "config.pbtxt") -> str:
    """Return the text of a configuration with ``changes``; ``source`` is its path, for messages.

    Changed values are replaced in place; new fields are added at the end of their message. Raises as :func:`merge` and
    :func:`conch.config.pbtxt.parse` do.
    """
    before = pbtxt.parse(text, source)
    after = merge(before, changes)
    if before == after:
        return text
    entry = _edited(text, before, after)
    try:
        if pbtxt.parse(entry, source) == after:
            return entry
    except ConfigError:
        pass
    # The text uses syntax that this module does not support, such as extensions.
    return str(text_format.MessageToString(after, as_utf8=True))


def _apply(message: Any, changes: Mapping[str, Any], prefix: str) -> None:
    fields = {name: field for field in message.DESCRIPTOR.fields for name in (field.name, field.json_name)}
    for name, value in changes.items():
        path = f"{prefix}{name}"
        field = fields.get(name)
        if field is None:
            raise invalid(f"a model configuration has no field '{path}'")
        repeated = field.default_value == []
        if value is None:
            message.ClearField(field.name)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            _apply_entries(message, field.name, value, path)
        elif field.full_name == _BY_PLACE and isinstance(value, list):
            _apply_by_index(getattr(message, field.name), value, path)
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


def _apply_by_index(groups: Any, changes: list[Any], path: str) -> None:
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


class _Span(NamedTuple):
    """A range of a text."""

    start: int
    end: int


class _Field(NamedTuple):
    """A field in the text of a message: its name, span (with trailing separator) and values or list elements."""

    name: str
    span: _Span
    values: list[_Span]


def _edited(text: str, before: ModelConfig, after: ModelConfig) -> str:
    edits: list[tuple[_Span, str]] = []
    _edit_message(text, _Span(0, len(text)), before, after, edits)
    for (start, end), written in sorted(edits, reverse=True):
        text = text[:start] + written + text[end:]
    return text


def _edit_message(text: str, body: _Span, before: Any, after: Any, edits: list[tuple[_Span, str]]) -> None:
    """Collect the edits that change ``before`` to ``after``; ``body`` is the span of the message's fields."""
    fields = list(_fields(text, body))
    added = ""
    for field in before.DESCRIPTOR.fields:
        present = [entry for entry in fields if entry.name == field.name]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            added += _edit_entries(text, present, before, after, field.name, edits)
            continue
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old == new and (not field.has_presence or before.HasField(field.name) == after.HasField(field.name)):
            continue
        if not _edit_values(text, field, present, before, after, edits):
            added += _replace(text, present, _written(after, field.name), edits)
    if added:
        _append(text, body, added, edits)


def _edit_values(
    text: str, field: Any, present: list[_Field], before: Any, after: Any, edits: list[tuple[_Span, str]]
) -> bool:
    """Collect the edits of one field's values; returns False if the field must be rewritten as a whole."""
    repeated = field.default_value == []
    old = list(getattr(before, field.name)) if repeated else [getattr(before, field.name)]
    new = list(getattr(after, field.name)) if repeated else [getattr(after, field.name)]
    spans = [value for entry in present for value in entry.values]
    if len(spans) != len(old) or len(old) != len(new) or not _is_set(after, field):
        return False
    for span, was, value in zip(spans, old, new, strict=True):
        if field.message_type is not None:
            _edit_message(text, _Span(span.start + 1, span.end - 1), was, value, edits)
        elif was != value:
            edits.append((span, _scalar(field, value)))
    return True


def _edit_entries(
    text: str, present: list[_Field], before: Any, after: Any, name: str, edits: list[tuple[_Span, str]]
) -> str:
    """Collect the edits of a map's entries; returns new entries in text format."""
    old, new = getattr(before, name), getattr(after, name)
    changed = [key for key in sorted({*old, *new}) if key not in old or key not in new or old[key] != new[key]]
    entries = {key: entry for entry in present for key in _keys(type(before), text, entry)}
    if any(len(entry.values) > 1 for entry in present) and changed:
        return _replace(text, present, _written(after, name), edits)
    added = ""
    for key in changed:
        field = entries.get(key)
        inner = _Span(field.values[0].start + 1, field.values[0].end - 1) if field is not None else None
        value = (
            next((inner_field for inner_field in _fields(text, inner) if inner_field.name == "value"), None)
            if inner is not None
            else None
        )
        if key in new and value is not None:
            described = before.DESCRIPTOR.fields_by_name[name].message_type.fields_by_name["value"]
            span = value.values[0]
            if described.message_type is not None:
                _edit_message(text, _Span(span.start + 1, span.end - 1), old[key], new[key], edits)
            else:
                edits.append((span, _scalar(described, new[key])))
        else:
            added += _replace(text, [field] if field is not None else [], _written(after, name, key), edits)
    return added


def _is_set(message: Any, field: Any) -> bool:
    return bool(message.HasField(field.name)) if field.has_presence else bool(getattr(message, field.name))


def _replace(text: str, present: list[_Field], written: str, edits: list[tuple[_Span, str]]) -> str:
    """Collect the edits that rewrite fields at the position of the first, after their comments.

    Returns the text to append if ``present`` is empty.
    """
    for number, entry in enumerate(present):
        if number or not written:
            edits.append((_whole_line(text, entry.span), ""))
            continue
        indent = _indent(text, entry.span.start)
        lines = [comment for entry in present for comment in _comments(text, entry.span)] + written.splitlines()
        edits.append((entry.span, f"\n{indent}".join(lines)))
    return "" if present or not written else written + "\n"


def _append(text: str, body: _Span, written: str, edits: list[tuple[_Span, str]]) -> None:
    """Collect the edit that adds fields at the end of a message, on new lines if its other fields are."""
    inside = text[body.start : body.end]
    if body == (0, len(text)):
        edits.append((_Span(body.end, body.end), ("\n" if text and not text.endswith("\n") else "") + written))
    elif "\n" in inside:
        indent = next(
            (_indent(text, field.span.start) for field in _fields(text, body)), _indent(text, body.start) + "  "
        )
        end = body.start + len(inside.rstrip(" \t"))
        lines = "".join(f"{indent}{line}\n" for line in written.splitlines())
        edits.append((_Span(end, end), lines if inside.rstrip(" \t").endswith("\n") else f"\n{lines}"))
    else:
        end = body.start + len(inside.rstrip())
        edits.append((_Span(end, body.end), f" {' '.join(written.split())} "))


def _written(message: Any, name: str, key: str = "") -> str:
    """Return a field, or one entry of it, in text format; empty if it is not set."""
    part = type(message)()
    part.CopyFrom(message)
    for other, _ in message.ListFields():
        if other.name != name:
            part.ClearField(other.name)
    if key:
        for other_key in [other for other in getattr(part, name) if other != key]:
            del getattr(part, name)[other_key]
    return str(text_format.MessageToString(part, as_utf8=True)).rstrip("\n")


def _scalar(field: Any, value: Any) -> str:
    """Return a value in text format."""
    out = text_format.TextWriter(as_utf8=True)
    text_format.PrintFieldValue(field, value, out, as_utf8=True)
    return str(out.getvalue())


def _keys(kind: type[Any], text: str, field: _Field) -> set[str]:
    """Return the keys of a map's entries."""
    part = kind()
    text_format.Parse(text[field.span.start : field.span.end].rstrip(",;"), part)
    return set(getattr(part, field.name))


def _comments(text: str, span: _Span) -> list[str]:
    return [match[0] for match in pbtxt.TOKEN.finditer(text, *span) if match[0].startswith("#")]


def _indent(text: str, at: int) -> str:
    """Return the leading whitespace of a line."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip())]


def _whole_line(text: str, span: _Span) -> _Span:
    """Return a span extended to its whole lines if they contain nothing else."""
    line = text.rfind("\n", 0, span.start) + 1
    after = text.find("\n", span.end)
    after = len(text) if after < 0 else after + 1
    alone = not text[line : span.start].strip() and not text[span.end : after].strip()
    return _Span(line, after) if alone else span


def _fields(text: str, body: _Span) -> Iterator[_Field]:
    """Yield the fields of a valid message in text order."""
    tokens = [
        _Span(match.start(), match.start() + len(match[0].rstrip()))
        for match in pbtxt.TOKEN.finditer(text, *body)
        if match.lastgroup != "blank"
    ]
    words = [text[token.start : token.end] for token in tokens]
    at = 0
    while at < len(tokens):
        first = at
        at += 2 if words[at + 1 : at + 2] == [":"] else 1
        values = []
        if words[at : at + 1] == ["["]:
            end = _after_value(words, at)
            at += 1
            while at < end - 1:
                last = _after_value(words, at)
                values.append(_Span(tokens[at].start, tokens[last - 1].end))
                at = last + 1 if words[last] == "," else last
            at = end
        else:
            last = _after_value(words, at)
            values.append(_Span(tokens[at].start, tokens[last - 1].end))
            at = last
        if words[at : at + 1] in ([","], [";"]):
            at += 1
        yield _Field(words[first], _Span(tokens[first].start, tokens[at - 1].end), values)


def _after_value(words: list[str], at: int) -> int:
    """Return the index of the token after the value that begins at ``at``."""
    closing: list[str] = []
    while at < len(words):
        word = words[at]
        at += 1
        if word in _OPENING:
            closing.append(_OPENING[word])
        elif closing and word == closing[-1]:
            closing.pop()
        if not closing:
            return at
    return at
