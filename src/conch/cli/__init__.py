"""The command ``conch``. Commands are imported on use, so that the help is fast.

Every command returns its exit status (None means success) or raises; ``main`` reports an exception as one line on
standard error and returns status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

import click

from conch import __version__
from conch.cli.interrupting import INTERRUPTED
from conch.cli.lazy import LazyGroup
from conch.cli.suggest import unknown_option
from conch.core.errors import ConchError

#: Name, location (module and attribute), and line in the help.
COMMANDS: Final = {
    "serve": ("conch.cli.serve", "serve_command", "Serve a model repository over HTTP and gRPC."),
    "check": ("conch.cli.check", "check_command", "Check a model repository and report errors with file and line."),
    "init": ("conch.cli.init", "init_command", "Write a new working model, with a test."),
    "convert": ("conch.cli.convert", "convert_command", "Convert a model to a faster format and verify its results."),
    "perf": ("conch.cli.perf", "perf_command", "Measure the throughput and latency of a model."),
    "analyze": (
        "conch.cli.analyze",
        "analyze_command",
        "Find the best configuration of models: measure candidates and rank them.",
    ),
    "top": ("conch.cli.top", "top_command", "Show the models of a running server in the terminal."),
    "deploy": ("conch.cli.deploy", "deploy_command", "Write the files for serving a repository on a managed platform."),
    "request": (
        "conch.cli.request",
        "request_command",
        "Write the body of a request to a file, for curl.",
    ),
    "doctor": (
        "conch.cli.doctor",
        "doctor_command",
        "Show this machine's hardware and packages, with advice on performance.",
    ),
    "demo": (
        "conch.cli.demo.command",
        "demo_command",
        "Build a small model repository, serve it and send it requests.",
    ),
}


@click.group(cls=LazyGroup, table=COMMANDS)
@click.version_option(__version__, message="conch %(version)s")
def conch() -> None:
    """Serves Hugging Face checkpoints and the model repositories of NVIDIA Triton Inference Server."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (the process's by default) and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return conch.main(words, prog_name="conch", standalone_mode=False) or 0
    except ConchError as error:
        print(error, file=sys.stderr)
    except click.NoSuchOption as error:
        print(_unknown_option(error, words), file=sys.stderr)
    except click.ClickException as error:
        print(error.format_message(), file=sys.stderr)
    except click.Abort:
        return INTERRUPTED
    return 1


def _unknown_option(error: click.NoSuchOption, arguments: Sequence[str]) -> str:
    context = error.ctx
    if context is None or context.command is conch:
        root = context or click.Context(conch)
        commands = {name: command for name in COMMANDS if (command := conch.get_command(root, name)) is not None}
        return unknown_option(error.option_name, arguments, conch, commands)
    return unknown_option(error.option_name, arguments, context.command, {})
