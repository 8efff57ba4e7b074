"""``conch deploy oci``, ``sagemaker`` and ``vertex``: common options, and a different plan for each; ``kubernetes``."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from conch.cli.interrupting import signals_as_ctrl_c
from conch.cli.options import command_of
from conch.deploy.bundle import Endpoint, ModelEndpoint
from conch.options.declaration import Directory, option

if TYPE_CHECKING:
    from conch.deploy.bundle import Planner
from conch.deploy.kubernetes import KubernetesOptions, plan, write
from conch.machine.memory import mebibytes

_SECTION: Final = "Options"


@dataclass(frozen=True, kw_only=True)
class BundleOptions:
    """The options of every platform."""

    # fmt: off
    repository: Directory = option(
        MISSING, _SECTION, "The model repository.", flags=("-r", "--model-repository")
    )
    output: Path = option(
        MISSING, _SECTION, "Folder to write; it must be new or empty.", flags=("-o", "--output"), metavar="OUT"
    )
    model: str = option(
        "", _SECTION, "The model that serves the endpoint (default: the only model, or the only ensemble).",
        metavar="NAME",
    )
    endpoint: Endpoint = option("infer", _SECTION, "The kind of requests to serve.")
    name: str = option("", _SECTION, "Name of the deployment on the platform (default: conch-MODEL).")
    verify: bool = option(
        True, _SECTION, "Serve the artifact here first, as the platform does, and send it request.json (default).",
        flags=("--verify/--no-verify",),
    )
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class SageMakerOptions(BundleOptions):
    """The options for Amazon SageMaker, whose requests have one path for each model."""

    endpoint: ModelEndpoint = option("infer", _SECTION, "The kind of requests to serve.")
    multi_model: bool = option(
        False, _SECTION, "Write an archive for each model; the platform loads a model when a request names it."
    )


@dataclass(frozen=True, kw_only=True)
class VertexOptions(BundleOptions):
    """The options for Google Vertex AI."""

    from_bucket: bool = option(False, _SECTION, "Leave the repository out of the image: it is read from Cloud Storage.")


def _oci(options: BundleOptions) -> None:
    """Write a zip archive for OCI Data Science's model catalog, the container file, Terraform and the steps."""
    from conch.deploy import oci

    _write(oci.plan, oci.MOUNT, options)


def _sagemaker(options: SageMakerOptions) -> None:
    """Write model.tar.gz for Amazon SageMaker, the container file, the calls that create an endpoint, and the steps."""
    from conch.deploy import sagemaker

    plan = partial(sagemaker.plan, multi_model=options.multi_model)
    _write(plan, sagemaker.MOUNT, options, several=options.multi_model)


def _vertex(options: VertexOptions) -> None:
    """Write the repository for Google Vertex AI, the container file, and the commands that upload and deploy it."""
    from conch.deploy import vertex

    _write(partial(vertex.plan, from_bucket=options.from_bucket), vertex.MOUNT, options)


oci_command = command_of("oci", BundleOptions, _oci)
sagemaker_command = command_of("sagemaker", SageMakerOptions, _sagemaker)
vertex_command = command_of("vertex", VertexOptions, _vertex)


def _write(plan: Planner, mount: str, options: BundleOptions, several: bool = False) -> None:
    """Check the repository, write the files of the plan, and print the written and the omitted files."""
    from conch.deploy.bundle import deployment, shown, write

    output = options.output
    with signals_as_ctrl_c():
        planned = deployment(
            options.repository, output, mount, options.name, options.model, options.endpoint, several=several
        )
        bundle = plan(planned)
        skipped = "; ".join(planned.requirements.lacking) if options.verify else "--no-verify"
        size, response = write(bundle, planned.contents, output, verify=not skipped)
    for left_out in planned.contents.left_out:
        click.echo(f"left out: {left_out}")
    click.echo(f"wrote {output / bundle.artifact} ({shown(size)})")
    for text in bundle.texts(size):
        click.echo(f"wrote {output / text}")
    if skipped:
        click.echo(f"\nrequest.json was not sent: {skipped}")
    else:
        click.echo(f"\nThe artifact, served here as on the platform, answered request.json with\n{response}")
    addressing = "Requests name the model." if several else f"Requests go to the model '{planned.model}'."
    click.echo(f"\n{addressing} The steps are in {output / 'README.md'}.")


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
