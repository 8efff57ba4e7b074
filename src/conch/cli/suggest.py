"""What was probably meant by a command or a flag that there is not.  Called where a command line is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import click

from conch.core.errors import did_you_mean

#: What other programs call a command.
_OTHER_NAMES: Final = {
    **dict.fromkeys(("start", "run", "server", "tritonserver", "up"), "serve"),
    **dict.fromkeys(("validate", "lint", "verify"), "check"),
    **dict.fromkeys(("export", "quantize", "quantise", "optimize", "optimise"), "convert"),
}

#: What other servers call an option.
_OTHER_OPTIONS: Final = {"--port": "--http-port", "--host": "--http-address"}


def unknown_command(name: str, commands: Collection[str]) -> str:
    """The message for a command that there is not; a model in its place is answered with ``conch serve``."""
    if "/" in name or Path(name).exists():
        return f"'{name}' is no command; did you mean 'conch serve {name}'?"
    known = {command: command for command in commands} | _OTHER_NAMES
    hint = did_you_mean(name, known, f"there are {', '.join(commands)}", shown=known.__getitem__)
    return f"unrecognized command '{name}'; {hint}"


def unknown_option(
    parsed: str,
    arguments: Sequence[str],
    command: click.Command,
    others: Mapping[str, click.Command],
) -> str:
    """The message for an option that ``command`` has not.

    ``parsed`` is the option as the parser read it from ``arguments``; ``others`` are the commands that may have it.
    """
    option = _as_written(parsed, arguments)
    message = f"unrecognized option '{option}'"
    flag = _spelt(option)
    for name, other in others.items():
        if flag in _flags(other):
            return f"{message}; it is one of '{name}': conch {name} {flag} …"
    flags = _flags(command)
    known = {name: name for name in flags} | {name: of for name, of in _OTHER_OPTIONS.items() if of in flags}
    if longer := _longer(flag, flags):
        known.setdefault(flag, longer)
    hint = did_you_mean(flag, known, "--help lists the valid ones", shown=known.__getitem__)
    return f"{message}; {hint}"


def _as_written(option: str, arguments: Sequence[str]) -> str:
    """The option with all its letters: of ``-model-repository`` a parser reads ``-m``."""
    if not option.startswith("--"):
        for argument in arguments:
            if argument.startswith(option) and len(argument) > 2 and not argument.startswith("--"):
                return argument.partition("=")[0]
    return option


def _spelt(option: str) -> str:
    """The option as flags are spelt here: two dashes, small letters, dashes for underscores."""
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
    """The one of the flags that ``flag`` is the beginning of; empty where it begins none or several."""
    matches = [candidate for candidate in known if candidate.startswith(flag)] if flag.strip("-") else []
    return matches[0] if len(matches) == 1 else ""
