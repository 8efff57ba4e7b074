"""``conch deploy oci``, ``sagemaker`` and ``vertex``: the same options, and another plan of what is written."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from conch.cli import completion
from conch.cli.interrupting import ended_as_by_ctrl_c
from conch.deploy.endpoint import ENDPOINTS, OF_MODELS

if TYPE_CHECKING:
    from conch.deploy.bundle import Planner


def _options(platform: str, endpoints: tuple[str, ...] = ENDPOINTS) -> list[click.Parameter]:
    return [
        click.Option(["-r", "--model-repository", "repository"], required=True, metavar="DIR",
                     type=click.Path(path_type=Path), shell_complete=completion.directories,
                     help="The model repository."),
        click.Option(["-o", "--output"], required=True, metavar="OUT", type=click.Path(path_type=Path),
                     help="Folder to write; it must be new or empty."),
        click.Option(["--model"], default="", metavar="NAME",
                     help="The model that serves the endpoint; default: the only model, or the only ensemble."),
        click.Option(["--endpoint"], type=click.Choice(endpoints), default="infer", show_default=True,
                     help="The kind of request that it gets."),
        click.Option(["--name"], default="", metavar="TEXT",
                     help=f"Name of the deployment on {platform}; conch-MODEL by default."),
        click.Option(["--verify/--no-verify"], default=True,
                     help="Whether to serve the artifact here first, as the platform does, and send it request.json."),
    ]  # fmt: skip


def _oci(repository: Path, output: Path, model: str, endpoint: str, name: str, verify: bool) -> None:
    """Write a zip archive for OCI Data Science's model catalog, the image's file, Terraform and the steps."""
    from conch.deploy import oci

    _write(oci.plan, oci.MOUNT, repository, output, model, endpoint, name, verify)


oci_command = click.Command("oci", callback=_oci, help=_oci.__doc__, params=_options("OCI"))


def _sagemaker(
    repository: Path, output: Path, model: str, endpoint: str, name: str, verify: bool, multi_model: bool
) -> None:
    """Write model.tar.gz for Amazon SageMaker, the image's file, the calls that create an endpoint, and the steps."""
    from conch.deploy import sagemaker

    plan = partial(sagemaker.plan, multi_model=multi_model)
    _write(plan, sagemaker.MOUNT, repository, output, model, endpoint, name, verify, several=multi_model)


_several = click.Option(
    ["--multi-model"],
    is_flag=True,
    help="An archive for each model, which the platform has loaded when a request names it.",
)
sagemaker_command = click.Command(
    "sagemaker",
    callback=_sagemaker,
    help=_sagemaker.__doc__,
    params=[*_options("SageMaker", OF_MODELS), _several],
)


def _vertex(
    repository: Path, output: Path, model: str, endpoint: str, name: str, verify: bool, from_bucket: bool
) -> None:
    """Write the repository for Google Vertex AI, the image's file, and the commands that upload and deploy it."""
    from conch.deploy import vertex

    _write(
        partial(vertex.plan, from_bucket=from_bucket), vertex.MOUNT, repository, output, model, endpoint, name, verify
    )


_bucket = click.Option(
    ["--from-bucket"], is_flag=True, help="Leave the repository out of the image: it is read from Cloud Storage."
)
vertex_command = click.Command(
    "vertex", callback=_vertex, help=_vertex.__doc__, params=[*_options("Vertex AI"), _bucket]
)


def _write(
    plan: Planner,
    mount: str,
    repository: Path,
    output: Path,
    model: str,
    endpoint: str,
    name: str,
    verify: bool,
    several: bool = False,
) -> None:
    """Look through the repository, write what the plan says, and tell what was written and what was left out."""
    from conch.deploy.bundle import deployment, shown, write

    with ended_as_by_ctrl_c():
        planned = deployment(repository, output, mount, name, model, endpoint, several=several)
        bundle = plan(planned)
        skipped = "; ".join(planned.needs.lacking) if verify else "--no-verify"
        size, answer = write(bundle, planned.contents, output, verify=not skipped)
    for left_out in planned.contents.left_out:
        click.echo(f"left out: {left_out}")
    click.echo(f"wrote {output / bundle.artifact} ({shown(size)})")
    for text in bundle.texts(size):
        click.echo(f"wrote {output / text}")
    if skipped:
        click.echo(f"\nrequest.json was not sent: {skipped}")
    else:
        click.echo(f"\nThe artifact, served here as on the platform, answered request.json with\n{answer}")
    answers = "Requests name the model." if several else f"Requests go to the model '{planned.model}'."
    click.echo(f"\n{answers} The steps are in {output / 'README.md'}.")
