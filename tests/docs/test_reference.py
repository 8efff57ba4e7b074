"""Pages that list something list all of it: names of ``pb_utils``, fields of configurations, flags, metrics."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from conch.backends.python import pb_utils
from conch.cli.serve import serve_command
from conch.config.effects import ineffective_problems
from conch.config.schema import ModelConfig
from conch.telemetry.metrics import MetricsConfig, Registry
from docs.generate import generated

DOCS = Path(__file__).parents[2] / "docs"


def words(page: str) -> set[str]:
    return set(re.findall(r"\w+", (DOCS / page).read_text("utf-8")))


def test_everything_in_pb_utils_is_on_its_page() -> None:
    classes = [value for name in pb_utils.__all__ if inspect.isclass(value := getattr(pb_utils, name))]
    methods = {
        name
        for class_ in classes
        for name, value in vars(class_).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, staticmethod))
    }
    internal = {"pack", "encode", "received"}  # between the modules of the backend
    assert {*pb_utils.__all__, *methods} - internal - words("model_py.md") == set()


def test_every_field_of_a_configuration_has_a_row_with_its_type() -> None:
    rows = dict(re.findall(r"^\| `([\w.]+)` \| ([^|]+?) \|", (DOCS / "config.md").read_text("utf-8"), re.MULTILINE))
    described = {}
    for path, written in rows.items():
        field = _field_at(path)
        assert _type_of(field) == written, path
        described[field.full_name] = path
    assert set(_fields(ModelConfig.DESCRIPTOR)) - described.keys() == set()


def test_fields_without_effect_are_those_that_are_warned_of() -> None:
    """``conch check`` and the log name each; but for those that are completed here, or only describe a tensor."""
    silent = {"input.format", "optimization.input_pinned_memory", "optimization.output_pinned_memory"}
    rows = re.findall(
        r"^\| `([\w.]+)` \|[^|]*\|[^|]*\| (.*) \|$", (DOCS / "config.md").read_text("utf-8"), re.MULTILINE
    )
    useless = {path for path, text in rows if text.startswith("no effect")}
    inner = {path for path in useless if any(path.startswith(f"{outer}.") for outer in useless)}
    named = useless - inner - silent
    assert len(named) >= 10
    assert [path for path in sorted(named) if not list(ineffective_problems(_with(path)))] == []


def _with(path: str) -> ModelConfig:
    """A configuration in which the field at a path says something."""
    config = ModelConfig()
    message: Any = config
    *outer, last = path.split(".")
    for name in outer:
        inner = getattr(message, name)
        message = inner.add() if hasattr(inner, "add") else inner
    value = getattr(message, last)
    if isinstance(value, str | bool | int | float):
        setattr(message, last, type(value)("1"))
    elif hasattr(value, "add"):
        value.add()
    elif hasattr(value, "SetInParent"):
        value.SetInParent()
    elif hasattr(value, "append"):
        value.append("1")
    else:
        value["1"] = "1"
    return config


def _field_at(path: str) -> FieldDescriptor:
    message: Descriptor | None = ModelConfig.DESCRIPTOR
    field: FieldDescriptor | None = None
    for name in path.split("."):
        assert message is not None and name in message.fields_by_name, f"there is no {path}"
        field = message.fields_by_name[name]
        message = _message_of(field)
    assert field is not None
    return field


def _fields(message: Descriptor) -> Iterator[str]:
    """The full names of all fields below a message; those of a message that is used in two places come once."""
    waiting, seen = [message], {message.full_name}
    while waiting:
        for field in waiting.pop().fields:
            yield field.full_name
            inner = _message_of(field)
            if inner is not None and inner.full_name not in seen:
                seen.add(inner.full_name)
                waiting.append(inner)


def _message_of(field: FieldDescriptor) -> Descriptor | None:
    return _value_field(field).message_type


def _value_field(field: FieldDescriptor) -> FieldDescriptor:
    """The field of a map's values; any other field is its own."""
    message = field.message_type
    if message is None or not message.GetOptions().map_entry:
        return field
    return message.fields_by_name["value"]


_PLAIN = {
    FieldDescriptor.CPPTYPE_BOOL: "bool",
    FieldDescriptor.CPPTYPE_STRING: "string",
    FieldDescriptor.CPPTYPE_FLOAT: "number",
    FieldDescriptor.CPPTYPE_DOUBLE: "number",
    FieldDescriptor.CPPTYPE_ENUM: "enum",
    FieldDescriptor.CPPTYPE_MESSAGE: "message",
}


def _type_of(field: FieldDescriptor) -> str:
    value = _value_field(field)
    plain = _PLAIN.get(value.cpp_type, "integer")
    if value is not field:
        return f"map to {plain}"
    return f"{plain}s" if field.default_value == [] else plain


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_tables_are_what_the_declarations_say(page: Path) -> None:
    text = page.read_text("utf-8")
    assert generated(text) == text, f"{page.name} is out of date: run make docs"


def test_every_flag_is_on_its_page() -> None:
    flags = {flag for param in serve_command.params if isinstance(param, click.Option) for flag in param.opts}
    written = set(re.findall(r"--[\w-]+", (DOCS / "flags.md").read_text("utf-8")))
    assert flags - written == set()


def test_every_metric_is_on_its_page() -> None:
    page = Registry(MetricsConfig(summary_latencies=True, histogram_latencies=True), gpu=False)
    page.register(page.statistics("m", 1, decoupled=True), cached=True)
    shown = set(re.findall(r"^# TYPE (\S+)", page.render().decode(), re.MULTILINE))
    assert len(shown) > 20
    assert (
        shown - set(re.findall(r"^\| `([\w:]+)` \|", (DOCS / "metrics.md").read_text("utf-8"), re.MULTILINE)) == set()
    )


def test_errors_on_their_page_are_those_of_the_code() -> None:
    """Each fixed part of a message is in a string of the source; strings that continue on the next line are joined."""
    sources = "\n".join(path.read_text("utf-8") for path in (DOCS.parent / "src" / "conch").rglob("*.py"))
    code = re.sub(r"\{[^{}]*\}", "…", re.sub(r"\"\s+f?\"", "", sources))
    messages = re.findall(r"^\| `([^`]+)`", (DOCS / "errors.md").read_text("utf-8"), re.MULTILINE)
    assert len(messages) > 20
    parts = [part.strip() for message in messages for part in message.split("…") if len(part.strip("' .;")) > 3]
    assert [part for part in parts if part not in code] == []
