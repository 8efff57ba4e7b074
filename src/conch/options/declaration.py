"""The declaration of options: each has a name, a type, a default, a section and a help text, written once.

The options of a command are the fields of a class, declared with :func:`option`. The command line and completion
(:mod:`conch.cli.options`), files, the library and the tables of the documentation are derived from the declarations. To
add an option, add a field to the class of its command: ``Settings`` (``settings.py``) for ``conch serve``, the
``options`` modules for other commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
from math import inf
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

#: Parses a value from the command line or a file. Takes the option's name for messages; raises INVALID_ARG.
Reader = Callable[[str, Any], Any]


class Range(NamedTuple):
    """The allowed values of a number: finite, from ``low``, or ``above`` it, to ``high``."""

    low: float
    high: float = inf
    above: bool = False


class Values(NamedTuple):
    """The completions of a value: a kind defined in :mod:`conch.cli.completion`, or the values themselves."""

    kind: str = ""
    known: tuple[str, ...] = ()


#: Marks a path that must exist.
EXISTING: Final = "existing"
FileName = Annotated[str, Values("files")]
DirectoryName = Annotated[str, Values("directories")]
File = Annotated[Path, Values("files")]
Directory = Annotated[Path, Values("directories")]
ExistingFile = Annotated[Path, Values("files"), EXISTING]
ExistingDirectory = Annotated[Path, Values("directories"), EXISTING]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. ``name`` is its field, and its key in files; ``default`` is ``MISSING`` if it is required.

    ``kind`` is ``bool``, ``int``, ``float``, ``str`` or ``Path``, with the ``range`` of numbers, the ``choices`` of
    texts and the ``values`` that a shell offers. A ``repeatable`` option has a tuple of such values. An option with
    ``read`` is parsed by this function, any other by the command line. A ``switch`` has no value on the command line;
    ``bare`` is the value of an option that is given without one.

    The help shows ``common`` options first. An option with ``no_effect`` is checked and ignored, for that reason.
    """

    name: str
    default: Any
    section: str
    help: str
    flags: tuple[str, ...]
    metavar: str
    kind: type
    range: Range | None
    choices: tuple[str, ...]
    values: Values
    existing: bool
    repeatable: bool
    switch: bool
    bare: str
    read: Reader | None
    common: bool
    no_effect: str

    @property
    def flag(self) -> str:
        """The flag to write in messages and help: the first long one."""
        return next(flag for flag in self.flags if flag.startswith("--")).partition("/")[0]

    @property
    def default_text(self) -> str:
        """The default as a user writes it; empty if there is none."""
        if self.switch or self.default in (MISSING, None, "", ()):
            return ""
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default))
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)

    @property
    def description(self) -> str:
        """The help text with the default, unless the text mentions it."""
        if not self.default_text or "default" in self.help:
            return self.help
        return f"{self.help.removesuffix('.')} (default: {self.default_text})."

    @property
    def placeholder(self) -> str:
        """The placeholder for the value after the flag; empty for a switch."""
        if self.switch:
            return ""
        kinds = _PLACEHOLDERS
        return self.metavar or "|".join(self.choices) or kinds.get(self.values.kind) or kinds.get(self.kind, "TEXT")


_PLACEHOLDERS: Final = {
    "files": "FILE", "directories": "DIR", "tasks": "TASK", "engines": "ENGINE", "models_to_load": "MODEL",
    "configurations": "NAME", bool: "BOOL", int: "N", float: "X", Path: "PATH",
}  # fmt: skip


def option(
    default: Any,
    section: str,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    metavar: str = "",
    read: Reader | None = None,
    repeatable: bool | None = None,
    switch: bool = True,
    bare: str = "",
    common: bool = False,
    no_effect: str = "",
) -> Any:
    """Declare an option as a field of a dataclass; see :class:`Option`.

    ``flags`` come first on the command line; a long one among them replaces the flag made from the name. By default, an
    option whose type is a tuple is ``repeatable``, and a Boolean is a ``switch``.
    """
    declared = {
        "section": section, "help": help, "flags": flags, "metavar": metavar, "read": read, "repeatable": repeatable,
        "switch": switch, "bare": bare, "common": common, "no_effect": no_effect,
    }  # fmt: skip
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=declared)
    return field(default=default, metadata=declared)


def flag_of(name: str) -> str:
    """Return the flag that is made from a name."""
    return f"--{name.replace('_', '-')}"


def options_of(declaring: type) -> dict[str, Option]:
    """Return the options that a dataclass declares, by name, in their order."""
    types = get_type_hints(declaring, include_extras=True)
    return {
        declared.name: _option(declared.name, types[declared.name], declared.default, **declared.metadata)
        for declared in fields(declaring)
        if declared.metadata
    }


def _option(
    name: str, annotation: Any, default: Any, *, flags: tuple[str, ...], repeatable: bool | None, switch: bool,
    **declared: Any,
) -> Option:  # fmt: skip
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    is_tuple = get_origin(annotation) is tuple
    kind = get_args(annotation)[0] if is_tuple else annotation
    kind, *notes = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if choices or not isinstance(kind, type):
        kind = str
    if kind is bool and not switch:
        notes.append(Values(known=("true", "false")))
    if not any(flag.startswith("--") for flag in flags):
        flags = (*flags, flag_of(name))
    return Option(
        name=name,
        default=default,
        flags=flags,
        kind=kind,
        range=next((note for note in notes if isinstance(note, Range)), None),
        choices=choices,
        values=next((note for note in notes if isinstance(note, Values)), Values(known=choices)),
        existing=EXISTING in notes,
        repeatable=is_tuple if repeatable is None else repeatable,
        switch=kind is bool and switch,
        **declared,
    )


def by_section(options: Iterable[Option]) -> dict[str, list[Option]]:
    """Return the options of each section."""
    sections: dict[str, list[Option]] = {}
    for declared in options:
        sections.setdefault(declared.section, []).append(declared)
    return sections


def words_of(values: Any) -> list[str]:
    """Return the words of a command line that gives the options which differ from their defaults."""
    words: list[str] = []
    for declared in options_of(type(values)).values():
        value = getattr(values, declared.name)
        if value != declared.default:
            words.append(declared.flags[0])
            if not declared.switch:
                words += map(str, value if declared.repeatable else [f"{value:g}" if declared.kind is float else value])
    return words
