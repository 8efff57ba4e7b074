"""Amazon SageMaker: an archive of all models or one per model, a container image, and calls of the API.

Sources: AWS's pages on inference containers (the argument ``serve``, ports, root) and multi-model endpoints, its API
reference, and the environment variables of its Triton container.
"""

from __future__ import annotations

import json
import shlex
import tarfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from conch.core.errors import invalid
from conch.deploy.archives import write_tar_gz
from conch.deploy.bundle import Bundle, Deployment, base_commands, check_size, containerfile, render, shown, words
from conch.deploy.requirements import Contents, Entry
from conch.deploy.trial import LocalRun, copy_program

#: The folder where the platform unpacks the archive of a single-model endpoint.
MOUNT: Final = "/opt/ml/model"
#: The largest volume of an instance (bytes).
LIMIT: Final = 512 * 10**9
#: Placeholders for the user's account and region, in the form of AWS's documentation.
_ACCOUNT: Final = "123456789012"
_REGION: Final = "us-east-1"
#: Up to this size (GB), the default volume of an instance is large enough.
_SMALL_GB: Final = 10
_START_SECONDS: Final = 1800


def plan(deployment: Deployment, *, multi_model: bool = False) -> Bundle:
    """Plan the files of an endpoint with one model, or with several that are loaded on demand.

    Raises INVALID_ARG for a repository that SageMaker does not accept.
    """
    for models in _by_model(deployment.contents).values() if multi_model else (deployment.contents,):
        check_size(models, LIMIT, "the volume of a SageMaker instance")
    if multi_model and deployment.endpoint != "infer":
        raise invalid(f"an endpoint with several models supports only 'infer', not '{deployment.endpoint}'")
    if multi_model and deployment.requirements.ensembles:
        raise invalid(
            "an endpoint with several models loads each separately, so it cannot serve the ensemble "
            f"'{deployment.requirements.ensembles[0]}': remove --multi-model"
        )
    artifact, pack = ("models", _write_each) if multi_model else ("model.tar.gz", write_tar_gz)
    run_locally = partial(_run_locally, deployment, multi_model)
    return Bundle(partial(_texts, deployment, multi_model), artifact, pack, run_locally, frozenset({"container/serve"}))


def create_model(deployment: Deployment, multi_model: bool = False) -> dict[str, Any]:
    """Return the body of the call CreateModel."""
    return {
        "ModelName": deployment.name,
        "ExecutionRoleArn": f"arn:aws:iam::{_ACCOUNT}:role/conch",
        "PrimaryContainer": {
            "Image": f"{_ACCOUNT}.dkr.ecr.{_REGION}.amazonaws.com/conch:1",
            "Mode": "MultiModel" if multi_model else "SingleModel",
            "ModelDataUrl": f"s3://BUCKET/{deployment.name}/{'models/' if multi_model else 'model.tar.gz'}",
            "Environment": environment(deployment, multi_model),
        },
    }


