"""Options that take several values after one flag, as in ``--seq-len 16 128 384``, which click does not have."""

from __future__ import annotations

from collections.abc import Sequence

import click

from conch.cli.options import OptionsCommand


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
