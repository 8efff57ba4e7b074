"""OCI Data Science: a zip archive for its model catalog, a container image, and Terraform for both.

Sources: Oracle's pages on bring-your-own containers (interfaces, environment variables, limits), on invoking a
deployment and on large artifacts, and its walkthroughs for Triton, which map the endpoints by environment variables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from conch.core.errors import invalid
from conch.deploy.archives import write_zip
from conch.deploy.bundle import (
    Bundle,
    Deployment,
    base_commands,
    check_size,
    containerfile,
    path_of,
    render,
    shown,
    words,
)
from conch.deploy.trial import LocalRun

#: The folder where the platform unpacks the archive, and the folder in the archive.
MOUNT: Final = "/opt/ds/model/deployed_model"
BELOW: Final = "model_repository"
PORT: Final = 9000
#: Limits of the model catalog (bytes): upload from the console, single upload, and copy from a bucket.
CONSOLE_LIMIT: Final = 100 * 10**6
UPLOAD_LIMIT: Final = 6 * 10**9
LIMIT: Final = 400 * 10**9
#: The limit of the command, and of all environment variables with their names (bytes).
_TEXT_LIMIT: Final = 2048
#: Disk space for the image (GB), and the number of copies of the artifact: packed and unpacked.
_IMAGE_GB: Final = 40
_COPIES: Final = 2


def plan(deployment: Deployment) -> Bundle:
    """Plan the files of a deployment. Raises INVALID_ARG for a repository or a model's name too large for OCI."""
    check_size(deployment.contents, LIMIT, "OCI's model catalog")
    variables, arguments = environment(deployment), command(deployment)
    _check_limits(variables, arguments)
    return Bundle(
        partial(_texts, deployment, variables, arguments),
        "artifact.zip",
        partial(write_zip, below=BELOW),
        partial(_run_locally, variables, arguments),
    )


def command(deployment: Deployment) -> list[str]:
    """Return the arguments of the image's entry point, ``conch serve``."""
    return [
        f"--model-repository={MOUNT}/{BELOW}",
        "--allow-oci=true",
        f"--oci-port={PORT}",
        f"--oci-default-model={deployment.model}",
        "--allow-http=false",
        "--allow-grpc=false",
    ]


def environment(deployment: Deployment) -> dict[str, str]:
    """Return the deployment's environment variables, which map OCI's endpoints and set the disk size."""
    artifact = -(-deployment.contents.size // 10**9)
    variables = {
        "MODEL_DEPLOY_PREDICT_ENDPOINT": path_of(deployment.endpoint, deployment.model),
        "MODEL_DEPLOY_HEALTH_ENDPOINT": "/v2/health/ready",
        "STORAGE_SIZE_IN_GB": str(max(50, _IMAGE_GB + _COPIES * artifact)),
    }
    if deployment.endpoint in ("generate_stream", "openai"):
        variables["MODEL_DEPLOY_ENABLE_STREAMING"] = "true"
    return variables


def _texts(deployment: Deployment, variables: Mapping[str, str], arguments: Sequence[str], size: int) -> dict[str, str]:
    """Return the files beside the archive, which has ``size`` bytes."""
    values = {
        "name": deployment.name,
        "display_name": _hcl(deployment.name),
        "model": deployment.model,
        "endpoint": path_of(deployment.endpoint, deployment.model),
        "folder": f"{MOUNT}/{BELOW}",
        "port": PORT,
        "size": size,
        "artifact_size": shown(size),
        "command": "".join(f"        {_hcl(word)},\n" for word in arguments),
        "variables": "".join(
            f"        {key.ljust(max(map(len, variables)))} = {_hcl(value)}\n" for key, value in variables.items()
        ),
        "local_environment": "\n".join(f"    -e {key}={value} \\" for key, value in variables.items()),
        "base": "\n".join(base_commands(deployment.requirements)),
        "upload": _upload(size),
        "console": shown(CONSOLE_LIMIT),
        "limit": shown(LIMIT),
        "hub": _hub(deployment.requirements.hub),
    }
    steps = (
        "# OCI checks the container's health with curl, inside the container.",
        "USER root",
        "RUN apt-get update && apt-get install --yes --no-install-recommends curl && rm -rf /var/lib/apt/lists/*",
        "USER 65532:65532",
        f"EXPOSE {PORT}",
        "HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \\",
        f'    CMD ["curl", "--fail", "--silent", "http://127.0.0.1:{PORT}/health"]',
        f"CMD {words(arguments)}",
    )
    return {
        "request.json": f"{deployment.example}\n",
        "README.md": render("oci/README.md", **values),
        "container/Containerfile": containerfile("OCI Data Science", deployment.requirements, steps),
        "terraform/main.tf": render("oci/main.tf", **values),
        "terraform/variables.tf": render("oci/variables.tf"),
    }


def _run_locally(
    variables: Mapping[str, str], arguments: Sequence[str], written: Path, folder: Path, port: int
) -> LocalRun:
    mounted = folder / "deployed_model"
    with ZipFile(written / "artifact.zip") as archive:
        archive.extractall(mounted)
    local_arguments = [
        argument.replace(MOUNT, str(mounted)).replace(f"--oci-port={PORT}", f"--oci-port={port}")
        for argument in arguments
    ]
    return LocalRun(
        ("conch", "serve", *local_arguments),
        variables,
        variables["MODEL_DEPLOY_HEALTH_ENDPOINT"],
        variables["MODEL_DEPLOY_PREDICT_ENDPOINT"],
    )


def _check_limits(variables: Mapping[str, str], arguments: Sequence[str]) -> None:
    for name, size in (
        ("the container's command", len(" ".join(("conch", "serve", *arguments)).encode())),
        ("the environment variables", sum(len(f"{key}={value}".encode()) for key, value in variables.items())),
    ):
        if size >= _TEXT_LIMIT:
            raise invalid(
                f"{name} would have {size} bytes, but OCI accepts less than {_TEXT_LIMIT}: choose a shorter name for "
                "the model"
            )


def _hcl(text: str) -> str:
    """Quote a string for Terraform."""
    return json.dumps(text).replace("${", "$${").replace("%{", "%%{")


def _upload(size: int) -> str:
    """Return instructions to upload the archive to the model catalog."""
    if size <= UPLOAD_LIMIT:
        return "Terraform uploads it in one request."
    return render("oci/bucket.md", limit=shown(UPLOAD_LIMIT)).rstrip()


def _hub(ids: Sequence[str]) -> str:
    """Return the requirements for downloading checkpoints."""
    return render("oci/hub.md", ids=", ".join(ids)).rstrip() if ids else render("oci/no_hub.md").rstrip()
