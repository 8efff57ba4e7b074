"""The Ray Serve application of a repository: its deployments, how it is run, watched and removed.

Called in the process of ``conch deploy ray``, which is connected to a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from conch import __version__
from conch.deploy.ray.directory import ReplicaDirectory
from conch.deploy.ray.entry import ServeEntry
from conch.deploy.ray.front import IngressPlan
from conch.deploy.ray.ingress import INGRESS, NodeIngress
from conch.deploy.ray.listing import WITHDRAW_SECONDS
from conch.deploy.ray.planning import DeploymentPlan, RayOptions
from conch.deploy.ray.pool import pool_class
from conch.deploy.ray.replica import ModelReplica, ReplicaWork

#: The names of the deployments beside those of the models.
DIRECTORY: Final = "directory"
ENTRY: Final = "entry"
#: Dynamic and in-flight batching stay in the replicas, which have queues of their own: Ray Serve holds nothing back.
_MANY: Final = 100_000
#: The most nodes that have an ingress.
_MOST_NODES: Final = 10_000
#: How often a replica is started that fails to start, before its deployment is given up.
_ATTEMPTS: Final = 2
#: How often it is looked whether a replica that ends has requests of Ray Serve's left (s).
_DRAINED_SECONDS: Final = 0.2
#: What a replica that ends may take beyond draining (s), before it is killed.
_ENDING_SECONDS: Final = 10
#: How Ray Serve's own proxies choose a replica: sequences and prompts that begin alike stay together.
_BY_SESSION: Final = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def application(options: RayOptions, plans: Sequence[DeploymentPlan]) -> Any:
    """What ``serve.run`` takes: the deployments of ``plans``, bound to each other."""
    directory = _deployment(ReplicaDirectory, DIRECTORY, __version__).bind()
    shared = bool(options.max_models_per_replica)
    handles = {plan.name: _of_models(options, plan).bind(_work(options, plan), directory) for plan in plans}
    names = sorted(name for plan in plans for name in plan.models)
    work = IngressPlan(shared, options.drain_secs, options.ingress_options)
    ingress = _deployment(
        NodeIngress,
        INGRESS,
        f"{__version__} {work}",
        user_config={"models": names},
        max_replicas_per_node=1,
        graceful_shutdown_timeout_s=options.drain_secs + _ENDING_SECONDS,
        autoscaling_config=_autoscaling("OnePerNode", 1, _MOST_NODES, 1.0, 0.0, 0.0),
    ).bind(work, directory)
    by_model = {name: handles[plan.name] for plan in plans for name in plan.models}
    entry = _deployment(ServeEntry, ENTRY, f"{__version__} {names} {shared}", max_surge_percent=100)
    return entry.bind(by_model, ingress, shared)


def _of_models(options: RayOptions, plan: DeploymentPlan) -> Any:
    from ray.serve.config import RequestRouterConfig

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
    kind: type[ModelReplica] = ModelReplica
    routing: dict[str, Any] = {"request_router_config": RequestRouterConfig(request_router_class=_BY_SESSION)}
    if options.max_models_per_replica:  # which replica has the model counts for more
        kind, routing = pool_class(options.max_models_per_replica), {}
    return _deployment(
        kind,
        plan.name,
        plan.version,
        max_surge_percent=options.max_surge_percent,
        graceful_shutdown_timeout_s=options.drain_secs + WITHDRAW_SECONDS + _ENDING_SECONDS,
        health_check_period_s=5,
        ray_actor_options={"num_cpus": options.cpus_per_replica, "num_gpus": options.gpus_per_replica},
        **scaling,
        **routing,
    )


def _deployment(kind: type, name: str, version: str, **options: Any) -> Any:
    """A deployment whose replicas stay when it is deployed again with the same version and resources.

    Ray Serve takes a new version for everything that is run from Python, and would replace every replica.
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


def _work(options: RayOptions, plan: DeploymentPlan) -> ReplicaWork:
    return ReplicaWork(
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
