"""``conch deploy``: a command for each managed platform."""

from __future__ import annotations

from typing import Final

import click

from conch.cli.lazy import LazyGroup

#: Name, location (module and attribute), and line in the help.
PLATFORMS: Final = {
    "ray": (
        "conch.cli.deploy_ray",
        "ray_command",
        "A Ray cluster: replicas on several machines, and an ingress on each.",
    ),
    "kubernetes": (
        "conch.cli.deploy_clouds",
        "kubernetes_command",
        "Kubernetes: manifests with the memory that the models need.",
    ),
    "oci": ("conch.cli.deploy_clouds", "oci_command", "OCI Data Science: artifact, image, Terraform."),
    "sagemaker": ("conch.cli.deploy_clouds", "sagemaker_command", "Amazon SageMaker: artifact, image, API calls."),
    "vertex": ("conch.cli.deploy_clouds", "vertex_command", "Google Vertex AI: repository, image, commands."),
}


@click.group("deploy", cls=LazyGroup, table=PLATFORMS)
def deploy_command() -> None:
    """Write the files for serving a model repository on a cluster or a managed platform."""