def environment(deployment: Deployment, multi_model: bool = False) -> dict[str, str]:
    """Return the container's environment variables, to which the platform adds others."""
    if multi_model:
        return {}
    variables = {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": deployment.model}
    if deployment.endpoint != "infer":
        variables["SAGEMAKER_TRITON_INFERENCE_TYPE"] = deployment.endpoint
    return variables


def create_endpoint_config(deployment: Deployment) -> dict[str, Any]:
    """Return the body of the call CreateEndpointConfig."""
    variant: dict[str, Any] = {
        "VariantName": "AllTraffic",
        "ModelName": deployment.name,
        "InstanceType": "ml.g5.xlarge" if "vllm" in deployment.requirements.extras else "ml.m5.xlarge",
        "InitialInstanceCount": 1,
        "ModelDataDownloadTimeoutInSeconds": _START_SECONDS,
        "ContainerStartupHealthCheckTimeoutInSeconds": _START_SECONDS,
    }
    needed = -(-2 * deployment.contents.size // 10**9)  # packed and unpacked
    if needed > _SMALL_GB and "vllm" not in deployment.requirements.extras:
        variant["VolumeSizeInGB"] = min(needed, LIMIT // 10**9)
    return {"EndpointConfigName": deployment.name, "ProductionVariants": [variant]}


def create_endpoint(deployment: Deployment) -> dict[str, Any]:
    """Return the body of the call CreateEndpoint."""
    return {"EndpointName": deployment.name, "EndpointConfigName": deployment.name}


def _texts(deployment: Deployment, multi_model: bool, size: int) -> Mapping[str, str]:
    values = {
        "name": deployment.name,
        "model": deployment.model,
        "answers": "Requests name their model."
        if multi_model
        else f"Requests are `{deployment.endpoint}` to the model `{deployment.model}`.",
        "artifact": "models/" if multi_model else "model.tar.gz",
        "artifact_size": shown(size),
        "base": "\n".join(base_commands(deployment.requirements)),
        "account": _ACCOUNT,
        "region": _REGION,
        "limit": shown(LIMIT),
        "start_minutes": _START_SECONDS // 60,
        "layout": render(f"sagemaker/{'several' if multi_model else 'one'}.md", model=deployment.model).rstrip(),
        "upload": f"--recursive models s3://BUCKET/{deployment.name}/models/"
        if multi_model
        else f"model.tar.gz s3://BUCKET/{deployment.name}/model.tar.gz",
        "invoke": _invoke(deployment, multi_model),
        "hub": render("sagemaker/hub.md", ids=", ".join(deployment.requirements.hub))
        if deployment.requirements.hub
        else "",
    }
    steps = (
        "# SageMaker runs the container as root, with the argument `serve`, and sets the port in the environment.",
        "USER root",
        "LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true",
        "LABEL com.amazonaws.sagemaker.capabilities.multi-models=true",
        "COPY serve /opt/conch/bin/serve-sagemaker",
        "EXPOSE 8080",
        "HEALTHCHECK NONE",
        f"ENTRYPOINT {words(['/opt/conch/bin/serve-sagemaker'])}",
        f"CMD {words(['serve'])}",
    )
    return {
        "request.json": f"{deployment.example}\n",
        "README.md": render("sagemaker/README.md", **values),
        "container/Containerfile": containerfile("Amazon SageMaker", deployment.requirements, steps),
        "container/serve": render("sagemaker/serve"),
        "create-model.json": _document(create_model(deployment, multi_model)),
        "create-endpoint-config.json": _document(create_endpoint_config(deployment)),
        "create-endpoint.json": _document(create_endpoint(deployment)),
    }


def _run_locally(deployment: Deployment, multi_model: bool, written: Path, folder: Path, port: int) -> LocalRun:
    """Run the container of one model; of several, only the model of ``request.json``."""
    with tarfile.open(written / (f"models/{deployment.model}.tar.gz" if multi_model else "model.tar.gz")) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # new in Python 3.11.4
        archive.extractall(folder / "model")
    program = copy_program(written / "container/serve", folder, {MOUNT: str(folder / "model")})
    variables = {**environment(deployment), "SAGEMAKER_BIND_TO_PORT": str(port)}
    return LocalRun((program, "serve"), variables, "/ping", "/invocations")


def _invoke(deployment: Deployment, multi_model: bool) -> str:
    """Return instructions to send a request; the AWS command line does not support streaming responses."""
    if deployment.endpoint == "generate_stream":
        return render("sagemaker/stream.md", name=deployment.name).rstrip()
    target = f"    --target-model {shlex.quote(deployment.model)}.tar.gz \\\n" if multi_model else ""
    return render("sagemaker/invoke.md", name=deployment.name, target=target).rstrip()


def _document(call: Mapping[str, Any]) -> str:
    return f"{json.dumps(call, indent=2)}\n"


def _write_each(folder: Path, contents: Contents) -> None:
    """Write an archive for each model to ``folder``, with the model's directory at its root."""
    folder.mkdir()
    for model, of_model in _by_model(contents).items():
        write_tar_gz(folder / f"{model}.tar.gz", of_model)


def _by_model(contents: Contents) -> dict[str, Contents]:
    """Return the files of each model."""
    entries_of: dict[str, list[Entry]] = {}
    for entry in contents.entries:
        model, _, inside = entry.name.partition("/")
        if inside:
            entries_of.setdefault(model, []).append(entry)
    return {model: Contents(tuple(entries)) for model, entries in entries_of.items()}
