"""What was probably meant where ``config.pbtxt`` cannot be read: the nearest name, or what the writing lacks.

Pure; ``pbtxt`` calls it with the message of protobuf's parser and with where in the text that stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from conch.config.schema import ModelConfig
from conch.errors import nearest

_UNKNOWN_FIELD: Final = re.compile(r'Message type "(?P<message>[\w.]+)" has no field named "(?P<field>[^"]+)"')
_UNKNOWN_VALUE: Final = re.compile(r'Enum type "(?P<enum>[\w.]+)" has no value named (?P<value>"?\w+"?)')

#: What other programs call a field or a value, by the type that has it.
_OTHER_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "inference.DataType": {
        **dict.fromkeys(("BYTES", "STR", "TEXT", "CHAR", "UTF8", "OBJECT"), "TYPE_STRING"),
        **dict.fromkeys(("FLOAT", "FLOAT32", "SINGLE"), "TYPE_FP32"),
        **dict.fromkeys(("FLOAT16", "HALF"), "TYPE_FP16"),
        **dict.fromkeys(("FLOAT64", "DOUBLE"), "TYPE_FP64"),
        **dict.fromkeys(("INT", "INTEGER"), "TYPE_INT32"),
        "BFLOAT16": "TYPE_BF16",
        "LONG": "TYPE_INT64",
        "SHORT": "TYPE_INT16",
        "BYTE": "TYPE_UINT8",
        "BOOLEAN": "TYPE_BOOL",
    },
    "inference.ModelInstanceGroup.Kind": {"CUDA": "KIND_GPU"},
    "inference.ModelInput": {"shape": "dims", "dtype": "data_type", "type": "data_type"},
    "inference.ModelOutput": {"shape": "dims", "dtype": "data_type", "type": "data_type"},
    "inference.ModelConfig": {"batch_size": "max_batch_size", "batching": "dynamic_batching"},
}

#: By the parser's message: the hint, from the match and from the rest of the text where the parser stopped.
_WRITING: Final[Sequence[tuple[re.Pattern[str], Callable[[re.Match[str], str], str]]]] = (
    (re.compile(r"Expected string but found: '(\w+)'"), lambda found, rest: f'write "{found[1]}", in quotation marks'),
    (
        re.compile('(?:Expected integer, got|Couldn\'t parse (?:float|boolean)[^"]*): "([\\w.+-]+)"'),
        lambda found, rest: f"write {found[1]}, without quotation marks",
    ),
    (re.compile("Expected integer, got: -$"), lambda found, rest: "write a number that is not negative"),
    (
        re.compile(r"Expected identifier or number, got [{\"]"),
        lambda found, rest: "this is no JSON: write name: value, with the name without quotation marks",
    ),
    (re.compile("missing ending quote"), lambda found, rest: "close the quotation mark on the same line"),
    (re.compile(r'Expected ":"'), lambda found, rest: "write ':' in place of '='" if rest.startswith("=") else ""),
    (re.compile(r'Expected ","'), lambda found, rest: "write ',' between the elements of a list"),
    (re.compile(r'Expected "\{"'), lambda found, rest: _message_expected(rest)),
)


def hint(detail: str, text: str, offset: int) -> str:
    """What to write instead, empty where nothing tells.

    ``detail`` is the parser's message, ``offset`` the place in ``text`` where it stopped.
    """
    pool = ModelConfig.DESCRIPTOR.file.pool
    before = text[:offset]
    if found := _UNKNOWN_FIELD.search(detail):
        if found["field"] in ModelConfig.DESCRIPTOR.fields_by_name and (open_at := _unclosed(before)):
            return f"{open_at} first"
        return _nearest(
            found["field"], found["message"], list(pool.FindMessageTypeByName(found["message"]).fields_by_name)
        )
    if found := _UNKNOWN_VALUE.search(detail):
        known = list(pool.FindEnumTypeByName(found["enum"]).values_by_name)
        value = found["value"].strip('"')
        if value in known:
            return f"write {value}, without quotation marks"
        return _nearest(value, found["enum"], known)
    if "Expected identifier or number, got {" in detail and (open_at := _unclosed(before)):
        return f"{open_at} first"
    for pattern, say in _WRITING:
        if match := pattern.search(detail):
            return say(match, text[offset:])
    return _unclosed(text) if 'Expected "}"' in detail else ""


def _nearest(wrong: str, kind: str, known: Sequence[str]) -> str:
    """The name that was meant: another program's, one without its prefix (``GPU``), or one misspelt."""
    others = _OTHER_NAMES.get(kind, {})
    prefix = f"{known[0].partition('_')[0]}_" if known[0].isupper() else ""
    bare = wrong.upper().removeprefix(prefix) if prefix else wrong
    meant = others.get(bare) or next((name for name in known if name == prefix + bare), "")
    if not meant:
        # The prefix that all names share would make them all alike.
        stems = {name.removeprefix(prefix): name for name in known}
        meant = stems.get(nearest(bare, stems), "")
    return f"did you mean '{meant}'?" if meant else f"known here: {', '.join(known)}"


def _message_expected(rest: str) -> str:
    if value := re.match(r'"[^"\n]*"', rest):
        return f"write {{ string_value: {value[0]} }}"
    if rest.startswith("]"):
        return "leave out the ',' after the last element of the list"
    if found := re.match(r"(true|false)\b", rest):
        return "write { }" if found[0] == "true" else "leave the field out"
    return ""


def _unclosed(text: str) -> str:
    """That the innermost ``{`` or ``[`` which nothing closes must be closed, with its line; empty without one."""
    bare = re.sub(r"#[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", "", text)
    lines: list[int] = []
    for match in re.finditer(r"[\[\]{}]", bare):
        if match[0] in "[{":
            lines.append(bare.count("\n", 0, match.start()) + 1)
        elif lines:
            lines.pop()
    return f"close the bracket of line {lines[-1]}" if lines else ""
