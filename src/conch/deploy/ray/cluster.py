"""Runs the application of a repository (its deployments and their options) on a Ray cluster.

Waits until it is ready, and removes it. Used in the process of ``conch deploy ray``, which is connected to the cluster.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from conch import __version__
from conch.core.errors import ConchError, internal, invalid, one_line, unavailable
from conch.deploy.ray.ingress import IngressSpec, NodeIngress
from conch.deploy.ray.options import RayOptions
from conch.deploy.ray.planning import INGRESS, REGISTRY, DeploymentPlan
from conch.deploy.ray.registry import DEREGISTER_SECONDS, IngressRecord, ReplicaRecord, ReplicaRegistry
from conch.deploy.ray.replica import ModelReplica, ReplicaSpec
from conch.machine.extras import require
from conch.machine.ports import check_listens

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


#: The polling interval (s), and the timeout of a registry call (s).
POLL_SECONDS: Final = 0.5
_ANSWER_SECONDS: Final = 10.0
#: The timeout of connecting to the cluster (s).
_CONNECT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Deployed:
    """The ready parts of an application: an ingress on every node, and the replicas."""

    ingresses: Sequence[IngressRecord]
    replicas: Sequence[ReplicaRecord]


@contextmanager
def connected(address: str, *, start: bool = True) -> Iterator[bool]:
    """Connect to the cluster at ``address``, or to the one in ``RAY_ADDRESS`` or of this machine.

    Without a cluster, or with the address ``local``, starts one for the duration of the context. Yields whether it was
    started. Raises UNSUPPORTED without Ray, and UNAVAILABLE if the cluster does not respond. If ``start`` is false,
    no cluster is started: raises UNAVAILABLE if there is none, INVALID_ARG for the address ``local``.
    """
    require("conch deploy ray", "ray", "ray.serve", extra="ray")
    import ray

    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "namespace": "serve"}
    address = address or os.environ.get("RAY_ADDRESS", "")
    if address not in ("", "auto", "local"):
        check_address(address)
    starts = address == "local"
    if starts and not start:
        raise invalid("the address 'local' starts a cluster, but this command needs a running one: pass its HOST:PORT")
    try:
        if not starts:
            ray.init(address=address or "auto", **quiet)
    except ConnectionError as error:
        if address or not start:
            location = f"at {address}" if address else "on this machine"
            raise unavailable(f"no Ray cluster responds {location}: {one_line(error)}") from None
        starts = True
    if starts:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # disable usage statistics of a cluster that conch starts
        ray.init(address="local", include_dashboard=False, **quiet)
    try:
        yield starts
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """Raise UNAVAILABLE if nothing listens at ``address``, because Ray would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise invalid(
            f"'{address}' is not the address of a Ray cluster: pass the HOST:PORT that 'ray start --head' prints"
        )
    check_listens(host, int(port), _CONNECT_SECONDS, f"no Ray cluster responds at {address}")


def start_serve() -> None:
    """Start Ray Serve without proxies, unless it already runs on the cluster."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled")


@contextmanager
def logs_in_one_line() -> Iterator[None]:
    """Convert Ray's exceptions to INTERNAL, with their last line."""
    try:
        yield
    except ConchError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise internal(f"Ray Serve: {lines[-1] if lines else type(error).__name__}") from error


