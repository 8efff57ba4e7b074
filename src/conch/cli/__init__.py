"""The command ``conch``.  Commands are imported when they are asked for, so that the help starts at once.

Every command returns its exit status (nothing is success) or raises; ``main`` turns what it raises into one line on
standard error and status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

import click

from conch import __version__
from conch.errors import ConchError

#: Name, where it is (module, attribute), and its line in the help.
COMMANDS: Final = {
    "serve": ("conch.cli.serve", "serve_command", "Serve a model repository over HTTP and gRPC."),
    "check": ("conch.cli.check", "check_command", "Say what is wrong with a model repository, with file and line."),
    "convert": ("conch.cli.convert", "convert_command", "Make a model faster and prove that it answers the same."),
    "request": (
        "conch.cli.request",
        "request_command",
        "Write the body of a request for curl, and the line to send it.",
    ),
    "demo": ("conch.cli.demo", "demo_command", "Make a small model repository, serve it and ask it something."),
}


class _Lazy(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[name]
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, _, help) in COMMANDS.items()])


@click.group(cls=_Lazy)
@click.version_option(__version__, message="conch %(version)s")
def conch() -> None:
    """Serve Hugging Face models the Triton way."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (the process's by default) and return its exit status."""
    try:
        return conch.main(arguments, prog_name="conch", standalone_mode=False) or 0
    except ConchError as error:
        print(error, file=sys.stderr)
    except click.NoSuchOption as error:
        print(f"unrecognized option '{error.option_name}'", file=sys.stderr)
    except click.ClickException as error:
        print(error.format_message(), file=sys.stderr)
    except click.Abort:
        return 130
    return 1
