"""Google Vertex AI: a container with the repository in it or in a bucket, and the commands that upload and deploy it.

Sources: Google's pages on requirements for custom containers (ports, routes, ``AIP_…`` variables), on requests for
online inference, and the reference of ``gcloud ai``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from conch.core.errors import invalid
from conch.deploy.archives import copy
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
from conch.deploy.requirements import Contents
from conch.deploy.trial import LocalRun, copy_program

#: The folder of the repository in the image.
MOUNT: Final = "/models"
FOLDER: Final = "model_repository"
PORT: Final = 8080
#: The largest file in Cloud Storage and Artifact Registry (bytes); a layer of an image is one file.
LIMIT: Final = 5 * 10**12


def plan(deployment: Deployment, *, from_bucket: bool = False) -> Bundle:
    """Plan the files of a deployment with its repository in the image, or in a Cloud Storage bucket.

    Raises INVALID_ARG for a repository that the platform does not accept.
    """
    if from_bucket:
        for entry in deployment.contents.entries:
            if entry.size > LIMIT:
                raise invalid(f"{entry.name} has {shown(entry.size)}, but Cloud Storage accepts at most {shown(LIMIT)}")
        requirements = replace(
            deployment.requirements, extras=tuple(sorted({*deployment.requirements.extras, "stores"}))
        )
        deployment = replace(deployment, requirements=requirements)
    else:
        check_size(deployment.contents, LIMIT, "Artifact Registry")
    run_locally = partial(_run_locally, deployment, from_bucket)
    return Bundle(partial(_texts, deployment, from_bucket), FOLDER, _copy, run_locally, frozenset({"container/start"}))


def routes(deployment: Deployment) -> tuple[str, str]:
    """Return the paths of requests and of health checks."""
    if deployment.endpoint == "infer":
        return "/predict", "/health"
    return path_of(deployment.endpoint, deployment.model), "/v2/health/ready"


def _texts(deployment: Deployment, from_bucket: bool, size: int) -> Mapping[str, str]:
    predict, health = routes(deployment)
    where = "bucket" if from_bucket else "image"
    values = {
        "name": deployment.name,
        "model": deployment.model,
        "predict": predict,
        "health": health,
        "port": PORT,
        "folder": FOLDER,
        "artifact_size": shown(size),
        "base": "\n".join(base_commands(deployment.requirements)),
        "where": render(f"vertex/{where}.md", name=deployment.name, folder=FOLDER).rstrip(),
        "artifact": f"    --artifact-uri=gs://BUCKET/{deployment.name}/{FOLDER} \\\n" if from_bucket else "",
        "call": "stream-raw-predict" if deployment.endpoint == "generate_stream" else "raw-predict",
        "hub": render("vertex/hub.md", ids=", ".join(deployment.requirements.hub))
        if deployment.requirements.hub
        else "",
    }
    packed = () if from_bucket else (f"COPY {FOLDER} {MOUNT}",)
    steps = (
        *packed,
        "# Vertex AI sets the port, the routes and the bucket in environment variables.",
        "COPY container/start /opt/conch/bin/start-vertex",
        f"EXPOSE {PORT}",
        "HEALTHCHECK NONE",
        f"ENTRYPOINT {words(['/opt/conch/bin/start-vertex'])}",
    )
    return {
        "request.json": f"{deployment.example}\n",
        "README.md": render("vertex/README.md", **values),
        "container/Containerfile": containerfile("Google Vertex AI", deployment.requirements, steps),
        "container/start": render("vertex/start", front_ends=_front_ends(deployment)),
    }


def _run_locally(deployment: Deployment, from_bucket: bool, written: Path, folder: Path, port: int) -> LocalRun:
    predict, health = routes(deployment)
    models = folder / FOLDER
    models.symlink_to(written / FOLDER)
    program = copy_program(written / "container/start", folder, {f":-{MOUNT}}}": f":-{models}}}"})
    variables = {
        "AIP_MODE": "PREDICTION",
        "AIP_HTTP_PORT": str(port),
        "AIP_PREDICT_ROUTE": predict,
        "AIP_HEALTH_ROUTE": health,
        "AIP_STORAGE_URI": str(models) if from_bucket else "",
    }
    return LocalRun((program,), variables, health, predict)


def _front_ends(deployment: Deployment) -> str:
    """Return the options of the platform port's front end: Vertex AI's for ``infer``, else HTTP."""
    port = f'"${{AIP_HTTP_PORT:-{PORT}}}"'
    if deployment.endpoint == "infer":
        model = shlex.quote(f"--vertex-ai-default-model={deployment.model}")
        return f"--allow-vertex-ai=true --vertex-ai-port={port} {model} --allow-http=false"
    return f"--allow-vertex-ai=false --allow-http=true --http-address=0.0.0.0 --http-port={port}"


def _copy(folder: Path, contents: Contents) -> None:
    folder.mkdir()
    copy(folder, contents)
