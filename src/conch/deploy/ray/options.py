"""The options of ``conch deploy ray``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from conch.options.declaration import DirectoryName, Range, option

_MODELS: Final = "Models"
_REPLICAS: Final = "Replicas"
_PORTS: Final = "Ports"
_CLUSTER: Final = "Cluster"

_Count = Annotated[int, Range(1, 10_000)]
_Port = Annotated[int, Range(0, 65535)]
_Seconds = Annotated[float, Range(0, 86_400)]


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """The options that the command passes on as they are; resources are per replica."""

    # fmt: off
    model_repository: tuple[DirectoryName, ...] = option(
        (), _MODELS, "Directory of models, readable on every node; repeatable."
    )
    max_models_per_replica: Annotated[int, Range(0, 10_000)] = option(
        0, _MODELS,
        "Share replicas among all models, with at most N models on each (default: each model has its own replicas).",
    )
    min_replicas: _Count = option(1, _REPLICAS, "Minimum number of replicas of each model.")
    target_ongoing_requests: Annotated[float, Range(0, above=True)] = option(
        16.0, _REPLICAS, "Target number of concurrent requests per replica; above it, replicas are added."
    )
    upscale_delay_secs: _Seconds = option(
        10.0, _REPLICAS, "Time of high load before replicas are added.", metavar="S"
    )
    downscale_delay_secs: _Seconds = option(
        300.0, _REPLICAS, "Time of low load before replicas are removed.", metavar="S"
    )
    cpus_per_replica: Annotated[float, Range(0)] = option(1.0, _REPLICAS, "Cores that Ray reserves for a replica.")
    gpus_per_replica: Annotated[float, Range(0)] = option(
        0.0, _REPLICAS, "GPUs that Ray reserves for a replica; 0.5 is half a GPU."
    )
    max_surge_percent: Annotated[int, Range(0, 100)] = option(
        25, _REPLICAS, "Additional replicas while others are replaced; with 0, old ones stop first."
    )
    drain_secs: Annotated[int, Range(0, 86_400)] = option(
        30, _REPLICAS, "Timeout for the requests of a stopping replica.", metavar="S"
    )
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class RayOptions(ReplicaOptions):
    """The options of a deployment; those of ``conch serve`` are by name."""

    models: tuple[str, ...] = ()
    max_replicas: int = 1
    replica_options: dict[str, Any] = field(default_factory=dict)
    ingress_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RayCommandOptions(ReplicaOptions):
    """The options of the command line."""

    # fmt: off
    models: str = option(
        "", _MODELS,
        "Models to deploy (default: all); A+B puts B into each replica of A, for a model.py that calls it.",
        metavar="A,B",
    )
    replica_options: tuple[str, ...] = option(
        (), _MODELS, "An option of conch serve for the replicas, such as log_verbose=1; repeatable.",
        flags=("--replica-option",), metavar="NAME=VALUE",
    )
    max_replicas: _Count | None = option(
        None, _REPLICAS, "Maximum number of replicas of each model (default: the minimum)."
    )
    http_port: _Port = option(
        8000, _PORTS, "HTTP port of the ingress on every node; 0 for a free port, as needed on one machine."
    )
    grpc_port: _Port = option(8001, _PORTS, "gRPC port of the ingresses.")
    metrics_port: _Port = option(8002, _PORTS, "Metrics port of the ingresses.")
    host: str = option("0.0.0.0", _PORTS, "Address on which ingresses listen.", metavar="ADDRESS")
    ingress_options: tuple[str, ...] = option(
        (), _PORTS, "An option of conch serve for the ingresses; repeatable.", flags=("--ingress-option",),
        metavar="NAME=VALUE",
    )
    address: str = option(
        "", _CLUSTER,
        "A node of the cluster (default: RAY_ADDRESS, this machine's, or a local cluster that ends with the command).",
        metavar="HOST:PORT",
    )
    name: str = option("conch", _CLUSTER, "The application's name.", metavar="NAME")
    timeout_secs: _Seconds = option(1800.0, _CLUSTER, "Timeout for the models to become ready.", metavar="S")
    detach: bool = option(False, _CLUSTER, "Return when the models are ready, and leave them running.")
    remove: bool = option(False, _CLUSTER, "Remove the deployment with this name.")
    # fmt: on
