"""``conch deploy ray``: its flags; runs a model repository on a Ray cluster until Ctrl+C, or for good."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from conch.cli.grouped import GroupedCommand, GroupedOption
from conch.cli.interrupting import ended_as_by_ctrl_c
from conch.machine.addresses import host_and_port

if TYPE_CHECKING:
    from conch.deploy.ray.cluster import Deployed, RayApplication
    from conch.deploy.ray.planning import RayOptions

_MODELS = partial(GroupedOption, group="Models")
_REPLICAS = partial(GroupedOption, group="Replicas")
_PORTS = partial(GroupedOption, group="Ports")
_CLUSTER = partial(GroupedOption, group="Cluster")
_PORT: Final = click.IntRange(0, 65535)
_SECONDS: Final = click.FloatRange(0, 86_400)

#: Options of conch serve that follow from others here, and which.
_DECIDED: Final = {
    "model_repository": ": give --model-repository",
    "model_control_mode": " (see --max-models-per-replica)",
    "load_model": ": give --models",
    "max_loaded_models": ": give --max-models-per-replica",
    "allow_http": ", and needs it",
    "allow_grpc": ", and needs it",
}

#: Options that have a replica refuse what an ingress sends it.
_OF_INGRESSES: Final = frozenset({"http_use_ssl", "grpc_use_ssl", "http_restricted_api", "grpc_restricted_protocol"})

OPTIONS: Final = [
    _MODELS(["--model-repository"], multiple=True, metavar="DIR",
            help="Directory of models, to be read on every node; repeatable."),
    _MODELS(["--models"], default="", metavar="A,B",
            help="The models to deploy (default: all); A+B has B in each replica of A, for a model.py that calls it."),
    _MODELS(["--max-models-per-replica"], type=click.IntRange(0, 10_000), default=0, metavar="N",
            help="Share replicas among all models, with at most N models on each (default: each model has "
                 "its own replicas)."),
    _MODELS(["--replica-option", "replica_options"], multiple=True, metavar="NAME=VALUE",
            help="An option of conch serve for the replicas, as log_verbose=1; repeatable."),
    _REPLICAS(["--min-replicas"], type=click.IntRange(1, 10_000), default=1, show_default=True, metavar="N",
              help="Replicas of each model at least."),
    _REPLICAS(["--max-replicas"], type=click.IntRange(1, 10_000), metavar="N",
              help="At most (default: as many as at least)."),
    _REPLICAS(["--target-ongoing-requests"], type=click.FloatRange(0, min_open=True), default=16.0, show_default=True,
              metavar="N", help="Requests that a replica should have at a time; more replicas are started for more."),
    _REPLICAS(["--upscale-delay-secs"], type=_SECONDS, default=10.0, show_default=True, metavar="S",
              help="How long the load must be too high before replicas are added."),
    _REPLICAS(["--downscale-delay-secs"], type=_SECONDS, default=300.0, show_default=True, metavar="S",
              help="How long the load must be too low before replicas are removed."),
    _REPLICAS(["--cpus-per-replica"], type=click.FloatRange(0), default=1.0, show_default=True, metavar="N",
              help="Cores that Ray sets aside for a replica."),
    _REPLICAS(["--gpus-per-replica"], type=click.FloatRange(0), default=0.0, show_default=True, metavar="N",
              help="GPUs that Ray gives a replica; 0.5 is half of one."),
    _REPLICAS(["--max-surge-percent"], type=click.IntRange(0, 100), default=25, show_default=True, metavar="N",
              help="Replicas more than there should be while others replace them; with 0, old ones stop first."),
    _REPLICAS(["--drain-secs"], type=click.IntRange(0, 86_400), default=30, show_default=True, metavar="S",
              help="How long the requests of a stopping replica may take."),
    _PORTS(["--http-port"], type=_PORT, default=8000, show_default=True, metavar="PORT",
           help="Of the ingress on every node; 0 for a free one, as for several nodes on one machine."),
    _PORTS(["--grpc-port"], type=_PORT, default=8001, show_default=True, metavar="PORT", help="The same for gRPC."),
    _PORTS(["--metrics-port"], type=_PORT, default=8002, show_default=True, metavar="PORT",
           help="The same for metrics."),
    _PORTS(["--host"], default="0.0.0.0", show_default=True, metavar="ADDRESS", help="Where ingresses listen."),
    _PORTS(["--ingress-option", "ingress_options"], multiple=True, metavar="NAME=VALUE",
           help="An option of conch serve for the ingresses; repeatable."),
    _CLUSTER(["--address"], default="", metavar="HOST:PORT",
             help="A node of the cluster (default: RAY_ADDRESS, this machine's, or one that ends with the command)."),
    _CLUSTER(["--name"], default="conch", show_default=True, metavar="NAME", help="The application's name."),
    _CLUSTER(["--timeout-secs"], type=_SECONDS, default=1800.0, show_default=True, metavar="S",
             help="How long to wait for the models to become ready."),
    _CLUSTER(["--detach"], is_flag=True, help="Return when the models are ready, and leave them running."),
    _CLUSTER(["--remove"], is_flag=True, help="Remove the deployment with this name."),
]  # fmt: skip


@click.command("ray", cls=GroupedCommand, params=OPTIONS, context_settings={"max_content_width": 120})
def ray_command(
    address: str,
    name: str,
    timeout_secs: float,
    detach: bool,
    remove: bool,
    host: str,
    **fields: Any,
) -> int:
    """Run the models of a repository on a Ray cluster: replicas that Ray Serve watches, and an ingress on every node.

    Clients ask any node, as they would ask conch serve.  Called again, it replaces what has changed and nothing else,
    without losing a request.
    """
    from conch.core.errors import invalid
    from conch.machine.extras import require

    if not name or not name.isascii() or not name.isprintable() or "#" in name or "/" in name:
        raise invalid(f"--name '{name}': the name must be ASCII, without '#' or '/', and not empty")
    options = None if remove else _options(host, **fields)
    require("conch deploy ray", "ray", "ray.serve", extra="ray")

    from conch.deploy.ray.cluster import RayApplication, connected, start_serve, total_resources

    if options is None:
        with connected(address, start=False):
            there = RayApplication(name)
            if not there.is_there:
                raise invalid(f"the cluster has no application '{name}'")
            there.remove()
        print(f"removed '{name}'")
        return 0

    from conch.deploy.ray.planning import plan_deployments, shortage

    _check_ports(options.ingress_options)
    plans = plan_deployments(options)
    with connected(address) as alone, ended_as_by_ctrl_c():  # in this order: Ray has a handler of its own for SIGTERM
        if alone and detach:
            raise invalid("--detach needs a cluster that stays: start one with 'ray start --head', or give --address")
        if alone:
            print("started a Ray cluster on this machine, which ends with this command")
        if short := shortage(options, plans, total_resources()):
            if alone:  # no node can be added
                raise invalid(short)
            print(short, flush=True)
        start_serve()
        application = RayApplication(name)
        new = not application.is_there
        if not new:
            print(f"replacing what has changed of '{name}', which the cluster runs already", flush=True)
        try:
            application.deploy(options, plans)
            _show(application.wait(plans, timeout_secs, partial(print, flush=True)))
            if not detach:
                threading.Event().wait()
        except KeyboardInterrupt:
            if new or not detach:  # what served before, and was to stay, goes on
                _remove(application, name)
            else:
                raise
        except BaseException:
            if new:  # what served before goes on
                _remove(application, name)
            raise
    return 0


def _options(
    host: str,
    model_repository: tuple[str, ...],
    models: str,
    min_replicas: int,
    max_replicas: int | None,
    replica_options: tuple[str, ...],
    ingress_options: tuple[str, ...],
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    **fields: Any,
) -> RayOptions:
    from conch.core.errors import invalid
    from conch.deploy.ray.planning import RayOptions
    from conch.library.flags import plan

    if not model_repository:
        raise invalid("--model-repository must be specified")
    if max_replicas is not None and max_replicas < min_replicas:
        raise invalid(f"--max-replicas {max_replicas} is less than --min-replicas {min_replicas}")
    ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
    listening = {f"{kind}_address": host for kind in ("http", "grpc")}
    of_replicas, of_ingress = (
        _settings("--replica-option", replica_options),
        _settings("--ingress-option", ingress_options),
    )
    plan(None, model_repository, of_replicas, ports=True)  # which refuses what replicas would refuse
    plan(None, model_repository, of_ingress, ports=True)  # and ingresses
    return RayOptions(
        model_repository=tuple(map(_absolute, model_repository)),
        models=tuple(filter(None, (part.strip() for part in models.split(",")))),
        min_replicas=min_replicas,
        max_replicas=max_replicas or min_replicas,
        replica_options=of_replicas,
        ingress_options={**listening, **ports, **of_ingress},
        **fields,
    )


def _check_ports(ingress: Mapping[str, Any]) -> None:
    """Raise INVALID_ARG for a port that is given twice, with which no ingress would ever start."""
    from conch.core.errors import invalid

    wanted = {f"--{kind}-port": int(ingress[f"{kind}_port"]) for kind in ("http", "grpc", "metrics")}
    taken: dict[int, str] = {}
    for flag, port in wanted.items():
        if port and port in taken:
            raise invalid(f"{flag} {port} is the port of {taken[port]} as well: give another")
        taken[port] = flag


def _absolute(repository: str) -> str:
    """A directory as it is called from wherever replicas run; addresses of stores are what they are."""
    return repository if "://" in repository else os.path.abspath(repository)


def _settings(flag: str, texts: Iterable[str]) -> dict[str, str | tuple[str, ...]]:
    """Options of conch serve by name; one that was given several times has all of its values."""
    from conch.core.errors import invalid

    grouped: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise invalid(f"{flag} {text}: write NAME=VALUE, as log_verbose=1")
        name = name.removeprefix("--").replace("-", "_")
        if name in _DECIDED:
            raise invalid(f"{flag} {text}: conch deploy ray decides that itself{_DECIDED[name]}")
        if name in _OF_INGRESSES and flag == "--replica-option":
            raise invalid(f"{flag} {text}: no ingress could ask such a replica; give --ingress-option {text}")
        grouped[name] = (*grouped.get(name, ()), value)
    return {name: values[0] if len(values) == 1 else values for name, values in grouped.items()}


def _show(deployed: Deployed) -> None:
    counts: dict[str, int] = {}
    for replica in deployed.replicas:
        counts[replica.deployment] = counts.get(replica.deployment, 0) + 1
    for deployment, count in sorted(counts.items()):
        print(f"{deployment}: {count} {'replica' if count == 1 else 'replicas'}")
    for ingress in deployed.ingresses:
        print(f"node {ingress.node[:8]}: {' '.join(ingress_urls(ingress.addresses))}")
    sys.stdout.flush()


def ingress_urls(addresses: Mapping[str, tuple[str, int]]) -> list[str]:
    """Where an ingress listens: HTTP, gRPC, whatever else it was told to, and last its metrics."""
    order = ("http", "grpc", *(kind for kind in addresses if kind not in ("http", "grpc", "metrics")), "metrics")
    urls = []
    for host, port, kind in ((*addresses[kind], kind) for kind in order if kind in addresses):
        scheme, path = ("grpc", "") if kind == "grpc" else ("http", "/metrics" if kind == "metrics" else "")
        urls.append(f"{scheme}://{host_and_port(host, port)}{path}")
    return urls


def _remove(application: RayApplication, name: str) -> None:
    print(f"removing '{name}' ...", flush=True)
    application.remove()