class RayApplication:
    """The application ``name`` of the connected cluster."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def is_deployed(self) -> bool:
        """Whether the application is deployed."""
        from ray import serve

        return self._name in serve.status().applications

    def deploy(self, options: RayOptions, plans: Sequence[DeploymentPlan]) -> None:
        """Replace the running deployments by ``plans``; replicas that need not be replaced are kept.

        Returns immediately; :meth:`wait` waits.
        """
        from ray import serve

        if self.is_deployed:
            with suppress(ConchError):
                self._call_registry("forget_failures")
        target = serve.RunTarget(application(options, plans), name=self._name, route_prefix=None)
        with logs_in_one_line():
            serve.run_many([target], wait_for_ingress_deployment_creation=True, wait_for_applications_running=False)

    def wait(self, plans: Sequence[DeploymentPlan], seconds: float, report: Callable[[str], None]) -> Deployed:
        """Wait until every deployment of ``plans`` has a replica of its version, and every node its ingress.

        ``report`` is called with each new status message of Ray Serve. Raises INTERNAL with the reason if Ray Serve
        cannot run the models, INVALID_ARG if a replica or an ingress cannot start, and UNAVAILABLE with Ray Serve's
        status after ``seconds``.
        """
        from ray import serve

        ends = time.monotonic() + seconds
        reported: frozenset[str] = frozenset()
        while True:
            with logs_in_one_line():
                state = serve.status().applications.get(self._name)
            failures: dict[str, str] = {}
            with suppress(ConchError):
                failures = dict(self._call_registry("failures"))
                deployed = Deployed(self._call_registry("ingresses"), self._call_registry("replicas"))
                if state is not None and state.status == "RUNNING" and is_complete(deployed, plans, _nodes()):
                    return deployed
            words = status_messages(state)
            if failures or (state is not None and state.status == "DEPLOY_FAILED"):
                raise deployment_error(failures, "; ".join(words))
            if news := [word for word in words if word not in reported]:
                report("; ".join(news))
            reported |= set(words)
            if time.monotonic() > ends:
                raise unavailable(
                    f"the models are not ready after {seconds:g} s: {'; '.join(words) or 'no status from Ray Serve'}"
                )
            time.sleep(POLL_SECONDS)

    def replicas(self) -> Sequence[ReplicaRecord]:
        """Return the registered replicas. Raises UNAVAILABLE if the registry does not respond."""
        records: Sequence[ReplicaRecord] = self._call_registry("replicas")
        return records

    def remove(self) -> None:
        """Remove the application and everything that it runs; in-flight requests may complete.

        Waits until it is gone, without a timeout: Ray Serve itself waits a minute, but replicas may drain longer.
        """
        from ray import serve

        with logs_in_one_line():
            if self.is_deployed:
                serve.delete(self._name, _blocking=False)
            while self.is_deployed:
                time.sleep(POLL_SECONDS)

    def _call_registry(self, method: str) -> Any:
        """Call a method of the registry. Raises UNAVAILABLE if it does not respond."""
        from ray import serve

        try:
            handle = serve.get_deployment_handle(REGISTRY, self._name)
            return handle.options(method_name=method).remote().result(timeout_s=_ANSWER_SECONDS)
        except Exception as error:  # any exception of Ray
            raise unavailable(f"the replica registry does not respond: {one_line(error)}") from None


def total_resources() -> Mapping[str, float]:
    """Return the total resources of the cluster's nodes."""
    import ray

    return dict(ray.cluster_resources())


def _nodes() -> set[str]:
    """Return the ids of the cluster's live nodes."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def is_complete(deployed: Deployed, plans: Sequence[DeploymentPlan], nodes: Set[str]) -> bool:
    """Return whether all ``nodes`` have an ingress, and the replicas are those of ``plans`` with no other versions."""
    if not nodes <= {record.node for record in deployed.ingresses}:
        return False
    versions = {(record.deployment, record.version) for record in deployed.replicas}
    return versions == {(plan.name, plan.version) for plan in plans}


def deployment_error(failures: Mapping[str, str], words: str) -> ConchError:
    """Return the error with why replicas or ingresses could not start, or Ray Serve's own ``words`` if none failed."""
    if not failures:
        return internal(f"Ray Serve cannot run the models: {words}")
    reasons = "; ".join(
        f"the ingress: {reason}" if name == INGRESS else f"a replica of '{name}': {reason}"
        for name, reason in sorted(failures.items())
    )
    return invalid(f"cannot start {reasons}")


def status_messages(state: Any) -> list[str]:
    """Return Ray Serve's status of each deployment that is not healthy, one line each."""
    if state is None:
        return []
    waiting = [
        f"{name}: {' '.join(deployment.message.split()) or deployment.status.value.lower()}"
        for name, deployment in state.deployments.items()
        if deployment.status != "HEALTHY"
    ]
    return waiting or list(filter(None, [" ".join(state.message.split())]))
