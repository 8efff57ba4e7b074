"""``conch check``: finds faults in a model repository, with file and line, before it is served."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from conch.cli import completion

if TYPE_CHECKING:
    from conch.repository.checks.finding import Finding


@click.command("check")
@click.argument(
    "directories",
    nargs=-1,
    required=True,
    type=click.Path(),
    metavar="DIRECTORY…",
    shell_complete=completion.directories,
)
@click.option(
    "--backend-directory",
    default="",
    metavar="DIRECTORY",
    shell_complete=completion.directories,
    help="Directory of Python-based backends, as for conch serve.",
)
@click.option(
    "--model-config-name",
    "config_name",
    metavar="NAME",
    shell_complete=completion.configurations,
    help="Check configs/NAME.pbtxt where a model has it.",
)
def check_command(directories: tuple[str, ...], config_name: str | None, backend_directory: str) -> int:
    """Check a model repository for faults, without starting a model.

    A repository may also be a URL, as for conch serve; its models are then downloaded.
    The exit status is 1 if there are errors.
    """
    from conch.repository.backends import BackendDirectories
    from conch.repository.checks.repository import check
    from conch.repository.roots import parse_location

    locations = [parse_location(directory) for directory in directories]
    findings = check(locations, config_name, BackendDirectories.beginning_with(backend_directory))
    for finding in findings:
        click.echo(shown(finding, [location for location in locations if isinstance(location, Path)]))
    errors = sum(finding.severity == "error" for finding in findings)
    click.echo(f"{errors} error(s), {len(findings) - errors} warning(s)", err=True)
    return 1 if errors else 0


def shown(finding: Finding, directories: Iterable[Path]) -> str:
    """Format a finding as a line; its path is relative if the one in ``directories`` was."""
    if any(directory.is_absolute() for directory in directories):
        return str(finding)
    return str(finding).replace(f"{Path.cwd()}/", "")
