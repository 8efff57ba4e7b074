"""Options in groups, for commands that have too many for one list in their help."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import click

_OTHERS: Final = "Other options"


class GroupedOption(click.Option):
    """An option of a group, under whose name the help shows it."""

    def __init__(self, names: Iterable[str], group: str = _OTHERS, **declared: Any) -> None:
        super().__init__(list(names), **declared)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help has a section for each group, in the order of their first options."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(context):
            record = param.get_help_record(context)
            if record is not None:
                group = param.group if isinstance(param, GroupedOption) else _OTHERS
                sections.setdefault(group, []).append(record)
        for group, records in sections.items():
            with formatter.section(group):
                formatter.write_dl(records, col_max=40)
