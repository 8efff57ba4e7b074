"""Suggests a similar name for an unknown command or flag. Called when a command line is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import click

from conch.core.errors import did_you_mean

#: The names of commands in other programs.
_OTHER_NAMES: Final = {
    **dict.fromkeys(("start", "run", "server", "tritonserver", "up"), "serve"),
    **dict.fromkeys(("validate", "lint", "verify"), "check"),
    **dict.fromkeys(("export", "quantize", "quantise", "optimize", "optimise"), "convert"),
}

#: The names of options in other servers.
_OTHER_OPTIONS: Final = {"--port": "--http-port", "--host": "--http-address"}


def unknown_command(name: str, commands: Collection[str]) -> str:
    """Return the message for an unknown command; suggests ``conch serve`` if it is a model."""
    if "/" in name or Path(name).exists():
        return f"'{name}' is not a command; did you mean 'conch serve {name}'?"
    known = {command: command for command in commands} | _OTHER_NAMES
    hint = did_you_mean(name, known, f"the commands are {', '.join(commands)}", shown=known.__getitem__)
    return f"unrecognized command '{name}'; {hint}"


def unknown_option(
    parsed: str,
    arguments: Sequence[str],
    command: click.Command,
    others: Mapping[str, click.Command],
) -> str:
    """Return the message for an option that ``command`` does not have.

    ``parsed`` is the option as parsed from ``arguments``; ``others`` are the commands that may have it.
    """
    option = _as_written(parsed, arguments)
    message = f"unrecognized option '{option}'"
    flag = _spelt(option)
    for name, other in others.items():
        if flag in _flags(other):
            return f"{message}; it is an option of '{name}': conch {name} {flag} …"
    flags = _flags(command)
    known = {name: name for name in flags} | {name: of for name, of in _OTHER_OPTIONS.items() if of in flags}
    if longer := _longer(flag, flags):
        known.setdefault(flag, longer)
    hint = did_you_mean(flag, known, "--help lists the valid ones", shown=known.__getitem__)
    return f"{message}; {hint}"


def _as_written(option: str, arguments: Sequence[str]) -> str:
    """Return the whole option: of ``-model-repository``, a parser reads only ``-m``."""
    if not option.startswith("--"):
        for argument in arguments:
            if argument.startswith(option) and len(argument) > 2 and not argument.startswith("--"):
                return argument.partition("=")[0]
    return option


def _spelt(option: str) -> str:
    """Return the option in the spelling of flags: two dashes, lower case, dashes instead of underscores."""
    return "--" + option.lstrip("-").lower().replace("_", "-")


def _flags(command: click.Command) -> list[str]:
    context = click.Context(command)
    return [
        flag
        for param in command.get_params(context)
        if isinstance(param, click.Option)
        for flag in param.opts
        if flag[:2] == "--"
    ]


def _longer(flag: str, known: Collection[str]) -> str:
    """Return the only flag that begins with ``flag``; empty if none or several do."""
    matches = [candidate for candidate in known if candidate.startswith(flag)] if flag.strip("-") else []
    return matches[0] if len(matches) == 1 else ""
