"""A group of commands that are imported on use, so that its help is fast."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from conch.cli.suggest import unknown_command


class LazyGroup(click.Group):
    """A group with a table of commands: the location (module and attribute) and the help line of each."""

    def __init__(self, *arguments: Any, table: Mapping[str, tuple[str, str, str]], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.table = table

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.table:
            return None
        module, attribute, _ = self.table[name]
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if arguments[0] not in self.table and not arguments[0].startswith("-") and not context.resilient_parsing:
            raise click.UsageError(unknown_command(arguments[0], self.table), context)
        return super().resolve_command(context, arguments)

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        # From the table: click would import every command for its help line.
        items = [
            CompletionItem(name, help=help) for name, (_, _, help) in self.table.items() if name.startswith(incomplete)
        ]
        return [*items, *click.Command.shell_complete(self, context, incomplete)]

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, _, help) in self.table.items()])
