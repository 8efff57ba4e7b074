"""Commands of declared options: their flags, help and completion follow from the declarations.

``ManyValues`` adds options that take several values after one flag, as in ``--seq-len 16 128 384``; click has none.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING
from math import inf, isfinite
from pathlib import Path
from typing import Any

import click

from conch.cli.completion import completer
from conch.options.declaration import Option, by_section, options_of

_WIDTH = 120


class OptionsCommand(click.Command):
    """A command whose help has a section for each section of its options.

    If some options are common, the help describes these and names the others, as well as ``older`` flags by their
    heading; ``--help-all`` describes all options.
    """

    def __init__(
        self, name: str, options: Iterable[Option], params: Sequence[click.Parameter] = (),
        older: Mapping[str, Iterable[str]] | None = None, **declared: Any,
    ) -> None:  # fmt: skip
        self.options = list(options)
        self.older = older or {}
        params = [*params, *map(click_option, self.options)]
        if any(option.common for option in self.options):
            params.append(
                click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_help_all)
            )
        super().__init__(name, params=params, context_settings={"max_content_width": _WIDTH}, **declared)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        common = [option for option in self.options if option.common]
        write_sections(formatter, common or self.options)
        if not common:
            return
        others = by_section(option for option in self.options if not option.common)
        named = {section: [option.flag for option in options] for section, options in others.items()}
        formatter.write("\n")
        for heading, flags in {**named, **self.older}.items():
            text = f"{heading}: {', '.join(flag.removeprefix('--') for flag in flags)}"
            formatter.write(textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False) + "\n")
        formatter.write(f"\n{context.command_path} --help-all describes them all.\n")


def command_of(
    name: str, declaring: type, run: Callable[[Any], int | None], cls: type[OptionsCommand] = OptionsCommand,
    **declared: Any,
) -> click.Command:  # fmt: skip
    """Return the command that calls ``run`` with an instance of the class that declares the command's options."""

    def callback(**values: Any) -> int | None:
        return run(declaring(**values))

    return cls(name, options_of(declaring).values(), callback=callback, help=run.__doc__, **declared)


def click_option(option: Option) -> click.Option:
    """Return the parameter of click for an option. An option with its own reader gets texts and no default."""
    declared: dict[str, Any] = {"help": option.description}
    if option.switch:
        declared |= {"is_flag": True, "default": None if option.default is None else bool(option.default)}
    else:
        declared |= {
            "multiple": option.repeatable, "metavar": option.placeholder, "shell_complete": completer(option.values),
        }  # fmt: skip
        if option.bare:
            declared |= {"is_flag": False, "flag_value": option.bare}
        if option.read is None:
            declared["type"] = _type(option)
            declared |= {"required": True} if option.default is MISSING else {"default": option.default}
    return click.Option([option.name, *option.flags], **declared)


def hidden_option(
    flag: str, refuse: Callable[[click.Context, click.Parameter, Any], None] | None = None
) -> click.Option:
    """Return the parameter for a flag of another program, whose value is optional; ``refuse`` raises an error."""
    name = flag.strip("-").replace("-", "_")
    return click.Option(
        [name if refuse is None else f"_{name}", flag], hidden=True, is_flag=False, flag_value="true", callback=refuse,
        expose_value=refuse is None,
    )  # fmt: skip


def write_sections(formatter: click.HelpFormatter, options: Iterable[Option]) -> None:
    """Write a table of flags and their meanings for each section."""
    for section, listed in by_section(options).items():
        with formatter.section(section):
            formatter.write_dl([(_flags(option), option.description) for option in listed], col_max=40)


def _flags(option: Option) -> str:
    return f"{', '.join(flag.replace('/', ' / ') for flag in option.flags)} {option.placeholder}".rstrip()


def _help_all(context: click.Context, parameter: click.Parameter, requested: bool) -> None:
    if requested and isinstance(context.command, OptionsCommand):
        formatter = context.make_formatter()
        write_sections(formatter, context.command.options)
        click.echo(formatter.getvalue().strip())
        context.exit()


class FiniteRange(click.FloatRange):
    """A finite number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value} is not a number in the range {self._describe_range()}.", param, ctx)
        return number


def _type(option: Option) -> click.ParamType[Any]:
    if option.choices:
        return click.Choice(option.choices, case_sensitive=False)
    if option.kind is Path:
        kind = option.values.kind
        return click.Path(
            exists=option.existing, file_okay=kind != "directories", dir_okay=kind != "files", path_type=Path
        )
    low, high, above = option.range or (None, inf, False)
    if option.kind is int and option.range is not None:
        return click.IntRange(None if low is None else int(low), None if high == inf else int(high))
    if option.kind is float:
        return FiniteRange(low, None if high == inf else high, min_open=above)
    return click.types.convert_type(option.kind)


class ManyValues(OptionsCommand):
    """A command without arguments whose ``multiple`` options take several values after one flag.

    Values may be separated by spaces, by commas, or by repeating the flag.
    """

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        flags = {
            flag
            for parameter in self.params
            if isinstance(parameter, click.Option) and parameter.multiple
            for flag in parameter.opts
        }
        return super().parse_args(context, spread(args, flags))


def spread(arguments: Sequence[str], flags: set[str]) -> list[str]:
    """Return the command line with one flag before each value; everything after ``--`` stays."""
    words: list[str] = []
    current = ""
    for index, argument in enumerate(arguments):
        if argument == "--":
            return [*words, *arguments[index:]]
        flag, separator, value = argument.partition("=")
        if _is_flag(argument):
            current = flag if flag in flags else ""
            if not current:
                words.append(argument)
                continue
            if separator:
                words += _repeated(current, value)
            elif index + 1 == len(arguments) or _is_flag(arguments[index + 1]):
                words.append(argument)
        elif current:
            words += _repeated(current, argument)
        else:
            words.append(argument)
    return words


def _repeated(flag: str, values: str) -> list[str]:
    return [part for value in values.split(",") if value for part in (flag, value)]


def _is_flag(text: str) -> bool:
    return text.startswith("-") and not text[1:].isdigit()
