"""The Ray Serve application of a repository: its deployments and their options.

Used in the process of ``conch deploy ray``, which is connected to a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from conch import __version__
from conch.deploy.ray.ingress import IngressSpec, NodeIngress
from conch.deploy.ray.options import RayOptions
from conch.deploy.ray.planning import INGRESS, REGISTRY, DeploymentPlan
from conch.deploy.ray.registry import DEREGISTER_SECONDS, ReplicaRegistry
from conch.deploy.ray.replica import ModelReplica, ReplicaSpec

#: The limit of concurrent calls through Ray Serve per replica; each ingress that watches the registry has one open.
_MANY: Final = 100_000
#: The maximum number of nodes with an ingress.
_MOST_NODES: Final = 10_000
#: The number of attempts to start a replica before its deployment fails.
_ATTEMPTS: Final = 2
#: The interval at which Ray Serve checks whether an ending replica has calls left (s).
_DRAINED_SECONDS: Final = 0.2
#: The time for a replica to end after draining, before it is killed (s).
_ENDING_SECONDS: Final = 10


def application(options: RayOptions, plans: Sequence[DeploymentPlan]) -> Any:
    """Return the ingress bound to the deployments of ``plans`` and the registry, for ``serve.run``."""
    registry = _deployment(ReplicaRegistry, REGISTRY, __version__).bind()
    replicas = [_of_models(options, plan).bind(_spec(options, plan), registry) for plan in plans]
    names = sorted(name for plan in plans for name in plan.models)
    spec = IngressSpec(bool(options.max_models_per_replica), options.drain_secs, options.ingress_options)
    ingress = _deployment(
        NodeIngress,
        INGRESS,
        f"{__version__} {spec}",
        user_config={"models": names},
        max_replicas_per_node=1,
        graceful_shutdown_timeout_s=options.drain_secs + _ENDING_SECONDS,
        autoscaling_config=_autoscaling("OnePerNode", 1, _MOST_NODES, 1.0, 0.0, 0.0),
    )
    return ingress.bind(spec, registry, replicas)


def _of_models(options: RayOptions, plan: DeploymentPlan) -> Any:
    scaling: dict[str, Any] = {"num_replicas": options.min_replicas}
    if options.min_replicas != options.max_replicas:
        scaling = {
            "autoscaling_config": _autoscaling(
                "ByRequests",
                options.min_replicas,
                options.max_replicas,
                options.target_ongoing_requests,
                options.upscale_delay_secs,
                options.downscale_delay_secs,
            )
        }
    return _deployment(
        ModelReplica,
        plan.name,
        plan.version,
        max_surge_percent=options.max_surge_percent,
        graceful_shutdown_timeout_s=options.drain_secs + DEREGISTER_SECONDS + _ENDING_SECONDS,
        health_check_period_s=5,
        ray_actor_options={"num_cpus": options.cpus_per_replica, "num_gpus": options.gpus_per_replica},
        **scaling,
    )


def _deployment(kind: type, name: str, version: str, **options: Any) -> Any:
    """Return a deployment whose replicas are kept if it is deployed again with the same version and resources.

    By default, Ray Serve assigns a new version to each application run from Python, and would replace every replica.
    """
    from ray import serve

    common: dict[str, Any] = {
        "max_ongoing_requests": _MANY,
        "max_constructor_retry_count": _ATTEMPTS,
        "graceful_shutdown_wait_loop_s": _DRAINED_SECONDS,
        "ray_actor_options": {"num_cpus": 0},
    }
    deployment = serve.deployment(kind, name=name, **(common | options))
    deployment._version = version
    return deployment


def _spec(options: RayOptions, plan: DeploymentPlan) -> ReplicaSpec:
    return ReplicaSpec(
        plan.name,
        plan.version,
        options.model_repository,
        plan.models,
        plan.loads,
        options.max_models_per_replica,
        options.drain_secs,
        options.replica_options,
    )


def _autoscaling(policy: str, low: int, high: int, target: float, up: float, down: float) -> Any:
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    return AutoscalingConfig(
        min_replicas=low,
        max_replicas=high,
        target_ongoing_requests=target,
        upscale_delay_s=up,
        downscale_delay_s=down,
        policy=AutoscalingPolicy(policy_function=f"conch.deploy.ray.scaling:{policy}"),
    )
