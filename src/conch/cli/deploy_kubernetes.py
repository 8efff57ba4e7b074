"""``conch deploy kubernetes``: manifests for servers of a repository."""

from __future__ import annotations

import click

from conch.cli.interrupting import signals_as_ctrl_c
from conch.cli.options import command_of
from conch.deploy.kubernetes import KubernetesOptions, plan, write
from conch.machine.memory import mebibytes


def _kubernetes(options: KubernetesOptions) -> None:
    """Write manifests for Kubernetes, with the memory that the models need."""
    with signals_as_ctrl_c():
        planned = plan(options)
        write(planned, options.output)
    if planned.measured is not None:
        click.echo(
            f"measured: the server uses {mebibytes(planned.measured.server)}, "
            f"its {len(planned.models)} {'model' if len(planned.models) == 1 else 'models'} "
            f"{mebibytes(planned.measured.models)}"
        )
    for name in planned.texts:
        click.echo(f"wrote {options.output / name}")
    click.echo(f"\nThe steps are in {options.output / 'README.md'}.")


kubernetes_command = command_of("kubernetes", KubernetesOptions, _kubernetes)
